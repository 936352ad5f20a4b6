"""Throttle of the compactor while clients wait for acks. Pure except for the given clock.

Writes of a pass are ahead of a shard's sync in the device queue, and its computation evicts caches. If shards
commit small batches at a low rate, each batch is a client that waits. The pass then pauses after every piece:
even so it absorbs log faster than the log grows. If shards commit much or nothing, the pass runs at full
speed.
"""

from __future__ import annotations

from collections.abc import Callable

from ringlog.clock import Clock

SAMPLE_INTERVAL_NS = 50_000_000
"""How long a sample of the shards' load is valid."""
TRICKLE_BYTES_PER_S = 4_000_000
"""Rate of log over all shards below which the pass is throttled. A throttled pass absorbs more than this."""
PAUSE_S = 0.008
"""Pause after each piece of 64 KiB. It leaves 6 to 7 MB/s of segments, which stand for more bytes of log."""


class CompactionThrottle:
    """Throttle of passes.

    `read_counters` returns (commit batches, bytes) of all shards; `beat` reports progress.
    """

    def __init__(
        self, clock: Clock, read_counters: Callable[[], tuple[int, int]], beat: Callable[[], None]
    ) -> None:
        self._clock, self._read_counters, self._beat = clock, read_counters, beat
        self.is_urgent = False
        """The backlog is so large that the pass must not pause."""
        self._sampled_ns = clock.monotonic_ns()
        self._groups, self._bytes = read_counters()
        self._is_throttling = False

    def pause_if_contended(self) -> None:
        """Pause after a piece was written, if clients wait for acks."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._sampled_ns >= SAMPLE_INTERVAL_NS:
            self._sample_shard_load(now_ns)
        if self._is_throttling and not self.is_urgent:
            self._beat()
            self._clock.sleep(PAUSE_S)

    def _sample_shard_load(self, now_ns: int) -> None:
        groups, size = self._read_counters()
        took_s = (now_ns - self._sampled_ns) / 1e9
        self._is_throttling = groups != self._groups and size - self._bytes < TRICKLE_BYTES_PER_S * took_s
        self._sampled_ns, self._groups, self._bytes = now_ns, groups, size
