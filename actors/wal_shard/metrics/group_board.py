"""Publishes the metrics of a shard's consumer groups on the board."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringlog.board.board import ProcessSlot
from ringlog.board.layout import ConsumerGroupField
from ringlog.limits import QUEUE_SAMPLE_MS

if TYPE_CHECKING:
    from ringlog.actors.wal_shard.metrics.group_metrics import GroupMetrics

NS_PER_MS = 1_000_000


class GroupBoard:
    """Writes the ConsumerGroupField words of a shard's board page."""

    def __init__(self) -> None:
        self._look_ns = 0

    def publish(self, slot: ProcessSlot, numbers: GroupMetrics, now_ns: int, lease_ms: int) -> None:
        """Sample and publish the metrics every QUEUE_SAMPLE_MS. Call it in every pass of the loop.

        `lease_ms` is the current time on the clock of leases.
        """
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + QUEUE_SAMPLE_MS * NS_PER_MS
        numbers.sample(lease_ms, now_ns // NS_PER_MS)
        slot.set(ConsumerGroupField.GROUPS, len(numbers))
        slot.set(ConsumerGroupField.LAG, numbers.lag)
        slot.set(ConsumerGroupField.PENDING, numbers.pending)
        slot.set(ConsumerGroupField.MEMBERS, numbers.members)
        slot.set(ConsumerGroupField.FLOOR_AGE_MS, numbers.floor_age_ms)
