"""Idempotency keys of one topic: the same key inside the window is one write (semantics section 12)."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ringlog.limits import IDEMPOTENCY_KEYS_PER_TOPIC_MAX


class Remembered(NamedTuple):
    """What the first write under a key got."""

    first_seq: int
    records: int
    commit_ts: int
    created_us: int


class IdempotencyKeys:
    """Keys in the order they were first used. Time is the newest this table was told (I-12)."""

    __slots__ = ("_by_key", "_most", "_newest_us", "forgotten_early")

    def __init__(self, most: int = IDEMPOTENCY_KEYS_PER_TOPIC_MAX) -> None:
        self._most = most
        self._by_key: OrderedDict[str, Remembered] = OrderedDict()
        self._newest_us = 0
        self.forgotten_early = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: str, now_us: int, window_ms: int) -> Remembered | None:
        """The first write under `key`, if it is still inside the window."""
        self._expire(now_us, window_ms)
        return self._by_key.get(key)

    def remember(self, key: str, entry: Remembered, window_ms: int) -> None:
        """Record a first use. With a window of 0 nothing is kept (I-3)."""
        if window_ms == 0:
            return
        self._expire(entry.created_us, window_ms)
        if len(self._by_key) >= self._most:
            self._by_key.popitem(last=False)
            self.forgotten_early += 1
        self._by_key[key] = entry

    def _expire(self, now_us: int, window_ms: int) -> None:
        # A clock that steps back must not lengthen a window, so age is measured from the newest
        # time ever seen. Each entry is dropped once: amortised constant time for a write (I-11).
        self._newest_us = max(self._newest_us, now_us)
        oldest_ms = self._newest_us // 1000 - window_ms
        while self._by_key:
            entry = next(iter(self._by_key.values()))
            if entry.created_us // 1000 >= oldest_ms and window_ms:
                return
            self._by_key.popitem(last=False)

    def items(self, now_us: int, window_ms: int) -> list[tuple[str, Remembered]]:
        """Every key that is still inside the window, in the order of first use."""
        self._expire(now_us, window_ms)
        return list(self._by_key.items())
