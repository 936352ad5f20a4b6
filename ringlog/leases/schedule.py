"""DelaySchedule: seqs by the time at which they are due, 16 bytes each and without an object for each.

Pure.

It has sorted arrays, each at least twice as long as the next. New seqs are sorted and then merged with arrays
of about the same size. Among a million seqs each one is moved about 20 times, always with its whole array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

I64 = NDArray[np.int64]


class DelaySchedule:
    """Seqs by the time in milliseconds at which they are due."""

    def __init__(self) -> None:
        self._runs: list[tuple[I64, I64]] = []
        """(times ascending, seqs)."""

    def __len__(self) -> int:
        return sum(len(seqs) for _, seqs in self._runs)

    def add(self, at_ms: I64, seqs: I64) -> None:
        """Add these seqs, each due at its time."""
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
        """Return the time at which the next seq is due; None if there is none."""
        return min((int(at[0]) for at, _ in self._runs), default=None)

    def pop_due(self, now_ms: int) -> I64:
        """Remove and return the seqs that are due by now, in any order."""
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
        """Remove all other seqs and free their memory."""
        wanted = np.array(seqs.to_array(), dtype=np.int64)
        runs, self._runs = self._runs, []
        for at, numbers in runs:
            chosen = np.isin(numbers, wanted)
            self.add(at[chosen], numbers[chosen])
