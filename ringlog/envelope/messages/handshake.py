"""Greeting and liveness, and the shared memory between a client and a shard."""

from __future__ import annotations

from ringlog.envelope.messages.base import Message
from ringlog.envelope.messages.ranges import U32, U64, Name, Pid, Place, Seq

# -- greeting ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Client to supervisor, shard or gateway: first message of a connection. Reply: Welcome."""

    protocol: U32
    client: Name
    pid: Pid = 0


class Welcome(Message, frozen=True):
    """Reply to Hello: the engine, its number of shards, and the limits that a client needs."""

    protocol: U32
    version: Name
    engine_id: Name
    shards: U32
    shard: Place
    """Number of this shard; -1 from the supervisor, the gateway and other actors."""
    incarnation: U64
    limits: dict[str, U64] = {}


class Ping(Message, frozen=True):
    """Any process to any actor: check whether it is alive. Reply: Pong."""


class Pong(Message, frozen=True):
    """Reply to Ping: the actor is alive.

    `turns` counts the passes of its loop (of the gateway: answered requests).
    """

    incarnation: U64
    turns: Seq


# -- rings: client -> supervisor -----------------------------------------------------------------------


class RingOpen(Message, frozen=True):
    """Client to supervisor: create a ring to `shard`. Reply: RingOpened.

    The supervisor owns the ring and deletes it.
    """

    client: Name
    pid: Pid
    shard: U32
    ring_bytes: Seq = 0
    """0 = the default first size. The ring is smaller if run.ring_bytes or the free shared memory requires
    it."""
    pid_started: U64 = 0
    """Start time of process `pid` (`process_id`), in clock ticks since boot; 0 = the supervisor does not
    watch `pid`."""


class RingOpened(Message, frozen=True):
    """Reply to RingOpen: the ring exists and its shard reads it. Attach with ring.open_producer(path)."""

    ring: Name
    """File name in the shared-memory directory."""
    bell: Name
    """Named pipe that wakes the client; in the same directory."""


class RingClose(Message, frozen=True):
    """Client to supervisor: the client does not need this ring any more. Reply: RingClosed.

    The shard settles the frames in the ring, and then the supervisor deletes it.
    """

    ring: Name


class RingClosed(Message, frozen=True):
    """Reply to RingClose: the ring is deleted, or will be when the shard has settled its frames.

    The reply is the same if there was no such ring.
    """

    ring: Name


# -- rings: supervisor -> shard ------------------------------------------------------------------------


class RingAttach(Message, frozen=True):
    """Supervisor to shard: start to read this ring. Reply: RingAttached.

    Repeated after each restart of the shard.
    """

    ring: Name
    bell: Name
    client: Name


class RingAttached(Message, frozen=True):
    """Reply to RingAttach: the shard reads the ring now."""

    ring: Name


class RingDetach(Message, frozen=True):
    """Supervisor to shard: the producer of this ring closed it or exited. Reply: RingDetached.

    The shard first settles all published frames. `dead`: the producer's process died.
    """

    ring: Name
    dead: bool


class RingDetached(Message, frozen=True):
    """Reply to RingDetach: the shard does not use the ring any more. The supervisor may delete its file."""

    ring: Name
    settled: U64
    """Number of frames that were settled after the request."""


class OpenCalls(Message, frozen=True):
    """Client on the host to shard: accept job requests of this connection through a call ring, too. Reply:
    CallsOpened."""

    pid: Pid = 0
    """The client's process, and its start time (process_id). When it dies, its waiting claims end.
    0: the shard does not watch it."""
    pid_started: U64 = 0


class CallsOpened(Message, frozen=True):
    """Reply to OpenCalls: file name of the call ring in the shared-memory directory; its bell is next to it.

    "" = job requests are sent as messages.
    """

    name: Name = ""
