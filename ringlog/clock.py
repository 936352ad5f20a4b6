"""The only module that reads the time from the operating system.

All other code receives a Clock, so that tests control the time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import ClassVar, Protocol

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_TIMERSLACK = 29
_thread = threading.local()


class Clock(Protocol):
    """Wall time for timestamps, monotonic time for deadlines, and waits that tests can skip."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch. The value may jump forwards or backwards."""
        ...

    def monotonic_ns(self) -> int:
        """Return nanoseconds that never decrease. Comparable between processes of one boot."""
        ...

    def sleep_ns(self, nanoseconds: int) -> None:
        """Sleep much less than a millisecond, with little overshoot."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep. Use it only to limit how often something is polled: no result may depend on it."""
        ...


class SystemClock:
    """The clocks of the host."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic_ns: ClassVar[staticmethod[[], int]] = staticmethod(time.monotonic_ns)
    """Without a Python wrapper, because a call reads it several times."""

    def sleep_ns(self, nanoseconds: int) -> None:
        # The kernel extends a thread's sleeps by its timer slack, by default 50 µs. 1 ns is the minimum.
        if _libc is not None and not getattr(_thread, "is_exact", False):
            _thread.is_exact = True
            _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        time.sleep(nanoseconds / 1e9)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def read_both(clock: Clock) -> tuple[int, int]:
    """Return `(now_us(), monotonic_ns())` of the same moment, to a millisecond.

    A thread that is preempted between the two reads them again, twice at most.
    """
    for _ in range(3):
        before_ns = clock.monotonic_ns()
        now_us, after_ns = clock.now_us(), clock.monotonic_ns()
        if after_ns - before_ns < 1_000_000:
            break
    return now_us, after_ns
