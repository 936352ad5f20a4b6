"""What becomes of the appends of a pass over the log: which are kept, in what order, where. Pure.

A pass is a stretch of the log that fits into memory. Frames of a thousand topics lie in it in the order in
which they were committed; a segment wants them topic by topic. Nothing here costs time per record, little
costs time per frame, and the rest is per topic.
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
"""A row of the part attached to LiveReply: topic_id, epoch, earliest_seq, start and stop in `deleted`."""

COPY_FRAMES = 64
"""With fewer frames than this in each buffer a topic's frames are brought together first."""


class AppendCollector:
    """Append frames of one pass, and which topics had records removed in it."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self.bytes = 0
        """Bytes of the buffers that are kept."""
        self.deleted_topics: set[int] = set()
        """Topics of which the log says that records were deleted."""
        self._batches: list[FrameBatch] = []

    def add(self, buffer: Any, batch: FrameBatch) -> None:
        """Take the verified frames of one buffer, in the order of the log."""
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
        """Everything taken so far as one table."""
        return AppendTable(self.buffers, self._batches)


class AppendTable:
    """n append frames in the order of the log, numbered from 0: each source a buffer and its frames.

    Headers stay where they are. What is asked of all of them is copied out column by column, once: a matrix
    of all headers would be the largest thing a pass moves, payloads apart.
    """

    def __init__(self, buffers: list[Any], batches: list[FrameBatch]) -> None:
        self.buffers = buffers
        self._batches = batches
        counts = [len(batch) for batch in batches]
        self.firsts: I64 = np.cumsum([0, *counts])
        """(sources + 1,) number of the first frame of each source."""
        self.topic_ids = self._column(layout.W_TOPIC)
        self.bases = self._column(layout.W_BASE_SEQ)
        self._counts_epochs = self._column(layout.W_COUNT_EPOCH)
        self._heads = self._column(layout.W_HEAD)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def _column(self, word: int) -> U64:
        if not self._batches:
            return np.zeros(0, dtype=np.uint64)
        return np.concatenate([batch.words[:, word] for batch in self._batches])

    def topics(self) -> U64:
        """Ids of the topics there are, ascending."""
        return np.unique(self.topic_ids)

    def epochs(self) -> U64:
        """(n,) epochs of the frames' topics."""
        return self._counts_epochs >> np.uint64(layout.EPOCH_SHIFT)

    def counts(self) -> U64:
        """(n,) records in each frame."""
        return self._counts_epochs & np.uint64(0xFFFFFFFF)

    def lengths(self) -> I64:
        """(n,) frame_len of each frame."""
        return (self._heads & np.uint64(layout.LEN_MASK)).astype(np.int64)

    def sources(self, rows: I64) -> I64:
        """In which source each of these frames lies."""
        return np.searchsorted(self.firsts, rows, "right") - 1

    def frames_in_place(self, source: int, rows: I64) -> tuple[Any, FrameBatch]:
        """Frames of one source in the order given, where they lie."""
        inside = rows - self.firsts[source]
        batch = self._batches[source]
        is_stretch = bool((np.diff(inside) == 1).all())
        found = batch.take(slice(int(inside[0]), int(inside[-1]) + 1) if is_stretch else inside)
        end = int(found.offsets[-1] + _totals(found.words[-1:])[0])
        return self.buffers[source], FrameBatch(found.offsets, found.words, end, ScanEnd.CLEAN)

    def copy_frames(self, rows: I64) -> tuple[bytes, FrameBatch]:
        """Frames brought together in one buffer: what follows costs time per run, and a copy costs little."""
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
        places = zip(sources.tolist(), offsets.tolist(), (offsets + totals).tolist(), strict=True)
        buffers = self.buffers
        buffer = b"".join([buffers[source][start:stop] for source, start, stop in places])
        return buffer, FrameBatch(np.cumsum(totals) - totals, words, len(buffer), ScanEnd.CLEAN)


