"""How a broken guarantee is reported, and the offline check of a data directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import DAMAGE


class GuaranteeBroken(AssertionError):
    """A broken guarantee: which one, and what was observed."""

    def __init__(self, what: str, topic: str = "", *, case: str = "", path: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.topic = topic
        """Topic whose events belong in the story; empty if unknown."""
        self.case = case
        """Case that repeats it; empty if unknown."""
        self.path = path
        """Index of the choice made at each step of a schedule."""


def require(holds: object, otherwise: str | Callable[[], str]) -> None:
    """Raise GuaranteeBroken unless `holds` is true.

    Not an `assert`, because the interpreter can disable asserts.
    """
    if not holds:
        raise GuaranteeBroken(otherwise if isinstance(otherwise, str) else otherwise())


def verify(data_dir: str | Path, cold_dir: str | Path = "", *, is_deep: bool = False) -> Verification:
    """Run the offline verifier, which shares no decoder with the engine.

    Raises GuaranteeBroken for damage.
    """
    found = verify_directory(str(data_dir), is_deep=is_deep, jobs=1, cold_dir=str(cold_dir))
    damage = [each for each in found.findings if each.severity == DAMAGE]
    if damage:
        wrong = [f"{each.path} at {each.offset}: {each.what}" for each in damage[:5]]
        raise GuaranteeBroken(f"the verifier finds damage: {'; '.join(wrong)}")
    return found
