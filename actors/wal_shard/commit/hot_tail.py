"""Cache of the newest records of queues and of topics with consumer groups. Pure.

Workers often claim a record soon after its commit. Without this cache, the worker would read the job back
from the log, and the shard would read its size for the ack. The shard therefore keeps the committed frames in
memory, up to a limit, and sends them with the reply to a claim. If jobs consist of a payload only, it sends
bare payloads, which is cheapest; otherwise it sends whole frames.

The cache evicts jobs that are done as the queue advances. At the limit it evicts the oldest jobs; workers
then read them from the log. Entries cannot be stale: a record never changes, and a topic id is never reused.

Each commit adds a `PayloadBlock` or a `FrameBlock`, or `_RawFrames` that the first lookup converts into one
of them. Routed frames are not cached.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.wal_shard.commit.admission import FrameIntake
from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.codec import seal
from ringlog.frame.layout import Column
from ringlog.frame.spans import spans_of
from ringlog.limits import HOT_TAIL_BYTES, INLINE_BYTES_MAX
from ringlog.topic.config import QUEUE
from ringlog.topic.retention import first_live_seq
from ringlog.topic.state import ShardTopic

I64 = NDArray[np.int64]
STAMP_BYTES = 8
_PAYLOAD_ALONE = 1 << Column.PAYLOAD
_PAYLOAD_ONLY = frozenset({_PAYLOAD_ALONE, _PAYLOAD_ALONE | 1 << Column.COMMIT_TS})
_HEADER_STRUCT = struct.Struct("<QQQQII")
"""First words of a frame header: length and columns, topic, base seq, timestamp, record count, epoch."""
_CODEC_AT = layout.W_TAIL * 8 + 4
_LENGTH_AT = layout.HEADER_BYTES + 4
_DATA_AT = layout.HEADER_BYTES + 8
_ENTRY_BYTES = 512
"""Approximate memory of the objects of one entry, in bytes."""
_JOB_BYTES = 64
"""Approximate memory of each job that is cut out of a frame.
Small jobs then take more than in their frame."""
_TIDY_AT = 1_024


class Contents:
    """Contents of the jobs of one claim, in ascending order of seq.

    Jobs that consist of a payload only are in `payloads` and `stamps`. The frames of all other jobs are in
    `data`, sealed with seed 0.
    """

    __slots__ = ("_last", "data", "frames", "payloads", "size", "stamps")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.stamps: bytes = b""
        """Commit times of the payloads: 8 bytes each, microseconds since 1970, little-endian."""
        self.data: bytes = b""
        self.frames: int = 0
        self.size: int = 0
        self._last: tuple[FrameBlock | None, int] = None, 0
        """The block that frames were last added from, and the row after the last one.
        No frame is added twice."""

    def add_payloads(self, payloads: list[bytes], stamps: bytes) -> None:
        """Add payloads and commit times of the next jobs."""
        self.payloads += payloads
        self.stamps += stamps
        self.size += sum(map(len, payloads))

    def add_frames(self, framed: FrameBlock, low: int, high: int) -> None:
        """Add the frames of rows [low, high) of a block."""
        if self._last[0] is framed:
            low = max(low, self._last[1])
        self._last = framed, high
        data = framed.sealed(low, high)
        self.data += data
        self.frames += high - low
        self.size += len(data)


class PayloadBlock:
    """Jobs [first, stop) of one queue, without a gap, that consist of a payload only."""

    __slots__ = ("first", "payloads", "sizes", "stamps", "stop")

    def __init__(
        self, first: int, stop: int, payloads: list[bytes], stamps: bytes, sizes: I64 | None
    ) -> None:
        self.first: int = first
        self.stop: int = stop
        self.payloads: list[bytes] = payloads
        self.stamps: bytes = stamps
        self.sizes: I64 | None = sizes
        """(n,) accounted bytes of each job.
        None if there is one job, which is accounted with its payload size."""

    def add_to(self, first: int, stop: int, contents: Contents) -> None:
        """Add jobs [first, stop) of this block to `contents`."""
        low, high = first - self.first, stop - self.first
        contents.add_payloads(self.payloads[low:high], self.stamps[STAMP_BYTES * low : STAMP_BYTES * high])

    def accounted_bytes(self, first: int, stop: int) -> int | None:
        """Return the accounted bytes of jobs [first, stop) of this block."""
        if self.sizes is None:
            return len(self.payloads[0])
        return _sum(self.sizes, first - self.first, stop - self.first)


class FrameBlock:
    """Frames with jobs [first, stop) of one queue that have more than a payload, or a large payload."""

    __slots__ = ("_bases", "_data", "_offsets", "_totals", "first", "sizes", "stop")

    def __init__(
        self, bases: Sequence[int], stop: int, data: bytes | bytearray, offsets: Sequence[int],
        totals: Sequence[int], sizes: I64 | None,
    ) -> None:  # fmt: skip
        self.first: int = bases[0]
        self.stop: int = stop
        self._bases = bases
        """Seq of the first job of each frame."""
        self._data, self._offsets, self._totals = data, offsets, totals
        self.sizes: I64 | None = sizes
        """(n,) accounted bytes of each job. None if unknown: compressed frames do not contain the sizes."""

    def add_to(self, first: int, stop: int, contents: Contents) -> None:
        """Add the frames that contain jobs [first, stop) to `contents`."""
        low, high = self._rows(first, stop)
        contents.add_frames(self, low, high)

    def bytes_of(self, first: int, stop: int) -> int:
        """Return the bytes that `add_to` would add. A single frame with a single job counts as 0."""
        low, high = self._rows(first, stop)
        after = self._bases[high] if high < len(self._bases) else self.stop
        return 0 if after - self._bases[low] == 1 else sum(self._totals[low:high])

    def _rows(self, first: int, stop: int) -> tuple[int, int]:
        return bisect_right(self._bases, first) - 1, bisect_left(self._bases, stop)

    def accounted_bytes(self, first: int, stop: int) -> int | None:
        """Return the accounted bytes of jobs [first, stop) of this block; None if they are unknown."""
        return None if self.sizes is None else _sum(self.sizes, first - self.first, stop - self.first)

    def sealed(self, low: int, high: int) -> bytearray:
        """Return a copy of the frames of rows [low, high), sealed with the seed for messages."""
        found = bytearray()
        for at, size in zip(self._offsets[low:high], self._totals[low:high], strict=True):
            start = len(found)
            found += self._data[at : at + size]
            seal(found, layout.WIRE_SEED, start)
        return found


Block = PayloadBlock | FrameBlock
Part = tuple[Block, int, int]
"""(block, first, stop): jobs [first, stop) of a block."""


class _RawFrames:
    """Consecutive frames of one topic that are not decoded yet."""

    __slots__ = ("data", "first", "offsets", "stop", "totals")

    def __init__(self, first: int, stop: int, data: bytearray, offsets: I64, totals: I64) -> None:
        self.first, self.stop = first, stop
        self.data, self.offsets, self.totals = data, offsets, totals

    def cut(self) -> Block:
        """Decode the frames into single payloads where that is cheap, otherwise into a block of frames."""
        words = np.frombuffer(self.data, "<u8")
        rows = words[(self.offsets[:, None] >> 3) + np.arange(layout.HEADER_WORDS)]
        block, sizes = split_jobs(
            self.data, FrameBatch(self.offsets, rows, len(self.data), frames.ScanEnd.CLEAN)
        )
        if block is not None:
            return block
        bases = rows[:, layout.W_BASE_SEQ].tolist()
        return FrameBlock(bases, self.stop, self.data, self.offsets.tolist(), self.totals.tolist(), sizes)


class _TopicTail:
    """The cached entries of one topic, in ascending order of seq."""

    __slots__ = ("blocks", "firsts", "front", "numbers", "sizes")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.blocks: list[Block | _RawFrames | None] = []
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.front = 0
        """Index of the first entry that is not evicted."""


class HotTail:
    """Cache of the newest records of one shard. All topics together use about `bytes_max` bytes of memory."""

    def __init__(self, bytes_max: int = HOT_TAIL_BYTES) -> None:
        self._bytes_max = bytes_max
        self.bytes: int = 0
        self._tails: dict[int, _TopicTail] = {}
        self._order: OrderedDict[int, _TopicTail] = OrderedDict()
        """All entries by their number, oldest first."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._order)

    # -- adding and evicting --------------------------------------------------------------------------

    def add(self, intake: FrameIntake) -> None:
        """Cache the committed frames of topics whose records can be claimed.

        The frames must have their seqs and commit times already.
        """
        for admitted_range in intake.admitted_ranges:
            topic = admitted_range.topic
            if topic.config.type != QUEUE and not topic.groups:
                continue
            if admitted_range.stop - admitted_range.start == 1 and self._add_single(
                topic, intake, admitted_range.start
            ):
                continue
            shapes = frames.shapes_of(intake.batch.words[admitted_range.start : admitted_range.stop])
            at = admitted_range.start
            for stop in [*(np.flatnonzero(np.diff(shapes)) + 1 + at).tolist(), admitted_range.stop]:
                self._add_uniform(topic, intake, at, stop)
                at = stop

    def _add_single(self, topic: ShardTopic, intake: FrameIntake, row: int) -> bool:
        """Handle a frame with a single job. Return False for a frame with more jobs."""
        buffer, start = intake.buffer, int(intake.batch.offsets[row])
        head, _, base, stamp, count, _ = _HEADER_STRUCT.unpack_from(buffer, start)
        if count != 1:
            return False
        length = int.from_bytes(buffer[start + _LENGTH_AT : start + _DATA_AT], "little")
        is_plain = head >> layout.COLUMNS_SHIFT == _PAYLOAD_ALONE and not buffer[start + _CODEC_AT]
        if is_plain and length <= INLINE_BYTES_MAX:
            data = start + _DATA_AT
            payload = bytes(buffer[data : data + length])
            self._keep(
                topic, PayloadBlock(base, base + 1, [payload], stamp.to_bytes(8, "little"), None), length + 8
            )
            return True
        size = int(intake.batch.total_bytes[row])
        if size <= self._bytes_max:
            sizes = None
            if is_plain:
                sizes = np.array([length])
            elif intake.checked is not None:
                sizes = intake.checked.accounted[row : row + 1].copy()
            framed = FrameBlock([base], base + 1, bytes(buffer[start : start + size]), [0], [size], sizes)
            self._keep(topic, framed, size)
        return True

    def _add_uniform(self, topic: ShardTopic, intake: FrameIntake, start: int, stop: int) -> None:
        """Cache rows of a batch that have the same format version and columns."""
        offsets, totals = intake.batch.offsets[start:stop], intake.batch.total_bytes[start:stop]
        begin, end = int(offsets[0]), int(offsets[-1] + totals[-1])
        if end - begin > self._bytes_max:
            return
        rows = intake.batch.words[start:stop]
        first = int(rows[0, layout.W_BASE_SEQ])
        past = int(rows[-1, layout.W_BASE_SEQ]) + int(frames.counts_of(rows[-1:])[0])
        data = intake.buffer[begin:end]
        self._keep(topic, _RawFrames(first, past, data, offsets - begin, totals), len(data))

    def _keep(self, topic: ShardTopic, block: Block | _RawFrames, size: int) -> None:
        tail = self._tails.get(topic.topic_id)
        if tail is None:
            tail = self._tails[topic.topic_id] = _TopicTail()
        self._evict_below(tail, first_live_seq(topic))
        self._added += 1
        tail.firsts.append(block.first)
        tail.blocks.append(block)
        tail.numbers.append(self._added)
        tail.sizes.append(size + _ENTRY_BYTES)
        self.bytes += size + _ENTRY_BYTES
        self._order[self._added] = tail
        self._enforce_limit()

    def _enforce_limit(self) -> None:
        """Evict the oldest entries until the cache is within its limit."""
        while self.bytes > self._bytes_max:
            self._evict_oldest(next(iter(self._order.values())))

    def _evict_below(self, tail: _TopicTail, front: int) -> None:
        """Evict the entries of which all jobs are below `front`, the first live seq of the topic."""
        blocks = tail.blocks
        while tail.front < len(blocks):
            block = blocks[tail.front]
            if block is not None and block.stop > front:
                break
            self._evict_oldest(tail)

    def _evict_oldest(self, tail: _TopicTail) -> None:
        at = tail.front
        del self._order[tail.numbers[at]]
        self.bytes -= tail.sizes[at]
        tail.blocks[at] = None
        tail.front = at + 1
        if tail.front >= _TIDY_AT or tail.front == len(tail.blocks):
            del tail.firsts[: tail.front]
            del tail.blocks[: tail.front]
            del tail.numbers[: tail.front]
            del tail.sizes[: tail.front]
            tail.front = 0

    def forget(self, topic_id: int) -> None:
        """Drop all entries of a deleted topic."""
        tail = self._tails.pop(topic_id, None)
        while tail is not None and tail.front < len(tail.blocks):
            self._evict_oldest(tail)

    # -- lookup ---------------------------------------------------------------------------------------

    def _at(self, topic: ShardTopic, seq: int) -> Block | None:
        """Return the block that contains this job; None if the job is not cached."""
        tail = self._tails.get(topic.topic_id)
        if tail is None:
            return None
        at = bisect_right(tail.firsts, seq, tail.front) - 1
        if at < tail.front:
            return None
        block = tail.blocks[at]
        if isinstance(block, _RawFrames):
            raw, block = block, block.cut()
            tail.blocks[at] = block
            more = _JOB_BYTES * (raw.stop - raw.first)
            tail.sizes[at] += more
            self.bytes += more
            self._enforce_limit()
        return block if block is not None and seq < block.stop else None

    def find_parts(self, topic: ShardTopic, first: int, count: int) -> list[Part] | None:
        """Find `count` consecutive jobs. Return None if one of them is not cached."""
        found: list[Part] = []
        at, stop = first, first + count
        while at < stop:
            block = self._at(topic, at)
            if block is None:
                return None
            high = min(stop, block.stop)
            found.append((block, at, high))
            at = high
        return found

    def total_of(self, topic: ShardTopic, first: int, count: int) -> int | None:
        """Return the accounted bytes of `count` consecutive jobs; None if the size of one is unknown."""
        total, at, stop = 0, first, first + count
        while at < stop:
            block = self._at(topic, at)
            if block is None:
                return None
            high = min(stop, block.stop)
            size = block.accounted_bytes(at, high)
            if size is None:
                return None
            total += size
            at = high
        return total


