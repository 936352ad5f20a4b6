"""Retention: which records leave a topic by caps, TTL, their own expiry, and requested deletes. Pure.

`RetentionState` is the content of a topic at one time. `RecordIndex` answers queries about its records.
`retain` and `decide_delete` return a `Removal`: raised floors, seqs that are removed one by one, and the
exact number of live records and bytes that leave with them. `apply_removal` applies it, in operation and in
replay.

- Caps count live records. The lowest live ones are removed until both caps hold. The floor is one above the
  last removed
  record. Records that were deleted before are skipped.
- TTL removes the longest prefix of expired records. A record with its own `expires_at` may expire between
  others: it is
  removed on its own, and reported when the prefix reaches it.
- With `retain_until_acked` caps and TTL stop at the first position that a queue-mode group has not acked
  (CG5); only the
  hard caps remove more. A record's own expiry applies in any case. Without such a group all limits apply.
- A requested delete is silent: it never moves a floor of involuntary loss (X5).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.tags import TagMatch
from ringlog.topic.config import DISCARD_OLD, TopicConfig
from ringlog.topic.state import ShardTopic

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_TOP = (1 << 64) - 1
_STEP = 1_024
"""Records read in the first step of a scan of unknown length. Each further step is twice as long."""


class RecordIndex(Protocol):
    """The storage's knowledge of one topic's records; see storage/record_index.py."""

    def positions(self, first: int, last: int) -> tuple[U64, I64, I64]: ...
    def totals(self, first: int, last: int) -> tuple[int, int]: ...
    def sizes_of(self, seqs: U64) -> tuple[U64, I64]: ...
    def seek_time(self, ts_us: int) -> int: ...
    def tagged(self, match: TagMatch, below: int) -> BitMap64: ...
    def expired(self, now_us: int) -> BitMap64: ...
    def next_expiry(self, now_us: int) -> int: ...
    def delivery_attributes(self, first: int, last: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class RetentionState:
    """Content of a topic: seqs from `first_seq` to `next_seq` (exclusive), without the `dead` ones."""

    first_seq: int
    next_seq: int
    count: int
    bytes: int
    dead: BitMap64
    cap_records: int
    cap_bytes: int
    ttl_us: int
    own_due_us: int
    """A time before which no record's own expiry is due; 0 = no record has one."""
    retained_from: int = 0
    """First position that a group still needs; 0 = none."""
    hard_records: int = 0
    hard_bytes: int = 0
    """Caps that apply to every group."""


class Removal:
    """What leaves a topic. A floor of 0 means no change."""

    __slots__ = (
        "bytes", "cap_floor", "delete_floor", "due_us", "floor_bytes", "floor_records", "is_retained",
        "own_due_us", "records", "seqs", "shares", "ttl_floor",
    )  # fmt: skip

    def __init__(
        self, *, cap_floor: int = 0, ttl_floor: int = 0, delete_floor: int = 0, seqs: BitMap64 | None = None,
        records: int = 0, bytes: int = 0,
    ) -> None:  # fmt: skip
        self.cap_floor: int = cap_floor
        self.ttl_floor: int = ttl_floor
        self.delete_floor: int = delete_floor
        self.seqs: BitMap64 = BitMap64() if seqs is None else seqs
        """Live seqs that are removed one by one, in addition to the floors."""
        self.records: int = records
        self.bytes: int = bytes
        """Live records that leave, by floors and one by one."""
        self.floor_records: int = 0
        self.floor_bytes: int = 0
        """Those of them that leave by a floor of involuntary loss."""
        self.due_us: int = 0
        self.own_due_us: int = 0
        """Time at which the next record expires, including own expiries; 0 = never. Set by `retain` only."""
        self.is_retained: bool = False
        """A group keeps records that would have been removed otherwise. Set by `retain` only."""
        self.shares: list[tuple[int, int, int]] = []
        """The part of the removal in each volatile file: (file, records, bytes); see `attribute_to_files`."""

    @property
    def is_empty(self) -> bool:
        """True if no record leaves."""
        return not self.records and not self.cap_floor and not self.ttl_floor


# -- state of a topic ----------------------------------------------------------------------------------


def retention_state(topic: ShardTopic) -> RetentionState:
    """Return the current content of a topic, including staged records."""
    config = topic.config
    evicts = config.discard == DISCARD_OLD
    return RetentionState(
        first_seq=first_live_seq(topic),
        next_seq=topic.next_seq,
        count=topic.staged_count,
        bytes=topic.staged_bytes,
        dead=topic.dead if topic.dead is not None else BitMap64(),
        cap_records=config.cap_records if evicts else 0,
        cap_bytes=config.cap_bytes if evicts else 0,
        ttl_us=config.ttl_ms * 1_000,
        own_due_us=topic.own_due_us,
        retained_from=retained_from(topic)[0],
        hard_records=config.hard_cap_records if evicts else 0,
        hard_bytes=config.hard_cap_bytes if evicts else 0,
    )


