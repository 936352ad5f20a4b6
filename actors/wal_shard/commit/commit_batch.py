"""Groups: what one write call and at most one sync cover, and the chain that ties them together. Pure.

A group opens with a mark that names the end and the last seal of the group before it and says how far
the log was durable when it was written (storage/layout.py). So a reader of the file knows what must
be there (below a mark's durable_stop) and what may be torn (above the last one).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from actors.wal_shard.commit.admission import FrameIntake
from actors.wal_shard.commit.control_records import GroupMark, frame_of
from ringlog.frame import batch as frames
from ringlog.frame import codec, layout
from ringlog.frame.kernel import kernel
from ringlog.frame.layout import FrameType
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

News = tuple[ShardTopic, int, int, int, int, int, bool]
"""(topic, first_seq, last_seq, file_id, offset, stop, is_volatile) of frames of one topic that lie one behind
the other: what readers are told of a group."""

MARK_BYTES_MAX = 4_096
"""Room kept for a mark when a group's size is judged; only a mark with settled pairs comes near it."""


@dataclass(slots=True)
class LogPosition:
    """Where the next group goes in one file, and the chain up to there."""

    file_id: int = 0
    salt: int = 0
    offset: int = 0
    capacity: int = 0
    batch_number: int = 0
    last_seal: int = 0
    prev_stop: int = 0
    durable: int = 0
    """How far a sync has succeeded in this file."""
    marked_durable: int = 0
    """durable_stop of the last mark written."""
    frames_stop: int = 0
    """Where the last group ends that was more than a mark of an idle stream."""

    @property
    def is_open(self) -> bool:
        """True once a file was opened."""
        return self.file_id != 0

    def fits(self, length: int) -> bool:
        """Does a group of this many bytes, mark not counted, fit into the rest of the file?"""
        return self.offset + length + MARK_BYTES_MAX <= self.capacity

    def start_file(self, file_id: int, salt: int, start: int, capacity: int) -> None:
        """A new file is current. The chain starts again; its header carries the link."""
        self.file_id, self.salt, self.capacity = file_id, salt, capacity
        self.offset = self.prev_stop = self.durable = self.marked_durable = self.frames_stop = start
        self.batch_number = 0
        self.last_seal = 0


class ControlPart:
    """A control frame waiting for its place in a group."""

    __slots__ = ("frame", "topic")

    def __init__(self, frame: bytearray, topic: ShardTopic | None = None) -> None:
        self.frame, self.topic = frame, topic


class RoutedCopy(NamedTuple):
    """Records first..last of a topic, which a routed frame holds; and their accounted bytes."""

    topic: ShardTopic
    first_seq: int
    last_seq: int
    bytes: int


@dataclass(slots=True)
class RoutedPart:
    """A routed frame waiting for its place in a group: all its copies go to one kind of log."""

    frame: bytearray
    copies: list[RoutedCopy]
    is_volatile: bool = False


class CommitBatch:
    """Everything staged for the next write, in order."""

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
        "volatile_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.parts: list[FrameIntake | ControlPart | RoutedPart] = []
        self.bytes = self.volatile_bytes = 0
        """Bytes of logged frames, mark not counted."""
        self.needs_sync = False
        self.dirty_topics: dict[int, ShardTopic] = {}
        self.frames = self.records = self.refused = self.duplicates = 0
        self.has_removals = False
        """Something leaves a topic with this group."""
        self.news: list[News] = []
        """What was laid out so far, in the order of the files."""

    def add_intake(self, intake: FrameIntake) -> None:
        """Take in the admitted rows of an intake."""
        self.frames += intake.frames
        self.records += intake.records
        self.refused += intake.refused
        self.duplicates += intake.duplicates
        totals = intake.batch.total_bytes
        for stretch in intake.admitted_ranges:
            is_lone = stretch.stop - stretch.start == 1
            length = int(totals[stretch.start] if is_lone else totals[stretch.start : stretch.stop].sum())
            if stretch.is_volatile:
                self.volatile_bytes += length
            else:
                self.bytes += length
            self.dirty_topics[stretch.topic.topic_id] = stretch.topic
        self.parts.append(intake)
        self.needs_sync |= intake.needs_sync

    def add_routed(self, part: RoutedPart) -> None:
        """Take in copies, whose numbers are staged."""
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
        """Take in one control frame; `topic` is published with the group."""
        self.parts.append(ControlPart(frame, topic))
        self.bytes += len(frame)
        self.needs_sync |= sync
        if topic is not None:
            self.dirty_topics[topic.topic_id] = topic


