"""Tokens: a number for every lease of a job, never given twice (QL-7). Pure.

A token's upper 24 bits are the incarnation of the shard that gave it, the rest counts. A shard's incarnations
only grow over the life of the data directory, so a token from before a restart matches no later lease.
"""

from __future__ import annotations

from ringlog.errors import InvariantViolation

NUMBER_BITS = 40
INCARNATION_MAX = (1 << 24) - 1
NUMBER_MAX = (1 << NUMBER_BITS) - 1
"""At a million leases a second it lasts for twelve days; then the shard starts anew."""


class LeaseTokens:
    """The tokens of one incarnation of one shard."""

    def __init__(self, incarnation: int) -> None:
        if not 0 <= incarnation <= INCARNATION_MAX:
            raise InvariantViolation("no tokens for this incarnation", incarnation=incarnation)
        self._base = incarnation << NUMBER_BITS
        self._next = 1

    def allocate(self, count: int) -> int:
        """The first of `count` tokens that follow each other."""
        first, self._next = self._next, self._next + count
        if self._next > NUMBER_MAX:
            raise InvariantViolation("all tokens of this incarnation are given", most=NUMBER_MAX)
        return self._base | first


def incarnation_of(token: int) -> int:
    """Who gave it."""
    return token >> NUMBER_BITS
