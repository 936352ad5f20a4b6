"""Catalog of the segments with a shard's records: columns in memory, one row for each topic of a segment.

Pure.

A segment of a single topic is a row under its topic. The rows of segments that many topics share are in
sorted runs, with 60 bytes for each row, as in a log-structured merge tree. A new segment is a new run, and
small runs are merged. A lookup therefore searches few runs, however many segments exist.

If two segments contain the same position, the one with the greater number is in force. Both have the same
data for it. A reader that scans too far in either reads duplicates, and nothing wrong.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.envelope.messages import Extent, SegmentRef
from ringlog.errors import InvariantViolation
from ringlog.placement import shards_of

RUN_ROWS_MAX = 1 << 16
"""Largest merged run: a merge takes milliseconds, and blocks commits."""

RANGES_PER_SEGMENT_MAX = 64
"""Highest number of rows (60 bytes each) of one topic in one segment, if records were removed from it."""

_RUN = np.dtype(
    [
        ("topic_id", "<u8"), ("number", "<u8"), ("first_seq", "<u8"), ("last_seq", "<u8"),
        ("entry_start", "<u4"), ("entry_stop", "<u4"), ("data_start", "<u8"), ("data_stop", "<u8"),
    ]
)  # fmt: skip

Rows = NDArray[Any]


class _SegmentRange(NamedTuple):
    """The positions of one topic in one segment."""

    first: int
    last: int
    number: int
    entry_start: int
    entry_stop: int
    data_start: int
    data_stop: int


class MissingSegment(NamedTuple):
    """A segment that should exist and cannot be used."""

    stem: str
    part: str
    """Path of the file, relative to the data directory."""
    reason: str
    ref: SegmentRef | None
    """Its entry in a snapshot; None = no snapshot lists it."""
    is_cold: bool = False
    """Its records are in the cold tier: only its index is missing."""


class SegmentCatalog:
    """The segments of one shard, and the positions of its topics in them."""

    def __init__(self) -> None:
        self.refs: dict[int, SegmentRef] = {}
        self.missing: dict[int, SegmentRef] = {}
        """Segments that a snapshot lists, that do not exist, and that halted topics need. The next snapshot
        lists them, too, so that a later start finds them if they return."""
        self._own: dict[int, list[_SegmentRange]] = {}
        """Topic -> its rows in segments of its own, ascending."""
        self._topic_of: dict[int, int] = {}
        """Segment of a single topic -> that topic."""
        self._span = 0
        """Longest span of positions of a single-topic segment: bounds the search below a seq."""
        self._runs: list[Rows] = []

    def add(self, ref: SegmentRef, topics: Rows, owned: NDArray[np.bool_] | None = None) -> None:
        """Register a segment.

        `topics`: (n,) rows of its topic table; `owned`: (n,) which of them to register.
        """
        if ref.number in self.refs:
            raise InvariantViolation("segment is already registered", number=ref.number)
        rows = topics if owned is None else topics[owned]
        self.refs[ref.number] = ref
        if len(rows) == 1 and ref.topics == 1:
            row = rows[0]
            topic_id = int(row["topic_id"])
            ranges = self._own.setdefault(topic_id, [])
            added = _SegmentRange(
                int(row["first_seq"]), int(row["last_seq"]), ref.number, int(row["entry_start"]),
                int(row["entry_stop"]), int(row["data_start"]), int(row["data_stop"]),
            )  # fmt: skip
            ranges.insert(bisect_left(ranges, added), added)
            self._span = max(self._span, added.last - added.first)
            self._topic_of[ref.number] = topic_id
        elif len(rows):
            run = np.empty(len(rows), dtype=_RUN)
            for name in _RUN.names or ():
                run[name] = ref.number if name == "number" else rows[name]
            self._runs.append(run)
            self._merge_small()

    def split_rows(self, topics: Rows, entries: Rows) -> Rows:
        """Return the rows to register for a segment: (n,) its topic table, split at gaps of its frames.

        A row claims all positions from its first to its last. A segment with gaps is split into rows without
        gaps, because other segments may contain the missing positions, now or later. (After a change of the
        number of shards, records that were written later may be in a segment earlier.) If the split needs
        more than RANGES_PER_SEGMENT_MAX rows, it is done only if another registered segment overlaps.
        """
        is_cut = topics["records"] < topics["last_seq"] - topics["first_seq"] + 1
        parts = [topics[~is_cut]]
        for at in np.flatnonzero(is_cut).tolist():
            row = topics[at]
            gapless = _gapless_rows(row, entries)
            if len(gapless) > RANGES_PER_SEGMENT_MAX:
                others = self._rows_above(int(row["topic_id"]), int(row["first_seq"]) - 1)
                if not any(each.first <= row["last_seq"] for each in others):
                    gapless = topics[at : at + 1]
            parts.append(gapless)
        if len(parts) == 1:
            return topics
        rows = np.concatenate(parts)
        return rows[np.lexsort((rows["first_seq"], rows["topic_id"]))]

    def _merge_small(self) -> None:
        """Merge the youngest runs while the previous one is not much larger.

        The amortized cost of a row is small.
        """
        runs = self._runs
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
            if len(runs[-2]) + len(runs[-1]) > RUN_ROWS_MAX:
                return
            both = np.concatenate((runs.pop(), runs.pop()))
            runs.append(both[np.lexsort((both["first_seq"], both["topic_id"]))])

    def remove(self, number: int) -> None:
        """Remove a segment. Raises KeyError for an unknown one."""
        del self.refs[number]
        topic_id = self._topic_of.pop(number, None)
        if topic_id is not None:
            left = [held for held in self._own[topic_id] if held.number != number]
            if left:
                self._own[topic_id] = left
            else:
                del self._own[topic_id]
            return
        holding = [run["number"] == number for run in self._runs]
        kept = [run[~held] if held.any() else run for run, held in zip(self._runs, holding, strict=True)]
        self._runs = [run for run in kept if len(run)]

    def set_tier(self, number: int, tier: int) -> None:
        """Record the new tier of a segment. Raises KeyError for an unknown one."""
        old = self.refs[number]
        self.refs[number] = SegmentRef(
            old.number, old.stem, old.salt, old.data_bytes, old.records, old.frames, old.topics, tier,
            old.created_us,
        )  # fmt: skip

    def ranges(self, topic_id: int, after: int) -> list[Extent]:
        """Return extents with positions above `after`, ascending and without overlap.

        If segments overlap, the one with the greatest number is in force.
        """
        return [self._extent(row, first, last) for first, last, row in self._rows_in_force(topic_id, after)]

    def sealed_to(self, topic_id: int) -> int:
        """Return the last position in any segment; 0 = none."""
        return max((row.last for row in self._rows_above(topic_id, 0)), default=0)

    def sealed_to_many(self, topic_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return (n,) `sealed_to` for each of (n,) ascending topic ids."""
        found = np.zeros(len(topic_ids), dtype=np.uint64)
        for run in self._runs:
            places = np.searchsorted(topic_ids, run["topic_id"])
            known = places < len(topic_ids)
            known[known] = topic_ids[places[known]] == run["topic_id"][known]
            np.maximum.at(found, places[known], run["last_seq"][known])
        for topic_id, ranges in self._own.items():
            at = int(np.searchsorted(topic_ids, np.uint64(topic_id)))
            if at < len(topic_ids) and int(topic_ids[at]) == topic_id:
                found[at] = max(int(found[at]), *[each.last for each in ranges])
        return found

    def covered(self, topic_id: int, after: int = 0) -> list[tuple[int, int]]:
        """Return (first, last) of the ranges above `after` that segments cover, ascending."""
        joined: list[tuple[int, int]] = []
        for row in sorted(self._rows_above(topic_id, after)):
            if joined and row.first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(row.last, joined[-1][1]))
            else:
                joined.append((row.first, row.last))
        return joined

    def topics_of(self, number: int) -> list[int]:
        """Return the topics of this shard with records in a segment, ascending."""
        if number in self._topic_of:
            return [self._topic_of[number]]
        found = [run["topic_id"][run["number"] == number] for run in self._runs]
        return np.unique(np.concatenate(found)).tolist() if found else []

    def _rows_above(self, topic_id: int, after: int) -> Iterator[_SegmentRange]:
        """Yield the rows of a topic with positions above `after`, in any order."""
        ranges = self._own.get(topic_id, ())
        start = bisect_left(ranges, (after + 1 - self._span,)) if ranges else 0
        yield from (each for each in ranges[start:] if each.last > after)
        key = np.uint64(topic_id)
        for run in self._runs:
            ids = run["topic_id"]
            at = int(ids.searchsorted(key))
            while at < len(run) and ids[at] == key:
                row = run[at]
                if row["last_seq"] > after:
                    _, number, first, last, *places = row.item()
                    yield _SegmentRange(first, last, number, *places)
                at += 1

    def _rows_in_force(self, topic_id: int, after: int) -> list[tuple[int, int, _SegmentRange]]:
        """Return (first, last, row) of the rows in force, ascending and without overlap."""
        rows = sorted(self._rows_above(topic_id, after))
        if all(a.last < b.first for a, b in itertools.pairwise(rows)):
            return [(each.first, each.last, each) for each in rows]
        free: list[tuple[int, int]] = [(rows[0].first, max(each.last for each in rows))]
        pieces: list[tuple[int, int, _SegmentRange]] = []
        for each in sorted(rows, key=lambda row: -row.number):
            left: list[tuple[int, int]] = []
            for a, b in free:
                first, last = max(a, each.first), min(b, each.last)
                if first > last:
                    left.append((a, b))
                    continue
                pieces.append((first, last, each))
                left += [(x, y) for x, y in ((a, first - 1), (last + 1, b)) if x <= y]
            free = left
        return sorted(piece for piece in pieces if piece[1] > after)

    def _extent(self, row: _SegmentRange, first: int, last: int) -> Extent:
        ref = self.refs[row.number]
        return Extent(
            ref.stem + ".data", 0, ref.salt, row.data_start, row.data_stop, row.number, first, last,
            row.entry_start, row.entry_stop, ref.tier,
        )  # fmt: skip


def _gapless_rows(row: Any, entries: Rows) -> Rows:
    """Return (m,) copies of this row, one for each range of frames without a gap."""
    start = int(row["entry_start"])
    own = entries[start : int(row["entry_stop"])]
    lasts = own["base_seq"] + own["count"] - 1
    firsts = np.concatenate(([0], np.flatnonzero(own["base_seq"][1:] != lasts[:-1] + 1) + 1))
    stops = np.concatenate((firsts[1:], [len(own)]))
    rows = np.repeat(np.atleast_1d(row), len(firsts))
    rows["first_seq"], rows["last_seq"] = own["base_seq"][firsts], lasts[stops - 1]
    rows["entry_start"], rows["entry_stop"] = start + firsts, start + stops
    rows["data_start"] = own["offset"][firsts]
    rows["data_stop"] = own["offset"][stops - 1] + own["length"][stops - 1]
    return rows


def owned_by(topics: Rows, shard: int, shards: int) -> NDArray[np.bool_] | None:
    """Return (n,) which rows of a topic table belong to this shard; None = all."""
    return None if shards == 1 else shards_of(topics["topic_id"], shards) == shard
