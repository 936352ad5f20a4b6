"""The loop that every actor runs on: a pass of work, then a wait of the actor's own.

An actor is what Aeron calls an agent. In one pass it gathers what arrived, decides, and does what follows.
How it waits belongs to the actor too, since what can wake it does.

    on_start  READY     (do_work, idle) ... until a stop is asked for
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
    """What runs on the duty cycle."""

    exit_code: ExitCode | None
    """Set by the actor when it has come to its end; looked at behind each pass."""

    def on_start(self, stop: StopFlag) -> None:
        """Open and recover what passes need. With an `exit_code` then the actor ends before it serves.

        `stop.fileno()` belongs into what `idle` waits on, so that a signal ends the wait.
        """

    def do_work(self) -> int:
        """One pass; returns how much there was to do, 0 = nothing."""

    def idle(self, work: int) -> None:
        """Wait behind a pass that had so much to do; without work at most for a heartbeat's interval."""

    def drain(self) -> bool:
        """A stop is asked for: take nothing more, and come to an end in the passes that follow.

        False = not yet; then it is asked again before the next pass.
        """

    def on_close(self) -> None:
        """Let go of everything. Not called when a pass raises: then the process ends."""


def run_duty_cycle(actor: Actor, slot: ProcessSlot, stop: StopFlag) -> ExitCode:
    """Run the actor to its end and return its exit code; what it raises passes through."""
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
