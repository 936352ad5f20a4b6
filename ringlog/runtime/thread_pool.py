"""Threads for what may block: cold stores, long passes over files. The loop that beats never waits for them.

They are daemons: one that hangs in a dead device must not keep the process from ending. An error that is
not of our tree is a defect; it is raised again in the thread that calls `check`, and ends the process.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ringlog.errors import RinglogError


class TaskResult(NamedTuple):
    """A finished job: its ticket, and what came of it."""

    ticket: int
    result: Any = None
    error: RinglogError | None = None


class ThreadPool:
    """A few threads and a bounded queue of jobs for them."""

    def __init__(self, name: str, threads: int, queued_max: int, wake: Callable[[], None]) -> None:
        """`wake` is called from a worker's thread whenever there is something to take."""
        self._jobs: queue.Queue[tuple[int, Callable[[], Any]]] = queue.Queue(queued_max)
        self._done: deque[TaskResult] = deque()
        self._wake = wake
        self._failure: BaseException | None = None
        for n in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True).start()

    def submit(self, ticket: int, job: Callable[[], Any]) -> bool:
        """Have `job` done; False when the queue is full."""
        try:
            self._jobs.put_nowait((ticket, job))
        except queue.Full:
            return False
        return True

    def take_results(self) -> list[TaskResult]:
        """What was finished since; raises what was no RinglogError."""
        self.raise_failure()
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def raise_failure(self) -> None:
        """Raise the error of a job that failed as it never should."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            ticket, job = self._jobs.get()
            try:
                self._done.append(TaskResult(ticket, job()))
            except RinglogError as e:
                self._done.append(TaskResult(ticket, None, e))
            except BaseException as e:
                self._failure = e
                self._wake()
                raise
            self._wake()


class BackgroundThread:
    """One thread beside the main one, that runs `work` until it returns."""

    def __init__(self, name: str, work: Callable[[], None], wake: Callable[[], None]) -> None:
        self._work, self._wake = work, wake
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise what `work` raised."""
        if self._failure is not None:
            raise self._failure

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False when it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._failure = e
            self._wake()
            raise
