"""What the client's calls return. All immutable; times are microseconds since the Unix epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import RinglogError
from ringlog.types import Durability


@dataclass(frozen=True, slots=True)
class Appended:
    """Records were appended: numbers first_seq..last_seq, both included, met `durability` at `commit_ts`.

    `deduped`: the engine had them already and these are the numbers they got then (0: it no longer knows).
    """

    topic: str
    epoch: int
    first_seq: int
    last_seq: int
    count: int
    durability: Durability
    deduped: bool
    commit_ts: int


@dataclass(frozen=True, slots=True)
class AppendedEach(Appended):
    """Records were appended in several frames, so that others' may lie between them."""

    frame_seqs: NDArray[np.uint64] = field(
        default_factory=lambda: np.empty(0, dtype=np.uint64), compare=False
    )
    """(frames,) the first number of each frame, in the order given; 0 where it is not known any more."""
    records_per_frame: int = 1
    """Records in each frame but the last, which has the rest."""

    @property
    def seqs(self) -> NDArray[np.uint64]:
        """(count,) the number of each record, made when asked for, ascending; 0 as in `frame_seqs`."""
        size = self.records_per_frame
        if size == 1:
            return self.frame_seqs
        starts = np.repeat(self.frame_seqs, size)
        within = np.tile(np.arange(size, dtype=np.uint64), len(self.frame_seqs))
        return np.where(starts > 0, starts + within, 0).astype(np.uint64)[: self.count]


@dataclass(frozen=True, slots=True)
class AppendedOnce(Appended):
    """Records with dedup ids were appended, but for those whose id was used within the window.

    `deduped` is true when none was new; `first_seq` and `last_seq` are of the first and last record given.
    """

    seqs: tuple[int, ...] = ()
    """The number of each record, in the order given; of a repeat what it got then."""
    repeated: frozenset[int] = frozenset()
    """Which of them, counted from 0, were there already."""


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What became of all records sent before the flush."""

    acked: int
    """Records appended since the last report."""
    failed: int
    """Records that were refused or given up since the last report; `error` is the first reason."""
    unfinished: int
    """Records whose fate was not known when the timeout ended."""
    error: RinglogError | None = None

    @property
    def is_complete(self) -> bool:
        """Everything was appended."""
        return not self.failed and not self.unfinished


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing could not deliver."""

    unsent: int
    """Records that never left the client: certainly not applied."""
    unknown: int
    """Records that may or may not have been applied."""
    requests: int
    """Requests that were open."""

    @property
    def is_clean(self) -> bool:
        """Nothing was left."""
        return not (self.unsent or self.unknown or self.requests)


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """One producer's counters since it was opened; sizes in bytes."""

    records_sent: int
    records_acked: int
    records_failed: int
    records_deduped: int
    frames_sent: int
    bytes_sent: int
    buffered_records: int
    pending_records: int
    """Handed over and not settled, the buffered ones included."""
    pending_bytes: int
    retries: int
    waits: int
    """How often a send found the buffer full."""


class ClientState(Enum):
    """How a client and its engine stand."""

    CONNECTING = "connecting"
    """The engine has not been met yet."""
    READY = "ready"
    RECONNECTING = "reconnecting"
    """The engine was there and is not now; every handle goes on by itself when it is back."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """Something that happened to the connection: `connecting`, `connected`, `disconnected`, `reconnected`,
    `engine_restarted`, `forked` or `closed`."""

    at_us: int
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """The client at a glance (CL-8)."""

    state: ClientState
    state_since_us: int
    transport: str
    engine_id: str
    engine_starts_seen: int
    last_heard_age_s: float | None
    """Seconds since a peer's socket last said something; None = never."""
    reconnections: int
    frames_resent: int
    requests_resent: int
    retries: int
    """Frames the engine refused for now and that were sent again."""
    pending_records: int
    pending_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of jobs that were acked, given back or extended: `count` were; `skipped` were not held any
    more, in the order given."""

    count: int
    skipped: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """All of them."""
        return not self.skipped


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that was handed out and is not done."""

    seq: int
    state: str
    """leased, delayed, returned, or set aside: on its way to the dead letters."""
    node: str
    """Who holds it, "" = nobody."""
    until: float
    """When the lease or the rest ends, in seconds since the epoch on the engine's clock; 0 = it does not."""
    deliveries: int
    nacks: int
    """How often it was given back with a reason."""
    failed_at: float
    """When it was said last why it failed; 0 = nobody did."""
    reason: str


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue's jobs: `ready` to be claimed, `in_flight` with workers, `delayed` until their time."""

    topic: str
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int
    waiting: int
    """Claims that wait for jobs."""
    oldest_ready_ms: int | None = None
    """How long ago the oldest ready job was put; None = none is ready."""
    wait_p99_ms: int = 0
    """99 in 100 of the jobs handed out in the last one or two minutes had waited no longer than this since
    they were put; 0 = none was handed out. Jobs from before the shard's last start are not counted."""
    promoted: int = 0
    """Jobs that went before more urgent ones because they had waited for `starvation_ms`."""
