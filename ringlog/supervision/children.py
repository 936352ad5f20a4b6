"""Keeping the children alive: start, watch, replace, stop. Decisions are restart.decide's; here they happen.

A successor starts only after its predecessor's pidfd became readable: the fence is death (RD-6). Each
start takes a new incarnation number, durable before the process exists. Between two incarnations the
process slot on the board belongs to the supervisor, which says there that nobody serves.
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
from ringlog.board.board import Board, P, ProcessSlot, ProcessState
from ringlog.board.processes import GATEWAY, KINDS, SCHEDULER, WAL_SHARD
from ringlog.clock import Clock
from ringlog.envelope.boot import ActorBoot, ForkOrder, dump_boot
from ringlog.errors import DiskError, ExitCode
from ringlog.limits import RESTART_BACKOFF_MS_MAX
from ringlog.logs import say
from ringlog.supervision import restart
from ringlog.supervision.forkserver import ForkServer
from ringlog.supervision.progress import Progress
from ringlog.supervision.restart import Exit, GiveUp, History, Wait
from ringlog.supervision.spawn import Child, actor_command, spawn
from ringlog.supervision.starvation import STARVED_PATIENCE, Hunger, sight_of
from ringlog.supervision.tree import ChildSpec, Tree

log = logging.getLogger("ringlog.supervision")

READY = "ready"
DOWN = "down"
GIVEN_UP = "given_up"


class Change(NamedTuple):
    """Something happened to a child: it became READY, went DOWN, or was GIVEN_UP (after its DOWN)."""

    what: str
    ward: Ward


@dataclass(slots=True)
class Ward:
    """One child of the tree through all its incarnations."""

    spec: ChildSpec
    slot: ProcessSlot
    child: Child | None = None
    incarnation: int = 0
    starts: int = 0
    history: History = field(default_factory=History)
    progress: Progress = field(default_factory=lambda: Progress(0))
    hunger: Hunger = field(default_factory=Hunger)
    is_ready: bool = False
    start_at_ns: int | None = None
    """A start that is due at this monotonic time; None when none is wanted."""
    started_ns: int = 0
    kill_reason: str = ""
    given_up: str = ""
    """Why the child was given up; empty while it is kept alive."""
    last_exit: Exit | None = None
    latches: int = 0
    """Lives in a row that served reads alone, none of them followed by one that could write."""
    is_latched: bool = False
    """Its next life, or the one that runs, serves reads alone: the directory takes no writes."""

    @property
    def is_settled(self) -> bool:
        """It serves, or it was given up: nothing more is to be waited for."""
        return self.is_ready or bool(self.given_up)

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)


MakeBoot = Callable[[ChildSpec, int, str, int], ActorBoot]
"""(spec, incarnation, stop points, ActorBoot.read_only_ms) -> boot message."""


class Numbers(Protocol):
    """Where incarnation numbers come from (identity.Identity)."""

    def take(self) -> int:
        """A number, durable as taken; raises DiskError."""

    def take_unrecorded(self) -> int:
        """A number for a life that writes nothing."""


class Children:
    """All children. The caller polls `pidfds`, and calls `reap` and `look`; both return what changed."""

    def __init__(
        self,
        tree: Tree,
        *,
        board: Board,
        numbers: Numbers,
        make_boot: MakeBoot,
        environ: Mapping[str, str],
        life_line: int,
        forks: ForkServer,
        clock: Clock,
        test_stop_points: str = "",
        more_environ: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`environ` and `life_line` are every child's; `more_environ` is what a kind of them gets besides."""
        self.wards = tuple(Ward(spec, board.process(spec.slot)) for spec in tree)
        self._numbers = numbers
        self._make_boot = make_boot
        self._environ = environ
        self._life_line = life_line
        self.forks = forks
        self._more_environ = more_environ or {}
        self._clock = clock
        self._test_stop_points = test_stop_points
        self._is_stopping = False
        for ward in self.wards:
            ward.slot.set(P.KIND, KINDS.index(ward.spec.kind))
            ward.slot.set(P.SHARD, ward.spec.shard + 1)

    # -- looking --------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[Ward]:
        """The children of one kind."""
        return [ward for ward in self.wards if ward.spec.kind == kind]

    def pidfds(self) -> dict[int, Ward]:
        """Descriptors that become readable when a child dies."""
        return {ward.child.pidfd: ward for ward in self.wards if ward.child is not None}

    def next_deadline_ns(self) -> int | None:
        """When the next start is due."""
        due = (None if self._may_wait(ward) else ward.start_at_ns for ward in self.wards)
        return min((at_ns for at_ns in due if at_ns is not None), default=None)

    def _may_wait(self, ward: Ward) -> bool:
        """A first start is sooner done when what it imports is there. For a successor somebody waits."""
        return self.forks.is_coming and not ward.starts

    def is_any_coming(self) -> bool:
        """True while a started child is not READY yet."""
        return any(ward.child is not None and not ward.is_ready for ward in self.wards)

    # -- life -----------------------------------------------------------------------------------------

    def start(self, ward: Ward) -> None:
        """Ask for the first start of a child; it happens in the next `look`."""
        ward.start_at_ns = self._clock.monotonic_ns()

    def look(self) -> list[Change]:
        """Start what is due, see who became ready, kill who is stuck."""
        now = self._clock.monotonic_ns()
        changes = []
        self.forks.look()
        for ward in self.wards:
            is_due = ward.start_at_ns is not None and ward.start_at_ns <= now
            if is_due and not self._is_stopping and not self._may_wait(ward):
                changes += self._spawn(ward, now)
            if ward.child is not None:
                changes += self._watch(ward, now)
        return changes

    def reap(self, ward: Ward) -> list[Change]:
        """Take note that a child's pidfd is readable: it is dead for certain."""
        if ward.child is None:
            return []
        has_booted = ward.slot.get(P.PID) == ward.child.pid
        was_ready = ward.is_ready or ward.slot.state == ProcessState.READY
        exit = Exit(ward.child.reap(), was_ready, ward.kill_reason, has_booted)
        ward.child = None
        return self._died(ward, exit)

    def reap_strangers(self) -> None:
        """Collect processes that became our children when their parents ended and that have ended as well.

        For the first process of a container, which is the parent of every orphan there.
        """
        ours = {ward.child.pid for ward in self.wards if ward.child is not None} | self.forks.pids()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    return  # It is reaped in its turn, and the others in a later one.
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _spawn(self, ward: Ward, now: int) -> list[Change]:
        ward.start_at_ns = None
        if ward.starts:
            stop_points.hit("supervisor_before_respawn")
        ward.starts += 1
        ward.started_ns, ward.is_ready, ward.kill_reason = now, False, ""
        ward.progress = Progress(now)
        ward.hunger.fed()
        try:
            ward.incarnation = self._number_for(ward)
        except DiskError as e:
            # Without a number of its own nobody may write. A full disk costs this child, not the engine.
            code = ExitCode.READ_ONLY if e.is_unwritable else ExitCode.DISK_FAILED
            return self._died(ward, Exit(code, was_ready=False, why=f"not started: {e}"))
        ward.slot.set(P.RESTARTS, ward.restarts)
        ward.slot.set(P.INCARNATION, ward.incarnation)
        ward.slot.set(P.READ_ONLY, int(ward.is_latched))
        ward.slot.set(P.STATE, ProcessState.STARTING)
        # A plan for a test names the lives it is for: the last successor must be able to recover.
        plan = stop_points.of_life(self._test_stop_points, ward.starts)
        look_ms = restart.look_ms(ward.latches) if ward.is_latched else 0
        boot = dump_boot(self._make_boot(ward.spec, ward.incarnation, plan, look_ms))
        environ = {**self._environ, **self._more_environ.get(ward.spec.kind, {})}
        try:
            ward.child = self.forks.fork(ForkOrder(kind=ward.spec.kind, boot=boot, environ=environ)) or spawn(
                actor_command(ward.spec.kind, boot), environ, self._life_line
            )
        except OSError as e:
            # No process, no memory or no descriptor: an end like any other, with the same patience.
            return self._died(ward, Exit(ExitCode.CRASH, was_ready=False, why=f"not started: {e.strerror}"))
        say(log, logging.INFO, "child started", child=ward.spec.name, pid=ward.child.pid,
            child_incarnation=ward.incarnation)  # fmt: skip
        return []

    def _number_for(self, ward: Ward) -> int:
        """Raises DiskError for a child that may write, when no number can be made durable."""
        try:
            return self._numbers.take()
        except DiskError as e:
            writes_nothing = ward.is_latched or ward.spec.kind in {GATEWAY, SCHEDULER}
            if not (writes_nothing and e.is_unwritable):
                raise
            return self._numbers.take_unrecorded()

    def _watch(self, ward: Ward, now: int) -> list[Change]:
        slot, state = ward.slot, ward.slot.state
        facts = (state, *(slot.get(word) for word in (P.TURNS, P.PROGRESS, P.HEARTBEAT_NS)))
        ward.progress.look(facts, now)
        if not ward.is_ready and state == ProcessState.READY:
            ward.is_ready = True
            ward.latches = ward.latches if ward.is_latched else 0
            say(log, logging.INFO, "child ready", child=ward.spec.name, child_incarnation=ward.incarnation,
                after_ms=(now - ward.started_ns) // 1_000_000)  # fmt: skip
            return [Change(READY, ward)]
        if not ward.progress.is_stuck(state, ward.spec.stuck_after_s):
            ward.hunger.fed()
        elif not ward.kill_reason and not self._is_stopping and not self._is_starved(ward, state, now):
            self.kill(ward, f"no progress for {ward.progress.still_ns / restart.NS_PER_S:.1f} s")
        return []

    @staticmethod
    def _is_starved(ward: Ward, state: ProcessState, now: int) -> bool:
        """It stands still because it gets no processor, and not for too long."""
        if ward.child is None or ward.progress.is_stuck(state, STARVED_PATIENCE * ward.spec.stuck_after_s):
            return False
        was_seen = ward.hunger.is_seen
        is_starved = ward.hunger.is_starved(sight_of(ward.child.pid), now)
        if is_starved and not was_seen:
            say(log, logging.WARNING, "child gets no processor", child=ward.spec.name,
                still_s=round(ward.progress.still_ns / restart.NS_PER_S, 1))  # fmt: skip
        return is_starved

    def _died(self, ward: Ward, exit: Exit) -> list[Change]:
        now = self._clock.monotonic_ns()
        ward.last_exit, ward.is_ready = exit, False
        ward.slot.set(P.STATE, ProcessState.STOPPED if exit.is_orderly else ProcessState.FAILED)
        ward.slot.set(P.EXIT, exit.word)
        ward.slot.set(P.EXIT_NS, now)
        level = logging.INFO if self._is_stopping and exit.is_orderly else logging.ERROR
        say(
            log,
            level,
            "child ended",
            child=ward.spec.name,
            child_incarnation=ward.incarnation,
            exit=str(exit),
        )
        if self._is_stopping:
            return [Change(DOWN, ward)]
        if exit.status == ExitCode.READ_ONLY or (ward.is_latched and exit.is_orderly):
            self._latch(ward, exit, now)
            return [Change(DOWN, ward)]
        ward.is_latched = False
        ward.history = ward.history.after(ward.spec, exit, now)
        decision = restart.decide(ward.spec, ward.history, exit, now)
        if isinstance(decision, GiveUp):
            ward.given_up = decision.reason
            ward.slot.set(P.STATE, ProcessState.GIVEN_UP)
            say(log, logging.CRITICAL, "child given up", child=ward.spec.name, reason=decision.reason)
            return [Change(DOWN, ward), Change(GIVEN_UP, ward)]
        ward.start_at_ns = decision.until_ns if isinstance(decision, Wait) else now
        return [Change(DOWN, ward)]

    def _latch(self, ward: Ward, exit: Exit, now: int) -> None:
        """The directory takes no writes, or does again: no fault of the child, so it costs it no patience.

        A shard comes back at once, to serve reads alone or, after that, to try. The others have no use
        before there is something to write.
        """
        ward.is_latched = exit.status == ExitCode.READ_ONLY and ward.spec.kind == WAL_SHARD
        ward.start_at_ns = now
        if ward.is_latched:
            ward.latches += 1
            say(log, logging.CRITICAL, "serves reads alone: its directory takes no writes",
                child=ward.spec.name, reason=exit.why or "see its log")  # fmt: skip
        elif exit.status == ExitCode.READ_ONLY:
            ward.start_at_ns = now + RESTART_BACKOFF_MS_MAX * restart.NS_PER_MS

    # -- ends -----------------------------------------------------------------------------------------

    def kill(self, ward: Ward, reason: str) -> None:
        """End a child for certain; `reap` follows when its pidfd says so."""
        if ward.child is not None:
            ward.kill_reason = reason
            say(log, logging.ERROR, "child killed", child=ward.spec.name, pid=ward.child.pid, reason=reason)
            ward.child.send(signal.SIGKILL)

    def stop_restarting(self) -> None:
        """From now on the dead stay dead."""
        self._is_stopping = True
        self.forks.stop()
        for ward in self.wards:
            ward.start_at_ns = None

    def send_ready(self, number: signal.Signals) -> None:
        """Pass a signal on to every child that serves: the others may not handle it yet."""
        for ward in self.wards:
            if ward.child is not None and ward.is_ready:
                ward.child.send(number)

    def resident_bytes(self, ward: Ward) -> int:
        """Memory a child has in use; 0 when it is dead."""
        if ward.child is None:
            return 0
        try:
            with open(f"/proc/{ward.child.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0
