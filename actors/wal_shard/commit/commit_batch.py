"""Commit batches and the chain of marks that links them. Pure.

One write call and at most one sync cover a commit batch. The batch starts with a chain mark. The mark
contains the end and the last seal of the previous batch, and the durable position at the time of the write
(storage/layout.py). A reader of the file therefore knows which bytes must be intact: all bytes below a mark's
durable_stop. Bytes above the last durable_stop may be torn.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringlog.actors.wal_shard.commit.admission import FrameIntake
from ringlog.actors.wal_shard.commit.control_records import ChainMarkRecord, frame_of
from ringlog.contract import Reply
from ringlog.frame import batch as frames
from ringlog.frame import codec, layout
from ringlog.frame.kernel import kernel
from ringlog.frame.layout import FrameType
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

News = tuple[ShardTopic, int, int, int, int, int, bool]
"""(topic, first_seq, last_seq, file_id, offset, stop, is_volatile): adjacent frames of one topic in one file.
The shard announces a commit batch to readers in such rows."""

MARK_BYTES_MAX = 4_096
"""Bytes reserved for the mark when a batch's size is checked.
Only a mark with settled pairs comes near it."""


@dataclass(slots=True)
class LogPosition:
    """Append position in the current WAL file, and the state of the chain of marks up to it."""

    file_id: int = 0
    salt: int = 0
    offset: int = 0
    capacity: int = 0
    batch_number: int = 0
    last_seal: int = 0
    prev_stop: int = 0
    durable: int = 0
    """End offset of the bytes in this file that a successful sync covers."""
    marked_durable: int = 0
    """durable_stop of the last mark that was written."""
    frames_stop: int = 0
    """End offset of the last batch that was more than a mark of an idle log."""

    @property
    def is_open(self) -> bool:
        """True after the first file was opened."""
        return self.file_id != 0

    def fits(self, length: int) -> bool:
        """Return True if a batch of `length` bytes, plus its mark, fits into the rest of the file."""
        return self.offset + length + MARK_BYTES_MAX <= self.capacity

    def start_file(self, file_id: int, salt: int, start: int, capacity: int) -> None:
        """Make a new file the current one.

        The chain restarts; the file's header links to the previous file.
        """
        self.file_id, self.salt, self.capacity = file_id, salt, capacity
        self.offset = self.prev_stop = self.durable = self.marked_durable = self.frames_stop = start
        self.batch_number = 0
        self.last_seal = 0


class ControlPart:
    """A control frame that is staged in a commit batch."""

    __slots__ = ("frame", "topic")

    def __init__(self, frame: bytearray, topic: ShardTopic | None = None) -> None:
        self.frame: bytearray = frame
        self.topic: ShardTopic | None = topic


class RoutedCopy(NamedTuple):
    """Records first_seq..last_seq of one topic in a routed frame, and their accounted bytes."""

    topic: ShardTopic
    first_seq: int
    last_seq: int
    bytes: int


@dataclass(slots=True)
class RoutedPart:
    """A routed frame that is staged in a commit batch.

    All its copies go to the WAL, or all to the volatile log.
    """

    frame: bytearray
    copies: list[RoutedCopy]
    is_volatile: bool = False


@dataclass(slots=True)
class PendingSettlement:
    """Settlements that are due to one producer when the commit batch is durable."""

    source: int
    intake: FrameIntake
    new_tail: int


class CommitBatch:
    """All frames staged for the next write, in order, and the answers that wait for it."""

    __slots__ = (
        "bytes",
        "dirty_topics",
        "duplicates",
        "frames",
        "has_removals",
        "needs_sync",
        "news",
        "parts",
        "records",
        "refused",
        "replies",
        "settlements",
        "volatile_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.parts: list[FrameIntake | ControlPart | RoutedPart] = []
        self.bytes: int = 0
        self.volatile_bytes: int = 0
        """Bytes of WAL frames, without the mark, and bytes of frames for the volatile log."""
        self.needs_sync: bool = False
        self.dirty_topics: dict[int, ShardTopic] = {}
        self.frames: int = 0
        self.records: int = 0
        self.refused: int = 0
        self.duplicates: int = 0
        self.has_removals: bool = False
        """True if the batch removes records from a topic."""
        self.news: list[News] = []
        """Rows of the frames laid out so far, in file order."""
        self.settlements: list[PendingSettlement] = []
        self.replies: list[Reply] = []

    @property
    def is_staged(self) -> bool:
        """True if anything is staged and not published."""
        return bool(self.parts or self.settlements or self.has_removals)

    def add_intake(self, intake: FrameIntake) -> None:
        """Stage the admitted rows of an intake."""
        self.frames += intake.frames
        self.records += intake.records
        self.refused += intake.refused
        self.duplicates += intake.duplicates
        totals = intake.batch.total_bytes
        for admitted_range in intake.admitted_ranges:
            is_single_frame = admitted_range.stop - admitted_range.start == 1
            length = int(
                totals[admitted_range.start]
                if is_single_frame
                else totals[admitted_range.start : admitted_range.stop].sum()
            )
            if admitted_range.is_volatile:
                self.volatile_bytes += length
            else:
                self.bytes += length
            self.dirty_topics[admitted_range.topic.topic_id] = admitted_range.topic
        self.parts.append(intake)
        self.needs_sync |= intake.needs_sync

    def add_routed(self, part: RoutedPart) -> None:
        """Stage a routed frame. The seqs of its copies are already assigned."""
        if part.is_volatile:
            self.volatile_bytes += len(part.frame)
        else:
            self.bytes += len(part.frame)
        self.frames += 1
        for copy in part.copies:
            self.records += copy.last_seq - copy.first_seq + 1
            self.dirty_topics[copy.topic.topic_id] = copy.topic
            self.needs_sync |= copy.topic.config.durability == Durability.FSYNC
        self.parts.append(part)

    def add_control(self, frame: bytearray, topic: ShardTopic | None = None, *, sync: bool = True) -> None:
        """Stage one control frame. If `topic` is given, it is published with the batch."""
        self.parts.append(ControlPart(frame, topic))
        self.bytes += len(frame)
        self.needs_sync |= sync
        if topic is not None:
            self.dirty_topics[topic.topic_id] = topic


_MARK_BODY = struct.Struct(">B" + "BQ" * 6 + "B")
_MARK_FIXED_BYTES = layout.HEADER_BYTES + _MARK_BODY.size
_CHAIN_MARK: Final = int(FrameType.GROUP_MARK)
_FSYNC: Final = int(Durability.FSYNC)
_COUNT_MASK = (1 << layout.EPOCH_SHIFT) - 1
_U64, _ARRAY_OF_7, _ARRAY_OF_0 = 0xCF, 0x97, 0x90
assert _MARK_BODY.size % 8 == 0, "the mark's body needs no padding"


CopiedFiles = tuple[Sequence[tuple[int, int]], Sequence[int]]
"""Content of a MARK_COPIED mark: pairs (file, stop), and the ids of files cut at damage."""
_NO_COPIED_FILES: CopiedFiles = ((), ())


def mark_frame(
    position: LogPosition, body_bytes: int, flags: int, copied_files: CopiedFiles = _NO_COPIED_FILES
) -> tuple[bytearray, int]:
    """Build the sealed mark of a batch that has `body_bytes` bytes after the mark. Return (frame, seal).

    Every batch has a mark, so a fixed struct builds it instead of the encoder. Numbers of fixed width make
    its size known in advance. `decode_body` reads it like the mark that `frame_of(ChainMarkRecord(...))`
    builds.
    """
    body = _MARK_BODY.pack(
        _ARRAY_OF_7, _U64, position.batch_number, _U64, position.prev_stop, _U64, position.last_seal, _U64,
        position.durable, _U64, body_bytes + _MARK_FIXED_BYTES, _U64, flags, _ARRAY_OF_0,
    )  # fmt: skip
    if any(copied_files):
        return _mark_with_copied_files(position, body_bytes, flags, copied_files)
    mark = kernel.control(_CHAIN_MARK, 0, 0, 0, 0, _FSYNC, body)
    return mark, kernel.seal_at(mark, 0, position.salt)


def _mark_with_copied_files(
    position: LogPosition, body_bytes: int, flags: int, copied_files: CopiedFiles
) -> tuple[bytearray, int]:
    """Build a mark that lists other files (rare).

    The mark contains its own size, so a draft finds the size first.
    """
    settled, damaged = [list(pair) for pair in copied_files[0]], list(copied_files[1])

    def build(group_bytes: int) -> bytearray:
        return frame_of(
            ChainMarkRecord(
                position.batch_number, position.prev_stop, position.last_seal, position.durable,
                group_bytes, flags,
                settled, damaged,
            ),
            0,
        )  # fmt: skip

    # MessagePack encodes sizes from 2**16 on with one width, and frames are padded to 8 bytes. One draft is
    # therefore enough if the draft's size already has the final width.
    total = body_bytes + len(build(body_bytes + (1 << 16)))
    mark = build(total)
    if body_bytes + len(mark) != total:
        mark = build(body_bytes + len(mark))
    return mark, codec.seal(mark, position.salt)


def lay_out(
    batch: CommitBatch, position: LogPosition, flags: int = 0, copied_files: CopiedFiles = _NO_COPIED_FILES
) -> list[Any]:
    """Seal the WAL parts of a batch for its position in the file. Return the buffers to write.

    Advances `position` past the batch, and adds the frames' positions to the topics' indexes and to
    `batch.news`.
    """
    mark, seal = mark_frame(position, batch.bytes, flags, copied_files)
    buffers: list[Any] = [mark]
    offset = position.offset + len(mark)
    for part in batch.parts:
        if isinstance(part, ControlPart):
            seal = codec.seal(part.frame, position.salt)
            buffers.append(part.frame)
            offset += len(part.frame)
        elif isinstance(part, RoutedPart):
            if not part.is_volatile:
                seal = _lay_out_routed(part, position.file_id, position.salt, offset, buffers, batch.news)
                offset += len(part.frame)
        else:
            offset, last = _lay_out_intake(
                part, position.file_id, position.salt, offset, buffers, batch.news, is_volatile=False
            )
            seal = last or seal
    position.marked_durable = position.durable
    position.prev_stop = position.offset = offset
    if batch.parts or flags:
        position.frames_stop = offset
    position.batch_number += 1
    position.last_seal = seal
    return buffers


def lay_out_volatile(batch: CommitBatch, position: LogPosition) -> list[Any]:
    """Seal the volatile parts of a batch like `lay_out`.

    There is no mark: a volatile file ends with its writer.
    """
    buffers: list[Any] = []
    offset = position.offset
    for part in batch.parts:
        if isinstance(part, FrameIntake):
            offset, _ = _lay_out_intake(
                part, position.file_id, position.salt, offset, buffers, batch.news, is_volatile=True
            )
        elif isinstance(part, RoutedPart) and part.is_volatile:
            _lay_out_routed(part, position.file_id, position.salt, offset, buffers, batch.news)
            offset += len(part.frame)
    position.offset = offset
    return buffers


def _lay_out_routed(
    part: RoutedPart, file_id: int, salt: int, offset: int, buffers: list[Any], news: list[News]
) -> int:
    """Seal a routed frame and add its position to the index of each of its topics. Return its seal."""
    seal = codec.seal(part.frame, salt)
    buffers.append(part.frame)
    stop = offset + len(part.frame)
    for topic, first_seq, last_seq, _ in part.copies:
        topic.index.add(first_seq, file_id, offset)
        _add_news(news, topic, first_seq, last_seq, file_id, offset, stop, part.is_volatile)
    return seal


def _lay_out_intake(
    intake: FrameIntake, file_id: int, salt: int, offset: int, buffers: list[Any], news: list[News],
    *, is_volatile: bool,
) -> tuple[int, int]:  # fmt: skip
    """Seal the intake's frames for one log (WAL or volatile) and append their bytes to `buffers`.

    Return (next offset, last seal). The seal is 0 if the intake has no frame for this log.
    """
    if len(intake.batch) == 1:
        return _lay_out_one(intake, file_id, salt, offset, buffers, news, is_volatile=is_volatile)
    view = memoryview(intake.buffer)
    starts, totals = intake.batch.offsets, intake.batch.total_bytes
    run_start = run_stop = -1
    seal = 0
    for admitted_range in intake.admitted_ranges:
        if admitted_range.is_volatile != is_volatile:
            continue
        rows = intake.batch.words[admitted_range.start : admitted_range.stop]
        seal = frames.seal_rows(intake.buffer, intake.batch, admitted_range.start, admitted_range.stop, salt)
        first = int(starts[admitted_range.start])
        stop = int(starts[admitted_range.stop - 1] + totals[admitted_range.stop - 1])
        offsets = starts[admitted_range.start : admitted_range.stop] + (offset - first)
        admitted_range.topic.index.add_run(rows[:, layout.W_BASE_SEQ], file_id, offsets)
        begin, offset = offset, offset + stop - first
        first_seq, last_seq = _seqs_of(rows)
        _add_news(news, admitted_range.topic, first_seq, last_seq, file_id, begin, offset, is_volatile)
        if first == run_stop:
            run_stop = stop
        else:
            if run_start >= 0:
                buffers.append(view[run_start:run_stop])
            run_start, run_stop = first, stop
    if run_start >= 0:
        buffers.append(view[run_start:run_stop])
    return offset, seal


def _lay_out_one(
    intake: FrameIntake, file_id: int, salt: int, offset: int, buffers: list[Any], news: list[News],
    *, is_volatile: bool,
) -> tuple[int, int]:  # fmt: skip
    """Do the work of `_lay_out_intake` for a single frame, where latency matters most."""
    if not intake.admitted_ranges or intake.admitted_ranges[0].is_volatile != is_volatile:
        return offset, 0
    start, total = int(intake.batch.offsets[0]), int(intake.batch.total_bytes[0])
    topic = intake.admitted_ranges[0].topic
    row = intake.batch.words[0]
    base = int(row[layout.W_BASE_SEQ])
    topic.index.add(base, file_id, offset)
    _add_news(news, topic, base, base + intake.records - 1, file_id, offset, offset + total, is_volatile)
    buffers.append(memoryview(intake.buffer)[start : start + total])
    return offset + total, frames.seal_rows(intake.buffer, intake.batch, 0, 1, salt)


def _seqs_of(rows: frames.U64) -> tuple[int, int]:
    """Return the first and the last seq of consecutive frames."""
    last_count = int(rows[-1, layout.W_COUNT_EPOCH]) & _COUNT_MASK
    return int(rows[0, layout.W_BASE_SEQ]), int(rows[-1, layout.W_BASE_SEQ]) + last_count - 1


def _add_news(
    news: list[News], topic: ShardTopic, first_seq: int, last_seq: int, file_id: int, offset: int, stop: int,
    is_volatile: bool,
) -> None:  # fmt: skip
    """Add frames to the news rows.

    Frames directly after the last row's frames, of the same topic, extend that row. Several producers of one
    topic in a batch therefore share one row.
    """
    if news:
        last = news[-1]
        if last[0] is topic and last[5] == offset and last[3] == file_id:
            news[-1] = (topic, last[1], last_seq, file_id, last[4], stop, is_volatile)
            return
    news.append((topic, first_seq, last_seq, file_id, offset, stop, is_volatile))
