"""Results of client calls. All are immutable. Times are microseconds since the Unix epoch unless noted."""

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
    """Records were appended: seqs first_seq to last_seq inclusive reached `durability` at `commit_ts`.

    `deduped`: the engine already had the records, and these are their seqs (0: it no longer knows them).
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
    """Records were appended in several frames. Records of other producers may lie between them."""

    frame_seqs: NDArray[np.uint64] = field(
        default_factory=lambda: np.empty(0, dtype=np.uint64), compare=False
    )
    """(frames,) first seq of each frame, in the order given; 0 if it is no longer known."""
    records_per_frame: int = 1
    """Number of records of each frame except the last, which has the remainder."""

    @property
    def seqs(self) -> NDArray[np.uint64]:
        """(count,) seq of each record, ascending, computed on access; 0 as in `frame_seqs`."""
        size = self.records_per_frame
        if size == 1:
            return self.frame_seqs
        starts = np.repeat(self.frame_seqs, size)
        within = np.tile(np.arange(size, dtype=np.uint64), len(self.frame_seqs))
        return np.where(starts > 0, starts + within, 0).astype(np.uint64)[: self.count]


@dataclass(frozen=True, slots=True)
class AppendedOnce(Appended):
    """Records with dedup ids were appended, except those whose id was used within the window.

    `deduped` is true if no record was new. `first_seq` and `last_seq` belong to the first and last record
    given.
    """

    seqs: tuple[int, ...] = ()
    """Seq of each record, in the order given. A repeated record has the seq of its first append."""
    repeated: frozenset[int] = frozenset()
    """Indexes, from 0, of the records that the topic already had."""


@dataclass(frozen=True, slots=True)
class FlushReport:
    """Outcome of the records that were sent before a flush."""

    acked: int
    """Number of records appended since the last report."""
    failed: int
    """Number of records that were refused or given up since the last report; `error` is the first reason."""
    unfinished: int
    """Number of records that were not settled when the timeout ended."""
    error: RinglogError | None = None

    @property
    def is_complete(self) -> bool:
        """True if every record was appended."""
        return not self.failed and not self.unfinished


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Records and requests that were not settled at close."""

    unsent: int
    """Number of records that were never sent, and therefore not appended."""
    unknown: int
    """Number of records that were sent and may or may not have been appended."""
    requests: int
    """Number of requests without a reply."""

    @property
    def is_clean(self) -> bool:
        """True if everything was settled."""
        return not (self.unsent or self.unknown or self.requests)


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counters of one producer since it was opened. Sizes are in bytes."""

    records_sent: int
    records_acked: int
    records_failed: int
    records_deduped: int
    frames_sent: int
    bytes_sent: int
    buffered_records: int
    pending_records: int
    """Number of records that are not settled, including buffered ones."""
    pending_bytes: int
    retries: int
    waits: int
    """Number of sends that found the buffer full."""


class ClientState(Enum):
    """State of the connection between a client and its engine."""

    CONNECTING = "connecting"
    """The client has not connected to an engine yet."""
    READY = "ready"
    RECONNECTING = "reconnecting"
    """The connection was lost. All objects of the client resume when the engine returns."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """Event of the connection: `connecting`, `connected`, `disconnected`, `reconnected`, `engine_restarted`,
    `forked` or `closed`."""

    at_us: int
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Snapshot of a client's connection for liveness checks."""

    state: ClientState
    state_since_us: int
    transport: str
    engine_id: str
    engine_starts_seen: int
    last_heard_age_s: float | None
    """Seconds since the client last received data from a socket of the engine; None = never."""
    reconnections: int
    frames_resent: int
    requests_resent: int
    retries: int
    """Number of frames that were resent after a temporary refusal."""
    pending_records: int
    pending_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Result of an ack, nack or extension. `count` jobs succeeded. `skipped` has the seqs of jobs whose
    leases had ended, in the order given."""

    count: int
    skipped: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if no job was skipped."""
        return not self.skipped


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A delivered job that is not acked."""

    seq: int
    state: str
    """`leased`, `delayed`, `returned`, or `exhausted` (not yet in the dead-letter topic)."""
    node: str
    """Name of the worker that holds the job; "" = none."""
    until: float
    """End of the lease or the delay, in seconds since the epoch, on the engine's clock; 0 = there is no
    end."""
    deliveries: int
    nacks: int
    """Number of nacks with a reason."""
    failed_at: float
    """Time of the last reported failure, in seconds since the epoch; 0 = none."""
    reason: str


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Number of jobs of a queue by state: `ready` to be claimed, `in_flight` under a lease, `delayed` until a
    time."""

    topic: str
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int
    waiting: int
    """Number of claims that wait for jobs."""
    oldest_ready_ms: int | None = None
    """Age in milliseconds of the oldest ready job; None = no job is ready."""
    wait_p99_ms: int = 0
    """99th percentile, in milliseconds, of the time between append and delivery, over the last one to two
    minutes. 0 = no delivery. Jobs from before the shard's last start are not counted."""
    promoted: int = 0
    """Number of jobs that were delivered before more urgent ones because they had waited for
    `starvation_ms`."""
