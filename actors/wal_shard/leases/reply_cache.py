"""Replies to requests about leases, for requests that come again under the same number. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ringlog.envelope import messages as m
from ringlog.limits import REPLY_CACHE_REPLIES_MAX, REPLY_CACHE_ROWS_MAX


class ReplyCache:
    """The latest of one shard, by the number of their request: bounded by how many they are, and by what they
    name. A request whose reply is gone gets what is true then. Where changes are logged, a group keeps the
    latest itself (leases/recent_calls.py), and they outlive the shard."""

    def __init__(self) -> None:
        self._replies: OrderedDict[int, m.Message] = OrderedDict()
        self._rows = 0

    def __contains__(self, call: int) -> bool:
        return call in self._replies

    def get(self, call: int) -> m.Message | None:
        """What this request was replyed."""
        return self._replies.get(call)

    def remember_reply(self, call: int, reply: m.Message) -> None:
        """Keep this one, in place of what the request was replyed before."""
        if call in self._replies:
            self._rows -= _rows_in(self._replies.pop(call))
        self._replies[call] = reply
        self._rows += _rows_in(reply)
        while len(self._replies) > REPLY_CACHE_REPLIES_MAX or self._rows > REPLY_CACHE_ROWS_MAX:
            self._rows -= _rows_in(self._replies.popitem(last=False)[1])


def _rows_in(reply: Any) -> int:
    return 1 + (len(reply.runs) if isinstance(reply, m.ClaimReply) else len(reply.skipped) // 8)
