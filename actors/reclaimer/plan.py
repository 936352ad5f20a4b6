"""What to drop, rewrite and merge, decided from index tables and the shards' word. Pure.

P1  a segment is dropped when every position it holds is dead: the topic is gone or lives another life, the
    position lies below `earliest_seq`, was deleted one by one, or is held by a segment with a greater number
    that the topic's own shard knows: what others know of it leads nobody to the record.
P2  only hot segments that are not quarantined are rewritten or merged.
P3  what is merged into one segment is contiguous for each topic: no other segment holds positions between,
    since of two segments that span a position the greater number is in force.
P4  where a shard did not answer, everything of its topics counts as alive.
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
    """What its shard says of one topic. `epoch` 0: gone."""

    epoch: int
    earliest_seq: int
    deleted: BitMap64 = field(default_factory=BitMap64)
    codec: Codec = Codec.NONE
    """In which the topic wants its records kept; NONE = as storage.compression says."""


@dataclass(frozen=True, slots=True)
class RegisteredSegment:
    """One registered segment: which shards know it, and its table of topics (layout.TOPIC_DTYPE)."""

    ref: SegmentRef
    shards: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True)
class SegmentLiveness:
    """What is alive of a segment; `bytes` are accounted, dead ones included."""

    records: int
    alive_bytes: int
    bytes: int

    @property
    def is_sparse(self) -> bool:
        """More than half of the bytes are dead (RC-9)."""
        return self.alive_bytes * 2 < self.bytes


@dataclass(frozen=True, slots=True)
class SegmentRewrite:
    """Make new segments of the living records of `sources`, which go then."""

    sources: tuple[RegisteredSegment, ...]
    reason: str


Ranges = list[tuple[int, int]]
"""Ascending (first, last) of positions."""
MeasureLive = Callable[[RegisteredSegment, int, TopicLiveness, Ranges], tuple[int, int]]
"""(segment, row, live, elsewhere) -> (records, accounted bytes) alive of one topic of it, without what
segments with greater numbers hold."""


def row_state(row: Any, live: TopicLiveness | None) -> str:
    """`dead`, `alive`, or `mixed`: to be counted."""
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
    held: RegisteredSegment,
    lives: Mapping[int, TopicLiveness],
    elsewhere: Mapping[int, Ranges],
    measure: MeasureLive,
) -> SegmentLiveness:
    """Count what is alive; `elsewhere` says of rows what segments with greater numbers hold of them."""
    records = alive = 0
    for at, row in enumerate(held.table):
        live = lives.get(int(row["topic_id"]))
        state = row_state(row, live)
        if live is not None and state != "dead" and at in elsewhere:
            first = max(int(row["first_seq"]), live.earliest_seq)
            state = "dead" if _covers(elsewhere[at], first, int(row["last_seq"])) else "mixed"
        if state == "alive":
            records += int(row["records"])
            alive += int(row["bytes"])
        elif state == "mixed":
            assert live is not None
            counted = measure(held, at, live, elsewhere.get(at, []))
            records += counted[0]
            alive += counted[1]
    return SegmentLiveness(records, alive, int(held.table["bytes"].sum()))


StoredRanges = Callable[[RegisteredSegment, int], Ranges]
"""(segment, row) -> the positions that are really stored: a segment that leaves some out hides nobody who
holds them."""


def superseded_ranges(
    segments: Iterable[RegisteredSegment], stored: StoredRanges, shards: int
) -> tuple[dict[int, dict[int, Ranges]], set[int]]:
    """Segment -> row -> what segments with greater numbers hold of its topic, by the word of the topic's
    shard (of `shards`); and every segment that shares a position with another, which is not merged as
    long as it does."""
    segments = list(segments)
    by_number = {held.ref.number: held for held in segments}

    def is_known(number: int, at: int) -> bool:
        held = by_number[number]
        return shard_of(int(held.table["topic_id"][at]), shards) in held.shards

    def ranges_of(first: int, last: int, number: int, at: int) -> Ranges:
        held = by_number[number]
        is_dense = int(held.table["records"][at]) == last - first + 1
        return [(first, last)] if is_dense else stored(held, at)

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
    """(first, last, number, row) of every row of each life of a topic of which two rows overlap."""
    if not segments:
        return []
    table = np.concatenate([held.table for held in segments])
    numbers = np.repeat([held.ref.number for held in segments], [len(held.table) for held in segments])
    places = np.concatenate([np.arange(len(held.table)) for held in segments])
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
    """Do ascending ranges hold all of [first, last]?"""
    for a, b in ranges:
        if a > first:
            return False
        first = max(first, b + 1)
        if first > last:
            return True
    return False


# -- what to make anew ------------------------------------------------------------------------------------


def plan_rewrites(
    segments: Collection[RegisteredSegment], alive: Mapping[int, SegmentLiveness],
    left_alone: Collection[int], *,
    segment_bytes: int, segment_records: int,
) -> list[SegmentRewrite]:  # fmt: skip
    """What to rewrite and merge, in no order; no segment is in two of them."""
    usable = [
        held for held in segments
        if held.ref.tier == 0 and held.ref.number not in left_alone and alive[held.ref.number].records
    ]  # fmt: skip
    owns: dict[int, list[RegisteredSegment]] = {}
    packs: dict[tuple[int, ...], list[RegisteredSegment]] = {}
    for held in usable:
        parsed = parse_stem(held.ref.stem)
        if parsed is not None and parsed[0]:
            owns.setdefault(parsed[0], []).append(held)
        else:
            packs.setdefault(held.shards, []).append(held)
    found = [_merge_packs(group, alive) for group in packs.values() if len(group) > SHARED_SEGMENTS_MAX]
    between = SegmentSpans(segments)
    small = segment_bytes // 4
    for topic_id, own in owns.items():
        if sum(alive[held.ref.number].alive_bytes < small for held in own) > SMALL_SEGMENTS_MAX:
            found += _merge_own(topic_id, own, alive, between, small, segment_bytes, segment_records)
    taken = {held.ref.number for each in found for held in each.sources}
    found += [
        SegmentRewrite((held,), "sparse") for held in usable
        if held.ref.number not in taken and alive[held.ref.number].is_sparse
    ]  # fmt: skip
    return found


def _merge_packs(packs: list[RegisteredSegment], alive: Mapping[int, SegmentLiveness]) -> SegmentRewrite:
    """The smallest ones, as many as leave half of the bound: each record is copied few times in its life."""
    packs = sorted(packs, key=lambda held: alive[held.ref.number].alive_bytes)
    return SegmentRewrite(
        tuple(packs[: len(packs) - SHARED_SEGMENTS_MAX // 2 + 1]), "many small topics' segments"
    )


def _merge_own(
    topic_id: int, own: list[RegisteredSegment], alive: Mapping[int, SegmentLiveness],
    between: SegmentSpans, small: int,
    segment_bytes: int, segment_records: int,
) -> list[SegmentRewrite]:  # fmt: skip
    """Runs of small neighbours that together make no more than one segment."""
    runs: list[list[RegisteredSegment]] = [[]]
    size = records = 0
    for held in sorted(own, key=lambda held: int(held.table["first_seq"][0])):
        counted = alive[held.ref.number]
        size, records = size + counted.alive_bytes, records + counted.records
        run = runs[-1]
        fits = size <= segment_bytes and records <= segment_records
        may_merge = not run or (run[-1].shards == held.shards and between.may_merge(topic_id, run[-1], held))
        if counted.alive_bytes < small and fits and may_merge:
            run.append(held)
            continue
        is_small = counted.alive_bytes < small
        runs.append([held] if is_small else [])
        size, records = (counted.alive_bytes, counted.records) if is_small else (0, 0)
    return [SegmentRewrite(tuple(run), "many small segments") for run in runs if len(run) > 1]


class SegmentSpans:
    """Which stretches of positions of a topic lie in which segment, to see what lies between two of them."""

    def __init__(self, segments: Iterable[RegisteredSegment]) -> None:
        segments = list(segments)
        empty = np.zeros(0, dtype=np.uint64)
        tables = [held.table for held in segments]
        ids = np.concatenate([table["topic_id"] for table in tables]) if tables else empty
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._first = np.concatenate([t["first_seq"] for t in tables])[order] if tables else empty
        self._last = np.concatenate([t["last_seq"] for t in tables])[order] if tables else empty
        counts = [len(table) for table in tables]
        self._numbers = np.repeat(np.array([h.ref.number for h in segments], np.uint64), counts)[order]

    def is_unoccupied(self, topic_id: int, first: int, last: int, sources: Collection[int]) -> bool:
        """Does no segment but `sources` hold positions within [first, last] of this topic?"""
        start = int(np.searchsorted(self._ids, np.uint64(topic_id), "left"))
        stop = int(np.searchsorted(self._ids, np.uint64(topic_id), "right"))
        touches = (self._first[start:stop] <= last) & (self._last[start:stop] >= first)
        return all(int(number) in sources for number in self._numbers[start:stop][touches])

    def may_merge(self, topic_id: int, left: RegisteredSegment, right: RegisteredSegment) -> bool:
        """May two segments of one topic become one (P3)?"""
        first, last = int(left.table["first_seq"][0]), int(right.table["last_seq"][0])
        return self.is_unoccupied(topic_id, first, last, {left.ref.number, right.ref.number})


def contiguous_parts(
    topic_id: int, rows: list[tuple[int, int]], spans: SegmentSpans, sources: set[int]
) -> list[int]:
    """Part, from 0, of each of a topic's ascending (first, last) rows: one part is contiguous (P3)."""
    parts = [0] * len(rows)
    for at in range(1, len(rows)):
        is_unoccupied = spans.is_unoccupied(topic_id, rows[at - 1][0], rows[at][1], sources)
        parts[at] = parts[at - 1] + (not is_unoccupied)
    return parts