def retained_from(topic: ShardTopic) -> tuple[int, str]:
    """Return the first position that a queue-mode group has not acked, and the key of the slowest group.

    (0, "") if caps and TTL wait for no group."""
    if not topic.config.retain_until_acked:
        return 0, ""
    floors = [
        (group.ack_floor + 1, group.config.key) for group in topic.groups.values() if group.is_queue_mode
    ]
    return min(floors, default=(0, ""))


def first_live_seq(topic: ShardTopic) -> int:
    """Return the first seq that may be live, including staged ones."""
    front = max(topic.evict_floor, topic.delete_floor)
    for first, last in topic.lost:
        if first <= front <= last:
            front = last + 1
    return front


def exceeds_cap(topic: ShardTopic, config: TopicConfig) -> bool:
    """Return True if a topic that evicts exceeds a cap with records that no group keeps."""
    if config.discard != DISCARD_OLD:
        return False
    is_over_caps = 0 < config.cap_records < topic.staged_count or 0 < config.cap_bytes < topic.staged_bytes
    if not is_over_caps or not topic.retained_at:
        return is_over_caps
    first, _ = retained_from(topic)
    return (
        not first
        or 0 < config.hard_cap_records < topic.staged_count
        or 0 < config.hard_cap_bytes < topic.staged_bytes
        or topic.live_within(first_live_seq(topic), first - 1) > 0
    )


# -- decisions -----------------------------------------------------------------------------------------


def retain(topic: RetentionState, stored: RecordIndex, now_us: int) -> Removal:
    """Return what TTL, own expiry and caps remove at `now_us`. The result depends on nothing else."""
    found = Removal()
    found.own_due_us = topic.own_due_us
    prefix = stop = topic.first_seq
    expired = BitMap64()
    if topic.ttl_us and topic.count:
        old = min(max(stored.seek_time(now_us - topic.ttl_us), stop), topic.next_seq)
        stop = min(old, max(topic.retained_from, topic.first_seq)) if topic.retained_from else old
        found.is_retained = stop < old
    is_own_due = 0 < topic.own_due_us <= now_us
    if is_own_due or (stop > topic.first_seq and topic.dead):
        expired = stored.expired(now_us)
        expired.remove_range(0, topic.first_seq)
        expired.remove_range(topic.next_seq, _TOP)
    if is_own_due:
        found.own_due_us = stored.next_expiry(now_us)
    gone = topic.dead | expired
    if topic.count:
        prefix = _expired_prefix(topic, stored, stop, expired, found)
        _remove_expired(topic, stored, expired, prefix, found)
        _apply_caps(topic, stored, gone, prefix, found)
    found.due_us = _next_due(topic, stored, gone, max(prefix, found.cap_floor), found, now_us)
    return found


def decide_delete(
    topic: RetentionState, stored: RecordIndex, before_seq: int, match: TagMatch | None, seqs: BitMap64 | None
) -> Removal:
    """Return what a requested delete removes: only seqs that are assigned so far."""
    bound = min(before_seq, topic.next_seq) if before_seq else topic.next_seq
    found = Removal()
    if bound <= topic.first_seq or not topic.count:
        return found
    if match is None and seqs is None:
        found.records, found.bytes = _live_in(topic, stored, topic.first_seq, bound - 1, topic.dead)
        found.delete_floor = bound if found.records else 0
        return found
    chosen = seqs if match is None else stored.tagged(match, bound)
    assert chosen is not None
    chosen = chosen - topic.dead
    chosen.remove_range(0, topic.first_seq)
    chosen.remove_range(bound, _TOP)
    there, sizes = stored.sizes_of(_numbers(chosen))
    found.seqs = chosen if len(there) == len(chosen) else _set_of(there)
    found.records, found.bytes = len(there), int(sizes.sum())
    return found


def attribute_to_files(
    topic: RetentionState, stored: RecordIndex, removal: Removal, files: Sequence[tuple[int, int]]
) -> None:
    """Record the part of a removal in each volatile file, given as (file, its last seq + 1).

    Such a file is evicted as a whole, and its content cannot be queried any more at that time."""
    top = max(removal.cap_floor, removal.ttl_floor, removal.delete_floor)
    first = topic.first_seq
    for file_id, stop in files:
        last = min(top, stop) - 1
        records, accounted = (0, 0) if last < first else _live_in(topic, stored, first, last, topic.dead)
        alone = removal.seqs & BitMap64(range(max(first, top), max(stop, top, first)))
        there, sizes = stored.sizes_of(_numbers(alone))
        removal.shares.append((file_id, records + len(there), accounted + int(sizes.sum())))
        first = max(first, stop)


