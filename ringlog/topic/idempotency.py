"""Idempotency keys and dedup ids of one topic.

Within its window one key is one write, and one id is one record (W10). The table stores digests, so that the
size of an entry does not depend on the length of the key.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from ringlog.limits import IDEMPOTENCY_KEYS_PER_TOPIC

_STALE_MIN = 64
"""Number of obsolete heap entries that are always tolerated."""


class IdempotencyEntry(NamedTuple):
    """Result of the first write under a key."""

    first_seq: int
    records: int
    commit_ts: int
    created_us: int
    window_ms: int = 0
    """A shorter window of this entry; 0 = the window of the topic."""

    @property
    def last_ms(self) -> int:
        """Last millisecond of the entry's own window."""
        return self.created_us // 1000 + self.window_ms


class IdempotencyKeys:
    """Digests in the order of first use. The table's time is the latest time that it received."""

    __slots__ = ("_by_key", "_early", "_newest_us", "forgotten_early")

    def __init__(self) -> None:
        self._by_key: OrderedDict[bytes, IdempotencyEntry] = OrderedDict()
        self._early: list[tuple[int, bytes]] = []
        """Heap of (last millisecond, digest) of entries with their own window; some may be removed
        already."""
        self._newest_us = 0
        self.forgotten_early: int = 0
        """Number of entries that were removed before the end of their window, for lack of space."""

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes, now_us: int, window_ms: int) -> IdempotencyEntry | None:
        """Return the first write under `key`, if it is within the window."""
        self._expire(now_us, window_ms)
        return self._by_key.get(key)

    def remember(
        self, key: bytes, entry: IdempotencyEntry, window_ms: int, most: int = IDEMPOTENCY_KEYS_PER_TOPIC
    ) -> None:
        """Add a first use. Beyond `most` entries the one that expires next is removed.

        Does nothing with a window of 0."""
        if window_ms == 0:
            return
        self._expire(entry.created_us, window_ms)
        if entry.created_us < self._newest_us:
            # The clock went back. By its own time the entry would be too old at once.
            entry = entry._replace(created_us=self._newest_us)
        while len(self._by_key) >= most:
            self._forget_next(window_ms)
        self._by_key[key] = entry
        if entry.window_ms:
            heapq.heappush(self._early, (entry.last_ms, key))
            if len(self._early) > 2 * len(self._by_key) + _STALE_MIN:
                self._early = [each for each in self._early if self._is_there(each)]
                heapq.heapify(self._early)

    def items(self, now_us: int, window_ms: int) -> list[tuple[bytes, IdempotencyEntry]]:
        """Return every entry within the window, in the order of first use."""
        self._expire(now_us, window_ms)
        return list(self._by_key.items())

    def count(self, now_us: int, window_ms: int) -> int:
        """Return the number of entries within the window."""
        self._expire(now_us, window_ms)
        return len(self._by_key)

    def _expire(self, now_us: int, window_ms: int) -> None:
        # A clock that goes back must not extend the window of earlier entries, so ages are relative to the
        # latest time. Each entry is removed once, which is amortized constant time for a write. Entries with
        # their own window are an exception: they do not expire in the order of first use.
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
        """Return True if this heap entry is still valid."""
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
