"""Forked children that attach to a ring, and functions that wait for them."""

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
    """A forked process that runs one function. Its exit status is 0, or 3 if the function raised."""

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
        """Return the exit status, negative for a signal."""
        assert self.has_ended(DEADLINE_S), "child does not end"
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until the condition holds. Fail after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        os.sched_yield()
