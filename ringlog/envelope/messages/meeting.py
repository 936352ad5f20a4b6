"""Who is there, and shared memory between a client and a shard."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message

# -- meeting -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message on a connection; asks who answers."""

    protocol: int
    client: str
    pid: int = 0


class Welcome(Message, frozen=True):
    """Who answers: engine, shard layout and the limits a client should know."""

    protocol: int
    version: str
    engine_id: str
    shards: int
    shard: int
    """This shard's number, or -1 from the supervisor and the gateway."""
    incarnation: int
    limits: dict[str, int] = {}


class Ping(Message, frozen=True):
    """Is anybody there? Answered with Pong by every actor."""


class Pong(Message, frozen=True):
    """I am here and made this many turns."""

    incarnation: int
    turns: int


# -- rings: client -> supervisor -----------------------------------------------------------------------


class RingOpen(Message, frozen=True):
    """Make a ring to `shard` for this client; the supervisor owns its life."""

    client: str
    pid: int
    shard: int
    ring_bytes: int = 0
    """0 = as rings begin. The ring is smaller where run.ring_bytes or the room in shared memory is."""
    born: int = 0
    """When the process `pid` began (lives.born_of); 0 = `pid` is not to be watched."""


class RingOpened(Message, frozen=True):
    """The ring is there and its shard knows it. Attach with ring.open_producer(path)."""

    ring: str
    """File name under the shared-memory directory."""
    bell: str
    """Named pipe the client sleeps on, same directory."""


class RingClose(Message, frozen=True):
    """The client is done with this ring: settle what it holds, then remove it."""

    ring: str


class RingClosed(Message, frozen=True):
    """The ring is gone, or will be when it is drained."""

    ring: str


# -- rings: supervisor -> shard ------------------------------------------------------------------------


class RingAttach(Message, frozen=True):
    """Start draining this ring."""

    ring: str
    bell: str
    client: str


class RingAttached(Message, frozen=True):
    """The shard drains it now."""

    ring: str


class RingDetach(Message, frozen=True):
    """The producer is gone: settle what was published, then say RingDetached. `dead` = it died."""

    ring: str
    dead: bool


class RingDetached(Message, frozen=True):
    """The shard let go of the ring; the supervisor may unlink it."""

    ring: str
    settled: int
    """Frames settled since the detach was asked for."""


class OpenCalls(Message, frozen=True):
    """To a shard: take requests about jobs of this connection from shared memory as well; for clients on the
    host."""


class CallsOpened(Message, frozen=True):
    """Reply: the ring's file in the shared-memory directory, its bell beside it; empty = by messages."""

    name: str = ""
