"""Claim, extend and settle jobs: the base of a queue's worker and of a consumer group's member."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self

from ringlog.aio.batch_iteration import BatchIteration
from ringlog.aio.claims import JobClaims
from ringlog.aio.job import Job
from ringlog.aio.job_iteration import JobIteration
from ringlog.aio.shell import UNKNOWN_OUTCOME
from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.claim_result import ClaimResult, Jobs, Leases, mark_lost, unsplit_claim_of
from ringlog.client.leases.job_facts import (
    InFlightLimit,
    OnError,
    backoff_ms,
    check_job,
    check_jobs,
    check_on_error,
    check_reason,
)
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations, NackOptions
from ringlog.client.leases.queue_options import (
    GIVE_BACK_S,
    begin_move,
    check_batches,
    check_claim,
    check_claim_lease,
    check_iteration,
    check_lease,
    check_nack_options,
    is_seq_order,
    lease_lost_before_claim,
    release_settled_slots,
    release_slots,
)
from ringlog.client.leases.redrive import Redrive, RedriveFilter, RedriveReport
from ringlog.client.read.pages import Record, Tombstone
from ringlog.client.requests.results import Settled
from ringlog.client.requests.validation import (
    check_bool,
    check_call_setting,
    check_close_timeout,
    check_payload_codec,
    check_seqs,
    check_timeout,
)
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.link.futures import run_steps
from ringlog.payload import RAW, PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.aio.operations import Operations
    from ringlog.aio.shell import LoopShell

log: logging.Logger = logging.getLogger(__name__)


class LeaseClient(Generic[V]):
    """Operations that a queue's worker and a consumer group's member share.

    The jobs of a group are records of its topic. An ack of a group deletes no record.
    """

    def __init__(
        self,
        client: Operations,
        shell: LoopShell,
        operations: LeaseOperations,
        payload: PayloadCodec[Any] = RAW,
    ) -> None:
        self._client, self._shell = client, shell
        self._operations = operations
        self._codec: PayloadCodec[V] = check_payload_codec(payload)
        self._claims: JobClaims[V] = JobClaims(client, shell, operations, self._codec)

    @property
    def topic(self) -> str:
        """Name of the topic."""
        return self._operations.topic

    @property
    def node(self) -> str:
        """Name of the worker, under which the engine records its leases."""
        return self._operations.node

    # -- claiming -------------------------------------------------------------------------------------

    async def claim(
        self, max: int = 1, *, wait_ms: int = 0, lease_ms: int | None = None, auto_extend: bool = False,
        order: str = "priority", done: Iterable[Job[V]] = (),
    ) -> Jobs[Job[V]]:  # fmt: skip
        """Lease up to `max` ready jobs: returned jobs first, then the lowest seqs.

        If the topic has `record_priority`, jobs of higher priority come first, unless `order` is "seq".

        Jobs in `done` are acked first, and the ack is complete when the call returns. Where possible, one
        request does both, in half the time of an ack and a claim. This requires an engine on this host. A
        queue must have neither priorities nor durable leases, and a group must have no tag filter.

        Args:
            max: Most jobs to lease, 1 to 1,000.
            wait_ms: Longest time to wait for a ready job, in milliseconds.
            lease_ms: Length of the leases in milliseconds, 100 to 86,400,000. None uses the topic's
                `lease_ms`.
            auto_extend: Extend the leases in the background until the jobs are settled or this process exits.
            order: "priority", or "seq" for the lowest seqs whatever their priority.
            done: Jobs to ack first.

        Returns:
            The leased jobs. The sequence is empty if no job was ready within `wait_ms`.

        Raises:
            LeaseLost: A lease of a job in `done` had ended. No job was claimed.
            TopicNotFound: The topic does not exist.
            NotAQueue: The topic is not of type `queue`.
        """
        max, wait_ms, lease_ms = check_claim(max, wait_ms, lease_ms)
        auto_extend, done = check_bool(auto_extend, "auto_extend"), check_jobs(done, "done")
        handle = ClaimHandle(by_number=is_seq_order(order))
        if done:
            jobs = await self._claim_after(done, max, lease_ms, auto_extend, handle)
            if jobs or (jobs is not None and not wait_ms):
                return jobs
        return await self._claims.claim(self, max, wait_ms / 1_000, lease_ms, auto_extend, handle)

    async def _claim_after(
        self, done: Iterable[Job[V]], most: int, lease_ms: int | None, auto_extend: bool, handle: ClaimHandle
    ) -> Jobs[Job[V]] | None:
        """Ack `done` and claim other jobs in one request. None: that was not possible, and `done` was acked
        on its own.

        Raises LeaseLost.
        """
        whole_claim = unsplit_claim_of(done)
        jobs = [] if whole_claim is not None else list(done)
        leases: Leases = whole_claim if whole_claim is not None else [job.lease for job in jobs]
        try:
            steps = self._operations.ack_and_claim(self._client.connection, leases, most, lease_ms, handle)
            claimed = await self._claims.claimed(self, steps, auto_extend, handle) if len(leases) else None
        except UNKNOWN_OUTCOME:
            with self._shell.lock:
                mark_lost(leases)
            raise
        finally:
            # Also if the claimed jobs cannot be read: `done` is settled at this point.
            if jobs:
                with self._shell.lock:
                    release_settled_slots(jobs)
        if claimed is not None:
            return claimed
        settled = await self.ack(jobs if whole_claim is None else done)
        if not settled.is_complete:
            raise lease_lost_before_claim(self.topic, settled)
        return None

    def jobs(
        self, *, max_in_flight: int = 1, lease_ms: int | None = None, auto_extend: bool = True,
        pipelined_acks: bool = False, on_error: OnError | None = None, idle_s: float | None = None,
    ) -> AsyncIterator[Job[V]]:  # fmt: skip
        """Iterate over jobs one at a time. The iteration waits for jobs and ends when the queue or the client
        is closed.

        At most `max_in_flight` jobs are claimed and not settled. At the limit the iterator waits until one is
        acked, nacked, or its lease is lost. Leaving the loop returns unstarted jobs to the queue at once.

        If a `with job:` block raises, the job is nacked and the loop ends, unless `on_error` is set.
        KeyboardInterrupt and similar exceptions always end the loop.

        With `pipelined_acks` the end of a `with job:` block does not wait for the ack:

        - With one job in flight, the ack is sent with the claim of the next job. The iterator returns that
          job after the ack is complete. This doubles the rate.
        - With several jobs in flight, acks are sent as blocks end. For small jobs this is many times faster.
        - A lease that had ended is logged and sets `job.lost`, instead of raising LeaseLost. The error of an
          ack is raised with the next job. Leaving the loop waits for all acks.

        Args:
            max_in_flight: Most unsettled jobs of this iteration, 1 to 1,000.
            lease_ms: Length of the leases in milliseconds. None uses the topic's `lease_ms`.
            auto_extend: Extend the leases in the background until the jobs are settled.
            pipelined_acks: Do not wait for acks at the end of `with job:` blocks.
            on_error: A function of (job, error), or "log". Receives failed jobs and failed acks, and the loop
                continues.
            idle_s: End the iteration after this time without a job, in seconds. None waits without a limit.

        Returns:
            Iterator over jobs.

        Example:
            async for job in queue.jobs(max_in_flight=8, on_error="log"):
                async with job:
                    handle(job.json())
        """
        slots = InFlightLimit(check_iteration(max_in_flight))
        iteration = JobIteration(
            self._claims, self, self._shell, self._operations, slots, check_claim_lease(lease_ms),
            check_bool(auto_extend, "auto_extend"), check_bool(pipelined_acks, "pipelined_acks"),
            check_on_error(on_error), check_timeout(idle_s, "idle_s"),
        )  # fmt: skip
        return iteration.run()

    def batches(
        self, size: int = 100, *, max_in_flight: int | None = None, lease_ms: int | None = None,
        auto_extend: bool = True, idle_s: float | None = None,
    ) -> AsyncIterator[Jobs[Job[V]]]:  # fmt: skip
        """Iterate over batches of up to `size` jobs. The iteration waits for jobs and ends as `jobs` does.

        The next claim acks the jobs of earlier batches that were not settled one by one. Both requests are
        sent together, and the program does not wait for the acks. If a claim covers several batches, finished
        batches are acked after 10 ms even if others are not finished.

        Leaving the loop inside a batch returns its unsettled jobs and all unstarted jobs to the queue, and
        waits for the other acks. Lost leases and errors are reported as with `jobs(pipelined_acks=True)`.

        Args:
            size: Most jobs of one batch, 1 to 1,000.
            max_in_flight: Most jobs of one claim, from `size` to 1,000. None means `size`. For small jobs,
                several batches per claim are faster.
            lease_ms: Length of the leases in milliseconds. None uses the topic's `lease_ms`.
            auto_extend: Extend the leases in the background until the jobs are settled.
            idle_s: End the iteration after this time without a job, in seconds. None waits without a limit.

        Returns:
            Iterator over lists of jobs.

        Example:
            async for batch in queue.batches(size=100):
                store(batch.payloads())
        """
        size, most = check_batches(size, max_in_flight)
        iteration = BatchIteration(
            self._claims, self, self._shell, self._operations, size, most, check_claim_lease(lease_ms),
            check_bool(auto_extend, "auto_extend"), check_timeout(idle_s, "idle_s"),
        )  # fmt: skip
        return iteration.run()

    def pipeline_ack(self, job: Job[V], ack_pipeline: AckPipeline) -> None:
        """Ack a job through the pipeline of its iteration, at the end of its block."""
        with self._shell.checked_lock, self._shell.guarded_session:
            ack_pipeline.add_job(job)

    # -- settling -------------------------------------------------------------------------------------

    async def ack(self, jobs: Iterable[Job[V]]) -> Settled:
        """Acknowledge jobs. A request of up to 1,000 acks is one record in the log.

        A retry after an error is harmless. If the engine does not answer, the leases are no longer extended.

        Args:
            jobs: Jobs of this queue or group; a whole claim is settled fastest.

        Returns:
            The number of acked jobs, and in `skipped` the seqs of jobs whose leases had ended.
        """
        return await self._settle(jobs, None)

    async def nack(self, jobs: Iterable[Job[V]], *, delay_ms: int | None = None, reason: str = "") -> Settled:
        """Return jobs to the queue.

        Args:
            jobs: Jobs of this queue or group.
            delay_ms: Delay until the jobs are ready, in milliseconds, at most one day. None uses `backoff_ms`
                of the topic or group, which is 0 by default.
            reason: Marks the jobs as failed. Dead letters record its first line, the time and the number of
                failures.

        Returns:
            The number of returned jobs, and in `skipped` the seqs of jobs whose leases had ended.
        """
        return await self._settle(jobs, check_nack_options(delay_ms, reason))

    async def release(self, jobs: Iterable[Job[V]]) -> Settled:
        """Return jobs that were not begun to the queue. They are ready at once, and this delivery does not
        count.

        Args:
            jobs: Jobs of this queue or group.

        Returns:
            The number of returned jobs, and in `skipped` the seqs of jobs whose leases had ended.
        """
        jobs = list(check_jobs(jobs))
        steps = self._operations.release(self._client.connection, [job.lease for job in jobs])
        return await self._shell.run_then(steps, partial(release_slots, jobs))

    async def nack_with_backoff(self, job: Job[V], reason: str) -> None:
        """Nack a job whose block failed, with the backoff of the topic, or of `backoff_ms` if the topic has
        none."""
        await self._settle([job], NackOptions(backoff_ms(job.deliveries), reason, True))

    async def reject(self, job: Job[V], reason: str = "") -> None:
        """Move a job to the dead-letter topic at once, regardless of its number of deliveries.

        Args:
            job: Job of this queue or group.
            reason: Why the job was rejected. The dead letter records its first line.

        Raises:
            InvalidRequest: The queue or group has no dead-letter topic.
            LeaseLost: The lease had ended.
        """
        steps = self._operations.reject(self._client.connection, [check_job(job).lease], check_reason(reason))
        settled = await self._shell.run_then(steps, partial(release_slots, [job]))
        if not settled.is_complete:
            raise job.lease_lost_error()

    async def _settle(self, jobs: Iterable[Job[V]], nack_options: NackOptions | None) -> Settled:
        connection, operations = self._client.connection, self._operations
        whole_claim = unsplit_claim_of(jobs)
        if whole_claim is not None:
            return await self._settle_whole_claim(whole_claim, nack_options)
        jobs = list(check_jobs(jobs))
        leases = [job.lease for job in jobs]
        if nack_options is None:
            return await self._shell.run_then(
                operations.ack(connection, leases), partial(release_slots, jobs)
            )
        return await self._shell.run_then(
            operations.nack(connection, leases, *nack_options), partial(release_slots, jobs)
        )

    async def _settle_whole_claim(self, claimed: ClaimResult, nack_options: NackOptions | None) -> Settled:
        connection, operations = self._client.connection, self._operations
        try:
            if nack_options is None:
                return await self._shell.run(operations.ack(connection, claimed))
            return await self._shell.run(operations.nack(connection, claimed, *nack_options))
        except RinglogError:
            claimed.mark_lost()
            raise

    async def extend(self, jobs: Iterable[Job[V]], lease_ms: int) -> Settled:
        """Set the leases to end `lease_ms` milliseconds from now, which may be earlier than before.

        Args:
            jobs: Jobs of this queue or group.
            lease_ms: New length in milliseconds, 100 to 86,400,000.

        Returns:
            The number of extended leases, and in `skipped` the seqs of jobs whose leases had ended.
        """
        lease_ms = check_lease(lease_ms)
        leases = [job.lease for job in check_jobs(jobs)]
        return await self._shell.run(self._operations.extend(self._client.connection, leases, lease_ms))

    async def steal(
        self, seqs: Iterable[int], *, min_idle_ms: int = 0, lease_ms: int | None = None,
        auto_extend: bool = False,
    ) -> Jobs[Job[V]]:  # fmt: skip
        """Lease delivered jobs that other workers hold. Their leases end, and the workers' next request
        fails.

        Args:
            seqs: Seqs of the jobs. Jobs that were never delivered are omitted.
            min_idle_ms: Only jobs whose last delivery or lease extension is at least this old, in
                milliseconds.
            lease_ms: Length of the leases in milliseconds. None uses the topic's `lease_ms`.
            auto_extend: Extend the leases in the background until the jobs are settled.

        Returns:
            The leased jobs.
        """
        seqs, lease_ms = check_seqs(seqs), check_claim_lease(lease_ms)
        min_idle_ms, auto_extend = (
            check_call_setting(min_idle_ms, "min_idle_ms"),
            check_bool(auto_extend, "auto_extend"),
        )
        handle = ClaimHandle()
        steps = self._operations.steal(self._client.connection, seqs, min_idle_ms, lease_ms, handle)
        jobs = await self._claims.claimed(self, steps, auto_extend, handle)
        assert jobs is not None
        return jobs

    # -- dead letters ---------------------------------------------------------------------------------

    def dead_letters(self) -> AsyncIterator[Record | Tombstone]:
        """Iterate over the dead letters of this queue or group, oldest first, up to the current head of the
        dead-letter topic.

        A tombstone reports letters that the dead-letter topic lost. Raises InvalidRequest if the queue or
        group has no dead-letter topic.
        """
        return self._iterate_dead_letters(
            self._shell.begin(lambda: self._operations.dead_letter(self._client.connection))
        )

    async def _iterate_dead_letters(self, started: Any) -> AsyncIterator[Record | Tombstone]:
        name: str = await self._shell.finish(started)
        with suppress(TopicNotFound):
            async with self._client.reader(name) as reader:
                async for item in reader:
                    if self._operations.is_own_dead_letter(item):
                        yield item

    async def redrive(
        self, where: RedriveFilter = None, *, limit: int | None = None, rate: float | None = None
    ) -> RedriveReport:
        """Move dead letters back to their queue, or have the group deliver their records again, and delete
        the letters.

        A retry after an error or a crash is safe. No letter is lost. None returns twice as long as the shard
        remembers the producer of the copies.

        Args:
            where: A function of a record, or a collection of seqs in the dead-letter topic. None selects all
                letters.
            limit: Most letters to move, oldest first. None sets no limit.
            rate: Most letters per second. None sets no limit.

        Returns:
            Counts of moved letters. `gone` counts letters of a group that stay because their records left the
                topic.

        Raises:
            InvalidRequest: The queue or group has no dead-letter topic.
            Refused: The append of a copy was refused. Letters that were moved before stay moved.
        """
        plan = Redrive(self._operations, where, limit, rate)
        name = await self._shell.ask(lambda session: run_steps(plan.begin(session)))
        if name is not None:
            async with self._client.reader(name) as reader:
                async for page in reader.pages():
                    for part in plan.select_parts(page.records):
                        await self._shell.ask(partial(begin_move, plan, part))
                    if plan.is_done:
                        break
        return plan.report()

    async def close(self, timeout: float = GIVE_BACK_S) -> None:
        """End all iterations, return unstarted jobs, then release the files. Closing the client does this,
        too.

        Args:
            timeout: Longest time to wait for each step, in seconds.
        """
        timeout = check_close_timeout(timeout)
        await self._claims.close(timeout)
        self._operations.close()

    def restart_in_child(self) -> None:
        """Reset after a fork: leases belong to the parent, and the child neither extends nor returns them."""
        self._claims.restart_in_child()
        self._operations.close_files()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
