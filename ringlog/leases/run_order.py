"""The order of runs: by the time at which their state ends, and by seq for returned and exhausted ones. Pure.

Each order is a heap. An entry stays in it when its run changes, and is skipped then; a heap with many such
entries is rebuilt.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ringlog.leases.runs import DELAYED, EXHAUSTED, GONE, LEASED, RETURNED, LeaseRuns

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STALE_MAX = 1_024
"""Number of obsolete heap entries, in addition to the valid ones, after which a heap is rebuilt."""


class RunOrder:
    """The runs whose state ends by itself, and those that wait for their next delivery or for their move."""

    def __init__(self, runs: LeaseRuns, counts_by_state: list[int]) -> None:
        self._runs = runs
        self._counts_by_state = counts_by_state
        """Number of runs by state, which the table counts."""
        self._deadlines: list[int] = []
        """Heap of (time, row), packed into one integer. An entry is valid only while its row ends at that
        time."""
        self._returned: list[int] = []
        """Heap of first seqs of returned runs. An entry is valid only while such a run starts there."""
        self._exhausted: list[int] = []
        """The same for exhausted runs."""

    def add(self, row: int, state: int) -> None:
        """Add a run to the heap by time, or to the heap of its state."""
        if state in {LEASED, DELAYED, GONE}:
            heap, of = self._deadlines, self._counts_by_state
            heappush(heap, self._due_ms(row) << _ROW_BITS | row)
            if len(heap) > _STALE_MAX + 2 * (of[LEASED] + of[DELAYED] + of[GONE]):
                heap[:] = {each for each in heap if self._due_ms(each & _ROW_MASK) == each >> _ROW_BITS}
                heapify(heap)
        elif state == RETURNED:
            heappush(self._returned, self._runs.first[row])
            if len(self._returned) > 2 * self._counts_by_state[RETURNED] + _STALE_MAX:
                self._returned = sorted(
                    {first for first in self._returned if self._run_starts(first, RETURNED)}
                )
        else:
            heappush(self._exhausted, self._runs.first[row])
            if len(self._exhausted) > 2 * self._counts_by_state[EXHAUSTED] + _STALE_MAX:
                self._exhausted = sorted(
                    {first for first in self._exhausted if self._run_starts(first, EXHAUSTED)}
                )

    # -- time -----------------------------------------------------------------------------------------

    def pop_due(self, now_ms: int) -> int:
        """Remove and return the row of the next run whose state ended by now; -1 if there is none."""
        heap = self._deadlines
        while heap and heap[0] >> _ROW_BITS <= now_ms:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if self._due_ms(row) == entry >> _ROW_BITS:
                return row
        return -1

    def next_due_ms(self) -> int | None:
        """Return the time at which the next lease or delay ends; None if there is none."""
        heap = self._deadlines
        while heap and self._due_ms(heap[0] & _ROW_MASK) != heap[0] >> _ROW_BITS:
            heappop(heap)
        return heap[0] >> _ROW_BITS if heap else None

    def _due_ms(self, row: int) -> int:
        """Return the time at which the state of this run ends; -1 = never.

        A lease is still held in the millisecond of its deadline. A delay has ended in the millisecond of its
        end."""
        if row >= len(self._runs.state):
            return -1
        state = self._runs.state[row]
        if state in {LEASED, GONE}:
            return self._runs.at[row] + 1
        return self._runs.at[row] if state == DELAYED else -1

    # -- seqs -----------------------------------------------------------------------------------------

    @property
    def has_returned(self) -> bool:
        """There may be returned runs."""
        return bool(self._returned)

    def lowest_returned(self, passed: int = -1) -> int:
        """Return the row of the lowest returned run, which stays in the order; -1 if there is none.

        The run that starts at `passed` was taken, so another entry for it is a duplicate."""
        heap = self._returned
        while heap and (heap[0] == passed or not self._run_starts(heap[0], RETURNED)):
            heappop(heap)
        return self._runs.find(heap[0]) if heap else -1

    def pop_returned(self) -> None:
        """Remove the run that `lowest_returned` returned."""
        heappop(self._returned)

    def lowest_exhausted(self, most: int) -> list[int]:
        """Return the rows of exhausted runs, lowest first, until they have `most` seqs."""
        rows: list[int] = []
        kept: list[int] = []
        while most > 0 and self._exhausted:
            first = heappop(self._exhausted)
            if not self._run_starts(first, EXHAUSTED) or (kept and kept[-1] == first):
                continue
            kept.append(first)
            row = self._runs.find(first)
            rows.append(row)
            most -= self._runs.stop[row] - first
        for first in kept:
            heappush(self._exhausted, first)
        return rows

    def _run_starts(self, first: int, state: int) -> bool:
        """Return True if a run in this state starts at `first`."""
        row = self._runs.find(first)
        return row >= 0 and self._runs.state[row] == state and self._runs.first[row] == first
