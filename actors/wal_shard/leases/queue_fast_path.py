"""Fast path for common claims and acks of queues. Pure.

A worker with many small jobs sends almost only these requests. The general path checks retention, delivery
attributes, the ready index, durable leases and storage, and these checks take longer than the request itself.
The fast path skips them when they cannot matter. All other requests take the general path. Both paths give
the same results (tests/actors/test_wal_shard_queue_fast_path.py compares them).

A successful claim changes nothing in the log, so its reply is sent before the frames of the same pass are
written. The acks of one pass are collected, and staged as one removal for each topic before other requests
are processed. A claim that arrives with an ack is answered together with the ack. This combined request of a
queue has no general path: if the fast path cannot handle it, nothing of it is done.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pyroaring import BitMap64

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch
from ringlog.actors.wal_shard.leases.lease_requests import claim_reply, live_count, live_of
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.leases.change import LeaseChange
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.spans import Span
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    DURATION_MS_MAX,
    JOBS_PER_REQUEST_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    NODE_BYTES_MAX,
)
from ringlog.topic.config import QUEUE, TopicConfig
from ringlog.topic.retention import Removal, first_live_seq
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases

FastPathRequest = m.Claim | m.Ack | m.AckAndClaim
_FRAME_BYTES, _JOB_BYTES = 512, 16
"""Upper bounds of the log bytes of one removal, and of each of its jobs."""


class AckBatch:
    """Acks of one topic in the current pass of the loop."""

    __slots__ = ("answers", "bytes", "records", "spans", "topic")

    def __init__(self, topic: ShardTopic) -> None:
        self.topic: ShardTopic = topic
        self.spans: list[Span] = []
        """Half-open ranges of the acked seqs, in the order of the requests."""
        self.records: int = 0
        self.bytes: int = 0
        self.answers: list[tuple[ControlReceived, m.AckReply | m.ClaimReply]] = []

    def removal(self) -> Removal:
        """Return the removal of all acked jobs. Jobs at the front of the queue only raise the floor.

        A floor is cheaper than a set of seqs.
        """
        spans = sorted(self.spans)
        stop = first_live_seq(self.topic)
        for low, high in spans:
            if low != stop:
                break
            stop = high
        else:
            return Removal(delete_floor=stop, records=self.records, bytes=self.bytes)
        jobs = BitMap64()
        for low, high in spans:
            jobs.add_range(low, high)
        return Removal(seqs=jobs, records=self.records, bytes=self.bytes)


class QueueFastPath:
    """The fast path of one shard's queues."""

    def __init__(self, leases: ShardLeases) -> None:
        self._leases = leases
        self._acked: dict[int, AckBatch] = {}
        self.bytes: int = 0
        """Upper bound of the log bytes of the collected acks.
        The caller reserves space for one more request."""

    def __bool__(self) -> bool:
        return bool(self._acked)

    def _eligible_queue(self, message: FastPathRequest) -> tuple[ShardTopic, ConsumerGroup] | None:
        """Return the queue if no check of the general path applies to it, otherwise None."""
        leases = self._leases
        topic = leases.registry.directory.find(message.topic)
        queue = None if topic is None else leases.registry.find_default_group(topic.topic_id)
        if topic is None or queue is None or not _is_plain(topic.config):
            return None
        is_marked = (
            queue.levels
            or topic.attributes_to > queue.attributes_loaded_to
            or queue.ready_index
            or queue.exhausted
        )
        if is_marked or 0 < topic.due_us <= leases.wall_us or leases.delivery_attributes.is_damaged:
            return None
        return topic, queue

    # -- claims ---------------------------------------------------------------------------------------

    def claim(self, message: m.Claim, now_us: int) -> m.ClaimReply | None:
        """Lease jobs for this claim. Return None if it needs the general path, or if no job is ready."""
        found = self._eligible_queue(message)
        if found is None or not 0 <= message.wait_ms <= DURATION_MS_MAX or not self._is_simple_claim(message):
            return None
        claimed = self._claim(found, message, now_us)
        if claimed is None or not claimed.rows:
            return None
        topic = found[0]
        gathered = self._acked.get(topic.topic_id)
        acked = gathered.records if gathered is not None else 0
        return self._leases.remember_reply(
            found[1], message.call, claim_reply(topic, found[1], claimed, acked)
        )

    def _is_simple_claim(self, message: m.Claim | m.AckAndClaim) -> bool:
        if message.call <= 0 or min(message.max, message.pid, message.pid_started) < 0:
            return False
        if message.lease_ms and not LEASE_MS_MIN <= message.lease_ms <= LEASE_MS_MAX:
            return False
        if not 1 <= len(message.node.encode()) <= NODE_BYTES_MAX:
            return False
        leases = self._leases
        return not (
            leases.knows_call(message.call) or leases.cancelled_claims.has(message.call, message.node)
        )

    def _claim(
        self, found: tuple[ShardTopic, ConsumerGroup], message: m.Claim | m.AckAndClaim, now_us: int
    ) -> LeaseChange | None:
        topic, queue = found
        leases = self._leases
        lease_ms = message.lease_ms or topic.config.lease_ms
        claimed = queue.claim(
            live_of(topic), message.node, min(max(message.max, 1), CLAIM_JOBS_MAX), lease_ms,
            now_us // 1_000, deliveries_max=leases.registry.max_deliveries_of(topic), process_id=(message.pid,
            message.pid_started),
        )  # fmt: skip
        topic.last_read_us = leases.wall_us
        leases.count_exhausted(claimed)
        return claimed

    # -- acks -----------------------------------------------------------------------------------------

    def ack(self, message: m.Ack, event: ControlReceived, now_us: int) -> bool:
        """Collect this ack. Return False if it needs the general path."""
        found = self._eligible_queue(message) if message.call > 0 else None
        if found is None or self._leases.knows_call(message.call):
            return False
        acked = self._ack(found, message, now_us)
        if acked is None:
            return False
        topic, queue = found
        count = len(message.seqs) >> 3
        counts = queue.counts(live_count(topic) - acked.records)
        answer = m.AckReply(topic.name, count, b"", counts.ready, counts.in_flight)
        acked.answers.append((event, self._leases.remember_reply(queue, message.call, answer)))
        return True

    def ack_and_claim(self, message: m.AckAndClaim, event: ControlReceived, now_us: int) -> bool:
        """Collect the ack and perform the claim of a combined request.

        The reply is sent with that of the ack. Return False if the fast path cannot handle the request.
        Nothing was changed then.
        """
        found = self._eligible_queue(message)
        if found is None or not self._is_simple_claim(message):
            return False
        acked = self._ack(found, message, now_us)
        if acked is None:
            return False
        leases = self._leases
        leases.registry.queue_metrics.count_acked(len(message.seqs) >> 3)
        claimed = self._claim(found, message, now_us)
        answer = claim_reply(*found, claimed, acked.records)
        acked.answers.append((event, leases.remember_reply(found[1], message.call, answer)))
        return True

    def _ack(
        self, found: tuple[ShardTopic, ConsumerGroup], message: m.Ack | m.AckAndClaim, now_us: int
    ) -> AckBatch | None:
        """Collect these jobs if one lease contains all of them. Otherwise change nothing and return None."""
        seqs, tokens = message.seqs, message.tokens
        count = len(seqs) >> 3
        if not 1 <= count <= JOBS_PER_REQUEST_MAX or len(seqs) != len(tokens) or len(seqs) & 7:
            return None
        topic, queue = found
        first, token = int.from_bytes(seqs[:8], "little"), int.from_bytes(tokens[:8], "little")
        is_there = token and first_live_seq(topic) <= first <= topic.head_seq
        if topic.config.durability == Durability.EPHEMERAL or not is_there:
            return None
        if count > 1 and not (_follow(seqs, first, count) and _follow(tokens, token, count)):
            return None
        accounted = self._leases.recent_records.total_of(topic, first, count)
        if accounted is None:
            accounted = self._leases.sizes.total_of(topic.topic_id, first, count)
        if accounted is None or not queue.ack_lease(first, count, token, message.node, now_us // 1_000):
            return None
        acked = self._acked.get(topic.topic_id)
        if acked is None:
            acked = self._acked[topic.topic_id] = AckBatch(topic)
        acked.spans.append((first, first + count))
        acked.records += count
        acked.bytes += accounted
        self.bytes += _FRAME_BYTES + count * _JOB_BYTES
        return acked

    def take_acks(self) -> list[AckBatch]:
        """Remove and return the collected acks, one batch for each topic."""
        gathered, self._acked, self.bytes = self._acked, {}, 0
        return list(gathered.values())

    def stage_acks(self, acked: AckBatch, batch: CommitBatch) -> list[Reply]:
        """Stage the acks of a topic into the commit batch, as one removal.

        Return the replies, which are due when the batch is committed.
        """
        topic = acked.topic
        is_synced = topic.config.durability == Durability.FSYNC
        self._leases.removals.stage_removal(
            topic, acked.removal(), batch, sync=is_synced, on_request=True, notify=False
        )
        return [Reply(event.client, event.corr, answer) for event, answer in acked.answers]


def _is_plain(config: TopicConfig) -> bool:
    """Return True for a queue without priorities, durable leases and claim jitter.

    Its claims are not logged and open no window, and its jobs are delivered in order of arrival.
    """
    return config.type == QUEUE and not (
        config.record_priority or config.leases_durable or config.claim_jitter_ms
    )


def _follow(data: bytes, first: int, count: int) -> bool:
    """Return True if `data` contains the numbers from `first` on, each as 8 bytes, little-endian.

    They come from a client, so the last one may be too large to exist.
    """
    return first + count <= 1 << 64 and data == array("Q", range(first, first + count)).tobytes()
