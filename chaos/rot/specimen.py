"""A small data directory with every kind of file, created by the production cores, and its expected state.

It has two shards. There are closed, absorbed and live log files of several lives. There are hot and cold
segments, shared and of one topic, uncompressed, LZ4 and Zstandard, with indexes, tags and deletion marks.
Each shard has two snapshots. The engine's identity is included.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from ringlog.envelope import messages as m
from ringlog.errors import DiskError
from ringlog.frame import encode_records, frame
from ringlog.limits import KIB, WAL_HEADER_BYTES
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.storage.layout import COLD_OWNER, META_DIR
from ringlog.supervision.identity import EngineIdentity
from ringlog.testing.disk import SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OWNER_OBJECT as COLD_ENGINE
from ringlog.tier.ownership import OwnedStore
from tests.support.shard_world import DATA, ENGINE_ID, SimulatedBoardMarks, World
from tests.support.world_checkpoints import checkpoint_all

COLD = "/cold"
OWNER = f"{DATA}/{META_DIR}/{COLD_OWNER}"
"""File that states that a cold tier exists. Its contents are not read, so it is not damaged."""
SHARDS = 2
TOPICS = ("alpha", "beta", "gamma", "delta", "eps")
FILE_BYTES = 24 * KIB
ROOM_BYTES = 512
NOISE_BYTES = 700
TEXT_BYTES = 1_500
WORDS = (b"order", b"paid", b"shipped", b"returned", b"cancelled")
TAGS = ("red", "green", "blue", "")
"""Tags of the records. An empty string means no tag."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """Files by absolute path, and facts about them. DATA is the data directory, COLD the cold tier."""

    files: dict[str, bytes]
    directories: tuple[str, ...]
    marks: dict[int, SimulatedBoardMarks]
    """Marks on the board when all processes were killed."""
    incarnation: int
    boot_id: bytes
    now_us: int
    salt: int
    absorbed: frozenset[str] = frozenset()
    """Log files that a snapshot absorbed and that wait for their removal."""
    earlier: dict[str, bytes] = field(default_factory=dict)
    """The files before the last round of appends."""

    def mount(self, files: dict[str, bytes] | None = None) -> SimulatedDisk:
        """Return a disk with these files (default: the undamaged ones)."""
        files = self.files if files is None else files
        directories = [*dict.fromkeys([*self.directories, *map(posixpath.dirname, files)])]
        disk = SimulatedDisk(*directories)
        for path, data in (*files.items(), (OWNER, ENGINE_ID.hex().encode())):
            fd = disk.create(path)
            disk.write_at(fd, [data], 0)
            disk.sync_file(fd)
            disk.close(fd)
        for directory in directories:
            disk.sync_dir(directory)
        return disk


@dataclass(slots=True)
class _Maker:
    world: World
    rng: random.Random
    numbers: dict[str, int] = field(default_factory=dict)

    def append(self, name: str, count: int, *, is_noise: bool = False) -> None:
        """Append one frame of `count` records with keys and tags."""
        number = self.numbers[name] = self.numbers.get(name, 0) + 1
        size = NOISE_BYTES if is_noise else TEXT_BYTES
        payloads = [self._payload(name, number, i, size, is_noise) for i in range(count)]
        sent = frame(
            encode_records(
                payloads,
                keys=[b"k%d" % (i % 3) for i in range(count)],
                tags=[TAGS[(number + i) % len(TAGS)] for i in range(count)],
            ),
            topic_id=self.world.topic(name).topic_id,
            producer_id=7,
            producer_seq=number,
        )
        entry = self.world.send(name, [sent])[0]
        assert not int(entry[3]) >> 32 & 0xFFFF, "a frame of the specimen was refused"
        self.world.clock.advance(0.001)

    def _payload(self, name: str, number: int, i: int, size: int, is_noise: bool) -> bytes:
        head = f"{name}/{number}/{i} ".encode()
        if is_noise:
            return head + self.rng.randbytes(size)
        return head + b" ".join(self.rng.choices(WORDS, k=size // 6))

    def round(self, **storage: Any) -> None:
        """Append to every topic, then run a checkpoint on each shard."""
        for name in TOPICS:
            self.append(name, 4)
            self.append(name, 3, is_noise=name in {"alpha", "delta"})
        self.world.tick(0.2)
        checkpoint_all(self.world, **storage)
        self.world.clock.advance(0.01)


def make_specimen(seed: int, *, is_marked: bool = True) -> Specimen:
    """Run several lives, kill the last one, and return the files. The same seed gives the same specimen.

    With `is_marked`, the streams are idle before the kill, so that a mark follows every acknowledged frame.
    """
    disk = SimulatedDisk(DATA, COLD, f"{DATA}/{META_DIR}")
    world = World(disk, shards=SHARDS, file_bytes=FILE_BYTES)
    maker = _Maker(world, random.Random(seed))
    world.start()
    for name in TOPICS:
        world.put_topic(name, durability="disk" if name == "gamma" else "fsync")
    world.put_topic("gone", durability="fsync")
    maker.append("gone", 2)
    maker.round(own_segment_bytes=0, compression="zstd", compression_min_bytes=64)
    world.request(m.TopicDelete("gone"))
    world.request(m.RecordsDelete("alpha", 0, None, _numbers(2, 5)))
    maker.round(own_segment_bytes=4 * KIB, compression="lz4", compression_min_bytes=64)
    _chill(world)
    world.request(m.RecordsDelete("beta", 0, "red"))
    maker.round(own_segment_bytes=1 << 20, compression="none")
    for name in TOPICS[:3]:
        maker.append(name, 2)
    _identify(disk, world.incarnation)
    earlier = dict(_files(disk, (*_directories(disk, DATA), *_directories(disk, COLD))))
    world.stop()
    world.start()
    for name in TOPICS:
        maker.append(name, 2, is_noise=True)
    world.request(m.RecordsDelete("delta", 0, None, _numbers(3)))
    for name in TOPICS:
        maker.append(name, 1)
    if is_marked:
        for _ in range(3):
            world.tick(0.2)
    waiting = [path for run in world.runs.values() for path in run.found.waiting]
    marks = {shard: SimulatedBoardMarks(each.published, each.durable) for shard, each in world.marks.items()}
    world.kill()
    _identify(disk, world.incarnation)
    directories = tuple(sorted(_directories(disk, DATA))) + tuple(sorted(_directories(disk, COLD)))
    files = dict(_files(disk, directories))
    return Specimen(
        files, directories, marks, world.incarnation, world.boot_id, world.clock.now_us(), world.next_salt(),
        frozenset(f"{DATA}/{path}" for _, path in waiting), earlier,
    )  # fmt: skip


def _numbers(*seqs: int) -> bytes:
    return bytes(BitMap64(seqs).serialize())


def _chill(world: World) -> None:
    """Move the oldest segment of each shard to the cold tier, as the relocator does."""
    store = OwnedStore(LocalStore(world.disk, COLD), world.disk, DATA, ENGINE_ID.hex())
    assert store.claim() == ENGINE_ID.hex()
    copies = SegmentCopies(world.disk, DATA, store)
    for shard, run in world.runs.items():
        refs = sorted(run.core.checkpoint.segments.refs.values(), key=lambda ref: ref.number)
        own = [ref for ref in refs if ref.stem.startswith("topics/")]
        assert own, f"shard {shard} has a segment to move"
        ref = own[0]
        copies.verify_local(ref.stem)
        copies.upload_index_parts(ref.stem)
        copies.upload_part(ref.stem + DATA_SUFFIX)
        for tier in (m.TIER_BOTH, m.TIER_COLD):
            answer = world.ask(run, m.SegmentTier(ref.number, tier))
            assert isinstance(answer, m.SegmentsChanged), answer
            assert answer.accepted, answer
        copies.drop_local(ref.stem, (DATA_SUFFIX,))


def _identify(disk: SimulatedDisk, incarnation: int) -> None:
    """Write the identity file for the last incarnation."""
    aside = SimulatedDisk(DATA)
    identity = EngineIdentity(aside, DATA)
    identity.engine_id = ENGINE_ID.hex()
    identity.record_start("/dev/shm/ringlog-0-0123abcd", incarnation + 1)
    path = f"{DATA}/{META_DIR}/engine"
    fd = aside.open_read(path)
    data = aside.read_at(fd, aside.size(fd), 0)
    if disk.exists(path):
        disk.unlink(path)
    out = disk.create(path)
    disk.write_at(out, [data], 0)
    disk.sync_file(out)
    disk.close(out)
    disk.sync_dir(f"{DATA}/{META_DIR}")


def _directories(disk: SimulatedDisk, top: str) -> Iterator[str]:
    yield top
    for name in disk.list_dir(top):
        path = posixpath.join(top, name)
        try:
            disk.list_dir(path)
        except DiskError:  # a file
            continue
        yield from _directories(disk, path)


def _files(disk: SimulatedDisk, directories: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for directory in directories:
        for name in disk.list_dir(directory):
            path = posixpath.join(directory, name)
            if path not in (*directories, OWNER, f"{COLD}/{COLD_ENGINE}"):
                fd = disk.open_read(path)
                data = disk.read_at(fd, disk.size(fd), 0)
                disk.close(fd)
                yield path, _without_room(data) if path.endswith(".log") else data


def _without_room(data: bytes) -> bytes:
    """Return a log file without most of its trailing zeros. Damage there would repeat the same case."""
    used = len(data.rstrip(b"\0"))
    return data[: max(used + ROOM_BYTES, WAL_HEADER_BYTES + ROOM_BYTES) & ~7]
