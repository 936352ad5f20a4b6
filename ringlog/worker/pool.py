"""The worker: claims jobs for its idle processes, and sends the engine the outcome of each job.

The worker is one loop in one process. It has the only connection to the engine, and its client extends the
leases of running jobs. Each lane has one process, gives it one job at a time, and replaces it when it ends.
The worker claims jobs only for idle lanes, so that no job waits at a busy worker while another one is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ringlog import logs
from ringlog.aio.job import Job
from ringlog.aio.queue import Queue
from ringlog.clock import Clock
from ringlog.errors import RinglogError
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    WORKER_CLAIM_MS,
    WORKER_CLOSE_S,
    WORKER_RESTART_MS_MAX,
    WORKER_RESTART_MS_MIN,
    WORKER_SETTLE_S,
    WORKER_UNSETTLED_MAX,
)
from ringlog.worker import wire
from ringlog.worker.job import CurrentJob
from ringlog.worker.options import WorkerOptions
from ringlog.worker.process import WorkerProcess
from ringlog.worker.process_exit import KillReason, ProcessExited
from ringlog.worker.settlement import NOT_BEGUN, settlement_of_exit, settlement_of_outcome
from ringlog.worker.settler import RETRY_S, Settler
from ringlog.worker.target import CannotImport

log: logging.Logger = logging.getLogger("ringlog.worker")


class Worker:
    """One run of a worker. `stop` and `stop_now` may be called at any time, on the event loop."""

    def __init__(self, queue: Queue, options: WorkerOptions, setup: wire.Setup, clock: Clock) -> None:
        self._queue, self._options, self._setup = queue, options, setup
        self._clock = clock
        self._free: deque[asyncio.Future[Job | None]] = deque()
        """One future for each idle lane. It resolves to the lane's next job."""
        self._changed = asyncio.Event()
        """Set when a lane becomes idle, a job ends, the engine confirms outcomes, or the worker stops."""
        self._settler = Settler(queue, options.backoff, self._changed.set)
        self._processes: set[WorkerProcess] = set()
        self._at_work = 0
        self._claiming: asyncio.Task[None] | None = None
        self._stop_requested = asyncio.Event()
        self._stop_now_requested = asyncio.Event()

    # -- control --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Claim no more jobs, wait for running jobs, then end `run`.

        A claim in flight is cancelled. The client returns jobs that the engine leased to it, and their
        deliveries do not count.
        """
        self._stop_requested.set()
        self._changed.set()
        if self._claiming is not None:
            self._claiming.cancel()

    def stop_now(self) -> None:
        """Stop without waiting for running jobs: their processes are killed and the jobs are returned."""
        self.stop()
        self._stop_now_requested.set()

    @property
    def job_counts(self) -> Mapping[str, int]:
        """Number of jobs by log event, for example `job done`."""
        return self._settler.counts

    # -- run ------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until a stop is requested. Returns whether every started job was settled.

        Raises CannotImport before any job is claimed, and every error of the engine that is not retriable.
        """
        lanes: list[asyncio.Task[None]] = []
        try:
            lanes += [asyncio.create_task(self._lane(each)) for each in await self._first_or_stopped()]
            self._claiming = asyncio.create_task(self._claim_all())
            logs.log_event(
                log, logging.INFO, "worker ready",
                queue=self._queue.topic, target=self._options.target, node=self._queue.node,
                processes=len(lanes),
            )  # fmt: skip
            try:
                await self._watch(self._claiming, lanes)
            finally:
                self.stop()
                is_complete = await self._finish(lanes)
            return is_complete
        finally:
            await self._abort(lanes)

    async def _watch(self, claiming: asyncio.Task[None], lanes: list[asyncio.Task[None]]) -> None:
        """Wait until a stop is requested. Raises the error of a part that failed."""
        stopping = asyncio.create_task(self._stop_requested.wait())
        parts: list[asyncio.Task[None]] = [claiming, *lanes, self._settler.task]
        await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        self.stop()
        stopping.cancel()
        await asyncio.wait((claiming,))
        for part in parts:
            if part.done() and not part.cancelled():
                part.result()

    async def _finish(self, lanes: list[asyncio.Task[None]]) -> bool:
        """Wait for running jobs up to `stop_timeout_s`, then for the engine's replies to their outcomes.

        `stop_now` shortens both.
        """
        while self._free:
            job_future = self._free.popleft()
            if not job_future.done():
                job_future.set_result(None)
        at_once = asyncio.create_task(self._stop_now_requested.wait())
        ends = asyncio.gather(*lanes, return_exceptions=True)
        both: tuple[asyncio.Future[Any], ...] = (at_once, ends)
        await asyncio.wait(both, timeout=self._options.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_complete = not self._at_work
        for process in self._processes:
            process.kill(KillReason.STOPPED)
        await ends
        settling = asyncio.create_task(self._settler.wait_settled(WORKER_SETTLE_S))
        await asyncio.wait((at_once, settling), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((settling,), timeout=WORKER_CLOSE_S)
        at_once.cancel()
        settling.cancel()
        if self._settler.unsettled:
            logs.log_event(
                log, logging.ERROR, "outcomes of jobs not confirmed before exit", jobs=self._settler.unsettled
            )
            is_complete = False
        return is_complete

    async def _abort(self, lanes: list[asyncio.Task[None]]) -> None:
        for lane in lanes:
            lane.cancel()
        for process in list(self._processes):
            process.kill(KillReason.STOPPED)
            await process.close()
        await self._settler.abandon()

    # -- processes ------------------------------------------------------------------------------------

    async def _first_or_stopped(self) -> list[WorkerProcess]:
        """Return the first processes; empty if a stop is requested before they are ready."""
        starting = asyncio.create_task(self._first_processes())
        stopping = asyncio.create_task(self._stop_requested.wait())
        both: tuple[asyncio.Task[Any], ...] = (starting, stopping)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.wait({starting})
        return []

    async def _first_processes(self) -> list[WorkerProcess]:
        """Start all processes and wait until they are ready. Raises CannotImport if one cannot start."""
        starting = [asyncio.create_task(self._new_process()) for _ in range(self._options.concurrency)]
        try:
            return list(await asyncio.gather(*starting))
        except ProcessExited as e:
            raise CannotImport(
                f"while it imported the function, {e.description}", target=self._options.target
            ) from None
        finally:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)

    async def _new_process(self) -> WorkerProcess:
        process = await WorkerProcess.start(self._setup)
        self._processes.add(process)
        try:
            await process.wait_ready()
        except BaseException:
            self._processes.discard(process)
            process.kill(KillReason.STOPPED)
            await process.close()
            raise
        return process

    async def _replacement(self) -> WorkerProcess | None:
        """Start a successor of a process, with retries and backoff. Returns None if the worker stops."""
        pause_ms = WORKER_RESTART_MS_MIN
        while not self._stop_requested.is_set():
            try:
                return await self._new_process()
            except (ProcessExited, RinglogError, OSError) as e:
                logs.log_event(log, logging.ERROR, "process not started", error=str(e), again_in_ms=pause_ms)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), pause_ms / 1e3)
            pause_ms = min(pause_ms * 2, WORKER_RESTART_MS_MAX)
        return None

    async def _close_process(self, process: WorkerProcess) -> None:
        self._processes.discard(process)
        await process.close()

    # -- lanes ----------------------------------------------------------------------------------------

    async def _lane(self, first: WorkerProcess) -> None:
        """Run jobs one after another, and replace the process when needed.

        A process may end while it is idle. Its next job then returns to the queue, where other workers can
        take it: the start of a successor may take long, and may fail again and again.
        """
        process: WorkerProcess | None = first
        most = self._options.max_jobs_per_process
        while process is not None and (job := await self._next_job()) is not None:
            self._at_work += 1
            try:
                await self._work(process, job)
            finally:
                self._at_work -= 1
                self._changed.set()
            if not process.is_alive or 0 < most <= process.jobs:
                await self._close_process(process)
                process = await self._replacement()
        if process is not None:
            await self._close_process(process)

    async def _next_job(self) -> Job | None:
        """Wait for the lane's next job. Returns None if the worker stops."""
        if self._stop_requested.is_set():
            return None
        job_future: asyncio.Future[Job | None] = asyncio.get_running_loop().create_future()
        self._free.append(job_future)
        self._changed.set()
        return await job_future

    async def _work(self, process: WorkerProcess, job: Job) -> None:
        if not process.is_alive:
            self._settler.settle(job, NOT_BEGUN, process.pid)
            return
        begun_ns = self._clock.monotonic_ns()
        try:
            outcome = await process.run(_shown(job), self._options.time_limit_s)
        except ProcessExited as died:
            ran_ms = (self._clock.monotonic_ns() - begun_ns) / 1e6
            settlement = settlement_of_exit(died, job.deliveries, ran_ms, self._options.backoff)
        else:
            settlement = settlement_of_outcome(outcome, job.deliveries, self._options.backoff)
        self._settler.settle(job, settlement, process.pid)

    # -- claiming -------------------------------------------------------------------------------------

    async def _claim_all(self) -> None:
        while not self._stop_requested.is_set():
            self._changed.clear()  # Before the state is read: a change during the claim ends the wait.
            room = min(len(self._free), WORKER_UNSETTLED_MAX - self._settler.unsettled, CLAIM_JOBS_MAX)
            if room <= 0:
                await self._wait_for_change()
                continue
            jobs = await self._claim(room)
            if jobs is None:
                continue
            for job in jobs:
                self._free.popleft().set_result(job)
            if not jobs and self._options.until_empty:
                if self._at_work or self._settler.unsettled:
                    await self._wait_for_change()  # These jobs may return to the queue.
                else:
                    self.stop()

    async def _claim(self, most: int) -> Sequence[Job] | None:
        """Claim up to `most` jobs. Returns None, after a pause, if the engine does not reply."""
        wait_ms = 0 if self._options.until_empty else WORKER_CLAIM_MS
        try:
            return await self._queue.claim(
                most, wait_ms=wait_ms, lease_ms=self._options.lease_ms, auto_extend=True
            )
        except RinglogError as e:
            if not e.retriable:
                raise
            logs.log_event(log, logging.WARNING, "engine did not reply", error=str(e))
            await asyncio.sleep(RETRY_S)
            return None

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), WORKER_CLAIM_MS / 1e3)


def _shown(job: Job) -> CurrentJob:
    return CurrentJob(
        queue=job.topic,
        seq=job.seq,
        deliveries=job.deliveries,
        data=job.data,
        key=job.key,
        tag=job.tag,
        headers=dict(job.headers),
        meta_json=job.record.meta_json,
    )
