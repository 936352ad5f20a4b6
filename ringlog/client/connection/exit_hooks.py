"""What is done before a process ends, also where `atexit` is not asked.

Processes that `multiprocessing` makes by fork, or from its fork server, end with os._exit behind their
function, and so do workers of concurrent.futures. What is registered with atexit is not called then, only
finalizers of multiprocessing itself; those are cleared when such a process begins, so ours is registered anew
there. A program that calls os.fork and os._exit closes its clients itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable

EXIT_CLOSE_S = 2.0
"""How long a client that was not closed may take for what is not settled."""
PRIORITY = -10
"""Behind multiprocessing's own: its queues and pools are flushed by then, and may have had us send more."""


class _ExitHooks:
    """What is to be called, and where multiprocessing was told. It remembers us weakly."""

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
            util.register_after_fork(self, _ExitHooks.begun)
        is_child = sys.modules["multiprocessing.process"].parent_process() is not None
        if is_child and self.registered_in != os.getpid():
            self.registered_in = os.getpid()
            util.Finalize(None, self.end, exitpriority=PRIORITY)

    def begun(self) -> None:
        """multiprocessing begins one of its processes, and has forgotten what was registered before."""
        self.registered_in = 0
        self.register_finalizer()

    def end(self) -> None:
        for call in reversed(self.calls):
            call()


_ending = _ExitHooks()


def register_exit_hook(call: Callable[[], object]) -> None:
    """Have this called before this process ends, and before each that is forked from it does."""
    _ending.calls.append(call)
    atexit.register(call)


def register_with_multiprocessing() -> None:
    """Where multiprocessing made this process, have it call us. For when there is something to end."""
    _ending.register_finalizer()


def warn_unsettled(unsent: int, unknown: int) -> None:
    """Records that the end of the process met unsettled: they are not lost in silence."""
    if unsent or unknown:
        warnings.warn(
            f"the process ended before {unsent + unknown} records were settled, {unsent} of them were never "
            "sent: close clients, or flush their producers, in time",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=register_with_multiprocessing)
