"""What the HTTP gateways of one engine tell each other. All of them run the same code, so there is no
version."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


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


class FindSession(msgspec.Struct, tag="find"):
    """Ask for a watch session, and take it over."""

    wid: str
    principal: str
    """Name of the key of the request. A session of another key is not given away."""
    taker: int
    """Number of the gateway that takes the session over; -1 = it stays where it is."""
    moves: int
    """Number of moves with which the session has come to the gateway that is asked; 0 = it may know
    nothing."""


class FoundSession(msgspec.Struct, tag="found"):
    """Answer to FindSession.

    `here`: it is here, and stays; `given`: `state` is the session, which is not here any more; `moved`: ask
    the gateway `holder`, to which it came with `moves`; `absent`: it is not known here; `foreign`: it belongs
    to another key; `busy`: it is on its way to here, and has not arrived in time.
    """

    what: Literal["here", "given", "moved", "absent", "foreign", "busy"]
    holder: int = -1
    moves: int = 0
    state: SessionState | None = None


class ListSessions(msgspec.Struct, tag="list"):
    """Ask which sessions of a maker are here. Its successor asks, to know where they are."""

    maker: int


class SessionsHeld(msgspec.Struct, tag="held"):
    """Answer to ListSessions, and notice to the maker of these sessions: the gateway `holder` has them."""

    holder: int
    sessions: list[tuple[str, int]]
    """Name and number of moves of each."""


class SettledJobs(msgspec.Struct, array_like=True):
    """Jobs of a queue that a node has settled over HTTP."""

    topic: str
    node: str
    seqs: list[int]


class JobsSettled(msgspec.Struct, tag="settled"):
    """Notice for the work streams of the nodes."""

    jobs: list[SettledJobs]


class SiblingRefused(msgspec.Struct, tag="refused"):
    """Answer to a request that was not processed."""

    message: str


SiblingRequest = FindSession | ListSessions
SiblingReply = FoundSession | SessionsHeld | SiblingRefused
SiblingNotice = SessionsHeld | JobsSettled


class SiblingEnvelope(msgspec.Struct, array_like=True):
    """One message. A request and its reply have the same number; a notice has 0."""

    number: int
    body: FindSession | ListSessions | FoundSession | SessionsHeld | SiblingRefused | JobsSettled
