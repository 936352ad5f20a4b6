"""Plan of segments: which appends of a pass are kept, in which order, and in which segment. Pure.

A pass is a part of the log that fits into memory. Its frames are in commit order, of up to thousands of
topics. A segment needs them topic by topic. No step costs time per record, few cost time per frame, the
others cost time per topic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch, ScanEnd
from ringlog.frame.layout import FrameType
from ringlog.types import Codec

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

LIVE_WORDS = 5
"""Words of a row of LiveRecordsReply: topic_id, epoch, earliest_seq, start and stop in `deleted`."""

COPY_FRAMES = 64
"""If a topic has fewer frames than this per buffer, they are copied into one buffer first."""


class AppendCollector:
    """Collects the append frames of one pass, and the topics whose records it deletes."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.bytes: int = 0
        """Bytes of the kept buffers."""
        self.deleted_topics: set[int] = set()
        """Ids of the topics with delete frames in the log."""
        self._batches: list[FrameBatch] = []

    def add(self, buffer: Any, batch: FrameBatch) -> None:
        """Add the verified frames of one buffer. Call it in the order of the log."""
        types = frames.types_of(batch.words)
        removals = types == FrameType.DELETE
        if removals.any():
            self.deleted_topics.update(batch.words[removals, layout.W_TOPIC].tolist())
        appends = types == FrameType.APPEND
        chosen = batch if appends.all() else batch.take(np.flatnonzero(appends))
        if len(chosen):
            self._batches.append(chosen)
            self.buffers.append(buffer)
            self.bytes += len(buffer)

    def to_table(self) -> AppendTable:
        """Return all collected frames as one table."""
        return AppendTable(self.buffers, self._batches)


class AppendTable:
    """n append frames in the order of the log, numbered from 0. A source is a buffer with its frames.

    Headers stay in place. The columns that are needed for all frames are copied once: a matrix of all headers
    would be the largest data of a pass, except for payloads.
    """

    def __init__(self, buffers: list[Any], batches: list[FrameBatch]) -> None:
        self.buffers = buffers
        self._batches = batches
        counts = [len(batch) for batch in batches]
        self.firsts: I64 = np.cumsum([0, *counts])
        """Number of the first frame of each source, and the total; shape (sources + 1,)."""
        self.topic_ids: U64 = self._column(layout.W_TOPIC)
        self.bases: U64 = self._column(layout.W_BASE_SEQ)
        self._counts_epochs = self._column(layout.W_COUNT_EPOCH)
        self._heads = self._column(layout.W_HEAD)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def _column(self, word: int) -> U64:
        if not self._batches:
            return np.zeros(0, dtype=np.uint64)
        return np.concatenate([batch.words[:, word] for batch in self._batches])

    def topics(self) -> U64:
        """Return the ids of all topics, ascending."""
        return np.unique(self.topic_ids)

    def epochs(self) -> U64:
        """Return the epoch of each frame, shape (n,)."""
        return self._counts_epochs >> np.uint64(layout.EPOCH_SHIFT)

    def counts(self) -> U64:
        """Return the number of records in each frame, shape (n,)."""
        return self._counts_epochs & np.uint64(0xFFFFFFFF)

    def lengths(self) -> I64:
        """Return the frame_len of each frame, shape (n,)."""
        return (self._heads & np.uint64(layout.LEN_MASK)).astype(np.int64)

    def sources(self, rows: I64) -> I64:
        """Return the source of each of these frames."""
        return np.searchsorted(self.firsts, rows, "right") - 1

    def frames_in_place(self, source: int, rows: I64) -> tuple[Any, FrameBatch]:
        """Return frames of one source in the given order, without copying them."""
        inside = rows - self.firsts[source]
        batch = self._batches[source]
        is_contiguous = bool((np.diff(inside) == 1).all())
        found = batch.take(slice(int(inside[0]), int(inside[-1]) + 1) if is_contiguous else inside)
        end = int(found.offsets[-1] + _totals(found.words[-1:])[0])
        return self.buffers[source], FrameBatch(found.offsets, found.words, end, ScanEnd.CLEAN)

    def copy_frames(self, rows: I64) -> tuple[bytes, FrameBatch]:
        """Copy frames into one buffer. Later steps cost time per run, and the copy is cheap."""
        sources = self.sources(rows)
        words = np.empty((len(rows), layout.HEADER_WORDS), dtype=np.uint64)
        offsets = np.empty(len(rows), dtype=np.int64)
        order = np.argsort(sources, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(sources[order])) + 1).tolist(), len(rows)]
        for start, stop in itertools.pairwise(bounds):
            at = order[start:stop]
            source = int(sources[at[0]])
            inside = rows[at] - self.firsts[source]
            words[at] = self._batches[source].words[inside]
            offsets[at] = self._batches[source].offsets[inside]
        totals = _totals(words)
        slices = zip(sources.tolist(), offsets.tolist(), (offsets + totals).tolist(), strict=True)
        buffers = self.buffers
        buffer = b"".join([buffers[source][start:stop] for source, start, stop in slices])
        return buffer, FrameBatch(np.cumsum(totals) - totals, words, len(buffer), ScanEnd.CLEAN)


