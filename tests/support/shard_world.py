"""Shards without processes: the same core, log writer and recovery, over any Disk, in one thread.

A World is one data directory and its environment: disk, clock, boot id, board marks. A ShardRun is one
incarnation of one shard in it. It performs effects in the same order as the shell. It has no rings, sockets
or threads, so a test can run thousands of incarnations per minute.

    world = World(SimulatedDisk("/data"))
    world.start()
    world.put_topic("orders", durability="fsync")
    world.append("orders", [b"a", b"b"])
    world.power_loss(seed=1)
    world.start()
    assert [payload for _, payload in world.records("orders")] == [b"a", b"b"]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.core import Settings, ShardCore
from ringlog.actors.wal_shard.phases import ShardPhase
from ringlog.actors.wal_shard.recovery.baseline import segment_tables
from ringlog.actors.wal_shard.recovery.log_files import StartFacts, make_stream
from ringlog.actors.wal_shard.recovery.recovery import Recovery
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult, clean_up
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.actors.wal_shard.retention.storage_query import answer_question
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import DiskError, FrameInvalid, InvariantViolation, Refused, error_from_status
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame, layout
from ringlog.frame.batch import scan_checked
from ringlog.frame.routed_frame import resolve_copies
from ringlog.frame.settle_entry import WORDS, SettleEntries, entry_error
from ringlog.frame.view import open_row
from ringlog.limits import KIB, WAL_HEADER_BYTES
from ringlog.placement import home_shard
from ringlog.storage.disk import Disk
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.layout import WAL_FLAG_PREV_ORDERLY, WalHeader, pack_file
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.wal import PreparedFile, ShardLogIdentity, WalWriter
from ringlog.testing.clock import ManualClock
from ringlog.testing.disk import SimulatedDisk
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

ENGINE_ID = bytes(range(16))
DATA = "/data"
SHM = "/shm"
VOLATILE_N_FIRST = 1 << 23
RING = 1
"""Number of the ring that `append` uses."""

EffectObserver = Callable[[int, Any], None]
"""Called with the shard's number and each effect, directly after the effect was performed."""


class ShardRunEnded(RuntimeError):
    """The run does not exist: the shard was killed or stopped."""


class NoReply(AssertionError):
    """A running shard received a request and sent no reply."""


@dataclass(slots=True)
class SimulatedBoardMarks:
    """Marks that the board keeps of one shard between its incarnations: (file id, offset) each."""

    published: tuple[int, int] = (0, 0)
    durable: tuple[int, int] = (0, 0)


class _WorldFiles:
    """Reads WAL files from the disk and volatile files from the memory of a run."""

    def __init__(self, disk: Disk, volatile: dict[int, bytearray]) -> None:
        self._disk = disk
        self._volatile = volatile

    def open_read(self, path: str) -> Any:
        if path.startswith(SHM):
            return self._volatile[int(path.rpartition("-")[2])]
        return self._disk.open_read(path)

    def read_into(self, fd: Any, buffer: Any, offset: int) -> int:
        if isinstance(fd, int):
            return self._disk.read_into(fd, buffer, offset)
        found = fd[offset : offset + len(buffer)]
        memoryview(buffer)[: len(found)] = found
        return len(found)

    def close(self, fd: Any) -> None:
        if isinstance(fd, int):
            self._disk.close(fd)

    def __getattr__(self, name: str) -> Any:
        """Forward all other calls to the disk, which stores the segments."""
        return getattr(self._disk, name)


