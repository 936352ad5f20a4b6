"""Interface between a client and its connections, the same for every transport.

`LocalLinks` (rings and sockets of an engine on this host) and `GatewayLinks` (one socket to a gateway)
implement it. Nothing here blocks or locks. The shell that owns the links waits until a descriptor is readable
or the next timer is due, and then calls `pump`. It calls from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ringlog.clock import Clock
from ringlog.envelope.messages import Message
from ringlog.errors import RinglogError
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.futures import Pending
from ringlog.link.peer import Peer
from ringlog.link.peer_request import PeerReply
from ringlog.link.timers import Timers

Transport = Literal["ring", "ipc", "tcp"]


class ShardWatermarks(NamedTuple):
    """Published end of a shard's logs: (file_id, offset in bytes) of the WAL and of the volatile log."""

    wal: tuple[int, int]
    volatile: tuple[int, int]


@dataclass(slots=True)
class LinkStats:
    """Counters for diagnostics; they only grow."""

    connections: int = 0
    reconnections: int = 0
    frames_resent: int = 0
    requests_resent: int = 0
    last_heard_ns: int = 0


class SchedulerListener(Protocol):
    """Receives unsolicited messages of schedulers, and events of the connections to them."""

    def scheduler_connected(self, number: int) -> None:
        """A connection to this scheduler was made. The scheduler knows no subscription of this client."""
        ...

    def scheduler_message(self, number: int, push: PeerReply) -> None:
        """An unsolicited message arrived."""
        ...

    def scheduler_grants(self, number: int, rows: list[list[int]], *, is_complete: bool) -> None:
        """Grants arrived through shared memory, rows as in `Grants`. If not `is_complete`, some were lost."""
        ...

    def schedulers_changed(self, schedulers: int) -> None:
        """A new start of the engine has another number of schedulers. The connections to them come next."""
        ...


class Links(Protocol):
    """All connections of one client."""

    @property
    def transport(self) -> Transport:
        """How appends are sent."""
        ...

    @property
    def shards(self) -> int:
        """Number of peers that have topics: the engine's shards, or 1 for a gateway.

        0 before the first connection.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """The engine is connected, as far as is known without a request."""
        ...

    @property
    def unreachable_reason(self) -> str:
        """Why the engine cannot be reached, as far as that is known; "" = no known reason."""
        ...

    @property
    def generation(self) -> int:
        """Number of starts of the engine that were seen (for a gateway: of connections); 0 = never
        connected."""
        ...

    @property
    def open_requests(self) -> int:
        """Number of requests without a reply."""
        ...

    @property
    def stats(self) -> LinkStats:
        """The counters."""
        ...

    def connect(self) -> Pending[None]:
        """Start to connect, unless that was done. The result is done after the first connection."""
        ...

    def home_shard(self, topic: str) -> int:
        """Return the peer that resolves this name."""
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
        """Send a request to a shard (any number, for a gateway).

        With `by_ring` it goes through shared memory if possible, and it may then overtake other requests."""
        ...

    @property
    def schedulers(self) -> int:
        """Number of processes that send grants: the engine's schedulers, or 1 for a gateway.

        0 before the first connection.
        """
        ...

    def scheduler(self, number: int) -> Peer:
        """Return the connection to one scheduler. The first call creates it."""
        ...

    def request_grants(self, number: int) -> None:
        """Request a grant ring of this scheduler, before the first subscription at it."""
        ...

    def submit(self, shard: int, run: OutboundFrames) -> None:
        """Send frames, in the order of the calls."""
        ...

    def is_full(self, shard: int) -> bool:
        """Return True if there is no space for frames to this shard, as far as the client knows."""
        ...

    def pump(self) -> bool:
        """Process what arrived and push frames for which there is space. Return True if anything happened."""
        ...

    def on_readable(self, fd: int) -> None:
        """Handle a readable descriptor that the owner was requested to watch."""
        ...

    @property
    def frames_in_flight(self) -> int:
        """Number of frames in rings that are not settled; 0 if a socket wakes the owner."""
        ...

    def spin_words(self) -> tuple[list[memoryview], list[int]]:
        """Return the words of shared memory to spin on, and their values now.

        A word changes when something arrives.

        Both lists are empty if a socket wakes the owner, or if so much is in flight that spinning is a
        waste."""
        ...

    def arm(self, *, for_settlements: bool = True) -> bool:
        """Request wake-ups for replies and, with `for_settlements`, settlements.

        Return False if something is available already. A caller that slept would then miss it."""
        ...

    def disarm(self) -> None:
        """Cancel the request for wake-ups, because the owner is awake."""
        ...

    def close(self, why: RinglogError | None = None) -> list[OutboundFrames]:
        """Close all connections. Return the runs that are not settled. Open requests fail.

        With `why`, open requests and waits for publications fail with this error.
        """
        ...

    def close_after_fork(self) -> None:
        """Close the copies of descriptors in the child after a fork, without effect on the parent."""
        ...


class DeliveryHost(Protocol):
    """Provides connections and time: a client's session, or the gateway."""

    @property
    def links(self) -> Links: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def timers(self) -> Timers: ...

    def deadline_ns(self) -> int:
        """Return the deadline of a request that is made now."""
        ...

    def pause(self, seconds: float) -> Pending[None]:
        """Return a result that is done after this time."""
        ...

    def wait_connected(self) -> Pending[None]:
        """Return a result that is done after the first connection to the engine."""
        ...
