"""Who is there, and shared memory between a client and a shard."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Pid, Place, Seq

# -- meeting -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message on a connection; asks who answers."""

    protocol: U32
    client: Name
    pid: Pid = 0


class Welcome(Message, frozen=True):
    """Who answers: engine, shard layout and the limits a client should know."""

    protocol: U32
    version: Name
    engine_id: Name
    shards: U32
    shard: Place
    """This shard's number, or -1 from the supervisor and the gateway."""
    incarnation: U64
    limits: dict[str, U64] = {}


class Ping(Message, frozen=True):
    """Is anybody there? Answered with Pong by every actor."""


class Pong(Message, frozen=True):
    """I am here and made this many turns."""

    incarnation: U64
    turns: Seq


# -- rings: client -> supervisor -----------------------------------------------------------------------


class RingOpen(Message, frozen=True):
    """Make a ring to `shard` for this client; the supervisor owns its life."""

    client: Name
    pid: Pid
    shard: U32
    ring_bytes: Seq = 0
    """0 = as rings begin. The ring is smaller where run.ring_bytes or the room in shared memory is."""
    born: U64 = 0
    """When the process `pid` began (lives.process_started_ticks); 0 = `pid` is not to be watched."""


class RingOpened(Message, frozen=True):
    """The ring is there and its shard knows it. Attach with ring.open_producer(path)."""

    ring: Name
    """File name under the shared-memory directory."""
    bell: Name
    """Named pipe the client sleeps on, same directory."""


class RingClose(Message, frozen=True):
    """The client is done with this ring: settle what it holds, then remove it."""

    ring: Name


class RingClosed(Message, frozen=True):
    """The ring is gone, or will be when it is drained."""

    ring: Name


# -- rings: supervisor -> shard ------------------------------------------------------------------------


class RingAttach(Message, frozen=True):
    """Start draining this ring."""

    ring: Name
    bell: Name
    client: Name


class RingAttached(Message, frozen=True):
    """The shard drains it now."""

    ring: Name


class RingDetach(Message, frozen=True):
    """The producer is gone: settle what was published, then say RingDetached. `dead` = it died."""

    ring: Name
    dead: bool


class RingDetached(Message, frozen=True):
    """The shard let go of the ring; the supervisor may unlink it."""

    ring: Name
    settled: U64
    """Frames settled since the detach was asked for."""


class OpenCalls(Message, frozen=True):
    """To a shard: take requests about jobs of this connection from shared memory as well; for clients on the
    host."""


class CallsOpened(Message, frozen=True):
    """Reply: the ring's file in the shared-memory directory, its bell beside it; empty = by messages."""

    name: Name = ""
