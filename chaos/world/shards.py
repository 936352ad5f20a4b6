"""A shard as a process of the simulated world: production core, recovery and log writer."""

from __future__ import annotations

from typing import Any

from chaos.world.engine import RING_FRAMES_MAX, Child, Engine, Ring
from chaos.world.tasks import NS, Process
from ringlog.actors.wal_shard import events as ev
from ringlog.contract import DrainRequested, Reply
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import Refused
from ringlog.frame.settle_entry import FLAG_DEDUPED, FLAGS_SHIFT, S_COUNT_STATUS, S_TOPIC
from ringlog.types import Durability
from tests.support.shard_world import ShardRun

REQUESTS_PER_TURN = 16
IDLE_S = 1.0
TURNS_APART, TURN_S = 50, 1e-4
"""Every TURNS_APART busy passes of the loop take TURN_S seconds. Without this, a shard that spins would stop
the virtual time."""


class ShardActor:
    """One incarnation of a shard. It reads rings and inbox, and writes settlements and replies."""

    def __init__(self, engine: Engine, child: Child, process: Process) -> None:
        self.engine, self.child, self.process = engine, child, process
        self.shard = child.spec.shard
        self.is_stopping = self._is_told = False
        self.turns = 0
        self._corr = 0
        self._answers: dict[int, Any] = {}
        self._sources: dict[int, Ring] = {}
        self._group_stop = 0
        self._flush_at_ns = self._file_at_ns = 0
        engine.base.disk_of = lambda _: engine.disk_for(process)
        self.run_ = _Run(self, process.incarnation)

    def live(self) -> None:
        """Recover, serve until a stop is requested, then drain."""
        engine, run = self.engine, self.run_
        run.recover()
        run.has_slow_files = run.has_slow_flushes = True
        engine.base.runs[self.shard] = run
        self.child.was_ready = True
        engine.tell("", f"{self.process.name} incarnation {self.process.incarnation} serves")
        while run.stopped is None:
            if not self.turn():
                self._sleep()
            elif self.turns % TURNS_APART == 0:
                self.engine.loop.pause(TURN_S)
        self._close()

    def watch(self, effect: Any) -> None:
        """Check an effect immediately after it: no ack may precede its write or sync.

        The process may die here.
        """
        kind = type(effect)
        if kind is ev.WriteBatch:
            self._group_stop = effect.offset + effect.length
        elif kind is ev.OpenFile:
            self._group_stop = 0
        elif kind is ev.Settle:
            self._check_settled(effect.entries)
        self.process.point()

    def _check_settled(self, entries: Any) -> None:
        """Check that acks follow the write of their frame, and acks of class `fsync` a sync of its file."""
        run, path = self.run_, self.run_.writer.path
        for entry in entries:
            status = int(entry[S_COUNT_STATUS])
            is_repeat = status >> FLAGS_SHIFT & FLAG_DEDUPED
            if status >> 32 & 0xFFFF or is_repeat or not self._group_stop:
                continue
            topic = run.core.directory.by_id.get(int(entry[S_TOPIC]))
            if topic is None or topic.config.durability is Durability.EPHEMERAL:
                continue
            self.engine.monitor.require_written(path, self._group_stop)
            if topic.config.durability is Durability.FSYNC:
                self.engine.monitor.require_durable(path, self._group_stop)

    # -- one pass of the loop -------------------------------------------------------------------------

    def turn(self) -> bool:
        """Process the pending input; return whether there was any."""
        run, loop = self.run_, self.engine.loop
        self.turns += 1
        busy = self._do_slow_things()
        events: list[Any] = []
        is_low = self.engine.disk_faults.is_full and self.engine.options["says_low"]
        run.core.requests.appends.disk_missing_bytes = 4_096 if is_low else 0
        if run.core.wants_intake:
            events += self._drain_rings()
            events += self._requests()
        if self.is_stopping and not events and not self._is_told:
            self._is_told = True
            events.append(DrainRequested())
        deadline = run.core.next_deadline_ns()
        if events or (deadline is not None and loop.now_ns >= deadline):
            run.step(*events)
            busy = True
        return busy

    def _do_slow_things(self) -> bool:
        """Complete background syncs and file creations after a random delay; return whether one completed."""
        run, loop, rng = self.run_, self.engine.loop, self.engine.rng
        busy = False
        if run._flushing is not None:
            self._flush_at_ns = self._flush_at_ns or loop.now_ns + round(rng.expovariate(200) * NS)
            if loop.now_ns >= self._flush_at_ns:
                self._flush_at_ns = 0
                run.finish_flush()
                busy = True
        if run._wanted is not None:
            self._file_at_ns = self._file_at_ns or loop.now_ns + round(rng.expovariate(100) * NS)
            if loop.now_ns >= self._file_at_ns:
                self._file_at_ns = 0
                run.make_file()
                busy = True
        return busy

    def _drain_rings(self) -> list[Any]:
        found: list[Any] = []
        rings = [ring for ring in self.engine.rings if ring.shard == self.shard]
        self.engine.rng.shuffle(rings)
        for ring in rings:
            waiting = list(ring.frames)[ring.read : ring.read + RING_FRAMES_MAX]
            if not waiting:
                if ring.is_abandoned and not ring.frames:
                    self.engine.rings.remove(ring)
                continue
            source = next((n for n, each in self._sources.items() if each is ring), 0)
            if not source:
                source = len(self._sources) + 1
                self._sources[source] = ring
            ring.read += len(waiting)
            found.append(self.run_.frames(source, *(bytearray(frame) for _, frame in waiting)))
        return found

    def _requests(self) -> list[Any]:
        found: list[Any] = []
        while self.child.inbox and len(found) < REQUESTS_PER_TURN:
            request = self.child.inbox.popleft()
            self._corr += 1
            try:
                event = self.run_.request(self._corr, request.message, request.attachment)
            except Refused as e:
                request.answer(m.ErrorReply(int(e.status), e.message, e.detail), None)
                continue
            self._answers[self._corr] = request.answer
            found.append(event)
        return found

    def settle(self, effect: ev.Settle) -> None:
        """Write settlements into the ring immediately, because the ring survives the shard."""
        ring, entries = self._sources[effect.source], effect.entries
        if len(entries) > ring.read:
            raise GuaranteeBroken(f"{len(entries)} frames are settled of {ring.read} that were taken")
        for entry in entries:
            ring.settled.append((ring.frames.popleft()[0], entry))
        ring.read -= len(entries)
        if ring.news is not None:
            ring.news.set()

    def reply(self, effect: Reply) -> None:
        """Answer a request. Raises GuaranteeBroken if it is answered twice."""
        if effect.corr not in self._answers:
            raise GuaranteeBroken(f"request {effect.corr} is answered twice: {effect.message}")
        self._answers.pop(effect.corr)(effect.message, effect.attachment)

    def _sleep(self) -> None:
        run, loop = self.run_, self.engine.loop
        wait_ns = round(IDLE_S * NS)
        times = [run.core.next_deadline_ns(), self._flush_at_ns or None, self._file_at_ns or None]
        for at_ns in times:
            if at_ns is not None:
                wait_ns = min(wait_ns, max(at_ns - loop.now_ns, 1_000))
        assert self.child.bell is not None
        loop.wait(self.child.bell, wait_ns / NS)

    def _close(self) -> None:
        run = self.run_
        if run._prepared is not None:
            run.writer.discard(run._prepared)
        run.writer.close(truncate=True)
        run.disk.sync_dir(run.directory)
        self.engine.counts["orderly stops"] += 1


class _Run(ShardRun):
    """A ShardRun that passes settlements and replies on immediately."""

    def __init__(self, actor: ShardActor, incarnation: int) -> None:
        self._actor = actor
        super().__init__(actor.engine.base, actor.shard, incarnation)

    def _settle(self, effect: ev.Settle) -> None:
        self._actor.settle(effect)

    def _reply(self, effect: Reply) -> None:
        self._actor.reply(effect)


def wal_shard(engine: Engine, child: Child, process: Process) -> None:
    """Run a shard."""
    actor = ShardActor(engine, child, process)
    child.actor = actor
    actor.live()


def watch(engine: Engine, shard: int, effect: Any) -> None:
    """Pass an effect to its shard's actor. Used as World.watch."""
    child = engine.children.get(f"wal_shard-{shard:02d}")
    if child is not None and isinstance(child.actor, ShardActor):
        child.actor.watch(effect)
