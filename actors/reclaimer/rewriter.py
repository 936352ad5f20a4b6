"""Writes the live records of segments to new segments. Sources are only read.

Every frame is verified before it is copied, and every segment is read back before it is registered. A topic
that is large enough for a segment of its own does not go to a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyroaring import BitMap64

from ringlog.actors.reclaimer.plan import (
    RegisteredSegment,
    SegmentSpans,
    TopicLiveness,
    contiguous_parts,
    row_state,
)
from ringlog.actors.reclaimer.rate_limiter import ByteRateLimiter
from ringlog.config import StorageConfig
from ringlog.entropy import random_u64
from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.placement import shard_of
from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import DATA, DEL, IDX, TAGS, NumberAllocator
from ringlog.segment.segment import Segment
from ringlog.segment.writer import SegmentWriter
from ringlog.storage.disk import Disk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.verify_copy import verify_frames

Runs = Iterator[tuple[Any, FrameBatch]]


@dataclass(frozen=True, slots=True)
class SegmentOrigin:
    """Facts about the engine for the headers of new segments."""

    engine_id: bytes
    shards: int
    created_us: int


@dataclass(frozen=True, slots=True)
class _SourceRow:
    """One topic in one source."""

    source: RegisteredSegment
    topic_id: int
    epoch: int
    first: int
    last: int
    bytes: int
    start: int
    stop: int


class Rewriter:
    """Writes segments. For one thread."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        settings: StorageConfig,
        numbers: NumberAllocator,
        rate_limiter: ByteRateLimiter,
    ) -> None:
        self._disk, self._data_dir = disk, data_dir
        self._settings, self._numbers, self._rate_limiter = settings, numbers, rate_limiter

    def rewrite(
        self,
        sources: tuple[RegisteredSegment, ...],
        liveness: Mapping[int, TopicLiveness],
        spans: SegmentSpans,
        origin: SegmentOrigin,
    ) -> dict[int, list[SegmentRef]]:
        """Write the live records of `sources`. After an error no new segment is left.

        Each segment belongs to one shard; other shards do not read it when they start. Sources that were made
        under another number of shards may contain topics of several shards, and are split.

        Returns:
            The new, verified segments, by the shard that owns their topics.

        Raises:
            CorruptData: a source is damaged; the error names it.
            DiskError: a file cannot be read or written.
            FrameInvalid: a frame of a source cannot be decoded.
        """
        made: dict[int, list[SegmentRef]] = {}
        try:
            for topics in self._outputs(sources, liveness, spans, origin.shards):
                shard = shard_of(topics[0][0].topic_id, origin.shards)
                ref = self._write(topics, liveness, origin, shard)
                if ref is not None:
                    made.setdefault(shard, []).append(ref)
                    self._read_back(ref)
        except BaseException:
            self.remove_segments([ref for refs in made.values() for ref in refs])
            raise
        return made

    def remove_segments(self, refs: list[SegmentRef]) -> None:
        """Remove segments that were not registered."""
        copies = SegmentCopies(self._disk, self._data_dir, None)
        for ref in refs:
            copies.drop_local(ref.stem, (DATA, IDX, TAGS, DEL))

    def _outputs(
        self,
        sources: tuple[RegisteredSegment, ...],
        liveness: Mapping[int, TopicLiveness],
        spans: SegmentSpans,
        shards: int,
    ) -> list[list[list[_SourceRow]]]:
        """Return the rows of each new segment by topic. Topics ascend and belong to one shard."""
        numbers = {source.ref.number for source in sources}
        packs: dict[tuple[int, int], list[list[_SourceRow]]] = {}
        owns: list[list[list[_SourceRow]]] = []
        for topic_id, rows in sorted(_rows_by_topic(sources, liveness).items()):
            rows.sort(key=lambda row: row.first)
            parts = contiguous_parts(topic_id, [(row.first, row.last) for row in rows], spans, numbers)
            for part in range(parts[-1] + 1):
                group = [row for row, at in zip(rows, parts, strict=True) if at == part]
                size = sum(row.bytes for row in group)
                if len(sources[0].table) == 1 or size >= self._settings.own_segment_bytes:
                    owns.append([group])
                else:
                    packs.setdefault((shard_of(topic_id, shards), part), []).append(group)
        return [*packs.values(), *owns]

    def _write(
        self,
        topics: list[list[_SourceRow]],
        liveness: Mapping[int, TopicLiveness],
        origin: SegmentOrigin,
        shard: int,
    ) -> SegmentRef | None:
        settings = self._settings
        writer = SegmentWriter(
            self._disk, self._data_dir, number=self._numbers.allocate(), salt=random_u64() | 1,
            shard=shard, shards=origin.shards, engine_id=origin.engine_id,
            created_us=origin.created_us, compression=settings.compression,
            compression_min_bytes=settings.compression_min_bytes,
            compression_saving=settings.compression_saving,
        )  # fmt: skip
        try:
            for group in topics:
                live = liveness.get(group[0].topic_id)
                writer.add_topic(
                    group[0].topic_id, group[0].epoch, self._runs(group),
                    earliest_seq=live.earliest_seq if live else 1, dead=_dead(live),
                    codec=live.codec if live else None,
                )  # fmt: skip
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def _runs(self, group: list[_SourceRow]) -> Runs:
        for row in group:
            path = f"{self._data_dir}/{row.source.ref.stem}{DATA}"
            fd = self._disk.open_read(path)
            try:
                for buffer, batch in self._read_verified(fd, path, row):
                    self._rate_limiter(2 * batch.stop)  # Bytes are read once and written once.
                    yield buffer, batch
            finally:
                self._disk.close(fd)

    def _read_verified(self, fd: int, path: str, row: _SourceRow) -> Runs:
        def read(start: int, stop: int) -> bytes:
            return self._disk.read_at(fd, stop - start, start)

        for verified in verify_frames(read, path, row.source.ref.salt, row.start, row.stop):
            words = verified.batch.words
            is_own = (words[:, layout.W_TOPIC] == row.topic_id) & (frames.epochs_of(words) == row.epoch)
            if not is_own.all():
                raise CorruptData(
                    "frame belongs to another topic than its index entry", file=path, offset=verified.offset
                )
            yield verified.buffer, verified.batch

    def _read_back(self, ref: SegmentRef) -> None:
        self._rate_limiter(ref.data_bytes)
        findings = verify_segment(self._disk, self._data_dir, ref.stem)
        if findings:
            raise CorruptData("a new segment failed verification", file=ref.stem, findings=findings)

    def mark_deleted(self, refs: list[SegmentRef], liveness: Mapping[int, TopicLiveness]) -> int:
        """Mark records that were deleted since the sources were assessed; return the number of new marks."""
        made = 0
        for ref in refs:
            segment = Segment.open(self._disk, self._data_dir, ref.stem)
            try:
                fresh = sum(
                    segment.mark_deleted(at, liveness[int(topic_id)].deleted)
                    for at, topic_id in enumerate(segment.topics["topic_id"])
                    if int(topic_id) in liveness and liveness[int(topic_id)].deleted
                )
                if fresh:
                    segment.sync_marks()
                    made += fresh
            finally:
                segment.close()
        return made


def _rows_by_topic(
    sources: tuple[RegisteredSegment, ...], liveness: Mapping[int, TopicLiveness]
) -> dict[int, list[_SourceRow]]:
    """Return the rows of live topics. All rows of a topic have its current epoch."""
    found: dict[int, list[_SourceRow]] = {}
    for source in sources:
        for row in source.table:
            topic_id, live = int(row["topic_id"]), liveness.get(int(row["topic_id"]))
            if row_state(row, live) != "dead":
                found.setdefault(topic_id, []).append(
                    _SourceRow(
                        source, topic_id, int(row["epoch"]), int(row["first_seq"]), int(row["last_seq"]),
                        int(row["bytes"]), int(row["data_start"]), int(row["data_stop"]),
                    )
                )  # fmt: skip
    return found


def _dead(live: TopicLiveness | None) -> BitMap64 | None:
    return live.deleted if live is not None and live.deleted else None
