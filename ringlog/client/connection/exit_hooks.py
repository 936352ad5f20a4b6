"""Hooks that run before a process exits, also where `atexit` does not run.

Processes that `multiprocessing` forks or starts from its fork server end with os._exit after their function.
So do workers of concurrent.futures. `atexit` hooks do not run there; only finalizers of multiprocessing do.
multiprocessing clears its finalizers when such a process starts, so this module registers its finalizer again
there. A program that calls os.fork and os._exit must close its clients itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable

log: logging.Logger = logging.getLogger("ringlog.client")
EXIT_CLOSE_S = 2.0
"""Longest time in seconds that an unclosed client may take to settle its records at exit."""
PRIORITY = -10
"""Runs after multiprocessing's own finalizers: their flush of queues and pools may send further records."""


class _ExitHooks:
    """Registered hooks, and the process in which multiprocessing knows them. multiprocessing keeps only a
    weak reference."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.is_watching = False
        self.registered_in = 0

    def register_finalizer(self) -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is None:
            return
        if not self.is_watching:
            self.is_watching = True
            util.register_after_fork(self, _ExitHooks.register_again)
        is_child = sys.modules["multiprocessing.process"].parent_process() is not None
        if is_child and self.registered_in != os.getpid():
            self.registered_in = os.getpid()
            util.Finalize(None, self.end, exitpriority=PRIORITY)

    def register_again(self) -> None:
        """Register again: multiprocessing started a process and cleared its finalizers."""
        self.registered_in = 0
        self.register_finalizer()

    def end(self) -> None:
        call_each(reversed(self.calls))


_hooks = _ExitHooks()


def register_exit_hook(call: Callable[[], object]) -> None:
    """Call a function before this process, and each process that is forked from it, exits."""
    _hooks.calls.append(call)
    atexit.register(call)


def register_with_multiprocessing() -> None:
    """If multiprocessing started this process, register the hooks with it. Call this once there is something
    to close."""
    _hooks.register_finalizer()


def call_each(calls: Iterable[Callable[[], object]]) -> None:
    """Call functions that close clients at process exit. An error of one goes to the log, and does not stop
    the others."""
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("closing a client at process exit failed")


def warn_unsettled(unsent: int, unknown: int) -> None:
    """Warn about records that were not settled when the process exited."""
    if unsent or unknown:
        warnings.warn(
            f"the process exits with {unsent + unknown} unsettled records, {unsent} of them never sent: "
            "close clients or flush their producers before exit",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=register_with_multiprocessing)
