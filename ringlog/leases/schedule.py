"""Schedule: which numbers are due when. Sixteen bytes each, whatever their order; no object for any. Pure.

Sorted runs, each at least twice as long as the next: what is added is sorted alone and merged with runs of
about its size, so that every number is moved some twenty times among a million, a whole run at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

I64 = NDArray[np.int64]


class DelaySchedule:
    """Numbers by the instant at which they are due, milliseconds."""

    def __init__(self) -> None:
        self._runs: list[tuple[I64, I64]] = []
        """(instants ascending, numbers)."""

    def __len__(self) -> int:
        return sum(len(seqs) for _, seqs in self._runs)

    def add(self, at_ms: I64, seqs: I64) -> None:
        """Each of these numbers is due at its instant."""
        if not len(seqs):
            return
        order = np.argsort(at_ms, kind="stable")
        self._runs.append((at_ms[order], seqs[order]))
        while len(self._runs) > 1 and len(self._runs[-2][1]) < 2 * len(self._runs[-1][1]):
            (late_at, late), (at, numbers) = self._runs.pop(), self._runs.pop()
            at, numbers = np.concatenate((at, late_at)), np.concatenate((numbers, late))
            order = np.argsort(at, kind="stable")
            self._runs.append((at[order], numbers[order]))

    def next_ms(self) -> int | None:
        """When the next one is due; None = there is none."""
        return min((int(at[0]) for at, _ in self._runs), default=None)

    def pop_due(self, now_ms: int) -> I64:
        """Those that are due by now, in no order; they leave."""
        taken, left = [], []
        for at, seqs in self._runs:
            due = int(np.searchsorted(at, now_ms, side="right"))
            if due:
                taken.append(seqs[:due])
            if due < len(seqs):
                left.append((at[due:], seqs[due:]))
        self._runs = left
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def keep_only(self, seqs: BitMap64) -> None:
        """Forget all others, and the room of what left."""
        wanted = np.array(seqs.to_array(), dtype=np.int64)
        runs, self._runs = self._runs, []
        for at, numbers in runs:
            chosen = np.isin(numbers, wanted)
            self.add(at[chosen], numbers[chosen])
