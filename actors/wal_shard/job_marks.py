"""Marks of jobs: what records say of when and how urgently they want to be handed out, learned from storage.
Pure.

A shard knows that some records of a queue have marks, not which. It asks storage for all jobs when the queue
is first used, later for those that were published since. While that is not known, nothing of the queue is
handed out.
"""

from __future__ import annotations

from typing import Any

from actors.wal_shard.job_sizes import JobSizes
from actors.wal_shard.lease_registry import LeaseRegistry, find_group, key_of
from actors.wal_shard.lease_requests import damage_of, levels_of, live_of, marks_of
from actors.wal_shard.removal import Learn, Learned, Question, Removals
from actors.wal_shard.waiting import Waiting
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.leases.group import ConsumerGroup
from ringlog.topic.config import QUEUE
from ringlog.topic.retention import front_of
from ringlog.topic.state import Topic


class JobMarks:
    """What one shard has learned of its queues' records, and has to."""

    def __init__(
        self, registry: LeaseRegistry, removals: Removals, waiting: Waiting, sizes: JobSizes
    ) -> None:
        self._registry, self._removals, self._waiting, self._sizes = registry, removals, waiting, sizes
        self.wall_us = 0
        self._wanted: dict[int, Topic] = {}
        """Queues with claims that wait for what has to be learned first."""
        self._damaged: dict[int, CorruptData] = {}
        """Queues whose marks could not be read: the next request gets the error."""
        self._put_us: dict[int, tuple[int, int]] = {}
        """Of a queue or group whose statistics are asked for: (its oldest record, when that was put)."""
        removals.learned.subscribe(self._learned)

    @property
    def is_damaged(self) -> bool:
        """Does any request have to get an error for damage?"""
        return bool(self._damaged)

    def require_whole(self, topic: Topic) -> None:
        """Raise Internal where the marks of a queue could not be read."""
        if (damage := self._damaged.pop(topic.topic_id, None)) is not None:
            raise damage_of(topic, damage)

    def to_learn_for(self, message: Any) -> list[Question]:
        """What has to be known before this request is looked at: marks that records brought since, or had
        when we began; and when the oldest job was put, where that was before."""
        registry = self._registry
        topic = registry.directory.find(message.topic)
        if topic is None:
            return []
        name: str = getattr(message, "group", "")
        learn, group = None, find_group(topic, name) if name else None
        if topic.config.type == QUEUE and not name:
            if topic.topic_id in self._damaged:
                return []
            learn, group = self._unlearned(topic), registry.own(topic)
        if learn is None and isinstance(message, m.LeaseStats) and group is not None and group.is_queue:
            group.settle(registry.now_ms)
            oldest = group.oldest_ready(live_of(topic))
            if oldest and key_of(topic, group) not in self._put_us and group.ages.put_ms(oldest) is None:
                learn = Learn(1, 0, oldest, key_of(topic, group))
        return [] if learn is None else self._removals.questions_to_learn([(topic, learn)], self.wall_us)

    def to_learn(self) -> list[Question]:
        """The same for claims that wait."""
        if not self._wanted:
            return []
        wanted, self._wanted = self._wanted, {}
        asked = [
            (topic, learn)
            for topic in wanted.values()
            if self._registry.directory.by_id.get(topic.topic_id) is topic
            and (learn := self._unlearned(topic)) is not None
        ]
        return self._removals.questions_to_learn(asked, self.wall_us) if asked else []

    def has_to_learn(self, topic: Topic) -> bool:
        """Is it not known yet what records of this queue say of their delays? Then storage is asked."""
        if self._unlearned(topic) is None:
            return False
        self._wanted[topic.topic_id] = topic
        return True

    def wants_to_learn(self, topic: Topic) -> bool:
        """The same, unless that could not be read."""
        return topic.topic_id not in self._damaged and self.has_to_learn(topic)

    def _unlearned(self, topic: Topic) -> Learn | None:
        own, levels = self._registry.own(topic), levels_of(topic)
        if own.levels != levels:
            own.unmark(levels)
        if topic.marked_to <= own.marked_to or topic.head_seq <= own.marked_to:
            return None
        first = max(own.marked_to + 1, front_of(topic))
        if not own.ready_index.is_awaiting:
            first = max(first, own.cursor)
        if first > min(topic.marked_to, topic.head_seq):
            return None
        return Learn(first, topic.head_seq)

    def _learned(self, question: Question, found: Learned | CorruptData) -> None:
        topic, learn = question.topic, question.learn
        if self._registry.directory.by_id.get(topic.topic_id) is not topic or learn is None:
            return
        if learn.has_sizes:
            # What lies beside damage may be whole: then each ack asks for its own jobs alone.
            if not isinstance(found, CorruptData):
                self._sizes.learn(topic.topic_id, *found.sizes)
        elif learn.put:
            # The age of a record that cannot be read is not known.
            put = (0, 0) if isinstance(found, CorruptData) else (learn.put, found.put_us)
            self._put_us[learn.of] = put
        elif isinstance(found, CorruptData):
            self._damaged[topic.topic_id] = found
            self._waiting.dismiss(damage_of(topic, found), topic.topic_id)
        else:
            marks = marks_of(found.marks, levels_of(topic))
            self._registry.own(topic).feed(marks, live_of(topic), learn.last, self._registry.now_ms)
            self._waiting.wake(topic.topic_id)

    def take_put_ms(self, topic: Topic, group: ConsumerGroup) -> int | None:
        """When the oldest ready one was put, as far as that is known; None = it is not, or there is none."""
        seq = group.oldest_ready(live_of(topic))
        known, put_us = self._put_us.pop(key_of(topic, group), (0, 0))
        if seq is None:
            return None
        if known == seq:
            return put_us // 1_000 - self._registry.ahead_ms
        return group.ages.put_ms(seq)

    def forget(self, topic: Topic) -> None:
        """The topic is no more."""
        self._damaged.pop(topic.topic_id, None)
        for key in (topic.topic_id, *topic.groups):
            self._put_us.pop(key, None)
