"""What a shard remembers about earlier lease requests, by call number. Pure.

Replies are kept for retries. Cancelled claims are kept because a claim may arrive after its undo, or again:
the two may take different channels, and a client sends its requests again after a reconnect.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ringlog.envelope import messages as m
from ringlog.limits import CANCELLED_CLAIMS_MAX, REPLY_CACHE_REPLIES_MAX, REPLY_CACHE_ROWS_MAX


class ReplyCache:
    """The latest replies of one shard by call number. The number of replies and of their rows is limited.

    If the reply of a retry is not cached, the shard processes the retry like a new request. A group whose
    changes are logged keeps its recent calls itself (leases/recent_calls.py); they survive a restart of the
    shard.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[int, m.Message] = OrderedDict()
        self._rows = 0

    def __contains__(self, call: int) -> bool:
        return call in self._replies

    def get(self, call: int) -> m.Message | None:
        """Return the reply to this call, or None."""
        return self._replies.get(call)

    def remember_reply(self, call: int, reply: m.Message) -> None:
        """Store the reply to this call. It replaces an earlier reply to the same call."""
        if call in self._replies:
            self._rows -= _rows_in(self._replies.pop(call))
        self._replies[call] = reply
        self._rows += _rows_in(reply)
        while len(self._replies) > REPLY_CACHE_REPLIES_MAX or self._rows > REPLY_CACHE_ROWS_MAX:
            self._rows -= _rows_in(self._replies.popitem(last=False)[1])


class CancelledClaims:
    """The latest claims of one shard that their clients cancelled. Their number is limited."""

    def __init__(self) -> None:
        self._node_of: OrderedDict[int, str] = OrderedDict()
        """Node by call number, in the order of the undo requests."""

    def remember_claim(self, call: int, node: str) -> None:
        """Remember that this node cancelled the claim with this call number."""
        self._node_of[call] = node
        self._node_of.move_to_end(call)
        if len(self._node_of) > CANCELLED_CLAIMS_MAX:
            self._node_of.popitem(last=False)

    def has(self, call: int, node: str) -> bool:
        """Return True if this node cancelled the claim with this call number."""
        return self._node_of.get(call) == node


def _rows_in(reply: Any) -> int:
    return 1 + (len(reply.runs) if isinstance(reply, m.ClaimReply) else len(reply.skipped) // 8)
