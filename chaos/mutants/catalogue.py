"""The catalogue of mutants: read and apply."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from chaos.plan import PlanError

CATALOGUE = Path(__file__).with_name("catalogue.toml")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One mutant: `old`, which occurs exactly once in `file`, becomes `new`."""

    number: int
    what: str
    """Effect of the bug, in one line."""
    file: str
    old: str
    new: str
    by: str = ""
    """Fault class that must find it."""
    tests: list[str] = []
    """Or: tests that must fail."""
    seconds: float = 10.0
    limit_s: float = 90.0
    settings: dict[str, Any] = {}
    says: str = ""
    """Text that a finding must contain to count. For tests: part of the line of a failed test."""
    private_mounts: bool = False

    @property
    def judge(self) -> str:
        """The class or tests that must find it, as text."""
        return self.by or " ".join(self.tests)

    def trial_key(self) -> tuple[object, ...]:
        """Return a key that is equal for mutants that are tried in the same way."""
        return self.by, tuple(self.tests), self.seconds, repr(sorted(self.settings.items()))

    def apply(self, root: Path) -> None:
        """Change a copy of the program. Raises PlanError unless `old` occurs exactly once."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise PlanError(
                f"mutant {self.number}: `old` must occur exactly once in {self.file},"
                f" found {source.count(self.old)} times"
            )
        path.write_text(source.replace(self.old, self.new))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


def load_catalogue() -> tuple[Mutant, ...]:
    """Return all mutants, sorted by number. Raises PlanError."""
    try:
        mutants = msgspec.convert(tomllib.loads(CATALOGUE.read_text()), _File).mutant
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise PlanError(f"{CATALOGUE.name}: {e}") from e
    for mutant in mutants:
        if bool(mutant.by) == bool(mutant.tests):
            raise PlanError(f"mutant {mutant.number}: exactly one of `by` and `tests` must be set")
    if len({mutant.number for mutant in mutants}) != len(mutants):
        raise PlanError("each mutant number must be listed once")
    return tuple(sorted(mutants, key=lambda mutant: mutant.number))