class LiveTopics(NamedTuple):
    """What is alive: of each id, ascending, its epoch (0 = gone), first number and deleted numbers."""

    ids: U64
    epochs: U64
    earliest: U64
    deleted: dict[int, BitMap64]
    """Only of topics that have some."""
    codecs: dict[int, Codec]
    """Only of topics that want one."""


def decode_live(rows: Any, deleted: bytes, codecs: bytes = b"") -> LiveTopics:
    """Read a LiveReply with its attached part; ids come ascending. Raises CorruptData for nonsense."""
    table = np.frombuffer(rows, dtype="<u8").reshape(-1, LIVE_WORDS)
    ids, epochs, earliest, starts, stops = (np.ascontiguousarray(column) for column in table.T)
    if (ids[1:] <= ids[:-1]).any() or (stops < starts).any() or (stops > len(deleted)).any():
        raise CorruptData("what a shard says of its topics makes no sense", topics=len(ids))
    found = {
        int(ids[i]): BitMap64.deserialize(deleted[int(starts[i]) : int(stops[i])])
        for i in np.flatnonzero(stops > starts).tolist()
    }
    wanted = np.frombuffer(codecs, dtype=np.uint8)
    if len(wanted) not in {0, len(ids)} or (wanted > max(Codec)).any():
        raise CorruptData("what a shard says of its topics makes no sense", codecs=len(codecs))
    return LiveTopics(
        ids, epochs, earliest, found, {int(ids[i]): Codec(wanted[i]) for i in np.flatnonzero(wanted).tolist()}
    )


def merge_live_topics(parts: list[LiveTopics]) -> LiveTopics:
    """Answers about ascending ids as one."""
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
    """Frames of one topic that go into one segment: positions [start, stop) of the order."""

    topic_id: int
    epoch: int
    earliest_seq: int
    start: int
    stop: int


class SegmentSizeLimits(NamedTuple):
    """Bounds of a segment: it is rolled at so many records or bytes; topics below `own` bytes share one."""

    records: int
    bytes: int
    own_segment_bytes: int


class SegmentPlanner:
    """The frames of a pass that are to be sealed, topic by topic."""

    def __init__(self, gathered: AppendTable, live: LiveTopics, sealed: dict[tuple[int, int], int]) -> None:
        """`sealed`: (topic, epoch) -> last number that earlier passes of this checkpoint have sealed.

        Left out are frames of what is gone, below a floor, sealed already, or there twice: after a restart
        a copy of what was in doubt follows the original.
        """
        self._gathered = gathered
        which = np.searchsorted(live.ids, gathered.topic_ids)
        counts, bases = gathered.counts(), gathered.bases
        last = bases + counts - np.uint64(1)
        floor = np.maximum(live.earliest, self._beyond(live, sealed))
        epochs = live.epochs[which]
        alive = (gathered.epochs() == epochs) & (last >= floor[which]) & (epochs > 0)
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
        self._bytes = _running(gathered.lengths()[rows] - layout.FRAME_LEN_MIN)
        self._records = _running(counts[rows].astype(np.int64))
        self._last = last

    @staticmethod
    def _beyond(live: LiveTopics, sealed: dict[tuple[int, int], int]) -> U64:
        """(ids,) first number that no earlier pass has sealed."""
        found = np.zeros(len(live.ids), dtype=np.uint64)
        if sealed:
            pairs = zip(live.ids.tolist(), live.epochs.tolist(), strict=True)
            found[:] = [sealed.get(pair, -1) + 1 for pair in pairs]
        return found

    def record_last_sealed(self, sealed: dict[tuple[int, int], int]) -> None:
        """Write down the last number of each topic of this pass."""
        for cut in self._cuts:
            sealed[cut.topic_id, cut.epoch] = int(self._last[self.rows[cut.stop - 1]])

    def plan_segments(self, sizes: SegmentSizeLimits) -> Iterator[list[TopicCut]]:
        """What goes into each segment, large topics first; within a segment topics ascend."""
        small: list[TopicCut] = []
        for cut in self._cuts:
            if self._bytes[cut.stop] - self._bytes[cut.start] < sizes.own_segment_bytes:
                small.append(cut)
            else:
                for start, stop in self._rolled(cut.start, cut.stop, sizes):
                    yield [TopicCut(cut.topic_id, cut.epoch, cut.earliest_seq, start, stop)]
        yield from self._packs(small, sizes)

    def _rolled(self, start: int, stop: int, sizes: SegmentSizeLimits) -> Iterator[tuple[int, int]]:
        """Cut a topic's frames where a segment is full."""
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
        held_bytes = held_records = 0
        for cut in cuts:
            pack.append(cut)
            held_bytes += int(self._bytes[cut.stop] - self._bytes[cut.start])
            held_records += int(self._records[cut.stop] - self._records[cut.start])
            if held_bytes >= sizes.bytes or held_records >= sizes.records:
                yield pack
                pack, held_bytes, held_records = [], 0, 0
        if pack:
            yield pack

    def frame_runs(self, cuts: list[TopicCut]) -> Iterator[tuple[TopicCut, list[tuple[Any, FrameBatch]]]]:
        """The frames of one segment, cut by cut: (buffer, batch)s one behind the other, ascending."""
        if len(cuts) == 1:
            yield cuts[0], list(self._topic_runs(self.rows[cuts[0].start : cuts[0].stop]))
            return
        buffer, all_of_it = self._gathered.copy_frames(
            np.concatenate([self.rows[cut.start : cut.stop] for cut in cuts])
        )
        stops = [*all_of_it.offsets.tolist()[1:], len(buffer)]
        at = 0
        for cut in cuts:
            until = at + cut.stop - cut.start
            offsets, words = all_of_it.offsets[at:until], all_of_it.words[at:until]
            yield cut, [(buffer, FrameBatch(offsets, words, stops[until - 1], ScanEnd.CLEAN))]
            at = until

    def _topic_runs(self, rows: I64) -> Iterator[tuple[Any, FrameBatch]]:
        """Frames of one topic, where they lie; brought together when there are few in each buffer."""
        gathered = self._gathered
        sources = gathered.sources(rows)
        breaks = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(rows)]
        if len(rows) < COPY_FRAMES * (len(breaks) - 1):
            yield gathered.copy_frames(rows)
            return
        for start, stop in itertools.pairwise(breaks):
            yield gathered.frames_in_place(int(sources[start]), rows[start:stop])


def _totals(words: U64) -> I64:
    """(n,) size of each frame in bytes."""
    return (words[:, layout.W_HEAD] & np.uint64(layout.LEN_MASK)).astype(np.int64) + layout.LEN_FIELD_BYTES


def _ordered(rows: I64, which: I64, bases: U64) -> I64:
    """The rows sorted by topic and number; the log of a single topic is sorted as it is."""
    topics, numbers = which[rows], bases[rows]
    steps = np.diff(topics)
    if bool(((steps > 0) | ((steps == 0) & (numbers[1:] >= numbers[:-1]))).all()):
        return rows
    return rows[np.lexsort((numbers, topics))]


def _running(values: I64) -> I64:
    return np.concatenate(([0], np.cumsum(values)))


def _first_of_each(topics: I64, bases: U64, last: U64) -> NDArray[np.bool_]:
    """Which frames, sorted by topic and number, hold a number that none before them holds."""
    same = np.zeros(len(bases), dtype=bool)
    same[1:] = (topics[1:] == topics[:-1]) & (bases[1:] <= last[:-1])
    keep = ~same
    for at in np.flatnonzero(same).tolist():
        # A copy begins where its original does. Anything else that overlaps was never acknowledged twice.
        before = at - 1
        while not keep[before]:
            before -= 1
        keep[at] = bases[at] > last[before] or topics[at] != topics[before]
    return keep
