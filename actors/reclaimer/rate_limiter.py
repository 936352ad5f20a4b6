"""Limits work to a number of bytes per second, and ends it when the process stops."""

from __future__ import annotations

from collections.abc import Callable

from ringlog.clock import Clock
from ringlog.errors import ShuttingDown

_NS = 1_000_000_000
SLEEP_S_MAX = 0.1
"""Longest sleep between two checks of the stop signal, in seconds."""


class ByteRateLimiter:
    """Rate limiter that sleeps if bytes come too fast. Unused time is not saved up."""

    def __init__(self, bytes_per_s: int, clock: Clock, is_stopping: Callable[[], bool]) -> None:
        self.bytes_per_s = bytes_per_s
        self.total_bytes: int = 0
        self._clock, self._is_stopping = clock, is_stopping
        self._due_ns = 0

    def __call__(self, count: int) -> None:
        """Count bytes and sleep until they are due. Raises ShuttingDown if the process stops."""
        self.total_bytes += count
        now_ns = self._clock.monotonic_ns()
        self._due_ns = max(self._due_ns, now_ns) + count * _NS // max(self.bytes_per_s, 1)
        while (left_s := (self._due_ns - self._clock.monotonic_ns()) / _NS) > 0:
            if self._is_stopping():
                raise ShuttingDown("stop requested")
            self._clock.sleep(min(left_s, SLEEP_S_MAX))
