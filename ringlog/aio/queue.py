"""Queues for workers: `for job in client.queue("emails").jobs(): with job: deliver(job.json())`.

A job is leased to one worker at a time until the worker acks it. If the worker nacks the job or its lease
expires, the job is delivered again. Delivery is at-least-once, so job handlers must be idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

from ringlog.aio.lease_client import LeaseClient
from ringlog.client.leases.job_payloads import encode_payloads
from ringlog.client.leases.lease_operations import LeaseOperations
from ringlog.client.read.pages import Record
from ringlog.client.requests.results import Appended, PendingJob, QueueStats
from ringlog.client.requests.topic_requests import Deletion
from ringlog.client.requests.validation import (
    check_bool,
    check_call_setting,
    check_int_range,
    check_seq,
    check_str,
)
from ringlog.client.write.fields import NewRecord, RecordFields
from ringlog.clock import SystemClock
from ringlog.payload import RAW, PayloadCodec, V

if TYPE_CHECKING:
    from ringlog.aio.operations import Operations
    from ringlog.aio.shell import LoopShell


class Queue(LeaseClient[V]):
    """View of one worker on one queue. The engine records leases under the name `node`.

    Example:
        queue = client.queue("emails")
        await queue.put(b"...")
        async for job in queue.jobs():
            async with job:
                deliver(job.data)
    """

    def __init__(
        self, client: Operations, shell: LoopShell, topic: str, node: str,
        payload: PayloadCodec[Any] = RAW, release_on_exit: bool = True, min_idle_ms: int = 0,
    ) -> None:  # fmt: skip
        operations = LeaseOperations(
            check_str(topic, "topic"), check_str(node, "node"), SystemClock(),
            release_on_exit=check_bool(release_on_exit, "release_on_exit"),
            min_idle_ms=check_call_setting(min_idle_ms, "min_idle_ms"),
        )  # fmt: skip
        super().__init__(client, shell, operations, payload)

    # -- adding jobs ----------------------------------------------------------------------------------

    async def put(
        self, data: V, /, *, dedup_id: str | None = None, dedup_window_ms: int | None = None,
        **record: Unpack[RecordFields],
    ) -> Appended:  # fmt: skip
        """Add a job to the queue and wait until it reached the durability class of the topic.

        Create the queue first: `client.topics.create(topic, type="queue")`.

        Args:
            data: Payload in bytes, or a value that the queue's codec encodes.
            dedup_id: Skip the append if this id was used within the window. See Client.append.
            dedup_window_ms: Deduplication window in milliseconds, if shorter than the topic's.
            **record: Other fields of the record: key, tag, headers, priority, not_before and so on.

        Returns:
            The appended record.

        Raises:
            TopicNotFound: The topic does not exist.
            NotAQueue: The topic is not of type `queue`.
        """
        await self._require_queue()
        return await self._client.append(
            self.topic, self._codec.encode(data), create=False, dedup_id=dedup_id,
            dedup_window_ms=dedup_window_ms, **record,
        )  # fmt: skip

    async def put_many(
        self, jobs: Iterable[V | NewRecord | Record], /, *, dedup_window_ms: int | None = None
    ) -> Appended:
        """Add up to 10,000 jobs in one atomic write.

        Args:
            jobs: Payloads as in `put`, NewRecord objects, or Record objects that were read before. A
                NewRecord may have a dedup id. See Client.append_many.
            dedup_window_ms: Deduplication window in milliseconds, if shorter than the topic's.

        Returns:
            The appended records.

        Raises:
            TopicNotFound: The topic does not exist.
            NotAQueue: The topic is not of type `queue`.
        """
        await self._require_queue()
        return await self._client.append_many(
            self.topic, encode_payloads(jobs, self._codec), create=False, dedup_window_ms=dedup_window_ms
        )

    # -- inspecting -----------------------------------------------------------------------------------

    async def stats(self) -> QueueStats:
        """Return the number of jobs in each state. Raises NotAQueue, TopicNotFound."""
        return await self._shell.run(self._operations.stats(self._client.connection))

    async def pending(self, limit: int = 100, *, after: int = 0) -> list[PendingJob]:
        """Return delivered jobs that are not acked, with node, deadline, number of deliveries and last
        failure.

        The call changes no state.

        Args:
            limit: Most jobs to return, at least 1.
            after: Only jobs above this seq.

        Returns:
            The jobs, in order of their seqs.
        """
        after, limit = check_seq(after, "after"), check_int_range(limit, "limit", 1)
        return await self._shell.run(self._operations.pending_jobs(self._client.connection, after, limit))

    async def peek(self, limit: int = 1) -> list[Record]:
        """Return the first jobs of the queue, leased or not, without claiming them."""
        await self._require_queue()
        page = await self._client.read(self.topic, limit=limit)
        return page.records

    async def purge(self) -> Deletion:
        """Delete every job that the queue contains now: ready, leased and delayed jobs. This cannot be
        undone."""
        await self._require_queue()
        found = await self._client.topics.state(self.topic, touch=False)
        return await self._client.topics.delete_records(self.topic, before_seq=found.head_seq + 1)

    async def _require_queue(self) -> None:
        await self._shell.run(self._operations.resolve_topic(self._client.connection))
