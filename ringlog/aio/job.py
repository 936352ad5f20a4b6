"""One job of a queue, or one record that a consumer group leases to a worker."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.job_facts import JobFacts, failure_reason, report_failure
from ringlog.client.leases.lease_extender import Lease
from ringlog.client.read.pages import Record
from ringlog.errors import RinglogError
from ringlog.payload import RAW, PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.aio.lease_client import LeaseClient


class Job(JobFacts[V]):
    """One job with its lease.

    As a context manager, a job is acked when its block succeeds. When the block raises, the job is nacked
    with backoff (`backoff_ms`).

    Example:
        async for job in queue.jobs():
            async with job:
                handle(job.json())
    """

    __slots__ = ("_ack_pipeline", "_lost", "_queue")

    def __init__(
        self,
        queue: LeaseClient[V],
        record: Record,
        lease: Lease,
        deliveries: int,
        codec: PayloadCodec[Any] = RAW,
    ) -> None:
        super().__init__(queue.topic, record, lease, deliveries, codec)
        self._queue = queue
        self._lost: asyncio.Event | None = None
        self._ack_pipeline: AckPipeline | None = None
        """Pipeline that sends the ack when the block ends. None: the end of the block waits for the ack."""
        lease.on_lost = self._was_lost

    @property
    def lost(self) -> asyncio.Event:
        """Event that is set when the lease is known to have ended. Another worker may then process the
        job."""
        if self._lost is None:
            # Created on first access, since creating it takes longer than all other work for a job. Create
            # the event before testing the lease, which may be lost at any moment.
            self._lost = asyncio.Event()
            if self.lease.is_lost:
                self._lost.set()
        return self._lost

    def _was_lost(self) -> None:
        if self._lost is not None:
            self._lost.set()

    async def ack(self) -> None:
        """Acknowledge the job. When the call returns, the queue has deleted it and never delivers it again.

        Raises:
            LeaseLost: The lease had ended. The job is or was delivered again, unless another worker acked it.
        """
        settled = await self._queue.ack([self])
        if not settled.is_complete:
            raise self.lease_lost_error()

    async def nack(self, *, delay_ms: int | None = None, reason: str = "") -> None:
        """Return the job to its queue. It is ready after `delay_ms`. See Queue.nack.

        Args:
            delay_ms: Delay in milliseconds. None uses the backoff of the topic or group.
            reason: Why the job failed. A dead letter records its first line.

        Raises:
            LeaseLost: The lease had ended.
        """
        settled = await self._queue.nack([self], delay_ms=delay_ms, reason=reason)
        if not settled.is_complete:
            raise self.lease_lost_error()

    async def reject(self, reason: str = "") -> None:
        """Move the job to the dead-letter topic, without further deliveries. See Queue.reject.

        Args:
            reason: Why the job failed. The dead letter records its first line.

        Raises:
            LeaseLost: The lease had ended.
            InvalidRequest: The queue or group has no dead-letter topic.
        """
        await self._queue.reject(self, reason)

    async def extend(self, lease_ms: int) -> None:
        """Extend the lease.

        Args:
            lease_ms: Time in milliseconds from now until the lease ends.

        Raises:
            LeaseLost: The lease had ended.
        """
        settled = await self._queue.extend([self], lease_ms)
        if not settled.is_complete:
            raise self.lease_lost_error()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.is_from_parent:
            return False  # The end of the block in a forked child does not settle the parent's job.
        on_error = self._on_error
        if error is None:
            try:
                await self._done()
            except RinglogError as e:
                if on_error is None:
                    raise
                report_failure(on_error, self, e)
            return False
        if not self.lease.is_over:
            # The caller must see the error of the block, not a failed nack. If the lease is lost or the
            # engine is down, the lease expires and the job is delivered again.
            with suppress(RinglogError):
                await self._queue.nack_with_backoff(self, failure_reason(error))
        if on_error is None or not isinstance(error, Exception):
            return False
        report_failure(on_error, self, error)
        return True

    async def _done(self) -> None:
        if self._ack_pipeline is not None and not self.lease.is_over:
            self._queue.pipeline_ack(self, self._ack_pipeline)
            self._ack_pipeline = None
        elif not self.lease.is_over or self.lease.is_lost:
            await self.ack()