class ShardRun:
    """One incarnation of one shard. `step` runs one pass of the loop; see `settled` and `replies`."""

    def __init__(self, world: World, shard: int, incarnation: int) -> None:
        self.world = world
        self.shard = shard
        self.incarnation = incarnation
        self.disk: Disk = world.disk_of(incarnation) if world.disk_of else world.disk
        if not world.time_base_us:
            world.time_base_us = world.clock.now_us() - world.clock.monotonic_ns() // 1_000
        identity = ShardIdentity(
            ENGINE_ID.hex(), shard, world.shards, incarnation, world.topics_max, world.time_base_us
        )
        self.core: ShardCore = ShardCore(identity, world.settings)
        self.directory: str = ""
        self.found: RecoveryResult = RecoveryResult()
        self.volatile: dict[int, bytearray] = {}
        self.writer: WalWriter = WalWriter(
            self.disk,
            ShardLogIdentity(
                DATA,
                f"{DATA}/wal/shard-{shard:02d}",
                shard,
                world.shards,
                incarnation,
                world.boot_id,
                ENGINE_ID,
            ),
            world.file_bytes,
        )
        files = _WorldFiles(self.disk, self.volatile)
        self._ledger = StoredRecordIndex(files, DATA, SHM, self._published)
        self.settled: list[tuple[int, SettleEntries, int]] = []
        self.replies: dict[int, m.Message] = {}
        self.attached: Any = None
        """Attachment of the last reply."""
        self.stopped: Stop | None = None
        self.has_slow_files = False
        """If set, files are created only by `make_file`."""
        self.has_slow_flushes = False
        """If set, background syncs finish only by `finish_flush`."""
        self._prepared: PreparedFile | None = None
        self._wanted: ev.PrepareFile | None = None
        self._flushing: ev.Flush | None = None
        self._volatile_n = itertools.count()
        self._positions: dict[int, int] = {}
        self._perform: dict[type, Callable[[Any], Any]] = {
            ev.WriteBatch: self._write_group,
            ev.WriteVolatile: self._write_volatile,
            ev.Sync: self._sync,
            ev.QueryStorage: self._query_storage,
            ev.Flush: self._flush,
            ev.PrepareFile: self._prepare,
            ev.OpenFile: self._open,
            ev.OpenVolatile: self._open_volatile,
            ev.PublishTopics: self._publish_topics,
            ev.PublishMarks: self._publish_marks,
            ev.RetireTopic: self._retire_topic,
            ev.Settle: self._settle,
            ev.BatchCommitted: lambda effect: None,
            Reply: self._reply,
            Stop: self._stop,
        }

    # -- lifetime -------------------------------------------------------------------------------------

    def recover(self, *, is_read_only: bool = False) -> None:
        """Recover as the shell does before it serves; raise the errors of recovery."""
        world, core = self.world, self.core
        if not is_read_only:
            self.directory = make_stream(self.disk, DATA, self.shard)
        marks = world.marks[self.shard]
        segments = core.checkpoint.segments
        replay = Replay(core.identity, core.directory, segments, is_lenient=world.is_lenient)
        start = StartFacts(
            shard=self.shard, shards=world.shards, incarnation=self.incarnation,
            boot_incarnation=world.boot_incarnation, boot_id=world.boot_id, engine_id=ENGINE_ID,
            durable_mark=marks.durable, published_mark=marks.published, has_cold=world.has_cold,
            is_read_only=is_read_only,
        )  # fmt: skip
        self.found = found = Recovery(self.disk, DATA, replay, start).run()
        core.log_files.update(found.log_files)
        if is_read_only:
            core.begin_read_only(
                ReadOnlyMode(self.shard, f"wal/shard-{self.shard:02d}", found.in_doubt), found.halts
            )
            marks.published = max(core.log_files.last_closed(), marks.published)
            self._publish_topics(ev.PublishTopics(core.directory.all_topics()))
            return
        core.checkpoint.restore(
            found.number, found.waiting, found.changed, found.listed, has_base=found.has_base
        )
        effects = core.begin(found.batch, found.prev, found.settled, found.damaged, found.halts)
        while core.state.phase is ShardPhase.RECOVERING:
            completions = self._do(effects)
            if len(completions) == 1:
                raise DiskError("cannot create the first WAL file", directory=self.directory)
            effects = core.handle(completions)
        clean_up(self.disk, DATA, self.found)
        self._publish_topics(ev.PublishTopics(core.directory.all_topics()))
        self._pump(effects)

    def step(self, *events: Any) -> None:
        """Run one pass of the loop: handle these events, and all follow-up events that need no wait."""
        if self._flushing is not None and not self.has_slow_flushes:
            events = (self._finish_flush(), *events)
        self._pump(self.core.handle([self._tick(), *events]))

    def _pump(self, effects: list[Any]) -> None:
        while effects:
            completions = self._do(effects)
            effects = self.core.handle(completions) if len(completions) > 1 else []

    def _do(self, effects: list[Any]) -> list[Any]:
        completions: list[Any] = [self._tick()]
        for effect in effects:
            completion = self._perform[type(effect)](effect)
            self.world.effect_observer(self.shard, effect)
            if completion is not None:
                completions.append(completion)
        return completions

    def drain(self) -> None:
        """Stop in an orderly way, including the shell's final work on the files."""
        self.step(DrainRequested())
        for _ in range(3):
            if self.stopped is None:
                self.step()
        if self.stopped is None:
            raise InvariantViolation("a drain does not end", waiting=self.core.state.awaited.name)
        if self._prepared is not None:
            self.writer.discard(self._prepared)
        self.writer.close(truncate=True)
        self.disk.sync_dir(self.directory)

    def _tick(self) -> Tick:
        return Tick(self.world.clock.now_us(), self.world.clock.monotonic_ns())

    # -- input ----------------------------------------------------------------------------------------

    def frames(self, source: int, *pieces: bytes | bytearray) -> ev.FramesArrived:
        """Return the event for frames that arrived in ring `source`."""
        buffer = bytearray().join(pieces)
        position = self._positions.get(source, 0)
        self._positions[source] = position + len(buffer)
        return ev.FramesArrived(
            source, position, buffer, scan_checked(buffer, position), position + len(buffer)
        )

    def request(self, corr: int, message: m.Message, attachment: bytearray | None = None) -> ControlReceived:
        """Return the event for a request that arrived by socket."""
        opened = None
        if isinstance(message, m.SegmentsChange):
            opened = segment_tables(self.disk, DATA, message.added)
        return ControlReceived(b"client", corr, message, attachment, opened)

    def make_file(self) -> None:
        """Create the file that was requested while `has_slow_files` was set."""
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self.step(self._make(wanted))

    def finish_flush(self) -> None:
        """Finish the sync that was started while `has_slow_flushes` was set."""
        if self._flushing is not None:
            self.step(self._finish_flush())

    def _finish_flush(self) -> ev.Flushed:
        flush, self._flushing = self._flushing, None
        assert flush is not None
        self.writer.sync()
        return ev.Flushed(flush.file_id, flush.stop)

    # -- effects --------------------------------------------------------------------------------------

    def _write_group(self, effect: ev.WriteBatch) -> ev.BatchWritten:
        self.writer.append(effect.buffers, effect.offset, effect.length, is_synced=effect.is_synced)
        return ev.BatchWritten()

    def _sync(self, effect: ev.Sync) -> ev.Synced:
        self.writer.sync()
        return ev.Synced()

    def _query_storage(self, effect: ev.QueryStorage) -> ev.StorageQueried:
        return ev.StorageQueried(
            [answer_question(question, self._ledger.for_topic) for question in effect.questions]
        )

    def _published(self, is_volatile: bool) -> LogHighWatermark:
        if is_volatile:
            return LogHighWatermark(self.core.volatile_files.log.file_id, self.core.volatile_files.log.offset)
        return LogHighWatermark(*self.world.marks[self.shard].published)

    def _flush(self, effect: ev.Flush) -> None:
        self._flushing = effect

    def _prepare(self, effect: ev.PrepareFile) -> Any:
        if self._prepared is not None:
            self.writer.discard(self._prepared)
            self._prepared = None
        if self.has_slow_files:
            self._wanted = effect
            return None
        return self._make(effect)

    def _make(self, effect: ev.PrepareFile) -> ev.FileReady | ev.FileFailed:
        try:
            self._prepared = self.writer.prepare(effect.at_least, fill=False)
        except DiskError as e:
            return ev.FileFailed(str(e))
        return ev.FileReady(self._prepared.capacity)

    def _open(self, effect: ev.OpenFile) -> ev.FileOpened:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise InvariantViolation("no file was prepared")
        header = self.writer.open(
            prepared,
            salt=self.world.next_salt(),
            created_us=self.world.clock.now_us(),
            prev=(effect.prev_file, effect.prev_stop, effect.prev_seal),
            flags=WAL_FLAG_PREV_ORDERLY if effect.orderly else 0,
            last_identity=effect.last_identity,
        )
        self.core.log_files.paths[header.file_id] = self.writer.path[len(DATA) + 1 :]
        return ev.FileOpened(header.file_id, header.salt, WAL_HEADER_BYTES, prepared.capacity)

    def _open_volatile(self, effect: ev.OpenVolatile) -> ev.VolatileOpened | ev.VolatileFailed:
        if self.world.is_shm_full:
            return ev.VolatileFailed("shared memory is full")
        capacity = max(effect.at_least, self.world.volatile_bytes)
        dropped = []
        while self.volatile and sum(map(len, self.volatile.values())) + capacity > 2 * capacity:
            dropped.append(min(self.volatile))
            del self.volatile[dropped[-1]]
        n = VOLATILE_N_FIRST + next(self._volatile_n)
        file_id, salt = pack_file(self.incarnation, n), self.world.next_salt()
        header = WalHeader(
            self.shard, self.world.shards, n, self.incarnation, salt, self.world.boot_id, ENGINE_ID,
            self.world.clock.now_us(), capacity, 0, 0, 0, 0,
        )  # fmt: skip
        self.volatile[file_id] = bytearray(header.encode().ljust(capacity, b"\0"))
        self.core.log_files.paths[file_id] = f"@volatile-{file_id}"
        return ev.VolatileOpened(file_id, salt, WAL_HEADER_BYTES, capacity, tuple(dropped))

    def _write_volatile(self, effect: ev.WriteVolatile) -> None:
        data = b"".join(effect.buffers)
        file = self.volatile[self.core.volatile_files.log.file_id]
        if len(data) != effect.length or effect.offset + len(data) > len(file):
            raise InvariantViolation("a volatile group does not fit", length=len(data), size=len(file))
        file[effect.offset : effect.offset + len(data)] = data

    def _publish_topics(self, effect: ev.PublishTopics) -> None:
        for topic in effect.topics:
            topic.slot = max(topic.slot, 0)
            self.world.published[topic.topic_id] = topic.head_seq

    def _publish_marks(self, effect: ev.PublishMarks) -> None:
        marks = self.world.marks[self.shard]
        marks.published = (effect.file_id, effect.published)
        marks.durable = (effect.file_id, effect.durable)

    def _retire_topic(self, effect: ev.RetireTopic) -> None:
        self.world.published.pop(effect.topic.topic_id, None)

    def _settle(self, effect: ev.Settle) -> None:
        self.settled.append((effect.source, effect.entries, effect.new_tail))

    def _reply(self, effect: Reply) -> None:
        if effect.corr in self.replies:
            raise InvariantViolation("a request is answered twice", corr=effect.corr)
        self.replies[effect.corr] = effect.message
        self.attached = effect.attachment

    def _stop(self, effect: Stop) -> None:
        self.stopped = effect

    # -- reading --------------------------------------------------------------------------------------

    def read(self, path: str, *, is_cold: bool = False) -> bytes:
        """Return the content of a file by its extent path; with `is_cold`, from the cold tier."""
        if path.startswith("@"):
            return bytes(self.volatile[int(path.rpartition("-")[2])])
        fd = self.disk.open_read(f"{self.world.cold if is_cold else DATA}/{path}")
        try:
            return self.disk.read_at(fd, self.disk.size(fd), 0)
        finally:
            self.disk.close(fd)


