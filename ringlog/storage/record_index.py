"""StoredRecordIndex: sizes, commit times, expiry and tags of one topic's stored records.

For segments the answers come from the index parts, without reading data. Frames in the WAL are read once
per topic, and the result is kept (tail.py). The shard uses the index for deletes and retention; searches by
time use it too. Answers describe stored records. The caller must determine which of them are alive.

The `located` of a query must come from a fresh Locate from the start (after = 0): its extents lead to every
record from `earliest_seq` on. If a file of an extent was deleted in the meantime, the query raises DiskError
(ENOENT), and the caller must locate again. All files are read with pread.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.frame.batch import I64, U64
from ringlog.frame.facts import RecordFacts
from ringlog.segment.layout import DATA
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk
from ringlog.storage.extents import VOLATILE_PREFIX, ExtentFacts, HighWatermarkReader, LocatedFacts
from ringlog.storage.layout import unpack_file
from ringlog.storage.tail import TopicTail
from ringlog.tags import TagMatch

TAILS_MAX = 4_096
TAIL_RECORDS_MAX = 16_000_000
"""Limit of cached WAL records for all topics together, at about 25 bytes each. A tag counts as several
records (TopicTail.memory_cost)."""
SEGMENTS_MAX = 64
"""Maximum number of open segment indexes."""

Positions = tuple[U64, I64, I64]
"""(n,) seqs ascending, (n,) accounted sizes in bytes, (n,) commit stamps in microseconds."""
_NO_POSITIONS: Positions = (np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


class RecordDeliveryAttributes(NamedTuple):
    """Records with a `not_before` time or a priority."""

    seqs: U64
    """(n,) ascending."""
    not_before: I64
    """(n,) microseconds, 0 = none."""
    priorities: NDArray[np.uint8]
    """(n,)"""


NO_DELIVERY_ATTRIBUTES = RecordDeliveryAttributes(
    np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
)


class SegmentExtent(ExtentFacts, Protocol):
    """An Extent of a WAL file or of a segment."""

    @property
    def segment(self) -> int: ...
    @property
    def first_seq(self) -> int: ...
    @property
    def last_seq(self) -> int: ...


def bitmap_of(seqs: U64) -> BitMap64:
    """Return the bitmap of these seqs."""
    return BitMap64(array("Q", np.ascontiguousarray(seqs, dtype="<u8").tobytes()))


class StoredRecordIndex:
    """Caches segment indexes and WAL tails within bounds. For one thread."""

    def __init__(self, disk: Disk, data_dir: str, shm_dir: str, read_watermark: HighWatermarkReader) -> None:
        self._disk = disk
        self._roots = (data_dir, shm_dir)
        self._read_watermark = read_watermark
        self._tails: OrderedDict[tuple[int, int], TopicTail] = OrderedDict()
        self._incarnation = 0
        self._segments: OrderedDict[str, Segment] = OrderedDict()

    def close(self) -> None:
        """Close all files and drop all caches."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._tails.clear()

    def for_topic(self, located: LocatedFacts, staged: Sequence[RecordFacts] = ()) -> TopicRecordIndex:
        """Return the index of one topic. `staged` are records in memory that follow the stored ones."""
        return TopicRecordIndex(self, located, staged)

    # -- queries --------------------------------------------------------------------------------------

    def positions(self, located: LocatedFacts, first: int, last: int) -> Positions:
        """Return seqs, accounted sizes and stamps of the stored records in first..last (inclusive)."""
        return self.for_topic(located).positions(first, last)

    def seek_time(self, located: LocatedFacts, ts_us: int) -> int:
        """Return the seq before the first record committed at or after `ts_us`, else the last stored seq."""
        return self.for_topic(located).seek_time(ts_us) - 1

    def tagged(self, located: LocatedFacts, match: TagMatch, below: int) -> BitMap64:
        """Return the seqs below `below` of records whose tag matches."""
        return self.for_topic(located).tagged(match, below)

    def expired(self, located: LocatedFacts, now_us: int) -> BitMap64:
        """Return the seqs of records whose own expiry is at or before `now_us`."""
        return self.for_topic(located).expired(now_us)

    # -- parts ----------------------------------------------------------------------------------------

    def segment(self, path: str) -> Segment:
        """Return the open index of the segment with this data part."""
        stem = path.removesuffix(DATA)
        held = self._segments.get(stem)
        if held is None:
            held = self._segments[stem] = Segment.open(self._disk, self._roots[0], stem)
            while len(self._segments) > SEGMENTS_MAX:
                self._segments.popitem(last=False)[1].close()
        self._segments.move_to_end(stem)
        return held

    def tail(self, located: LocatedFacts, after: int, *, with_tags: bool) -> TopicTail:
        """Return the cached tail of the topic's WAL records that follow the seq `after`."""
        self._drop_stale_tails(located)
        key = (located.topic_id, located.epoch)
        tail = self._tails.get(key)
        is_disjoint = tail is not None and not tail.after <= after <= tail.last_seq
        if tail is None or is_disjoint or (with_tags and tail.tags is None):
            tail = self._tails[key] = TopicTail(*key, after, with_tags=with_tags)
        self._tails.move_to_end(key)
        return tail

    def read_tail(self, tail: TopicTail, located: LocatedFacts, is_enough: Callable[[], bool]) -> None:
        """Read WAL files until `is_enough`, or up to the published mark."""
        extents = [extent for extent in located.extents if not extent.segment]
        for extent in extents:
            if is_enough():
                break
            is_volatile = extent.path.startswith(VOLATILE_PREFIX)
            path = f"{self._roots[is_volatile]}/{extent.path.removeprefix(VOLATILE_PREFIX)}"
            tail.read(self._disk, path, extent, self._visible(extent), is_enough)
        tail.retain_files({extent.file_id for extent in extents})
        self._shrink()

    def _visible(self, extent: ExtentFacts) -> int:
        mark = self._read_watermark(extent.path.startswith(VOLATILE_PREFIX))
        if mark.file_id != extent.file_id:
            return int(extent.stop) if mark.file_id > extent.file_id else 0
        return min(int(extent.stop) or mark.offset, mark.offset)

    def _drop_stale_tails(self, located: LocatedFacts) -> None:
        """Drop all tails after a new incarnation: a power loss may have removed records they contain."""
        newest = max((unpack_file(e.file_id)[0] for e in located.extents if not e.segment), default=0)
        if newest > self._incarnation:
            self._incarnation = newest
            self._tails.clear()

    def _shrink(self) -> None:
        """Drop the least recently used tails until the limits are met."""
        held = sum(tail.memory_cost for tail in self._tails.values()) if len(self._tails) > 1 else 0
        while len(self._tails) > 1 and (len(self._tails) > TAILS_MAX or held > TAIL_RECORDS_MAX):
            held -= self._tails.popitem(last=False)[1].memory_cost


