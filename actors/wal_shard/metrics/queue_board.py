"""Publishes the metrics of a shard's queues on the board."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringlog.actors.wal_shard.metrics import queue_metrics as n
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import QueueField
from ringlog.limits import QUEUE_SAMPLE_MS

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.leases.shard_leases import ShardLeases

NS_PER_MS = 1_000_000
COUNTERS = {
    n.CLAIMED: QueueField.CLAIMED, n.ACKED: QueueField.ACKED, n.NACKED: QueueField.NACKED,
    n.REJECTED: QueueField.REJECTED,
    n.DEAD_LETTERED: QueueField.DEAD_LETTERED,
}  # fmt: skip


class QueueBoard:
    """Writes the QueueField words of a shard's board page."""

    def __init__(self) -> None:
        self._look_ns = 0

    def publish(self, slot: ProcessSlot, leases: ShardLeases, now_ns: int) -> None:
        """Publish the metrics. Call it in every pass of the loop.

        The count of exhausted jobs is published at once, because schedulers wait for it. All other metrics
        are sampled every QUEUE_SAMPLE_MS.
        """
        slot.set(QueueField.EXHAUSTED, leases.exhausted_total + leases.registry.group_metrics.exhausted_total)
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + QUEUE_SAMPLE_MS * NS_PER_MS
        numbers = leases.registry.queue_metrics
        numbers.sample()
        slot.set(QueueField.QUEUES, len(numbers))
        slot.set(QueueField.READY, max(numbers.ready, 0))
        slot.set(QueueField.IN_FLIGHT, numbers.in_flight)
        slot.set(QueueField.DELAYED, numbers.delayed)
        slot.set(QueueField.WAITING, len(leases.waiting_claims))
        for name, word in COUNTERS.items():
            if many := numbers.outcomes.pop(name, 0):
                slot.add(word, many)
