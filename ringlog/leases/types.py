"""What a queue is asked and answers: plain values. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.holders import NO_PROCESS, ProcessId

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
_DOUBLINGS_MAX = 40
"""Beyond it every rest is the longest one: a day's milliseconds double 27 times."""


class LeaseMatch(NamedTuple):
    """Which entries of a request hold their lease. Numbers ascend, but for `skipped`: in request order."""

    leased: I64
    gone: I64
    """Deleted by others meanwhile (QA-9)."""
    skipped: I64


class QueueCounts(NamedTuple):
    """QS-1."""

    ready: int
    in_flight: int
    delayed: int


class ClaimRequest(NamedTuple):
    """One claim among several."""

    node: str
    most: int
    lease_ms: int
    process_id: ProcessId = NO_PROCESS
    """The process that claims; see `release`."""
    call: int = 0
    by_number: bool = False
    """As of `Order`: it is given the lowest numbers whatever the others are given by."""


class DispatchOrder(NamedTuple):
    """In which order jobs are handed out that nobody had yet."""

    levels: int = 0
    """Levels of priority, the highest first; a priority above them is the highest. 0: there are none."""
    starvation_ms: int = 0
    """A job below the highest level that waited longer goes before all of these; 0 = none does."""
    by_number: bool = False
    """Whatever their level: the lowest number first (L14)."""


SEQ_ORDER = DispatchOrder()


class RedeliveryBackoff(NamedTuple):
    """After the first delivery `base_ms`, then twice as long each time, `most_ms` at most; 0 = none."""

    base_ms: int = 0
    most_ms: int = 0

    def delay_after(self, deliveries: int) -> int:
        """After so many deliveries."""
        if not self.base_ms:
            return 0
        return min(self.base_ms << min(max(deliveries - 1, 0), _DOUBLINGS_MAX), self.most_ms)


NO_BACKOFF = RedeliveryBackoff()
