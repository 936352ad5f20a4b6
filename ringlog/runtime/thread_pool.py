"""Threads for work that may block: cold stores, long passes over files. An actor's loop never waits for them.

The threads are daemons: one that hangs in a dead device must not keep the process from exiting. An error that
is not a RinglogError is a defect. It is raised again in the thread that takes results or calls
`raise_failure`, and ends the process.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ringlog.errors import RinglogError


class TaskResult(NamedTuple):
    """A finished job: its id, and its result or error."""

    job_id: int
    result: Any = None
    error: RinglogError | None = None


class ThreadPool:
    """A few threads with one bounded queue of jobs."""

    def __init__(self, name: str, threads: int, queued_max: int, wake: Callable[[], None]) -> None:
        """`wake` is called from a thread of the pool after each job. `queued_max` bounds the waiting jobs."""
        self._jobs: queue.Queue[tuple[int, Callable[[], Any]]] = queue.Queue(queued_max)
        self._done: deque[TaskResult] = deque()
        self._wake = wake
        self._failure: BaseException | None = None
        for n in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True).start()

    def submit(self, job_id: int, job: Callable[[], Any]) -> bool:
        """Queue a job. Returns False if the queue is full."""
        try:
            self._jobs.put_nowait((job_id, job))
        except queue.Full:
            return False
        return True

    def take_results(self) -> list[TaskResult]:
        """Return the results since the last call. Raises an error of a job that is no RinglogError."""
        self.raise_failure()
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    def raise_failure(self) -> None:
        """Raise the error of a job that failed with something else than a RinglogError."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            job_id, job = self._jobs.get()
            try:
                self._done.append(TaskResult(job_id, job()))
            except RinglogError as e:
                self._done.append(TaskResult(job_id, None, e))
            except BaseException as e:
                self._failure = e
                self._wake()
                raise
            self._wake()


class BackgroundThread:
    """One thread that runs `work` until it returns."""

    def __init__(self, name: str, work: Callable[[], None], wake: Callable[[], None]) -> None:
        self._work, self._wake = work, wake
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise the error that `work` raised, if any."""
        if self._failure is not None:
            raise self._failure

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns False after `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._failure = e
            self._wake()
            raise
