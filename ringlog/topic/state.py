"""One topic instance: its numbers, floors and counts. Every fact here has one writer, the shard.

Invariants, checked by `check()`:
  1 <= evict_floor <= earliest_seq <= head_seq + 1          (X-2)
  head_seq <= next_seq - 1: what is staged is not yet published (CV-6)

A shard may have a hundred thousand of these, most of them idle: what most topics never need is made when
it is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.topic.config import TopicConfig
from ringlog.topic.dedup import ProducerTable
from ringlog.topic.idempotency import IdempotencyKeys
from ringlog.topic.index import SparseIndex
from ringlog.topic.reservation import Reservation

if TYPE_CHECKING:
    from ringlog.leases.group import ConsumerGroup
    from ringlog.topic.routers import Router


@dataclass(slots=True)
class ShardTopic:
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
    used_us: int = 0
    """When a request used it otherwise, as far as that is noted: where it is removed when nobody does."""
    cap_floor: int = 1
    ttl_floor: int = 1
    trim_floor: int = 1
    delete_floor: int = 1
    """One past the highest number below which everything was deleted on request: silently."""
    dead: BitMap64 | None = None
    """Numbers at or above `earliest_seq` that were removed one by one; None = none."""
    version: int = 0
    """Grows with every removal; readers compare it (see the board). A later incarnation's are greater."""
    due_us: int = 0
    """When the next record expires, microseconds; 0 = none will."""
    own_due_us: int = 0
    """A time before which no record's own `expires_at` comes; 0 = none will. Not later than `due_us`."""
    marked_to: int = 0
    """The last number that may say when or how urgently it wants to be handed out; 0 = none does. Queues ask
    storage about them up to here."""
    staged_count: int = 0
    """Live records, staged ones included (W-14)."""
    staged_bytes: int = 0
    count: int = 0
    """Live records that are published, and their accounted bytes."""
    bytes: int = 0
    held_at: int = 0
    """What caps or TTL would have taken from here on stays for a consumer group; 0 = nothing does."""
    is_reserving: bool = False
    """Some of its records are of a class that a crash may take: numbers are reserved ahead (D-9)."""
    _reservation: Reservation | None = None
    _producers: ProducerTable | None = None
    _keys: IdempotencyKeys | None = None
    _index: SparseIndex | None = None
    _lost: list[tuple[int, int]] | None = None
    _trimmed: list[tuple[int, int]] | None = None
    _routers: dict[int, Router] | None = None
    _groups: dict[int, ConsumerGroup] | None = None
    leases: ConsumerGroup | None = None
    """Of a queue whose leases are durable: its own group, once the log says anything of it."""

    @property
    def reservation(self) -> Reservation:
        """How far its numbers are durably reserved."""
        if self._reservation is None:
            self._reservation = Reservation()
        return self._reservation

    @property
    def producers(self) -> ProducerTable:
        """Who wrote here, and how far."""
        if self._producers is None:
            self._producers = ProducerTable()
        return self._producers

    @producers.setter
    def producers(self, producers: ProducerTable) -> None:
        self._producers = producers

    @property
    def keys(self) -> IdempotencyKeys:
        """Idempotency keys used here within the window."""
        if self._keys is None:
            self._keys = IdempotencyKeys()
        return self._keys

    def keys_counted(self) -> tuple[int, int]:
        """How many are remembered, and how many were forgotten early."""
        return (0, 0) if self._keys is None else (len(self._keys), self._keys.forgotten_early)

    @property
    def index(self) -> SparseIndex:
        """Where its records lie in the log."""
        if self._index is None:
            self._index = SparseIndex()
        return self._index

    @property
    def has_index(self) -> bool:
        """Do any of its records lie in the log?"""
        return self._index is not None and len(self._index) > 0

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Ranges lost in restarts, inclusive, ascending (D-12). Assign a new list to change them."""
        return self._lost if self._lost is not None else []

    @lost.setter
    def lost(self, lost: list[tuple[int, int]]) -> None:
        self._lost = lost or None

    @property
    def trimmed(self) -> list[tuple[int, int]]:
        """Those of `lost` that a router's source had lost (RT-23). Assign a new list to change them."""
        return self._trimmed if self._trimmed is not None else []

    @trimmed.setter
    def trimmed(self, trimmed: list[tuple[int, int]]) -> None:
        self._trimmed = trimmed or None

    @property
    def routers(self) -> dict[int, Router]:
        """Routers that lead here, by number. Assign a new dictionary to change which there are."""
        return self._routers if self._routers is not None else {}

    @routers.setter
    def routers(self, routers: dict[int, Router]) -> None:
        self._routers = routers or None

    @property
    def groups(self) -> dict[int, ConsumerGroup]:
        """Consumer groups of this topic, by number. Assign a new dictionary to change which there are."""
        return self._groups if self._groups is not None else {}

    @groups.setter
    def groups(self, groups: dict[int, ConsumerGroup]) -> None:
        self._groups = groups or None

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
        for first, last in self._lost or ():
            if first <= earliest <= last:
                earliest = last + 1
        return min(earliest, self.head_seq + 1)

    def publish(self) -> None:
        """Make everything staged readable."""
        self.head_seq = self.next_seq - 1
        self.count, self.bytes = self.staged_count, self.staged_bytes

    def skip_to(self, to_seq: int) -> tuple[int, int] | None:
        """Move the head over numbers that may have been lost; returns the range, or None if there is none."""
        if to_seq < self.next_seq:
            return None
        lost = (self.next_seq, to_seq)
        self.lost = with_range(self.lost, *lost)
        self.next_seq = to_seq + 1
        self.head_seq = to_seq
        return lost

    @property
    def has_reservation(self) -> bool:
        """Were numbers ever reserved?"""
        return self._reservation is not None

    def live_within(self, first: int, last: int) -> int:
        """Published numbers within first..last that are neither evicted nor deleted nor lost."""
        first, last = max(first, self.earliest_seq), min(last, self.head_seq)
        if first > last:
            return 0
        gone = self.dead.rank(last) - self.dead.rank(first - 1) if self.dead else 0
        for a, b in self._lost or ():
            a, b = max(a, first), min(b, last)
            if a <= b:
                gone += b - a + 1 - (self.dead.rank(b) - self.dead.rank(a - 1) if self.dead else 0)
        return last - first + 1 - gone

    def mark_lost(self, first: int, last: int) -> None:
        """Published numbers first..last are gone by damage. How large they were is not known any more: of
        the accounted bytes the same part leaves as of the records."""
        records = min(self.live_within(first, last), self.count)
        size = self.bytes * records // self.count if self.count else 0
        self.staged_count -= records
        self.staged_bytes -= size
        self.count, self.bytes = self.count - records, self.bytes - size
        self.lost = with_range(self.lost, first, last)

    def check(self) -> None:
        """Assert the invariants; raises InvariantViolation naming the topic and its numbers."""
        ok = 1 <= self.earliest_seq <= self.head_seq + 1 <= self.next_seq
        # A floor may pass records that are staged; it is published with them.
        ok = ok and 1 <= self.evict_floor <= self.next_seq
        if not ok or self.staged_count < 0 or self.staged_bytes < 0:
            raise InvariantViolation(
                "topic numbers out of order", topic=self.name, evict_floor=self.evict_floor,
                earliest_seq=self.earliest_seq, head_seq=self.head_seq, next_seq=self.next_seq,
                count=self.staged_count, bytes=self.staged_bytes,
            )  # fmt: skip


def with_range(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The ranges with one more, ascending; what overlaps or touches becomes one."""
    joined: list[tuple[int, int]] = []
    for a, b in sorted([*ranges, (first, last)]):
        if joined and a <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined
