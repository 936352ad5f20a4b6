"""In which thread a pass runs, and how much of the processor it may take.

A pass is background work: it runs when nobody else wants the processor, in a thread that lowers itself.
Where the processor is never free such a thread hardly moves, and the log would grow until the disk is full.
So when much log waits the pass takes its fair share instead, and whoever writes feels it. There are two
threads, since one that was lowered may not raise itself again, and both are there from the start: a host
that is at its limit of threads later gets its log compacted all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from ringlog import hardening
from ringlog.errors import ShuttingDown
from ringlog.limits import HEARTBEAT_INTERVAL_MS, MIB, PASS_END_S

T = TypeVar("T")

BACKLOG_BYTES = 1_024 * MIB
"""With so much log of one shard waiting its pass does not stand back any more."""


class PassExecutor:
    """The threads in which passes run, one at a time. Raises RuntimeError when none can be started."""

    def __init__(self) -> None:
        self.is_abandoned = False
        """A pass did not end when it was to: its thread is still at work."""
        self._lowered = ThreadPoolExecutor(1, "pass", initializer=hardening.set_background_priority)
        self._fair = ThreadPoolExecutor(1, "fair-pass")
        for thread in (self._lowered, self._fair):
            thread.submit(int).result()

    def run(
        self, work: Callable[[], T], waiting_bytes: int, is_stopping: Callable[[], bool] = lambda: False
    ) -> T:
        """Run one pass, wait for it, raise what it raises. `waiting_bytes`: log that no snapshot covers.

        The pass looks itself whether it is to end. One that does not come to that, because it gets no
        processor or waits for a disk, is left alone: raises ShuttingDown, and the process may end.
        """
        thread = self._lowered if waiting_bytes < BACKLOG_BYTES else self._fair
        running = thread.submit(work)
        while wait([running], HEARTBEAT_INTERVAL_MS / 1_000).not_done:
            if is_stopping() and wait([running], PASS_END_S).not_done:
                self.is_abandoned = True
                raise ShuttingDown("a pass did not end in time")
        return running.result()

    def close(self) -> None:
        """End the threads, but one whose pass was abandoned: it ends with the process."""
        self._lowered.shutdown(wait=not self.is_abandoned)
        self._fair.shutdown(wait=not self.is_abandoned)
