"""A case as one line of text: `seed=123 steps=0..100 without=3,17`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from chaos.world.plan import STEPS

_CASE = re.compile(r"^seed=(\d+)(?: steps=(\d+)\.\.(\d+))?(?: without=([\d,]*))?$")


class Failed(AssertionError):
    """A seed in which a promise did not hold, with the story of it."""

    def __init__(self, what: str, story: str) -> None:
        super().__init__(what)
        self.what, self.story = what, story


@dataclass(frozen=True, slots=True)
class Case:
    """A seed, and which of its steps happen."""

    seed: int
    first: int = 0
    upto: int = STEPS
    without: frozenset[int] = frozenset()

    def __str__(self) -> str:
        left_out = ",".join(map(str, sorted(self.without)))
        return f"seed={self.seed} steps={self.first}..{self.upto}" + (
            f" without={left_out}" if left_out else ""
        )

    @property
    def kept(self) -> list[int]:
        """The steps that happen."""
        return [index for index in range(self.first, self.upto) if index not in self.without]

    @classmethod
    def of(cls, seed: int, kept: list[int]) -> Case:
        """The case in which these steps happen and no others."""
        if not kept:
            return cls(seed, 0, 0)
        first, upto = min(kept), max(kept) + 1
        return cls(seed, first, upto, frozenset(range(first, upto)) - frozenset(kept))


def parse_case(text: str) -> Case:
    """Read a case; raises ValueError."""
    found = _CASE.match(text.strip())
    if found is None:
        raise ValueError(f"not a case of this class: {text!r}; like seed=1 steps=0..{STEPS} without=3,17")
    seed, first, upto, without = found.groups()
    left_out = frozenset(int(each) for each in (without or "").split(",") if each)
    return Case(int(seed), int(first or 0), int(upto or STEPS), left_out)
