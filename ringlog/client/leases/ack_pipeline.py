"""Acks of an iteration that nobody waits for: sent as a block ends, while the loop goes on with the next job.

One request is on its way at a time, and what is settled meanwhile goes with the next: a loop over small jobs
acks many at once by itself, one over long jobs each at once. What is not answered is bounded by how many jobs
the iteration may have in flight. Where that is one, its ack waits a moment for the next claim, to travel with
it: that is answered when the job is gone for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringlog.client.leases.claim_result import ClaimResult, Leases, mark_lost, unsettled_requests
from ringlog.client.leases.job_facts import JobFacts
from ringlog.client.leases.lease_extender import Lease
from ringlog.client.requests.results import Settled
from ringlog.errors import RinglogError
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.peer import MS
from ringlog.link.timers import Timer

log = logging.getLogger(__name__)

LINGER_MS = 10
"""Longest that a batch waits, done, for the others of its claim, or a job for the next claim: then it is
acked without them."""


class AckOperations(Protocol):
    """What acks need of a worker's view of a queue; see working.Working."""

    topic: str

    def ack(self, connection: Any, leases: Leases) -> Steps[Settled]: ...


class AckPipeline:
    """Acks of one iteration. With the client's lock held, or in its loop."""

    def __init__(self, working: AckOperations, connection: Any, *, waits_for_claim: bool = False) -> None:
        self._working, self._connection = working, connection
        self._waits_for_claim = waits_for_claim
        self._unsent: list[Lease] = []
        self._batches: list[ClaimResult] = []
        """Done, of one claim; acked together with the last of them, or after LINGER_MS."""
        self._timers: list[Timer] = []
        """What is of no use when these batches have been acked: they keep the leases of their claim."""
        self._linger: Timer | None = None
        self._open = 0
        """Requests without an answer."""
        self._error: RinglogError | None = None
        self._waits: list[Pending[None]] = []

    def add_job(self, job: JobFacts) -> None:
        """Its holder is done with it. It makes room for another one at once: its ack is on its way before the
        next claim."""
        self._unsent.append(job.lease)
        job.release_slot()
        if self._waits_for_claim:
            # Set once for many jobs: each takes longer to do than it has cost so far.
            if self._linger is None:
                self._linger_on(self._lingered)
        elif not self._open:
            self.flush()

    def take_unsent(self) -> list[Lease]:
        """What was settled and is not on its way, for who sends it with a claim; he says `sent` then."""
        leases, self._unsent = self._unsent, []
        self._open += bool(leases)
        return leases

    def on_sent(
        self, leases: list[Lease], error: BaseException | None = None, *, is_taken: bool = True
    ) -> None:
        """What came of it: they are done, or nobody knows; or they are to be acked apart."""
        self._open -= 1
        is_done = all(lease.is_over and not lease.is_lost for lease in leases)
        # Else it is the claim that failed: what it was given cannot be read, and is told of by who claimed.
        if error is not None and not is_done:
            mark_lost(leases)
            if isinstance(error, RinglogError):
                self._error = self._error or error
        elif not is_taken and not is_done and self._waits:
            self._send(leases)
        elif not is_taken and not is_done:
            self._unsent = leases + self._unsent
        self._resolve_waits_if_idle()

    def on_answered(
        self, leases: list[Lease], claimed: ClaimResult | None, error: BaseException | None
    ) -> None:
        """The same, for who had them acked with a claim."""
        if error is None:
            self.on_sent(leases, is_taken=claimed is not None)
        else:
            # Interrupted, nobody knows: to ack them again does no harm.
            self.on_sent(leases, error if isinstance(error, RinglogError) else None, is_taken=False)

    def _linger_on(self, then: Callable[[], None]) -> None:
        at_ns = self._connection.clock.monotonic_ns() + LINGER_MS * MS
        self._linger = self._connection.timers.call_at(at_ns, then)

    def _lingered(self) -> None:
        self._linger = None
        self.flush()

    def flush(self) -> None:
        """Send what was settled, whatever is on its way."""
        leases, self._unsent = self._unsent, []
        if leases:
            self._send(leases)
        if self._batches:
            self._send_batches()

    def add_batch(self, part: ClaimResult, timer: Timer | None, *, is_last: bool) -> None:
        """Its holder is done with a batch. With the last one of its claim comes the `timer` that would have
        kept them all alive."""
        self._batches.append(part)
        if timer is not None:
            self._timers.append(timer)
        if is_last:
            self._send_batches()
        elif self._linger is None:
            self._linger_on(self._send_batches)

    def _send_batches(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        batches, self._batches = self._batches, []
        timers, self._timers = self._timers, []
        requests = unsettled_requests(batches)
        for leases in requests[:-1]:
            self._send(leases)
        if requests:
            self._send(requests[-1], timers)
        else:
            for timer in timers:
                timer.cancel()

    def _send(self, leases: Leases, timers: Sequence[Timer] = ()) -> None:
        def answered(done: Pending[Settled]) -> None:
            for timer in timers:
                timer.cancel()
            self._answered(done, leases)

        self._open += 1
        run_steps(self._working.ack(self._connection, leases)).when_done(answered)

    def _answered(self, done: Pending[Settled], leases: Leases) -> None:
        self._open -= 1
        try:
            settled = done.result()
        except RinglogError as e:
            mark_lost(leases)
            self._error = self._error or e
        else:
            if settled.skipped:
                log.warning(
                    "%d jobs of %s were done after their leases had ended, and may be done again: %s",
                    len(settled.skipped), self._working.topic, settled.skipped[:10],
                )  # fmt: skip
        if not self._open and self._unsent and (self._waits or not self._waits_for_claim):
            unsent, self._unsent = self._unsent, []
            self._send(unsent)
        self._resolve_waits_if_idle()

    def _resolve_waits_if_idle(self) -> None:
        if not self._open:
            waits, self._waits = self._waits, []
            for pending in waits:
                pending.resolve(None)

    def take_error(self) -> RinglogError | None:
        """Why acks failed that were sent since this was asked last."""
        error, self._error = self._error, None
        return error

    def reset_in_child(self) -> None:
        """After a fork: they are the parent's."""
        self._unsent, self._batches, self._open, self._waits = [], [], 0, []
        self._timers, self._linger = [], None

    def wait_answered(self) -> Pending[None]:
        """Done when every ack has its answer; each fails by itself when its time is over."""
        self.flush()
        pending: Pending[None] = Pending()
        if self._open:
            self._waits.append(pending)
        else:
            pending.resolve(None)
        return pending
