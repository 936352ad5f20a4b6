"""Segments with records that a test defines; and shards that know only segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyroaring import BitMap64

from ringlog.envelope import messages as m
from ringlog.errors import NotReady
from ringlog.frame import batch as frames
from ringlog.frame.layout import Column
from ringlog.segment.segment import Segment
from ringlog.segment.writer import SegmentWriter
from ringlog.storage.disk import Disk
from tests.support.log_file import sealed_frame

ENGINE_ID = bytes(range(16))


def make_segment(
    disk: Disk,
    data_dir: str,
    number: int,
    topics: Mapping[int, Sequence[int]],
    *,
    payload_bytes: int = 100,
    epoch: int = 1,
    created_us: int = 0,
    shard: int = 0,
) -> m.SegmentRef:
    """Write a segment. `topics`: topic id -> ascending seqs. Payloads begin with `<topic_id>-<seq> `."""
    writer = SegmentWriter(
        disk, data_dir, number=number, salt=number * 7 + 1, shard=shard, shards=1, engine_id=ENGINE_ID,
        created_us=created_us or number,
    )  # fmt: skip
    for topic_id in sorted(topics):
        data = b"".join(
            sealed_frame(
                {Column.PAYLOAD: [payload_of(topic_id, seq, payload_bytes)]}, topic_id=topic_id, base_seq=seq,
                epoch=epoch,
            )
            for seq in topics[topic_id]
        )  # fmt: skip
        writer.add_topic(topic_id, epoch, [(data, frames.scan(data))])
    ref = writer.finish()
    assert ref is not None, "a test's segment holds something"
    return ref


def payload_of(topic_id: int, seq: int, payload_bytes: int = 100) -> bytes:
    """Return the payload that make_segment wrote for this record."""
    return f"{topic_id}-{seq} ".encode().ljust(payload_bytes, b".")


def seqs_of(disk: Disk, data_dir: str, stem: str, topic_id: int) -> list[int]:
    """Return the seqs of one topic in a segment."""
    segment = Segment.open(disk, data_dir, stem)
    try:
        row = segment.row(topic_id)
        return [] if row is None else [int(seq) for seq in segment.positions(row, 1, 1 << 62)[0]]
    finally:
        segment.close()


def mark_deleted(disk: Disk, data_dir: str, stem: str, topic_id: int, seqs: Sequence[int]) -> None:
    """Mark records as deleted, as the compactor does in a checkpoint."""
    segment = Segment.open(disk, data_dir, stem)
    try:
        row = segment.row(topic_id)
        assert row is not None, "the topic is in the segment"
        segment.mark_deleted(row, BitMap64(seqs))
        segment.sync_marks()
    finally:
        segment.close()


class FakeShards:
    """Shards as the reclaimer and the relocator see them: plans, liveness, segment list changes."""

    def __init__(self, shards: int = 1) -> None:
        self.refs: dict[int, dict[int, m.SegmentRef]] = {shard: {} for shard in range(shards)}
        self.topics: dict[int, tuple[int, int, BitMap64]] = {}
        """Topic id -> (epoch, earliest_seq, deleted)."""
        self.missing: list[m.SegmentRef] = []
        """Segments that every shard reports as listed but missing."""
        self.snapshots: dict[int, int] = dict.fromkeys(range(shards), 1)
        self.down: set[int] = set()
        self.refuses: set[int] = set()
        self.asked: list[tuple[int, m.Message]] = []
        self.before: dict[type[m.Message], Any] = {}
        """Message type -> callback that is called just before the reply."""

    def register(self, *refs: m.SegmentRef, shard: int = 0) -> None:
        """Add segments to a shard."""
        for ref in refs:
            self.refs[shard][ref.number] = ref

    def ask(self, shard: int, message: m.Message, attachment: Any = None) -> tuple[m.Message, bytes]:
        """Answer one request as a shard does."""
        self.asked.append((shard, message))
        if shard in self.down:
            raise NotReady("shard is not there", shard=shard)
        if type(message) in self.before:
            self.before[type(message)](shard, message)
        if isinstance(message, m.CheckpointOpen):
            segments = list(self.refs[shard].values())
            number, missing = self.snapshots[shard], self.missing
            return m.CheckpointPlan(shard, len(self.refs), 1, [], 0, number, segments, missing=missing), b""
        if isinstance(message, m.ListLiveRecords):
            return self._live(attachment)
        if isinstance(message, m.SegmentTier):
            return self._tier(shard, message), b""
        assert isinstance(message, m.SegmentsChange), message
        return self._change(shard, message), b""

    def _live(self, attachment: Any) -> tuple[m.Message, bytes]:
        rows, bitmaps = [], b""
        for topic_id in memoryview(attachment).cast("B").cast("Q"):
            epoch, earliest, deleted = self.topics.get(topic_id, (0, 1, BitMap64()))
            data = bytes(deleted.serialize()) if deleted else b""
            rows += [topic_id, epoch, earliest, len(bitmaps), len(bitmaps) + len(data)]
            bitmaps += data
        words = b"".join(word.to_bytes(8, "little") for word in rows)
        return m.LiveRecordsReply(len(rows) // 5, bitmaps), words

    def _tier(self, shard: int, message: m.SegmentTier) -> m.SegmentsChanged:
        ref = self.refs[shard].get(message.number)
        if ref is None or shard in self.refuses:
            return m.SegmentsChanged(False, "unknown segment")
        self.refs[shard][message.number] = m.SegmentRef(
            ref.number, ref.stem, ref.salt, ref.data_bytes, ref.records, ref.frames, ref.topics, message.tier,
            ref.created_us,
        )  # fmt: skip
        return m.SegmentsChanged(True)

    def _change(self, shard: int, message: m.SegmentsChange) -> m.SegmentsChanged:
        known = self.refs[shard]
        if shard in self.refuses or not set(message.removed) <= known.keys():
            return m.SegmentsChanged(False, "unknown number in removed")
        for number in message.removed:
            del known[number]
        self.register(*message.added, shard=shard)
        return m.SegmentsChanged(True)
