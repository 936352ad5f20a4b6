"""A clock that only the test advances."""

from __future__ import annotations

from ringlog.errors import UsageError

_START_US = 1_700_000_000_000_000
_START_NS = 1_000_000_000


class ManualClock:
    """A Clock whose time changes only by `advance`, `step` and `sleep`.

    Wall time starts at `now_us` (microseconds since the epoch), monotonic time at `monotonic_ns`. A sleep
    takes no real time: it advances both clocks and is appended to `sleeps`, in seconds.
    """

    def __init__(self, now_us: int = _START_US, monotonic_ns: int = _START_NS) -> None:
        self._now_us = now_us
        self._monotonic_ns = monotonic_ns
        self.sleeps: list[float] = []

    def now_us(self) -> int:
        return self._now_us

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def sleep_ns(self, nanoseconds: int) -> None:
        self.advance(nanoseconds / 1e9)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Advance both clocks; raise UsageError for a negative duration."""
        if seconds < 0:
            raise UsageError("time does not go back; use step() for the wall clock", seconds=seconds)
        self._now_us += round(seconds * 1_000_000)
        self._monotonic_ns += round(seconds * 1_000_000_000)

    def step(self, seconds: float) -> None:
        """Change the wall clock forward or back, like an operator or NTP. Monotonic time does not change."""
        self._now_us += round(seconds * 1_000_000)
