"""Who waits for a turn of one subscription, and who is next: bands, served by deficit weighted round robin.

Each entry lies in the band of its priority (SCH-2), within it in order of the instant it became dirty
(SCH-3). Priorities change by waiting alone, and when they do is known beforehand: an entry notes the tick of
AGING_TICK_MS at which it may reach the next band, and is looked at then (SCH-4). Ticks are made up for when
somebody is asked for, so nobody who waits costs anything meanwhile.

An entry that left or rose stays behind as a reference until it is met or too many of them are held; so all is
O(1) for entries that come in order of time, O(log n) for one that rises, and memory follows what waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, TypeVar

from ringlog.limits import AGING_TICK_MS, BANDS
from ringlog.topic.priority import CREDITS, TOP_BAND, TopicPriority, band_of

_GONE = -1
STALE_MIN = 64
"""References to what left that are not worth cleaning up."""

K = TypeVar("K")


class _ReadyEntry(Generic[K]):
    __slots__ = ("band", "key", "number", "since_ms", "standing", "tick")

    def __init__(self, key: K, standing: TopicPriority, dirty_ms: int, number: int) -> None:
        self.key = key
        self.standing = standing
        self.since_ms = dirty_ms
        self.number = number
        self.band = _GONE
        self.tick = 0
        """Tick at which it is looked at next; 0 = not at all."""

    def __lt__(self, other: _ReadyEntry[K]) -> bool:
        return (self.since_ms, self.number) < (other.since_ms, other.number)


class _Band(Generic[K]):
    """Entries in order of the instant they became dirty: most come in that order, the others by a heap."""

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
    """Keys that want a turn, each at most once."""

    __slots__ = (
        "_at", "_bands", "_counts", "_deficits", "_due", "_entries", "_number", "_stale", "_tick", "_ticks",
    )  # fmt: skip

    def __init__(self, counts: list[int] | None = None) -> None:
        """`counts`: who waits by band, of several ready sets together."""
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
        """References held, those to what left included."""
        waiting = sum(len(band.queue) + len(band.late) for band in self._bands)
        return waiting + sum(map(len, self._due.values()))

    def band(self, key: K) -> int:
        """The band that a key lies in; raises KeyError."""
        return self._entries[key].band

    def add(self, key: K, standing: TopicPriority, dirty_ms: int, now_ms: int) -> None:
        """Have `key` wait; it has been dirty since `dirty_ms`. Nothing happens when it waits already."""
        if key in self._entries:
            return
        if not self._entries:
            self._tick = now_ms // AGING_TICK_MS
        self._number += 1
        entry = self._entries[key] = _ReadyEntry(key, standing, dirty_ms, self._number)
        self._place(entry, now_ms)

    def discard(self, key: K) -> None:
        """Have it wait no longer, if it did."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._stale += 1
            self._left(entry)

    def refresh(self, key: K, now_ms: int) -> None:
        """Its standing changed: put it where it belongs. It keeps its place by age."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.tick:
            self._stale += 1
        if entry.band == band_of(entry.standing.effective(now_ms, entry.since_ms)):
            self._schedule_rise(entry, now_ms)
        else:
            self._stale += 1
            self._place(entry, now_ms)
        self._clean_up()

    @property
    def oldest_ms(self) -> int | None:
        """The instant at which the one that has waited longest became dirty; None when nobody waits."""
        heads = [entry.since_ms for band in range(BANDS) if (entry := self._head(band)) is not None]
        return min(heads, default=None)

    def pop(self, now_ms: int, lowest: int = 0) -> tuple[K, int] | None:
        """Who is next in the bands from `lowest` on, with the instant it became dirty; None when nobody waits
        there."""
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
        self._left(entry)
        return entry.key, entry.since_ms

    # -- inside ---------------------------------------------------------------------------------------

    def _place(self, entry: _ReadyEntry[K], now_ms: int) -> None:
        if entry.band != _GONE:
            self._counts[entry.band] -= 1
        entry.band = band_of(entry.standing.effective(now_ms, entry.since_ms))
        self._counts[entry.band] += 1
        self._bands[entry.band].add(entry)
        self._schedule_rise(entry, now_ms)

    def _schedule_rise(self, entry: _ReadyEntry[K], now_ms: int) -> None:
        due_ms = entry.standing.next_rise_ms(now_ms, entry.since_ms)
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
        """Ticks that have passed: who may have reached the next band is looked at."""
        self._tick = max(self._tick, now_ms // AGING_TICK_MS)
        while self._ticks and self._ticks[0] <= self._tick:
            tick = heapq.heappop(self._ticks)
            for entry in self._due.pop(tick):
                if entry.tick != tick or entry.band == _GONE:
                    self._stale -= 1
                elif band_of(entry.standing.effective(now_ms, entry.since_ms)) > entry.band:
                    self._stale += 1
                    self._place(entry, now_ms)
                else:
                    self._schedule_rise(entry, now_ms)

    def _head(self, number: int) -> _ReadyEntry[K] | None:
        """The first of a band; what left it meanwhile is dropped on the way."""
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

    def _left(self, entry: _ReadyEntry[K]) -> None:
        self._counts[entry.band] -= 1
        entry.band = _GONE
        if entry.tick:
            self._stale += 1
        if self._entries:
            self._clean_up()
        else:
            self._reset()

    def _clean_up(self) -> None:
        """Drop references to what left, once they are most of what is held."""
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