_MARK_BODY = struct.Struct(">B" + "BQ" * 6 + "B")
_MARK_FIXED_BYTES = layout.HEADER_BYTES + _MARK_BODY.size
_GROUP_MARK: Final = int(FrameType.GROUP_MARK)
_FSYNC: Final = int(Durability.FSYNC)
_COUNT_MASK = (1 << layout.EPOCH_SHIFT) - 1
_U64, _ARRAY_OF_7, _ARRAY_OF_0 = 0xCF, 0x97, 0x90
assert _MARK_BODY.size % 8 == 0, "the mark's body needs no padding"


CopiedFiles = tuple[Sequence[tuple[int, int]], Sequence[int]]
"""What MARK_COPIED says of earlier files: pairs (file, stop), and the files cut at damage."""
_NO_COPIED_FILES: CopiedFiles = ((), ())


def mark_frame(
    position: LogPosition, body_bytes: int, flags: int, word: CopiedFiles = _NO_COPIED_FILES
) -> tuple[bytearray, int]:
    """Build the sealed mark of a group with `body_bytes` further bytes; returns (frame, seal).

    One is written for every group, so it is put together by hand: numbers of fixed width make its size
    known beforehand. It is the same MessagePack array that `frame_of(GroupMark(...))` decodes.
    """
    body = _MARK_BODY.pack(
        _ARRAY_OF_7, _U64, position.batch_number, _U64, position.prev_stop, _U64, position.last_seal, _U64,
        position.durable, _U64, body_bytes + _MARK_FIXED_BYTES, _U64, flags, _ARRAY_OF_0,
    )  # fmt: skip
    if any(word):
        return _mark_with_copied_files(position, body_bytes, flags, word)
    mark = kernel.control(_GROUP_MARK, 0, 0, 0, 0, _FSYNC, body)
    return mark, kernel.seal_at(mark, 0, position.salt)


def _mark_with_copied_files(
    position: LogPosition, body_bytes: int, flags: int, word: CopiedFiles
) -> tuple[bytearray, int]:
    """The rare mark that speaks of other files. It counts itself: its size is found first, by a draft."""
    settled, damaged = [list(pair) for pair in word[0]], list(word[1])

    def build(group_bytes: int) -> bytearray:
        return frame_of(
            GroupMark(
                position.batch_number, position.prev_stop, position.last_seal, position.durable,
                group_bytes, flags,
                settled, damaged,
            ),
            0,
        )  # fmt: skip

    # A size above 2**16 always takes the same width, and frames are padded to 8: one draft is enough
    # once the number it is drafted with has its final width.
    total = body_bytes + len(build(body_bytes + (1 << 16)))
    mark = build(total)
    if body_bytes + len(mark) != total:
        mark = build(body_bytes + len(mark))
    return mark, codec.seal(mark, position.salt)


