"""From `python -m ringlog.actors.<kind> <boot>` to a running actor, and from its end to an exit code.

Every actor's `__main__` uses this module. It parses the boot message, confines the process, checks that the
supervisor is alive, publishes the process on the board, and builds and runs the actor. The last `except
Exception` of an actor's process is here: it logs the error and exits with a code that the supervisor
interprets. The gateway, which holds no durable state, also has one around each request of a client.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import msgspec

from ringlog import config, hardening, logs, stop_points
from ringlog.board.board import Board, ProcessSlot
from ringlog.board.layout import ProcessField, ProcessState
from ringlog.clock import SystemClock
from ringlog.envelope.boot import ActorBoot, load_boot
from ringlog.errors import (
    ConfigError,
    CorruptData,
    DiskError,
    ExitCode,
    InvariantViolation,
    RinglogError,
    StartRefused,
)
from ringlog.frame.malloc_tuning import raise_malloc_trim_threshold
from ringlog.limits import ORPHAN_DRAIN_S
from ringlog.runtime.duty_cycle import Actor, run_duty_cycle
from ringlog.signals import StopFlag

log: logging.Logger = logging.getLogger("ringlog.process")

_STORY_CHARS_MAX = 400
_REASON_CHARS_MAX = 2_000


Build = Callable[[ActorBoot], Actor]


def main(build: Build) -> NoReturn:
    """Run the actor that the command line describes. Never returns."""
    code = run_process(build, sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that hangs in a dead disk, or a lingering socket, must not keep a failed process alive. After
    # an orderly end, an interpreter shutdown would only free piece by piece what the kernel frees at once.
    os._exit(code)


def run_process(build: Build, arguments: list[str]) -> int:
    """Boot the actor, run it, and return the exit code."""
    try:
        boot = _read_boot(arguments)
        _confine(boot)
    except (ConfigError, StartRefused) as e:
        print(f"cannot boot: {e}", file=sys.stderr)  # noqa: T201  no log yet
        return ExitCode.CANNOT_BOOT
    # An orphan that drains delays the next engine. Only processes with unsettled work may do that.
    last_signal = signal.SIGKILL if boot.is_expendable else signal.SIGTERM
    if not hardening.die_with_parent(boot.supervisor_pid, last_signal):
        return ExitCode.ORPHANED
    stopping = _StopHandler(boot.supervisor_pid)
    stop = StopFlag(logs.reopen, stopping.begin)
    try:
        return _run(build, boot, stop, stopping)
    finally:
        if stop.is_set():
            # The interpreter's shutdown would remove the signal handler before the process has exited.
            hardening.cancel_exit_if_orphaned()
        stop.close()


def _show_stacks(_number: int, _frame: FrameType | None) -> None:
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)


class _StopHandler:
    """Action of the first signal to stop, at any point of the actor's work."""

    def __init__(self, supervisor_pid: int) -> None:
        self._supervisor_pid = supervisor_pid
        self.slot: ProcessSlot | None = None

    def begin(self) -> None:
        """Exit at once while the actor is STARTING: no client depends on it, and recovery can be repeated.

        Otherwise arrange that the process exits if its supervisor dies during the drain.
        """
        if self.slot is not None and self.slot.state == ProcessState.STARTING:
            self.slot.set(ProcessField.STATE, ProcessState.STOPPED)
            os._exit(ExitCode.OK)
        hardening.exit_if_orphaned(self._supervisor_pid, ORPHAN_DRAIN_S, ExitCode.ORPHANED)


def _read_boot(arguments: list[str]) -> ActorBoot:
    if len(arguments) != 1:
        raise StartRefused("an actor is started by the supervisor with one argument", found=len(arguments))
    try:
        return load_boot(arguments[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise StartRefused(
            "the boot message is invalid; actors are started by the supervisor only", reason=str(e)
        ) from None


def _confine(boot: ActorBoot) -> None:
    settings = config.from_plain(boot.config)
    hardening.harden(may_profile=settings.profile.allow)
    hardening.set_process_title(boot.name, boot.data_dir)
    if boot.is_background:
        hardening.set_background_priority()
    raise_malloc_trim_threshold()
    # Not faulthandler.register: its handler reads frames at any point of the interpreter's work, and has
    # crashed busy processes.
    signal.signal(signal.SIGQUIT, _show_stacks)
    stop_points.configure(boot.test_stop_points)
    logs.configure(
        level=settings.log.level,
        format=settings.log.format,
        file=settings.log.file,
        actor=boot.name,
        incarnation=boot.incarnation,
    )


def _run(build: Build, boot: ActorBoot, stop: StopFlag, stopping: _StopHandler) -> int:
    slot: ProcessSlot | None = None
    is_built = False
    try:
        slot = Board.open(boot.shm_dir, writable=True).process(boot.slot)
        _announce(slot, boot)
        stopping.slot = slot
        if stop.is_set():
            slot.set(ProcessField.STATE, ProcessState.STOPPED)
            return ExitCode.OK
        actor = build(boot)
        is_built = True
        code = run_duty_cycle(actor, slot, stop)
    except Exception as e:  # noqa: BLE001  the one of this process: it ends here
        code = exit_code_for(e, is_built=is_built)
        _log_failure(e, code)
    if slot is not None:
        slot.set(ProcessField.STATE, ProcessState.STOPPED if code == ExitCode.OK else ProcessState.FAILED)
    logs.log_event(log, logging.INFO, "actor ends", code=code.name)
    return code


def _announce(slot: ProcessSlot, boot: ActorBoot) -> None:
    slot.set(ProcessField.PID, os.getpid())
    slot.set(ProcessField.INCARNATION, boot.incarnation)
    slot.set(ProcessField.STARTED_NS, SystemClock().monotonic_ns())
    slot.set(ProcessField.STATE, ProcessState.STARTING)


def exit_code_for(error: Exception, *, is_built: bool) -> ExitCode:
    """Return the exit code for an error. `is_built`: the error occurred after the actor was built."""
    if isinstance(error, InvariantViolation):
        return ExitCode.INVARIANT
    if isinstance(error, DiskError):
        # Another process has the lock of this actor, so this process must not continue.
        return ExitCode.FENCED if error.detail.get("holder") else ExitCode.DISK_FAILED
    if isinstance(error, CorruptData):
        return ExitCode.CORRUPT
    if isinstance(error, StartRefused | ConfigError):
        return ExitCode.CANNOT_BOOT
    return ExitCode.CRASH if is_built else ExitCode.CANNOT_BOOT


def _log_failure(error: Exception, code: ExitCode) -> None:
    """Log why the process ends: the facts in one line, the core's last events, then the traceback."""
    detail: Mapping[str, Any] = error.detail if isinstance(error, RinglogError) else {}
    logs.log_event(
        log,
        logging.CRITICAL,
        "actor failed",
        code=code.name,
        error=type(error).__name__,
        reason=error.message if isinstance(error, RinglogError) else str(error)[:_REASON_CHARS_MAX],
        detail={name: value for name, value in detail.items() if name != "story"},
    )
    for event in detail.get("story", ()):
        logs.log_event(log, logging.CRITICAL, "last event", told=repr(event)[:_STORY_CHARS_MAX])
    log.critical("traceback", exc_info=error)
