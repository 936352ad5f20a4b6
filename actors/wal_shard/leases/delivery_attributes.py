"""Marks of records: what they say of when and how urgently they want to be handed out, learned from storage.
Pure.

A shard knows that some records of a topic have marks, not which. It asks storage for all that a queue or
group has before it when that is first used, later for those that were published since. While that is not
known, nothing of it is handed out.
"""

from __future__ import annotations

from typing import Any

from actors.wal_shard.leases.job_sizes import JobSizes
from actors.wal_shard.leases.lease_registry import LeaseRegistry, find_group, key_of
from actors.wal_shard.leases.lease_requests import damage_error, delivery_attributes_of, levels_of, live_of
from actors.wal_shard.leases.waiting_claims import WaitingClaims
from actors.wal_shard.retention.removal import LedgerQuestion, RecordQuery, RecordQueryResult, Removals
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.leases.group import ConsumerGroup
from ringlog.topic.config import QUEUE
from ringlog.topic.retention import first_live_seq
from ringlog.topic.state import ShardTopic


class DeliveryAttributeLoader:
    """What one shard has learned for its queues and groups, and has to."""

    def __init__(
        self, registry: LeaseRegistry, removals: Removals, waiting: WaitingClaims, sizes: JobSizes
    ) -> None:
        self._registry, self._removals, self._waiting, self._sizes = registry, removals, waiting, sizes
        self.wall_us = 0
        self._wanted: dict[int, None] = {}
        """Queues and groups with claims that wait for what has to be learned first, by `key_of`."""
        self._damaged: dict[int, CorruptData] = {}
        """Those whose marks could not be read: the next request gets the error."""
        self._put_us: dict[int, tuple[int, int]] = {}
        """Of a queue or group whose statistics are asked for: (its oldest record, when that was put)."""
        removals.learned.subscribe(self._learned)

    @property
    def is_damaged(self) -> bool:
        """Does any request have to get an error for damage?"""
        return bool(self._damaged)

    def require_undamaged(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Raise Internal where the marks of a queue or group could not be read."""
        if (damage := self._damaged.pop(key_of(topic, group), None)) is not None:
            raise damage_error(topic, damage)

    def questions_for(self, message: Any) -> list[LedgerQuestion]:
        """What has to be known before this request is looked at: marks that records brought since, or had
        when we began; and when the oldest job was put, where that was before."""
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
        learn = self._unlearned(topic, group)
        if learn is None and isinstance(message, m.LeaseStats):
            group.apply_expirations(registry.now_ms)
            oldest = group.oldest_ready(live_of(topic))
            if oldest and key not in self._put_us and group.enqueue_times.put_ms(oldest) is None:
                learn = RecordQuery(1, 0, key, put=oldest)
        return [] if learn is None else self._removals.questions_for_queries([(topic, learn)], self.wall_us)

    def pending_questions(self) -> list[LedgerQuestion]:
        """The same for claims that wait."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        asked = [
            (found[0], learn)
            for key in wanted
            if (found := self._registry.find_by_key(key)) and (learn := self._unlearned(*found)) is not None
        ]
        return self._removals.questions_for_queries(asked, self.wall_us) if asked else []

    def needs_loading(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """Is it not known yet what records before this queue or group say of their delays? Then storage is
        asked."""
        if self._unlearned(topic, group) is None:
            return False
        self._wanted[key_of(topic, group)] = None
        return True

    def needs_loading_if_readable(self, topic: ShardTopic, group: ConsumerGroup) -> bool:
        """The same, unless that could not be read."""
        return key_of(topic, group) not in self._damaged and self.needs_loading(topic, group)

    def _unlearned(self, topic: ShardTopic, group: ConsumerGroup) -> RecordQuery | None:
        if not group.is_queue_mode:
            return None
        levels = levels_of(topic)
        if group.levels != levels:
            group.invalidate_priorities(levels)
        if topic.marked_to <= group.attributes_loaded_to or topic.head_seq <= group.attributes_loaded_to:
            return None
        first = max(group.attributes_loaded_to + 1, first_live_seq(topic))
        if not group.ready_index.is_reloading:
            first = max(first, group.cursor)
        if first > min(topic.marked_to, topic.head_seq):
            return None
        return RecordQuery(first, topic.head_seq, key_of(topic, group))

    def _learned(self, question: LedgerQuestion, found: RecordQueryResult | CorruptData) -> None:
        topic, learn = question.topic, question.learn
        if self._registry.directory.by_id.get(topic.topic_id) is not topic or learn is None:
            return
        if learn.has_sizes:
            # What lies beside damage may be whole: then each ack asks for its own jobs alone.
            if not isinstance(found, CorruptData):
                self._sizes.add_sizes(topic.topic_id, *found.sizes)
        elif learn.put:
            # The age of a record that cannot be read is not known.
            put = (0, 0) if isinstance(found, CorruptData) else (learn.put, found.put_us)
            self._put_us[learn.key] = put
        elif isinstance(found, CorruptData):
            self._damaged[learn.key] = found
            self._waiting.fail_claims(damage_error(topic, found), learn.key)
        elif (known := self._registry.find_by_key(learn.key)) is not None:
            marks = delivery_attributes_of(found.marks, levels_of(topic))
            known[1].add_delivery_attributes(marks, live_of(topic), learn.last, self._registry.now_ms)
            self._waiting.wake(learn.key)

    def take_put_ms(self, topic: ShardTopic, group: ConsumerGroup) -> int | None:
        """When the oldest ready one was put, as far as that is known; None = it is not, or there is none."""
        seq = group.oldest_ready(live_of(topic))
        known, put_us = self._put_us.pop(key_of(topic, group), (0, 0))
        if seq is None:
            return None
        if known == seq:
            return put_us // 1_000 - self._registry.wall_clock_offset_ms
        return group.enqueue_times.put_ms(seq)

    def forget(self, key: int) -> None:
        """The queue or group is no more."""
        self._damaged.pop(key, None)
        self._put_us.pop(key, None)
