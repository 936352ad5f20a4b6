"""Stored ranges of a topic from the indexes of its segments: vectorised, and bounded in number.

A segment with a damaged index is planned as one range. An index only makes reading faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.envelope.messages import Extent
from ringlog.errors import CorruptData
from ringlog.segment.segment import Segment
from ringlog.spark.plan import COLD, HOT, StoredRange
from ringlog.storage.extents import TIER_COLD
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.tags import parse_match

I64 = NDArray[np.int64]
Tags = Sequence[str]
STORED_RANGES_MAX = 65_536
"""Maximum number of ranges of one topic. If there are more frames, adjacent frames are merged."""
SKIP_BYTES_MIN = 256 * 1024
"""Minimum size of untagged frames that is worth skipping. Smaller ranges are read and filtered."""


@dataclass(frozen=True, slots=True)
class _Frames:
    """Frames of one segment; each array is (n,). `size` is in bytes; `wanted` selects frames to read."""

    first: I64
    last: I64
    size: I64
    records: I64
    wanted: NDArray[np.bool_]
    tier: str


def stored_ranges_in_segments(
    record_index: StoredRecordIndex,
    topic_id: int,
    extents: Sequence[Extent],
    after: int,
    until: int,
    tags: Tags = (),
) -> list[StoredRange]:
    """Return the ranges of positions after + 1 .. until that segments store; see Catalog.stored_ranges.

    Raises DiskError.
    """
    parts = [
        _frames_of(
            record_index, topic_id, each, max(after + 1, each.first_seq), min(until, each.last_seq), tags
        )
        for each in extents
        if each.segment and each.first_seq <= until and each.last_seq > after
    ]
    parts = [part for part in parts if len(part.first)]
    if not parts:
        return []
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("first", "last", "size", "records", "wanted")
    }
    is_cold = np.concatenate([np.full(len(part.first), part.tier == COLD) for part in parts])
    if not tags:
        # Positions between two frames belong to the later frame, so that slices leave no position out.
        joined["first"] = np.concatenate(([after], joined["last"][:-1])) + 1
    return _grouped(joined, is_cold)


def _frames_of(
    record_index: StoredRecordIndex, topic_id: int, extent: Extent, low: int, high: int, tags: Tags
) -> _Frames:
    tier = COLD if extent.tier == TIER_COLD else HOT
    try:
        segment = record_index.segment(extent.path)
        row = segment.row(topic_id)
    except CorruptData:
        size = max(extent.stop - extent.start, 1)
        share = size * (high - low + 1) // max(extent.last_seq - extent.first_seq + 1, 1)
        one = np.array([1])
        return _Frames(one * low, one * high, one * share, one * (high - low + 1), one > 0, tier)
    if row is None:
        nothing = np.zeros(0, np.int64)
        return _Frames(nothing, nothing, nothing, nothing, nothing > 0, tier)
    topic = segment.topics[row]
    entries = segment.entries[int(topic["entry_start"]) : int(topic["entry_stop"])]
    first = entries["base_seq"].astype(np.int64)
    last = first + entries["count"] - 1
    rows = slice(int(np.searchsorted(last, low)), int(np.searchsorted(first, high, side="right")))
    first, last = first[rows], last[rows]
    wanted = np.ones(len(first), np.bool_)
    if tags:
        wanted = _tagged_frames(segment, topic_id, first, last, entries["length"][rows], tags)
    first, last = np.maximum(first, low), np.minimum(last, high)
    return _Frames(first, last, entries["length"][rows].astype(np.int64), last - first + 1, wanted, tier)


def _tagged_frames(
    segment: Segment, topic_id: int, first: I64, last: I64, size: Any, tags: Tags
) -> NDArray[np.bool_]:
    """Return a mask of the frames to read: frames with one of the tags, and short ranges between them."""
    hit = np.zeros(len(first), np.bool_)
    try:
        for tag in tags:
            seqs = segment.tagged(topic_id, parse_match(tag, "tags"))
            at = np.searchsorted(last, seqs.astype(np.int64))
            at = at[at < len(last)]
            hit[at] = True
    except CorruptData:
        return np.ones(len(first), np.bool_)  # Damaged tag index: read all frames, and filter.
    hits = np.flatnonzero(hit)
    ends = np.concatenate(([0], np.cumsum(size, dtype=np.int64)))
    between = ends[hits[1:]] - ends[hits[:-1] + 1]
    for gap in np.flatnonzero((between > 0) & (between < SKIP_BYTES_MIN)).tolist():
        hit[hits[gap] : hits[gap + 1]] = True
    return hit


def _grouped(frames: dict[str, Any], is_cold: NDArray[np.bool_]) -> list[StoredRange]:
    """Return one range for each frame, or merge adjacent frames if there are too many."""
    rows = np.flatnonzero(frames["wanted"])
    if not len(rows):
        return []
    first, last, size, records = (frames[name][rows] for name in ("first", "last", "size", "records"))
    cold = is_cold[rows]
    ends = np.cumsum(size)
    grain = max(int(ends[-1]) // STORED_RANGES_MAX, 1)
    breaks = np.flatnonzero(
        (np.diff((ends - size) // grain) > 0) | (cold[1:] != cold[:-1]) | (np.diff(rows) > 1)
    )
    starts = np.concatenate(([0], breaks + 1))
    stops = np.concatenate((breaks, [len(rows) - 1]))
    sizes, counts = np.add.reduceat(size, starts), np.add.reduceat(records, starts)
    columns = (first[starts], last[stops], sizes, counts, cold[starts])
    return [
        StoredRange(low, high, nbytes, count, COLD if is_far else HOT)
        for low, high, nbytes, count, is_far in zip(*(each.tolist() for each in columns), strict=True)
    ]
