"""Head reservations: no seq is issued twice after any crash, at the cost of few syncs.

Before the shard acks a write of a class below `fsync`, a seq at or above its last one must be durably
reserved. After a power loss, and for `ephemeral` records after any restart, the head jumps to the
reservation. The skipped seqs are reported as lost.

The step is 256 at first and grows fourfold while a topic uses up reservations faster than the flush interval.
Even a stream of ten million records per second needs only a few forced syncs. A quiet topic keeps the small
step, so that few seqs are skipped.
"""

from __future__ import annotations

from ringlog.limits import HEAD_RESERVATION_MAX, HEAD_RESERVATION_MIN, SEQ_MAX


class Reservation:
    """Durable reservation of a topic's seqs."""

    __slots__ = ("_last_us", "_step", "reserved")

    def __init__(self) -> None:
        self.reserved: int = 0
        """Highest seq that may have been acked; 0 = none."""
        self._step = HEAD_RESERVATION_MIN
        self._last_us = 0

    def needed(self, last_seq: int) -> bool:
        """Return True if a new reservation must be durable before a write that ends at `last_seq` is
        acked."""
        return last_seq >= self.reserved

    def extend(self, last_seq: int, now_us: int, interval_us: int) -> int:
        """Reserve beyond `last_seq`. Return the new reservation, which must be logged and synced."""
        quick = self._last_us and now_us - self._last_us < interval_us
        self._step = min(self._step * 4, HEAD_RESERVATION_MAX) if quick else HEAD_RESERVATION_MIN
        self._last_us = now_us
        self.reserved = min(max(last_seq, self.reserved) + self._step, SEQ_MAX)
        return self.reserved

    def restore(self, value: int) -> None:
        """Apply a reservation from the log; it never decreases."""
        self.reserved = max(self.reserved, value)

    def settle(self, head_seq: int) -> None:
        """Reduce the reservation to the head, after an orderly stop or a proof that no record was lost."""
        self.reserved = head_seq
