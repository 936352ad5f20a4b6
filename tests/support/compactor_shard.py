"""A minimal shard for compactor tests: real log files, real topics, and the shard's side of a checkpoint.

The real shard code writes the log in a World. The replies to the compactor are computed here, from the files
on disk. Therefore these tests check the compactor's actions, not the shard's memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ringlog.actors.compactor.checkpoint import CheckpointContext, CheckpointTask
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.frame import open_frame
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.segment.index_rebuild import read_frames, verify_segment
from ringlog.segment.layout import (
    CREATOR_COMPACTOR,
    DATA,
    DATA_HEADER_BYTES,
    NumberAllocator,
    SegmentDataHeader,
    parse_stem,
)
from ringlog.segment.segment import Segment, find_segments
from ringlog.storage.layout import decode_wal_header, pack_file, parse_wal_name
from ringlog.storage.recovery import FileScan
from ringlog.testing.simulated_disk import SimulatedDisk
from tests.support.shard_world import DATA as DATA_DIR
from tests.support.shard_world import ENGINE_ID, World


class SmallShard:
    """Shard 0 of a World, reduced to the requests that the compactor sends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.refs: dict[int, m.SegmentRef] = {}
        self.absorbed: set[int] = set()
        self.waiting: list[str] = []
        self.number = 0
        self.facts = b"facts"
        self.refuses = ""
        self.page = 3
        self.asked: list[str] = []
        self._pages: list[list[tuple[int, bytes]]] = []
        self._everything = False

    def ask(self, shard, message, wanted, *, attachment=None):
        kind = type(message).__name__
        self.asked.append(kind)
        answer, attached = getattr(self, f"_{kind}")(message, attachment)
        assert isinstance(answer, wanted)
        return SimpleNamespace(message=answer, attachment=memoryview(attached))

    def plan(self):
        return CompactorShardClient(self, 0).fetch_plan()

    def _CheckpointOpen(self, message, _):
        files = [each for each in self.files() if each.file_id not in self.absorbed]
        size = sum(each.stop for each in files)
        return m.CheckpointPlan(0, 1, 7, files, size, self.number, list(self.refs.values())), b""

    def files(self):
        """Return the closed log files in order, each with the end of its frames."""
        disk, found = self.world.disk, []
        for name in disk.list_dir(f"{DATA_DIR}/wal/shard-00"):
            parsed = parse_wal_name(name)
            if parsed is None or pack_file(*parsed) >= self.world.runs[0].writer.file_id:
                continue
            path = f"wal/shard-00/{name}"
            data = self.read(path)
            header = decode_wal_header(data, path)
            scan = FileScan(header, len(data), lambda at, size, data=data: data[at : at + size])
            list(scan.iter_chunks())
            found.append(m.Extent(path, header.file_id, header.salt, WAL_HEADER_BYTES, scan.stop))
        return sorted(found, key=lambda each: each.file_id)

    def read(self, path):
        disk = self.world.disk
        fd = disk.open_read(f"{DATA_DIR}/{path}")
        try:
            return disk.read_at(fd, disk.size(fd), 0)
        finally:
            disk.close(fd)

    def topics(self):
        return self.world.runs[0].core.directory.by_id

    def _ListLiveRecords(self, message, attachment):
        rows, deleted = [], b""
        for topic_id in np.frombuffer(attachment, "<u8").tolist():
            topic = self.topics().get(topic_id)
            if topic is None:
                rows.append([topic_id, 0, 0, 0, 0])
                continue
            start = len(deleted)
            deleted += topic.dead.serialize() if topic.dead else b""
            rows.append([topic_id, topic.epoch, topic.earliest_seq, start, len(deleted)])
        assert len(rows) == message.topics
        return m.LiveRecordsReply(len(rows), deleted), np.array(rows, "<u8").tobytes()

    def _SegmentsChange(self, message, _):
        if self.refuses:
            return m.SegmentsChanged(False, self.refuses), b""
        for ref in message.added:
            Segment.open(self.world.disk, DATA_DIR, ref.stem).close()
            self.refs[ref.number] = ref
        for number in message.removed:
            del self.refs[number]
        return m.SegmentsChanged(True), b""

    def rows(self):
        """Return the rows that a snapshot must contain now, by topic id."""
        return {topic.topic_id: f"{topic.name}:{topic.head_seq}".encode() for topic in self.topics().values()}

    def _CheckpointRows(self, message, _):
        if message.begin:
            self._everything = message.everything
            rows = sorted(self.rows().items())
            self._pages = [rows[at : at + self.page] for at in range(0, len(rows), self.page)] or [[]]
        page = self._pages.pop(0)
        words = np.array([[key, len(row)] for key, row in page], "<u8").tobytes()
        reply = m.CheckpointRowsReply(len(page), not self._pages, self.facts, self._everything)
        return reply, words + b"".join(row for _, row in page)

    def _CheckpointDone(self, message, _):
        unlink, self.waiting = self.waiting, []
        paths = {each.file_id: each.path for each in self.files()}
        self.waiting = [paths[each] for each in message.absorbed]
        self.absorbed |= set(message.absorbed)
        self.number = message.number
        return m.CheckpointClosed(unlink), b""

    # -- inspection -------------------------------------------------------------------------------------

    def sealed(self):
        """Return topic id -> {seq: payload} of registered segments. Verify every segment part."""
        found = {}
        for ref in sorted(self.refs.values(), key=lambda each: each.number):
            assert verify_segment(self.world.disk, DATA_DIR, ref.stem) == []
            data = self.read(ref.stem + DATA)
            header = SegmentDataHeader.decode(data[:DATA_HEADER_BYTES], ref.stem)
            for origin, _, batch in read_frames(self.world.disk, f"{DATA_DIR}/{ref.stem}{DATA}", header):
                for offset in batch.offsets.tolist():
                    view = open_frame(data, origin + offset, seed=ref.salt)
                    pairs = zip(range(view.base_seq, view.last_seq + 1), view.to_list(), strict=True)
                    found.setdefault(view.topic_id, {}).update(pairs)
        return found

    def deleted(self, topic_id):
        """Return the seqs that registered segments mark as deleted."""
        found = set()
        for ref in self.refs.values():
            segment = Segment.open(self.world.disk, DATA_DIR, ref.stem)
            row = segment.row(topic_id)
            found |= set(segment.deleted(row)) if row is not None else set()
            segment.close()
        return found


def new_world(**options):
    """Return a started World on an in-memory disk."""
    world = World(SimulatedDisk(DATA_DIR), **options)
    world.start()
    return world


def place_of(world, disk=None, **storage):
    """Return the context of a checkpoint, with segment numbers allocated as at a start of the compactor."""
    disk = disk or world.disk
    known = [parse_stem(stem)[2] for stem in find_segments(disk, DATA_DIR)]
    return CheckpointContext(
        disk=disk, data_dir=DATA_DIR, engine_id=ENGINE_ID, storage=StorageConfig(**storage),
        clock=world.clock,
        numbers=NumberAllocator(CREATOR_COMPACTOR, known), heartbeat=lambda: None,
    )  # fmt: skip


def checkpoint(shard, disk=None, **storage):
    """Run one checkpoint with a compactor that has just started."""
    world = shard.world
    world.clock.advance(0.001)
    return CheckpointTask(
        place_of(world, disk, **storage), CompactorShardClient(shard, 0), shard.plan()
    ).run()
