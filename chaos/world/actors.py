"""The engine's actors as processes of the simulated world: production cores in simulated surroundings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from chaos.rigs.storage import asked_by, reclaimer_numbers, reclaimer_of
from chaos.world.engine import COLD, Child, Engine
from chaos.world.tasks import NS, Process
from ringlog.actors.compactor.checkpoint import CheckpointContext, CheckpointTask
from ringlog.actors.compactor.schedule import CheckpointBacklog, CheckpointSchedule
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.actors.reclaimer import orphan_sweep, reclaim_round, segment_indexes, shard_client
from ringlog.actors.relocator.core import ColdReads, Fetch, Fetched, PartChanged
from ringlog.actors.relocator.mover import Mover
from ringlog.contract import ControlReceived, Reply, Tick
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import (
    ColdUnavailable,
    CorruptData,
    DiskError,
    InvariantViolation,
    RinglogError,
    ShuttingDown,
)
from ringlog.segment.layout import (
    CREATOR_COMPACTOR,
    CREATOR_SHIFT,
    NumberAllocator,
    parse_stem,
)
from ringlog.segment.segment import find_segments
from ringlog.storage.disk import Disk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.shard_world import DATA, ENGINE_ID

DAMAGE_WORDS = frozenset({"index not readable", "segments not rewritten"})


@contextmanager
def listening(engine: Engine) -> Iterator[None]:
    """Intercept the reclaimer's log events about damage.

    The reclaimer continues without a damaged segment, but no data is damaged in this world. The first such
    event is stored in `engine.damage`.
    """

    def hear(logger: Any, level: int, event: str, **facts: Any) -> None:
        reason = str(facts.get("reason", ""))
        if event in DAMAGE_WORDS and "call=" not in reason and not engine.damage:  # "call=": a disk error
            engine.damage = f"{event}: {reason}"

    modules: tuple[Any, ...] = (reclaim_round, orphan_sweep, segment_indexes, shard_client)
    said = modules[0].log_event
    for module in modules:
        module.log_event = hear
    try:
        yield
    finally:
        for module in modules:
            module.log_event = said


class SimulatedShardRequests:
    """Requests of compactor, reclaimer and relocator to shards."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, shard: int, message: m.Message, wanted: type[Any], *, attachment: Any = None) -> Any:
        """Send a request and return the reply, as link.shard_requests.ShardRequests.ask does."""
        copied = bytearray(attachment) if attachment is not None else None
        reply, attached = self._engine.ask(self._engine.child("wal_shard", shard), message, copied)
        assert isinstance(reply, wanted), reply
        return SimpleNamespace(
            message=reply, attachment=memoryview(attached if attached is not None else b"")
        )


# -- compactor -------------------------------------------------------------------------------------------


class CompactorActor:
    """Replaces actors/compactor/shell.py, without its sockets."""

    def __init__(self, engine: Engine, child: Child, process: Process) -> None:
        self.engine, self.process = engine, process
        disk, config, loop = engine.disk_for(process), engine.config, engine.loop
        self.schedule = CheckpointSchedule(
            engine.base.shards, file_bytes=engine.base.file_bytes, age_ms=config.storage.segment_age_ms,
            now_ns=loop.monotonic_ns(),
        )  # fmt: skip
        stems = map(parse_stem, find_segments(disk, DATA))
        numbers = [parsed[2] for parsed in stems if parsed is not None]
        numbers.append(CREATOR_COMPACTOR << CREATOR_SHIFT | process.incarnation << 24)
        self.place = CheckpointContext(
            disk=disk, data_dir=DATA, engine_id=ENGINE_ID, storage=config.storage, clock=loop,
            numbers=NumberAllocator(CREATOR_COMPACTOR, numbers), heartbeat=process.point,
        )  # fmt: skip
        self.tickets = 0
        child.actor, child.was_ready = self, True

    def run(self) -> None:
        """Poll the shards in turn, forever."""
        shards = [
            CompactorShardClient(SimulatedShardRequests(self.engine), number)
            for number in range(self.engine.base.shards)
        ]
        loop = self.engine.loop
        while True:
            number = self.schedule.next_shard(loop.now_ns)
            if number is None:
                loop.pause(min(0.2, max(0.001, (self.schedule.next_poll_ns() - loop.now_ns) / NS)))
            else:
                self._look_at(shards[number])

    def want(self) -> None:
        """Request checkpoints, as an operator or the reclaimer does."""
        self.tickets += 1
        self.schedule.request_checkpoints(self.tickets, self.engine.loop.now_ns)

    def _look_at(self, shard: CompactorShardClient) -> None:
        started_ns, counts = self.engine.loop.now_ns, self.engine.counts
        try:
            look = shard.fetch_plan_summary(roll=self.schedule.must_roll(shard.number, started_ns))
            waiting = CheckpointBacklog(tuple(each.stop - each.start for each in look.files), look.log_bytes)
            if not self.schedule.is_due(shard.number, waiting, started_ns):
                return
            made = CheckpointTask(self.place, shard, shard.fetch_plan()).run()
        except InvariantViolation:
            raise
        except CorruptData as e:
            raise GuaranteeBroken(
                f"the compactor reports damage, but no data was damaged: {e} {e.detail}"
            ) from e
        except RinglogError as e:
            counts["checkpoints failed"] += 1
            self.engine.tell("", f"checkpoint of shard {shard.number} failed: {e}")
            self.schedule.checkpoint_failed(shard.number, self.engine.loop.now_ns)
        else:
            counts["checkpoints"] += 1
            counts["segments"] += made.segments
            counts["log files unlinked"] += made.unlinked
            self.engine.tell(
                "", f"checkpoint of shard {shard.number}: snapshot {made.snapshot}, {made.segments} segments"
            )
            self.schedule.checkpoint_done(shard.number, self.engine.loop.now_ns)


