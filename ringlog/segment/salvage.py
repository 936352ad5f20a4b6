"""Write the readable rest of damaged segments, and of log files that they replaced, as a new segment.

A repair selects the frames: their places, and the seqs that no other file contains. The frames are verified
again when they are read, so a wrong selection cannot copy invalid data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pyroaring import BitMap64

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.layout import FrameType
from ringlog.frame.routed_frame import resolve_copies
from ringlog.segment.frame_encoder import BlockSlice, CompressionPolicy, seal_frame
from ringlog.segment.records import blocks_of
from ringlog.segment.segment import Segment
from ringlog.segment.writer import SegmentWriter
from ringlog.storage.disk import Disk


class SalvagedSlice(NamedTuple):
    """Records first..last of one frame in `file` (an absolute path) with salt `salt`."""

    first: int
    last: int
    file: str
    offset: int
    length: int
    salt: int


class SalvagedTopic(NamedTuple):
    """Salvaged slices of one topic, ascending, and the seqs that were deleted."""

    pieces: Sequence[SalvagedSlice]
    dead: BitMap64


def write_salvaged(
    disk: Disk, data_dir: str, topics: Mapping[tuple[int, int], SalvagedTopic], *, number: int, salt: int,
    shard: int, shards: int, engine_id: bytes, created_us: int,
) -> SegmentRef | None:  # fmt: skip
    """Write one durable segment of these topics, keyed by (topic_id, epoch). None if no record is alive.

    Raises DiskError, and CorruptData for a frame that no longer verifies.
    """
    writer = SegmentWriter(
        disk, data_dir, number=number, salt=salt, shard=shard, shards=shards, engine_id=engine_id,
        created_us=created_us,
    )  # fmt: skip
    try:
        for topic_id, epoch in sorted(topics):
            pieces, dead = topics[topic_id, epoch]
            runs = _runs(disk, pieces, topic_id, epoch)
            writer.add_topic(topic_id, epoch, runs, dead=dead)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def write_deletion_marks(
    disk: Disk, data_dir: str, stem: str, dead: Mapping[tuple[int, int], BitMap64]
) -> None:
    """Create the deletion marks of a segment that has none.

    `dead` are deleted seqs by (topic_id, epoch); those that the segment does not contain are ignored. Raises
    CorruptData, DiskError.
    """
    segment = Segment.open(disk, data_dir, stem)
    try:
        for row, topic in enumerate(segment.topics):
            numbers = dead.get((int(topic["topic_id"]), int(topic["epoch"])))
            if numbers:
                segment.mark_deleted(row, numbers)
        segment.sync_marks()
    finally:
        segment.close()


def _runs(
    disk: Disk, pieces: Sequence[SalvagedSlice], topic_id: int, epoch: int
) -> Iterator[tuple[Any, FrameBatch]]:
    fds: dict[str, int] = {}
    try:
        for piece in pieces:
            if piece.file not in fds:
                fds[piece.file] = disk.open_read(piece.file)
            data = disk.read_at(fds[piece.file], piece.length, piece.offset)
            yield _cut(piece, *_frame_of(piece, data, topic_id, epoch), topic_id, epoch)
    finally:
        for fd in fds.values():
            disk.close(fd)


def _frame_of(piece: SalvagedSlice, data: bytes, topic_id: int, epoch: int) -> tuple[bytes, FrameBatch]:
    """Return the append of this topic with the slice. It may be a router's copy in a routed frame."""
    found = frames.scan(memoryview(data)[: len(data) & ~7])
    is_verified = len(found) == 1 and not (
        frames.malformed(found.words).any()
        or (frames.seals(found.words, piece.salt) != found.words[:, layout.W_SEAL_XXH3]).any()
        or (frames.body_hashes(data, found) != found.words[:, layout.W_BODY_XXH3]).any()
    )
    if is_verified:
        found = resolve_copies(data, found, piece.salt, topic_id=topic_id, is_verified=True)
        words = found.words
        bases = words[:, layout.W_BASE_SEQ]
        rows = np.flatnonzero(
            frames.is_of_type(words, FrameType.APPEND)
            & (words[:, layout.W_TOPIC] == np.uint64(topic_id))
            & (frames.epochs_of(words) == epoch)
            & (bases <= np.uint64(piece.first))
            & (bases + frames.counts_of(words) > np.uint64(piece.last))
        )
        if len(rows):
            return data, found.take(rows[:1])
    raise CorruptData(
        "a frame that was valid before is not valid now",
        file=piece.file, offset=piece.offset, topic_id=topic_id,
        seq=piece.first,
    )  # fmt: skip


def _cut(
    piece: SalvagedSlice, data: bytes, batch: FrameBatch, topic_id: int, epoch: int
) -> tuple[bytes, FrameBatch]:
    """Return the frame, or a new frame of the wanted part of its records."""
    base, count = int(batch.words[0, layout.W_BASE_SEQ]), int(frames.counts_of(batch.words)[0])
    if (piece.first, piece.last) == (base, base + count - 1):
        return data, batch
    (block,) = blocks_of(data, batch)
    block_slice = BlockSlice(block, piece.first - base, piece.last - base + 1)
    sealed = seal_frame(
        [block_slice], topic_id=topic_id, epoch=epoch, salt=piece.salt, compression=CompressionPolicy()
    )
    made = b"".join(bytes(each) for each in sealed.pieces)
    return made, frames.scan(memoryview(made))
