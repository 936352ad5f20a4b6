"""Sends the outcomes of jobs to the engine. Jobs that end at about the same time share one request.

While one request is in flight, further outcomes collect. Many short jobs therefore cost few requests and few
syncs. If the engine does not reply, the request is retried. If a lease expired in the meantime, that is
logged, and the job is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from ringlog import logs
from ringlog.aio.job import Job
from ringlog.aio.queue import Queue
from ringlog.client.requests.results import Settled
from ringlog.errors import InvalidRequest, LeaseLost, RinglogError
from ringlog.limits import JOBS_PER_REQUEST_MAX
from ringlog.worker.settlement import CUT_OFF, DONE, FAILED, JobSettlement, WorkerBackoff

log: logging.Logger = logging.getLogger("ringlog.worker")

RETRY_S = 0.25
"""Pause (s) before a request is retried after a retriable error."""
LOST = "lease lost"
"""Log event of a job whose lease ended before its outcome arrived. It is or was delivered again."""
_LEVELS = {DONE: logging.INFO, CUT_OFF: logging.INFO}

SettledJob = tuple[Job, JobSettlement, int]
"""A job, its settlement, and the pid of the process that ran it."""


class Settler:
    """Runs as a task until it is abandoned. `counts` has the number of jobs by log event."""

    def __init__(self, queue: Queue, backoff: WorkerBackoff, on_confirmed: Callable[[], None]) -> None:
        """Start the task. It calls `on_confirmed` whenever `unsettled` has decreased."""
        self._queue = queue
        self._backoff = backoff
        self._on_confirmed = on_confirmed
        self._unsent: list[SettledJob] = []
        self._changed = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self.unsettled: int = 0
        """Jobs with an outcome that the engine has not confirmed yet."""
        self.counts: Counter[str] = Counter()
        self.task: asyncio.Task[None] = asyncio.create_task(self._run())
        """Ends on cancellation, or with an error of the engine that is not retriable."""

    def settle(self, job: Job, settlement: JobSettlement, pid: int) -> None:
        """Queue the outcome of a job. It is sent soon."""
        self._unsent.append((job, settlement, pid))
        self.unsettled += 1
        self._all_settled.clear()
        self._changed.set()

    async def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the engine confirmed all outcomes. Returns False on a timeout or after an error."""
        if self.task.done():
            return not self.unsettled
        try:
            await asyncio.wait_for(self._all_settled.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def abandon(self) -> None:
        """Stop sending. Leases of jobs without a sent outcome expire."""
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def _run(self) -> None:
        while True:
            if not self._unsent:
                self._changed.clear()
                await self._changed.wait()
                continue
            part, self._unsent = self._unsent[:JOBS_PER_REQUEST_MAX], self._unsent[JOBS_PER_REQUEST_MAX:]
            await self._send_settlements(part)
            self.unsettled -= len(part)
            self._on_confirmed()
            if not self.unsettled:
                self._all_settled.set()

    async def _send_settlements(self, settled_jobs: list[SettledJob]) -> None:
        queue = self._queue
        done = [settled_job for settled_job in settled_jobs if settled_job[1].is_done]
        await self._settle_batch(done, queue.ack)
        not_begun = [settled_job for settled_job in settled_jobs if not settled_job[1].is_begun]
        await self._settle_batch(not_begun, queue.release)
        back: dict[tuple[int, str], list[SettledJob]] = {}
        for settled_job in settled_jobs:
            if settled_job[1].is_rejected:
                await self._reject(settled_job)
            elif settled_job[1].is_begun and not settled_job[1].is_done:
                key = (settled_job[1].delay_ms, _failure_of(settled_job[1]))
                back.setdefault(key, []).append(settled_job)
        for (delay_ms, reason), given in back.items():
            await self._settle_batch(given, partial(queue.nack, delay_ms=delay_ms, reason=reason))

    async def _settle_batch(
        self, settled_jobs: list[SettledJob], send: Callable[[list[Job]], Awaitable[Settled]]
    ) -> None:
        if not settled_jobs:
            return
        settled = await self._retry_until_answered(lambda: send([job for job, _, _ in settled_jobs]))
        skipped = set(settled.skipped)
        for job, settlement, pid in settled_jobs:
            self._log_settled(job, settlement, pid, is_late=job.seq in skipped)

    async def _reject(self, settled_job: SettledJob) -> None:
        job, settlement, pid = settled_job
        try:
            await self._retry_until_answered(lambda: self._queue.reject(job, settlement.reason))
        except LeaseLost:
            self._log_settled(job, settlement, pid, is_late=True)
        except InvalidRequest:
            # The queue has no dead-letter topic. The job is kept: it is retried after the longest backoff.
            logs.log_event(
                log,
                logging.ERROR,
                "queue has no dead-letter topic, job is retried",
                queue=job.topic,
                seq=job.seq,
            )
            settlement = JobSettlement(
                FAILED, delay_ms=self._backoff.most_ms, reason=settlement.reason, ran_ms=settlement.ran_ms
            )
            nack = partial(self._queue.nack, delay_ms=settlement.delay_ms, reason=settlement.reason)
            await self._settle_batch([(job, settlement, pid)], nack)
        else:
            self._log_settled(job, settlement, pid, is_late=False)

    async def _retry_until_answered(self, ask: Callable[[], Awaitable[Settled | None]]) -> Settled:
        """Repeat a request until the engine replies. A successful `reject` returns no result."""
        while True:
            try:
                return await ask() or Settled(1, ())
            except RinglogError as e:
                if not e.retriable:
                    raise
                logs.log_event(log, logging.WARNING, "engine did not reply", error=str(e))
            await asyncio.sleep(RETRY_S)

    def _log_settled(self, job: Job, settlement: JobSettlement, pid: int, *, is_late: bool) -> None:
        event = LOST if is_late else settlement.event
        self.counts[event] += 1
        facts = {
            "queue": job.topic, "seq": job.seq, "deliveries": job.deliveries,
            "ran_ms": round(settlement.ran_ms, 1), "process": pid,
        }  # fmt: skip
        if settlement.reason:
            facts["reason"] = settlement.reason
        if event == FAILED:
            facts["again_in_ms"] = settlement.delay_ms
        if is_late:
            facts["was"] = settlement.event
        if settlement.trace and log.isEnabledFor(logging.DEBUG):
            facts["job_traceback"] = settlement.trace
        logs.log_event(log, _LEVELS.get(event, logging.ERROR), event, **facts)


def _failure_of(settlement: JobSettlement) -> str:
    """Return the reason for a dead letter; empty for a job that was only interrupted."""
    return settlement.reason if settlement.event == FAILED else ""
