"""Threads in which passes run, and their CPU priority.

A pass is background work: it runs in a thread with the lowest priority. On a host without idle CPU such a
thread makes almost no progress. The log would grow until the disk is full, and an operator's backup would
time out. A pass with a large backlog, or that an operator waits for, therefore runs at normal priority, at
the cost of other processes. A thread cannot raise its priority again, so there are two threads. Both are
started at once: the log must be compacted even if the host later reaches its limit of threads.
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
"""From this backlog of one shard on, its pass is urgent."""


class PassExecutor:
    """Threads that run passes, one at a time. Raises RuntimeError if a thread cannot be started."""

    def __init__(self) -> None:
        self.is_abandoned: bool = False
        """A pass did not end in time, and its thread is still running."""
        self._lowered = ThreadPoolExecutor(1, "pass", initializer=hardening.set_background_priority)
        self._fair = ThreadPoolExecutor(1, "fair-pass")
        for thread in (self._lowered, self._fair):
            thread.submit(int).result()

    def run(
        self, work: Callable[[], T], *, is_urgent: bool, is_stopping: Callable[[], bool] = lambda: False
    ) -> T:
        """Run one pass and wait for it; raise its errors. An urgent pass runs at normal priority.

        The pass checks itself whether it must stop. If it cannot, because it gets no CPU or waits for a disk,
        it is abandoned: ShuttingDown is raised and the process may exit.
        """
        running = (self._fair if is_urgent else self._lowered).submit(work)
        while wait([running], HEARTBEAT_INTERVAL_MS / 1_000).not_done:
            if is_stopping() and wait([running], PASS_END_S).not_done:
                self.is_abandoned = True
                raise ShuttingDown("a pass did not stop in time")
        return running.result()

    def close(self) -> None:
        """Stop the threads. A thread with an abandoned pass ends with the process."""
        self._lowered.shutdown(wait=not self.is_abandoned)
        self._fair.shutdown(wait=not self.is_abandoned)
