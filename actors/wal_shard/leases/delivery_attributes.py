"""Loads the delivery attributes of records from storage: `not_before` and priority. Pure.

A shard knows that some records of a topic have delivery attributes, but not which records. At the first
request for a queue or group, it queries storage for the attributes of all undelivered records. Later it
queries those of newly published records. Until the attributes are loaded, the queue or group delivers
nothing.
"""

from __future__ import annotations

from typing import Any

from ringlog.actors.wal_shard.leases.job_sizes import JobSizes
from ringlog.actors.wal_shard.leases.lease_registry import LeaseRegistry, find_group, key_of
from ringlog.actors.wal_shard.leases.lease_requests import (
    damage_error,
    delivery_attributes_of,
    levels_of,
    live_of,
)
from ringlog.actors.wal_shard.leases.waiting_claims import WaitingClaims
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.retention.storage_query import RecordQuery, RecordQueryResult, StorageQuery
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.leases.group import ConsumerGroup
from ringlog.topic.config import QUEUE
from ringlog.topic.retention import first_live_seq
from ringlog.topic.state import ShardTopic


class DeliveryAttributeLoader:
    """Loads delivery attributes for the queues and consumer groups of one shard."""

    def __init__(
        self, registry: LeaseRegistry, removals: Removals, waiting: WaitingClaims, sizes: JobSizes
    ) -> None:
        self._registry, self._removals, self._waiting, self._sizes = registry, removals, waiting, sizes
        self.wall_us = 0
        self._wanted: dict[int, None] = {}
        """Queues and groups whose waiting claims need attributes to be loaded, by `key_of`."""
        self._damaged: dict[int, CorruptData] = {}
        """Queues and groups whose attributes could not be read. The next request gets the error."""
        self._put_us: dict[int, tuple[int, int]] = {}
        """`key_of` -> (oldest ready seq, its append time in microseconds), for requests for statistics."""
        removals.query_results.subscribe(self._on_query_result)

    @property
    def is_damaged(self) -> bool:
        """True if a request has to fail because attributes could not be read."""
        return bool(self._damaged)

    def require_undamaged(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Raise Internal once if the attributes of this queue or group could not be read."""
        if (damage := self._damaged.pop(key_of(topic, group), None)) is not None:
            raise damage_error(topic, damage)

    def questions_for(self, message: Any) -> list[StorageQuery]:
        """Return the storage queries that this request needs first.

        It may need delivery attributes of records that are not loaded yet. A request for statistics may need
        the append time of the oldest ready job.
        """
        registry = self._registry
        topic = registry.directory.find(message.topic)
        if topic is None:
            return []
        name: str = getattr(message, "group", "")
        group = find_group(topic, name) if name else None
        if not name and topic.config.type == QUEUE:
            group = registry.default_group(topic)
        if group is None or not group.is_queue_mode or (key := key_of(topic, group)) in self._damaged:
            return []
        query = self._query_unloaded(topic, group)
        if query is None and isinstance(message, m.LeaseStats):
            group.apply_expirations(registry.now_ms)
            oldest = group.oldest_ready(live_of(topic))
            if oldest and key not in self._put_us and group.enqueue_times.put_ms(oldest) is None:
                query = RecordQuery(1, 0, key, put=oldest)
        return [] if query is None else self._removals.record_queries([(topic, query)], self.wall_us)

    def pending_questions(self) -> list[StorageQuery]:
        """Return the storage queries that waiting claims need."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        asked = [
            (found[0], query)
            for key in wanted
            if (found := self._registry.find_by_key(key))
            and (query := self._query_unloaded(*found)) is not None
        ]
        return self._removals.record_queries(asked, self.wall_us) if asked else []

    def needs_loading(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """Return True if attributes of undelivered records are not loaded yet, and schedule their query."""
        if self._query_unloaded(topic, group) is None:
            return False
        self._wanted[key_of(topic, group)] = None
        return True

    def needs_loading_if_readable(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """Act like `needs_loading`, but return False if the attributes could not be read."""
        return key_of(topic, group) not in self._damaged and self.needs_loading(topic, group)

    def _query_unloaded(self, topic: ShardTopic, group: ConsumerGroup) -> RecordQuery | None:
        if not group.is_queue_mode:
            return None
        levels = levels_of(topic)
        if group.levels != levels:
            group.invalidate_priorities(levels)
        if topic.attributes_to <= group.attributes_loaded_to or topic.head_seq <= group.attributes_loaded_to:
            return None
        first = max(group.attributes_loaded_to + 1, first_live_seq(topic))
        if not group.ready_index.is_reloading:
            first = max(first, group.cursor)
        if first > min(topic.attributes_to, topic.head_seq):
            return None
        return RecordQuery(first, topic.head_seq, key_of(topic, group))

    def _on_query_result(self, question: StorageQuery, found: RecordQueryResult | CorruptData) -> None:
        topic, query = question.topic, question.record_query
        if self._registry.directory.by_id.get(topic.topic_id) is not topic or query is None:
            return
        if query.has_sizes:
            # Records next to damaged ones may be valid. Each ack then queries only its own jobs.
            if not isinstance(found, CorruptData):
                self._sizes.add_sizes(topic.topic_id, *found.sizes)
        elif query.put:
            # The age of an unreadable record is unknown.
            put = (0, 0) if isinstance(found, CorruptData) else (query.put, found.put_us)
            self._put_us[query.key] = put
        elif isinstance(found, CorruptData):
            self._damaged[query.key] = found
            self._waiting.fail_claims(damage_error(topic, found), query.key)
        elif (known := self._registry.find_by_key(query.key)) is not None:
            attributes = delivery_attributes_of(found.attributes, levels_of(topic))
            known[1].add_delivery_attributes(attributes, live_of(topic), query.last, self._registry.now_ms)
            self._waiting.wake(query.key)

    def take_put_ms(self, topic: ShardTopic, group: ConsumerGroup) -> int | None:
        """Return the append time of the oldest ready record, in milliseconds on the clock of leases.

        Return None if it is unknown or no record is ready.
        """
        seq = group.oldest_ready(live_of(topic))
        known, put_us = self._put_us.pop(key_of(topic, group), (0, 0))
        if seq is None:
            return None
        if known == seq:
            return put_us // 1_000 - self._registry.wall_clock_offset_ms
        return group.enqueue_times.put_ms(seq)

    def forget(self, key: int) -> None:
        """Drop the state of a deleted queue or group."""
        self._damaged.pop(key, None)
        self._put_us.pop(key, None)
