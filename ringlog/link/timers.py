"""Timers of one owner. Pure: the owner reads `next_ns` and passes the current time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

_COMPACT_MIN = 1_024


class Timer:
    """One callback, due at `when_ns` (monotonic)."""

    __slots__ = ("_callback", "_owner", "when_ns")

    def __init__(self, owner: Timers, when_ns: int, callback: Callable[[], None]) -> None:
        self._owner = owner
        self.when_ns: int = when_ns
        self._callback: Callable[[], None] | None = callback

    @property
    def is_live(self) -> bool:
        """True until the timer fired or was cancelled."""
        return self._callback is not None

    def cancel(self) -> None:
        """Cancel the timer; without effect if it fired."""
        if self._callback is not None:
            self._callback = None
            self._owner.forget_one()

    def fire(self) -> None:
        """Call the callback, unless the timer fired or was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def __lt__(self, other: Timer) -> bool:
        return self.when_ns < other.when_ns


class Timers:
    """A heap of timers.

    A cancelled timer is removed at the top of the heap, or when most timers are cancelled.
    """

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._cancelled = 0

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """Call `callback` at `when_ns` or soon after."""
        timer = Timer(self, when_ns, callback)
        heapq.heappush(self._heap, timer)
        return timer

    def next_ns(self) -> int | None:
        """Return the time at which the next timer is due; None if there is none."""
        heap = self._heap
        while heap and not heap[0].is_live:
            heapq.heappop(heap)
            self._cancelled -= 1
        return heap[0].when_ns if heap else None

    def fire(self, now_ns: int) -> int:
        """Fire all due timers and return their number.

        Timers that they add are not due before the next call.
        """
        due = []
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            due.append(heapq.heappop(self._heap))
        for timer in due:
            # An earlier timer of `due` may have cancelled a later one. That one is not in the heap any more.
            if timer.is_live:
                timer.fire()
            else:
                self._cancelled -= 1
        return len(due)

    def forget_one(self) -> None:
        """Count a cancelled timer of this owner, and compact the heap if most of its timers are cancelled."""
        self._cancelled += 1
        if self._cancelled > _COMPACT_MIN and self._cancelled * 2 > len(self._heap):
            self._heap = [timer for timer in self._heap if timer.is_live]
            heapq.heapify(self._heap)
            self._cancelled = 0
