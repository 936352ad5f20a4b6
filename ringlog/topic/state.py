"""State of one topic: its seqs, floors and counts. Only the shard writes it.

Invariants, which `check()` verifies:
  1 <= earliest_seq <= head_seq + 1 <= next_seq: staged records are not published yet
  1 <= evict_floor <= next_seq: a floor may pass staged records

A shard may have 100,000 topics, most of them idle. Parts that most topics never need are created at the first
use.
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
    """State of one life of a topic, as the shard keeps it in memory."""

    topic_id: int
    epoch: int
    name: str
    config: TopicConfig
    slot: int = -1
    """Index of its slot in the shard's topic table on the board."""
    next_seq: int = 1
    """Seq of the next record to be staged."""
    head_seq: int = 0
    """Last published seq."""
    last_ts: int = 0
    """Commit time of the newest record in microseconds; commit times never decrease."""
    last_read_us: int = 0
    used_us: int = 0
    """Time of the last other use by a request, recorded only for topics that expire without use."""
    cap_floor: int = 1
    ttl_floor: int = 1
    trim_floor: int = 1
    delete_floor: int = 1
    """One above the highest seq below which every record was deleted by a request. Such deletes are
    silent."""
    dead: BitMap64 | None = None
    """Seqs at or above `earliest_seq` that were removed one by one; None = none."""
    version: int = 0
    """Grows with every removal. Readers compare it with the board. A later incarnation has greater
    versions."""
    due_us: int = 0
    """Time at which the next record expires, in microseconds; 0 = never."""
    own_due_us: int = 0
    """A time before which no record's own `expires_at` is due; 0 = no record has one. Not later than
    `due_us`."""
    attributes_to: int = 0
    """Last seq that may have a `not_before` or a priority; 0 = none. Queues query the storage for them up to
    here."""
    staged_count: int = 0
    """Number of live records, including staged ones."""
    staged_bytes: int = 0
    count: int = 0
    """Number of live published records; `bytes` is their accounted size."""
    bytes: int = 0
    retained_at: int = 0
    """First seq that caps or TTL would have removed but a consumer group keeps; 0 = none."""
    is_reserving: bool = False
    """Some records have a class that a crash may lose, so seqs are reserved in advance."""
    _reservation: Reservation | None = None
    _producers: ProducerTable | None = None
    _keys: IdempotencyKeys | None = None
    _index: SparseIndex | None = None
    _lost: list[tuple[int, int]] | None = None
    _trimmed: list[tuple[int, int]] | None = None
    _routers: dict[int, Router] | None = None
    _groups: dict[int, ConsumerGroup] | None = None
    leases: ConsumerGroup | None = None
    """For a queue with durable leases: its own group, once the log has a change of it."""

    @property
    def reservation(self) -> Reservation:
        """Durable reservation of its seqs."""
        if self._reservation is None:
            self._reservation = Reservation()
        return self._reservation

    @property
    def producers(self) -> ProducerTable:
        """The producers of the topic and their settled frames."""
        if self._producers is None:
            self._producers = ProducerTable()
        return self._producers

    @producers.setter
    def producers(self, producers: ProducerTable) -> None:
        self._producers = producers

    @property
    def keys(self) -> IdempotencyKeys:
        """Idempotency keys and dedup ids within the window."""
        if self._keys is None:
            self._keys = IdempotencyKeys()
        return self._keys

    def keys_counted(self) -> tuple[int, int]:
        """Return the number of remembered keys, and of keys that were dropped early."""
        return (0, 0) if self._keys is None else (len(self._keys), self._keys.forgotten_early)

    @property
    def index(self) -> SparseIndex:
        """Positions of its records in the log."""
        if self._index is None:
            self._index = SparseIndex()
        return self._index

    @property
    def has_index(self) -> bool:
        """True if any of its records are in the log."""
        return self._index is not None and len(self._index) > 0

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Ranges lost in restarts, inclusive, ascending. Assign a new list to change them."""
        return self._lost if self._lost is not None else []

    @lost.setter
    def lost(self, lost: list[tuple[int, int]]) -> None:
        self._lost = lost or None

    @property
    def trimmed(self) -> list[tuple[int, int]]:
        """Those of `lost` that a router's source had lost. Assign a new list to change them."""
        return self._trimmed if self._trimmed is not None else []

    @trimmed.setter
    def trimmed(self, trimmed: list[tuple[int, int]]) -> None:
        self._trimmed = trimmed or None

    @property
    def routers(self) -> dict[int, Router]:
        """Routers to this topic, by number. Assign a new dictionary to change the set."""
        return self._routers if self._routers is not None else {}

    @routers.setter
    def routers(self, routers: dict[int, Router]) -> None:
        self._routers = routers or None

    @property
    def groups(self) -> dict[int, ConsumerGroup]:
        """Consumer groups of this topic, by number. Assign a new dictionary to change the set."""
        return self._groups if self._groups is not None else {}

    @groups.setter
    def groups(self, groups: dict[int, ConsumerGroup]) -> None:
        self._groups = groups or None

    @property
    def evict_floor(self) -> int:
        """One above the highest seq that was removed involuntarily."""
        return max(self.cap_floor, self.ttl_floor, self.trim_floor)

    @property
    def earliest_seq(self) -> int:
        """First live seq; head_seq + 1 if there is none.

        If a lost range contains the floor, the first live seq is after that range, because no record in it is
        alive.
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
        """Move the head over seqs that may be lost. Return the range; None if there is none."""
        if to_seq < self.next_seq:
            return None
        lost = (self.next_seq, to_seq)
        self.lost = with_range(self.lost, *lost)
        self.next_seq = to_seq + 1
        self.head_seq = to_seq
        return lost

    @property
    def has_reservation(self) -> bool:
        """True if seqs were ever reserved."""
        return self._reservation is not None

    def live_within(self, first: int, last: int) -> int:
        """Return the number of published seqs in first..last that are not evicted, deleted or lost."""
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
        """Mark published seqs first..last as lost by damage.

        Their size is not known any more. The accounted bytes shrink by the same share as the records."""
        records = min(self.live_within(first, last), self.count)
        size = self.bytes * records // self.count if self.count else 0
        self.staged_count -= records
        self.staged_bytes -= size
        self.count, self.bytes = self.count - records, self.bytes - size
        self.lost = with_range(self.lost, first, last)

    def check(self) -> None:
        """Verify the invariants. Raises InvariantViolation with the topic and its values."""
        ok = 1 <= self.earliest_seq <= self.head_seq + 1 <= self.next_seq
        # A floor may pass staged records; it is published with them.
        ok = ok and 1 <= self.evict_floor <= self.next_seq
        if not ok or self.staged_count < 0 or self.staged_bytes < 0:
            raise InvariantViolation(
                "positions of a topic are out of order, or a count is negative", topic=self.name,
                evict_floor=self.evict_floor, earliest_seq=self.earliest_seq,
                head_seq=self.head_seq, next_seq=self.next_seq,
                count=self.staged_count, bytes=self.staged_bytes,
            )  # fmt: skip


def with_range(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges with one more, ascending. Overlapping and adjacent ranges are merged."""
    joined: list[tuple[int, int]] = []
    for a, b in sorted([*ranges, (first, last)]):
        if joined and a <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined
