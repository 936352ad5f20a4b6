"""What a program is told of consumer groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ringlog.client.read.pages import TagFilter


class GroupLimits(TypedDict, total=False):
    """What bounds a group and its leases, as `client.group` takes it."""

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
    """A group of a topic, and where it is; see GroupStats for more."""

    topic: str
    group: str
    """Its name, and behind an `@` its filter of tags, if it has one."""
    name: str
    mode: str
    tags: TagFilter | None
    """As `client.group` takes it."""
    cursor: int
    """Every record below this number was given out, or is there no more; later ones only where they were more
    urgent, or those before them wait for their time."""
    floor: int
    """Everything up to here is done; of a stream group, committed."""
    pending: int
    """Records that were given out and are not done."""
    max_deliveries: int = 0
    """What was given out so often and comes back goes to the dead letters; 0 = nothing does by itself."""
    dead_letter: str | None = None
    """The topic where they go."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Who works for a group."""

    name: str
    last_seen: float
    """Seconds since the epoch, on the engine's clock."""
    in_flight: int
    """Records that are leased to it."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """How a group is. A position is a number of the topic."""

    topic: str
    group: str
    """Its name, and behind an `@` its filter of tags, if it has one."""
    mode: str
    cursor: int
    """Every record below this number was given out, or is there no more; later ones only where they were more
    urgent, or those before them wait for their time."""
    floor: int
    """Everything up to here is done; of a stream group, committed."""
    head_seq: int
    undelivered: int
    """Records that nobody was given; of a stream group, that are not committed."""
    in_flight: int
    delayed: int
    returned: int
    """Given out, not done, and ready again."""
    waiting: int
    """Claims that wait."""
    members: tuple[GroupMember, ...]
    holder: str
    """Who reads a stream group."""
    is_holding: bool
    """Its topic keeps records beyond caps or TTL for this group (`retain_until_acked`)."""
    set_aside: int = 0
    """On their way to the dead letters."""
    oldest_ready_ms: int | None = None
    """How long ago the oldest record was put that may be claimed; None = there is none. Of mode queue alone,
    as is the next."""
    wait_p99_ms: int = 0
    """99 in 100 of the records given out in the last one or two minutes had waited no longer than this since
    they were put; 0 = none was given out. Records from before the group, or the shard's last start, are
    not counted."""

    @property
    def pending(self) -> int:
        """Records that were given out and are not done."""
        return self.in_flight + self.delayed + self.returned + self.set_aside

    @property
    def lag(self) -> int:
        """Records that are not done."""
        return self.undelivered + self.pending


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """Records first_seq up to last_seq, both included, that were given out together and are not done."""

    first_seq: int
    last_seq: int
    state: str
    """leased, delayed, returned, or set aside: on its way to the dead letters."""
    node: str
    """Who holds them, "" = nobody."""
    deliveries: int
    first_given: float
    """Seconds since the epoch, on the engine's clock; so are the next two."""
    last_given: float
    until: float
    """When the lease or the rest ends; 0 = they are ready."""
    idle_ms: int
    """Nothing was done about them for so long."""

    @property
    def seqs(self) -> range:
        """Their numbers."""
        return range(self.first_seq, self.last_seq + 1)
