"""BatchIteration: one loop over the jobs of a queue or group in batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ringlog.aio.claims import JobClaims
from ringlog.aio.job import Job
from ringlog.aio.job_iteration import ClaimIteration
from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.claim_batches import ClaimBatches
from ringlog.client.leases.claim_result import ClaimResult, Jobs, mark_lost
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.leases.queue_options import GIVE_BACK_S
from ringlog.errors import RinglogError
from ringlog.link.futures import run_steps
from ringlog.payload import V

if TYPE_CHECKING:
    from ringlog.aio.lease_client import LeaseClient
    from ringlog.aio.shell import LoopShell
    from ringlog.client.connection.session import Session


class BatchIteration(ClaimIteration[V]):
    """Iteration over batches of up to `size` jobs, with claims of up to `most` jobs."""

    def __init__(
        self, claims: JobClaims[V], queue: LeaseClient[V], shell: LoopShell, operations: LeaseOperations,
        size: int, most: int, lease_ms: int | None, auto_extend: bool, idle_s: float | None,
    ) -> None:  # fmt: skip
        super().__init__(claims, queue, shell, operations, lease_ms, auto_extend, idle_s)
        self._size, self._most = size, most
        self._batches: ClaimBatches | None = None

    async def run(self) -> AsyncIterator[Jobs[Job[V]]]:
        """Yield batches until the iteration ends."""
        ack_pipeline = self._ack_pipeline = AckPipeline(self._operations, self._shell.session)
        batches = self._batches = ClaimBatches(self._size, ack_pipeline)
        self._begin()
        try:
            while self._is_open:
                jobs = await self._next_claim()
                if jobs is not None and not jobs and self._idle_s is not None:
                    return
                if not jobs:
                    continue
                with self._shell.checked_lock, self._shell.guarded_session as session:
                    extender = self._claims.lease_extender(session) if self._auto_extend else None
                    batches.add_claim(jobs.claimed, extender)
                    part = self._next_batch(batches, session)
                while part is not None:
                    yield self._claims.jobs_of(self._queue, part)
                    if self._is_in_child:
                        return
                    with self._shell.checked_lock, self._shell.guarded_session as session:
                        batches.finish_batch()
                        part = self._next_batch(batches, session)
                    if (error := ack_pipeline.take_error()) is not None:
                        raise error
        except RinglogError:
            if not self._shell.is_closed:
                # The request failed because the client was closed; the iteration then ends without an error.
                raise
        finally:
            try:
                if not self._is_in_child:
                    await self._give_back(GIVE_BACK_S, is_left=True)
                await self.wait_acks(None)
            finally:
                self._claims.iterations.remove(self)

    def _next_batch(self, batches: ClaimBatches, session: Session) -> ClaimResult | None:
        """Return the next batch; None if all are finished, or the queue was closed. Call with the client's
        lock held: `close` returns every batch to the queue that was not started before."""
        return batches.next_batch(session.clock.monotonic_ns()) if self._is_open else None

    async def _next_claim(self) -> Jobs[Job[V]] | None:
        """Claim the next jobs; None, after a pause, if the engine could not answer."""
        try:
            jobs = await self._claims.claim(
                self._queue, self._most, self._wait_s, self._lease_ms, False, ClaimHandle(),
                close_count=self._close_count,
            )  # fmt: skip
            self._claims.note_answer()
            return jobs
        except RinglogError as e:
            await self._claims.pause_after(e)
            return None

    async def release(self, timeout: float) -> None:
        """Return the jobs of unstarted batches to the queue. If the engine is down, their leases expire."""
        await self._give_back(timeout, is_left=False)

    async def _give_back(self, timeout: float, *, is_left: bool) -> None:
        """Return the jobs of unstarted batches and, with `is_left`, those of the batch that the program left
        unfinished."""
        batches = self._batches
        if batches is None or self._shell.is_closed:
            return
        with self._shell.checked_lock, self._shell.guarded_session as session:
            started, unstarted = batches.take_unsettled(is_left=is_left)
            self._returning += [run_steps(self._operations.nack(session, leases, 0)) for leases in started]
            self._returning += [run_steps(self._operations.release(session, leases)) for leases in unstarted]
        await self._wait_returned(timeout)
        for leases in started + unstarted:
            mark_lost(leases)