def contents_of(parts: Sequence[Part]) -> Contents | None:
    """Return the contents of these jobs, in ascending order of seq.

    Return None if the jobs, or the frames that contain them, are too large for a reply. A single job that is
    the only one of its frame always fits.
    """
    found = Contents()
    is_one = len(parts) == 1 and parts[0][2] - parts[0][1] == 1
    for block, first, stop in parts:
        # Check the size before the copy, because many workers may claim single jobs of one large frame.
        if isinstance(block, FrameBlock) and found.size + block.bytes_of(first, stop) > INLINE_BYTES_MAX:
            return None
        block.add_to(first, stop, found)
        if found.size > INLINE_BYTES_MAX and not is_one:
            return None
    return found


def split_jobs(
    buffer: bytes | bytearray | memoryview, batch: FrameBatch
) -> tuple[PayloadBlock | None, I64 | None]:
    """Split frames of one topic into single jobs. Return (jobs, sizes).

    `sizes` has shape (n,): the accounted bytes of each job. `jobs` is None if a job is large or has more than
    a payload. Both are None if the frames are compressed, differ in shape, do not decode, or leave a gap.
    """
    words = batch.words
    shapes = frames.shapes_of(words)
    if (shapes != shapes[0]).any() or frames.codecs_of(words).any():
        return None, None
    try:
        found = spans_of(buffer, batch)
    except FrameInvalid:
        return None, None
    seqs = found.seqs
    first, last = int(seqs[0]), int(seqs[-1])
    if last - first != len(seqs) - 1 or not bool((np.diff(seqs) == 1).all()):
        return None, None
    starts, stops = found.spans.get(Column.PAYLOAD) or (np.zeros(len(seqs), np.int64),) * 2
    sizes = stops - starts
    if int(frames.columns_of(words[:1])[0]) not in _PAYLOAD_ONLY or int(sizes.max()) > INLINE_BYTES_MAX:
        if Column.META in found.spans:
            low, high = found.spans[Column.META]
            sizes = sizes + (high - low)
        return None, sizes
    low_byte = int(starts[0])
    whole = bytes(found.buffer[low_byte : int(stops[-1])])
    places = map(slice, (starts - low_byte).tolist(), (stops - low_byte).tolist())
    stamps = found.times.astype("<i8").tobytes()
    return PayloadBlock(first, last + 1, list(map(whole.__getitem__, places)), stamps, sizes), sizes


def _sum(sizes: I64, low: int, high: int) -> int:
    return int(sizes[low]) if high - low == 1 else int(sizes[low:high].sum())
