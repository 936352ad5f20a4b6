"""The newest records of queues and of topics with groups, for who claims them soon after they were put. Pure.

What was just committed was in the shard's memory, and would be read back from the log at once: by the worker
for the job's payload, and by the shard for its size when it is acked. So the frames are kept, up to a bound,
and cut into jobs when somebody claims one. Those that are over leave as the queue goes on; beyond the bound
the oldest leave, and are found in the log like all others. A record never changes in its topic's life, so
nothing here can be out of date.

Each commit adds a `Block`, or a `_Stretch` of frames that is cut into one when it is first asked for. Frames
that are compressed, or were routed, are not kept.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from actors.wal_shard.admission import Intake
from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.layout import Column
from ringlog.frame.spans import spans_of
from ringlog.limits import HOT_TAIL_BYTES, INLINE_BYTES_MAX
from ringlog.topic.config import QUEUE
from ringlog.topic.retention import front_of
from ringlog.topic.state import Topic

I64 = NDArray[np.int64]
Payloads = tuple[list[bytes], bytes]
"""Payloads of a claim's jobs, and their commit stamps, 8 bytes each."""
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


class Block:
    """Jobs `first` up to `stop` of one queue, without a gap."""

    __slots__ = ("first", "payloads", "sizes", "stamps", "stop")

    def __init__(
        self, first: int, stop: int, payloads: list[bytes] | None, stamps: bytes, sizes: I64 | None
    ) -> None:
        self.first, self.stop = first, stop
        self.payloads = payloads
        """None: these jobs have more than a payload."""
        self.stamps = stamps
        self.sizes = sizes
        """(n,) accounted bytes; None: it is one job, and those of its payload."""

    def find(self, first: int, stop: int) -> Payloads | None:
        """Payloads and stamps of jobs that lie in here; None where they have more than that."""
        if self.payloads is None:
            return None
        low, high = first - self.first, stop - self.first
        return self.payloads[low:high], self.stamps[STAMP_BYTES * low : STAMP_BYTES * high]

    def total(self, first: int, stop: int) -> int:
        """Accounted bytes of jobs that lie in here."""
        sizes = self.sizes
        if sizes is None:
            return sum(map(len, self.payloads or ()))
        low, high = first - self.first, stop - self.first
        return int(sizes[low]) if high - low == 1 else int(sizes[low:high].sum())


class _Stretch:
    """Frames of one topic, one behind the other, not yet cut."""

    __slots__ = ("data", "first", "offsets", "stop", "totals")

    def __init__(self, first: int, stop: int, data: bytearray, offsets: I64, totals: I64) -> None:
        self.first, self.stop = first, stop
        self.data, self.offsets, self.totals = data, offsets, totals

    def cut(self) -> Block | None:
        """Its jobs; None where that takes more than a look at the columns."""
        words = np.frombuffer(self.data, "<u8")
        rows = words[(self.offsets[:, None] >> 3) + np.arange(layout.HEADER_WORDS)]
        batch = FrameBatch(self.offsets, rows, len(self.data), frames.End.CLEAN)
        return cut(self.data, batch)


class _Tail:
    """What is kept of one topic, ascending."""

    __slots__ = ("blocks", "epoch", "firsts", "front", "numbers", "sizes")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.firsts: list[int] = []
        self.blocks: list[Block | _Stretch | None] = []
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.front = 0
        """Entries before it have left."""


