"""Pipelined acks of one iteration: sent as blocks end, while the loop continues with the next job.

At most one request is in flight. Jobs that are settled meanwhile are acked by the next request. A loop over
small jobs therefore acks many jobs per request, and a loop over long jobs acks each at once. `max_in_flight`
of the iteration bounds the unanswered acks. If it is 1, the ack waits a moment for the next claim and is sent
with it. The reply arrives when the ack is complete.
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

log: logging.Logger = logging.getLogger(__name__)

LINGER_MS = 10
"""Longest time in milliseconds that a finished batch waits for the other batches of its claim, or a job for
the next claim. It is then acked on its own."""


class AckOperations(Protocol):
    """Interface that acks need. See lease_operations.LeaseOperations."""

    topic: str

    def ack(self, connection: Any, leases: Leases) -> Steps[Settled]: ...


class AckPipeline:
    """Acks of one iteration. Call with the client's lock held, or in its loop."""

    def __init__(self, operations: AckOperations, connection: Any, *, waits_for_claim: bool = False) -> None:
        self._operations, self._connection = operations, connection
        self._waits_for_claim = waits_for_claim
        self._unsent: list[Lease] = []
        self._batches: list[ClaimResult] = []
        """Finished batches of one claim. They are acked with the last batch of the claim, or after
        LINGER_MS."""
        self._timers: list[Timer] = []
        """Timers that extend the leases of these batches' claims. They are cancelled after the ack."""
        self._linger: Timer | None = None
        self._open = 0
        """Number of requests in flight."""
        self._error: RinglogError | None = None
        self._waits: list[Pending[None]] = []

    def add_job(self, job: JobFacts[Any]) -> None:
        """Ack a finished job. It frees its slot at once: its ack is sent before the next claim."""
        self._unsent.append(job.lease)
        job.release_slot()
        if self._waits_for_claim:
            # Set once for many jobs, since setting it for each would be too expensive.
            if self._linger is None:
                self._linger_on(self._lingered)
        elif not self._open:
            self.flush()

    def take_unsent(self) -> list[Lease]:
        """Take the leases whose acks are not sent yet, to send them with a claim. The caller must call
        `on_sent` afterwards."""
        leases, self._unsent = self._unsent, []
        self._open += bool(leases)
        return leases

    def on_sent(
        self, leases: list[Lease], error: BaseException | None = None, *, is_taken: bool = True
    ) -> None:
        """Report the result of leases that `take_unsent` returned.

        Args:
            leases: The leases.
            error: Why the request failed; None = it did not.
            is_taken: False if the acks were not sent and must be sent without a claim.
        """
        self._open -= 1
        is_done = all(lease.is_over and not lease.is_lost for lease in leases)
        # Otherwise the acks succeeded and the claimed jobs cannot be read; the claim's caller reports this
        # error.
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
        """Report the result of acks that were sent with a claim."""
        if error is None:
            self.on_sent(leases, is_taken=claimed is not None)
        else:
            # After an interruption the outcome is unknown. Acking again is harmless.
            self.on_sent(leases, error if isinstance(error, RinglogError) else None, is_taken=False)

    def _linger_on(self, then: Callable[[], None]) -> None:
        at_ns = self._connection.clock.monotonic_ns() + LINGER_MS * MS
        self._linger = self._connection.timers.call_at(at_ns, then)

    def _lingered(self) -> None:
        self._linger = None
        self.flush()

    def flush(self) -> None:
        """Send all unsent acks, even if a request is in flight."""
        leases, self._unsent = self._unsent, []
        if leases:
            self._send(leases)
        if self._batches:
            self._send_batches()

    def add_batch(self, part: ClaimResult, timer: Timer | None, *, is_last: bool) -> None:
        """Ack a finished batch. The last batch of a claim brings the `timer` that would have extended the
        claim's leases."""
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
        run_steps(self._operations.ack(self._connection, leases)).when_done(answered)

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
                    "leases of %d jobs of %s ended before their acks, the jobs may be delivered again: %s",
                    len(settled.skipped), self._operations.topic, settled.skipped[:10],
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
        """Return the first error of acks since the last call, or None."""
        error, self._error = self._error, None
        return error

    def reset_in_child(self) -> None:
        """Forget all acks after a fork: they belong to the parent."""
        self._unsent, self._batches, self._open, self._waits = [], [], 0, []
        self._timers, self._linger = [], None

    def wait_answered(self) -> Pending[None]:
        """Wait until every ack has a reply. Each request fails by itself at its timeout."""
        self.flush()
        pending: Pending[None] = Pending()
        if self._open:
            self._waits.append(pending)
        else:
            pending.resolve(None)
        return pending
