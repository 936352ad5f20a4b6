"""Client's end of the grant ring of one scheduler: grants through shared memory (grant_ring).

The client requests the ring with the connection and uses it while the connection lasts. Without a ring, or if
the client cannot open it, grants come as messages.
"""

from __future__ import annotations

from ringlog.board.layout import BoardError
from ringlog.clock import Clock
from ringlog.envelope.messages import OpenGrants
from ringlog.errors import ConnectionTrouble, RingError
from ringlog.link.channel.grant_ring import GrantReader
from ringlog.link.futures import Pending
from ringlog.link.peer import MS, FdSet, Peer
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import SchedulerListener

_ASK_NS = 5_000 * MS


class GrantLink:
    """Grant ring of one scheduler. Not thread-safe."""

    def __init__(self, scheduler: int, *, clock: Clock, fds: FdSet, listener: SchedulerListener) -> None:
        self._scheduler = scheduler
        self._clock, self._fds, self._scheduler_listener = clock, fds, listener
        self._ring_request: Pending[PeerReply] | None = None
        self._ring: GrantReader | None = None

    @property
    def fd(self) -> int:
        """Descriptor that is readable when grants arrived; -1 without a ring."""
        return -1 if self._ring is None else self._ring.fileno()

    def request_ring(self, peer: Peer, shm_dir: str) -> None:
        """Request a ring, as the first request on a new connection."""
        self.drop_ring()
        pending = self._ring_request = peer.request(OpenGrants(), self._deadline_ns(), is_patient=False)
        pending.when_done(lambda done: self._answered(done, peer, shm_dir))

    def _answered(self, pending: Pending[PeerReply], peer: Peer, shm_dir: str) -> None:
        if pending is not self._ring_request:
            return
        if pending.error is not None:
            if isinstance(pending.error, ConnectionTrouble) and peer.is_up:
                # The scheduler is slow and did not refuse: it may still create a ring and then send grants
                # only there.
                self.request_ring(peer, shm_dir)
            return
        name = pending.result().message.name
        if not name:
            return
        try:
            self._ring = GrantReader(shm_dir, name)
        except (BoardError, RingError):
            # No descriptor, or no memory for the mapping.
            self._request_messages(peer)
            return
        self._fds.watch(self._ring.fileno())
        self.pump()

    def _request_messages(self, peer: Peer) -> None:
        """Request grants as messages.

        After the reply the reader checks every feed, because grants in the ring are lost.
        """

        def answered(pending: Pending[PeerReply]) -> None:
            if pending.error is None:
                self._scheduler_listener.scheduler_grants(self._scheduler, [], is_complete=False)
            elif isinstance(pending.error, ConnectionTrouble) and peer.is_up:
                self._request_messages(peer)

        pending = peer.request(OpenGrants(wanted=False), self._deadline_ns(), is_patient=False)
        pending.when_done(answered)

    def _deadline_ns(self) -> int:
        return self._clock.monotonic_ns() + _ASK_NS

    def on_bell(self) -> None:
        """Clear the bell and read grants."""
        if self._ring is not None:
            self._ring.drain_bell()
            self.pump()

    def pump(self) -> bool:
        """Read grants. Return True if there were any."""
        ring = self._ring
        if ring is None or not ring.has_grants:
            return False
        grants = ring.take_grants()
        self._scheduler_listener.scheduler_grants(
            self._scheduler, grants.rows.tolist(), is_complete=grants.is_complete
        )
        return True

    def drop_ring(self) -> None:
        """Give up the ring, because the connection ended."""
        self._ring_request = None
        ring, self._ring = self._ring, None
        if ring is not None:
            self._fds.unwatch(ring.fileno())
            ring.close()

    def close_after_fork(self) -> None:
        """Close the copies of descriptors in the child after a fork."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
