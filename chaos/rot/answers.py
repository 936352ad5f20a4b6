"""The answers of an engine to all reads of a directory, recovered and read by the production code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from chaos.rot.specimen import COLD, TOPICS, Specimen
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, RinglogError, TopicHalted
from ringlog.frame import FrameView, open_frame
from ringlog.frame.layout import Column
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.reader import Pause, TopicReader
from ringlog.storage.segment_cache import SegmentCache
from ringlog.testing.clock import ManualClock
from ringlog.testing.disk import SimulatedDisk
from tests.support.shard_world import DATA, SHM, ShardRunEnded, SimulatedBoardMarks, World

ROUNDS_MAX = 200
"""Maximum number of steps of a reader over one small topic. More steps mean that it makes no progress."""
PAUSES_MAX = 2
Record = tuple[int, bytes, bytes, bytes]
"""seq, payload, key, tag."""


@dataclass(slots=True)
class Topic:
    """One topic as clients see it."""

    state: tuple[Any, ...] = ()
    located: m.Located | None = None
    records: list[Record] = field(default_factory=list)
    damage: CorruptData | TopicHalted | None = None
    """Error that ended reading. `records` are the records before it."""
    error: str = ""
    """Any other error that ended reading."""


@dataclass(slots=True)
class Answers:
    """All answers of an engine on one directory.

    `refused`: the error with which its start or a shard's failed.
    """

    refused: RinglogError | None = None
    topics: dict[str, Topic] = field(default_factory=dict)
    announced: list[Any] = field(default_factory=list)
    """Losses that recovery announced."""
    left: dict[str, bytes] = field(default_factory=dict)
    """Contents of the watched files afterwards."""


def world_of(specimen: Specimen, disk: SimulatedDisk, **options: Any) -> World:
    """Return a world on this disk, with time and incarnation later than those of the specimen."""
    world = World(
        disk, shards=2, incarnation=specimen.incarnation + 10, boot_id=specimen.boot_id,
        clock=ManualClock(specimen.now_us + 1_000_000), **options,
    )  # fmt: skip
    world._salt = specimen.salt & 0xFFFF | 1 << 20  # no salt may be used twice
    return world


def start(
    specimen: Specimen, disk: SimulatedDisk, *, keeps_board: bool = False, is_lenient: bool = False
) -> World:
    """Start an engine on this disk: after a reboot, or with `keeps_board` as successors of killed shards."""
    world = world_of(specimen, disk, is_lenient=is_lenient)
    if not keeps_board:
        world.reboot()
        world.start()
        return world
    world.boot_incarnation = 3
    world.marks = {
        shard: SimulatedBoardMarks(each.published, each.durable) for shard, each in specimen.marks.items()
    }
    for shard in range(world.shards):
        world.start_shard(shard)
    return world


def ask(
    specimen: Specimen, files: dict[str, bytes], *, keeps_board: bool = False, watched: Iterable[str] = ()
) -> Answers:
    """Start an engine and read everything from it. `watched` files are returned as the engine left them."""
    found = Answers()
    disk = specimen.mount(files)
    try:
        world = start(specimen, disk, keeps_board=keeps_board)
    except RinglogError as e:
        found.refused = e
        return found
    finally:
        held = disk.contents() if watched else {}
        found.left = {path: held.get(path, b"") for path in watched}
    for run in world.runs.values():
        found.announced += run.found.announced
    for name in TOPICS:
        found.topics[name] = topic_of(world, name)
    for run in world.runs.values():
        for topic in run.core.directory.by_id.values():
            if topic.name not in found.topics:
                found.topics[topic.name] = Topic(state=("unexpected",))
    return found


def topic_of(world: World, name: str) -> Topic:
    """Return one topic as clients see it."""
    try:
        run = world.run_of(name)
        state = world.ask(run, m.TopicState(name, touch=False))
    except (RinglogError, ShardRunEnded) as e:
        return Topic(state=("none", str(e)))
    if not isinstance(state, m.TopicStateReply):
        return Topic(state=("none", str(state)))
    kept = run.core.directory.find_by_id(state.topic_id)
    topic = Topic((
        state.topic_id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.bytes,
        state.last_write_ts, state.config, list(kept.lost) if kept is not None else [],
    ))  # fmt: skip
    try:
        located = world.request(m.Locate(name, 0))
        topic.located = located
        mark = LogHighWatermark(*world.marks[run.shard].published)
        topic.records = read_all(world.disk, located, mark)
    except Damaged as e:
        topic.records, topic.damage = e.before, e.damage
    except TopicHalted as e:
        topic.damage = e
    except (RinglogError, AssertionError) as e:
        topic.error = f"{type(e).__name__}: {e}"
    return topic


class Damaged(Exception):
    """Reading reached damage after the records `before`."""

    def __init__(self, damage: CorruptData, before: list[Record]) -> None:
        super().__init__(str(damage))
        self.damage, self.before = damage, before


def read_all(disk: Any, located: m.Located, mark: LogHighWatermark, after: int = 0) -> list[Record]:
    """Return all live records, read as clients read them.

    Raises Damaged, and AssertionError if records are missing silently.
    """
    shelf = SegmentCache(disk, DATA)
    reader = TopicReader(
        located, max(after, located.earliest_seq - 1), data_dir=DATA, shm_dir=SHM,
        read_watermark=lambda _: mark, disk=disk, cold_dir=COLD, segment_cache=shelf,
    )  # fmt: skip
    gone = BitMap64.deserialize(located.deleted) if located.deleted else BitMap64()
    found: list[Record] = []
    pauses = 0
    try:
        for _ in range(ROUNDS_MAX):
            before = reader.cursor
            run = reader.next_run(located.head_seq)
            if isinstance(run, FrameRun):
                found += _records(run, before, located.head_seq, gone)
                pauses = 0
            elif pauses == PAUSES_MAX or run is Pause.AT_MARK:
                break
            else:  # like a client: query the shard again, which gives the same answer
                pauses += 1
                reader.relocate(located)
        else:
            raise AssertionError(f"{located.topic}: the reader makes no progress at seq {reader.cursor}")
    except CorruptData as e:
        raise Damaged(e, found) from None
    finally:
        reader.close()
        shelf.close()
    if reader.cursor < located.head_seq and not reader.records.accounts_for(
        reader.cursor + 1, located.head_seq
    ):
        raise AssertionError(f"{located.topic}: reading ends at {reader.cursor} of {located.head_seq}")
    return found


def _records(run: FrameRun, before: int, head: int, gone: BitMap64) -> list[Record]:
    found: list[Record] = []
    for offset in run.batch.offsets.tolist():
        view = open_frame(run.buffer, offset, seed=run.salt, verify=False)
        keys, tags = _column(view, Column.KEY), _column(view, Column.TAG)
        for i, payload in enumerate(view.to_list()):
            seq = view.base_seq + i
            if before < seq <= head and seq not in gone:
                found.append((seq, payload or b"", keys[i], tags[i]))
    return found


def _column(view: FrameView, column: Column) -> list[bytes]:
    found = view.bytes_column(column)
    return found.to_list() if found is not None else [b""] * view.count