def _expired_prefix(
    topic: RetentionState, stored: RecordIndex, stop: int, expired: BitMap64, found: Removal
) -> int:
    """Return the end of the prefix of expired records, and note what leaves.

    `stop` is the end by TTL alone. Seqs that expired one by one earlier belong to the prefix when it reaches
    them. The reported losses thus depend on the clock, and not on how often retention ran.
    """
    own = stop
    if len(expired):
        own = _first_not_in(stored, topic.dead | expired, stop, topic.next_seq)
    last = _last_live(stored, topic.dead - expired, topic.first_seq, own)
    if last is None:
        return topic.first_seq
    found.ttl_floor = last + 1
    found.floor_records, found.floor_bytes = _live_in(topic, stored, topic.first_seq, last, topic.dead)
    found.records, found.bytes = found.floor_records, found.floor_bytes
    return last + 1


def _remove_expired(
    topic: RetentionState, stored: RecordIndex, expired: BitMap64, prefix: int, found: Removal
) -> None:
    """Remove records that expired after one that did not."""
    middle = expired - topic.dead
    middle.remove_range(0, prefix)
    there, sizes = stored.sizes_of(_numbers(middle))
    found.seqs = _set_of(there)
    found.records += len(there)
    found.bytes += int(sizes.sum())


def _apply_caps(
    topic: RetentionState, stored: RecordIndex, gone: BitMap64, prefix: int, found: Removal
) -> None:
    """Remove the lowest live records until both caps hold, except records that a group needs.

    From the first needed record on, remove records until the hard caps hold."""
    caps = topic.cap_records, topic.cap_bytes
    if not topic.retained_from:
        _evict(topic, stored, gone, (prefix, topic.next_seq), caps, found)
    else:
        found.is_retained |= _evict(topic, stored, gone, (prefix, topic.retained_from), caps, found)
        rest = max(prefix, found.cap_floor), topic.next_seq
        _evict(topic, stored, gone, rest, (topic.hard_records, topic.hard_bytes), found)
    _move_to_floor(stored, topic, found)


def _evict(
    topic: RetentionState, stored: RecordIndex, gone: BitMap64, within: tuple[int, int], caps: tuple[int,
    int],
    found: Removal,
) -> bool:  # fmt: skip
    """Remove the lowest live records of a range until both caps hold. Return False if they hold."""
    records = topic.count - found.records - caps[0] if caps[0] else 0
    accounted = topic.bytes - found.bytes - caps[1] if caps[1] else 0
    (at, stop), step = within, max(_STEP, records)
    while (records > 0 or accounted > 0) and at < stop:
        seqs, sizes = _live(stored, gone, at, min(at + step, stop) - 1)
        if len(seqs):
            ends = np.cumsum(sizes)
            by_bytes = int(np.searchsorted(ends, accounted)) + 1 if accounted > 0 else 0
            taken = min(max(records, by_bytes, 0), len(seqs))
            size = int(ends[taken - 1])
            found.cap_floor = int(seqs[taken - 1]) + 1
            found.records, found.floor_records = found.records + taken, found.floor_records + taken
            found.bytes, found.floor_bytes = found.bytes + size, found.floor_bytes + size
            records, accounted = records - taken, accounted - size
        at, step = at + step, step * 2
    return records > 0 or accounted > 0


def _move_to_floor(stored: RecordIndex, topic: RetentionState, found: Removal) -> None:
    """Count removed seqs below the floor of the cap as removed by the floor."""
    below = found.seqs & BitMap64(range(found.cap_floor)) if len(found.seqs) and found.cap_floor else None
    if below:
        there, sizes = stored.sizes_of(_numbers(below))
        found.seqs = found.seqs - below
        found.floor_records += len(there)
        found.floor_bytes += int(sizes.sum())


