"""What a client needs of its connections, whatever they are made of.

`LocalLinks` (rings and sockets of an engine on this host) and `GatewayLinks` (one socket to a gateway)
both offer this. Nothing here blocks or locks: the shell that owns it waits for its descriptors or its
next timer, whichever is first, calls `pump`, and does so from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ringlog.envelope.messages import Message
from ringlog.link.peer import Reply
from ringlog.link.pending import Pending
from ringlog.link.runs import Run

Transport = Literal["ring", "ipc", "tcp"]


@dataclass(slots=True)
class LinkFacts:
    """Counters for people; they only grow."""

    connections: int = 0
    reconnections: int = 0
    frames_resent: int = 0
    requests_resent: int = 0
    last_heard_ns: int = 0


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
    def generation(self) -> int:
        """Starts of the engine seen; 0 = never connected."""
        ...

    @property
    def open_requests(self) -> int:
        """Requests without an answer."""
        ...

    @property
    def facts(self) -> LinkFacts:
        """Counters."""
        ...

    def connect(self) -> Pending[None]:
        """Begin connecting if that was not done; done once the engine has been met."""
        ...

    def home(self, topic: str) -> int:
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
    ) -> Pending[Reply]:
        """Ask a shard (any number, for a gateway)."""
        ...

    def submit(self, shard: int, run: Run) -> None:
        """Send frames; they go in the order in which they are submitted."""
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

    def can_look_on(self) -> bool:
        """May settlements be looked for in shared memory? Then `has_settled` costs next to nothing."""
        ...

    def has_settled(self) -> bool:
        """Are settlements there to be pumped?"""
        ...

    def arm(self) -> bool:
        """Ask to be woken for settlements; False when some are there already and sleeping would miss them."""
        ...

    def disarm(self) -> None:
        """No more wake-ups are needed: the owner is awake."""
        ...

    def close(self) -> list[Run]:
        """End all connections; returns the runs that were not settled. Open requests fail."""
        ...

    def let_go_in_child(self) -> None:
        """After a fork, in the child: close our copies of what can be closed without harm to the parent."""
        ...
