"""Idempotency keys and dedup ids of one topic: the same one inside its window is one write (section 12).

A key stands for a whole write, an id for one record. Both are kept as digests, so that an entry is as large
whatever the program calls its records.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from ringlog.limits import IDEMPOTENCY_KEYS_PER_TOPIC

_STALE_MIN = 64
"""Stale places of entries that expire early which are not worth being looked for."""


class IdempotencyEntry(NamedTuple):
    """What the first write under a key got."""

    first_seq: int
    records: int
    commit_ts: int
    created_us: int
    window_ms: int = 0
    """A shorter window than the topic's, of this entry alone; 0 = the topic's."""

    @property
    def last_ms(self) -> int:
        """The last millisecond of a window of its own."""
        return self.created_us // 1000 + self.window_ms


class IdempotencyKeys:
    """Digests in the order they were first used. Time is the newest this table was told (I-12)."""

    __slots__ = ("_by_key", "_early", "_newest_us", "forgotten_early")

    def __init__(self) -> None:
        self._by_key: OrderedDict[bytes, IdempotencyEntry] = OrderedDict()
        self._early: list[tuple[int, bytes]] = []
        """A heap of (last millisecond, digest) of those with a window of their own; some are gone already."""
        self._newest_us = 0
        self.forgotten_early = 0
        """Entries that had to make room before their window was over."""

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes, now_us: int, window_ms: int) -> IdempotencyEntry | None:
        """The first write under `key`, if it is still inside the window."""
        self._expire(now_us, window_ms)
        return self._by_key.get(key)

    def remember(
        self, key: bytes, entry: IdempotencyEntry, window_ms: int, most: int = IDEMPOTENCY_KEYS_PER_TOPIC
    ) -> None:
        """Record a first use; of more than `most` those go that would expire first. With a window of 0
        nothing is kept (I-3)."""
        if window_ms == 0:
            return
        self._expire(entry.created_us, window_ms)
        while len(self._by_key) >= most:
            self._forget_next(window_ms)
        self._by_key[key] = entry
        if entry.window_ms:
            heapq.heappush(self._early, (entry.last_ms, key))
            if len(self._early) > 2 * len(self._by_key) + _STALE_MIN:
                self._early = [each for each in self._early if self._is_there(each)]
                heapq.heapify(self._early)

    def items(self, now_us: int, window_ms: int) -> list[tuple[bytes, IdempotencyEntry]]:
        """Every key that is still inside the window, in the order of first use."""
        self._expire(now_us, window_ms)
        return list(self._by_key.items())

    def count(self, now_us: int, window_ms: int) -> int:
        """How many are still inside the window."""
        self._expire(now_us, window_ms)
        return len(self._by_key)

    def _expire(self, now_us: int, window_ms: int) -> None:
        # A clock that steps back must not lengthen a window, so age is measured from the newest
        # time ever seen. Each entry is dropped once: amortised constant time for a write (I-11), but for
        # those with windows of their own, which do not expire in the order of their first use.
        self._newest_us = max(self._newest_us, now_us)
        newest_ms = self._newest_us // 1000
        while self._early and self._early[0][0] < newest_ms:
            place = heapq.heappop(self._early)
            if self._is_there(place):
                del self._by_key[place[1]]
        while self._by_key:
            entry = next(iter(self._by_key.values()))
            if entry.created_us // 1000 >= newest_ms - window_ms and window_ms:
                return
            self._by_key.popitem(last=False)

    def _is_there(self, place: tuple[int, bytes]) -> bool:
        """Does this place of the heap still stand for an entry?"""
        entry = self._by_key.get(place[1])
        return entry is not None and entry.window_ms > 0 and entry.last_ms == place[0]

    def _forget_next(self, window_ms: int) -> None:
        self.forgotten_early += 1
        while self._early and not self._is_there(self._early[0]):
            heapq.heappop(self._early)
        oldest = next(iter(self._by_key.values()))
        if self._early and self._early[0][0] < oldest.created_us // 1000 + window_ms:
            del self._by_key[heapq.heappop(self._early)[1]]
        else:
            self._by_key.popitem(last=False)
