"""A client's end of the turns that one scheduler gives it through shared memory (turn_ring).

Asked for when the connection is made, of use as long as that lasts. Where there is no ring, or it cannot be
opened here, turns come as messages.
"""

from __future__ import annotations

from ringlog.board.layout import BoardError
from ringlog.clock import Clock
from ringlog.envelope.messages import OpenTurns
from ringlog.errors import ConnectionTrouble, RingError
from ringlog.link.channel.grant_ring import GrantReader
from ringlog.link.futures import Pending
from ringlog.link.peer import MS, FdSet, Peer, PeerReply
from ringlog.link.protocol import SchedulerListener

_ASK_NS = 5_000 * MS


class GrantLink:
    """One scheduler's. Not thread-safe."""

    def __init__(self, scheduler: int, *, clock: Clock, fds: FdSet, hears: SchedulerListener) -> None:
        self._scheduler = scheduler
        self._clock, self._fds, self._scheduler_listener = clock, fds, hears
        self._asked: Pending[PeerReply] | None = None
        self._ring: GrantReader | None = None

    @property
    def fd(self) -> int:
        """Readable when there are turns; -1 while there is no ring."""
        return -1 if self._ring is None else self._ring.fileno()

    def request_ring(self, peer: Peer, shm_dir: str) -> None:
        """The connection is new: ask for a ring, in front of everything else."""
        self.drop_ring()
        asked = self._asked = peer.request(OpenTurns(), self._deadline_ns(), is_patient=False)
        asked.when_done(lambda done: self._answered(done, peer, shm_dir))

    def _answered(self, asked: Pending[PeerReply], peer: Peer, shm_dir: str) -> None:
        if asked is not self._asked:
            return
        if asked.error is not None:
            if isinstance(asked.error, ConnectionTrouble) and peer.is_up:
                # Too slow, not unwilling: it may make a ring all the same, and tell us nothing but there.
                self.request_ring(peer, shm_dir)
            return
        name = asked.result().message.name
        if not name:
            return
        try:
            self._ring = GrantReader(shm_dir, name)
        except (BoardError, RingError):
            # No descriptor, or no memory to map it.
            self._request_messages(peer)
            return
        self._fds.watch(self._ring.fileno())
        self.pump()

    def _request_messages(self, peer: Peer) -> None:
        """Turns are to come as messages. What is in the ring already is told again behind the answer."""

        def answered(asked: Pending[PeerReply]) -> None:
            if asked.error is None:
                self._scheduler_listener.scheduler_grants(self._scheduler, [], is_complete=False)
            elif isinstance(asked.error, ConnectionTrouble) and peer.is_up:
                self._request_messages(peer)

        asked = peer.request(OpenTurns(wanted=False), self._deadline_ns(), is_patient=False)
        asked.when_done(answered)

    def _deadline_ns(self) -> int:
        return self._clock.monotonic_ns() + _ASK_NS

    def on_bell(self) -> None:
        """The bell rang."""
        if self._ring is not None:
            self._ring.drain_bell()
            self.pump()

    def pump(self) -> bool:
        """Take turns; True when there were some."""
        ring = self._ring
        if ring is None or not ring.has_grants:
            return False
        taken = ring.take_grants()
        self._scheduler_listener.scheduler_grants(
            self._scheduler, taken.rows.tolist(), is_complete=taken.is_complete
        )
        return True

    def drop_ring(self) -> None:
        """The connection is gone, and its ring with it."""
        self._asked = None
        ring, self._ring = self._ring, None
        if ring is not None:
            self._fds.unwatch(ring.fileno())
            ring.close()

    def close_after_fork(self) -> None:
        """After a fork: close our copies."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
