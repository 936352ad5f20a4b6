# Generated from ringlog/aio/job_iteration.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""JobIteration: one loop over the jobs of a queue or group."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic

from ringlog.client.claims import JobClaims
from ringlog.client.job import Job
from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.claim_result import Jobs
from ringlog.client.leases.job_facts import BACKOFF_MS_MAX, InFlightLimit, OnError, fork_count
from ringlog.client.leases.job_payloads import decode_failure
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.leases.queue_options import GIVE_BACK_S
from ringlog.errors import InvalidRequest, LeaseLost, RinglogError
from ringlog.link.futures import Pending, run_steps
from ringlog.payload import RAW, V

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.lease_client import LeaseClient

log: logging.Logger = logging.getLogger(__name__)


class ClaimIteration(Generic[V]):
    """What iterations over jobs and over batches have in common."""

    def __init__(
        self, claims: JobClaims[V], queue: LeaseClient[V], shell: ThreadedShell, operations: LeaseOperations,
        lease_ms: int | None, auto_extend: bool, idle_s: float | None,
    ) -> None:  # fmt: skip
        """Create an iteration, which begins with its first step. The arguments are those of
        LeaseClient.jobs."""
        self._claims, self._queue = claims, queue
        self._shell, self._operations = shell, operations
        self._lease_ms, self._auto_extend, self._idle_s = lease_ms, auto_extend, idle_s
        self._wait_s = inf if idle_s is None else idle_s
        self._ack_pipeline: AckPipeline | None = None
        self._returning: list[Pending[Any]] = []
        """Requests that return jobs to the queue. `close` also waits for those of a loop that ends by
        itself."""
        self._close_count = self._forks_at_start = 0

    def _begin(self) -> None:
        self._claims.iterations.append(self)
        self._close_count, self._forks_at_start = self._claims.close_count, fork_count()

    @property
    def _is_open(self) -> bool:
        """False after `close` of the queue or the client."""
        return not self._shell.is_closed and self._close_count == self._claims.close_count

    @property
    def _is_in_child(self) -> bool:
        """True in a process that was forked during the iteration: the jobs belong to the parent."""
        return self._forks_at_start != fork_count()

    def wake(self) -> None:
        """Wake up the iteration, if it waits for room. Call with the client's lock held."""

    def release(self, timeout: float) -> None:
        """Return unstarted jobs to the queue. If the engine is down, their leases expire."""
        raise NotImplementedError

    def _wait_returned(self, timeout: float) -> None:
        """Wait until the engine answered each request that returns jobs, or `timeout` seconds passed."""
        for each in list(self._returning):
            self._shell.wait(each, timeout)

    def wait_acks(self, timeout: float | None) -> None:
        """Wait until the engine answered every ack. Each request fails by itself at its own timeout."""
        ack_pipeline = self._ack_pipeline
        if ack_pipeline is None or self._shell.is_closed:
            return
        with self._shell.checked_lock, self._shell.guarded_session:
            wait_answered = ack_pipeline.wait_answered()
        self._shell.wait(wait_answered, timeout)
        if (error := ack_pipeline.take_error()) is not None:
            log.error("acks failed, jobs of %s are delivered again: %s", self._queue.topic, error)

    def reset_in_child(self) -> None:
        """Reset after a fork: the jobs and acks belong to the parent."""
        if self._ack_pipeline is not None:
            self._ack_pipeline.reset_in_child()


