"""The engine in the simulated world: supervisor, children, and the messages between them.

The supervisor's own policy (ringlog/supervision/restart.py) starts, restarts and gives up children, under
incarnation numbers of its own identity file. A message is put into the inbox of a process. Messages to a dead
process are lost. An answer in transit may be lost when its sender dies.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chaos.world.disks import DiskFaults, ProcessDisk
from chaos.world.model import Model
from chaos.world.tasks import NS, Halted, Loop, Process, Signal
from ringlog.actors.wal_shard.core import Settings
from ringlog.config import ColdConfig, Config, DeliveryConfig, StorageConfig, WalConfig
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import (
    CorruptData,
    DiskError,
    ExitCode,
    InvariantViolation,
    NotReady,
    RequestTimeout,
    ShuttingDown,
    StartRefused,
    error_from_status,
)
from ringlog.runtime.process import exit_code_for
from ringlog.storage.disk import replace_file
from ringlog.storage.identity_file import ENGINE_FILE, encode_identity
from ringlog.storage.layout import META_DIR
from ringlog.supervision.identity import EngineIdentity
from ringlog.supervision.restart import ChildExit, DeathHistory, GiveUp, RestartAt, decide
from ringlog.supervision.tree import ChildSpec, build_tree
from ringlog.testing.disk import SimulatedDisk
from ringlog.testing.monitor_disk import Monitor
from tests.support.shard_world import DATA, ENGINE_ID, SimulatedBoardMarks, World

COLD = "/cold"
BOOT_S = (0.02, 0.2)
"""Range of the duration (s) of an interpreter's start."""
DRAIN_S = 10.0
RING_FRAMES_MAX = 64
STORY_EVENTS_MAX = 4_000


@dataclass(slots=True)
class Request:
    """A message in an inbox. `answer(message, attachment)` receives the reply, if there is one."""

    message: m.Message
    attachment: Any
    answer: Callable[[m.Message, Any], None]


@dataclass(eq=False, slots=True)
class Ring:
    """Frames of one client for one shard in shared memory. It survives both, but not the engine."""

    owner: str
    shard: int
    frames: deque[tuple[Any, bytes]] = field(default_factory=deque)
    """(the owner's id of the frame, the frame), from the tail on."""
    read: int = 0
    """Number of these frames that the present shard has read."""
    settled: list[tuple[Any, Any]] = field(default_factory=list)
    news: Signal | None = None
    is_abandoned: bool = False


@dataclass(eq=False)
class Child:
    """One place in the process tree, and its present process."""

    spec: ChildSpec
    process: Process | None = None
    history: DeathHistory = field(default_factory=DeathHistory)
    was_ready: bool = False
    inbox: deque[Request] = field(default_factory=deque)
    bell: Signal | None = None
    actor: Any = None


