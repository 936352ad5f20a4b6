"""Acks of a queue, which delete jobs in two steps, like every deletion. Pure.

The core first queries storage for the sizes of the jobs, unless they are known. It then stages the deletion,
and the reply follows with its commit batch (Q4).

Leases that are not durable do not survive a restart: every live job is ready again. A worker may then resend
an ack whose deletion became durable before the restart. The job counts as acked if it was deleted on request,
its token belongs to an earlier incarnation, and the worker first sent the ack in time. The length of the
outage does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_requests import (
    checked_node,
    entries_in,
    live_count,
    seqs_to_bitmap,
    seqs_to_bytes,
    was_deleted,
)
from ringlog.actors.wal_shard.metrics.queue_metrics import DEAD_LETTERED
from ringlog.actors.wal_shard.retention.storage_query import RecordQuery, StorageQuery
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Internal, InvalidRequest, Refused, TopicNotFound
from ringlog.leases.tokens import incarnation_of
from ringlog.leases.types import I64, LeaseMatch
from ringlog.topic.retention import Removal, first_live_seq
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases


@dataclass(slots=True)
class _PendingDelete:
    """A request that deletes jobs and waits for a reply of storage about them."""

    message: m.Ack | m.ConfirmDeadLettered
    topic: ShardTopic
    version: int
    changes: int
    matched: LeaseMatch


class JobDeletes:
    """Deletes acked and dead-lettered jobs of one shard's queues."""

    def __init__(self, incarnation: int, leases: ShardLeases) -> None:
        self._incarnation = incarnation
        self._leases, self._registry, self._removals = leases, leases.registry, leases.removals
        self._decided: _PendingDelete | None = None
        self._sizes_asked: m.Message | None = None
        """The request for which storage was queried for sizes. There is one such query for each request."""

    # -- storage queries ------------------------------------------------------------------------------

    def questions_for(self, message: m.Ack | m.ConfirmDeadLettered, now_ms: int) -> list[StorageQuery]:
        """Return the storage queries that a deletion of jobs needs first.

        The list is empty if everything is known, or if the request deletes nothing.
        """
        if self._still_holds(message, now_ms):
            return []
        self.cancel_pending()
        self._removals.cancel_delete()
        try:
            topic, matched = self._to_delete(message, now_ms)
        except Refused:
            return []  # The handler of the request raises the same error.
        if not len(matched.leased):
            return []
        numbers = seqs_to_bitmap(matched.leased)
        removal = self._known_removal(topic, matched.leased, numbers)
        if removal is None and self._sizes_asked is not message:
            self._sizes_asked = message
            span = self._leases.sizes.block_range(matched.leased, topic.head_seq)
            if span is not None and topic.config.durability != Durability.EPHEMERAL:
                query = RecordQuery(*span, topic.topic_id, has_sizes=True)
                return self._removals.record_queries([(topic, query)], self._leases.wall_us)
        changes = self._registry.default_group(topic).version
        self._decided = _PendingDelete(message, topic, topic.version, changes, matched)
        if removal is None:
            return [self._removals.question_about(topic, numbers, self._leases.wall_us)]
        self._removals.set_delete_result(topic, removal)
        return []

    def sizes_for(self, message: m.AckAndClaim) -> list[StorageQuery]:
        """Return the storage queries for the sizes of jobs that the fast path acks.

        Query once for a request.
        """
        topic = self._registry.directory.find(message.topic)
        if (
            topic is None
            or self._sizes_asked is message
            or self._registry.find_default_group(topic.topic_id) is None
        ):
            return []
        try:
            seqs, _ = entries_in(message.seqs, message.tokens)
        except Refused:
            return []  # The handler of the request raises the same error.
        is_there = (
            len(seqs) > 0 and first_live_seq(topic) <= int(seqs.min()) and int(seqs.max()) <= topic.head_seq
        )
        span = self._leases.sizes.block_range(seqs, topic.head_seq) if is_there else None
        if span is None or topic.config.durability == Durability.EPHEMERAL:
            return []
        if self._accounted(topic, seqs) is not None:
            return []
        self._sizes_asked = message
        return self._removals.record_queries(
            [(topic, RecordQuery(*span, topic.topic_id, has_sizes=True))], self._leases.wall_us
        )

    def _known_removal(self, topic: ShardTopic, seqs: I64, numbers: BitMap64) -> Removal | None:
        """Return the removal without a storage query, or None if storage must be queried.

        Ephemeral topics always need a query. So do jobs that are below the first live seq or already deleted.
        """
        if topic.config.durability == Durability.EPHEMERAL or int(seqs[0]) < first_live_seq(topic):
            return None
        if topic.dead is not None and topic.dead.intersect(numbers):
            return None
        accounted = self._accounted(topic, seqs)
        if accounted is None:
            return None
        return Removal(seqs=numbers, records=len(seqs), bytes=accounted)

    def _accounted(self, topic: ShardTopic, seqs: I64) -> int | None:
        """Return the total bytes of these jobs; None if the size of one is unknown.

        `seqs` must be ascending and not empty.
        """
        first, count = int(seqs[0]), len(seqs)
        total = None
        if int(seqs[-1]) - first == count - 1:
            total = self._leases.recent_records.total_of(topic, first, count)
        return self._leases.sizes.total(topic.topic_id, seqs) if total is None else total

    def _to_delete(
        self, message: m.Ack | m.ConfirmDeadLettered, now_ms: int
    ) -> tuple[ShardTopic, LeaseMatch]:
        if isinstance(message, m.ConfirmDeadLettered):
            return self._exhausted(message)
        topic, matched = self._matched(message, now_ms)
        if message.call in self._leases.replies:
            return topic, LeaseMatch(matched.leased[:0], matched.gone[:0], matched.skipped)
        return topic, matched

    def _matched(self, message: m.Ack, now_ms: int) -> tuple[ShardTopic, LeaseMatch]:
        topic, own = self._registry.find(message)
        self._leases.delivery_attributes.require_undamaged(topic, own)
        node = checked_node(message)
        return topic, own.match(*entries_in(message.seqs, message.tokens), node, now_ms)

    def _exhausted(self, message: m.ConfirmDeadLettered) -> tuple[ShardTopic, LeaseMatch]:
        topic = self._registry.queue_of(message)
        if topic.topic_id != message.topic_id:
            raise TopicNotFound("no such topic", topic=message.topic)
        if len(message.seqs) & 7:
            raise InvalidRequest(
                f"length of seqs must be a multiple of 8 bytes, got {len(message.seqs)}", field="seqs",
                bytes=len(message.seqs),
            )  # fmt: skip
        named = np.unique(np.frombuffer(message.seqs, dtype="<i8"))
        seqs = self._registry.default_group(topic).filter_exhausted(named)
        return topic, LeaseMatch(seqs, seqs[:0], seqs[:0])

    def _still_holds(self, message: m.Ack | m.ConfirmDeadLettered, now_ms: int) -> bool:
        """Return True if this request was decided and the queue has not changed since then."""
        decided = self._decided
        if decided is None or decided.message is not message:
            return False
        own = self._registry.default_group(decided.topic)
        own.apply_expirations(now_ms)
        return (own.version, decided.topic.version) == (decided.changes, decided.version)

    def cancel_pending(self) -> None:
        """Drop the pending deletion: the request cannot be logged, or is invalid. Nothing changes."""
        self._decided = None

    # -- deletion -------------------------------------------------------------------------------------

    def ack(self, message: m.Ack, batch: CommitBatch, now_ms: int) -> m.AckReply:
        """Delete the acked jobs. The caller has checked that the request is not a retry."""
        decided, self._decided = self._decided, None
        if decided is None:
            topic, matched = self._matched(message, now_ms)
        else:
            topic, matched = decided.topic, decided.matched
        own, found = self._registry.default_group(topic), self._found_out(matched)
        own.finish_jobs(matched)
        self._delete(topic, found, batch)
        skipped = self._unless_gone(topic, message, matched.skipped)
        acked, counts = len(message.seqs) // 8 - len(skipped), own.counts(live_count(topic))
        return m.AckReply(topic.name, acked, seqs_to_bytes(skipped), counts.ready, counts.in_flight)

    def confirm_dead_lettered(
        self, message: m.ConfirmDeadLettered, batch: CommitBatch, now_ms: int
    ) -> m.ConfirmReply:
        """Delete exhausted jobs whose dead letters are durable (Q11)."""
        decided, self._decided = self._decided, None
        topic, matched = (decided.topic, decided.matched) if decided else self._exhausted(message)
        self._delete(topic, self._found_out(matched), batch)
        own = self._registry.default_group(topic)
        self._registry.log(topic, own, own.count_dead_lettered(len(matched.leased), now_ms), batch)
        self._registry.queue_metrics.outcomes[DEAD_LETTERED] += len(matched.leased)
        return m.ConfirmReply(topic.name, len(matched.leased))

    def _found_out(self, matched: LeaseMatch) -> Removal | None:
        """Return the decided removal of these jobs. Raise Internal if stored records are damaged."""
        found = self._removals.take_delete()
        if isinstance(found, CorruptData):
            raise Internal("stored records are damaged, so no job was deleted", reason=str(found))
        if found is None and len(matched.leased):
            raise Internal("internal error: job deletion without a storage result")
        return found

    def _delete(self, topic: ShardTopic, found: Removal | None, batch: CommitBatch) -> None:
        if found is not None:
            is_synced = topic.config.durability == Durability.FSYNC
            self._removals.stage_removal(topic, found, batch, sync=is_synced, on_request=True)

    def _unless_gone(self, topic: ShardTopic, message: m.Ack, skipped: I64) -> I64:
        """Return `skipped` without the jobs that an earlier incarnation acked (see the module)."""
        if not message.tokens or not len(skipped) or not message.in_time:
            return skipped
        seqs, tokens = entries_in(message.seqs, message.tokens)
        assert tokens is not None
        token_of = dict(zip(seqs.tolist(), tokens.tolist(), strict=True))
        is_gone = [
            0 < incarnation_of(token_of[seq]) < self._incarnation and was_deleted(topic, seq)
            for seq in skipped.tolist()
        ]
        return skipped[~np.array(is_gone, dtype=np.bool_)]
