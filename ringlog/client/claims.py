# Generated from ringlog/aio/claims.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""JobClaims: the claims and the open iterations of one worker, which end when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from ringlog.client.job import Job
from ringlog.client.leases.claim_result import ClaimResult, Jobs
from ringlog.client.leases.job_facts import InFlightLimit, MissingQueueRetry
from ringlog.client.leases.lease_extender import LeaseExtender
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.leases.queue_options import RETRY_S
from ringlog.client.requests.results import ClientState
from ringlog.errors import RinglogError
from ringlog.link.futures import Steps
from ringlog.payload import PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.job_iteration import ClaimIteration
    from ringlog.client.lease_client import LeaseClient
    from ringlog.client.operations import Operations


class JobClaims(Generic[V]):
    """Claims of one LeaseClient, and the extension of their leases.

    It does not refer to the LeaseClient, except while an iteration is open: a program that drops both it and
    its Client does not wait for the garbage collector.
    """

    def __init__(
        self, client: Operations, shell: ThreadedShell, operations: LeaseOperations, codec: PayloadCodec[V]
    ) -> None:
        self.client: Operations = client
        self._shell = shell
        self._operations = operations
        self.codec = codec
        self.close_count: int = 0
        """Number of calls of `close`. Iterations that began before a call end with it."""
        self.iterations: list[ClaimIteration[V]] = []
        """Open iterations over jobs and batches."""
        self._waiting: set[ClaimHandle] = set()
        self._missing_queue_retry = MissingQueueRetry()
        self._extender: LeaseExtender | None = None

    def claim(
        self, queue: LeaseClient[V], most: int, wait_s: float, lease_ms: int | None, auto_extend: bool,
        handle: ClaimHandle, slots: InFlightLimit | None = None, close_count: int | None = None,
    ) -> Jobs[Job[V]]:  # fmt: skip
        """Claim jobs. A claim of an iteration passes the `close_count` of its start, and claims nothing if
        `close` was called since."""
        steps = self._operations.claim(self.client.connection, most, wait_s, lease_ms, handle)
        try:
            with self._shell.checked_lock:
                # `close` cancels, under the same lock, only the claims that it finds here.
                self._waiting.add(handle)
                if close_count not in {None, self.close_count}:
                    handle.cancel()
            jobs = self.claimed(queue, steps, auto_extend, handle, slots)
        finally:
            self._waiting.discard(handle)
        assert jobs is not None
        return jobs

    def claimed(
        self, queue: LeaseClient[V], steps: Steps[ClaimResult | None], auto_extend: bool, handle: ClaimHandle,
        slots: InFlightLimit | None = None, then: Callable[[Any, BaseException | None], None] | None = None,
    ) -> Jobs[Job[V]] | None:  # fmt: skip
        """Wait for a claim, then extend its leases and count its jobs as in flight. None: it could not be
        combined with acks.

        `then` receives the result or the error of the claim, even if this call is interrupted.
        """
        try:
            claimed = self._shell.run(steps) if then is None else self._shell.run_then(steps, then)
            if claimed is None:
                return None
            jobs = self.jobs_of(queue, claimed)
            if len(jobs) and (auto_extend or slots is not None):
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    if auto_extend:
                        self.lease_extender(session).extend_until_settled(claimed.leases_to_extend())
                    if slots is not None:
                        slots.acquire_all(jobs)
        except Exception:
            raise
        except BaseException:
            self.cancel(handle)
            raise
        return jobs

    def cancel(self, handle: ClaimHandle) -> None:
        """Undo an interrupted claim: jobs that the engine leased to it return to the queue."""
        with suppress(RinglogError), self._shell.checked_lock, self._shell.guarded_session as session:
            session.track_claim_cancel(self._operations.cancel_claim(session, handle))

    def lease_extender(self, session: Session) -> LeaseExtender:
        """Return the extender of the leases of this worker."""
        if self._extender is None:
            self._extender = LeaseExtender(
                session, self._operations.topic, self._operations.node, self._operations.group
            )
        return self._extender

    def jobs_of(self, queue: LeaseClient[V], claimed: ClaimResult) -> Jobs[Job[V]]:
        """Return the jobs of a claim."""
        return Jobs(claimed, partial(Job, queue, codec=self.codec))

    def pause_after(self, error: RinglogError) -> None:
        """Sleep before a retry. Raises the error if a retry is of no use."""
        if self.client.state is ClientState.CLOSED or not self._missing_queue_retry.should_retry(error):
            raise error
        self._shell.pause(RETRY_S)

    def note_answer(self) -> None:
        """Note that the engine answered a claim of an iteration."""
        self._missing_queue_retry.reset()

    def close(self, timeout: float) -> None:
        """Cancel all claims, and end all iterations. Each step takes at most `timeout` seconds."""
        if self.iterations:
            self._shell.end_left_loops()
        with self._shell.lock:
            self.close_count += 1
            waiting = list(self._waiting)
        for handle in waiting:
            self.cancel(handle)
        with suppress(RinglogError), self._shell.checked_lock, self._shell.guarded_session:
            for each in list(self.iterations):
                each.wake()
        for each in list(self.iterations):
            each.release(timeout)
        for each in list(self.iterations):
            each.wait_acks(timeout)
        self._shell.wait_claims_cancelled(timeout)

    def restart_in_child(self) -> None:
        """Reset after a fork: leases belong to the parent, and the child neither extends nor returns them."""
        self._extender = None
        for each in self.iterations:
            each.reset_in_child()
