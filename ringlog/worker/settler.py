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

log = logging.getLogger("ringlog.worker")

RETRY_S = 0.25
"""Pause (s) before a request is retried after a retriable error."""
LOST = "lease lost"
"""Log event of a job whose lease ended before its outcome arrived. It is or was delivered again."""
_LEVELS = {DONE: logging.INFO, CUT_OFF: logging.INFO}

End = tuple[Job, JobSettlement, int]
"""A job, its settlement, and the pid of the process that ran it."""


class Settler:
    """Runs as a task until it is abandoned. `counts` has the number of jobs by log event."""

    def __init__(self, queue: Queue, backoff: WorkerBackoff) -> None:
        self._queue = queue
        self._backoff = backoff
        self._ends: list[End] = []
        self._news = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self.unsettled = 0
        """Jobs with an outcome that the engine has not confirmed yet."""
        self.counts: Counter[str] = Counter()
        self.task = asyncio.create_task(self._run())
        """Ends on cancellation, or with an error of the engine that is not retriable."""

    def settle(self, job: Job, fate: JobSettlement, pid: int) -> None:
        """Queue the outcome of a job. It is sent soon."""
        self._ends.append((job, fate, pid))
        self.unsettled += 1
        self._all_settled.clear()
        self._news.set()

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
            if not self._ends:
                self._news.clear()
                await self._news.wait()
                continue
            part, self._ends = self._ends[:JOBS_PER_REQUEST_MAX], self._ends[JOBS_PER_REQUEST_MAX:]
            await self._send_settlements(part)
            self.unsettled -= len(part)
            if not self.unsettled:
                self._all_settled.set()

    async def _send_settlements(self, ends: list[End]) -> None:
        queue = self._queue
        done = [end for end in ends if end[1].is_done]
        await self._many(done, queue.ack)
        back: dict[tuple[int, str], list[End]] = {}
        for end in ends:
            if end[1].is_rejected:
                await self._reject(end)
            elif not end[1].is_done:
                back.setdefault((end[1].delay_ms, _failure_of(end[1])), []).append(end)
        for (delay_ms, reason), given in back.items():
            await self._many(given, partial(queue.nack, delay_ms=delay_ms, reason=reason))

    async def _many(self, ends: list[End], tell: Callable[[list[Job]], Awaitable[Settled]]) -> None:
        if not ends:
            return
        settled = await self._retry_until_answered(lambda: tell([job for job, _, _ in ends]))
        skipped = set(settled.skipped)
        for job, fate, pid in ends:
            self._note(job, fate, pid, is_late=job.seq in skipped)

    async def _reject(self, end: End) -> None:
        job, fate, pid = end
        try:
            await self._retry_until_answered(lambda: self._queue.reject(job, fate.reason))
        except LeaseLost:
            self._note(job, fate, pid, is_late=True)
        except InvalidRequest:
            # The queue has no dead-letter topic. The job is kept: it is retried after the longest backoff.
            logs.log_event(
                log,
                logging.ERROR,
                "queue has no dead-letter topic, job is retried",
                queue=job.topic,
                seq=job.seq,
            )
            fate = JobSettlement(
                FAILED, delay_ms=self._backoff.most_ms, reason=fate.reason, ran_ms=fate.ran_ms
            )
            nack = partial(self._queue.nack, delay_ms=fate.delay_ms, reason=fate.reason)
            await self._many([(job, fate, pid)], nack)
        else:
            self._note(job, fate, pid, is_late=False)

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

    def _note(self, job: Job, fate: JobSettlement, pid: int, *, is_late: bool) -> None:
        event = LOST if is_late else fate.event
        self.counts[event] += 1
        facts = {
            "queue": job.topic, "seq": job.seq, "deliveries": job.deliveries, "ran_ms": round(fate.ran_ms, 1),
            "process": pid,
        }  # fmt: skip
        if fate.reason:
            facts["reason"] = fate.reason
        if event == FAILED:
            facts["again_in_ms"] = fate.delay_ms
        if is_late:
            facts["was"] = fate.event
        if fate.trace and log.isEnabledFor(logging.DEBUG):
            facts["job_traceback"] = fate.trace
        logs.log_event(log, _LEVELS.get(event, logging.ERROR), event, **facts)


def _failure_of(fate: JobSettlement) -> str:
    """Return the reason for a dead letter; empty for a job that was only interrupted."""
    return fate.reason if fate.event == FAILED else ""
