"""A clock that only the test moves."""

from __future__ import annotations

from ringlog.errors import UsageError

_START_US = 1_700_000_000_000_000
_START_NS = 1_000_000_000


class ManualClock:
    """A Clock whose time stands still until `advance`, `step` or a `sleep` moves it.

    Wall time begins at `now_us` (microseconds since the epoch), monotonic time at `monotonic_ns`.
    A sleep costs no real time: it advances both and is kept in `sleeps`, in seconds, for the test to see.
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
        """Let time pass on both clocks; raises UsageError for less than nothing."""
        if seconds < 0:
            raise UsageError("time does not go back; use step() for the wall clock", seconds=seconds)
        self._now_us += round(seconds * 1_000_000)
        self._monotonic_ns += round(seconds * 1_000_000_000)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP does; monotonic time stands still."""
        self._now_us += round(seconds * 1_000_000)