def lay_out(
    group: CommitBatch, position: LogPosition, flags: int = 0, word: CopiedFiles = _NO_COPIED_FILES
) -> list[Any]:
    """Seal the logged parts of a group for its place in the file; returns the buffers to write.

    Afterwards `position` stands behind the group and the topics' indexes know where it lies.
    """
    mark, seal = mark_frame(position, group.bytes, flags, word)
    buffers: list[Any] = [mark]
    offset = position.offset + len(mark)
    for part in group.parts:
        if isinstance(part, ControlPart):
            seal = codec.seal(part.frame, position.salt)
            buffers.append(part.frame)
            offset += len(part.frame)
        elif isinstance(part, RoutedPart):
            if not part.is_volatile:
                seal = _lay_out_routed(part, position.file_id, position.salt, offset, buffers, group.news)
                offset += len(part.frame)
        else:
            offset, last = _lay_out_intake(
                part, position.file_id, position.salt, offset, buffers, group.news, is_volatile=False
            )
            seal = last or seal
    position.marked_durable = position.durable
    position.prev_stop = position.offset = offset
    if group.parts or flags:
        position.frames_stop = offset
    position.batch_number += 1
    position.last_seal = seal
    return buffers


def lay_out_volatile(group: CommitBatch, position: LogPosition) -> list[Any]:
    """The same for the volatile parts: no marks, since a volatile file does not outlive its writer."""
    buffers: list[Any] = []
    offset = position.offset
    for part in group.parts:
        if isinstance(part, FrameIntake):
            offset, _ = _lay_out_intake(
                part, position.file_id, position.salt, offset, buffers, group.news, is_volatile=True
            )
        elif isinstance(part, RoutedPart) and part.is_volatile:
            _lay_out_routed(part, position.file_id, position.salt, offset, buffers, group.news)
            offset += len(part.frame)
    position.offset = offset
    return buffers


def _lay_out_routed(
    part: RoutedPart, file_id: int, salt: int, offset: int, buffers: list[Any], news: list[News]
) -> int:
    """Seal a routed frame; readers of each of its topics find it there. Returns its seal."""
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
    """Seal the intake's stretches of one kind, append their bytes to `buffers`; (next offset, last seal)."""
    if len(intake.batch) == 1:
        return _lay_out_one(intake, file_id, salt, offset, buffers, news, is_volatile=is_volatile)
    view = memoryview(intake.buffer)
    starts, totals = intake.batch.offsets, intake.batch.total_bytes
    run_start = run_stop = -1
    seal = 0
    for stretch in intake.admitted_ranges:
        if stretch.is_volatile != is_volatile:
            continue
        rows = intake.batch.words[stretch.start : stretch.stop]
        seal = frames.seal_rows(intake.buffer, intake.batch, stretch.start, stretch.stop, salt)
        first = int(starts[stretch.start])
        stop = int(starts[stretch.stop - 1] + totals[stretch.stop - 1])
        places = starts[stretch.start : stretch.stop] + (offset - first)
        stretch.topic.index.add_run(rows[:, layout.W_BASE_SEQ], file_id, places)
        begin, offset = offset, offset + stop - first
        first_seq, last_seq = _seqs_of(rows)
        _add_news(news, stretch.topic, first_seq, last_seq, file_id, begin, offset, is_volatile)
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
    """The same for a single frame, which is all latency."""
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
    """First and last number of frames that follow each other."""
    last_count = int(rows[-1, layout.W_COUNT_EPOCH]) & _COUNT_MASK
    return int(rows[0, layout.W_BASE_SEQ]), int(rows[-1, layout.W_BASE_SEQ]) + last_count - 1


def _add_news(
    news: list[News], topic: ShardTopic, first_seq: int, last_seq: int, file_id: int, offset: int, stop: int,
    is_volatile: bool,
) -> None:  # fmt: skip
    """Add a stretch to the news. Right behind one of the same topic it makes that longer: producers of one
    topic in a group are one piece of news."""
    if news:
        last = news[-1]
        if last[0] is topic and last[5] == offset and last[3] == file_id:
            news[-1] = (topic, last[1], last_seq, file_id, last[4], stop, is_volatile)
            return
    news.append((topic, first_seq, last_seq, file_id, offset, stop, is_volatile))
