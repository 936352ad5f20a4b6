"""The newest records of queues and of topics with groups, for who claims them soon after they were put. Pure.

What was just committed was in the shard's memory, and would be read back from the log at once: by the worker
for the job itself, and by the shard for its size when it is acked. So the frames are kept, up to a bound, and
travel with the answer to a claim: payloads by themselves where jobs have nothing else, which is cheapest, and
whole frames otherwise. Jobs that are over leave as the queue goes on; beyond the bound the oldest leave, and
are found in the log like all others. A record never changes in its topic's life, and no other topic ever has
its number, so nothing here can be out of date.

Each commit adds a `Plain` or a `Framed`, or a `_Stretch` of frames that becomes one of them when it is first
asked for. Frames that were routed are not kept.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.wal_shard.commit.admission import FrameIntake
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
_PLAIN = frozenset({_PAYLOAD_ALONE, _PAYLOAD_ALONE | 1 << Column.COMMIT_TS})
_LONE = struct.Struct("<QQQQII")
"""The first words of a header: length and columns, topic, base number, stamp, records, epoch."""
_CODEC_AT = layout.W_TAIL * 8 + 4
_LENGTH_AT = layout.HEADER_BYTES + 4
_DATA_AT = layout.HEADER_BYTES + 8
_ENTRY_BYTES = 512
"""What the objects of one entry take, about."""
_JOB_BYTES = 64
"""And those of each job that was cut out of a stretch; small jobs take more so than their frame did."""
_TIDY_AT = 1_024


class Contents:
    """What the jobs of one claim hold, ascending: payloads of those that have nothing else, each with its
    commit stamp, and frames of the others, sealed under seed 0."""

    __slots__ = ("_last", "data", "frames", "payloads", "size", "stamps")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.stamps = b""
        """8 bytes each, microseconds since the epoch, little-endian."""
        self.data = b""
        self.frames = 0
        self.size = 0
        self._last: tuple[FrameBlock | None, int] = None, 0
        """The frame that was added last, by its row: no frame comes twice."""

    def add_payloads(self, payloads: list[bytes], stamps: bytes) -> None:
        """Of jobs that follow those before."""
        self.payloads += payloads
        self.stamps += stamps
        self.size += sum(map(len, payloads))

    def add_frames(self, framed: FrameBlock, low: int, high: int) -> None:
        """Rows `low` up to `high`."""
        if self._last[0] is framed:
            low = max(low, self._last[1])
        self._last = framed, high
        data = framed.sealed(low, high)
        self.data += data
        self.frames += high - low
        self.size += len(data)


class PayloadBlock:
    """Jobs `first` up to `stop` of one queue, without a gap, that have a payload each and nothing else."""

    __slots__ = ("first", "payloads", "sizes", "stamps", "stop")

    def __init__(
        self, first: int, stop: int, payloads: list[bytes], stamps: bytes, sizes: I64 | None
    ) -> None:
        self.first, self.stop = first, stop
        self.payloads, self.stamps = payloads, stamps
        self.sizes = sizes
        """(n,) accounted bytes of each; None: it is one job, and those of its payload."""

    def add_to(self, first: int, stop: int, contents: Contents) -> None:
        """Add jobs that lie in here."""
        low, high = first - self.first, stop - self.first
        contents.add_payloads(self.payloads[low:high], self.stamps[STAMP_BYTES * low : STAMP_BYTES * high])

    def accounted_bytes(self, first: int, stop: int) -> int | None:
        """Accounted bytes of jobs that lie in here."""
        if self.sizes is None:
            return len(self.payloads[0])
        return _sum(self.sizes, first - self.first, stop - self.first)


class FrameBlock:
    """The same of jobs that have more than a payload, or a large one: in their frames."""

    __slots__ = ("_bases", "_data", "_offsets", "_totals", "first", "sizes", "stop")

    def __init__(
        self, bases: Sequence[int], stop: int, data: bytes | bytearray, offsets: Sequence[int],
        totals: Sequence[int], sizes: I64 | None,
    ) -> None:  # fmt: skip
        self.first, self.stop = bases[0], stop
        self._bases = bases
        """Of each frame, the number of its first job."""
        self._data, self._offsets, self._totals = data, offsets, totals
        self.sizes = sizes
        """(n,) accounted bytes of each job; None = not known, which compressed frames do not say."""

    def add_to(self, first: int, stop: int, contents: Contents) -> None:
        """Add the frames with jobs that lie in here."""
        low, high = self._rows(first, stop)
        contents.add_frames(self, low, high)

    def bytes_of(self, first: int, stop: int) -> int:
        """What that adds; 0 for a frame that holds nothing but the one job that is asked for."""
        low, high = self._rows(first, stop)
        after = self._bases[high] if high < len(self._bases) else self.stop
        return 0 if after - self._bases[low] == 1 else sum(self._totals[low:high])

    def _rows(self, first: int, stop: int) -> tuple[int, int]:
        return bisect_right(self._bases, first) - 1, bisect_left(self._bases, stop)

    def accounted_bytes(self, first: int, stop: int) -> int | None:
        """Accounted bytes of jobs that lie in here."""
        return None if self.sizes is None else _sum(self.sizes, first - self.first, stop - self.first)

    def sealed(self, low: int, high: int) -> bytearray:
        """A copy of these frames, sealed as they travel."""
        found = bytearray()
        for at, size in zip(self._offsets[low:high], self._totals[low:high], strict=True):
            start = len(found)
            found += self._data[at : at + size]
            seal(found, layout.WIRE_SEED, start)
        return found


Block = PayloadBlock | FrameBlock
Part = tuple[Block, int, int]
"""Jobs of a block: the first, and one past the last."""


class _RawFrames:
    """Frames of one topic, one behind the other, not yet looked into."""

    __slots__ = ("data", "first", "offsets", "stop", "totals")

    def __init__(self, first: int, stop: int, data: bytearray, offsets: I64, totals: I64) -> None:
        self.first, self.stop = first, stop
        self.data, self.offsets, self.totals = data, offsets, totals

    def cut(self) -> Block:
        """Its jobs, one by one where that is quickly done."""
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
    """What is kept of one topic, ascending."""

    __slots__ = ("blocks", "firsts", "front", "numbers", "sizes")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.blocks: list[Block | _RawFrames | None] = []
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.front = 0
        """Entries before it have left."""


class HotTail:
    """Of one shard's topics together up to `bytes_max` of memory, about."""

    def __init__(self, bytes_max: int = HOT_TAIL_BYTES) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self._tails: dict[int, _TopicTail] = {}
        self._order: OrderedDict[int, _TopicTail] = OrderedDict()
        """Every entry by its number, in the order they came."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._order)

    # -- what is kept ---------------------------------------------------------------------------------

    def add(self, intake: FrameIntake) -> None:
        """Keep what was committed, as far as somebody may claim it; its frames are numbered and stamped."""
        for stretch in intake.admitted_ranges:
            topic = stretch.topic
            if topic.config.type != QUEUE and not topic.groups:
                continue
            if stretch.stop - stretch.start == 1 and self._add_single(topic, intake, stretch.start):
                continue
            shapes = frames.shapes_of(intake.batch.words[stretch.start : stretch.stop])
            at = stretch.start
            for stop in [*(np.flatnonzero(np.diff(shapes)) + 1 + at).tolist(), stretch.stop]:
                self._add_uniform(topic, intake, at, stop)
                at = stop

    def _add_single(self, topic: ShardTopic, intake: FrameIntake, row: int) -> bool:
        """Keep a frame that holds one job; False for one that holds more."""
        buffer, start = intake.buffer, int(intake.batch.offsets[row])
        head, _, base, stamp, count, _ = _LONE.unpack_from(buffer, start)
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
        """Keep rows of a batch that have one shape."""
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
        """Beyond it the oldest leave."""
        while self.bytes > self._bytes_max:
            self._evict_oldest(next(iter(self._order.values())))

    def _evict_below(self, tail: _TopicTail, front: int) -> None:
        """Entries with jobs below the first there is are needed no more."""
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
        """The topic is no more."""
        tail = self._tails.pop(topic_id, None)
        while tail is not None and tail.front < len(tail.blocks):
            self._evict_oldest(tail)

    # -- what is known of jobs ------------------------------------------------------------------------

    def _at(self, topic: ShardTopic, seq: int) -> Block | None:
        """The block that holds this job."""
        tail = self._tails.get(topic.topic_id)
        if tail is None:
            return None
        at = bisect_right(tail.firsts, seq, tail.front) - 1
        if at < tail.front:
            return None
        block = tail.blocks[at]
        if isinstance(block, _RawFrames):
            stretch, block = block, block.cut()
            tail.blocks[at] = block
            more = _JOB_BYTES * (stretch.stop - stretch.first)
            tail.sizes[at] += more
            self.bytes += more
            self._enforce_limit()
        return block if block is not None and seq < block.stop else None

    def find_parts(self, topic: ShardTopic, first: int, count: int) -> list[Part] | None:
        """Where jobs lie that follow each other; None when one is not kept."""
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
        """Accounted bytes of jobs that follow each other; None when those of one are not known."""
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
    """These jobs, ascending; None when they, or the frames they lie in, are too large to travel with an
    answer. One alone in its frame always does."""
    found = Contents()
    is_one = len(parts) == 1 and parts[0][2] - parts[0][1] == 1
    for block, first, stop in parts:
        # Before it is copied: many may claim single jobs of one large frame.
        if isinstance(block, FrameBlock) and found.size + block.bytes_of(first, stop) > INLINE_BYTES_MAX:
            return None
        block.add_to(first, stop, found)
        if found.size > INLINE_BYTES_MAX and not is_one:
            return None
    return found


def split_jobs(
    buffer: bytes | bytearray | memoryview, batch: FrameBatch
) -> tuple[PayloadBlock | None, I64 | None]:
    """The jobs of frames of one topic, in order, and (n,) how many bytes each is accounted with. No jobs when
    they have more than a payload, or are large; neither when the frames are compressed, are not all of one
    shape, or one is missing between them."""
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
    if int(frames.columns_of(words[:1])[0]) not in _PLAIN or int(sizes.max()) > INLINE_BYTES_MAX:
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