def _next_due(
    topic: RetentionState, stored: RecordIndex, gone: BitMap64, at: int, found: Removal, now_us: int
) -> int:
    """Return when the next record expires: the first live one by TTL, or any by its own expiry."""
    due = [found.own_due_us] if found.own_due_us else []
    if topic.ttl_us and topic.count > found.records:
        step = 1
        while at < topic.next_seq:
            seqs, _, stamps = stored.positions(at, min(at + step, topic.next_seq) - 1)
            alive = ~_is_in(seqs, gone)
            if alive.any():
                first = int(alive.argmax())
                at_us = int(stamps[first]) + topic.ttl_us + 1
                # A record that waits for a group is checked again when the group advances.
                due += [at_us] if at_us > now_us or not 0 < topic.retained_from <= int(seqs[first]) else []
                break
            at, step = at + step, max(step * 2, _STEP)
    return min(due, default=0)


# -- scans ---------------------------------------------------------------------------------------------


def _live(stored: RecordIndex, gone: BitMap64, first: int, last: int) -> tuple[U64, I64]:
    seqs, sizes, _ = stored.positions(first, last)
    if not gone.range_cardinality(first, last + 1):
        return seqs, sizes
    alive = ~_is_in(seqs, gone)
    return seqs[alive], sizes[alive]


def _live_in(
    topic: RetentionState, stored: RecordIndex, first: int, last: int, dead: BitMap64
) -> tuple[int, int]:
    """Return (records, bytes) that are alive in first..last."""
    if first <= topic.first_seq and last >= topic.next_seq - 1:
        return topic.count, topic.bytes
    records, accounted = stored.totals(first, last)
    inside = dead & BitMap64(range(first, last + 1))
    if inside:
        there, sizes = stored.sizes_of(_numbers(inside))
        records, accounted = records - len(there), accounted - int(sizes.sum())
    return records, accounted


def _last_live(stored: RecordIndex, gone: BitMap64, first: int, stop: int) -> int | None:
    """Return the last stored seq in [first, stop) that is not in `gone`; None if there is none."""
    step = _STEP
    while stop > first:
        low = max(first, stop - step)
        seqs, _ = _live(stored, gone, low, stop - 1)
        if len(seqs):
            return int(seqs[-1])
        stop, step = low, step * 2
    return None


def _first_not_in(stored: RecordIndex, gone: BitMap64, at: int, stop: int) -> int:
    """Return the first stored seq in [at, stop) that is not in `gone`, or `stop`."""
    step = _STEP
    while at < stop:
        seqs, _ = _live(stored, gone, at, min(at + step, stop) - 1)
        if len(seqs):
            return int(seqs[0])
        at, step = at + step, step * 2
    return stop


def _is_in(seqs: U64, numbers: BitMap64) -> NDArray[np.bool_]:
    if not len(seqs) or not len(numbers):
        return np.zeros(len(seqs), np.bool_)
    near = numbers & BitMap64(range(int(seqs[0]), int(seqs[-1]) + 1))
    return np.isin(seqs, _numbers(near), assume_unique=True)


def _numbers(numbers: BitMap64) -> U64:
    return np.array(numbers.to_array(), dtype=np.uint64)


def _set_of(seqs: U64) -> BitMap64:
    return BitMap64(array("Q", np.ascontiguousarray(seqs, dtype="<u8").tobytes()))


# -- application ---------------------------------------------------------------------------------------


def apply_removal(topic: ShardTopic, removal: Removal) -> None:
    """Apply a removal: raise floors, mark seqs as dead, reduce the counts."""
    topic.cap_floor = max(topic.cap_floor, removal.cap_floor)
    topic.ttl_floor = max(topic.ttl_floor, removal.ttl_floor)
    topic.delete_floor = max(topic.delete_floor, removal.delete_floor)
    if len(removal.seqs):
        topic.dead = removal.seqs if topic.dead is None else topic.dead | removal.seqs
    topic.staged_count -= removal.records
    topic.staged_bytes -= removal.bytes
    advance_delete_floor(topic)


def advance_delete_floor(topic: ShardTopic) -> None:
    """Move the silent floor over dead seqs at the front, and drop all data below it."""
    if topic.lost:
        evicted = topic.evict_floor
        topic.lost = [(first, last) for first, last in topic.lost if last >= evicted]
    dead = topic.dead
    if dead is None:
        return
    front = first_live_seq(topic)
    while front in dead:
        topic.delete_floor = _end_of_run(dead, front)
        front = first_live_seq(topic)
    if dead.range_cardinality(0, front):
        dead = dead.copy()
        dead.remove_range(0, front)
    topic.dead = dead if len(dead) else None


def _end_of_run(dead: BitMap64, first: int) -> int:
    """Return the end (exclusive) of the gapless range of dead seqs that starts at `first`."""
    low, high = first + 1, int(dead.max()) + 2
    while low < high:
        middle = (low + high) // 2
        if dead.contains_range(first, middle):
            low = middle + 1
        else:
            high = middle
    return low - 1
