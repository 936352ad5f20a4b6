"""Registry of the lease tables of one shard: the queues' own and those of named groups; their log and replay.
Pure.

A queue's own group (its name is empty) is made when the queue is first asked for something. It is memory,
unless the topic has `leases_durable`: then its changes are logged, and it lies with its topic, in its row of
a snapshot too. A named group always does. A change is one frame of the log, as durable as the topic's class
asks before a reply says so (QL-16). Acks of a queue are deletions, and logged as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actors.wal_shard.commit.commit_batch import CommitBatch
from actors.wal_shard.commit.control_records import frame_of
from actors.wal_shard.leases.lease_requests import backoff_of, live_of
from actors.wal_shard.metrics.group_metrics import GroupMetrics
from actors.wal_shard.metrics.queue_metrics import QueueMetrics
from ringlog.envelope import messages as m
from ringlog.errors import (
    CorruptData,
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    NotAQueue,
    Throttled,
    TopicNotFound,
)
from ringlog.leases.change import LeaseChange, Mode, Op
from ringlog.leases.group import ConsumerGroup, create_group
from ringlog.leases.holders import ProcessId
from ringlog.leases.snapshot import new_durable_group
from ringlog.leases.tokens import NUMBER_MAX, LeaseTokens
from ringlog.limits import (
    DEAD_LETTER_REASON_BYTES_MAX,
    DURABLE_CHANGE_BYTES_MAX,
    DURABLE_LEASE_BYTES,
    DURABLE_LEASES_MAX,
    GROUP_CHANGE_BYTES_MAX,
    NODE_BYTES_MAX,
    PRESSURE_RETRY_MS,
)
from ringlog.topic.config import QUEUE, TopicConfig
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import Removal
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

_OF_GROUPS = (
    m.GroupOpen, m.GroupLeave, m.GroupSeek, m.GroupTake, m.GroupCommit, m.GroupDelete, m.Redeliver,
)  # fmt: skip
"""Requests that add to the log, whatever group they are about."""
_DELETES = (m.Ack, m.AckAndClaim)
"""Requests that add a change of a named group to the log, or a deletion of jobs."""
_CHANGES = (m.Claim, m.Steal, m.Nack, m.Extend, m.Reject)
"""Requests that add a change to the log, where changes are logged."""
_SYNCED = frozenset({Op.CREATED, Op.SEEK, Op.TAKEN_OVER, Op.REMOVED, Op.REDELIVERED, Op.SNAPSHOT})
"""What a group is, and where it was told to be, is synced in any case, as a topic's creation is; and what
comes back from elsewhere, where it is deleted then."""
_RUN_BYTES = DURABLE_LEASE_BYTES + NODE_BYTES_MAX + 32
"""Most bytes of a run that is written when leases become durable."""
_FAILURE_BYTES = DEAD_LETTER_REASON_BYTES_MAX + 32
"""The same of why a job failed."""


class LeaseRegistry:
    """The lease tables of one shard."""

    def __init__(self, incarnation: int, directory: TopicDirectory) -> None:
        self.directory = directory
        self._own_tokens = LeaseTokens(incarnation)
        self.tokens = LeaseTokens(incarnation)
        """Of named groups. Queues count from the other end of the same numbers: a token is never given
        twice."""
        self.tokens.allocate(NUMBER_MAX // 2)
        self._own: dict[int, ConsumerGroup] = {}
        self._topic_of: dict[int, ShardTopic] = {}
        """By the number of a named group."""
        self.queue_metrics, self.group_metrics = QueueMetrics(), GroupMetrics()
        self.has_dead_letter_mover = False
        """Is there a scheduler that moves records to the dead letters? Without one they come back forever."""
        self.wall_clock_offset_ms = self.now_ms = 0
        """Of the wall clock, against the time of leases; and that time."""

    def __iter__(self) -> Iterator[tuple[ShardTopic, ConsumerGroup]]:
        for topic_id, own in self._own.items():
            yield self.directory.by_id[topic_id], own
        for number, topic in self._topic_of.items():
            yield topic, topic.groups[number]

    # -- which one ------------------------------------------------------------------------------------

    def topic_of(self, message: Any) -> ShardTopic:
        """The topic that a request names."""
        topic = self.directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        return topic

    def queue_of(self, message: Any) -> ShardTopic:
        """The same; it has to be a queue."""
        topic = self.topic_of(message)
        if topic.config.type != QUEUE:
            raise NotAQueue("not a queue", topic=topic.name)
        return topic

    def find(self, message: Any) -> tuple[ShardTopic, ConsumerGroup]:
        """The topic that a request names and its group, which leases records; "" is the queue's own."""
        if message.group:
            return self.find_named(message, Mode.QUEUE)
        topic = self.queue_of(message)
        _require_call(message)
        return topic, self.default_group(topic)

    def find_named(self, message: Any, mode: Mode | None = None) -> tuple[ShardTopic, ConsumerGroup]:
        """The same of a group that has a name; of any mode, if none is asked for."""
        topic = self.topic_of(message)
        group = find_group(topic, message.group)
        if group is None:
            raise GroupNotFound("no such group", topic=topic.name, group=message.group)
        _require_call(message)
        if mode is not None and group.config.mode != mode:
            raise GroupIncompatible(
                "the group is of the other mode", topic=topic.name, group=message.group,
                mode=group.config.mode.name.lower(),
            )  # fmt: skip
        return topic, group

    def find_by_key(self, key: int) -> tuple[ShardTopic, ConsumerGroup] | None:
        """What `key_of` stands for, if it is there still."""
        topic = self._topic_of.get(key)
        if topic is not None:
            return topic, topic.groups[key]
        own = self._own.get(key)
        return None if own is None else (self.directory.by_id[key], own)

    def find_default_group(self, topic_id: int) -> ConsumerGroup | None:
        """A queue's own group, if the queue was asked for something before."""
        return self._own.get(topic_id)

    def default_group(self, topic: ShardTopic) -> ConsumerGroup:
        """A queue's own group."""
        own = self._own.get(topic.topic_id)
        return self._adopt(topic, ConsumerGroup(tokens=self._own_tokens)) if own is None else own

    def with_exhausted(self, after: int) -> list[int]:
        """Keys behind `after` of groups that may have something for the dead letters, ascending."""
        own = sorted(key for key, group in self._own.items() if group.exhausted and key > after)
        return own + self.group_metrics.with_exhausted(after)

    def process_ids(self) -> Iterator[ProcessId]:
        """The processes that claimed, as far as that is known."""
        for _, group in self:
            yield from group.process_by_link.values()

    def dead_letters_of(self, topic: ShardTopic, group: ConsumerGroup) -> str:
        """The topic where records go that failed too often; "" where they cannot go anywhere."""
        if not self.has_dead_letter_mover:
            return ""
        return (topic.config.dead_letter or "") if group.is_default_group else group.config.dead_letter

    def max_deliveries_of(self, topic: ShardTopic) -> int:
        """How often a job of a queue is handed out; 0 = any number of times."""
        return topic.config.max_deliveries if self.has_dead_letter_mover and topic.config.dead_letter else 0

    def room_for(self, group: ConsumerGroup, messages: Sequence[m.Claim | m.Steal]) -> list[bool]:
        """Which of these claims may be given something, for the number of holders that a snapshot names?"""
        if not group.is_default_group or not group.is_logged:
            return [True] * len(messages)
        return group.room_for(each.node for each in messages)

    # -- coming and going -----------------------------------------------------------------------------

    def _adopt(self, topic: ShardTopic, own: ConsumerGroup) -> ConsumerGroup:
        self._own[topic.topic_id] = own
        own.backoff, own.wall_clock_offset_ms = backoff_of(topic), self.wall_clock_offset_ms
        # Of jobs that were there before it is only known that they are older than this.
        own.enqueue_times.record_enqueue(topic.head_seq + 1, self.now_ms)
        self.queue_metrics.add_queue(topic, own)
        self._begin_log(topic, own)
        return own

    def add(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """A topic has one named group more."""
        topic.groups = {**topic.groups, group.number: group}
        self._register(topic, group)

    def _register(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        self._topic_of[group.number] = topic
        group.wall_clock_offset_ms = self.wall_clock_offset_ms
        group.enqueue_times.record_enqueue(topic.head_seq + 1, self.now_ms)
        self.group_metrics.add_group(topic, group)
        group.set_dead_lettering(self.has_dead_letter_mover)

    def remove(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """This named group is no more."""
        topic.groups = {number: each for number, each in topic.groups.items() if each is not group}
        self._forget(group)

    def forget(self, topic: ShardTopic) -> list[ConsumerGroup]:
        """The topic is no more; returns its named groups."""
        self._own.pop(topic.topic_id, None)
        self.queue_metrics.forget(topic.topic_id)
        groups = list(topic.groups.values())
        for group in groups:
            self._forget(group)
        return groups

    def _forget(self, group: ConsumerGroup) -> None:
        self._topic_of.pop(group.number, None)
        self.group_metrics.forget(group.number)

    def finish_recovery(self) -> None:
        """The directory is filled: leases that outlived the predecessor are held, without what left the
        topics meanwhile."""
        for topic in self.directory.by_id.values():
            for group in topic.groups.values():
                group.finish_recovery(live_of(topic), self.tokens)
                self._register(topic, group)
            if topic.leases is not None and topic.config.logs_leases:
                topic.leases.finish_recovery(live_of(topic), self._own_tokens)
                self._adopt(topic, topic.leases)
            else:
                topic.leases = None

    def apply_removal(self, topic: ShardTopic, removal: Removal, on_request: bool) -> None:
        """These records left the topic."""
        floor = max(removal.cap_floor, removal.ttl_floor)
        own = self._own.get(topic.topic_id)
        if own is not None:
            if floor:
                own.apply_removal(floor, None, on_request=False)
            own.apply_removal(removal.delete_floor, removal.seqs, on_request=on_request)
        for group in topic.groups.values():
            group.apply_removal(max(floor, removal.delete_floor), removal.seqs)

    def check(self) -> None:
        """Assert what must be true of every group."""
        for _, group in self:
            group.check()

    # -- what is logged -------------------------------------------------------------------------------

    def log(
        self, topic: ShardTopic, group: ConsumerGroup, change: LeaseChange | None, into: CommitBatch | None
    ) -> None:
        """Log what a call did to a group, where its changes are logged."""
        if change is None or not group.is_logged:
            return
        assert into is not None, "claims of such a group wait until something can be logged"
        is_synced = topic.config.durability == Durability.FSYNC or change.op in _SYNCED
        into.add_control(frame_of(change, topic.topic_id, topic.epoch), topic, sync=is_synced)

    def may_log(self, message: Any) -> bool:
        """May this request add to the log?"""
        if not isinstance(message, _CHANGES):
            return isinstance(message, (*_OF_GROUPS, *_DELETES, m.ConfirmDeadLettered))
        if message.group:
            return True
        topic = self.directory.find(message.topic)
        return topic is not None and topic.config.logs_leases

    def bytes_of(self, message: Any) -> int:
        """Most bytes that a request adds to the log for the sake of leases."""
        if isinstance(message, _OF_GROUPS):
            return GROUP_CHANGE_BYTES_MAX
        if isinstance(message, m.ConfirmDeadLettered):
            return GROUP_CHANGE_BYTES_MAX if message.number else 0
        if isinstance(message, (*_CHANGES, *_DELETES)):
            if message.group:
                return GROUP_CHANGE_BYTES_MAX * (1 + isinstance(message, m.AckAndClaim))
            return DURABLE_CHANGE_BYTES_MAX if isinstance(message, _CHANGES) else 0
        if not isinstance(message, m.TopicPut):
            return 0
        topic = self.directory.find(message.topic)
        own = self._own.get(topic.topic_id) if topic is not None else None
        if topic is None or own is None or topic.config.logs_leases:
            return 0
        known = min(own.runs.jobs, DURABLE_LEASES_MAX)
        return len(own.runs) * _RUN_BYTES + min(len(own.failures), known) * _FAILURE_BYTES

    def _begin_log(self, topic: ShardTopic, own: ConsumerGroup) -> None:
        if topic.config.logs_leases and topic.leases is None:
            own.begin_log()
            topic.leases = own

    # -- switching ------------------------------------------------------------------------------------

    def require_room(self, topic: ShardTopic, config: TopicConfig) -> None:
        """Raise Throttled when leases are to become durable and too many jobs are handed out."""
        own = self._own.get(topic.topic_id)
        if own is None or topic.config.logs_leases or not config.logs_leases:
            return
        if own.runs.jobs > DURABLE_LEASES_MAX:
            raise Throttled(
                "too many jobs are handed out to make their leases durable", limit="durable_leases",
                jobs=own.runs.jobs, max=DURABLE_LEASES_MAX, retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip

    def apply_config(self, topic: ShardTopic, into: CommitBatch, now_ms: int) -> ConsumerGroup | None:
        """The topic's config is another one, and logged: what is known of its queue follows, when leases
        became durable (QL-21); when they are no more, they stay as they are, in memory. Returns the queue's
        own group."""
        own = self._own.get(topic.topic_id)
        if own is not None:
            own.backoff, own.wall_clock_offset_ms = backoff_of(topic), self.wall_clock_offset_ms
        if topic.config.logs_leases and topic.leases is None and own is not None:
            own.apply_expirations(now_ms)
            self._begin_log(topic, own)
            for change in own.snapshot_changes(now_ms):
                self.log(topic, own, change, into)
        elif not topic.config.logs_leases and topic.leases is not None:
            topic.leases.end_log()
            topic.leases = None
        return own


def key_of(topic: ShardTopic, group: ConsumerGroup) -> int:
    """What stands for a group among all of a shard: its number, which is larger than any topic's id, or the
    id of the topic whose own group it is."""
    return group.number or topic.topic_id


def find_group(topic: ShardTopic, key: str) -> ConsumerGroup | None:
    """The named group of this key."""
    return next((each for each in topic.groups.values() if each.config.key == key), None)


def _require_call(message: Any) -> None:
    if getattr(message, "call", 0) < 0:
        raise InvalidRequest("a number is negative", topic=message.topic, field="call")


# -- replay -------------------------------------------------------------------------------------------


def replay_change(topic: ShardTopic, change: LeaseChange) -> None:
    """Apply what the log says of a group, unless the topic's state has it already."""
    group = topic.groups.get(change.group)
    if not change.group:
        if topic.leases is None:
            topic.leases = new_durable_group()
        topic.leases.backoff = backoff_of(topic)
        topic.leases.replay(change)
    elif change.op == Op.CREATED:
        if change.config is None:
            raise CorruptData("a group begins without a name", topic=topic.name, group=change.group)
        if group is None:
            topic.groups = {**topic.groups, change.group: create_group(change)}
    elif change.op == Op.REMOVED:
        topic.groups = {number: each for number, each in topic.groups.items() if number != change.group}
    elif group is not None:
        group.replay(change)


def replay_config(topic: ShardTopic) -> None:
    """The config is another one: once leases are not durable any more, the log says nothing of them. It says
    all there is again when they are."""
    if not topic.config.logs_leases:
        topic.leases = None
