"""How hard the compactor works beside somebody who waits for acks. Pure but for the clock it is handed.

What a pass writes stands in the device's queue before the sync of whoever waits, and what it computes leaves
the caches cold. Where shards take a trickle of small groups, each of them somebody's wait, the pass rests
behind every piece: the log grows more slowly than even so it is absorbed. Where shards take much, or nothing,
nobody's wait is at stake, and it goes on at full speed.
"""

from __future__ import annotations

from collections.abc import Callable

from ringlog.clock import Clock

SAMPLE_INTERVAL_NS = 50_000_000
"""How long a look at what the shards do holds good."""
TRICKLE_BYTES_PER_S = 4_000_000
"""Of log, over all shards: less than what a resting pass absorbs."""
PAUSE_S = 0.008
"""Behind each piece of 64 KiB: 6 to 7 MB/s of segment are left, of which log takes more."""


class CompactionThrottle:
    """`seen` counts (groups, bytes) of all shards; `beat` is told that we make progress."""

    def __init__(self, clock: Clock, seen: Callable[[], tuple[int, int]], beat: Callable[[], None]) -> None:
        self._clock, self._seen, self._beat = clock, seen, beat
        self.is_urgent = False
        """So much log waits that the pass must not stand back."""
        self._looked_ns = clock.monotonic_ns()
        self._groups, self._bytes = seen()
        self._is_throttling = False

    def pause_if_contended(self) -> None:
        """A piece was written: stand back for a moment, if somebody waits for acks."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns >= SAMPLE_INTERVAL_NS:
            self._sample_shard_load(now_ns)
        if self._is_throttling and not self.is_urgent:
            self._beat()
            self._clock.sleep(PAUSE_S)

    def _sample_shard_load(self, now_ns: int) -> None:
        groups, size = self._seen()
        took_s = (now_ns - self._looked_ns) / 1e9
        self._is_throttling = groups != self._groups and size - self._bytes < TRICKLE_BYTES_PER_S * took_s
        self._looked_ns, self._groups, self._bytes = now_ns, groups, size
