"""The only place that asks the operating system for the time.

Everything else is handed a Clock, so that tests own the time (CK-1).
"""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamps, monotonic time for deadlines, and a wait that tests can skip."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch; may step in either direction."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back; comparable between processes of one boot."""
        ...

    def give_way(self) -> None:
        """Offer the processor to whoever else is ready to run, and go on at once when nobody is."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. Never used to make a result correct, only to bound how often something is looked at."""
        ...


class SystemClock:
    """The host's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def give_way(self) -> None:
        # Not time.sleep(0): the kernel may stretch that by its timer slack, 50 microseconds by default.
        os.sched_yield()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
