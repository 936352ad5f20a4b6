"""One topic instance: its numbers, floors and counts. Every fact here has one writer, the shard.

Invariants, checked by `check()`:
  1 <= evict_floor <= earliest_seq <= head_seq + 1          (X-2)
  head_seq <= next_seq - 1: what is staged is not yet published (CV-6)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.topic.config import TopicConfig
from ringlog.topic.dedup import Producers
from ringlog.topic.idempotency import IdempotencyKeys
from ringlog.topic.index import SparseIndex
from ringlog.topic.reservation import Reservation


@dataclass(slots=True)
class Topic:
    """State of one topic instance, as the shard keeps it in memory."""

    topic_id: int
    epoch: int
    name: str
    config: TopicConfig
    slot: int = -1
    """Index of its slot in the shard's topic table on the board."""
    next_seq: int = 1
    """Number of the next record to be staged."""
    head_seq: int = 0
    """Last published number."""
    last_ts: int = 0
    """Commit stamp of the newest record, microseconds; stamps never decrease (CK-3)."""
    last_read_us: int = 0
    cap_floor: int = 1
    ttl_floor: int = 1
    trim_floor: int = 1
    delete_floor: int = 1
    """One past the highest number below which everything was deleted on request: silently."""
    dead: BitMap64 | None = None
    """Numbers at or above `earliest_seq` that were removed one by one; None = none."""
    version: int = 0
    """Grows with every removal and every change of where records lie; readers compare it (see the board)."""
    due_us: int = 0
    """When the next record expires, microseconds; 0 = none will."""
    staged_count: int = 0
    """Live records, staged ones included (W-14)."""
    staged_bytes: int = 0
    count: int = 0
    """Live records that are published, and their accounted bytes."""
    bytes: int = 0
    has_disk_records: bool = False
    """Some of its records are of class `disk`: numbers are reserved ahead (D-9)."""
    reservation: Reservation = field(default_factory=Reservation)
    producers: Producers = field(default_factory=Producers)
    keys: IdempotencyKeys = field(default_factory=IdempotencyKeys)
    index: SparseIndex = field(default_factory=SparseIndex)
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Ranges lost in restarts, inclusive, ascending (D-12)."""

    @property
    def evict_floor(self) -> int:
        """One past the highest number removed involuntarily."""
        return max(self.cap_floor, self.ttl_floor, self.trim_floor)

    @property
    def earliest_seq(self) -> int:
        """First live number, or head_seq + 1 when there is none.

        A lost range that begins where the live records would moves it: nothing live is inside.
        """
        earliest = max(self.evict_floor, self.delete_floor)
        for first, last in self.lost:
            if first <= earliest <= last:
                earliest = last + 1
        return min(earliest, self.head_seq + 1)

    def publish(self) -> None:
        """Make everything staged readable."""
        self.head_seq = self.next_seq - 1
        self.count, self.bytes = self.staged_count, self.staged_bytes

    def jump(self, to_seq: int) -> tuple[int, int] | None:
        """Move the head over numbers that may have been lost; returns the range, or None if there is none."""
        if to_seq < self.next_seq:
            return None
        lost = (self.next_seq, to_seq)
        self.lost.append(lost)
        self.next_seq = to_seq + 1
        self.head_seq = to_seq
        return lost

    def evict_below(self, floor: int, records: int, accounted: int) -> None:
        """Cap eviction up to `floor` (exclusive), which held that many records and bytes."""
        self.cap_floor = max(self.cap_floor, floor)
        self.staged_count -= records
        self.staged_bytes -= accounted
        self.lost = [(a, b) for a, b in self.lost if b >= self.evict_floor]

    def check(self) -> None:
        """Assert the invariants; raises InvariantViolation naming the topic and its numbers."""
        ok = 1 <= self.evict_floor <= self.earliest_seq <= self.head_seq + 1 <= self.next_seq
        if not ok or self.staged_count < 0 or self.staged_bytes < 0:
            raise InvariantViolation(
                "topic numbers out of order", topic=self.name, evict_floor=self.evict_floor,
                earliest_seq=self.earliest_seq, head_seq=self.head_seq, next_seq=self.next_seq,
                count=self.staged_count, bytes=self.staged_bytes,
            )  # fmt: skip
