"""Tombstones: the decision which lost records a reader must report before it continues. Pure.

A read starts from a cursor, the last position that its reader processed. Positions after it may be missing
for two kinds of reasons. Requested removals (deletes) are silent. Involuntary losses (a cap, a TTL, a trimmed
source, a restart that lost unsynced records) are reported once, before the records that follow. `plan_read`
takes the cursor and the topic's floors and returns a ReadPlan: the loss to report, the position to continue
at, and the end of this read.

A lost range ends the read before it, so that its tombstone is delivered between the records on both sides.
One read delivers at most one tombstone; the next read delivers the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAP = "cap"
TTL = "ttl"
MIXED = "mixed"
SOURCE_TRIM = "source_trim"
RESTART_LOSS = "restart_loss"
RECREATED = "recreated"


@dataclass(frozen=True, slots=True)
class Floors:
    """Floors of a topic at one time. Each floor is one above the highest position that it removed."""

    head_seq: int
    earliest_seq: int
    cap_floor: int = 1
    ttl_floor: int = 1
    trim_floor: int = 1

    @property
    def evict_floor(self) -> int:
        """One above the highest position that was removed involuntarily."""
        return max(self.cap_floor, self.ttl_floor, self.trim_floor, 1)


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions `gap_from`..`gap_to`, inclusive, were lost. `recreated` means: the reader starts over."""

    gap_from: int
    gap_to: int
    reason: str

    @property
    def missed_estimate(self) -> int:
        """Upper bound of the number of lost records."""
        return self.gap_to - self.gap_from + 1


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How one read proceeds: report `gap` if not None, then read positions `after` + 1 to `stop`."""

    gap: Gap | None
    after: int
    stop: int


def plan_read(
    cursor: int, floors: Floors, lost: Sequence[int] = (), *, trimmed: Sequence[int] = (),
    recreated: bool = False, is_behind: bool = False,
) -> ReadPlan:  # fmt: skip
    """Decide what a read from `cursor` reports, where it continues and where it ends.

    `lost` are the ranges lost in restarts, [first, last, first, last, …], ascending. `trimmed` are those of
    them that a router's source had lost, also ascending.

    `recreated`: the cursor has an earlier epoch. A cursor above the head means the same, unless `is_behind`:
    then the shard temporarily shows fewer records than before, and the read ends at the cursor.
    """
    head = floors.head_seq
    if is_behind and cursor > head and not recreated:
        return ReadPlan(None, cursor, cursor)
    if recreated or cursor > head:
        start = floors.earliest_seq - 1
        return ReadPlan(Gap(1, head, RECREATED), start, _walk_stop(start, head, lost))
    if cursor + 1 < floors.evict_floor:
        gap = Gap(cursor + 1, floors.evict_floor - 1, _eviction_reason(cursor + 1, floors))
        return _resume(gap, floors.evict_floor - 1, floors, lost)
    next_range = next_lost(cursor, head, lost)
    if next_range is not None and max(cursor + 1, floors.earliest_seq) >= next_range[0]:
        first = max(cursor + 1, next_range[0])
        reason = SOURCE_TRIM if next_lost(first - 1, first, trimmed) is not None else RESTART_LOSS
        return _resume(Gap(first, next_range[1], reason), next_range[1], floors, lost)
    return _resume(None, cursor, floors, lost)


def next_lost(cursor: int, head: int, lost: Sequence[int]) -> tuple[int, int] | None:
    """Return the first lost range, cut at the head, with a position after `cursor`; None if there is none."""
    for first, last in zip(lost[::2], lost[1::2], strict=True):
        last = min(last, head)
        if last > cursor and first <= last:
            return first, last
    return None


def _resume(gap: Gap | None, after: int, floors: Floors, lost: Sequence[int]) -> ReadPlan:
    """Skip requested removals silently, but never skip a lost range."""
    stop = _walk_stop(after, floors.head_seq, lost)
    resumed = min(max(after, floors.earliest_seq - 1), max(after, stop))
    return ReadPlan(gap, resumed, stop)


def _walk_stop(after: int, head: int, lost: Sequence[int]) -> int:
    following = next_lost(after, head, lost)
    return head if following is None else max(after, following[0] - 1)


def _eviction_reason(gap_from: int, floors: Floors) -> str:
    """Return the reason of an eviction from `gap_from` on: cap, TTL, both (mixed), or a trimmed source."""
    by_cap = floors.cap_floor - 1 >= gap_from
    by_ttl = floors.ttl_floor - 1 >= gap_from
    if by_cap and by_ttl:
        return MIXED
    if by_ttl:
        return TTL
    if not by_cap and floors.trim_floor - 1 >= gap_from:
        return SOURCE_TRIM
    return CAP
