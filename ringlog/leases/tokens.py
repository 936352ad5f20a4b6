"""Lease tokens: a number for each lease of a job, never reused. Pure.

The upper 24 bits of a token are the incarnation of the shard, the others are a counter. Incarnations of a
shard only grow over the life of the data directory. A token from before a restart therefore matches no later
lease.
"""

from __future__ import annotations

from ringlog.errors import InvariantViolation

NUMBER_BITS = 40
INCARNATION_MAX = (1 << 24) - 1
NUMBER_MAX = (1 << NUMBER_BITS) - 1
"""At a million leases per second it lasts for 12 days. Then the shard restarts."""


class LeaseTokens:
    """The tokens of one incarnation of one shard."""

    def __init__(self, incarnation: int) -> None:
        if not 0 <= incarnation <= INCARNATION_MAX:
            raise InvariantViolation(
                f"incarnation must be from 0 to {INCARNATION_MAX}, got {incarnation}", incarnation=incarnation
            )
        self._base = incarnation << NUMBER_BITS
        self._next = 1

    def allocate(self, count: int) -> int:
        """Return the first of `count` consecutive tokens."""
        first, self._next = self._next, self._next + count
        if self._next > NUMBER_MAX:
            raise InvariantViolation("all lease tokens of this incarnation are used", most=NUMBER_MAX)
        return self._base | first


def incarnation_of(token: int) -> int:
    """Return the incarnation that issued this token."""
    return token >> NUMBER_BITS
