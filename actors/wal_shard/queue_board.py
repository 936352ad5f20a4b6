"""Shows on the board what a shard's queues count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.wal_shard import queue_numbers as n
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import Q
from ringlog.limits import QUEUES_LOOK_MS

if TYPE_CHECKING:
    from actors.wal_shard.leases import Leases

NS_PER_MS = 1_000_000
COUNTERS = {
    n.CLAIMED: Q.CLAIMED, n.ACKED: Q.ACKED, n.NACKED: Q.NACKED, n.REJECTED: Q.REJECTED,
    n.DEAD_LETTERED: Q.DEAD_LETTERED,
}  # fmt: skip


class QueueBoard:
    """Writes the words Q of a shard's page."""

    def __init__(self) -> None:
        self._look_ns = 0

    def beat(self, slot: ProcessSlot, leases: Leases, now_ns: int) -> None:
        """Called in every turn. What others wait for is shown at once, the rest now and then."""
        slot.set(Q.SET_ASIDE, leases.set_aside + leases.registry.group_numbers.set_aside)
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + QUEUES_LOOK_MS * NS_PER_MS
        numbers = leases.registry.queue_numbers
        numbers.sample()
        slot.set(Q.QUEUES, len(numbers))
        slot.set(Q.READY, max(numbers.ready, 0))
        slot.set(Q.IN_FLIGHT, numbers.in_flight)
        slot.set(Q.DELAYED, numbers.delayed)
        slot.set(Q.WAITING, len(leases.waiting))
        for name, word in COUNTERS.items():
            if many := numbers.done.pop(name, 0):
                slot.add(word, many)
