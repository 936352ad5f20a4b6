"""Public data about consumer groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ringlog.client.read.pages import TagFilter


class GroupLimits(TypedDict, total=False):
    """Limits of a group and of its leases, as `client.group` takes them. See there."""

    max_in_flight: int
    member_max_in_flight: int
    min_idle_ms: int
    create: bool
    max_deliveries: int
    dead_letter: str
    backoff_ms: int
    backoff_max_ms: int
    release_on_exit: bool


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group of a topic and its position. See GroupStats for more."""

    topic: str
    group: str
    """Name of the group, followed by `@` and its tag filter if it has one."""
    name: str
    mode: str
    tags: TagFilter | None
    """Tag filter, as `client.group` takes it."""
    cursor: int
    """Every record below this seq was delivered or no longer exists. A record above it was delivered only if
    it was more urgent, or if earlier records are delayed."""
    floor: int
    """Highest seq up to which every record is acked; for mode stream, committed."""
    pending: int
    """Number of delivered records that are not acked."""
    max_deliveries: int = 0
    """Number of deliveries after which a returned record becomes a dead letter; 0 = no limit."""
    dead_letter: str | None = None
    """Dead-letter topic of the group."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Member of a group."""

    name: str
    last_seen: float
    """Time of the last request in seconds since the epoch, on the engine's clock."""
    in_flight: int
    """Number of records that are leased to the member."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """State of a group. Positions are seqs of the topic."""

    topic: str
    group: str
    """Name of the group, followed by `@` and its tag filter if it has one."""
    mode: str
    cursor: int
    """Every record below this seq was delivered or no longer exists. A record above it was delivered only if
    it was more urgent, or if earlier records are delayed."""
    floor: int
    """Highest seq up to which every record is acked; for mode stream, committed."""
    head_seq: int
    undelivered: int
    """Number of records that were never delivered; for mode stream, that are not committed."""
    in_flight: int
    delayed: int
    returned: int
    """Number of delivered records that were returned and are ready again."""
    waiting: int
    """Number of claims that wait for records."""
    members: tuple[GroupMember, ...]
    holder: str
    """Name of the member that reads the group in mode stream."""
    is_holding: bool
    """True if the topic retains records beyond caps or TTL for this group (`retain_until_acked`)."""
    exhausted: int = 0
    """Number of exhausted records that are not yet in the dead-letter topic."""
    oldest_ready_ms: int | None = None
    """Age in milliseconds of the oldest record that may be claimed; None = there is none. Only for mode
    queue, as the next field."""
    wait_p99_ms: int = 0
    """99th percentile, in milliseconds, of the time between append and delivery, over the last one to two
    minutes. 0 = no delivery. Records from before the creation of the group, or the shard's last start, are
    not counted."""

    @property
    def pending(self) -> int:
        """Number of delivered records that are not acked."""
        return self.in_flight + self.delayed + self.returned + self.exhausted

    @property
    def lag(self) -> int:
        """Number of records that are not acked."""
        return self.undelivered + self.pending


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """Consecutive records, first_seq to last_seq inclusive, that were delivered together and are not
    acked."""

    first_seq: int
    last_seq: int
    state: str
    """`leased`, `delayed`, `returned`, or `exhausted` (not yet in the dead-letter topic)."""
    node: str
    """Name of the member that holds the records; "" = none."""
    deliveries: int
    first_given: float
    """Time of the first delivery in seconds since the epoch, on the engine's clock. `last_given` is the time
    of the last delivery or lease extension."""
    last_given: float
    until: float
    """End of the lease or the delay, in seconds since the epoch, on the engine's clock; 0 = the records are
    ready."""
    idle_ms: int
    """Time since the last delivery or lease extension, in milliseconds."""

    @property
    def seqs(self) -> range:
        """Seqs of the records."""
        return range(self.first_seq, self.last_seq + 1)
