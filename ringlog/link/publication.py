"""PublicationWatch: wait until a shard published something new.

It has a small ring of its own to each shard for which a reader waits. No frame is ever pushed into this ring:
only its `wants` word and its bell are used. Without the ring (for example while its shard restarts) it polls
the board every 100 ms, so waiting is slower and never wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringlog.clock import Clock
from ringlog.envelope.messages import RingOpen
from ringlog.errors import RinglogError
from ringlog.limits import RING_BYTES_MIN
from ringlog.link.channel.client_ring import ClientRing, RingLocation
from ringlog.link.channel.ring_channel import OPEN_REQUEST_NS, OPEN_RETRY_NS
from ringlog.link.futures import Pending, resolved
from ringlog.link.peer import MS, FdSet
from ringlog.link.peer_request import FINAL_REASONS, PeerReply
from ringlog.link.timers import Timer, Timers
from ringlog.process_id import own_process_id
from ringlog.ring.layout import WakeupFlags

BACKUP_NS = 100 * MS


@dataclass(slots=True)
class _Waiter:
    marks: Callable[[], Any]
    seen: Any
    deadline_ns: int
    pending: Pending[bool]


class PublicationWatch:
    """Readers that wait for one shard."""

    def __init__(self, client_id: str, *, clock: Clock, timers: Timers, fds: FdSet) -> None:
        self._client_id = client_id
        self._clock, self._timers, self._fds = clock, timers, fds
        self._location: RingLocation | None = None
        self._ring: ClientRing | None = None
        self._opening: Pending[PeerReply] | None = None
        self._open_again_ns = 0
        self._waiters: list[_Waiter] = []
        self._timer: Timer | None = None

    def wait(self, marks: Callable[[], Any], seen: Any, deadline_ns: int) -> Pending[bool]:
        """Wait until `marks()`, the shard's published marks, differs from `seen`.

        The result is True in that case, and False at the deadline.
        """
        if marks() != seen:
            return resolved(True)
        waiter = _Waiter(marks, seen, deadline_ns, Pending())
        self._waiters.append(waiter)
        if self._ring is None:
            self._open()
        else:
            self._ring.set_wakeups(WakeupFlags.PUBLICATION)
        self._check_waiters()  # Only after the request for wake-ups: earlier publications ring no bell.
        return waiter.pending

    def on_bell(self, fd: int) -> bool:
        """Check the waiting readers. Return False if this descriptor is not ours."""
        if self._ring is None or self._ring.fd != fd:
            return False
        self._ring.drain_bell()
        self._check_waiters()
        return True

    def move(self, location: RingLocation | None) -> None:
        """Use the ring of another start of the engine.

        Waiting readers continue with its marks, which differ.
        """
        self.close_ring()
        self._location = location
        if self._waiters:
            self._open()
            self._check_waiters()

    def close_ring(self) -> None:
        """Close the ring. Waiting readers continue with the backup timer."""
        ring, self._ring = self._ring, None
        self._opening, self._location = None, None
        if ring is not None:
            ring.close()

    def fail_all(self, why: RinglogError) -> None:
        """Fail all waiting readers."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.pending.fail(why)

    def _check_waiters(self) -> None:
        """Resolve the readers whose marks changed or whose deadline passed. Set the timer for the others."""
        now = self._clock.monotonic_ns()
        waiters, self._waiters = self._waiters, []
        ready: list[tuple[_Waiter, bool]] = []
        for waiter in waiters:
            if waiter.marks() != waiter.seen:
                ready.append((waiter, True))
            elif now >= waiter.deadline_ns:
                ready.append((waiter, False))
            else:
                self._waiters.append(waiter)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters:
            next_ns = min(now + BACKUP_NS, *(waiter.deadline_ns for waiter in self._waiters))
            self._timer = self._timers.call_at(next_ns, self._check_again)
        elif self._ring is not None:
            self._ring.set_wakeups(0)
        for waiter, is_news in ready:
            waiter.pending.resolve(is_news)

    def _check_again(self) -> None:
        self._timer = None
        ring = self._ring
        if ring is not None and (ring.producer.is_consumer_closed or ring.producer.is_removed):
            self._ring = None
            ring.close()
        if self._ring is None:
            self._open()
        self._check_waiters()

    def _open(self) -> None:
        location, now = self._location, self._clock.monotonic_ns()
        if location is None or self._opening is not None or now < self._open_again_ns:
            return
        self._open_again_ns = now + OPEN_RETRY_NS
        request = RingOpen(
            f"{self._client_id}.reads", os.getpid(), location.shard, RING_BYTES_MIN, own_process_id()[1]
        )
        self._opening = opening = location.supervisor.request(request, now + OPEN_REQUEST_NS)
        opening.when_done(lambda done: self._opened(location, done))

    def _opened(self, location: RingLocation, opening: Pending[PeerReply]) -> None:
        if self._opening is opening:
            self._opening = None
        if self._location is not location:
            # The reply is from an earlier start of the engine. The next start deletes any ring that it left.
            return
        try:
            self._ring = ClientRing(location, opening.result().message, self._fds)
        except RinglogError as e:
            if e.detail.get("reason") in FINAL_REASONS:
                self.fail_all(e)
            return  # The backup timer polls the board and tries again.
        self._ring.set_wakeups(WakeupFlags.PUBLICATION if self._waiters else 0)
        self._check_waiters()
