"""Schedule of retention: when records of which topics expire, and whose retention is requested. Pure."""

from __future__ import annotations

import heapq

from ringlog.actors.wal_shard.commit.admission import Admission
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.envelope import messages as m
from ringlog.limits import STALE_DUES_MAX
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


class DueTopics:
    """When topics are due: a heap with one entry in force for each topic, at its `due_us` or earlier.

    Retention postpones a topic with each commit batch that evicts records. The topic then keeps its entry,
    and gets a later one when that time has come.
    """

    def __init__(self, directory: TopicDirectory) -> None:
        self._directory = directory
        self._heap: list[tuple[int, int]] = []
        """(time in microseconds, topic_id). At most one for each topic and STALE_DUES_MAX others."""
        self._in_force: dict[int, int] = {}
        """topic_id -> time of its entry in force."""

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_us(self) -> int:
        """Time in microseconds before which no topic is due; 0 if none will be."""
        return self._heap[0][0] if self._heap else 0

    def add(self, topic: ShardTopic) -> None:
        """Add a topic that has a `due_us`."""
        known = self._in_force.get(topic.topic_id)
        if known is not None and known <= topic.due_us:
            return
        self._push(topic)
        if len(self._heap) > len(self._directory.by_id) + STALE_DUES_MAX:
            self._rebuild()

    def take(self, now_us: int) -> list[ShardTopic]:
        """Remove and return the topics that are due."""
        found: list[ShardTopic] = []
        while self._heap and self._heap[0][0] <= now_us:
            due_us, topic_id = heapq.heappop(self._heap)
            if self._in_force.get(topic_id) != due_us:
                continue  # An earlier entry replaced this one.
            del self._in_force[topic_id]
            topic = self._directory.by_id.get(topic_id)
            if topic is None or not topic.due_us:
                continue
            if topic.due_us > now_us:
                self._push(topic)
            else:
                found.append(topic)
        return found

    def postpone(self, topic: ShardTopic, until_us: int) -> None:
        """Take a topic that is due not before this time."""
        self._in_force[topic.topic_id] = until_us
        heapq.heappush(self._heap, (until_us, topic.topic_id))

    def _push(self, topic: ShardTopic) -> None:
        self.postpone(topic, topic.due_us)

    def _rebuild(self) -> None:
        """Remove replaced entries, and those of topics that were deleted or no longer expire."""
        topics = [self._directory.by_id.get(topic_id) for topic_id in self._in_force]
        self._in_force = {topic.topic_id: topic.due_us for topic in topics if topic and topic.due_us}
        self._heap = [(due_us, topic_id) for topic_id, due_us in self._in_force.items()]
        heapq.heapify(self._heap)


class RetentionSchedule:
    """Due and requested retention of the topics of one shard."""

    def __init__(self, directory: TopicDirectory) -> None:
        self._directory = directory
        self.dues: DueTopics = DueTopics(directory)
        self.strict_dues: DueTopics = DueTopics(directory)
        """Topics with `discard: reject`. Expired records must make room before a write is refused."""
        self._wanted: dict[int, ShardTopic] = {}
        self._not_before: dict[int, int] = {}
        """topic_id -> time in microseconds until which caps are not applied."""
        self._postponed: set[int] = set()
        """Ids of topics that keep expired records, because the log has no room for their removal."""

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
            self.dues.add(topic)
            if topic.config.discard == DISCARD_REJECT:
                self.strict_dues.add(topic)

    def request(self, topic: ShardTopic) -> None:
        """Apply this topic's retention with the next commit batch."""
        self._wanted[topic.topic_id] = topic

    @property
    def is_requested(self) -> bool:
        """True if retention is requested for a topic."""
        return bool(self._wanted)

    @property
    def next_due_us(self) -> int:
        """Time in microseconds before which no record expires; 0 if none will."""
        return self.dues.next_us

    def request_due(self, now_us: int) -> None:
        """Request the retention of every topic that is due."""
        self._take_due(self.dues, now_us)

    def must_run_first(self, message: m.Message | None, batch: CommitBatch, now_us: int) -> bool:
        """Return True if retention must be applied before this request (X6). `message` None means frames."""
        if message is None or isinstance(message, m.Append | m.Route):
            return self._take_due(self.strict_dues, now_us)
        if isinstance(message, LEASE_REQUESTS):
            topic = self._directory.find(message.topic)
            if topic is not None and self._is_due(topic, now_us):
                self._wanted[topic.topic_id] = topic
            return topic is not None and topic.topic_id in self._wanted
        if not isinstance(message, CONTENT_REQUESTS):
            return False
        if isinstance(message, m.TopicList):
            self.request_due(now_us)
        else:
            topic = self._directory.find(message.topic)
            if topic is not None and self._is_due(topic, now_us):
                self._wanted[topic.topic_id] = topic
        return bool(self._wanted) or batch.has_removals

    def _is_due(self, topic: ShardTopic, now_us: int) -> bool:
        return 0 < topic.due_us <= now_us and topic.topic_id not in self._postponed

    def _take_due(self, dues: DueTopics, now_us: int) -> bool:
        found = dues.take(now_us)
        self._wanted.update((topic.topic_id, topic) for topic in found)
        return bool(found)

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
        """Postpone the retention of a topic whose stored records are damaged."""
        self._not_before[topic.topic_id] = topic.due_us = now_us + _RETRY_US
        self.add(topic)

    def postpone(self, topic: ShardTopic, now_us: int) -> None:
        """Postpone the retention of a topic, because the log has no room for the removal.

        It is due until then, also if its records exceed a cap and expire later or never.
        """
        topic.due_us = min(topic.due_us or now_us, now_us)
        until_us = now_us + _RETRY_US
        self._not_before[topic.topic_id] = until_us
        self._postponed.add(topic.topic_id)
        self.dues.postpone(topic, until_us)
        if topic.config.discard == DISCARD_REJECT:
            self.strict_dues.postpone(topic, until_us)

    def is_postponed(self, topic: ShardTopic) -> bool:
        """Return whether the topic keeps expired records, because the log has no room for their removal."""
        return topic.topic_id in self._postponed

    def clear_retry(self, topic: ShardTopic) -> None:
        """Note that the topic's retention was decided, or that the topic was deleted."""
        self._not_before.pop(topic.topic_id, None)
        self._postponed.discard(topic.topic_id)
