"""HTTP gateways of one engine: where watch sessions are, and jobs that were settled over HTTP.

An HTTP gateway has a number, from 0. A watch session counts its moves from one HTTP gateway to another.
"""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, Name, Place, Seq


class FindSession(Message, frozen=True):
    """HTTP gateway to HTTP gateway: find a watch session, and take it over. Reply: FoundSession.

    A repeated request gets the same session again, until the taker confirms it with SessionsHeld."""

    wid: Name
    """Name of the session."""
    principal: str
    """Name of the key of the client. A session of another key is not given away."""
    taker: Place
    """Number of the gateway that asks, and takes the session over; -1 = the session stays where it is."""
    moves: U32 = 0
    """Number of moves with which the session came to the gateway that is asked; 0 = it may know nothing."""


class FoundSession(Message, frozen=True):
    """Reply to FindSession.

    `what`: `here`, it is here and stays, the attachment is the list of its topics; `given`, the attachment is
    the session, which is not here any more; `moved`, it went to the gateway `holder` with `moves`; `absent`,
    it is not known here; `foreign`, it belongs to another key; `busy`, it is on its way to here and has not
    arrived in time."""

    what: Name
    holder: Place = -1
    moves: U32 = 0


class ListSessions(Message, frozen=True):
    """HTTP gateway to HTTP gateway: list the watch sessions that are here and were made by the gateway
    `maker`.

    Reply: SessionsListed. The successor of the maker asks."""

    maker: U32


class SessionsListed(Message, frozen=True):
    """Reply to ListSessions. The attachment has name and number of moves of each session, at most 100,000."""

    holder: U32
    """Number of the gateway that replies."""


class SessionsHeld(Message, frozen=True):
    """HTTP gateway to HTTP gateway: the gateway `holder` has these watch sessions. Reply: Noted.

    It is sent to their makers, and to the gateways that gave them away."""

    holder: U32
    sessions: list[tuple[Name, U32]]
    """Name and number of moves of each, at most 1,000."""


class SettledJobs(Message, frozen=True):
    """Part of JobsSettled: jobs of one queue that a node has settled."""

    topic: Name
    node: Name
    seqs: list[Seq]
    returned: bool = False
    """They are jobs of the queue again, and may have other leases by now."""


class JobsSettled(Message, frozen=True):
    """HTTP gateway to HTTP gateway: these jobs were settled over HTTP. Reply: Noted.

    Work streams of the nodes have room for others."""

    jobs: list[SettledJobs]


class Noted(Message, frozen=True):
    """Reply to SessionsHeld and JobsSettled."""