class TopicRecordIndex:
    """Queries for one topic under one Located."""

    def __init__(
        self, index: StoredRecordIndex, located: LocatedFacts, staged: Sequence[RecordFacts] = ()
    ) -> None:
        self._index = index
        self._located = located
        self._staged = staged
        self._sealed = [extent for extent in located.extents if extent.segment]
        last_sealed = max((extent.last_seq for extent in self._sealed), default=0)
        self._after = max(last_sealed, located.earliest_seq - 1)
        """Seqs above this one are in WAL files or in memory."""

    # -- seqs, sizes, times ---------------------------------------------------------------------------

    def positions(self, first: int, last: int) -> Positions:
        """Return seqs, accounted sizes and stamps of the stored records in first..last (inclusive)."""
        parts = [segment.positions(row, low, high) for segment, row, low, high in self._segments(first, last)]
        if last > self._after:
            tail = self._read_tail_until(lambda known: known.last_seq >= last)
            rows = slice(
                int(np.searchsorted(tail.seqs, max(first, self._after + 1))),
                int(np.searchsorted(tail.seqs, last, side="right")),
            )
            parts.append((tail.seqs[rows], tail.sizes[rows], tail.stamps[rows]))
        parts = [part for part in parts if len(part[0])]
        if not parts:
            return _NO_POSITIONS
        if len(parts) == 1:
            return parts[0]
        seqs, sizes, stamps = (np.concatenate(column) for column in zip(*parts, strict=True))
        return seqs, sizes, stamps

    def totals(self, first: int, last: int) -> tuple[int, int]:
        """Return (records, accounted bytes) stored in first..last. Whole frames are not decoded."""
        records = accounted = 0
        for segment, row, low, high in self._segments(first, last):
            found, size = _totals_of(segment, row, low, high)
            records, accounted = records + found, accounted + size
        if last > self._after:
            seqs, sizes, _ = self.positions(max(first, self._after + 1), last)
            records, accounted = records + len(seqs), accounted + int(sizes.sum())
        return records, accounted

    def sizes_of(self, seqs: U64) -> tuple[U64, I64]:
        """Return the seqs among these ascending ones that are stored, and their accounted sizes."""
        if not len(seqs):
            return seqs, np.zeros(0, np.int64)
        parts = []
        for segment, row, low, high in self._segments(int(seqs[0]), int(seqs[-1])):
            wanted = seqs[np.searchsorted(seqs, low) : np.searchsorted(seqs, high, side="right")]
            if len(wanted):
                parts.append(_sizes_in(segment, row, wanted))
        wanted = seqs[np.searchsorted(seqs, self._after, side="right") :]
        if len(wanted):
            found, sizes, _ = self.positions(int(wanted[0]), int(wanted[-1]))
            parts.append(_chosen(found, sizes, wanted))
        if not parts:
            return seqs[:0], np.zeros(0, np.int64)
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def seek_time(self, ts_us: int) -> int:
        """Return the first stored seq committed at or after `ts_us`, else the last stored seq + 1."""
        for extent in self._sealed[bisect_left(self._sealed, ts_us, key=self._last_stamp) :]:
            segment = self._index.segment(extent.path)
            row = segment.row(self._located.topic_id)
            found = None if row is None else segment.seek_time(row, ts_us)
            if found is not None and found <= extent.last_seq:
                return max(int(found), int(extent.first_seq))
        tail = self._read_tail_until(lambda known: len(known) > 0 and int(known.stamps[-1]) >= ts_us)
        at = int(np.searchsorted(tail.stamps, ts_us))
        if at < len(tail):
            return max(int(tail.seqs[at]), self._after + 1)
        return max(tail.last_seq, self._after) + 1

    def _last_stamp(self, extent: SegmentExtent) -> int:
        """Return the commit stamp of the topic's last record in a segment. Stamps never decrease."""
        segment = self._index.segment(extent.path)
        row = segment.row(self._located.topic_id)
        return 0 if row is None else int(segment.topics["ts_max"][row])

    # -- tags, expiry ---------------------------------------------------------------------------------

    def tagged(self, match: TagMatch, below: int) -> BitMap64:
        """Return the seqs below `below` of records whose tag matches. Untagged records never match."""
        found = BitMap64()
        for extent in self._sealed:
            if extent.first_seq < below:
                segment = self._index.segment(extent.path)
                seqs = segment.tagged(self._located.topic_id, match)
                found |= bitmap_of(seqs[(seqs >= extent.first_seq) & (seqs <= extent.last_seq)])
        tail = self._read_tail_until(lambda known: known.last_seq >= below - 1, with_tags=True)
        assert tail.tags is not None
        seqs = tail.seqs[tail.tags.rows(match)]
        found |= bitmap_of(seqs[seqs > self._after])
        found.remove_range(below, (1 << 64) - 1)
        return found

    def expired(self, now_us: int) -> BitMap64:
        """Return the seqs of records whose own expiry is at or before `now_us`."""
        found = BitMap64()
        for segment, row, low, high in self._segments(0, 1 << 63):
            seqs = segment.expired(row, now_us)
            found |= bitmap_of(seqs[(seqs >= low) & (seqs <= high)])
        tail = self._read_tail_until(lambda known: False)
        if tail.expires is not None:
            seqs = tail.seqs[(tail.expires > 0) & (tail.expires <= now_us)]
            found |= bitmap_of(seqs[seqs > self._after])
        return found

    def next_expiry(self, now_us: int) -> int:
        """Return the earliest own expiry after `now_us` in microseconds, or 0 if there is none."""
        found = [segment.next_expiry(row, now_us) for segment, row, _, _ in self._segments(0, 1 << 63)]
        earliest = [each for each in found if each]
        tail = self._read_tail_until(lambda known: False)
        if tail.expires is not None:
            later = tail.expires[tail.expires > now_us]
            earliest += [int(later.min())] if len(later) else []
        return min(earliest, default=0)

    # -- queues ---------------------------------------------------------------------------------------

    def delivery_attributes(self, first: int, last: int) -> RecordDeliveryAttributes:
        """Return the records in first..last with a `not_before` time or a priority, ascending."""
        parts = [
            _with_attributes(seqs.astype(np.uint64), columns.not_before, columns.priorities, rows)
            for segment, row, low, high in self._segments(first, last)
            for seqs, columns, rows in segment.delivery_attributes(row, low, high)
        ]
        if last > self._after:
            tail = self._read_tail_until(lambda known: known.last_seq >= last)
            if tail.not_before is not None or tail.priorities is not None:
                rows = slice(
                    int(np.searchsorted(tail.seqs, max(first, self._after + 1))),
                    int(np.searchsorted(tail.seqs, last, side="right")),
                )
                parts.append(_with_attributes(tail.seqs[rows], tail.not_before, tail.priorities, rows))
        if not parts:
            return NO_DELIVERY_ATTRIBUTES
        return RecordDeliveryAttributes(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    # -- parts ----------------------------------------------------------------------------------------

    def _segments(self, first: int, last: int) -> Iterator[tuple[Segment, int, int, int]]:
        """Yield (segment, row of the topic in it, low, high): the parts of first..last in segments."""
        for extent in self._sealed:
            low, high = max(first, extent.first_seq), min(last, extent.last_seq)
            if low <= high:
                segment = self._index.segment(extent.path)
                row = segment.row(self._located.topic_id)
                if row is not None:
                    yield segment, row, low, high

    def _read_tail_until(
        self, is_enough: Callable[[TopicTail], bool], *, with_tags: bool = False
    ) -> TopicTail:
        """Return the topic's tail, read until `is_enough`, and then extended by the staged records."""
        tail = self._index.tail(self._located, self._after, with_tags=with_tags)
        staged_from = int(self._staged[0].seqs[0]) if self._staged else 0
        has_all_filed = bool(staged_from) and tail.last_seq >= staged_from - 1
        if not has_all_filed:
            self._index.read_tail(tail, self._located, lambda: is_enough(tail))
        if not is_enough(tail):
            for facts in self._staged:
                tail.append_records(facts)
        tail.drop_below(self._after + 1)
        return tail


def _with_attributes(seqs: U64, not_before: Any, priorities: Any, rows: slice) -> RecordDeliveryAttributes:
    """Return the records with a `not_before` or priority. `rows` are the records' rows in the columns."""
    times = np.zeros(len(seqs), np.int64) if not_before is None else not_before[rows]
    levels = np.zeros(len(seqs), np.uint8) if priorities is None else priorities[rows]
    # A time before 1970 is in the past, so it is equivalent to no time.
    chosen = (times > 0) | (levels > 0)
    return RecordDeliveryAttributes(seqs[chosen], np.maximum(times[chosen], 0), levels[chosen])


def _totals_of(segment: Segment, row: int, low: int, high: int) -> tuple[int, int]:
    """Return (records, bytes) of low..high from the segment's entries. Only edge frames are decoded."""
    topic = segment.topics[row]
    if low <= int(topic["first_seq"]) and high >= int(topic["last_seq"]):
        return int(topic["records"]), int(topic["bytes"])
    entries = segment.entries[int(topic["entry_start"]) : int(topic["entry_stop"])]
    firsts = entries["base_seq"].astype(np.int64)
    lasts = firsts + entries["count"].astype(np.int64) - 1
    start, stop = int(np.searchsorted(lasts, low)), int(np.searchsorted(firsts, high, side="right"))
    inner = slice(start + 1, max(stop - 1, start + 1))
    records, accounted = int(entries["count"][inner].sum()), int(entries["bytes"][inner].sum())
    for edge in {start, stop - 1} if stop > start else set():
        _, sizes, _ = segment.positions(row, max(low, int(firsts[edge])), min(high, int(lasts[edge])))
        records, accounted = records + len(sizes), accounted + int(sizes.sum())
    return records, accounted


def _sizes_in(segment: Segment, row: int, wanted: U64) -> tuple[U64, I64]:
    """Return the seqs among `wanted` that a segment contains, and their sizes.

    A frame's columns are read only if its records differ in size.
    """
    start, stop = int(segment.topics["entry_start"][row]), int(segment.topics["entry_stop"][row])
    bases, counts = segment.entries["base_seq"][start:stop], segment.entries["count"][start:stop]
    at = np.searchsorted(bases, wanted.astype(np.int64), side="right") - 1
    inside = at >= 0
    inside &= wanted.astype(np.int64) - bases[at] < counts[at]
    wanted, at = wanted[inside], at[inside]
    sizes: I64 = segment.entries["bytes"][start:stop][at].astype(np.int64) // counts[at]
    uneven = np.flatnonzero(segment.entries["columns_at"][start:stop][at])
    entries, firsts = np.unique(at[uneven], return_index=True)
    places = (wanted[uneven].astype(np.int64) - bases[at[uneven]]).astype(np.int64)
    edges = [*firsts.tolist(), len(uneven)]
    frames = segment.sizes_in([start + entry for entry in entries.tolist()])
    for columns, (low, high) in zip(frames, pairwise(edges), strict=True):
        if columns is not None:
            sizes[uneven[low:high]] = columns[places[low:high]]
    return wanted, sizes


def _chosen(found: U64, sizes: I64, wanted: U64) -> tuple[U64, I64]:
    """Return the rows of `found` that are in `wanted`. Both are ascending."""
    if len(found) == len(wanted) and bool((found == wanted).all()):
        return found, sizes
    rows = np.flatnonzero(np.isin(found, wanted, assume_unique=True))
    return found[rows], sizes[rows]
