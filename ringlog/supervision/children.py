"""Keep the children alive: start, watch, restart, stop. restart.decide decides, this module acts.

A successor starts only after the pidfd of its predecessor became readable: the death is the fence (P2). Each
start gets a new incarnation number, which is durable before the process exists. Between two incarnations the
supervisor owns the child's process slot on the board, and marks there that the child does not serve.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ringlog import stop_points
from ringlog.board.board import Board, ProcessField, ProcessSlot, ProcessState
from ringlog.board.processes import GATEWAY, HTTP_GATEWAY, KINDS, SCHEDULER, WAL_SHARD
from ringlog.clock import Clock
from ringlog.envelope.boot import ActorBoot, ForkRequest, dump_boot
from ringlog.errors import DiskError, ExitCode
from ringlog.limits import RESTART_BACKOFF_MS_MAX
from ringlog.logs import log_event
from ringlog.supervision import restart
from ringlog.supervision.child_process import ChildProcess, actor_command, spawn_process
from ringlog.supervision.forkserver import ForkServer
from ringlog.supervision.progress import ChildProgress
from ringlog.supervision.restart import ChildExit, DeathHistory, GiveUp, RestartAt
from ringlog.supervision.starvation import STARVED_FACTOR, CpuStarvation, sample_cpu
from ringlog.supervision.tree import ChildSpec, Tree

log: logging.Logger = logging.getLogger("ringlog.supervision")

READY = "ready"
DOWN = "down"
GIVEN_UP = "given_up"


class ChildChange(NamedTuple):
    """A change of a child: READY, DOWN, or GIVEN_UP (which follows DOWN)."""

    event: str
    child: ChildState


@dataclass(slots=True)
class ChildState:
    """State of one child of the tree, over all its incarnations."""

    spec: ChildSpec
    slot: ProcessSlot
    process: ChildProcess | None = None
    incarnation: int = 0
    starts: int = 0
    history: DeathHistory = field(default_factory=DeathHistory)
    progress: ChildProgress = field(default_factory=lambda: ChildProgress(0))
    starvation: CpuStarvation = field(default_factory=CpuStarvation)
    is_ready: bool = False
    start_at_ns: int | None = None
    """Monotonic time (ns) at which a start is due; None if no start is requested."""
    started_ns: int = 0
    kill_reason: str = ""
    give_up_reason: str = ""
    """Why the child was given up; empty otherwise."""
    last_exit: ChildExit | None = None
    read_only_starts: int = 0
    """Consecutive read-only incarnations, none of them followed by one that could write."""
    is_read_only: bool = False
    """The current or next incarnation is read-only, because the data directory is not writable."""

    @property
    def is_settled(self) -> bool:
        """Whether the child is ready or was given up, so that there is nothing to wait for."""
        return self.is_ready or bool(self.give_up_reason)

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)


MakeBoot = Callable[[ChildSpec, int, str, int], ActorBoot]
"""(spec, incarnation, stop points, ActorBoot.read_only_ms) -> boot message."""


class IncarnationSource(Protocol):
    """Source of incarnation numbers (identity.EngineIdentity)."""

    def allocate_incarnation(self) -> int:
        """Return a number whose use is durable; raises DiskError."""

    def allocate_unrecorded(self) -> int:
        """Return a number without a durable record, for an incarnation that writes no data."""


class Children:
    """All children. The caller polls `pidfds` and calls `reap` and `poll`; both return the changes."""

    def __init__(
        self,
        tree: Tree,
        *,
        board: Board,
        numbers: IncarnationSource,
        make_boot: MakeBoot,
        environ: Mapping[str, str],
        liveness_fd: int,
        fork_server: ForkServer,
        clock: Clock,
        test_stop_points: str = "",
        environ_by_kind: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`environ` and `liveness_fd` apply to every child, `environ_by_kind` to all children of one kind.

        `liveness_fd` is the descriptor of the liveness lock (run_dir.open_liveness_lock).
        """
        self.states: tuple[ChildState, ...] = tuple(
            ChildState(spec, board.process(spec.slot)) for spec in tree
        )
        self._numbers = numbers
        self._make_boot = make_boot
        self._environ = environ
        self._liveness_fd = liveness_fd
        self.fork_server = fork_server
        self._environ_by_kind = environ_by_kind or {}
        self._clock = clock
        self._test_stop_points = test_stop_points
        self._is_stopping = False
        for child in self.states:
            child.slot.set(ProcessField.KIND, KINDS.index(child.spec.kind))
            child.slot.set(ProcessField.SHARD, child.spec.shard + 1)

    # -- queries --------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[ChildState]:
        """Return the children of one kind."""
        return [child for child in self.states if child.spec.kind == kind]

    def has_process(self, pid: int) -> bool:
        """Return True if a living child has this pid."""
        return any(child.process is not None and child.process.pid == pid for child in self.states)

    def pidfds(self) -> dict[int, ChildState]:
        """Return pidfd -> child. A pidfd becomes readable when its child dies."""
        return {child.process.pidfd: child for child in self.states if child.process is not None}

    def next_deadline_ns(self) -> int | None:
        """Return the monotonic time (ns) of the next start; None if none is due."""
        due = (None if self._may_defer_start(child) else child.start_at_ns for child in self.states)
        return min((at_ns for at_ns in due if at_ns is not None), default=None)

    def _may_defer_start(self, child: ChildState) -> bool:
        """Return whether a start should wait for the fork server.

        A first start is faster with the imports of the fork server. A successor starts at once: clients wait.
        """
        return self.fork_server.is_starting and not child.starts

    def is_any_starting(self) -> bool:
        """Return whether a running child is not READY yet."""
        return any(child.process is not None and not child.is_ready for child in self.states)

    # -- start and death ------------------------------------------------------------------------------

    def request_start(self, child: ChildState) -> None:
        """Request the first start of a child. The next `poll` performs it."""
        child.start_at_ns = self._clock.monotonic_ns()

    def poll(self) -> list[ChildChange]:
        """Start children that are due, detect children that became ready, and kill stuck ones."""
        now = self._clock.monotonic_ns()
        changes = []
        self.fork_server.poll()
        for child in self.states:
            is_due = child.start_at_ns is not None and child.start_at_ns <= now
            if is_due and not self._is_stopping and not self._may_defer_start(child):
                changes += self._spawn(child, now)
            if child.process is not None:
                changes += self._watch(child, now)
        return changes

    def reap(self, child: ChildState) -> list[ChildChange]:
        """Collect the exit status of a child whose pidfd is readable: its death is certain."""
        if child.process is None:
            return []
        has_booted = child.slot.get(ProcessField.PID) == child.process.pid
        was_ready = child.is_ready or child.slot.state == ProcessState.READY
        exit = ChildExit(child.process.reap(), was_ready, child.kill_reason, has_booted)
        child.process = None
        return self._handle_death(child, exit)

    def reap_orphans(self) -> None:
        """Reap orphaned processes that the supervisor inherited and that have ended.

        For a supervisor that is pid 1 of a container: the kernel makes every orphan there its child.
        """
        ours = {
            child.process.pid for child in self.states if child.process is not None
        } | self.fork_server.pids()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    return  # The loop reaps it through its pidfd. The other orphans follow in a later pass.
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _spawn(self, child: ChildState, now: int) -> list[ChildChange]:
        child.start_at_ns = None
        if child.starts:
            stop_points.hit("supervisor_before_respawn")
        child.starts += 1
        child.started_ns, child.is_ready, child.kill_reason = now, False, ""
        child.progress = ChildProgress(now)
        child.starvation.reset()
        try:
            child.incarnation = self._allocate_incarnation(child)
        except DiskError as e:
            # Without its own number no process may write. A full disk stops this child, not the engine.
            code = ExitCode.READ_ONLY if e.is_unwritable else ExitCode.DISK_FAILED
            return self._handle_death(child, ChildExit(code, was_ready=False, reason=f"not started: {e}"))
        child.slot.set(ProcessField.RESTARTS, child.restarts)
        child.slot.set(ProcessField.INCARNATION, child.incarnation)
        child.slot.set(ProcessField.READ_ONLY, int(child.is_read_only))
        child.slot.set(ProcessField.STATE, ProcessState.STARTING)
        # A test plan names the incarnations it applies to: the last successor must be able to recover.
        plan = stop_points.plan_of_incarnation(self._test_stop_points, child.starts)
        read_only_probe_ms = restart.read_only_probe_ms(child.read_only_starts) if child.is_read_only else 0
        boot = dump_boot(self._make_boot(child.spec, child.incarnation, plan, read_only_probe_ms))
        environ = {**self._environ, **self._environ_by_kind.get(child.spec.kind, {})}
        try:
            child.process = self.fork_server.fork(
                ForkRequest(kind=child.spec.kind, boot=boot, environ=environ)
            ) or spawn_process(actor_command(child.spec.kind, boot), environ, self._liveness_fd)
        except OSError as e:
            # No process, memory or descriptor. It counts as a death, with the usual limits.
            return self._handle_death(
                child, ChildExit(ExitCode.CRASH, was_ready=False, reason=f"not started: {e.strerror}")
            )
        log_event(log, logging.INFO, "child started", child=child.spec.name, pid=child.process.pid,
            child_incarnation=child.incarnation)  # fmt: skip
        return []

    def _allocate_incarnation(self, child: ChildState) -> int:
        """Return an incarnation number. Raises DiskError if the child may write and it cannot be durable."""
        try:
            return self._numbers.allocate_incarnation()
        except DiskError as e:
            writes_nothing = child.is_read_only or child.spec.kind in {GATEWAY, HTTP_GATEWAY, SCHEDULER}
            if not (writes_nothing and e.is_unwritable):
                raise
            return self._numbers.allocate_unrecorded()

    def _watch(self, child: ChildState, now: int) -> list[ChildChange]:
        slot, state = child.slot, child.slot.state
        facts = (
            state,
            *(
                slot.get(word)
                for word in (ProcessField.TURNS, ProcessField.PROGRESS, ProcessField.HEARTBEAT_NS)
            ),
        )
        child.progress.observe(facts, now)
        if not child.is_ready and state == ProcessState.READY:
            child.is_ready = True
            child.read_only_starts = child.read_only_starts if child.is_read_only else 0
            log_event(log, logging.INFO, "child ready", child=child.spec.name,
            child_incarnation=child.incarnation,
                after_ms=(now - child.started_ns) // 1_000_000)  # fmt: skip
            return [ChildChange(READY, child)]
        if not child.progress.is_stuck(state, child.spec.stuck_after_s):
            child.starvation.reset()
        elif not child.kill_reason and not self._is_stopping and not self._is_starved(child, state, now):
            self.kill(child, f"no progress for {child.progress.stalled_ns / restart.NS_PER_S:.1f} s")
        return []

    @staticmethod
    def _is_starved(child: ChildState, state: ProcessState, now: int) -> bool:
        """Return whether the child is starved of CPU. False after STARVED_FACTOR times its normal limit."""
        if child.process is None or child.progress.is_stuck(state, STARVED_FACTOR * child.spec.stuck_after_s):
            return False
        was_seen = child.starvation.has_waited_for_cpu
        is_starved = child.starvation.is_starved(sample_cpu(child.process.pid), now)
        if is_starved and not was_seen:
            log_event(log, logging.WARNING, "child is CPU-starved", child=child.spec.name,
                still_s=round(child.progress.stalled_ns / restart.NS_PER_S, 1))  # fmt: skip
        return is_starved

    def _handle_death(self, child: ChildState, exit: ChildExit) -> list[ChildChange]:
        now = self._clock.monotonic_ns()
        child.last_exit, child.is_ready = exit, False
        child.slot.set(ProcessField.STATE, ProcessState.STOPPED if exit.is_orderly else ProcessState.FAILED)
        child.slot.set(ProcessField.EXIT, exit.board_code)
        child.slot.set(ProcessField.EXIT_NS, now)
        level = logging.INFO if self._is_stopping and exit.is_orderly else logging.ERROR
        log_event(
            log,
            level,
            "child ended",
            child=child.spec.name,
            child_incarnation=child.incarnation,
            exit=str(exit),
        )
        if self._is_stopping:
            return [ChildChange(DOWN, child)]
        if exit.status == ExitCode.READ_ONLY or (child.is_read_only and exit.is_orderly):
            self._handle_read_only(child, exit, now)
            return [ChildChange(DOWN, child)]
        child.is_read_only = False
        child.history = child.history.with_death(child.spec, exit, now)
        decision = restart.decide(child.spec, child.history, exit, now)
        if isinstance(decision, GiveUp):
            child.give_up_reason = decision.reason
            child.slot.set(ProcessField.STATE, ProcessState.GIVEN_UP)
            log_event(log, logging.CRITICAL, "child given up", child=child.spec.name, reason=decision.reason)
            return [ChildChange(DOWN, child), ChildChange(GIVEN_UP, child)]
        child.start_at_ns = decision.until_ns if isinstance(decision, RestartAt) else now
        return [ChildChange(DOWN, child)]

    def _handle_read_only(self, child: ChildState, exit: ChildExit, now: int) -> None:
        """Handle a directory that became read-only or writable. The child did not fail: no death is counted.

        A shard restarts at once: read-only if the directory is not writable, otherwise normally. Other
        children wait, because they have nothing to do before the directory is writable.
        """
        child.is_read_only = exit.status == ExitCode.READ_ONLY and child.spec.kind == WAL_SHARD
        child.start_at_ns = now
        if child.is_read_only:
            child.read_only_starts += 1
            log_event(log, logging.CRITICAL, "read-only: data directory is not writable",
                child=child.spec.name, reason=exit.reason or "see the log of the child")  # fmt: skip
        elif exit.status == ExitCode.READ_ONLY:
            child.start_at_ns = now + RESTART_BACKOFF_MS_MAX * restart.NS_PER_MS

    # -- stop -----------------------------------------------------------------------------------------

    def kill(self, child: ChildState, reason: str) -> None:
        """Kill a child with SIGKILL. `reap` follows when its pidfd becomes readable."""
        if child.process is not None:
            child.kill_reason = reason
            log_event(
                log,
                logging.ERROR,
                "child killed",
                child=child.spec.name,
                pid=child.process.pid,
                reason=reason,
            )
            child.process.send_signal(signal.SIGKILL)

    def stop_restarting(self) -> None:
        """Restart no child from now on."""
        self._is_stopping = True
        self.fork_server.stop()
        for child in self.states:
            child.start_at_ns = None

    def signal_ready_children(self, number: signal.Signals) -> None:
        """Send a signal to every ready child. Other children may not handle it yet."""
        for child in self.states:
            if child.process is not None and child.is_ready:
                child.process.send_signal(number)

    def resident_bytes(self, child: ChildState) -> int:
        """Return the resident memory of a child in bytes; 0 if it is dead."""
        if child.process is None:
            return 0
        try:
            with open(f"/proc/{child.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0
