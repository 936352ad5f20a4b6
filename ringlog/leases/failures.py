"""Why jobs were given back or rejected, until they are done or moved to the dead letters. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from ringlog.limits import DEAD_LETTER_REASONS_MAX


class Failure(NamedTuple):
    """The last time that a job failed, as who held it said."""

    reason: str
    at_ms: int
    """0 = not known."""
    nacks: int
    """How often it was given back with a reason."""


class Failures:
    """Of one queue, by number; the longest unchanged go when there are too many."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: OrderedDict[int, Failure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[tuple[int, Failure]]:
        return iter(self._of.items())

    def find(self, seq: int) -> Failure | None:
        """What is known of this job."""
        return self._of.get(seq)

    def record_failure(self, first: int, stop: int, reason: str, at_ms: int, nacks: int) -> None:
        """These jobs failed; `nacks` is 1 when they were given back for it."""
        for seq in range(first, stop):
            old = self._of.pop(seq, None)
            self._of[seq] = Failure(reason, at_ms, nacks + (old.nacks if old is not None else 0))
        while len(self._of) > DEAD_LETTER_REASONS_MAX:
            self._of.popitem(last=False)

    def forget(self, first: int, stop: int) -> None:
        """These jobs are no more."""
        if stop - first < len(self._of):
            for seq in range(first, stop):
                self._of.pop(seq, None)
            return
        for seq in [each for each in self._of if first <= each < stop]:
            del self._of[seq]