class LiveTopics(NamedTuple):
    """Live state of topics by ascending id: epoch (0 = deleted), first seq, and deleted seqs."""

    ids: U64
    epochs: U64
    earliest: U64
    deleted: dict[int, BitMap64]
    """Contains only topics with deleted records."""
    codecs: dict[int, Codec]
    """Contains only topics with a codec of their own."""


def decode_live(rows: Any, deleted: bytes, codecs: bytes = b"") -> LiveTopics:
    """Decode a LiveRecordsReply with its attachment.

    Raises CorruptData if ids do not ascend or a range is invalid.
    """
    table = np.frombuffer(rows, dtype="<u8").reshape(-1, LIVE_WORDS)
    ids, epochs, earliest, starts, stops = (np.ascontiguousarray(column) for column in table.T)
    if (ids[1:] <= ids[:-1]).any() or (stops < starts).any() or (stops > len(deleted)).any():
        raise CorruptData("corrupt LiveRecordsReply of a shard", topics=len(ids))
    found = {
        int(ids[i]): BitMap64.deserialize(deleted[int(starts[i]) : int(stops[i])])
        for i in np.flatnonzero(stops > starts).tolist()
    }
    codes = np.frombuffer(codecs, dtype=np.uint8)
    if len(codes) not in {0, len(ids)} or (codes > max(Codec)).any():
        raise CorruptData("corrupt LiveRecordsReply of a shard", codecs=len(codecs))
    return LiveTopics(
        ids, epochs, earliest, found, {int(ids[i]): Codec(codes[i]) for i in np.flatnonzero(codes).tolist()}
    )


def merge_live_topics(parts: list[LiveTopics]) -> LiveTopics:
    """Merge replies about ascending ids."""
    if not parts:
        none = np.zeros(0, dtype=np.uint64)
        return LiveTopics(none, none, none, {}, {})
    merged: dict[int, BitMap64] = {}
    codecs: dict[int, Codec] = {}
    for part in parts:
        merged |= part.deleted
        codecs |= part.codecs
    return LiveTopics(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.epochs for part in parts]),
        np.concatenate([part.earliest for part in parts]),
        merged,
        codecs,
    )


@dataclass(frozen=True, slots=True)
class TopicCut:
    """Frames of one topic for one segment: positions [start, stop) of the planner's order."""

    topic_id: int
    epoch: int
    earliest_seq: int
    start: int
    stop: int


class SegmentSizeLimits(NamedTuple):
    """Limits of a segment in records and bytes. Topics below `own_segment_bytes` share a segment (a pack)."""

    records: int
    bytes: int
    own_segment_bytes: int