class JobIteration(ClaimIteration[V]):
    """Iteration over jobs, of which at most `slots.limit` are in flight."""

    def __init__(
        self, claims: JobClaims[V], queue: LeaseClient[V], shell: ThreadedShell, operations: LeaseOperations,
        slots: InFlightLimit, lease_ms: int | None, auto_extend: bool, pipelined_acks: bool,
        on_error: OnError | None, idle_s: float | None,
    ) -> None:  # fmt: skip
        super().__init__(claims, queue, shell, operations, lease_ms, auto_extend, idle_s)
        self._slots, self._pipelined_acks, self._on_error = slots, pipelined_acks, on_error
        self._unstarted: deque[Job[V]] = deque()
        """Claimed jobs that the iteration has not yet returned."""

    def run(self) -> Iterator[Job[V]]:
        """Yield jobs until the iteration ends."""
        ack_pipeline, unstarted, on_error = self._new_pipeline(), self._unstarted, self._on_error
        self._begin()
        try:
            while self._is_open:
                if not unstarted:
                    is_idle = self._claim_next_with_retry()
                    if is_idle and self._idle_s is not None:
                        return
                while unstarted:
                    job = unstarted[0]  # The job counts as unstarted until it is returned.
                    is_good = not job.lease.is_lost and self._is_readable(job)
                    try:
                        unstarted.popleft()
                    except IndexError:
                        break  # `close` in another thread has returned the jobs.
                    if is_good:
                        job._ack_pipeline, job._on_error = ack_pipeline, on_error
                        yield job
                        if ack_pipeline is not None and (error := ack_pipeline.take_error()) is not None:
                            if on_error is None:
                                raise error
                            log.error(
                                "acks failed, jobs of %s are delivered again: %s", self._queue.topic, error
                            )
        except RinglogError:
            if not self._shell.is_closed:
                # The request failed because the client was closed; the iteration then ends without an error.
                raise
        finally:
            try:
                if not self._is_in_child:
                    self.release(GIVE_BACK_S)
                self.wait_acks(None)
            finally:
                self._claims.iterations.remove(self)

    def _new_pipeline(self) -> AckPipeline | None:
        if self._pipelined_acks:
            self._ack_pipeline = AckPipeline(
                self._operations, self._shell.session, waits_for_claim=self._slots.limit == 1
            )
        return self._ack_pipeline

    def wake(self) -> None:
        """Wake up the iteration, if it waits for room. Call with the client's lock held."""
        self._slots.wake()

    def _is_readable(self, job: Job[V]) -> bool:
        """Return True if the payload can be decoded. Otherwise reject the job with the reason.

        A job that cannot be decoded will never succeed. Without a dead-letter topic it is nacked with the
        longest backoff.
        """
        reason = None if self._claims.codec is RAW else decode_failure(job)
        if reason is None:
            return True
        log.error("undecodable job %d of %s: %s", job.seq, self._queue.topic, reason)
        try:
            self._queue.reject(job, reason)
        except InvalidRequest:
            with suppress(RinglogError):
                self._queue.nack([job], delay_ms=BACKOFF_MS_MAX, reason=reason)
        except RinglogError as e:
            if not (e.retriable or isinstance(e, LeaseLost)):
                raise
        return False

    def _claim_next_with_retry(self) -> bool:
        """Claim as `_claim_next` does. If the engine cannot answer at present, pause; the caller tries
        again."""
        try:
            is_idle = self._claim_next()
            self._claims.note_answer()
            return is_idle
        except RinglogError as e:
            self._claims.pause_after(e)
            return False

    def _claim_next(self) -> bool:
        """Wait for room below the limit, then claim as many jobs as fit. Returns True if no job was ready in
        `idle_s`."""
        jobs, slots, ack_pipeline = None, self._slots, self._ack_pipeline
        if ack_pipeline is not None and slots.limit == 1:
            jobs = self._ack_and_claim(ack_pipeline)
        if not jobs:
            with self._shell.checked_lock, self._shell.guarded_session:
                if self._close_count != self._claims.close_count:
                    return False  # `close` has woken all waits already, and would not wake this one.
                waits = [slots.wait_room()]
                if ack_pipeline is not None:
                    ack_pipeline.flush()  # Before the claim: the shard handles requests in this order.
                    if slots.limit == 1:
                        waits.append(ack_pipeline.wait_answered())
            for each in waits:
                self._shell.wait(each, None)
            if slots.in_flight >= slots.limit:
                return False  # The queue was closed.
            jobs = self._claims.claim(
                self._queue, slots.limit - slots.in_flight, self._wait_s, self._lease_ms, self._auto_extend,
                ClaimHandle(), slots, self._close_count,
            )  # fmt: skip
        self._unstarted += jobs
        return not jobs

    def _ack_and_claim(self, ack_pipeline: AckPipeline) -> Jobs[Job[V]] | None:
        """Ack finished jobs and claim the next job in one request. None if there is no ack, or both cannot be
        combined."""
        with self._shell.checked_lock, self._shell.guarded_session:
            leases = ack_pipeline.take_unsent()
        if not leases:
            return None
        handle = ClaimHandle()
        steps = self._operations.ack_and_claim(
            self._claims.client.connection, leases, 1, self._lease_ms, handle
        )
        return self._claims.claimed(
            self._queue,
            steps,
            self._auto_extend,
            handle,
            self._slots,
            partial(ack_pipeline.on_answered, leases),
        )

    def release(self, timeout: float) -> None:
        """Return unstarted jobs to the queue. If the engine is down, their leases expire."""
        left: list[Job[V]] = []
        with suppress(IndexError):  # `close` may take jobs at the same time, in another thread.
            while True:
                left.append(self._unstarted.popleft())
        leases = [job.lease for job in left if not job.lease.is_over]
        if self._shell.is_closed or not (leases or self._returning):
            return
        if leases:
            with self._shell.checked_lock, self._shell.guarded_session as session:
                self._returning.append(run_steps(self._operations.release(session, leases)))
        self._wait_returned(timeout)
        with self._shell.checked_lock, self._shell.guarded_session:
            for job in left:
                job.lease.mark_lost()

    def reset_in_child(self) -> None:
        """Reset after a fork: the jobs and acks belong to the parent."""
        self._unstarted.clear()
        super().reset_in_child()
