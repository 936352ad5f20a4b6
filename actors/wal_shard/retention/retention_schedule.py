"""Schedule of retention: when records of which topics expire, and whose retention is requested. Pure."""

from __future__ import annotations

import heapq

from ringlog.actors.wal_shard.commit.admission import Admission
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.envelope import messages as m
from ringlog.topic.config import DISCARD_REJECT
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import exceeds_cap
from ringlog.topic.state import ShardTopic

CONTENT_REQUESTS = (m.TopicState, m.TopicList, m.TopicDelete, m.TopicPut, m.Locate, m.RecordsDelete)
"""Requests that show contents or counts, or depend on them.
TopicPut is one of them, because a longer TTL must not bring back records that have expired."""
LEASE_REQUESTS = (
    m.Claim, m.Steal, m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject, m.ListPending, m.LeaseStats,
    m.ConfirmDeadLettered, m.GroupOpen, m.GroupSeek,
)  # fmt: skip
"""Requests about jobs and groups. Expired records are removed first; they must not be leased or counted."""
_RETRY_US = 10_000_000
"""Time after which retention is tried again if storage reported damage, or the log has no room for it."""


class RetentionSchedule:
    """Due and requested retention of the topics of one shard."""

    def __init__(self, directory: TopicDirectory) -> None:
        self._directory = directory
        self._dues: list[tuple[int, int]] = []
        """Heap of (time in microseconds, topic_id).
        An entry is valid only if it equals the topic's `due_us`."""
        self._strict_dues: list[tuple[int, int]] = []
        """Entries of topics with `discard: reject`.
        Expired records must make room before a write is refused."""
        self._wanted: dict[int, ShardTopic] = {}
        self._not_before: dict[int, int] = {}
        """topic_id -> time in microseconds until which caps are not applied."""

    def finish_recovery(self) -> None:
        """Schedule expiry for the recovered topics, and request retention for topics above their caps."""
        for topic in self._directory.by_id.values():
            # A snapshot row contains one time for both kinds of expiry.
            topic.own_due_us = topic.own_due_us or topic.due_us
            self.add(topic)
            if exceeds_cap(topic, topic.config):
                self._wanted[topic.topic_id] = topic

    def add(self, topic: ShardTopic) -> None:
        """Schedule the topic's next expiry after its time has changed."""
        if topic.due_us:
            heapq.heappush(self._dues, (topic.due_us, topic.topic_id))
            if topic.config.discard == DISCARD_REJECT:
                heapq.heappush(self._strict_dues, (topic.due_us, topic.topic_id))

    def request(self, topic: ShardTopic) -> None:
        """Apply this topic's retention with the next commit batch."""
        self._wanted[topic.topic_id] = topic

    @property
    def is_requested(self) -> bool:
        """True if retention is requested for a topic."""
        return bool(self._wanted)

    @property
    def next_due_us(self) -> int:
        """Time in microseconds at which the next record expires; 0 if none does."""
        return self._dues[0][0] if self._dues else 0

    def request_due(self, now_us: int) -> None:
        """Request the retention of every topic that is due."""
        self._take_due(self._dues, now_us)

    def must_run_first(self, message: m.Message | None, batch: CommitBatch, now_us: int) -> bool:
        """Return True if retention must be applied before this request (X6). `message` None means frames."""
        if message is None or isinstance(message, m.Append | m.Route):
            return self._take_due(self._strict_dues, now_us)
        if isinstance(message, LEASE_REQUESTS):
            topic = self._directory.find(message.topic)
            if topic is not None and 0 < topic.due_us <= now_us:
                self._wanted[topic.topic_id] = topic
            return topic is not None and topic.topic_id in self._wanted
        if not isinstance(message, CONTENT_REQUESTS):
            return False
        if isinstance(message, m.TopicList):
            self.request_due(now_us)
        else:
            topic = self._directory.find(message.topic)
            if topic is not None and 0 < topic.due_us <= now_us:
                self._wanted[topic.topic_id] = topic
        return bool(self._wanted) or batch.has_removals

    def _take_due(self, dues: list[tuple[int, int]], now_us: int) -> bool:
        found = False
        while dues and dues[0][0] <= now_us:
            due_us, topic_id = heapq.heappop(dues)
            topic = self._directory.by_id.get(topic_id)
            if topic is not None and topic.due_us == due_us:
                self._wanted[topic_id] = topic
                found = True
        return found

    def take_requested(self, admission: Admission, now_us: int) -> list[ShardTopic]:
        """Return the topics whose retention is requested, or that the admission took above their caps."""
        for topic in admission.earlier_expiry:
            self.add(topic)
        for topic in admission.needs_retention.values():
            if exceeds_cap(topic, topic.config) and self._not_before.get(topic.topic_id, 0) <= now_us:
                self._wanted[topic.topic_id] = topic
        admission.earlier_expiry.clear()
        admission.needs_retention.clear()
        topics = [t for t in self._wanted.values() if self._directory.by_id.get(t.topic_id) is t]
        self._wanted.clear()
        return topics

    def retry_later(self, topic: ShardTopic, now_us: int) -> None:
        """Postpone the retention of a topic with damaged records, or of one whose removal has no room."""
        self._not_before[topic.topic_id] = topic.due_us = now_us + _RETRY_US
        self.add(topic)

    def clear_retry(self, topic: ShardTopic) -> None:
        """Note that the topic's retention was decided."""
        self._not_before.pop(topic.topic_id, None)
