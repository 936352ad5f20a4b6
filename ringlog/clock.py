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
