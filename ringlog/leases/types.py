"""Parameters and results of queue operations: plain values. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.holders import NO_PROCESS, ProcessId

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
_DOUBLINGS_MAX = 40
"""More doublings change nothing: the milliseconds of a day have 27 bits."""


class LeaseMatch(NamedTuple):
    """Which entries of a request hold their lease. Seqs ascend, except in `skipped`: in request order."""

    leased: I64
    gone: I64
    """Deleted by another request in the meantime; an ack of them still counts."""
    skipped: I64


class QueueCounts(NamedTuple):
    """Jobs of a queue by state; together they are all of its jobs."""

    ready: int
    in_flight: int
    delayed: int


class ClaimRequest(NamedTuple):
    """One of several claims."""

    node: str
    most: int
    lease_ms: int
    process_id: ProcessId = NO_PROCESS
    """The process that claims; see `ConsumerGroup.release`."""
    call: int = 0
    by_number: bool = False
    """As in `DispatchOrder`: this claim gets the lowest seqs, whatever the order of the others."""


class DispatchOrder(NamedTuple):
    """Order in which jobs are delivered for the first time."""

    levels: int = 0
    """Number of priority levels, the highest first. A priority above them counts as the highest. 0: no
    priorities."""
    starvation_ms: int = 0
    """A job below the highest level that waited longer is delivered before all others; 0 = no such rule."""
    by_number: bool = False
    """Ignore levels: the lowest seq first."""


SEQ_ORDER = DispatchOrder()


class RedeliveryBackoff(NamedTuple):
    """Delay `base_ms` after the first delivery, doubled with each further one, at most `most_ms`.

    `base_ms` 0 = no delay.
    """

    base_ms: int = 0
    most_ms: int = 0

    def delay_after(self, deliveries: int) -> int:
        """Return the delay after this number of deliveries."""
        if not self.base_ms:
            return 0
        return min(self.base_ms << min(max(deliveries - 1, 0), _DOUBLINGS_MAX), self.most_ms)


NO_BACKOFF = RedeliveryBackoff()
