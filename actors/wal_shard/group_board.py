"""Shows on the board what a shard's consumer groups count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringlog.board.board import ProcessSlot
from ringlog.board.layout import C
from ringlog.limits import QUEUES_LOOK_MS

if TYPE_CHECKING:
    from actors.wal_shard.group_numbers import GroupNumbers

NS_PER_MS = 1_000_000


class GroupBoard:
    """Writes the words C of a shard's page."""

    def __init__(self) -> None:
        self._look_ns = 0

    def beat(self, slot: ProcessSlot, numbers: GroupNumbers, now_ns: int, lease_ms: int) -> None:
        """Called in every turn; it looks now and then. `lease_ms`: the time in which leases are counted."""
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + QUEUES_LOOK_MS * NS_PER_MS
        numbers.sample(lease_ms, now_ns // NS_PER_MS)
        slot.set(C.GROUPS, len(numbers))
        slot.set(C.LAG, numbers.lag)
        slot.set(C.PENDING, numbers.pending)
        slot.set(C.MEMBERS, numbers.members)
        slot.set(C.FLOOR_AGE_MS, numbers.floor_age_ms)