class Engine:
    """One data directory, the engine on it, and its faults."""

    def __init__(self, loop: Loop, rng: random.Random, model: Model, options: dict[str, Any]) -> None:
        self.loop, self.rng, self.model, self.options = loop, rng, model, options
        self.disk = SimulatedDisk(DATA, COLD)
        self.monitor = Monitor()
        self.disk_faults = DiskFaults(loop, rng)
        self.counts: Counter[str] = Counter()
        self.story: deque[tuple[int, str, str]] = deque(maxlen=STORY_EVENTS_MAX)
        self.config = Config(
            # No watches here, so schedulers would be idle; class `kills` runs them as real processes.
            delivery=DeliveryConfig(schedulers=0),
            wal=WalConfig(shards=options["shards"], file_bytes=1 << 20,
            flush_interval_ms=options["flush_ms"]),
            storage=StorageConfig(
                segment_bytes=options["segment_bytes"], own_segment_bytes=options["own_bytes"],
                segment_age_ms=options["age_ms"], reclaim_interval_s=1.0, reclaim_bytes_per_s=1 << 40,
                compression=options["compression"],
            ),
            cold=ColdConfig(dir=COLD if options["has_cold"] else "", hot_segments=options["hot"],
            interval_s=1.0),
        )  # fmt: skip
        self.base = World(
            self.disk, shards=options["shards"], file_bytes=options["file_bytes"],
            settings=Settings(flush_interval_ms=options["flush_ms"]), has_cold=options["has_cold"],
            clock=loop,  # type: ignore[arg-type]
        )  # fmt: skip
        self.children: dict[str, Child] = {}
        self.rings: list[Ring] = []
        self.generation = 0
        self.is_up = self.is_stopping = self.is_calm = False
        self.damage = ""
        self.makers: dict[str, Callable[[Engine, Child, Process], None]] = {}
        self.disk.make_dir(f"{DATA}/{META_DIR}")
        self.disk.sync_dir(DATA)
        replace_file(self.disk, f"{DATA}/{META_DIR}", ENGINE_FILE, encode_identity(ENGINE_ID.hex(), 1, ""))
        self._identity: EngineIdentity | None = None
        self._supervisor: Process | None = None
        self._to_start: deque[Child] = deque()
        self._orders = Signal(loop)
        self._left: tuple[bytes, dict[int, tuple[int, int]]] = (b"", {})
        """Boot id, and published mark of each shard on the board, when the last engine died."""

    def tell(self, topic: str, what: str) -> None:
        """Record an event for the report of a failure."""
        self.story.append((self.loop.now_ns, topic, what))

    # -- starting -------------------------------------------------------------------------------------

    def start(self, shards: int = 0) -> None:
        """Start the engine as an operator does, optionally with another number of shards."""
        if self.is_up:
            return
        if shards and shards != self.base.shards:
            self.counts["reshards"] += 1
        self.base.shards = shards or self.base.shards
        self.config = msgspec.structs.replace(
            self.config, wal=msgspec.structs.replace(self.config.wal, shards=self.base.shards)
        )
        self.generation += 1
        self.is_up, self.is_stopping = True, False
        self.counts["starts"] += 1
        self.tell("", f"start {self.generation} with {self.base.shards} shards")
        self._supervisor = Process(self.loop, "supervisor", "supervisor", 1 << 40 | self.generation)
        self._to_start.clear()
        self._orders = Signal(self.loop)
        self._left = (self.base.boot_id, {n: marks.published for n, marks in self.base.marks.items()})
        self.base.marks = {}
        self.base.runs.clear()
        self.base.published = {}
        self.children = {spec.name: Child(spec, bell=Signal(self.loop)) for spec in build_tree(self.config)}
        self.run_as(self._supervisor, self._begin, self._supervisor_ended)

    def _begin(self) -> None:
        supervisor = self._supervisor
        assert supervisor is not None
        disk = self.disk_for(supervisor)
        self._identity = EngineIdentity(disk, DATA)
        self.base.boot_incarnation = self._identity.record_start("/shm", len(self.children))
        boot_id, published = self._left
        if boot_id != self.base.boot_id or set(published) != set(range(self.base.shards)):
            published = {}
        self.base.marks = {n: SimulatedBoardMarks(published.get(n, (0, 0))) for n in range(self.base.shards)}
        for child in self.children.values():
            self._start_child(child)
        while True:
            # In sequence, because the supervisor has one thread.
            while self._to_start:
                self._start_child(self._to_start.popleft())
            self.loop.wait(self._orders, 3_600)

    def _start_child(self, child: Child) -> None:
        """Start a child from the supervisor's task. Its incarnation number is durable first."""
        assert self._identity is not None
        number = self._identity.allocate_incarnation()
        if number <= self.base.incarnation:
            raise GuaranteeBroken(
                f"incarnation {number} allocated after {self.base.incarnation}, must be greater"
            )
        self.base.incarnation = number
        process = Process(self.loop, child.spec.name, child.spec.kind, number)
        child.process, child.was_ready, child.actor = process, False, None
        self.arm(process)
        self.run_as(
            process, lambda: self.makers[child.spec.kind](self, child, process),
            lambda code: self._child_ended(child, process, code), self.rng.uniform(*BOOT_S),
        )  # fmt: skip

    def arm(self, process: Process) -> None:
        """Called for each new process. The simulation replaces it to inject faults."""

    def disk_for(self, process: Process) -> ProcessDisk:
        """Return the disk for a process."""
        return ProcessDisk(self.monitor.watch(self.disk, process.incarnation), process, self.disk_faults)

    def run_as(
        self, process: Process, run: Callable[[], None], ended: Callable[[int], None], delay_s: float = 0.0
    ) -> None:
        """Start a task whose end ends its process.

        An InvariantViolation or AssertionError ends the simulation.
        """

        def body() -> None:
            try:
                run()
                code = int(ExitCode.OK)
            except Halted:
                return
            except (InvariantViolation, AssertionError):
                raise
            except ShuttingDown:
                code = int(ExitCode.OK)
            except (DiskError, CorruptData, StartRefused, OSError) as e:
                code = int(exit_code_for(e, is_built=True))
                self.tell("", f"{process.name} ends: {e}")
                if isinstance(e, CorruptData):
                    raise GuaranteeBroken(
                        f"{process.name} finds damage, and nothing was damaged: {e} {e.detail}"
                    ) from e
            self.loop.urgent.append(lambda: self._end(process, code, ended))

        process.spawn(body, delay_s)

    def _end(self, process: Process, code: int, ended: Callable[[int], None]) -> None:
        if not process.is_dead:
            self.loop.kill(process)
            ended(code)

    # -- ending ---------------------------------------------------------------------------------------

    def kill_child(self, child: Child, why: str) -> None:
        """Kill a child, as with SIGKILL. Call it outside all tasks."""
        process = child.process
        if process is None or process.is_dead:
            return
        self.counts["deaths"] += 1
        self.tell("", f"{why}: {process.name} incarnation {process.incarnation}")
        self.loop.kill(process)
        self._child_ended(child, process, -9)

    def _child_ended(self, child: Child, process: Process, code: int) -> None:
        if child.process is not process:
            return
        if code > 0:
            self.counts["deaths"] += 1
            self.counts[f"exit {ExitCode(code).name.lower()}"] += 1
        self._forget(child)
        if not self.is_up or self.is_stopping or code == ExitCode.OK:
            return
        ended = ChildExit(code, child.was_ready)
        child.history = child.history.with_death(child.spec, ended, self.loop.now_ns)
        decision = decide(child.spec, child.history, ended, self.loop.now_ns)
        if isinstance(decision, GiveUp):
            self.counts["given up"] += 1
            self.tell("", f"{child.spec.name} is given up: {decision.reason}")
            # An operator restarts it later.
            self.loop.at(self.rng.uniform(0.2, 1.0), self._restart_by_hand(self.generation))
            return
        delay_ns = decision.until_ns - self.loop.now_ns if isinstance(decision, RestartAt) else 0
        generation = self.generation

        def again() -> None:
            if self.generation == generation and self.is_up:
                self._to_start.append(child)
                self._orders.set()

        self.loop.at(delay_ns / NS + 0.001, again)

    def _restart_by_hand(self, generation: int) -> Callable[[], None]:
        def act() -> None:
            if self.generation == generation and self.is_up:
                self.kill_all("an operator restarts what was given up")
                self.start()

        return act

    def _forget(self, child: Child) -> None:
        for ring in self.rings:
            if child.spec.shard == ring.shard:
                ring.read = 0
        if child.spec.kind == "wal_shard":
            self.base.runs.pop(child.spec.shard, None)
        for ring in self.rings:
            ring.is_abandoned |= child.process is not None and ring.owner == child.process.name
        child.process, child.actor = None, None
        child.inbox.clear()

    def _supervisor_ended(self, code: int) -> None:
        """Kill all children after their supervisor ended, and start again later."""
        self.counts["supervisor ended"] += 1
        self.tell("", f"supervisor ends with {code}")
        self.kill_all("orphaned")
        self.loop.at(0.3, self.start)

    def kill_all(self, why: str) -> None:
        """Kill every process of the engine, as with SIGKILL. Call it outside all tasks."""
        self.is_up = False
        self.tell("", why)
        for child in self.children.values():
            if child.process is not None:
                self.counts["deaths"] += 1
                self.loop.kill(child.process)
                self._forget(child)
        if self._supervisor is not None and not self._supervisor.is_dead:
            self.counts["deaths"] += 1
            self.loop.kill(self._supervisor)
        self.children = {}
        self.rings.clear()
        self.disk.process_kill()

    def stop(self, done: Callable[[], None]) -> None:
        """Stop in order: processes that accept work first, then shards drain.

        Calls `done` after all ended.
        """
        generation = self.generation
        if not self.is_up:
            done()
            return
        self.tell("", "orderly stop")
        self.is_stopping = True
        for child in self.children.values():
            if child.spec.kind == "wal_shard":
                if child.actor is not None:
                    child.actor.is_stopping = True
                    self.ring_bell(child.spec.shard)
            elif child.process is not None:
                self.loop.kill(child.process)
                self._forget(child)
        until_ns = self.loop.now_ns + round(DRAIN_S * NS)

        def look() -> None:
            if self.generation != generation or not self.is_up:
                done()
            elif self.loop.now_ns < until_ns and any(
                child.process is not None and child.was_ready for child in self.children.values()
            ):
                self.loop.at(0.02, look)
            else:
                self.kill_all("stopped")
                self.base.marks = {}  # the supervisor removes the board
                done()

        look()

    def power_loss(self, seed: int) -> None:
        """Simulate a power loss of the host and a new boot."""
        self.kill_all("power loss")
        self.model.power_losses += 1
        self.counts["power losses"] += 1
        self.disk.power_loss(seed)
        self.monitor.power_loss(self.disk.exists)
        self.base.reboot()

    # -- messages -------------------------------------------------------------------------------------

    def child(self, kind: str, shard: int = -1) -> Child | None:
        """Return the child of this kind and shard if it is ready, else None."""
        name = f"wal_shard-{shard:02d}" if kind == "wal_shard" else kind
        child = self.children.get(name)
        return child if child is not None and child.process is not None and child.was_ready else None

    def ring_bell(self, shard: int) -> None:
        """Wake up a shard after a push."""
        child = self.child("wal_shard", shard)
        if child is not None and child.bell is not None:
            child.bell.set()

    def post(self, child: Child, message: m.Message, attachment: Any, answer: Callable[..., None]) -> None:
        """Put a message into the inbox of a child."""
        child.inbox.append(Request(message, attachment, answer))
        assert child.bell is not None
        child.bell.set()

    def ask(
        self, child: Child | None, message: m.Message, attachment: Any = None, timeout_s: float = 10.0
    ) -> tuple[m.Message, Any]:
        """Send a request from a task and wait for the reply, as link.shard_requests does.

        Raises NotReady, RequestTimeout, or the error of the reply.
        """
        loop = self.loop
        loop.current().process.point()
        loop.pause(self.rng.expovariate(1 / self.options["delay_s"]))
        if child is None or child.process is None:
            raise NotReady("process not running", outcome="unknown")
        asked, news = child.process, Signal(loop)
        found: list[tuple[m.Message, Any]] = []

        def answer(reply: m.Message, attached: Any) -> None:
            found.append((reply, attached))
            news.set()

        self.post(child, message, attachment, answer)
        until_ns = loop.now_ns + round(timeout_s * NS)
        while not found:
            if asked.is_dead:
                raise NotReady("process exited before its reply arrived", outcome="unknown")
            if loop.now_ns >= until_ns:
                raise RequestTimeout("no answer", outcome="unknown")
            loop.wait(news, (until_ns - loop.now_ns) / NS, asked.ended)
        loop.pause(self.rng.expovariate(1 / self.options["delay_s"]))
        if asked.is_dead and self.rng.random() < 0.5:
            self.counts["answers lost"] += 1
            raise NotReady("process exited before its reply arrived", outcome="unknown")
        reply, attached = found[0]
        if isinstance(reply, m.ErrorReply):
            raise error_from_status(reply.status, reply.message, reply.detail)
        return reply, attached
