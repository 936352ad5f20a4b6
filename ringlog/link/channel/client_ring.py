"""A ring of a client to one shard, with the bells of both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringlog.board.processes import shard_bell
from ringlog.envelope.messages import RingOpened
from ringlog.link.peer import FdSet, Peer
from ringlog.ring.doorbell import BellListener, BellRinger
from ringlog.ring.layout import WakeupFlags
from ringlog.ring.producer import RingProducer


@dataclass(slots=True)
class RingLocation:
    """Where the rings of a client to one shard are created, and how the shard is woken."""

    shm_dir: str
    engine_id: str
    supervisor: Peer
    shard: int
    is_asleep: Callable[[], bool]
    """Reads the shard's *asleep* word on the board."""


class ClientRing:
    """A ring of this client, the bell that wakes the client, and the bell that wakes the shard."""

    def __init__(self, location: RingLocation, opened: RingOpened, fds: FdSet) -> None:
        self.name: str = opened.ring
        self._location, self._fds = location, fds
        self.producer: RingProducer = RingProducer.attach(
            f"{location.shm_dir}/{opened.ring}", engine_id=location.engine_id
        )
        try:
            self._bell = BellListener(f"{location.shm_dir}/{opened.bell}")
        except BaseException:
            self.producer.close()
            raise
        self._shard_bell = BellRinger(shard_bell(location.shm_dir, location.shard))
        self._wakeup_bits = 0
        self.is_urgent: bool = False
        """Its frames must not wait for frames of other clients."""
        fds.watch(self._bell.fileno())

    @property
    def fd(self) -> int:
        """Descriptor that is readable when the shard rang the bell."""
        return self._bell.fileno()

    def drain_bell(self) -> None:
        """Clear the bell."""
        self._bell.drain()

    def set_wakeups(self, bits: int) -> None:
        """Set the events that wake this client."""
        if self.is_urgent:
            bits |= WakeupFlags.NO_BATCH_WINDOW
        if bits != self._wakeup_bits:
            self._wakeup_bits = bits
            self.producer.set_wakeup_flags(bits)

    def set_urgent(self, *, is_urgent: bool) -> None:
        """Set whether frames may wait for those of other clients; call it before they are published."""
        self.is_urgent = is_urgent
        self.set_wakeups(self._wakeup_bits & ~WakeupFlags.NO_BATCH_WINDOW)

    def wake_shard(self) -> None:
        """Ring the shard's bell if it sleeps. Call it after publishing, never before."""
        if self._location.is_asleep():
            self._shard_bell.ring()

    def close(self) -> None:
        """Close the ring. The shard settles its frames, and the supervisor removes it."""
        self._fds.unwatch(self._bell.fileno())
        self.producer.close()
        self._bell.close()
        self._shard_bell.close()
