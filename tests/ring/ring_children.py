"""Forked children that attach to a ring, and how to wait for them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

DEADLINE_S = 30.0


class Child:
    """A forked process that runs one function; its exit status is 0, or 3 when the function raised."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            status = 3
            try:
                run()
                status = 0
            except BaseException:  # noqa: BLE001 - the child must never return into the test runner
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        self.pidfd = os.pidfd_open(self.pid)

    def has_ended(self, wait_s: float = 0.0) -> bool:
        return bool(select.select([self.pidfd], [], [], wait_s)[0])

    def kill(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Exit status, negative for a signal."""
        assert self.has_ended(DEADLINE_S), "child does not end"
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


def until(condition: Callable[[], object], what: str) -> None:
    """Look until the condition holds; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        os.sched_yield()
