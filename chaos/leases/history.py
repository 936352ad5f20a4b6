"""The history of leases that is judged, the rules for it, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.leases.journal import Did

STORIES_MAX = 5
"""Number of stories kept for each kind of fault."""
MS = 1_000_000
GIVEN = frozenset({Did.CLAIMED, Did.TAKEN_OVER, Did.STOLEN})
DONE = frozenset({Did.ACK, Did.REJECT})


class Row(NamedTuple):
    """One row of a journal; see journal.py for the fields."""

    at_ns: int
    begun_ns: int
    client: int
    queue: int
    what: int
    outcome: int
    group: int
    value: int
    seq: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Place:
    """A queue or a group to judge."""

    topic: int
    group: int = 0
    is_queue: bool = True
    is_sought: bool = False
    left: int = 0
    """Records that were never delivered, or delivered and not done."""


@dataclass(frozen=True, slots=True)
class Death:
    """A kill between two instants."""

    role: str
    from_ns: int
    to_ns: int
    client: int = 0
    """Number of the killed client; 0 for a process of the engine."""

    @property
    def is_of_shard(self) -> bool:
        """Whether this death loses the memory of a shard."""
        return self.role in {"wal_shard", "all", "supervisor"}

    def is_within(self, from_ns: int, to_ns: int) -> bool:
        """Whether the death may have happened between these instants."""
        return self.to_ns >= from_ns and self.from_ns <= to_ns


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a lease lasts, and what ends it."""

    lease_ms: int
    idle_ms: int = 1 << 40
    """Idle time (ms) after which another member may take a lease."""
    is_logged: bool = True
    """Whether leases and rejections are in the log. Otherwise they are in the memory of a shard."""
    deaths: Sequence[Death] = ()
    what: str = "record"
    """Words for a leased item and, in `who`, for its holder."""
    who: str = "member"

    def shard_died(self, from_ns: int, to_ns: int) -> bool:
        """Whether leases may have ended with a shard between these instants."""
        return not self.is_logged and any(
            death.is_of_shard and death.is_within(from_ns, to_ns) for death in self.deaths
        )


@dataclass(slots=True)
class LeaseVerdict:
    """Counts and faults of a run."""

    records: int = 0
    """Records whose put returned."""
    done: int = 0
    """Records with a successful ack or commit, summed over all groups."""
    dead: int = 0
    doubles: int = 0
    """Deliveries after the first, of queues and of groups in queue mode."""
    read: int = 0
    commits: int = 0
    takeovers: int = 0
    """Takeovers of streams."""
    looks: int = 0
    seeks: int = 0
    redriven: int = 0
    """Dead letters whose redrive returned."""
    explained: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def says(self, fault: str, story: str) -> None:
        """Count a fault, with a story."""
        self.wrong[fault] += 1
        if self.wrong[fault] <= STORIES_MAX:
            self.stories.append(f"{fault}: {story}")


def name_of(place: Place) -> str:
    """Return how a complaint names this place."""
    return f"group {place.group} of topic {place.topic}"
