"""Client's end of the call ring to one shard: job requests through shared memory (call_ring).

The client requests the ring with the first job request and uses it while the connection lasts. A request goes
through the socket if it does not fit, or if there is no ring; replies arrive on either way. Requests keep
their correlation ids. When the connection or the ring ends, the Peer sends the unanswered requests again.
"""

from __future__ import annotations

from collections.abc import Callable

from ringlog.board.layout import BoardError
from ringlog.board.processes import shard_bell
from ringlog.clock import Clock
from ringlog.envelope.messages import OpenCalls
from ringlog.errors import ConnectionTrouble, RingError
from ringlog.link.channel.call_ring import CallClient
from ringlog.link.futures import Pending
from ringlog.link.peer import MS, FdSet, Peer
from ringlog.link.peer_request import PeerReply
from ringlog.process_id import own_process_id
from ringlog.ring.doorbell import BellRinger

_ASK_NS = 5_000 * MS


class CallLink:
    """Call ring to one shard. Not thread-safe."""

    def __init__(self, shard: int, *, clock: Clock, fds: FdSet) -> None:
        self._shard = shard
        self._clock, self._fds = clock, fds
        self._peer: Peer | None = None
        self._ring_request: Pending[PeerReply] | None = None
        self._ring: CallClient | None = None
        self._shard_bell: BellRinger | None = None
        self._is_asleep: Callable[[], bool] = lambda: True
        self._is_armed = False

    @property
    def fd(self) -> int:
        """Descriptor that is readable when replies arrived; -1 without a ring."""
        return -1 if self._ring is None else self._ring.fileno()

    @property
    def open_requests(self) -> int:
        """Number of requests that were sent through the ring and have no reply."""
        return 0 if self._peer is None else self._peer.fast_path_requests

    def spin_word(self) -> tuple[memoryview, int] | None:
        """Return the word to spin on, and its value now; another value means replies. None without a ring."""
        return None if self._ring is None else self._ring.spin_word()

    def request_ring(self, peer: Peer, shm_dir: str, is_asleep: Callable[[], bool]) -> None:
        """Request a ring, unless that was done on this connection."""
        if self._ring_request is not None or not peer.is_up:
            return
        deadline_ns = self._clock.monotonic_ns() + _ASK_NS
        pending = self._ring_request = peer.request(
            OpenCalls(*own_process_id()), deadline_ns, is_patient=False
        )
        pending.when_done(lambda done: self._answered(done, peer, shm_dir, is_asleep))

    def _answered(
        self, pending: Pending[PeerReply], peer: Peer, shm_dir: str, is_asleep: Callable[[], bool]
    ) -> None:
        if pending is not self._ring_request:
            return
        if pending.error is not None:
            if isinstance(pending.error, ConnectionTrouble):
                # The next job request repeats this. A slow shard then returns the same ring.
                self._ring_request = None
            return
        name = pending.result().message.name
        if not name:
            return
        try:
            self._ring = CallClient(shm_dir, name)
        except (BoardError, RingError):
            return  # No descriptor, or no memory for the mapping. The shard removes the ring.
        self._shard_bell = BellRinger(shard_bell(shm_dir, self._shard))
        self._is_asleep, self._peer = is_asleep, peer
        self._fds.watch(self._ring.fileno())
        peer.fast_path = self

    def send(self, data: bytes) -> bool:
        """Send a request. Return False if it must go through the socket."""
        ring = self._ring
        if ring is None:
            return False
        try:
            if not ring.send(data):
                return False
        except RingError:
            self._give_up_ring()
            return False
        if self._is_asleep() and self._shard_bell is not None:
            self._shard_bell.ring()
        return True

    def pump(self) -> bool:
        """Process replies. Return True if there were any."""
        ring, peer = self._ring, self._peer
        if ring is None or peer is None or not peer.fast_path_requests:
            return False  # A ring that its shard closes meanwhile is detected with the next request.
        if not ring.has_replies:
            if ring.is_closed:
                self._give_up_ring()
                return True
            return False
        try:
            replies = ring.take_replies()
        except RingError:
            self._give_up_ring()
            return True
        for data in replies:
            peer.on_message(data, None)
        return True

    def arm(self, *, is_wanted: bool) -> None:
        """Request wake-ups for replies, or cancel the request."""
        wants = is_wanted and self.open_requests > 0
        if wants is not self._is_armed and self._ring is not None:
            self._is_armed = wants
            self._ring.set_wakeup(is_wanted=wants)

    def on_bell(self) -> None:
        """Clear the bell."""
        if self._ring is not None:
            self._ring.drain_bell()

    def _give_up_ring(self) -> None:
        """Give up the ring, because it is closed or corrupt.

        Its unanswered requests go through the socket.
        """
        peer = self._detach_ring()
        if peer is not None:
            peer.close_fast_path(is_up=True)

    def drop_ring(self) -> None:
        """Give up the ring, because the connection ended."""
        self._ring_request = None
        peer = self._detach_ring()
        if peer is not None:
            peer.close_fast_path(is_up=False)

    def _detach_ring(self) -> Peer | None:
        ring, self._ring = self._ring, None
        peer, self._peer = self._peer, None
        self._is_armed = False
        if ring is not None:
            self._fds.unwatch(ring.fileno())
            self._close(ring)
        return peer

    def close_after_fork(self) -> None:
        """Close the copies of descriptors in the child after a fork."""
        ring, self._ring = self._ring, None
        if ring is not None:
            self._close(ring)

    def _close(self, ring: CallClient) -> None:
        ring.close()
        if self._shard_bell is not None:
            self._shard_bell.close()
            self._shard_bell = None
