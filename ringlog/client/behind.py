"""Acks of an iteration that nobody waits for: sent as a block ends, while the loop goes on with the next job.

One request is on its way at a time, and what is settled meanwhile goes with the next: a loop over small jobs
acks many at once by itself, one over long jobs each at once. What is not answered is bounded by how many jobs
the iteration may have in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ringlog.client.claimed import Claimed
from ringlog.client.job import JobFacts
from ringlog.client.leases import Lease
from ringlog.client.results import Settled
from ringlog.errors import RinglogError
from ringlog.link.pending import Pending, Steps, start
from ringlog.link.timers import Timer

log = logging.getLogger(__name__)


class Acking(Protocol):
    """What acks need of a worker's view of a queue; see working.Working."""

    topic: str

    def ack(self, connection: Any, leases: Sequence[Lease] | Claimed) -> Steps[Settled]: ...


class Behind:
    """Acks of one iteration. With the client's lock held, or in its loop."""

    def __init__(self, working: Acking, connection: Any) -> None:
        self._working, self._connection = working, connection
        self._unsent: list[Lease] = []
        self._open = 0
        """Requests without an answer."""
        self._error: RinglogError | None = None
        self._waits: list[Pending[None]] = []

    def add(self, job: JobFacts) -> None:
        """Its holder is done with it. It makes room for another one at once: its ack is on its way before the
        next claim."""
        self._unsent.append(job.lease)
        job.leave()
        if not self._open:
            self.send()

    def send(self) -> None:
        """Send what was settled, whatever is on its way."""
        leases, self._unsent = self._unsent, []
        if leases:
            self._send(leases)

    def add_batch(self, claimed: Claimed, timer: Timer | None) -> None:
        """Its holder is done with all of a claim, which `timer` would have kept alive."""
        leases = claimed.unsettled()
        if len(leases):
            self._send(leases, timer)
        elif timer is not None:
            timer.cancel()

    def _send(self, leases: list[Lease] | Claimed, timer: Timer | None = None) -> None:
        def answered(done: Pending[Settled]) -> None:
            if timer is not None:
                timer.cancel()
            self._answered(done, leases)

        self._open += 1
        start(self._working.ack(self._connection, leases)).when_done(answered)

    def _answered(self, done: Pending[Settled], leases: list[Lease] | Claimed) -> None:
        self._open -= 1
        try:
            settled = done.take()
        except RinglogError as e:
            # Nobody knows what became of them. Kept alive, jobs that nobody works on would never come back.
            if isinstance(leases, Claimed):
                leases.lose()
            else:
                for lease in leases:
                    lease.lose()
            self._error = self._error or e
        else:
            if settled.skipped:
                log.warning(
                    "%d jobs of %s were done after their leases had ended, and may be done again: %s",
                    len(settled.skipped), self._working.topic, settled.skipped[:10],
                )  # fmt: skip
        if not self._open:
            self.send()
        if not self._open:
            waits, self._waits = self._waits, []
            for pending in waits:
                pending.resolve(None)

    def take_error(self) -> RinglogError | None:
        """Why acks failed that were sent since this was asked last."""
        error, self._error = self._error, None
        return error

    def forget(self) -> None:
        """After a fork: they are the parent's."""
        self._unsent, self._open, self._waits = [], 0, []

    def all_answered(self) -> Pending[None]:
        """Done when every ack has its answer; each fails by itself when its time is over."""
        self.send()
        pending: Pending[None] = Pending()
        if self._open:
            self._waits.append(pending)
        else:
            pending.resolve(None)
        return pending
