"""The list of deliberate bugs, read and applied."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from chaos.plan import PlanError

CATALOGUE = Path(__file__).with_name("catalogue.toml")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bug: `old`, which stands exactly once in `file`, becomes `new`."""

    number: int
    what: str
    """What the bug does, in one line."""
    file: str
    old: str
    new: str
    by: str = ""
    """The class of faults that must find it."""
    tests: list[str] = []
    """Or the tests that must fail."""
    seconds: float = 10.0
    limit_s: float = 90.0
    settings: dict[str, Any] = {}
    says: str = ""
    """What a finding must say, where other findings would be no proof. For tests: of the name of one."""
    private_mounts: bool = False

    @property
    def judge(self) -> str:
        """Who has to find it, for people."""
        return self.by or " ".join(self.tests)

    def trial_key(self) -> tuple[object, ...]:
        """Equal for mutants that are tried in the same way."""
        return self.by, tuple(self.tests), self.seconds, repr(sorted(self.settings.items()))

    def apply(self, root: Path) -> None:
        """Change a copy of the program; raises PlanError when the place is not there any more."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise PlanError(
                f"mutant {self.number}: its text stands {source.count(self.old)} times in {self.file}"
            )
        path.write_text(source.replace(self.old, self.new))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


def load_catalogue() -> tuple[Mutant, ...]:
    """All mutants by number; raises PlanError."""
    try:
        mutants = msgspec.convert(tomllib.loads(CATALOGUE.read_text()), _File).mutant
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise PlanError(f"{CATALOGUE.name}: {e}") from e
    for mutant in mutants:
        if bool(mutant.by) == bool(mutant.tests):
            raise PlanError(f"mutant {mutant.number}: either a class or tests")
    if len({mutant.number for mutant in mutants}) != len(mutants):
        raise PlanError("a mutant is listed twice")
    return tuple(sorted(mutants, key=lambda mutant: mutant.number))
