"""The loop of every actor: one pass of work, then a wait that the actor implements.

An actor is like an agent of Aeron. One pass collects the input, decides, and performs the effects. The actor
implements the wait, because it knows which descriptors can wake it up.

    on_start  READY     (do_work, idle) ... until a stop is requested
    drain     DRAINING  (do_work, idle) ... until exit_code is set
    on_close
"""

from __future__ import annotations

from typing import Protocol

from ringlog.board.board import ProcessSlot
from ringlog.board.layout import ProcessField, ProcessState
from ringlog.errors import ExitCode
from ringlog.signals import StopFlag


class Actor(Protocol):
    """A component that runs on the duty cycle."""

    exit_code: ExitCode | None
    """Set by the actor when it ends. The loop checks it after each pass."""

    def on_start(self, stop: StopFlag) -> None:
        """Open and recover everything that the passes need. If it sets `exit_code`, the actor ends at once.

        `idle` must also wait for `stop.fileno()`, so that a signal ends the wait.
        """

    def do_work(self) -> int:
        """Run one pass. Returns the amount of work done; 0 = nothing to do."""

    def idle(self, work: int) -> None:
        """Wait after a pass with this amount of work. Without work, wait at most one heartbeat interval."""

    def drain(self) -> bool:
        """Handle a stop request: accept no more work and finish within the next passes.

        Returns False if the actor cannot begin yet. The loop then calls it again before the next pass.
        """

    def on_close(self) -> None:
        """Release all resources. Not called if a pass raises, because the process then ends."""


def run_duty_cycle(actor: Actor, slot: ProcessSlot, stop: StopFlag) -> ExitCode:
    """Run the actor to its end and return its exit code. Exceptions of the actor propagate."""
    actor.on_start(stop)
    code = actor.exit_code
    if code is not None:
        return code
    slot.set(ProcessField.STATE, ProcessState.READY)
    is_draining = False
    while code is None:
        if not is_draining and stop.is_set() and actor.drain():
            is_draining = True
            slot.set(ProcessField.STATE, ProcessState.DRAINING)
            code = actor.exit_code
            continue
        work = actor.do_work()
        code = actor.exit_code
        if code is None:
            actor.idle(work)
    actor.on_close()
    return code