class SegmentPlanner:
    """Plans the frames of a pass that go to segments, topic by topic."""

    def __init__(self, table: AppendTable, live: LiveTopics, sealed: dict[tuple[int, int], int]) -> None:
        """`sealed` is the last seq of each (topic, epoch) that earlier passes of this checkpoint wrote.

        Frames of deleted topics, below a floor, already written, or duplicated are left out. Duplicates occur
        after a restart: a frame whose fate was unknown is appended again after the original.
        """
        self._table = table
        which = np.searchsorted(live.ids, table.topic_ids)
        counts, bases = table.counts(), table.bases
        last = bases + counts - np.uint64(1)
        floor = np.maximum(live.earliest, self._beyond(live, sealed))
        epochs = live.epochs[which]
        alive = (table.epochs() == epochs) & (last >= floor[which]) & (epochs > 0)
        rows = _ordered(np.flatnonzero(alive), which, bases)
        rows = rows[_first_of_each(which[rows], bases[rows], last[rows])]
        self.rows: I64 = rows
        topic_of = which[rows]
        starts = np.flatnonzero(np.diff(topic_of, prepend=-1))
        self._bounds = (
            list(zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=True)) if len(rows) else []
        )
        self._cuts = [
            TopicCut(int(live.ids[i]), int(live.epochs[i]), int(live.earliest[i]), start, stop)
            for i, (start, stop) in zip(topic_of[starts].tolist(), self._bounds, strict=True)
        ]
        self._bytes = _running(table.lengths()[rows] - layout.FRAME_LEN_MIN)
        self._records = _running(counts[rows].astype(np.int64))
        self._last = last

    @staticmethod
    def _beyond(live: LiveTopics, sealed: dict[tuple[int, int], int]) -> U64:
        """Return for each topic the first seq that no earlier pass wrote, shape (ids,)."""
        found = np.zeros(len(live.ids), dtype=np.uint64)
        if sealed:
            pairs = zip(live.ids.tolist(), live.epochs.tolist(), strict=True)
            found[:] = [sealed.get(pair, -1) + 1 for pair in pairs]
        return found

    def record_last_sealed(self, sealed: dict[tuple[int, int], int]) -> None:
        """Store the last seq of each topic of this pass in `sealed`."""
        for cut in self._cuts:
            sealed[cut.topic_id, cut.epoch] = int(self._last[self.rows[cut.stop - 1]])

    def plan_segments(self, sizes: SegmentSizeLimits) -> Iterator[list[TopicCut]]:
        """Yield the content of each segment, large topics first. Topics of a segment ascend."""
        small: list[TopicCut] = []
        for cut in self._cuts:
            if self._bytes[cut.stop] - self._bytes[cut.start] < sizes.own_segment_bytes:
                small.append(cut)
            else:
                for start, stop in self._rolled(cut.start, cut.stop, sizes):
                    yield [TopicCut(cut.topic_id, cut.epoch, cut.earliest_seq, start, stop)]
        yield from self._packs(small, sizes)

    def _rolled(self, start: int, stop: int, sizes: SegmentSizeLimits) -> Iterator[tuple[int, int]]:
        """Split a topic's frames where a segment is full."""
        while start < stop:
            by_bytes = int(np.searchsorted(self._bytes, self._bytes[start] + sizes.bytes, "right")) - 1
            by_records = (
                int(np.searchsorted(self._records, self._records[start] + sizes.records, "right")) - 1
            )
            end = min(stop, max(start + 1, min(by_bytes, by_records)))
            yield start, end
            start = end

    def _packs(self, cuts: list[TopicCut], sizes: SegmentSizeLimits) -> Iterator[list[TopicCut]]:
        pack: list[TopicCut] = []
        pack_bytes = pack_records = 0
        for cut in cuts:
            pack.append(cut)
            pack_bytes += int(self._bytes[cut.stop] - self._bytes[cut.start])
            pack_records += int(self._records[cut.stop] - self._records[cut.start])
            if pack_bytes >= sizes.bytes or pack_records >= sizes.records:
                yield pack
                pack, pack_bytes, pack_records = [], 0, 0
        if pack:
            yield pack

    def frame_runs(self, cuts: list[TopicCut]) -> Iterator[tuple[TopicCut, list[tuple[Any, FrameBatch]]]]:
        """Yield each cut of one segment with its (buffer, batch) runs in ascending order."""
        if len(cuts) == 1:
            yield cuts[0], list(self._topic_runs(self.rows[cuts[0].start : cuts[0].stop]))
            return
        buffer, copied = self._table.copy_frames(
            np.concatenate([self.rows[cut.start : cut.stop] for cut in cuts])
        )
        stops = [*copied.offsets.tolist()[1:], len(buffer)]
        at = 0
        for cut in cuts:
            until = at + cut.stop - cut.start
            offsets, words = copied.offsets[at:until], copied.words[at:until]
            yield cut, [(buffer, FrameBatch(offsets, words, stops[until - 1], ScanEnd.CLEAN))]
            at = until

    def _topic_runs(self, rows: I64) -> Iterator[tuple[Any, FrameBatch]]:
        """Yield frames of one topic in place, or as one copy if there are few per buffer."""
        table = self._table
        sources = table.sources(rows)
        breaks = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(rows)]
        if len(rows) < COPY_FRAMES * (len(breaks) - 1):
            yield table.copy_frames(rows)
            return
        for start, stop in itertools.pairwise(breaks):
            yield table.frames_in_place(int(sources[start]), rows[start:stop])


def _totals(words: U64) -> I64:
    """Return the size of each frame in bytes, shape (n,)."""
    return (words[:, layout.W_HEAD] & np.uint64(layout.LEN_MASK)).astype(np.int64) + layout.LEN_FIELD_BYTES


def _ordered(rows: I64, which: I64, bases: U64) -> I64:
    """Return the rows sorted by topic and seq. Rows that are sorted already are returned unchanged."""
    topics, numbers = which[rows], bases[rows]
    steps = np.diff(topics)
    if bool(((steps > 0) | ((steps == 0) & (numbers[1:] >= numbers[:-1]))).all()):
        return rows
    return rows[np.lexsort((numbers, topics))]


def _running(values: I64) -> I64:
    return np.concatenate(([0], np.cumsum(values)))


def _first_of_each(topics: I64, bases: U64, last: U64) -> NDArray[np.bool_]:
    """Return which frames, sorted by topic and seq, contain a seq that no earlier frame contains."""
    same = np.zeros(len(bases), dtype=bool)
    same[1:] = (topics[1:] == topics[:-1]) & (bases[1:] <= last[:-1])
    keep = ~same
    for at in np.flatnonzero(same).tolist():
        # A duplicate begins at the seq of its original. Of frames that overlap otherwise, one was never
        # acked.
        before = at - 1
        while not keep[before]:
            before -= 1
        keep[at] = bases[at] > last[before] or topics[at] != topics[before]
    return keep
