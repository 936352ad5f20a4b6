"""What a client needs of its connections, whatever they are made of.

`LocalLinks` (rings and sockets of an engine on this host) and `GatewayLinks` (one socket to a gateway)
both offer this. Nothing here blocks or locks: the shell that owns it waits for its descriptors or its
next timer, whichever is first, calls `pump`, and does so from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ringlog.envelope.messages import Message
from ringlog.errors import RinglogError
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.futures import Pending
from ringlog.link.peer import Peer, PeerReply

Transport = Literal["ring", "ipc", "tcp"]


class ShardWatermarks(NamedTuple):
    """How far a shard's logs may be read: (file_id, offset in bytes) of the WAL and of the volatile log."""

    wal: tuple[int, int]
    volatile: tuple[int, int]


@dataclass(slots=True)
class LinkStats:
    """Counters for people; they only grow."""

    connections: int = 0
    reconnections: int = 0
    frames_resent: int = 0
    requests_resent: int = 0
    last_heard_ns: int = 0


class SchedulerListener(Protocol):
    """Who is told what schedulers say unasked, and that a connection to one is new."""

    def scheduler_connected(self, number: int) -> None:
        """A connection to this scheduler was made: it knows nothing of us."""
        ...

    def scheduler_message(self, number: int, said: PeerReply) -> None:
        """Something came that was not asked for."""
        ...

    def scheduler_grants(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Turns came through shared memory, rows as in the message; unless `is_complete` some are missing."""
        ...

    def schedulers_changed(self, schedulers: int) -> None:
        """The engine was started with another number of them; connections to those come next."""
        ...


class Links(Protocol):
    """All connections of one client."""

    @property
    def transport(self) -> Transport:
        """How appends travel."""
        ...

    @property
    def shards(self) -> int:
        """Peers that hold topics: the engine's shards, or 1 for a gateway; 0 while none was met."""
        ...

    @property
    def is_ready(self) -> bool:
        """The engine is connected, as far as is known without asking."""
        ...

    @property
    def unreachable_reason(self) -> str:
        """Why the engine cannot be reached, as far as that is known; empty: it is not."""
        ...

    @property
    def generation(self) -> int:
        """Starts of the engine seen; 0 = never connected."""
        ...

    @property
    def open_requests(self) -> int:
        """Requests without an answer."""
        ...

    @property
    def stats(self) -> LinkStats:
        """Counters."""
        ...

    def connect(self) -> Pending[None]:
        """Begin connecting if that was not done; done once the engine has been met."""
        ...

    def home_shard(self, topic: str) -> int:
        """Which peer resolves this name."""
        ...

    def request(
        self,
        shard: int,
        message: Message,
        deadline_ns: int,
        attachment: Any = None,
        *,
        is_patient: bool = True,
        by_ring: bool = False,
    ) -> Pending[PeerReply]:
        """Ask a shard (any number, for a gateway). `by_ring`: through shared memory where there is a way;
        such a request may overtake others."""
        ...

    @property
    def schedulers(self) -> int:
        """Who tells of news: the engine's schedulers, or 1 for a gateway; 0 while none was met."""
        ...

    def scheduler(self, number: int) -> Peer:
        """The connection to one of them, made when it is first asked for."""
        ...

    def request_grants(self, number: int) -> None:
        """Turns of this scheduler are wanted from now on, and were not before."""
        ...

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Send frames; they go in the order in which they are submitted."""
        ...

    def is_full(self, shard: int) -> bool:
        """Is there no room for frames to this shard, as far as is known here (BP-1)?"""
        ...

    def pump(self) -> bool:
        """Take what has arrived, push what has room; True when anything happened."""
        ...

    def on_readable(self, fd: int) -> None:
        """A descriptor the owner was asked to watch became readable."""
        ...

    @property
    def frames_in_flight(self) -> int:
        """Frames in rings, waiting for their fate; 0 where a socket wakes its owner anyway."""
        ...

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        """Words of shared memory that change as soon as something comes that is waited for, and their values
        as long as nothing has; none where a socket wakes, or so much is on its way that looking on costs."""
        ...

    def arm(self, *, for_settlements: bool = True) -> bool:
        """Ask to be woken for answers, and settlements; False when some are there already and sleeping would
        miss them."""
        ...

    def disarm(self) -> None:
        """No more wake-ups are needed: the owner is awake."""
        ...

    def close(self, why: RinglogError | None = None) -> list[OutboundFrames]:
        """End all connections; returns the runs that were not settled. Open requests fail.

        With `why`, that is their error, and waits for publications fail as well.
        """
        ...

    def close_after_fork(self) -> None:
        """After a fork, in the child: close our copies of what can be closed without harm to the parent."""
        ...
