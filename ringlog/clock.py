"""The only place that asks the operating system for the time.

Everything else is handed a Clock, so that tests own the time (CK-1).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Protocol

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_TIMERSLACK = 29
_thread = threading.local()


class Clock(Protocol):
    """Wall time for stamps, monotonic time for deadlines, and a wait that tests can skip."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch; may step in either direction."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back; comparable between processes of one boot."""
        ...

    def sleep_ns(self, nanoseconds: int) -> None:
        """Wait for much less than a millisecond, and hardly longer."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. Never used to make a result correct, only to bound how often something is looked at."""
        ...


class SystemClock:
    """The host's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic_ns = staticmethod(time.monotonic_ns)
    """Without a function of ours around it: it is asked several times a call."""

    def sleep_ns(self, nanoseconds: int) -> None:
        # The kernel stretches a thread's waits by its timer slack, 50 microseconds where nobody lowered it.
        if _libc is not None and not getattr(_thread, "is_exact", False):
            _thread.is_exact = True
            _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        time.sleep(nanoseconds / 1e9)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
