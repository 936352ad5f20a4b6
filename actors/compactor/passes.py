"""In which thread a pass runs, and how much of the processor it may take.

A pass is background work: it runs when nobody else wants the processor, in a thread that lowers itself.
Where the processor is never free such a thread hardly moves, and the log would grow until the disk is full.
So when much log waits the pass takes its fair share instead, and whoever writes feels it. There are two
threads, since one that was lowered may not raise itself again, and both are there from the start: a host
that is at its limit of threads later gets its log compacted all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringlog import hardening
from ringlog.limits import MIB

T = TypeVar("T")

BACKLOG_BYTES = 1_024 * MIB
"""With so much log of one shard waiting its pass does not stand back any more."""


class Passes:
    """The threads in which passes run, one at a time. Raises RuntimeError when none can be started."""

    def __init__(self) -> None:
        self._lowered = ThreadPoolExecutor(1, "pass", initializer=hardening.work_in_background)
        self._fair = ThreadPoolExecutor(1, "fair-pass")
        for thread in (self._lowered, self._fair):
            thread.submit(int).result()

    def run(self, work: Callable[[], T], waiting_bytes: int) -> T:
        """Run one pass, wait for it, raise what it raises. `waiting_bytes`: log that no snapshot covers."""
        thread = self._lowered if waiting_bytes < BACKLOG_BYTES else self._fair
        return thread.submit(work).result()

    def close(self) -> None:
        """End the threads."""
        self._lowered.shutdown()
        self._fair.shutdown()
