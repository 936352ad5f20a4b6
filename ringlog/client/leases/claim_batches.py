"""One claim, returned to a program in batches. Call with the client's lock held, or in its loop."""

from __future__ import annotations

from collections import deque
from functools import partial

from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.claim_result import ClaimResult, Leases, unsettled_requests
from ringlog.client.leases.lease_extender import Lease, LeaseExtender
from ringlog.link.timers import Timer


class ClaimBatches:
    """Unfinished jobs of an iteration, in batches of up to `size` jobs."""

    def __init__(self, size: int, ack_pipeline: AckPipeline) -> None:
        self._size, self._ack_pipeline = size, ack_pipeline
        self._left: deque[ClaimResult] = deque()
        self._is_started = False
        """True while the program works on the first of them."""
        self._timer: Timer | None = None
        """Timer that extends the leases of the claim."""

    def add_claim(self, claimed: ClaimResult, extender: LeaseExtender | None) -> None:
        """Add a claim. With a keeper, its leases are extended until each is settled."""
        parts = claimed.parts(self._size)
        self._left.extend(parts)
        if extender is not None and len(claimed):
            self._timer = extender.extend_later(claimed.until_ns, claimed.lease_ms, partial(_to_keep, parts))

    def next_batch(self, now_ns: int) -> ClaimResult | None:
        """Return the next batch; None if all are finished. Batches whose leases have all ended are
        skipped."""
        while self._left and self._left[0].is_lost_at(now_ns):
            self._left.popleft()
        if self._left:
            self._is_started = True
            return self._left[0]
        self._end_keeping()
        self._ack_pipeline.flush()  # Before the next claim: the shard handles requests in this order.
        return None

    def finish_batch(self) -> None:
        """Finish the current batch. Its ack is sent before the next claim."""
        part = self._left.popleft()
        self._is_started, timer = False, None
        if not self._left:
            timer, self._timer = self._timer, None
        self._ack_pipeline.add_batch(part, timer, is_last=not self._left)

    def take_unsettled(self, *, is_left: bool) -> tuple[list[Leases], list[Leases]]:
        """Take all jobs that must return to the queue: those of the started batch, if the program left it
        (`is_left`), and those of unstarted batches."""
        started = [self._left.popleft()] if self._is_started else []
        unstarted = list(self._left)
        self._left.clear()
        if not is_left:
            self._left.extend(started)
            started = []
        self._is_started = bool(self._left)
        if not self._left:
            self._end_keeping()
        return unsettled_requests(started), unsettled_requests(unstarted)

    def _end_keeping(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _to_keep(parts: list[ClaimResult]) -> list[Lease]:
    return [lease for part in parts for lease in part.leases_to_extend()]
