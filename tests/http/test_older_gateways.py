"""A watch session at a gateway of an older release is not lost, and not shown without a check of rights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ringlog.access.keys import ANYONE
from ringlog.actors.http_gateway.streams.session_moves import SessionMoves
from ringlog.actors.http_gateway.streams.session_state import SessionState, session_of
from ringlog.actors.http_gateway.streams.watches import new_wid
from ringlog.envelope import messages as m
from ringlog.errors import NotReady
from ringlog.link.peer_request import PeerReply

FIRST_FIELDS = {
    "moves": 1, "heartbeat_s": 15.0, "is_strong": False, "limit": 100, "max_bytes": 1_000,
    "include_data": True, "include_tags": False, "include_meta": True, "tags": None, "nodes": [],
    "positions": [["a", 1, 7, 9, False]],
}  # fmt: skip
"""A session as the first release with several gateways gives it away."""


def test_a_session_of_the_first_release_continues() -> None:
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(FIRST_FIELDS), type=SessionState)
    session = session_of("wid", ANYONE, state)
    assert (session.subs["a"].seq, session.sent_cursor) == (7, "")


def test_what_the_first_release_does_not_give_has_a_default() -> None:
    needed = len(SessionState.__struct_fields__) - len(SessionState.__struct_defaults__)
    assert set(SessionState.__struct_fields__[:needed]) == FIRST_FIELDS.keys(), "a new field needs a default"


async def test_topics_that_an_older_gateway_does_not_tell_are_not_taken_for_none() -> None:
    async def ask(number: int, request: m.FindSession) -> PeerReply:
        return PeerReply(m.FoundSession("here"))

    siblings: Any = SimpleNamespace(
        number=1, processes=2, pages={0: None}, is_given_up=lambda number: False, ask=ask
    )
    gateway: Any = SimpleNamespace(clock=SimpleNamespace(monotonic_ns=lambda: 0))
    sessions: Any = SimpleNamespace(find=lambda wid: None)
    with pytest.raises(NotReady, match="open the stream with GET"):
        await SessionMoves(gateway, sessions, siblings).topics_of(new_wid(0), ANYONE)
