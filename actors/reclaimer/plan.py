"""Decisions about which segments to drop, rewrite and merge, from index tables and replies of shards. Pure.

- A segment is dropped when every position in it is dead. A position is dead in these cases: its topic was
  deleted or has another epoch, it lies below `earliest_seq`, it was deleted itself, or a segment with a
  greater number contains it. The topic's own shard must know that segment, because only it directs readers to
  the record.
- Only hot segments that are not quarantined are rewritten or merged.
- The sources of a merged segment are contiguous for each topic: no other segment contains positions
  between them. Of two segments that span a position, the greater number is in force.
- If a shard did not reply, everything of its topics counts as alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.envelope.messages import SegmentRef
from ringlog.limits import SHARED_SEGMENTS_MAX, SMALL_SEGMENTS_MAX
from ringlog.placement import shard_of
from ringlog.segment.layout import parse_stem
from ringlog.types import Codec

Table = NDArray[Any]
NONE = BitMap64()


@dataclass(frozen=True, slots=True)
class TopicLiveness:
    """Live state of one topic, as its shard reports it. `epoch` 0 means that the topic was deleted."""

    epoch: int
    earliest_seq: int
    deleted: BitMap64 = field(default_factory=BitMap64)
    codec: Codec = Codec.NONE
    """Codec that the topic requires for its records; NONE = storage.compression applies."""


@dataclass(frozen=True, slots=True)
class RegisteredSegment:
    """One registered segment: the shards that know it, and its table of topics (layout.TOPIC_DTYPE)."""

    ref: SegmentRef
    shards: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True)
class SegmentLiveness:
    """Live records and bytes of a segment. `bytes` are all accounted bytes, including dead ones."""

    records: int
    alive_bytes: int
    bytes: int

    @property
    def is_sparse(self) -> bool:
        """Whether more than half of the bytes are dead."""
        return self.alive_bytes * 2 < self.bytes


@dataclass(frozen=True, slots=True)
class SegmentRewrite:
    """Write the live records of `sources` to new segments. The sources are then dropped."""

    sources: tuple[RegisteredSegment, ...]
    reason: str


Ranges = list[tuple[int, int]]
"""Ascending (first, last) ranges of positions."""
MeasureLive = Callable[[RegisteredSegment, int, TopicLiveness, Ranges], tuple[int, int]]
"""(segment, row, live, elsewhere) -> (records, accounted bytes) that are alive of one topic of a segment. It
excludes the ranges `elsewhere` that segments with greater numbers contain."""


def row_state(row: Any, live: TopicLiveness | None) -> str:
    """Return `dead`, `alive`, or `mixed`. A mixed row must be counted record by record."""
    if live is None:
        return "alive"
    if live.epoch != int(row["epoch"]) or int(row["last_seq"]) < live.earliest_seq:
        return "dead"
    first = max(int(row["first_seq"]), live.earliest_seq)
    gone = live.deleted.range_cardinality(first, int(row["last_seq"]) + 1) if live.deleted else 0
    if gone > int(row["last_seq"]) - first:
        return "dead"
    return "mixed" if gone or first > int(row["first_seq"]) else "alive"


def assess_segment(
    segment: RegisteredSegment,
    liveness: Mapping[int, TopicLiveness],
    elsewhere: Mapping[int, Ranges],
    measure: MeasureLive,
) -> SegmentLiveness:
    """Count live records and bytes. `elsewhere` is, by row, what segments with greater numbers contain."""
    records = alive = 0
    for at, row in enumerate(segment.table):
        live = liveness.get(int(row["topic_id"]))
        state = row_state(row, live)
        if live is not None and state != "dead" and at in elsewhere:
            first = max(int(row["first_seq"]), live.earliest_seq)
            state = "dead" if _covers(elsewhere[at], first, int(row["last_seq"])) else "mixed"
        if state == "alive":
            records += int(row["records"])
            alive += int(row["bytes"])
        elif state == "mixed":
            assert live is not None
            counted = measure(segment, at, live, elsewhere.get(at, []))
            records += counted[0]
            alive += counted[1]
    return SegmentLiveness(records, alive, int(segment.table["bytes"].sum()))


StoredRanges = Callable[[RegisteredSegment, int], Ranges]
"""(segment, row) -> the positions that are actually stored. A segment does not supersede positions within its
span that it does not store."""


def superseded_ranges(
    segments: Iterable[RegisteredSegment], stored: StoredRanges, shards: int
) -> tuple[dict[int, dict[int, Ranges]], set[int]]:
    """Find rows of segments that segments with greater numbers supersede. `shards` is the number of shards.

    Returns:
        Segment number -> row -> ranges of the row's topic in segments with greater numbers that the topic's
        shard knows. And the numbers of all segments that share a position with another one: these are not
        merged.
    """
    segments = list(segments)
    by_number = {segment.ref.number: segment for segment in segments}

    def is_known(number: int, at: int) -> bool:
        segment = by_number[number]
        return shard_of(int(segment.table["topic_id"][at]), shards) in segment.shards

    def ranges_of(first: int, last: int, number: int, at: int) -> Ranges:
        segment = by_number[number]
        is_dense = int(segment.table["records"][at]) == last - first + 1
        return [(first, last)] if is_dense else stored(segment, at)

    found: dict[int, dict[int, Ranges]] = {}
    shared: set[int] = set()
    for rows in _overlapping_topics(segments):
        for first, last, number, at in rows:
            others = [row for row in rows if row[2] != number and row[0] <= last and row[1] >= first]
            later = [row for row in others if row[2] > number and is_known(*row[2:])]
            greater = sorted(span for row in later for span in ranges_of(*row))
            if others:
                shared.add(number)
            if greater:
                found.setdefault(number, {})[at] = greater
    return found, shared


def _overlapping_topics(segments: list[RegisteredSegment]) -> list[list[tuple[int, int, int, int]]]:
    """Return the rows of each (topic, epoch) with overlapping rows, as (first, last, number, row)."""
    if not segments:
        return []
    table = np.concatenate([segment.table for segment in segments])
    numbers = np.repeat(
        [segment.ref.number for segment in segments], [len(segment.table) for segment in segments]
    )
    places = np.concatenate([np.arange(len(segment.table)) for segment in segments])
    order = np.lexsort((table["first_seq"], table["epoch"], table["topic_id"]))
    table, numbers, places = table[order], numbers[order], places[order]
    is_new = np.ones(len(table), dtype=np.bool_)
    is_new[1:] = (table["topic_id"][1:] != table["topic_id"][:-1]) | (
        table["epoch"][1:] != table["epoch"][:-1]
    )
    starts = np.flatnonzero(is_new)
    found = []
    for start, stop in zip(starts, np.append(starts[1:], len(table)), strict=True):
        if stop - start > 1:
            first, last = table["first_seq"][start:stop], table["last_seq"][start:stop]
            if (first[1:] <= np.maximum.accumulate(last)[:-1]).any():
                rows = zip(first, last, numbers[start:stop], places[start:stop], strict=True)
                found.append([(int(a), int(b), int(number), int(at)) for a, b, number, at in rows])
    return found


def _covers(ranges: Ranges, first: int, last: int) -> bool:
    """Return whether ascending ranges contain all of [first, last]."""
    for a, b in ranges:
        if a > first:
            return False
        first = max(first, b + 1)
        if first > last:
            return True
    return False


# -- rewrites and merges ----------------------------------------------------------------------------------


def plan_rewrites(
    segments: Collection[RegisteredSegment], alive: Mapping[int, SegmentLiveness],
    left_alone: Collection[int], *,
    segment_bytes: int, segment_records: int,
) -> list[SegmentRewrite]:  # fmt: skip
    """Return the rewrites and merges, in no order. No segment is a source of two of them."""
    usable = [
        segment for segment in segments
        if segment.ref.tier == 0 and segment.ref.number not in left_alone
        and alive[segment.ref.number].records
    ]  # fmt: skip
    owns: dict[int, list[RegisteredSegment]] = {}
    packs: dict[tuple[int, ...], list[RegisteredSegment]] = {}
    for segment in usable:
        parsed = parse_stem(segment.ref.stem)
        if parsed is not None and parsed[0]:
            owns.setdefault(parsed[0], []).append(segment)
        else:
            packs.setdefault(segment.shards, []).append(segment)
    found = [_merge_packs(group, alive) for group in packs.values() if len(group) > SHARED_SEGMENTS_MAX]
    between = SegmentSpans(segments)
    small = segment_bytes // 4
    for topic_id, own in owns.items():
        if sum(alive[segment.ref.number].alive_bytes < small for segment in own) > SMALL_SEGMENTS_MAX:
            found += _merge_own(topic_id, own, alive, between, small, segment_bytes, segment_records)
    taken = {segment.ref.number for each in found for segment in each.sources}
    found += [
        SegmentRewrite((segment,), "sparse") for segment in usable
        if segment.ref.number not in taken and alive[segment.ref.number].is_sparse
    ]  # fmt: skip
    return found


def _merge_packs(packs: list[RegisteredSegment], alive: Mapping[int, SegmentLiveness]) -> SegmentRewrite:
    """Merge the smallest packs until half of the limit is left.

    So each record is copied few times in its life.
    """
    packs = sorted(packs, key=lambda segment: alive[segment.ref.number].alive_bytes)
    return SegmentRewrite(
        tuple(packs[: len(packs) - SHARED_SEGMENTS_MAX // 2 + 1]), "many small topics' segments"
    )


def _merge_own(
    topic_id: int, own: list[RegisteredSegment], alive: Mapping[int, SegmentLiveness],
    between: SegmentSpans, small: int,
    segment_bytes: int, segment_records: int,
) -> list[SegmentRewrite]:  # fmt: skip
    """Merge runs of small neighbours that together fit into one segment."""
    runs: list[list[RegisteredSegment]] = [[]]
    size = records = 0
    for segment in sorted(own, key=lambda segment: int(segment.table["first_seq"][0])):
        counted = alive[segment.ref.number]
        size, records = size + counted.alive_bytes, records + counted.records
        run = runs[-1]
        fits = size <= segment_bytes and records <= segment_records
        may_merge = not run or (
            run[-1].shards == segment.shards and between.may_merge(topic_id, run[-1], segment)
        )
        if counted.alive_bytes < small and fits and may_merge:
            run.append(segment)
            continue
        is_small = counted.alive_bytes < small
        runs.append([segment] if is_small else [])
        size, records = (counted.alive_bytes, counted.records) if is_small else (0, 0)
    return [SegmentRewrite(tuple(run), "many small segments") for run in runs if len(run) > 1]


class SegmentSpans:
    """Ranges of positions of each topic by segment, to find segments between two others."""

    def __init__(self, segments: Iterable[RegisteredSegment]) -> None:
        segments = list(segments)
        empty = np.zeros(0, dtype=np.uint64)
        tables = [segment.table for segment in segments]
        ids = np.concatenate([table["topic_id"] for table in tables]) if tables else empty
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._first = np.concatenate([t["first_seq"] for t in tables])[order] if tables else empty
        self._last = np.concatenate([t["last_seq"] for t in tables])[order] if tables else empty
        counts = [len(table) for table in tables]
        self._numbers = np.repeat(np.array([h.ref.number for h in segments], np.uint64), counts)[order]

    def is_unoccupied(self, topic_id: int, first: int, last: int, sources: Collection[int]) -> bool:
        """Return whether only `sources` contain positions of this topic within [first, last]."""
        start = int(np.searchsorted(self._ids, np.uint64(topic_id), "left"))
        stop = int(np.searchsorted(self._ids, np.uint64(topic_id), "right"))
        touches = (self._first[start:stop] <= last) & (self._last[start:stop] >= first)
        return all(int(number) in sources for number in self._numbers[start:stop][touches])

    def may_merge(self, topic_id: int, left: RegisteredSegment, right: RegisteredSegment) -> bool:
        """Return whether two segments of one topic may be merged: no other segment lies between them."""
        first, last = int(left.table["first_seq"][0]), int(right.table["last_seq"][0])
        return self.is_unoccupied(topic_id, first, last, {left.ref.number, right.ref.number})


def contiguous_parts(
    topic_id: int, rows: list[tuple[int, int]], spans: SegmentSpans, sources: set[int]
) -> list[int]:
    """Return the part number, from 0, of each ascending (first, last) row of a topic.

    Each part is contiguous.
    """
    parts = [0] * len(rows)
    for at in range(1, len(rows)):
        is_unoccupied = spans.is_unoccupied(topic_id, rows[at - 1][0], rows[at][1], sources)
        parts[at] = parts[at - 1] + (not is_unoccupied)
    return parts
