"""Leases of the queues and consumer groups of one shard. Pure.

Queues and groups share the handlers of requests. A queue uses the unnamed default group of its topic, and an
ack of this group deletes the job. All other differences are data of the group (ringlog/leases/group.py),
which decides each change. If the changes of a group are logged, the reply waits for the log. A retry under
the same call number gets the earlier reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.commit.hot_tail import HotTail
from ringlog.actors.wal_shard.leases.claim_requests import ClaimRequests
from ringlog.actors.wal_shard.leases.consumer_groups import ConsumerGroups
from ringlog.actors.wal_shard.leases.dead_letter_requests import DeadLetterRequests
from ringlog.actors.wal_shard.leases.delivery_attributes import DeliveryAttributeLoader
from ringlog.actors.wal_shard.leases.job_deletes import JobDeletes
from ringlog.actors.wal_shard.leases.job_sizes import JobSizes
from ringlog.actors.wal_shard.leases.lease_queries import LeaseQueries
from ringlog.actors.wal_shard.leases.lease_registry import LeaseRegistry, key_of
from ringlog.actors.wal_shard.leases.lease_requests import checked_node, entries_in, reply_of
from ringlog.actors.wal_shard.leases.lease_updates import LeaseUpdates
from ringlog.actors.wal_shard.leases.queue_fast_path import QueueFastPath
from ringlog.actors.wal_shard.leases.reply_cache import CancelledClaims, ReplyCache
from ringlog.actors.wal_shard.leases.waiting_claims import WaitingClaims
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import GroupNotFound, ShuttingDown, TopicNotFound
from ringlog.leases.change import SPAN_ROW, LeaseChange, Op
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.types import LeaseMatch
from ringlog.topic.config import QUEUE
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import retained_from
from ringlog.topic.state import ShardTopic

_Kept = TypeVar("_Kept", m.ClaimReply, m.AckReply, m.NackReply, m.ExtendReply, m.RejectReply)
CLOCK_STEP_MS = 10
"""Minimum change of the clock offset that counts as a step of the wall clock.
Smaller changes arise because the two clocks are read one after the other."""


class ShardLeases:
    """The leases of one shard, and the handlers of requests about them."""

    def __init__(self, incarnation: int, directory: TopicDirectory, removals: Removals) -> None:
        self.registry: LeaseRegistry = LeaseRegistry(incarnation, directory)
        self.removals = removals
        self.replies: ReplyCache = ReplyCache()
        self.cancelled_claims: CancelledClaims = CancelledClaims()
        self.waiting_claims: WaitingClaims = WaitingClaims()
        """Waiting claims, by `key_of` their group."""
        self.recent_records: HotTail = HotTail()
        self.sizes: JobSizes = JobSizes()
        self.delivery_attributes: DeliveryAttributeLoader = DeliveryAttributeLoader(
            self.registry, removals, self.waiting_claims, self.sizes
        )
        self.deletes: JobDeletes = JobDeletes(incarnation, self)
        self.fast_path: QueueFastPath = QueueFastPath(self)
        self.exhausted_total: int = 0
        """Number of records exhausted by claims and rejects in this incarnation.
        The scheduler that moves dead letters checks whether it has grown. Exhausted records of groups are
        also found by the metrics samples."""
        removals.removed.subscribe(self.registry.apply_removal)
        self.wall_us: int = 0
        """Current wall-clock time in microseconds.
        Commit times and expiry times of records use this clock."""
        self.claims: ClaimRequests = ClaimRequests(self)
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], m.Message | None]
        ] = {
            **self.claims.handlers,
            **LeaseUpdates(self).handlers,
            **LeaseQueries(self).handlers,
            **DeadLetterRequests(self).handlers,
            **ConsumerGroups(self).handlers,
        }

    # -- lookup and retries ---------------------------------------------------------------------------

    def find(self, message: Any) -> tuple[ShardTopic, ConsumerGroup]:
        """Return the topic and the group that a request names. Raise Internal if its records are damaged."""
        found = self.registry.find(message)
        self.delivery_attributes.require_undamaged(*found)
        return found

    def matched(self, message: Any, now_us: int) -> tuple[ShardTopic, ConsumerGroup, LeaseMatch]:
        """Return the topic and the group of a request, and which of its leases still exist."""
        topic, group = self.find(message)
        node = checked_node(message)
        seqs, tokens = entries_in(message.seqs, message.tokens)
        return topic, group, group.match(seqs, tokens, node, now_us // 1_000)

    def previous_reply(
        self, topic: ShardTopic, group: ConsumerGroup, call: int, named: bytes = b""
    ) -> m.Message | None:
        """Return the earlier reply to a request with this call number, or None if it is new.

        `named` contains the seqs of the request, 8 bytes each.
        """
        reply = self.replies.get(call) if group.is_default_group else None
        if reply is None and (change := group.recent_calls.find(call)) is not None:
            reply = reply_of(topic, group, change, len(named) // 8)
        return reply

    def remember_reply(self, group: ConsumerGroup, call: int, reply: _Kept) -> _Kept:
        """Count a reply of a queue and remember it for retries.

        Named groups remember their changes themselves.
        """
        if group.is_default_group:
            self.registry.queue_metrics.count_reply(reply)
            if call:
                self.replies.remember_reply(call, reply)
        return reply

    def knows_call(self, call: int) -> bool:
        """Return True if a request about a queue used this call number before."""
        return call in self.replies or self.waiting_claims.has(call)

    def is_cancelled(self, group: ConsumerGroup, message: m.Claim | m.Steal | m.AckAndClaim) -> bool:
        """Return True if the client has cancelled this claim. It must not lease anything any more."""
        if self.cancelled_claims.has(message.call, message.node):
            return True
        change = group.recent_calls.find(message.call)
        return change is not None and change.op == Op.UNDONE and change.node == message.node

    def count_exhausted(self, change: LeaseChange | None) -> None:
        """Add the jobs that a claim exhausted to `exhausted_total`."""
        if change is not None and change.exhausted:
            self.exhausted_total += sum(change.exhausted[1::SPAN_ROW])

    def on_capacity_freed(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Wake claims of a group that made progress, and request retention that waited for it."""
        self.waiting_claims.wake(key_of(topic, group))
        if topic.retained_at:
            first, _ = retained_from(topic)
            if not first or first > topic.retained_at:
                self.removals.schedule.request(topic)

    def fail_waiting_claims(self) -> None:
        """Fail all waiting claims because the shard stops. Clients retry them with the next incarnation."""
        self.waiting_claims.fail_claims(ShuttingDown("the shard is shutting down, retry later"))

    # -- topics and time ------------------------------------------------------------------------------

    def tick(self, now_us: int, wall_us: int, monotonic_ns: int) -> None:
        """Set the current times: `now_us` is the clock of leases, `wall_us` the wall clock."""
        registry, wall_clock_offset_ms = self.registry, (wall_us - now_us) // 1_000
        if abs(wall_clock_offset_ms - registry.wall_clock_offset_ms) >= CLOCK_STEP_MS:
            # The wall clock was set. Records with a `not_before` may be ready earlier or later than planned.
            registry.wall_clock_offset_ms = wall_clock_offset_ms
            for topic, group in registry:
                group.wall_clock_offset_ms = wall_clock_offset_ms
                self.waiting_claims.wake(key_of(topic, group))
        registry.now_ms = now_us // 1_000
        self.wall_us = self.delivery_attributes.wall_us = wall_us
        self.waiting_claims.now_ns = monotonic_ns

    def on_publish(self, topic: ShardTopic) -> None:
        """Record the enqueue time of staged records and wake the topic's groups, just before publication."""
        is_more, first = topic.next_seq > topic.head_seq + 1, topic.head_seq + 1
        if is_more and topic.config.type == QUEUE:
            self.registry.default_group(topic).enqueue_times.record_enqueue(first, self.registry.now_ms)
        self.waiting_claims.wake(topic.topic_id)
        for number, group in topic.groups.items():
            if is_more and group.is_queue_mode:
                group.enqueue_times.record_enqueue(first, self.registry.now_ms)
            self.waiting_claims.wake(number)

    def apply_config(self, topic: ShardTopic, batch: CommitBatch, now_us: int) -> None:
        """Apply a changed and logged topic config to the topic's queue."""
        own = self.registry.apply_config(topic, batch, now_us // 1_000)
        if own is not None:
            self.waiting_claims.schedule_wakeup(key_of(topic, own), own.next_due_ms())
            self.waiting_claims.wake(topic.topic_id)

    def forget_topic(self, topic: ShardTopic) -> None:
        """Drop the groups and cached data of a deleted topic, and fail its waiting claims."""
        for group in self.registry.forget(topic):
            self.forget_group(topic, group)
        self.delivery_attributes.forget(topic.topic_id)
        self.sizes.forget(topic.topic_id)
        self.recent_records.forget(topic.topic_id)
        self.waiting_claims.fail_claims(TopicNotFound("no such topic", topic=topic.name), topic.topic_id)

    def forget_group(self, topic: ShardTopic, group: ConsumerGroup) -> None:
        """Fail the waiting claims of a deleted named group."""
        gone = GroupNotFound("no such group", topic=topic.name, group=group.config.key)
        self.waiting_claims.fail_claims(gone, group.number)
        self.delivery_attributes.forget(group.number)
