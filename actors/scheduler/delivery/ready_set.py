"""Ready set of one subscription: bands that are served by deficit weighted round robin.

Each entry is in the band of its priority. Within a band, entries are in the order of the time at which they
began to lag. The priority of a waiting entry rises only with its age, so the time of its next rise is known.
An entry records the tick of AGING_TICK_MS at which it may reach the next band, and is checked then. Past
ticks are processed when the next entry is popped, so waiting entries cost no time before.

An entry that left its band stays in the queue as a stale reference. It is removed when it reaches the head,
or when there are too many stale references. Operations take O(1) for entries that arrive in order of time,
and O(log n) for an entry that rises. Memory is proportional to the waiting entries.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, TypeVar

from ringlog.limits import AGING_TICK_MS, BANDS
from ringlog.topic.priority import CREDITS, TOP_BAND, TopicPriority, band_of

_NO_BAND = -1
STALE_MIN = 64
"""Number of stale references that are always tolerated."""

K = TypeVar("K")


class _ReadyEntry(Generic[K]):
    __slots__ = ("band", "key", "number", "priority", "since_ms", "tick")

    def __init__(self, key: K, priority: TopicPriority, lag_start_ms: int, number: int) -> None:
        self.key = key
        self.priority = priority
        self.since_ms = lag_start_ms
        self.number = number
        self.band = _NO_BAND
        self.tick = 0
        """Tick at which it is checked next; 0 = never."""

    def __lt__(self, other: _ReadyEntry[K]) -> bool:
        return (self.since_ms, self.number) < (other.since_ms, other.number)


class _Band(Generic[K]):
    """Entries in the order in which they began to lag. Entries that arrive out of order go to a heap."""

    __slots__ = ("late", "queue")

    def __init__(self) -> None:
        self.queue: deque[_ReadyEntry[K]] = deque()
        self.late: list[_ReadyEntry[K]] = []

    def add(self, entry: _ReadyEntry[K]) -> None:
        if not self.queue or self.queue[-1] < entry:
            self.queue.append(entry)
        else:
            heapq.heappush(self.late, entry)


class ReadySet(Generic[K]):
    """Keys that wait for a grant, each at most once."""

    __slots__ = (
        "_at", "_bands", "_counts", "_deficits", "_due", "_entries", "_number", "_stale", "_tick", "_ticks",
    )  # fmt: skip

    def __init__(self, counts: list[int] | None = None) -> None:
        """Create an empty set. `counts` is the number of waiting keys by band, shared by several sets."""
        self._counts = counts if counts is not None else [0] * BANDS
        self._entries: dict[K, _ReadyEntry[K]] = {}
        self._number = 0
        self._tick = 0
        self._reset()

    def _reset(self) -> None:
        self._bands: list[_Band[K]] = [_Band() for _ in range(BANDS)]
        self._due: dict[int, list[_ReadyEntry[K]]] = {}
        self._ticks: list[int] = []
        self._stale = 0
        self._at = TOP_BAND
        self._deficits = [0] * BANDS
        self._deficits[TOP_BAND] = CREDITS[TOP_BAND]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def references(self) -> int:
        """Number of stored references, including stale ones."""
        waiting = sum(len(band.queue) + len(band.late) for band in self._bands)
        return waiting + sum(map(len, self._due.values()))

    def band(self, key: K) -> int:
        """Return the band of a key; raise KeyError if it does not wait."""
        return self._entries[key].band

    def add(self, key: K, priority: TopicPriority, lag_start_ms: int, now_ms: int) -> None:
        """Add `key`, which has been lagging since `lag_start_ms`. Do nothing if it already waits."""
        if key in self._entries:
            return
        if not self._entries:
            self._tick = now_ms // AGING_TICK_MS
        self._number += 1
        entry = self._entries[key] = _ReadyEntry(key, priority, lag_start_ms, self._number)
        self._place(entry, now_ms)

    def discard(self, key: K) -> None:
        """Remove a key if it waits."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._stale += 1
            self._on_removed(entry)

    def refresh(self, key: K, now_ms: int) -> None:
        """Move a key to the band of its changed priority. Its order by age stays."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.tick:
            self._stale += 1
        if entry.band == band_of(entry.priority.effective(now_ms, entry.since_ms)):
            self._schedule_rise(entry, now_ms)
        else:
            self._stale += 1
            self._place(entry, now_ms)
        self._clean_up()

    @property
    def oldest_ms(self) -> int | None:
        """When the key that has waited longest began to lag, in ms; None if no key waits."""
        heads = [entry.since_ms for band in range(BANDS) if (entry := self._head(band)) is not None]
        return min(heads, default=None)

    def pop(self, now_ms: int, lowest: int = 0) -> tuple[K, int] | None:
        """Remove the next key of the bands from `lowest` up; return it and the time at which it began to lag.

        Return None if no key waits there.
        """
        if not self._entries:
            return None
        self._catch_up(now_ms)
        if lowest and all(self._head(band) is None for band in range(lowest, BANDS)):
            return None
        while True:
            entry = self._head(self._at) if self._at >= lowest else None
            if entry is None:
                self._deficits[self._at] = 0
            elif self._deficits[self._at]:
                break
            self._at = self._at - 1 if self._at else TOP_BAND
            self._deficits[self._at] += CREDITS[self._at]
        self._deficits[self._at] -= 1
        band = self._bands[self._at]
        if band.queue and band.queue[0] is entry:
            band.queue.popleft()
        else:
            heapq.heappop(band.late)
        del self._entries[entry.key]
        self._on_removed(entry)
        return entry.key, entry.since_ms

    # -- internals ------------------------------------------------------------------------------------

    def _place(self, entry: _ReadyEntry[K], now_ms: int) -> None:
        if entry.band != _NO_BAND:
            self._counts[entry.band] -= 1
        entry.band = band_of(entry.priority.effective(now_ms, entry.since_ms))
        self._counts[entry.band] += 1
        self._bands[entry.band].add(entry)
        self._schedule_rise(entry, now_ms)

    def _schedule_rise(self, entry: _ReadyEntry[K], now_ms: int) -> None:
        due_ms = entry.priority.next_rise_ms(now_ms, entry.since_ms)
        if due_ms is None:
            entry.tick = 0
            return
        entry.tick = max(-(-due_ms // AGING_TICK_MS), self._tick + 1)
        due = self._due.get(entry.tick)
        if due is None:
            due = self._due[entry.tick] = []
            heapq.heappush(self._ticks, entry.tick)
        due.append(entry)

    def _catch_up(self, now_ms: int) -> None:
        """Process the ticks that have passed: entries that reached the next band are moved."""
        self._tick = max(self._tick, now_ms // AGING_TICK_MS)
        while self._ticks and self._ticks[0] <= self._tick:
            tick = heapq.heappop(self._ticks)
            for entry in self._due.pop(tick):
                if entry.tick != tick or entry.band == _NO_BAND:
                    self._stale -= 1
                elif band_of(entry.priority.effective(now_ms, entry.since_ms)) > entry.band:
                    self._stale += 1
                    self._place(entry, now_ms)
                else:
                    self._schedule_rise(entry, now_ms)

    def _head(self, number: int) -> _ReadyEntry[K] | None:
        """Return the first entry of a band, or None. Stale references before it are removed."""
        band = self._bands[number]
        queue, late = band.queue, band.late
        while queue and queue[0].band != number:
            queue.popleft()
            self._stale -= 1
        while late and late[0].band != number:
            heapq.heappop(late)
            self._stale -= 1
        if queue and late:
            return min(queue[0], late[0])
        if queue:
            return queue[0]
        return late[0] if late else None

    def _on_removed(self, entry: _ReadyEntry[K]) -> None:
        self._counts[entry.band] -= 1
        entry.band = _NO_BAND
        if entry.tick:
            self._stale += 1
        if self._entries:
            self._clean_up()
        else:
            self._reset()

    def _clean_up(self) -> None:
        """Remove all stale references if there are more of them than entries, plus STALE_MIN."""
        if self._stale <= len(self._entries) + STALE_MIN:
            return
        at, deficits = self._at, self._deficits
        self._reset()
        self._at, self._deficits = at, deficits
        for entry in sorted(self._entries.values()):
            self._bands[entry.band].add(entry)
            if entry.tick:
                due = self._due.setdefault(entry.tick, [])
                if not due:
                    heapq.heappush(self._ticks, entry.tick)
                due.append(entry)
