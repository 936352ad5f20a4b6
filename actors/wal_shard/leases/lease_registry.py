"""Registry of the lease tables of one shard, with their logging and replay. Pure.

Each queue has a default group, whose name is empty. It is created at the first request for the queue, and
exists only in memory. If the topic has `leases_durable`, the changes of its default group are logged, and its
state is stored with the topic and in the topic's snapshot row. Named groups are always logged and stored in
this way.

A change is one frame of the log. The reply follows when the change is as durable as the topic's class
requires (Q6, CG3). Acks of a queue are logged as deletions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.control_records import frame_of
from ringlog.actors.wal_shard.leases.lease_requests import backoff_of, live_of
from ringlog.actors.wal_shard.metrics.group_metrics import GroupMetrics
from ringlog.actors.wal_shard.metrics.queue_metrics import QueueMetrics
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
    m.GroupOpen, m.GroupLeave, m.GroupSeek, m.GroupTakeOver, m.GroupCommit, m.GroupDelete, m.Redeliver,
)  # fmt: skip
"""Requests that always write to the log."""
_DELETES = (m.Ack, m.AckAndClaim)
"""Requests that log a change of a named group, or a deletion of jobs."""
_CHANGES = (m.Claim, m.Steal, m.Nack, m.Extend, m.Reject)
"""Requests that log a change if the changes of their group are logged."""
_SYNCED = frozenset({Op.CREATED, Op.SEEK, Op.TAKEN_OVER, Op.REMOVED, Op.REDELIVERED, Op.SNAPSHOT})
"""Changes that are synced whatever the topic's class is, like the creation of a topic.
They define a group or move it. A redelivery is synced because its dead letter is deleted afterwards."""
_RUN_BYTES = DURABLE_LEASE_BYTES + NODE_BYTES_MAX + 32
"""Maximum log bytes of one run when existing leases become durable."""
_FAILURE_BYTES = DEAD_LETTER_REASON_BYTES_MAX + 32
"""Maximum log bytes of the failure reason of one job when existing leases become durable."""


class LeaseRegistry:
    """The lease tables of one shard: default groups of queues, and named groups."""

    def __init__(self, incarnation: int, directory: TopicDirectory) -> None:
        self.directory = directory
        self._own_tokens = LeaseTokens(incarnation)
        self.tokens: LeaseTokens = LeaseTokens(incarnation)
        """Lease tokens of named groups.
        They use the upper half of the numbers and queues the lower half, so no token is issued twice (Q3)."""
        self.tokens.allocate(NUMBER_MAX // 2)
        self._own: dict[int, ConsumerGroup] = {}
        self._topic_of: dict[int, ShardTopic] = {}
        """Topics by the number of their named groups."""
        self.queue_metrics: QueueMetrics = QueueMetrics()
        self.group_metrics: GroupMetrics = GroupMetrics()
        self.has_dead_letter_mover = False
        """True if a scheduler moves exhausted records to dead-letter topics.
        Without one, they are redelivered forever."""
        self.wall_clock_offset_ms = self.now_ms = 0
        """Wall clock minus the clock of leases, and the current time of the clock of leases; milliseconds."""

    def __iter__(self) -> Iterator[tuple[ShardTopic, ConsumerGroup]]:
        for topic_id, own in self._own.items():
            yield self.directory.by_id[topic_id], own
        for number, topic in self._topic_of.items():
            yield topic, topic.groups[number]

    # -- lookup ---------------------------------------------------------------------------------------

    def topic_of(self, message: Any) -> ShardTopic:
        """Return the topic that a request names. Raise TopicNotFound."""
        topic = self.directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        return topic

    def queue_of(self, message: Any) -> ShardTopic:
        """Return the queue that a request names. Raise TopicNotFound or NotAQueue."""
        topic = self.topic_of(message)
        if topic.config.type != QUEUE:
            raise NotAQueue(
                "the topic is not a queue: use a queue, or name a consumer group", topic=topic.name
            )
        return topic

    def find(self, message: Any) -> tuple[ShardTopic, ConsumerGroup]:
        """Return the topic and the group that a request names.

        An empty group name means the queue's default group. A named group must be in queue mode.
        """
        if message.group:
            return self.find_named(message, Mode.QUEUE)
        topic = self.queue_of(message)
        _require_call(message)
        return topic, self.default_group(topic)

    def find_named(self, message: Any, mode: Mode | None = None) -> tuple[ShardTopic, ConsumerGroup]:
        """Return the topic and the named group that a request names.

        Raise GroupNotFound, or GroupIncompatible if `mode` is given and differs from the group's mode.
        """
        topic = self.topic_of(message)
        group = find_group(topic, message.group)
        if group is None:
            raise GroupNotFound("no such group", topic=topic.name, group=message.group)
        _require_call(message)
        if mode is not None and group.config.mode != mode:
            raise GroupIncompatible(
                "the request does not match the mode of the group", topic=topic.name, group=message.group,
                mode=group.config.mode.name.lower(),
            )  # fmt: skip
        return topic, group

    def find_by_key(self, key: int) -> tuple[ShardTopic, ConsumerGroup] | None:
        """Return the topic and the group with this key (see `key_of`), or None if it was deleted."""
        topic = self._topic_of.get(key)
        if topic is not None:
            return topic, topic.groups[key]
        own = self._own.get(key)
        return None if own is None else (self.directory.by_id[key], own)

    def find_default_group(self, topic_id: int) -> ConsumerGroup | None:
        """Return a queue's default group, or None if the queue has had no request yet."""
        return self._own.get(topic_id)

    def default_group(self, topic: ShardTopic) -> ConsumerGroup:
        """Return a queue's default group. Create it if necessary."""
        own = self._own.get(topic.topic_id)
        return self._adopt(topic, ConsumerGroup(tokens=self._own_tokens)) if own is None else own

    def with_exhausted(self, after: int) -> list[int]:
        """Return the keys above `after` of groups that may have exhausted records, in ascending order."""
        own = sorted(key for key, group in self._own.items() if group.exhausted and key > after)
        return own + self.group_metrics.with_exhausted(after)

    def process_ids(self) -> Iterator[ProcessId]:
        """Yield the known processes that hold leases."""
        for _, group in self:
            yield from group.processes.by_number.values()

    def dead_letters_of(self, topic: ShardTopic, group: ConsumerGroup) -> str:
        """Return the name of the dead-letter topic, or "" if exhausted records cannot be moved."""
        if not self.has_dead_letter_mover:
            return ""
        return (topic.config.dead_letter or "") if group.is_default_group else group.config.dead_letter

    def max_deliveries_of(self, topic: ShardTopic) -> int:
        """Return the maximum number of deliveries of a job of a queue; 0 means no limit."""
        return topic.config.max_deliveries if self.has_dead_letter_mover and topic.config.dead_letter else 0

    def room_for(self, group: ConsumerGroup, messages: Sequence[m.Claim | m.Steal]) -> list[bool]:
        """Return for each claim whether its node may hold leases. A snapshot limits the number of holders.

        The limit exists only for default groups with durable leases.
        """
        if not group.is_default_group or not group.is_logged:
            return [True] * len(messages)
        return group.room_for(each.node for each in messages)

    # -- registration ---------------------------------------------------------------------------------

    def _adopt(self, topic: ShardTopic, own: ConsumerGroup) -> ConsumerGroup:
        self._own[topic.topic_id] = own
        own.backoff, own.wall_clock_offset_ms = backoff_of(topic), self.wall_clock_offset_ms
        # The enqueue times of existing jobs are unknown; they are only known to be earlier than now.
        own.enqueue_times.record_enqueue(topic.head_seq + 1, self.now_ms)
        self.queue_metrics.add_queue(topic, own)
        self._begin_log(topic, own)
        return own

    def add(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Add a new named group to a topic."""
        topic.groups = {**topic.groups, group.number: group}
        self._register(topic, group)

    def _register(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        self._topic_of[group.number] = topic
        group.wall_clock_offset_ms = self.wall_clock_offset_ms
        group.enqueue_times.record_enqueue(topic.head_seq + 1, self.now_ms)
        self.group_metrics.add_group(topic, group)
        group.set_dead_lettering(self.has_dead_letter_mover)

    def remove(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Remove a named group from its topic."""
        topic.groups = {number: each for number, each in topic.groups.items() if each is not group}
        self._forget(group)

    def forget(self, topic: ShardTopic) -> list[ConsumerGroup]:
        """Drop the groups of a deleted topic. Return its named groups."""
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
        """Register the recovered groups, after the directory is complete.

        Durable leases of the previous incarnation stay valid. Records that left their topic lose their
        leases.
        """
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
        """Remove deleted records from the lease tables of their topic."""
        floor = max(removal.cap_floor, removal.ttl_floor)
        own = self._own.get(topic.topic_id)
        if own is not None:
            if floor:
                own.apply_removal(floor, None, on_request=False)
            own.apply_removal(removal.delete_floor, removal.seqs, on_request=on_request)
        for group in topic.groups.values():
            group.apply_removal(max(floor, removal.delete_floor), removal.seqs)

    def check(self) -> None:
        """Check the invariants of every group. Raise InvariantViolation."""
        for _, group in self:
            group.check()

    # -- logging --------------------------------------------------------------------------------------

    def log(
        self, topic: ShardTopic, group: ConsumerGroup, change: LeaseChange | None, batch: CommitBatch | None
    ) -> None:
        """Stage the log frame of a change, if the changes of this group are logged."""
        if change is None or not group.is_logged:
            return
        assert batch is not None, "claims of such a group wait until something can be logged"
        is_synced = topic.config.durability == Durability.FSYNC or change.op in _SYNCED
        batch.add_control(frame_of(change, topic.topic_id, topic.epoch), topic, sync=is_synced)

    def may_log(self, message: Any) -> bool:
        """Return True if this request may write to the log."""
        if not isinstance(message, _CHANGES):
            return isinstance(message, (*_OF_GROUPS, *_DELETES, m.ConfirmDeadLettered))
        if message.group:
            return True
        topic = self.directory.find(message.topic)
        return topic is not None and topic.config.logs_leases

    def bytes_of(self, message: Any) -> int:
        """Return the maximum log bytes of the lease changes of a request."""
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

    # -- changes of durability ------------------------------------------------------------------------

    def require_room(self, topic: ShardTopic, config: TopicConfig) -> None:
        """Raise Throttled if `config` makes leases durable while too many jobs are leased or delayed."""
        own = self._own.get(topic.topic_id)
        if own is None or topic.config.logs_leases or not config.logs_leases:
            return
        if own.runs.jobs > DURABLE_LEASES_MAX:
            raise Throttled(
                f"leases_durable needs at most {DURABLE_LEASES_MAX} leased or delayed jobs, retry later",
                limit="durable_leases", jobs=own.runs.jobs, max=DURABLE_LEASES_MAX,
                retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip

    def apply_config(self, topic: ShardTopic, batch: CommitBatch, now_ms: int) -> ConsumerGroup | None:
        """Apply a changed and logged topic config to its queue. Return the queue's default group, or None.

        If leases became durable, the complete state of the default group is logged. If leases are no longer
        durable, they stay unchanged in memory.
        """
        own = self._own.get(topic.topic_id)
        if own is not None:
            own.backoff, own.wall_clock_offset_ms = backoff_of(topic), self.wall_clock_offset_ms
        if topic.config.logs_leases and topic.leases is None and own is not None:
            own.apply_expirations(now_ms)
            self._begin_log(topic, own)
            for change in own.snapshot_changes(now_ms):
                self.log(topic, own, change, batch)
        elif not topic.config.logs_leases and topic.leases is not None:
            topic.leases.end_log()
            topic.leases = None
        return own


def key_of(topic: ShardTopic, group: ConsumerGroup) -> int:
    """Return the key of a group, unique in its shard.

    The key of a named group is its number, which is larger than any topic id. The key of a default group is
    its topic id.
    """
    return group.number or topic.topic_id


def find_group(topic: ShardTopic, key: str) -> ConsumerGroup | None:
    """Return the named group with this key, or None."""
    return next((each for each in topic.groups.values() if each.config.key == key), None)


def _require_call(message: Any) -> None:
    if getattr(message, "call", 0) < 0:
        raise InvalidRequest(f"call must be >= 0, got {message.call}", topic=message.topic, field="call")


# -- replay -------------------------------------------------------------------------------------------


def replay_change(topic: ShardTopic, change: LeaseChange) -> None:
    """Apply a logged change to its group, unless the topic's state includes it already."""
    group = topic.groups.get(change.group)
    if not change.group:
        if topic.leases is None:
            topic.leases = new_durable_group()
        topic.leases.backoff = backoff_of(topic)
        topic.leases.replay(change)
    elif change.op == Op.CREATED:
        if change.config is None:
            raise CorruptData(
                "creation record of a consumer group has no config", topic=topic.name, group=change.group
            )
        if group is None:
            topic.groups = {**topic.groups, change.group: create_group(change)}
    elif change.op == Op.REMOVED:
        topic.groups = {number: each for number, each in topic.groups.items() if number != change.group}
    elif group is not None:
        group.replay(change)


def replay_config(topic: ShardTopic) -> None:
    """Drop the durable leases of a topic if its new config makes leases non-durable.

    The log contains no lease changes from then on. When leases become durable again, it contains their
    complete state.
    """
    if not topic.config.logs_leases:
        topic.leases = None
