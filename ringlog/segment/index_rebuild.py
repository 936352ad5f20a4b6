"""Rebuild an index from its data part (S2), and verify a whole segment (scrub, read-back)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringlog.errors import CorruptData, DiskError, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout as frame_layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.layout import FrameType
from ringlog.frame.view import FrameView, open_frame
from ringlog.limits import FRAME_BYTES_MAX, MIB
from ringlog.segment.frame_encoder import describe_frame
from ringlog.segment.index import IndexBuilder
from ringlog.segment.layout import (
    DATA,
    DATA_HEADER_BYTES,
    FLAG_TAGS,
    IDX,
    RECORDS_MAX,
    TAGS,
    SegmentDataHeader,
)
from ringlog.segment.parts import publish_parts
from ringlog.segment.segment import Segment, check_data, read_data_header
from ringlog.segment.tags import TagsBuilder
from ringlog.segment.writer import write_index_parts
from ringlog.storage.disk import Disk

_WINDOW_BYTES = 8 * MIB


def rebuild_index(disk: Disk, data_dir: str, stem: str, *, source_dir: str | None = None) -> Segment:
    """Rebuild index and tags from the data part, durably, and open the segment. Deletion marks stay.

    `source_dir` is the directory of the data part if it is not the data directory (a cold store). Raises
    DiskError, and CorruptData with the first frame that does not verify.
    """
    header, index, tags = _read_all(disk, source_dir or data_dir, stem)
    suffixes = write_index_parts(disk, data_dir, header, index, tags)
    if TAGS not in suffixes and disk.exists(f"{data_dir}/{stem}{TAGS}"):
        disk.unlink(f"{data_dir}/{stem}{TAGS}")
    publish_parts(disk, data_dir, stem, suffixes)
    return Segment.open(disk, data_dir, stem)


def verify_segment(disk: Disk, data_dir: str, stem: str, *, source_dir: str | None = None) -> list[str]:
    """Read every part completely. Return a list of problems, empty if the segment is valid.

    Checks all checksums, the index and the tags against the data, and the bytes of the deletion marks.
    `source_dir` as in rebuild_index.
    """
    findings: list[str] = []
    try:
        header, index, tags = _read_all(disk, source_dir or data_dir, stem)
    except (CorruptData, DiskError) as e:
        return [f"{stem}{DATA}: {e}"]
    pieces = index.encode(
        number=header.number, salt=header.salt, shard=header.shard, shards=header.shards,
        engine_id=header.engine_id, created_us=header.created_us, data_bytes=header.data_bytes, flags=0,
    )  # fmt: skip
    text = b"".join(tags.encode(number=header.number, salt=header.salt, records=header.records))
    try:
        segment = Segment.open(disk, data_dir, stem)
    except (CorruptData, DiskError) as e:
        return [f"{stem}{IDX}: {e}"]
    try:
        findings += _index_findings(disk, data_dir, source_dir or data_dir, segment, b"".join(pieces[1:]))
        findings += _tags_findings(disk, data_dir, segment, text)
        findings += _marks_findings(segment)
    finally:
        segment.close()
    return findings


def _index_findings(disk: Disk, data_dir: str, source_dir: str, segment: Segment, made: bytes) -> list[str]:
    stem = segment.ref.stem
    try:
        check_data(disk, source_dir, segment)
        stored = _contents(disk, f"{data_dir}/{stem}{IDX}")
    except (CorruptData, DiskError) as e:
        return [f"{stem}{IDX}: {e}"]
    if stored[len(stored) - len(made) :] != made or segment.header.tables_stop > len(stored):
        return [f"{stem}{IDX}: index differs from the data part"]
    return []


def _tags_findings(disk: Disk, data_dir: str, segment: Segment, made: bytes) -> list[str]:
    name = f"{segment.ref.stem}{TAGS}"
    if bool(segment.header.flags & FLAG_TAGS) != bool(made):
        return [f"{name}: index and data disagree on whether there are tags"]
    if not made:
        return []
    try:
        segment.tags_of(int(segment.topics["topic_id"][0]))
        stored = _contents(disk, f"{data_dir}/{name}")
    except (CorruptData, DiskError) as e:
        return [f"{name}: {e}"]
    return [] if stored == made else [f"{name}: tags differ from the data part"]


def _marks_findings(segment: Segment) -> list[str]:
    try:
        for row in range(len(segment.topics)):
            segment.deleted(row)
    except (CorruptData, DiskError) as e:
        return [f"{segment.ref.stem}.del: {e}"]
    bad = segment.bad_marks
    return [f"{segment.ref.stem}.del: {bad} bytes are neither 0x00 nor 0xD5"] if bad else []


def _contents(disk: Disk, path: str) -> bytes:
    fd = disk.open_read(path)
    try:
        return disk.read_at(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def _read_all(disk: Disk, data_dir: str, stem: str) -> tuple[SegmentDataHeader, IndexBuilder, TagsBuilder]:
    """Read and verify the whole data part. Return the index and the tags that follow from it."""
    header = read_data_header(disk, data_dir, stem)
    path = f"{data_dir}/{stem}{DATA}"
    index, tags = IndexBuilder(), TagsBuilder()
    topic: tuple[int, int] | None = None
    for offset, view in _views(disk, path, header):
        found = (view.topic_id, view.epoch)
        if topic is not None and found != topic:
            _end_topic(index, tags, topic)
            if found[0] <= topic[0]:
                raise CorruptData("data part: topic ids must ascend", file=path, offset=offset)
        topic = found
        frame = describe_frame(view)
        if index.records + frame.count > RECORDS_MAX:
            raise CorruptData(f"data part must have at most {RECORDS_MAX} records", file=path, offset=offset)
        if frame.tags is not None:
            tags.add_frame(frame.tags, index.records)
        index.add_frame(frame, offset)
    if topic is not None:
        _end_topic(index, tags, topic)
    declared = (header.topics, header.frames, header.records)
    counted = (index.topics, index.frames, index.records)
    if counted != declared:
        raise CorruptData(
            f"data part must have (topics, frames, records) {declared}, got {counted}", file=path, offset=0
        )
    return header, index, tags


def _end_topic(index: IndexBuilder, tags: TagsBuilder, topic: tuple[int, int]) -> None:
    index.end_topic(*topic)
    tags.end_topic()


def _views(disk: Disk, path: str, header: SegmentDataHeader) -> Iterator[tuple[int, FrameView]]:
    """Yield every frame with its offset. Raise CorruptData with the first frame that is invalid."""
    for origin, buffer, batch in read_frames(disk, path, header):
        for at in batch.offsets.tolist():
            try:
                yield origin + at, open_frame(buffer, at, seed=None, verify=False)
            except FrameInvalid as e:
                raise CorruptData(
                    f"stored frame is malformed: {e.reason}", file=path, offset=origin + at
                ) from None


def read_frames(disk: Disk, path: str, header: SegmentDataHeader) -> Iterator[tuple[int, Any, FrameBatch]]:
    """Yield (file offset of the buffer, buffer, batch) for all frames of a data part, one window at a time.

    Verifies seals and body checksums, and that the frames are ascending appends without gaps between them.
    Raises DiskError, and CorruptData with the first frame that does not verify.
    """
    fd = disk.open_read(path)
    try:
        at, size, last = DATA_HEADER_BYTES, _WINDOW_BYTES, (-1, 0)
        while at < header.data_bytes:
            found = disk.read_at(fd, min(size, header.data_bytes - at) & ~7, at)
            # The read is shorter if the file was cut, and may then end at any byte.
            buffer = memoryview(found)[: len(found) & ~7]
            batch = frames.scan(buffer) if buffer else None
            if batch is None or not len(batch):
                is_partial = batch is not None and batch.end == frames.ScanEnd.PARTIAL
                if not is_partial or size > FRAME_BYTES_MAX or at + size >= header.data_bytes:
                    raise CorruptData("data part: expected a frame at this offset", file=path, offset=at)
                size = FRAME_BYTES_MAX + 8
                continue
            last = _check_frames(buffer, batch, header.salt, last, path, at)
            yield at, buffer, batch
            at, size = at + batch.stop, _WINDOW_BYTES
    finally:
        disk.close(fd)


def _check_frames(
    buffer: Any, batch: FrameBatch, salt: int, last: tuple[int, int], path: str, origin: int
) -> tuple[int, int]:
    """Verify the frames of a window after the (topic, end seq) `last`. Return the new (topic, end seq)."""
    words = batch.words
    counts = frames.counts_of(words)
    topics = np.concatenate(([np.uint64(max(last[0], 0))], words[:, frame_layout.W_TOPIC]))
    bases = words[:, frame_layout.W_BASE_SEQ]
    ends = np.concatenate(([np.uint64(last[1])], bases + counts))
    wrong = (
        frames.malformed(words)
        | ~frames.is_of_type(words, FrameType.APPEND)
        | (frames.seals(words, salt) != words[:, frame_layout.W_SEAL_XXH3])
        | (frames.body_hashes(buffer, batch) != words[:, frame_layout.W_BODY_XXH3])
        | (topics[1:] < topics[:-1])
        | ((topics[1:] == topics[:-1]) & (bases < ends[:-1]))
    )
    row = frames.first_true(wrong)
    if row is not None:
        offset = origin + int(batch.offsets[row])
        raise CorruptData(
            "data part: frame is invalid", file=path, offset=offset,
            topic_id=int(words[row, frame_layout.W_TOPIC]), seq=int(bases[row]),
        )  # fmt: skip
    return int(topics[-1]), int(ends[-1])
