"""Head reservations: no number is issued twice, whatever a crash takes, at few syncs (D-9 to D-11).

Before a write of a class below `fsync` is acknowledged, a number at or above its last one must be durably
reserved. After a power loss, or for `ephemeral` records after any restart, the head jumps to the
reservation, and what was skipped is announced. The step starts at 256 and grows fourfold while a topic
uses up reservations faster than the flush interval, so a stream of ten million records a second still
needs only a few forced syncs; a quiet topic keeps the small step, so that little is skipped.
"""

from __future__ import annotations

from ringlog.limits import HEAD_RESERVATION_MAX, HEAD_RESERVATION_MIN, SEQ_MAX


class Reservation:
    """How far a topic's numbers are durably reserved."""

    __slots__ = ("_last_us", "_step", "reserved")

    def __init__(self) -> None:
        self.reserved = 0
        """Highest number that may have been acknowledged; 0 = none."""
        self._step = HEAD_RESERVATION_MIN
        self._last_us = 0

    def needed(self, last_seq: int) -> bool:
        """Must a reservation become durable before a write ending at `last_seq` is acknowledged?"""
        return last_seq >= self.reserved

    def extend(self, last_seq: int, now_us: int, interval_us: int) -> int:
        """Reserve beyond `last_seq` and return the new reservation, to be logged and synced."""
        quick = self._last_us and now_us - self._last_us < interval_us
        self._step = min(self._step * 4, HEAD_RESERVATION_MAX) if quick else HEAD_RESERVATION_MIN
        self._last_us = now_us
        self.reserved = min(max(last_seq, self.reserved) + self._step, SEQ_MAX)
        return self.reserved

    def restore(self, value: int) -> None:
        """Take over a reservation found in the log; it only ever grows."""
        self.reserved = max(self.reserved, value)

    def settle(self, head_seq: int) -> None:
        """An orderly stop or a proof that nothing was lost: the reservation shrinks to the head."""
        self.reserved = head_seq