def compactor(engine: Engine, child: Child, process: Process) -> None:
    """Run the compactor."""
    CompactorActor(engine, child, process).run()


# -- reclaimer -------------------------------------------------------------------------------------------


def reclaimer(engine: Engine, child: Child, process: Process) -> None:
    """Run the reclaimer: rounds, forever."""
    loop, settings, disk = engine.loop, engine.config.storage, engine.disk_for(process)
    store = _store(disk) if engine.config.cold.dir else None

    def want_checkpoint() -> None:
        known = engine.child("compactor")
        if known is not None:
            known.actor.want()

    def later(job: Any) -> bool:
        process.spawn(job)
        return True

    actor = reclaimer_of(
        disk, asked_by(SimulatedShardRequests(engine)), settings, reclaimer_numbers(process.incarnation),
        loop, SegmentCopies(disk, DATA, store), shards=engine.base.shards, later=later,
        want_checkpoint=want_checkpoint,
    )  # fmt: skip
    child.actor, child.was_ready = actor, True
    before: Counter[str] = Counter()
    while True:
        loop.pause(settings.reclaim_interval_s)
        try:
            actor.run_round()
        except ShuttingDown:
            engine.counts["rounds cut short"] += 1
        if engine.damage:
            raise GuaranteeBroken(f"the reclaimer reports damage, but no data was damaged: {engine.damage}")
        now = Counter(dropped=actor.counts.dropped, rewritten=actor.counts.rewritten)
        engine.counts["segments dropped"] += now["dropped"] - before["dropped"]
        engine.counts["segments rewritten"] += now["rewritten"] - before["rewritten"]
        before = now


# -- relocator -------------------------------------------------------------------------------------------


def _store(disk: Disk) -> OwnedStore:
    return OwnedStore(LocalStore(disk, COLD), disk, DATA, ENGINE_ID.hex())


class RelocatorActor:
    """Replaces actors/relocator/shell.py, without its sockets.

    One task moves segments, one task serves each fetch, and one task replies.
    """

    def __init__(self, engine: Engine, child: Child, process: Process) -> None:
        self.engine, self.child, self.process = engine, child, process
        self.disk, cold, loop = engine.disk_for(process), engine.config.cold, engine.loop
        self.store = _store(self.disk)
        self.reads = ColdReads(cold.cache_bytes, round(cold.timeout_s * 1e9))
        asking = SimulatedShardRequests(engine)
        self.mover = Mover(
            SegmentCopies(self.disk, DATA, self.store), cold, shards=engine.base.shards,
            ask=lambda shard, message, wanted: asking.ask(shard, message, wanted).message, clock=loop,
            jitter=engine.rng.random, on_change=self._changed,
        )  # fmt: skip
        self.waiting: dict[int, Any] = {}
        self.corr = 0
        child.actor, child.was_ready = self, True
        process.spawn(self._move)

    def _changed(self, path: str) -> None:
        self.reads.handle([PartChanged(path)])

    def run(self) -> None:
        """Serve cold reads, forever."""
        loop, bell = self.engine.loop, self.child.bell
        assert bell is not None
        while True:
            self._perform(self.reads.handle([Tick(0, loop.now_ns)]))
            while self.child.inbox:
                request = self.child.inbox.popleft()
                self.corr += 1
                self.waiting[self.corr] = request.answer
                assert isinstance(request.message, m.ColdRead)
                self._perform(self.reads.handle([ControlReceived(b"", self.corr, request.message)]))
            loop.wait(bell, 0.5)

    def _perform(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.waiting.pop(effect.corr)(effect.message, effect.attachment)
            else:
                self.process.spawn(partial(self._fetch, effect))

    def _fetch(self, fetch: Fetch) -> None:
        data, error = None, None
        try:
            data = self.store.get_range(fetch.path, fetch.start, fetch.stop)
        except RinglogError as e:
            error = e
        self.engine.counts["cold fetches"] += 1
        self._perform(self.reads.handle([Fetched(fetch.ticket, data, error)]))

    def _move(self) -> None:
        engine, loop = self.engine, self.engine.loop
        moved = 0
        while True:
            loop.pause(engine.config.cold.interval_s)
            try:
                if self.store.claim() == ENGINE_ID.hex():
                    self.mover.run_round()
            except (ColdUnavailable, DiskError, ShuttingDown) as e:
                engine.tell("", f"relocator: {e}")
            except CorruptData as e:
                raise GuaranteeBroken(
                    f"the relocator reports damage, but no data was damaged: {e} {e.detail}"
                ) from e
            if self.mover.backoff.quarantined:
                raise GuaranteeBroken(
                    f"the relocator finds damage in {sorted(self.mover.backoff.quarantined)}"
                )
            engine.counts["segments moved"] += self.mover.counts.moved - moved
            moved = self.mover.counts.moved


def relocator(engine: Engine, child: Child, process: Process) -> None:
    """Run the relocator."""
    RelocatorActor(engine, child, process).run()
