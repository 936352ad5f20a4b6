"""Turn stored ranges of topics into Spark partitions. Pure; all results pickle to a few bytes.

A partition is a tuple of slices, of one topic or of several small topics. Frames in segments are never split.
Ranges that exist only in the log are split by position, because the planner does not know where their frames
begin. A partition never mixes cold and hot records if either part fills a partition on its own: otherwise a
slow store would delay a task that has hot records to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

HOT, COLD, WAL = "hot", "cold", "wal"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Positions `after` + 1 .. `until` of one epoch of a topic."""

    topic: str
    topic_id: int
    epoch: int
    after: int
    until: int

    def __len__(self) -> int:
        return max(self.until - self.after, 0)


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Consecutive positions that are stored together in one tier (hot, cold or wal).

    `bytes` is the size on disk, an estimate for tier wal. `records` is a number of positions. In a segment
    the range begins and ends at frame boundaries, unless a bound cuts it.
    """

    first_seq: int
    last_seq: int
    bytes: int
    records: int
    tier: str


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a topic for one task: bounds, approximate size, and tier at planning time."""

    bounds: Bounds
    bytes: int
    tier: str


Slices = tuple[Slice, ...]


def plan_slices(
    topics: Iterable[tuple[Bounds, Sequence[StoredRange]]], *, max_bytes: int, min_partitions: int = 1
) -> list[Slices]:
    """Pack stored ranges greedily and in order into partitions of about `max_bytes`.

    If the total is less than `min_partitions` * `max_bytes`, partitions are smaller. The ranges of a topic
    must be in ascending order and within its bounds.
    """
    listed = [(bounds, list(stored_ranges)) for bounds, stored_ranges in topics]
    total = sum(each.bytes for _, stored_ranges in listed for each in stored_ranges)
    target = max(min(max_bytes, -(-total // min_partitions)), 1)
    packer = _Packer(target)
    for bounds, stored_ranges in listed:
        for is_cold, group in groupby(stored_ranges, key=lambda each: each.tier == COLD):
            packer.add_tier_group(bounds, list(group), is_cold)
    return packer.finish()


class _Packer:
    """Fills one partition after another."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._done: list[Slices] = []
        self._slices: list[Slice] = []
        self._bytes = 0
        self._of_tier = {True: 0, False: 0}
        """Keys: cold (True), not cold (False).

        Total bytes of the tier groups that the open partition has a part of.
        """

    def add_tier_group(self, bounds: Bounds, group: list[StoredRange], is_cold: bool) -> None:
        """Add consecutive ranges of one topic that are all cold, or all not cold."""
        size = sum(each.bytes for each in group)
        other = self._of_tier[not is_cold]
        if other and (other >= self._target or self._of_tier[is_cold] + size >= self._target):
            self._close()
        self._of_tier[is_cold] += size
        for stored_range in group:
            for part in self._parts(stored_range):
                if self._bytes and self._bytes + part.bytes > self._target:
                    self._close()
                    # The last part counts with the size of its whole group: a range of the other tier then
                    # starts a new partition.
                    self._of_tier[is_cold] = size
                self._add(bounds, part)

    def finish(self) -> list[Slices]:
        """Close the open partition and return all partitions."""
        self._close()
        return self._done

    def _add(self, bounds: Bounds, stored_range: StoredRange) -> None:
        own = replace(bounds, after=stored_range.first_seq - 1, until=stored_range.last_seq)
        last = self._slices[-1] if self._slices else None
        if last is not None and _follows(last, own, stored_range.tier):
            joined = replace(last.bounds, until=own.until)
            self._slices[-1] = Slice(joined, last.bytes + stored_range.bytes, last.tier)
        else:
            self._slices.append(Slice(own, stored_range.bytes, stored_range.tier))
        self._bytes += stored_range.bytes

    def _parts(self, stored_range: StoredRange) -> Iterator[StoredRange]:
        """Yield the range itself, or a range of the log cut into equal parts that fit."""
        positions = stored_range.last_seq - stored_range.first_seq + 1
        count = min(-(-stored_range.bytes // self._target), positions) if stored_range.tier == WAL else 1
        if count <= 1:
            yield stored_range
            return
        cuts = [stored_range.first_seq + positions * part // count for part in range(count + 1)]
        for part in range(count):
            first, stop = cuts[part], cuts[part + 1]
            size = stored_range.bytes * (part + 1) // count - stored_range.bytes * part // count
            yield StoredRange(first, stop - 1, size, stop - first, stored_range.tier)

    def _close(self) -> None:
        if self._slices:
            self._done.append(tuple(self._slices))
        self._slices, self._bytes, self._of_tier = [], 0, {True: 0, False: 0}


def _follows(last: Slice, own: Bounds, tier: str) -> bool:
    """Return whether `own` starts where the slice ends, in the same epoch and tier."""
    before = last.bounds
    same_life = (before.topic_id, before.epoch) == (own.topic_id, own.epoch)
    return same_life and before.until == own.after and last.tier == tier
