"""ShardLink: the connections between one client and one shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from ringlog.board.processes import shard_socket
from ringlog.clock import Clock
from ringlog.errors import RinglogError
from ringlog.link.channel.call_link import CallLink
from ringlog.link.channel.client_ring import RingLocation
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.channel.ring_channel import RingChannel
from ringlog.link.peer import FdSet, Peer
from ringlog.link.publication import PublicationWatch
from ringlog.link.timers import Timers


class ShardLink:
    """Socket, rings and publications of one shard."""

    def __init__(
        self, shard: int, client_id: str, *, context: zmq.Context[Any], clock: Clock, timers: Timers,
        fds: FdSet, on_displaced: Callable[[OutboundFrames], None] | None,
    ) -> None:  # fmt: skip
        """`on_displaced` gets frames that the last ring did not settle; None = they are submitted again."""
        self.calls: CallLink = CallLink(shard, clock=clock, fds=fds)
        self.control: Peer = Peer(
            f"shard {shard}", context=context, timers=timers, clock=clock, fds=fds,
            on_change=self._control_changed,
        )  # fmt: skip
        self.channel: RingChannel = RingChannel(
            client_id, clock=clock, timers=timers, fds=fds, control=self.control,
            on_displaced=on_displaced or self._submit_again,
        )  # fmt: skip
        self.publication: PublicationWatch = PublicationWatch(client_id, clock=clock, timers=timers, fds=fds)

    def _control_changed(self, control: Peer) -> None:
        if not control.is_up:
            self.calls.drop_ring()

    def _submit_again(self, run: OutboundFrames) -> None:
        self.channel.submit(run)

    def pump(self) -> bool:
        """Process settlements and replies of the rings, and push frames that fit. Return True if anything
        happened."""
        happened = self.channel.pump()
        return self.calls.pump() or happened

    def on_readable(self, fd: int) -> bool:
        """Handle a readable descriptor. Return False if it does not belong to this shard."""
        if self.calls.fd == fd:
            self.calls.on_bell()
            return True
        if self.channel.on_bell(fd) or self.publication.on_bell(fd):
            return True
        if fd in self.control.fds:
            self.control.pump()
            return True
        return False

    def add_spin_words(self, words: list[memoryview], seen: list[int]) -> int:
        """Add the words to spin on, and their values now, for every ring with a pending result.

        Return the number of frames and requests in flight.
        """
        frames, requests = self.channel.in_flight, self.calls.open_requests
        if not frames and not requests:
            return 0
        for watched in (
            self.channel.spin_word() if frames else None,
            self.calls.spin_word() if requests else None,
        ):
            if watched is not None:
                words.append(watched[0])
                seen.append(watched[1])
        return frames + requests

    def arm(self, *, for_settlements: bool) -> None:
        """Request wake-ups for replies and, with `for_settlements`, settlements."""
        if for_settlements:
            self.channel.arm(is_wanted=True)
        self.calls.arm(is_wanted=True)

    def disarm(self) -> None:
        """Cancel the request for wake-ups."""
        self.channel.arm(is_wanted=False)
        self.calls.arm(is_wanted=False)

    def move(self, location: RingLocation | None) -> None:
        """Move the connections to a new start of the engine; None = it does not have this shard, or is not
        there yet."""
        self.calls.drop_ring()
        if self.control.open_requests or location is None:
            self.control.set_endpoint(shard_socket(location.shm_dir, location.shard) if location else "")
        else:
            self.control.set_endpoint("")  # The next request connects again.
        self.channel.move(location)
        self.publication.move(location)

    def close(self, why: RinglogError | None) -> list[OutboundFrames]:
        """Close the connections. Return the runs that are not settled."""
        left = self.channel.close()
        self.publication.close_ring()
        if why is not None:
            self.publication.fail_all(why)
        self.calls.drop_ring()
        self.control.close(why)
        return left

    def close_after_fork(self) -> None:
        """Close the copies of rings and bells in the child after a fork."""
        self.channel.close_ring()
        self.publication.close_ring()
        self.calls.close_after_fork()
