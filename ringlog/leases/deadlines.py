"""When rows of a table are due: leases that end, rests that are over. Pure.

Whoever changes a row's instant says so and does not look for what was said before: an entry counts only while
its row says the same. What does not count any more is thrown away when it comes to the top, or when it is the
most. Instants are milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_STALE_MAX = 1_024
"""Entries that hold no longer, beside as many as hold; beyond it the heap is made anew."""


class Deadlines:
    """Rows by their instants. `instant(row)` says when a row is due, -1 = never, also of one that is gone."""

    def __init__(self, instant: Callable[[int], int]) -> None:
        self._instant = instant
        self._heap: list[int] = []
        """(instant, row) in one number."""

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, row: int, timed: int) -> None:
        """The row's instant is another one; so many rows have one."""
        heappush(self._heap, self._instant(row) << _ROW_BITS | row)
        if len(self._heap) > 2 * timed + _STALE_MAX:
            self._heap = list({entry for entry in self._heap if self._holds(entry)})
            heapify(self._heap)

    def take(self, now_ms: int) -> Iterator[int]:
        """Rows that are due by now, the earliest first; each changes before the next is asked for."""
        while self._heap and self._heap[0] >> _ROW_BITS <= now_ms:
            entry = heappop(self._heap)
            if self._holds(entry):
                yield entry & _ROW_MASK

    def next_ms(self) -> int | None:
        """When the next one is due; None = none will be."""
        heap = self._heap
        while heap and not self._holds(heap[0]):
            heappop(heap)
        return heap[0] >> _ROW_BITS if heap else None

    def _holds(self, entry: int) -> bool:
        return self._instant(entry & _ROW_MASK) == entry >> _ROW_BITS