class HotTail:
    """Of one shard's topics together up to `bytes_max` of memory, about."""

    def __init__(self, bytes_max: int = HOT_TAIL_BYTES) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0
        self._tails: dict[int, _Tail] = {}
        self._order: OrderedDict[int, _Tail] = OrderedDict()
        """Every entry by its number, in the order they came."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._order)

    # -- what is kept ---------------------------------------------------------------------------------

    def add(self, intake: Intake) -> None:
        """Keep what was committed, as far as somebody may claim it; its frames are numbered and stamped."""
        for stretch in intake.stretches:
            topic = stretch.topic
            if topic.config.type != QUEUE and not topic.groups:
                continue
            if stretch.stop - stretch.start == 1:
                block = _lone(intake.buffer, int(intake.batch.offsets[stretch.start]))
                if block is not None:
                    self._keep(topic, block, len(block.stamps) + block.total(block.first, block.stop))
                    continue
            shapes = frames.columns_of(intake.batch.words[stretch.start : stretch.stop])
            at = stretch.start
            for stop in [*(np.flatnonzero(np.diff(shapes)) + 1 + at).tolist(), stretch.stop]:
                self._add_alike(topic, intake, at, stop)
                at = stop

    def _add_alike(self, topic: Topic, intake: Intake, start: int, stop: int) -> None:
        """Keep rows of a batch that have the same columns."""
        offsets, totals = intake.batch.offsets[start:stop], intake.batch.total_bytes[start:stop]
        begin, end = int(offsets[0]), int(offsets[-1] + totals[-1])
        if end - begin > self._bytes_max:
            return
        rows = intake.batch.words[start:stop]
        first = int(rows[0, layout.W_BASE_SEQ])
        past = int(rows[-1, layout.W_BASE_SEQ]) + int(frames.counts_of(rows[-1:])[0])
        data = intake.buffer[begin:end]
        self._keep(topic, _Stretch(first, past, data, offsets - begin, totals), len(data))

    def _keep(self, topic: Topic, block: Block | _Stretch, size: int) -> None:
        tail = self._tails.get(topic.topic_id)
        if tail is None or tail.epoch != topic.epoch:
            self.forget(topic.topic_id)
            tail = self._tails[topic.topic_id] = _Tail(topic.epoch)
        self._let_go_below(tail, front_of(topic))
        self._added += 1
        tail.firsts.append(block.first)
        tail.blocks.append(block)
        tail.numbers.append(self._added)
        tail.sizes.append(size + _ENTRY_BYTES)
        self.bytes += size + _ENTRY_BYTES
        self._order[self._added] = tail
        self._heed_bound()

    def _heed_bound(self) -> None:
        """Beyond it the oldest leave."""
        while self.bytes > self._bytes_max:
            self._let_go(next(iter(self._order.values())))

    def _let_go_below(self, tail: _Tail, front: int) -> None:
        """Entries with jobs below the first there is are needed no more."""
        blocks = tail.blocks
        while tail.front < len(blocks):
            block = blocks[tail.front]
            if block is not None and block.stop > front:
                break
            self._let_go(tail)

    def _let_go(self, tail: _Tail) -> None:
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
            self._let_go(tail)

    # -- what is known of jobs ------------------------------------------------------------------------

    def _at(self, topic: Topic, seq: int) -> Block | None:
        """The block that holds this job."""
        tail = self._tails.get(topic.topic_id)
        if tail is None or tail.epoch != topic.epoch:
            return None
        at = bisect_right(tail.firsts, seq, tail.front) - 1
        if at < tail.front:
            return None
        block = tail.blocks[at]
        if isinstance(block, _Stretch):
            stretch, block = block, block.cut()
            tail.blocks[at] = block
            more = 0 if block is None else _JOB_BYTES * (stretch.stop - stretch.first)
            tail.sizes[at] += more
            self.bytes += more
            self._heed_bound()
        return block if block is not None and seq < block.stop else None

    def payloads_of(self, topic: Topic, first: int, count: int) -> Payloads | None:
        """Payloads and stamps of jobs that follow each other; None when one is not kept, has more than a
        payload, or they are too large to travel with an answer."""
        stop = first + count
        block = self._at(topic, first)
        found = None if block is None else block.find(first, min(stop, block.stop))
        if block is None or found is None:
            return None
        payloads, stamps = found
        size = sum(map(len, payloads))
        while size <= INLINE_BYTES_MAX and block.stop < stop:
            at = block.stop
            block = self._at(topic, at)
            found = None if block is None else block.find(at, min(stop, block.stop))
            if block is None or found is None:
                return None
            payloads, stamps = payloads + found[0], stamps + found[1]
            size += sum(map(len, found[0]))
        return (payloads, stamps) if size <= INLINE_BYTES_MAX else None

    def total_of(self, topic: Topic, first: int, count: int) -> int | None:
        """Accounted bytes of jobs that follow each other; None when one is not kept."""
        total, at, stop = 0, first, first + count
        while at < stop:
            block = self._at(topic, at)
            if block is None:
                return None
            high = min(stop, block.stop)
            total += block.total(at, high)
            at = high
        return total


def _lone(buffer: bytearray, start: int) -> Block | None:
    """The job of a frame that holds one payload and nothing else."""
    head, _, base, stamp, count, _ = _LONE.unpack_from(buffer, start)
    if head >> layout.COLUMNS_SHIFT != _PAYLOAD_ALONE or count != 1 or buffer[start + _CODEC_AT]:
        return None
    length = int.from_bytes(buffer[start + _LENGTH_AT : start + _DATA_AT], "little")
    data = start + _DATA_AT
    return Block(base, base + 1, [bytes(buffer[data : data + length])], stamp.to_bytes(8, "little"), None)


def cut(buffer: bytes | bytearray | memoryview, batch: FrameBatch) -> Block | None:
    """The jobs of frames of one topic, in order; None when they are compressed, do not all have the same
    columns, or one is missing between them."""
    words = batch.words
    shapes = frames.columns_of(words)
    if (shapes != shapes[0]).any() or frames.codecs_of(words).any():
        return None
    try:
        found = spans_of(buffer, batch)
    except FrameInvalid:
        return None
    seqs = found.seqs
    first, last = int(seqs[0]), int(seqs[-1])
    if last - first != len(seqs) - 1 or not bool((np.diff(seqs) == 1).all()):
        return None
    stamps = found.times.astype("<i8").tobytes()
    starts, stops = found.spans.get(Column.PAYLOAD) or (np.zeros(len(seqs), np.int64),) * 2
    sizes = stops - starts
    if int(shapes[0]) not in _PLAIN:
        if Column.META in found.spans:
            low, high = found.spans[Column.META]
            sizes = sizes + (high - low)
        return Block(first, last + 1, None, stamps, sizes)
    low_byte = int(starts[0])
    whole = bytes(found.buffer[low_byte : int(stops[-1])])
    places = map(slice, (starts - low_byte).tolist(), (stops - low_byte).tolist())
    return Block(first, last + 1, list(map(whole.__getitem__, places)), stamps, sizes)
