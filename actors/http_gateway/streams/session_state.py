"""What a watch session takes with it to another HTTP gateway.

For a moment the gateways of an engine may be of different versions: a new field comes last and has a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.streams.fan_out import Projection, Subscriber
from ringlog.actors.http_gateway.streams.watches import WatchSession
from ringlog.client.read.pages import Cursor, Filters, tag_filter
from ringlog.limits import READ_BYTES_MAX, READ_LIMIT_MAX


class TopicPosition(msgspec.Struct, array_like=True):
    """Position of a watch session in one topic."""

    topic: str
    epoch: int
    seq: int
    head_seq: int
    omits_nodes: bool
    """Whether the topic applies the node filter of the session."""


class SessionState(msgspec.Struct):
    """A watch session on its way to another gateway."""

    moves: int
    """How often the session has moved, this move included."""
    heartbeat_s: float
    is_strong: bool
    limit: int
    """Most records of one frame."""
    max_bytes: int
    """Bytes of records after which a frame is complete."""
    include_data: bool
    include_tags: bool
    include_meta: bool
    tags: str | list[Any] | None
    """Tag filter, as the client has sent it."""
    nodes: list[bytes]
    """Node filter."""
    positions: list[TopicPosition]
    sent_cursor: str = ""
    """Cursor of the last frame; "" if it is not known."""


def state_of(session: WatchSession) -> SessionState:
    """Return what another gateway needs to continue a session."""
    state = SessionState(
        session.moves, session.heartbeat_s, session.is_strong, READ_LIMIT_MAX, READ_BYTES_MAX,
        include_data=True, include_tags=False, include_meta=True, tags=session.tags, nodes=[], positions=[],
        sent_cursor=session.sent_cursor,
    )  # fmt: skip
    for sub in session.subs.values():  # They differ in their positions, and some topics ignore nodes.
        shown, nodes = sub.projection, sub.projection.filters.nodes
        state.limit, state.max_bytes = sub.limit, sub.max_bytes
        state.include_data, state.include_tags = shown.include_data, shown.include_tags
        state.include_meta = shown.include_meta
        state.nodes = list(nodes) or state.nodes
        state.positions.append(TopicPosition(sub.topic, sub.epoch, sub.seq, sub.head_seq, bool(nodes)))
    return state


def session_of(wid: str, principal: Principal, state: SessionState) -> WatchSession:
    """Return the session that continues where `state_of` ended it."""
    nodes, tag = frozenset(state.nodes), tag_filter(state.tags)
    subs = {}
    for topic, epoch, seq, head_seq, omits_nodes in map(msgspec.structs.astuple, state.positions):
        filters = Filters(nodes if omits_nodes else frozenset(), tag)
        projection = Projection(state.include_data, state.include_tags, state.include_meta, filters)
        subs[topic] = Subscriber(topic, Cursor(epoch, seq), projection, state.limit, state.max_bytes)
        subs[topic].head_seq = head_seq
    session = WatchSession(
        wid, principal, subs, heartbeat_s=state.heartbeat_s, is_strong=state.is_strong, tags=state.tags
    )
    session.moves, session.sent_cursor = state.moves, state.sent_cursor
    return session
