# Generated from ringlog/aio/job.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""One job of a queue, or one record that a consumer group leases, for who works on it."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.job_facts import JobFacts, failure_reason, report_failure
from ringlog.client.leases.lease_extender import Lease
from ringlog.client.read.pages import Record
from ringlog.errors import RinglogError
from ringlog.payload import RAW, PayloadCodec

if TYPE_CHECKING:
    from ringlog.client.lease_client import LeaseClient


class Job(JobFacts):
    """One job and the right to it. As a context: acked when the block ends well, given back when it does not,
    to rest for a while (`backoff_ms`)."""

    __slots__ = ("_ack_pipeline", "_lost", "_queue")

    def __init__(
        self,
        queue: LeaseClient,
        record: Record,
        lease: Lease,
        deliveries: int,
        codec: PayloadCodec[Any] = RAW,
    ) -> None:
        super().__init__(queue.topic, record, lease, deliveries, codec)
        self._queue = queue
        self._lost: threading.Event | None = None
        self._ack_pipeline: AckPipeline | None = None
        """Where its ack goes when its block ends, if nobody waits for that."""
        lease.on_lost = self._was_lost

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is known to have ended: somebody else may be at work on the job."""
        if self._lost is None:
            # Made when somebody asks: that takes longer than all the rest of a job. In this order, since the
            # lease may be lost at any moment.
            self._lost = threading.Event()
            if self.lease.is_lost:
                self._lost.set()
        return self._lost

    def _was_lost(self) -> None:
        if self._lost is not None:
            self._lost.set()

    def ack(self) -> None:
        """The job is done; it is gone for good when this returns. Raises LeaseLost when the lease had ended:
        the job was or will be handed out again, unless somebody finished it."""
        settled = self._queue.ack([self])
        if not settled.is_complete:
            raise self.lease_lost_error()

    def nack(self, *, delay_ms: int | None = None, reason: str = "") -> None:
        """Give the job back, to be claimed by anybody after `delay_ms`; raises LeaseLost. See
        Queue.nack."""
        settled = self._queue.nack([self], delay_ms=delay_ms, reason=reason)
        if not settled.is_complete:
            raise self.lease_lost_error()

    def reject(self, reason: str = "") -> None:
        """Send the job to the dead letters: it would fail again. Raises LeaseLost; see Queue.reject."""
        self._queue.reject(self, reason)

    def extend(self, lease_ms: int) -> None:
        """Hold the job up to `lease_ms` from now; raises LeaseLost."""
        settled = self._queue.extend([self], lease_ms)
        if not settled.is_complete:
            raise self.lease_lost_error()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.is_from_parent:
            return False  # What a job forks is no end of it.
        on_error = self._on_error
        if error is None:
            try:
                self._done()
            except RinglogError as e:
                if on_error is None:
                    raise
                report_failure(on_error, self, e)
            return False
        if not self.lease.is_over:
            # The error of the block is what its caller has to hear of: a lease that is lost besides, or an
            # engine that is gone, gives the job to somebody else by itself.
            with suppress(RinglogError):
                self._queue.nack_with_backoff(self, failure_reason(error))
        if on_error is None or not isinstance(error, Exception):
            return False
        report_failure(on_error, self, error)
        return True

    def _done(self) -> None:
        if self._ack_pipeline is not None and not self.lease.is_over:
            self._queue.pipeline_ack(self, self._ack_pipeline)
            self._ack_pipeline = None
        elif not self.lease.is_over or self.lease.is_lost:
            self.ack()
