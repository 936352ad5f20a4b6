"""What a reader must be told before it reads on: the tombstone decision (TB-2..TB-13). Pure.

A read starts from a cursor, the last position its reader has dealt with. Positions after it may be
gone for two kinds of reasons. Somebody asked (a delete): that is silent. Nobody asked (a cap, a TTL,
a trimmed source, a restart that lost unsynced records): that is announced, once, before the records
that follow. `plan_read` takes the cursor and the topic's floors and answers with one ReadPlan: what to
announce, where to resume, and how far this read may walk.

A lost range ends the walk before it, so that its announcement comes between the records on both
sides. At most one tombstone goes with one read; whatever else is due comes with the next.
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
    """A topic's watermarks at one instant. Each floor is one past the highest position it removed."""

    head_seq: int
    earliest_seq: int
    cap_floor: int = 1
    ttl_floor: int = 1
    trim_floor: int = 1

    @property
    def evict_floor(self) -> int:
        """One past the highest position that was removed involuntarily (X-3)."""
        return max(self.cap_floor, self.ttl_floor, self.trim_floor, 1)


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions `gap_from`..`gap_to`, both included, were lost; `recreated` means: start over instead."""

    gap_from: int
    gap_to: int
    reason: str

    @property
    def missed_estimate(self) -> int:
        """Upper bound of the records missed (TB-5)."""
        return self.gap_to - self.gap_from + 1


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How one read proceeds: announce `gap` if any, read positions `after` + 1 up to `stop`."""

    gap: Gap | None
    after: int
    stop: int


def plan_read(
    cursor: int, floors: Floors, lost: Sequence[int] = (), *, trimmed: Sequence[int] = (),
    recreated: bool = False, is_behind: bool = False,
) -> ReadPlan:  # fmt: skip
    """Decide what a read from `cursor` announces, where it resumes and where it must end.

    `lost` are the restart losses, [first, last, first, last, …] in ascending order; those of them that a
    router's source had lost are `trimmed` as well (RT-23), also ascending. `recreated`: the
    cursor belongs to an earlier life of the topic (E-7); a cursor above the head says so by itself (E-8),
    unless `is_behind`: its shard shows less than it did, for a time, and there is nothing to read meanwhile.
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
    due = next_lost(cursor, head, lost)
    if due is not None and max(cursor + 1, floors.earliest_seq) >= due[0]:
        first = max(cursor + 1, due[0])
        reason = SOURCE_TRIM if next_lost(first - 1, first, trimmed) is not None else RESTART_LOSS
        return _resume(Gap(first, due[1], reason), due[1], floors, lost)
    return _resume(None, cursor, floors, lost)


def next_lost(cursor: int, head: int, lost: Sequence[int]) -> tuple[int, int] | None:
    """First lost range, cut at the head, of which some position lies after `cursor`; or None."""
    for first, last in zip(lost[::2], lost[1::2], strict=True):
        last = min(last, head)
        if last > cursor and first <= last:
            return first, last
    return None


def _resume(gap: Gap | None, after: int, floors: Floors, lost: Sequence[int]) -> ReadPlan:
    """Pass over voluntary removals silently (TB-6), but never over a lost range (TB-12)."""
    stop = _walk_stop(after, floors.head_seq, lost)
    resumed = min(max(after, floors.earliest_seq - 1), max(after, stop))
    return ReadPlan(gap, resumed, stop)


def _walk_stop(after: int, head: int, lost: Sequence[int]) -> int:
    following = next_lost(after, head, lost)
    return head if following is None else max(after, following[0] - 1)


def _eviction_reason(gap_from: int, floors: Floors) -> str:
    """TB-7."""
    by_cap = floors.cap_floor - 1 >= gap_from
    by_ttl = floors.ttl_floor - 1 >= gap_from
    if by_cap and by_ttl:
        return MIXED
    if by_ttl:
        return TTL
    if not by_cap and floors.trim_floor - 1 >= gap_from:
        return SOURCE_TRIM
    return CAP
