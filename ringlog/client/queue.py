# Generated from ringlog/aio/queue.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Queues for workers: `for job in client.queue("emails").jobs(): with job: deliver(job.json())`.

A job is leased to one worker at a time. It is done when the worker acks it; given back, or not extended in
time, it is handed out again. So every job is worked on at least once, and what it does should bear a second
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

from ringlog.client.lease_client import LeaseClient
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
from ringlog.client.write.fields import RecordFields
from ringlog.clock import SystemClock
from ringlog.payload import RAW, PayloadCodec

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell
    from ringlog.client.operations import Operations


class Queue(LeaseClient):
    """One queue, as one worker sees it. `node` names the worker, which holds the leases."""

    def __init__(
        self, client: Operations, shell: ThreadedShell, topic: str, node: str,
        payload: PayloadCodec[Any] = RAW, release_on_exit: bool = True, min_idle_ms: int = 0,
    ) -> None:  # fmt: skip
        working = LeaseOperations(
            check_str(topic, "topic"), check_str(node, "node"), SystemClock(),
            release_on_exit=check_bool(release_on_exit, "release_on_exit"),
            min_idle_ms=check_call_setting(min_idle_ms, "min_idle_ms"),
        )  # fmt: skip
        super().__init__(client, shell, working, payload)

    # -- putting jobs in ------------------------------------------------------------------------------

    def put(
        self, data: Any, /, *, dedup_id: str | None = None, dedup_window_ms: int | None = None,
        **record: Unpack[RecordFields],
    ) -> Appended:  # fmt: skip
        """Add a job: bytes, or what the queue's codec takes; fields and dedup as in Client.append. Raises
        TopicNotFound: a queue is made with `client.topics.create(topic, type="queue")`; and NotAQueue."""
        self._require_queue()
        return self._client.append(
            self.topic, self._codec.encode(data), create=False, dedup_id=dedup_id,
            dedup_window_ms=dedup_window_ms, **record,
        )  # fmt: skip

    def put_many(self, jobs: Iterable[Any], /, *, dedup_window_ms: int | None = None) -> Appended:
        """Add jobs in one atomic write, at most 10,000: each as for `put`, a NewRecord, or a Record. Dedup
        ids are as in Client.append_many."""
        self._require_queue()
        return self._client.append_many(
            self.topic, encode_payloads(jobs, self._codec), create=False, dedup_window_ms=dedup_window_ms
        )

    # -- looking --------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """How many jobs are in which state; raises NotAQueue, TopicNotFound."""
        return self._shell.run(self._operations.stats(self._client.connection))

    def pending(self, limit: int = 100, *, after: int = 0) -> list[PendingJob]:
        """The first jobs behind `after` that were handed out and are not done: who holds them, until when,
        how often they were handed out, why they failed. Looking changes nothing."""
        after, limit = check_seq(after, "after"), check_int_range(limit, "limit", 1)
        return self._shell.run(self._operations.pending_jobs(self._client.connection, after, limit))

    def peek(self, limit: int = 1) -> list[Record]:
        """The first jobs that are there, whoever holds them, without claiming any."""
        self._require_queue()
        page = self._client.read(self.topic, limit=limit)
        return page.records

    def purge(self) -> Deletion:
        """Delete every job that is there now: ready, leased and delayed ones. They do not come back."""
        self._require_queue()
        found = self._client.topics.state(self.topic, touch=False)
        return self._client.topics.delete_records(self.topic, before_seq=found.head_seq + 1)

    def _require_queue(self) -> None:
        self._shell.run(self._operations.resolve_topic(self._client.connection))
