"""BatchIteration: one loop over the jobs of a queue or group in batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ringlog.aio.claims import JobClaims
from ringlog.aio.job import Job
from ringlog.aio.job_iteration import ClaimIteration
from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.claim_batches import ClaimBatches
from ringlog.client.leases.claim_result import Jobs, mark_lost
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.leases.queue_options import GIVE_BACK_S
from ringlog.errors import RinglogError
from ringlog.link.futures import run_steps
from ringlog.payload import V

if TYPE_CHECKING:
    from ringlog.aio.lease_client import LeaseClient
    from ringlog.aio.shell import LoopShell


class BatchIteration(ClaimIteration[V]):
    """Iteration over batches of up to `size` jobs, with claims of up to `most` jobs."""

    def __init__(
        self, claims: JobClaims[V], queue: LeaseClient[V], shell: LoopShell, operations: LeaseOperations,
        size: int, most: int, lease_ms: int | None, auto_extend: bool, idle_s: float | None,
    ) -> None:  # fmt: skip
        super().__init__(claims, queue, shell, operations, lease_ms, auto_extend, idle_s)
        self._size, self._most = size, most

    async def run(self) -> AsyncIterator[Jobs[Job[V]]]:
        """Yield batches until the iteration ends."""
        ack_pipeline = self._ack_pipeline = AckPipeline(self._operations, self._shell.session)
        batches = ClaimBatches(self._size, ack_pipeline)
        clock = self._shell.session.clock
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
                    part = batches.next_batch(clock.monotonic_ns())
                while part is not None:
                    yield self._claims.jobs_of(self._queue, part)
                    with self._shell.checked_lock, self._shell.guarded_session:
                        batches.finish_batch()
                        part = batches.next_batch(clock.monotonic_ns())
                    if (error := ack_pipeline.take_error()) is not None:
                        raise error
        except RinglogError:
            if not self._shell.is_closed:
                # The request failed because the client was closed; the iteration then ends without an error.
                raise
        finally:
            self._claims.iterations.remove(self)
            if not self._is_in_child:
                await self._release_batches(batches)
            await self.wait_acks(None)

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

    async def _release_batches(self, batches: ClaimBatches) -> None:
        if self._shell.is_closed:
            return
        with self._shell.checked_lock, self._shell.guarded_session as session:
            started, unstarted = batches.take_unsettled()
            releasing = [run_steps(self._operations.nack(session, leases, 0)) for leases in started]
            releasing += [run_steps(self._operations.release(session, leases)) for leases in unstarted]
        for each in releasing:
            await self._shell.wait(each, GIVE_BACK_S)
        for leases in started + unstarted:
            mark_lost(leases)
