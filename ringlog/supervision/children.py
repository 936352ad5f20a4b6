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
from ringlog.board.processes import GATEWAY, KINDS, SCHEDULER, WAL_SHARD
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

log = logging.getLogger("ringlog.supervision")

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
        life_line: int,
        forks: ForkServer,
        clock: Clock,
        test_stop_points: str = "",
        more_environ: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`environ` and `life_line` apply to every child, `more_environ` to all children of one kind.

        `life_line` is the descriptor of the liveness lock (run_dir.open_liveness_lock).
        """
        self.states = tuple(ChildState(spec, board.process(spec.slot)) for spec in tree)
        self._numbers = numbers
        self._make_boot = make_boot
        self._environ = environ
        self._liveness_fd = life_line
        self.fork_server = forks
        self._more_environ = more_environ or {}
        self._clock = clock
        self._test_stop_points = test_stop_points
        self._is_stopping = False
        for ward in self.states:
            ward.slot.set(ProcessField.KIND, KINDS.index(ward.spec.kind))
            ward.slot.set(ProcessField.SHARD, ward.spec.shard + 1)

    # -- queries --------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[ChildState]:
        """Return the children of one kind."""
        return [ward for ward in self.states if ward.spec.kind == kind]

    def pidfds(self) -> dict[int, ChildState]:
        """Return pidfd -> child. A pidfd becomes readable when its child dies."""
        return {ward.process.pidfd: ward for ward in self.states if ward.process is not None}

    def next_deadline_ns(self) -> int | None:
        """Return the monotonic time (ns) of the next start; None if none is due."""
        due = (None if self._may_defer_start(ward) else ward.start_at_ns for ward in self.states)
        return min((at_ns for at_ns in due if at_ns is not None), default=None)

    def _may_defer_start(self, ward: ChildState) -> bool:
        """Return whether a start should wait for the fork server.

        A first start is faster with the imports of the fork server. A successor starts at once: clients wait.
        """
        return self.fork_server.is_starting and not ward.starts

    def is_any_starting(self) -> bool:
        """Return whether a running child is not READY yet."""
        return any(ward.process is not None and not ward.is_ready for ward in self.states)

    # -- start and death ------------------------------------------------------------------------------

    def request_start(self, ward: ChildState) -> None:
        """Request the first start of a child. The next `poll` performs it."""
        ward.start_at_ns = self._clock.monotonic_ns()

    def poll(self) -> list[ChildChange]:
        """Start children that are due, detect children that became ready, and kill stuck ones."""
        now = self._clock.monotonic_ns()
        changes = []
        self.fork_server.poll()
        for ward in self.states:
            is_due = ward.start_at_ns is not None and ward.start_at_ns <= now
            if is_due and not self._is_stopping and not self._may_defer_start(ward):
                changes += self._spawn(ward, now)
            if ward.process is not None:
                changes += self._watch(ward, now)
        return changes

    def reap(self, ward: ChildState) -> list[ChildChange]:
        """Collect the exit status of a child whose pidfd is readable: its death is certain."""
        if ward.process is None:
            return []
        has_booted = ward.slot.get(ProcessField.PID) == ward.process.pid
        was_ready = ward.is_ready or ward.slot.state == ProcessState.READY
        exit = ChildExit(ward.process.reap(), was_ready, ward.kill_reason, has_booted)
        ward.process = None
        return self._died(ward, exit)

    def reap_orphans(self) -> None:
        """Reap orphaned processes that the supervisor inherited and that have ended.

        For a supervisor that is pid 1 of a container: the kernel makes every orphan there its child.
        """
        ours = {
            ward.process.pid for ward in self.states if ward.process is not None
        } | self.fork_server.pids()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    return  # The loop reaps it through its pidfd. The other orphans follow in a later pass.
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _spawn(self, ward: ChildState, now: int) -> list[ChildChange]:
        ward.start_at_ns = None
        if ward.starts:
            stop_points.hit("supervisor_before_respawn")
        ward.starts += 1
        ward.started_ns, ward.is_ready, ward.kill_reason = now, False, ""
        ward.progress = ChildProgress(now)
        ward.starvation.reset()
        try:
            ward.incarnation = self._allocate_incarnation(ward)
        except DiskError as e:
            # Without its own number no process may write. A full disk stops this child, not the engine.
            code = ExitCode.READ_ONLY if e.is_unwritable else ExitCode.DISK_FAILED
            return self._died(ward, ChildExit(code, was_ready=False, reason=f"not started: {e}"))
        ward.slot.set(ProcessField.RESTARTS, ward.restarts)
        ward.slot.set(ProcessField.INCARNATION, ward.incarnation)
        ward.slot.set(ProcessField.READ_ONLY, int(ward.is_read_only))
        ward.slot.set(ProcessField.STATE, ProcessState.STARTING)
        # A test plan names the incarnations it applies to: the last successor must be able to recover.
        plan = stop_points.plan_of_incarnation(self._test_stop_points, ward.starts)
        read_only_probe_ms = restart.read_only_probe_ms(ward.read_only_starts) if ward.is_read_only else 0
        boot = dump_boot(self._make_boot(ward.spec, ward.incarnation, plan, read_only_probe_ms))
        environ = {**self._environ, **self._more_environ.get(ward.spec.kind, {})}
        try:
            ward.process = self.fork_server.fork(
                ForkRequest(kind=ward.spec.kind, boot=boot, environ=environ)
            ) or spawn_process(actor_command(ward.spec.kind, boot), environ, self._liveness_fd)
        except OSError as e:
            # No process, memory or descriptor. It counts as a death, with the usual limits.
            return self._died(
                ward, ChildExit(ExitCode.CRASH, was_ready=False, reason=f"not started: {e.strerror}")
            )
        log_event(log, logging.INFO, "child started", child=ward.spec.name, pid=ward.process.pid,
            child_incarnation=ward.incarnation)  # fmt: skip
        return []

    def _allocate_incarnation(self, ward: ChildState) -> int:
        """Return an incarnation number. Raises DiskError if the child may write and it cannot be durable."""
        try:
            return self._numbers.allocate_incarnation()
        except DiskError as e:
            writes_nothing = ward.is_read_only or ward.spec.kind in {GATEWAY, SCHEDULER}
            if not (writes_nothing and e.is_unwritable):
                raise
            return self._numbers.allocate_unrecorded()

    def _watch(self, ward: ChildState, now: int) -> list[ChildChange]:
        slot, state = ward.slot, ward.slot.state
        facts = (
            state,
            *(
                slot.get(word)
                for word in (ProcessField.TURNS, ProcessField.PROGRESS, ProcessField.HEARTBEAT_NS)
            ),
        )
        ward.progress.observe(facts, now)
        if not ward.is_ready and state == ProcessState.READY:
            ward.is_ready = True
            ward.read_only_starts = ward.read_only_starts if ward.is_read_only else 0
            log_event(log, logging.INFO, "child ready", child=ward.spec.name,
            child_incarnation=ward.incarnation,
                after_ms=(now - ward.started_ns) // 1_000_000)  # fmt: skip
            return [ChildChange(READY, ward)]
        if not ward.progress.is_stuck(state, ward.spec.stuck_after_s):
            ward.starvation.reset()
        elif not ward.kill_reason and not self._is_stopping and not self._is_starved(ward, state, now):
            self.kill(ward, f"no progress for {ward.progress.stalled_ns / restart.NS_PER_S:.1f} s")
        return []

    @staticmethod
    def _is_starved(ward: ChildState, state: ProcessState, now: int) -> bool:
        """Return whether the child is starved of CPU. False after STARVED_FACTOR times its normal limit."""
        if ward.process is None or ward.progress.is_stuck(state, STARVED_FACTOR * ward.spec.stuck_after_s):
            return False
        was_seen = ward.starvation.has_waited_for_cpu
        is_starved = ward.starvation.is_starved(sample_cpu(ward.process.pid), now)
        if is_starved and not was_seen:
            log_event(log, logging.WARNING, "child is CPU-starved", child=ward.spec.name,
                still_s=round(ward.progress.stalled_ns / restart.NS_PER_S, 1))  # fmt: skip
        return is_starved

    def _died(self, ward: ChildState, exit: ChildExit) -> list[ChildChange]:
        now = self._clock.monotonic_ns()
        ward.last_exit, ward.is_ready = exit, False
        ward.slot.set(ProcessField.STATE, ProcessState.STOPPED if exit.is_orderly else ProcessState.FAILED)
        ward.slot.set(ProcessField.EXIT, exit.board_code)
        ward.slot.set(ProcessField.EXIT_NS, now)
        level = logging.INFO if self._is_stopping and exit.is_orderly else logging.ERROR
        log_event(
            log,
            level,
            "child ended",
            child=ward.spec.name,
            child_incarnation=ward.incarnation,
            exit=str(exit),
        )
        if self._is_stopping:
            return [ChildChange(DOWN, ward)]
        if exit.status == ExitCode.READ_ONLY or (ward.is_read_only and exit.is_orderly):
            self._handle_read_only(ward, exit, now)
            return [ChildChange(DOWN, ward)]
        ward.is_read_only = False
        ward.history = ward.history.with_death(ward.spec, exit, now)
        decision = restart.decide(ward.spec, ward.history, exit, now)
        if isinstance(decision, GiveUp):
            ward.give_up_reason = decision.reason
            ward.slot.set(ProcessField.STATE, ProcessState.GIVEN_UP)
            log_event(log, logging.CRITICAL, "child given up", child=ward.spec.name, reason=decision.reason)
            return [ChildChange(DOWN, ward), ChildChange(GIVEN_UP, ward)]
        ward.start_at_ns = decision.until_ns if isinstance(decision, RestartAt) else now
        return [ChildChange(DOWN, ward)]

    def _handle_read_only(self, ward: ChildState, exit: ChildExit, now: int) -> None:
        """Handle a directory that became read-only or writable. The child did not fail: no death is counted.

        A shard restarts at once: read-only if the directory is not writable, otherwise normally. Other
        children wait, because they have nothing to do before the directory is writable.
        """
        ward.is_read_only = exit.status == ExitCode.READ_ONLY and ward.spec.kind == WAL_SHARD
        ward.start_at_ns = now
        if ward.is_read_only:
            ward.read_only_starts += 1
            log_event(log, logging.CRITICAL, "read-only: data directory is not writable",
                child=ward.spec.name, reason=exit.reason or "see the log of the child")  # fmt: skip
        elif exit.status == ExitCode.READ_ONLY:
            ward.start_at_ns = now + RESTART_BACKOFF_MS_MAX * restart.NS_PER_MS

    # -- stop -----------------------------------------------------------------------------------------

    def kill(self, ward: ChildState, reason: str) -> None:
        """Kill a child with SIGKILL. `reap` follows when its pidfd becomes readable."""
        if ward.process is not None:
            ward.kill_reason = reason
            log_event(
                log, logging.ERROR, "child killed", child=ward.spec.name, pid=ward.process.pid, reason=reason
            )
            ward.process.send_signal(signal.SIGKILL)

    def stop_restarting(self) -> None:
        """Restart no child from now on."""
        self._is_stopping = True
        self.fork_server.stop()
        for ward in self.states:
            ward.start_at_ns = None

    def signal_ready_children(self, number: signal.Signals) -> None:
        """Send a signal to every ready child. Other children may not handle it yet."""
        for ward in self.states:
            if ward.process is not None and ward.is_ready:
                ward.process.send_signal(number)

    def resident_bytes(self, ward: ChildState) -> int:
        """Return the resident memory of a child in bytes; 0 if it is dead."""
        if ward.process is None:
            return 0
        try:
            with open(f"/proc/{ward.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0