@dataclass
class World:
    """One data directory and its environment."""

    disk: Disk
    shards: int = 1
    file_bytes: int = 128 * KIB
    volatile_bytes: int = 128 * KIB
    settings: Settings = field(default_factory=Settings)
    topics_max: int = 0
    is_lenient: bool = False
    is_shm_full: bool = False
    has_cold: bool = False
    """Whether there is a cold store, and a relocator that moves segments to it."""
    clock: ManualClock = field(default_factory=ManualClock)
    effect_observer: EffectObserver = lambda shard, effect: None
    disk_of: Callable[[int], Disk] | None = None
    """Returns the disk of an incarnation, if each incarnation has its own (for a Monitor)."""
    cold: str = ""
    """Directory of the cold tier on the same disk. Segments may have been moved to it."""
    boot_id: bytes = b"boot" + bytes(11) + b"\1"
    time_base_us: int = 0
    """Time base of this boot; see envelope/boot.py."""
    boot_incarnation: int = 0
    incarnation: int = 0
    runs: dict[int, ShardRun] = field(default_factory=dict)
    marks: dict[int, SimulatedBoardMarks] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    """topic_id -> head, as on the board."""
    _salt: int = 0
    _corr: int = 0
    _producer_seqs: dict[tuple[str, int], int] = field(default_factory=dict)

    # -- lifetime -------------------------------------------------------------------------------------

    def start(self, shards: int = 0) -> None:
        """Start the engine, optionally with another number of shards.

        The marks of the last start are lost.
        """
        self.shards = shards or self.shards
        self.boot_incarnation = self.incarnation + 1
        self.marks = {shard: SimulatedBoardMarks() for shard in range(self.shards)}
        self.published = {}
        for shard in range(self.shards):
            self.start_shard(shard)

    def start_shard(self, shard: int, *, is_read_only: bool = False) -> ShardRun:
        """Start one shard, optionally read-only. The board still has the marks of its predecessor."""
        self.incarnation += 1
        run = ShardRun(self, shard, self.incarnation)
        run.recover(is_read_only=is_read_only)
        self.runs[shard] = run
        return run

    def kill_shard(self, shard: int) -> None:
        """Kill one shard; other shards and the board stay. Its open handles are harmless."""
        del self.runs[shard]

    def kill(self) -> None:
        """Kill every process."""
        self.runs.clear()
        self._simulated.process_kill()

    def stop(self) -> None:
        """Stop the engine in an orderly way."""
        for run in self.runs.values():
            run.drain()
        self.kill()

    def power_loss(self, seed: int, damage: Any = None) -> None:
        """Simulate a power loss of the host, and a new boot."""
        self.runs.clear()
        self._simulated.power_loss(seed, damage)
        self.reboot()

    def reboot(self) -> None:
        """Start a new boot: the boot id changes."""
        number = int.from_bytes(self.boot_id[4:], "big") + 1
        self.boot_id = b"boot" + number.to_bytes(12, "big")
        self.time_base_us = 0

    @property
    def _simulated(self) -> SimulatedDisk:
        disk: Any = self.disk
        while not isinstance(disk, SimulatedDisk):
            disk = disk.inner
        return disk

    def next_salt(self) -> int:
        """Return a new salt for each file; the sequence is the same in each repetition."""
        self._salt += 1
        return (self._salt * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) | 1

    def tick(self, seconds: float = 0.0) -> None:
        """Advance the clock and run one pass of the loop of every shard."""
        self.clock.advance(seconds)
        for run in list(self.runs.values()):
            run.step()

    # -- requests -------------------------------------------------------------------------------------

    def run_of(self, name: str) -> ShardRun:
        """Return the run that owns this topic, as a client finds it: through the home shard."""
        home = home_shard(name, self.shards)
        answer = self.ask(self._run(home), m.TopicResolve(name))
        if isinstance(answer, m.TopicInfo) and answer.shard != home:
            return self._run(answer.shard)
        return self._run(home)

    def _run(self, shard: int) -> ShardRun:
        if shard not in self.runs:
            raise ShardRunEnded(f"shard {shard} does not run")
        return self.runs[shard]

    def ask(self, run: ShardRun, message: m.Message, attachment: bytearray | None = None) -> m.Message:
        """Send one request and return its reply, which may be an ErrorReply."""
        self._corr += 1
        run.step(run.request(self._corr, message, attachment))
        if self._corr not in run.replies:
            raise NoReply(f"{type(message).__name__} got no answer")
        return run.replies.pop(self._corr)

    def request(self, message: Any, attachment: bytearray | None = None) -> Any:
        """Send a request about a topic to its shard; raise the error of a refusal."""
        answer = self.ask(self.run_of(message.topic), message, attachment)
        if isinstance(answer, m.ErrorReply):
            raise error_from_status(answer.status, answer.message, answer.detail)
        return answer

    def put_topic(self, name: str, mode: str = "upsert", **config: Any) -> m.TopicInfo:
        """Create or configure a topic."""
        answer: m.TopicInfo = self.request(m.TopicPut(name, config, mode))
        return answer

    def topic(self, name: str) -> ShardTopic:
        """Return the live topic of this name."""
        topic = self.run_of(name).core.directory.find(name)
        if topic is None:
            raise ShardRunEnded(f"no topic {name}")
        return topic

    def frame_for(
        self, name: str, payloads: Sequence[bytes], *, producer: int = 1, seq: int = 0, epoch: int = 0,
        durability: Durability = Durability.EPHEMERAL, claim: int = 0,
    ) -> bytearray:  # fmt: skip
        """Return one frame for a topic.

        `seq` 0: the producer's next number. `claim`: the claim of its producer.
        """
        key = (name, producer)
        number = seq or self._producer_seqs.get(key, 0) + 1
        self._producer_seqs[key] = max(number, self._producer_seqs.get(key, 0))
        made = frame(
            encode_records(list(payloads)), topic_id=self.topic(name).topic_id, producer_id=producer,
            producer_seq=number, epoch=epoch, durability=durability,
        )  # fmt: skip
        frames.words_of(made)[layout.W_BASE_SEQ] = claim
        return made

    def append(self, name: str, payloads: Sequence[bytes], **options: Any) -> int:
        """Append one frame through a ring; return its first seq. Raises the error of a refusal."""
        entry = self.send(name, [self.frame_for(name, payloads, **options)])[0]
        error = entry_error(entry, name)
        if error is not None:
            raise error
        return int(entry[1])

    def send(self, name: str, sent: Sequence[bytearray], *, source: int = RING) -> SettleEntries:
        """Push frames into a ring and return their (n, 8) settle entries."""
        run = self.run_of(name)
        before = len(run.settled)
        run.step(run.frames(source, *sent))
        found = [entries for ring, entries, _ in run.settled[before:] if ring == source]
        return np.concatenate(found) if found else np.zeros((0, WORDS), dtype=np.uint64)

    def records(self, name: str, after: int = 0) -> list[tuple[int, bytes]]:
        """Return (seq, payload) of every record that a reader after position `after` can see.

        Follows the extents of a Locate reply, verifies each frame, and checks that only deleted or lost
        records are missing.
        """
        run = self.run_of(name)
        located = self.request(m.Locate(name, after))
        lost = list(zip(located.lost[::2], located.lost[1::2], strict=True))
        gone = BitMap64.deserialize(located.deleted) if located.deleted else BitMap64()
        found: list[tuple[int, bytes]] = []
        expected = max(after + 1, located.earliest_seq)
        for extent in located.extents:
            stop = extent.stop or _published(run, extent.file_id)
            for view in self._frames_in(run, extent, stop):
                if view.topic_id != located.topic_id or view.epoch != located.epoch:
                    continue
                if view.last_seq < expected or view.last_seq > located.head_seq:
                    continue
                expected = _past_gone(expected, lost, gone)
                if view.base_seq > expected:
                    raise AssertionError(f"{name}: record {expected} is missing before {view.base_seq}")
                pairs = zip(itertools.count(view.base_seq), view.to_list(), strict=False)
                found += [(seq, payload) for seq, payload in pairs if seq >= expected and seq not in gone]
                expected = view.last_seq + 1
        if _past_gone(expected, lost, gone) != located.head_seq + 1:
            raise AssertionError(f"{name}: head is {located.head_seq}, records end before {expected}")
        return found

    @staticmethod
    def _frames_in(run: ShardRun, extent: m.Extent, stop: int) -> Any:
        data = run.read(extent.path, is_cold=extent.tier == m.TIER_COLD)
        batch = frames.scan(memoryview(data)[: stop & ~7], extent.start)
        if batch.stop != stop:
            raise AssertionError(f"{extent.path}: frames end at {batch.stop}, published up to {stop}")
        if (bad := frames.first_bad_seal(batch, extent.salt)) is not None:
            at = int(batch.offsets[bad])
            raise FrameInvalid("header does not match its seal", file=extent.path, offset=at)
        if (bad := frames.first_bad_body(data, batch)) is not None:
            at = int(batch.offsets[bad])
            raise FrameInvalid("body does not match its checksum", file=extent.path, offset=at)
        batch = resolve_copies(data, batch, extent.salt, is_verified=True)
        for row in np.flatnonzero(frames.types_of(batch.words) == layout.FrameType.APPEND).tolist():
            yield open_row(data, batch, row)


def _published(run: ShardRun, file_id: int) -> int:
    if file_id == run.core.volatile_files.log.file_id:
        return run.core.volatile_files.log.offset
    published_file, offset = run.world.marks[run.shard].published
    return offset if file_id == published_file else WAL_HEADER_BYTES


def _past_gone(expected: int, lost: list[tuple[int, int]], gone: BitMap64) -> int:
    """Return the first seq from `expected` that is neither lost nor deleted."""
    before = 0
    while before != expected:
        before = expected
        while expected in gone:
            expected += 1
        for first, last in lost:
            if first <= expected <= last:
                expected = last + 1
    return expected


def refusals(entries: SettleEntries, name: str = "") -> list[Refused | None]:
    """Return the error of each settle entry, or None for an ack."""
    return [entry_error(entry, name) for entry in entries]
