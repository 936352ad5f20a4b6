"""Metrics of a shard's queues: jobs by state, and counts of outcomes. Pure.

Each sample reads the states of a limited number of queues. The sums are therefore as old as one round over
all queues. A queue is included from its first request in this incarnation on.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from ringlog.actors.wal_shard.leases.lease_requests import live_count
from ringlog.envelope import messages as m
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.types import QueueCounts
from ringlog.limits import QUEUES_SAMPLED_MAX
from ringlog.topic.state import ShardTopic

CLAIMED: str = "claimed"
ACKED: str = "acked"
NACKED: str = "nacked"
REJECTED: str = "rejected"
DEAD_LETTERED: str = "dead_lettered"
_NONE = QueueCounts(0, 0, 0)


@dataclass(slots=True)
class _QueueSample:
    topic: ShardTopic
    queue: ConsumerGroup
    seen: QueueCounts = _NONE


class QueueMetrics:
    """Metrics of one shard's queues."""

    def __init__(self) -> None:
        self._known: dict[int, _QueueSample] = {}
        self._round: deque[int] = deque()
        """Topic ids in sampling order. May contain deleted topics."""
        self.ready: int = 0
        self.in_flight: int = 0
        self.delayed: int = 0
        self.outcomes: Counter[str] = Counter()
        """Number of jobs by outcome, since the counts were last published."""

    def __len__(self) -> int:
        return len(self._known)

    def add_queue(self, topic: ShardTopic, queue: ConsumerGroup) -> None:
        """Add a queue at its first request."""
        self._known[topic.topic_id] = _QueueSample(topic, queue)
        self._round.append(topic.topic_id)

    def forget(self, topic_id: int) -> None:
        """Drop a deleted queue."""
        known = self._known.pop(topic_id, None)
        if known is not None:
            self._seen(known, _NONE)

    def count_reply(self, answer: m.Message) -> None:
        """Count the jobs in a reply. Call it only for the first reply to a request, not for retries."""
        match answer:
            case m.ClaimReply():
                self.outcomes[CLAIMED] += sum(count for _, count, _, _ in answer.runs)
            case m.AckReply():
                self.outcomes[ACKED] += answer.acked
            case m.NackReply():
                self.outcomes[NACKED] += answer.nacked
            case m.RejectReply():
                self.outcomes[REJECTED] += answer.rejected

    def count_acked(self, count: int) -> None:
        """Count acked jobs of a request whose reply is not an AckReply."""
        self.outcomes[ACKED] += count

    def sample(self) -> None:
        """Sample the next queues, at most QUEUES_SAMPLED_MAX."""
        for _ in range(min(len(self._round), QUEUES_SAMPLED_MAX)):
            topic_id = self._round.popleft()
            known = self._known.get(topic_id)
            if known is not None:
                self._seen(known, known.queue.counts(live_count(known.topic)))
                self._round.append(topic_id)

    def _seen(self, known: _QueueSample, now: QueueCounts) -> None:
        before, known.seen = known.seen, now
        self.ready += now.ready - before.ready
        self.in_flight += now.in_flight - before.in_flight
        self.delayed += now.delayed - before.delayed
