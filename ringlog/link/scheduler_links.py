"""SchedulerLinks: the connections of one client to the schedulers of its engine."""

from __future__ import annotations

from typing import Any

import zmq

from ringlog.board.processes import scheduler_socket
from ringlog.clock import Clock
from ringlog.errors import NotReady, RinglogError
from ringlog.link.channel.grant_link import GrantLink
from ringlog.link.engine_board import EngineBoard
from ringlog.link.peer import FdSet, Peer
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import SchedulerListener
from ringlog.link.timers import Timers


class SchedulerLinks:
    """A socket and a grant ring for each scheduler, made at the first use of the scheduler."""

    def __init__(
        self, *, context: zmq.Context[Any], clock: Clock, timers: Timers, fds: FdSet, board: EngineBoard,
        listener: SchedulerListener | None,
    ) -> None:  # fmt: skip
        self._context, self._clock, self._timers, self._fds = context, clock, timers, fds
        self._board = board
        self._listener = listener
        self._peers: dict[int, Peer] = {}
        self._grant_links: dict[int, GrantLink] = {}
        self._count = 0
        """Number of schedulers of the engine that is in use."""

    def peer(self, number: int) -> Peer:
        """Return the connection to one scheduler. The first call creates it."""
        peer = self._peers.get(number)
        if peer is None:
            peer = self._peers[number] = self._new_peer(number)
            if self._board.is_open:
                peer.set_endpoint(scheduler_socket(self._board.shm_dir, number))
        return peer

    def request_grants(self, number: int) -> None:
        """Request a grant ring of this scheduler, if it is connected.

        The scheduler removes the ring of a client without subscriptions, so the first subscription needs a
        new one."""
        peer = self.peer(number)
        if peer.is_up:
            self._grant_links[number].request_ring(peer, self._board.shm_dir)

    def _new_peer(self, number: int) -> Peer:
        listener = self._listener
        assert listener is not None, "who asks a scheduler hears what it says"
        grant_link = self._grant_links[number] = GrantLink(
            number, clock=self._clock, fds=self._fds, listener=listener
        )

        def changed(peer: Peer) -> None:
            if peer.is_up:
                grant_link.request_ring(peer, self._board.shm_dir)
                listener.scheduler_connected(number)
            else:
                grant_link.drop_ring()

        def receive(_: Peer, push: PeerReply) -> None:
            listener.scheduler_message(number, push)

        return Peer(
            f"scheduler {number}", context=self._context, timers=self._timers, clock=self._clock,
            fds=self._fds, on_change=changed, on_push=receive,
        )  # fmt: skip

    def pump(self) -> bool:
        """Process the grants of all rings. Return True if anything happened."""
        happened = False
        for grant_link in list(self._grant_links.values()):
            happened |= grant_link.pump()
        return happened

    def on_readable(self, fd: int) -> bool:
        """Handle a readable descriptor. Return False if it belongs to no scheduler."""
        for number, grant_link in list(self._grant_links.items()):
            if grant_link.fd == fd:
                grant_link.on_bell()
                return True
            if fd in self._peers[number].fds:
                self._peers[number].pump()
                return True
        return False

    def move(self, count: int, *, is_there: bool) -> None:
        """Move the connections to a new start of the engine, which has `count` schedulers."""
        if count != self._count:
            # Before the connections exist: each scheduler receives its feeds when it is connected.
            self._count = count
            self._reassign(count)
        for number, peer in list(self._peers.items()):
            is_used = is_there and number < count
            self._grant_links[number].drop_ring()
            peer.set_endpoint(scheduler_socket(self._board.shm_dir, number) if is_used else "")

    def _reassign(self, schedulers: int) -> None:
        """Handle a new number of schedulers: it decides which scheduler serves a topic.

        The listener assigns its feeds again. Open Subscribe requests fail, and so do all requests to removed
        schedulers.
        """
        if self._listener is not None:
            self._listener.schedulers_changed(schedulers)
        for number, peer in list(self._peers.items()):
            # Scheduler 0 manages the routers, whatever the number of schedulers.
            for pending in peer.withdraw_requests("Subscribe" if number < schedulers else ""):
                pending.fail_with(
                    NotReady(
                        "the engine was restarted with a different number of schedulers: repeat the request",
                        request=pending.kind, schedulers=schedulers,
                        outcome="unknown" if pending.was_sent else "not_applied",
                    )
                )  # fmt: skip

    def close(self, why: RinglogError | None) -> None:
        """Close all connections. Open requests fail, with `why` if it is given."""
        for number, peer in list(self._peers.items()):
            self._grant_links[number].drop_ring()
            peer.close(why)

    def close_after_fork(self) -> None:
        """Close the copies of rings and bells in the child after a fork."""
        for grant_link in list(self._grant_links.values()):
            grant_link.close_after_fork()
