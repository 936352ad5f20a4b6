"""Reasons for which jobs were nacked or rejected, until they are acked or moved to the dead-letter topic.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from ringlog.limits import DEAD_LETTER_REASONS_MAX


class Failure(NamedTuple):
    """The last failure of a job, as its holder reported it."""

    reason: str
    at_ms: int
    """0 = unknown."""
    nacks: int
    """Number of nacks with a reason."""


class Failures:
    """Failures of one queue, by seq. If there are too many, the oldest are dropped."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: OrderedDict[int, Failure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[tuple[int, Failure]]:
        return iter(self._of.items())

    def find(self, seq: int) -> Failure | None:
        """Return the last failure of this job; None if there is none."""
        return self._of.get(seq)

    def record_failure(self, first: int, stop: int, reason: str, at_ms: int, nacks: int) -> None:
        """Record a failure of these jobs; `nacks` is 1 for a nack and 0 for a rejection."""
        for seq in range(first, stop):
            old = self._of.pop(seq, None)
            self._of[seq] = Failure(reason, at_ms, nacks + (old.nacks if old is not None else 0))
        while len(self._of) > DEAD_LETTER_REASONS_MAX:
            self._of.popitem(last=False)

    def forget(self, first: int, stop: int) -> None:
        """Forget these jobs, which are deleted or acked."""
        if stop - first < len(self._of):
            for seq in range(first, stop):
                self._of.pop(seq, None)
            return
        for seq in [each for each in self._of if first <= each < stop]:
            del self._of[seq]
