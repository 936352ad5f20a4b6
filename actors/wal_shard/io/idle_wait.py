"""Wait of a shard for work: a short spin after a pass with work, otherwise a sleep. Part of the shell."""

from __future__ import annotations

import select
from collections.abc import Iterable

from ringlog.actors.wal_shard.core import ShardCore
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.actors.wal_shard.metrics.load_monitor import ShardLoadMonitor
from ringlog.actors.wal_shard.requests.call_rings import CallRings
from ringlog.board.board import ProcessSlot
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import ProcessField
from ringlog.clock import Clock
from ringlog.limits import BATCH_WINDOW_POLL_US, HEARTBEAT_INTERVAL_MS
from ringlog.ring.doorbell import BellListener, EventBell
from ringlog.runtime.router_socket import RouterSocket
from ringlog.spin_wait import SPIN_REQUEST_NS, SPIN_WORDS_MAX, SpinPolicy, spin_wait

SLEEP_MS_MAX = 100
"""Interval of the backup poll. A lost doorbell delays work by at most this time (RF-35)."""
POLL_EVERY_PASSES = 8
"""A shard that does not sleep polls its descriptors in one of this many passes."""
_NOTHING: frozenset[int] = frozenset()
IDLE_SLEEPS = 20
"""After this many sleeps without work, the backup poll is as rare as the heartbeat.
An idle engine then uses almost no CPU."""


class IdleWait:
    """The wait between two passes of one shard's loop."""

    def __init__(
        self, core: ShardCore, slot: ProcessSlot, clock: Clock, heartbeat: Heartbeat,
        load_monitor: ShardLoadMonitor, rings: Rings, calls: CallRings, socket: RouterSocket,
        bell: BellListener, own_bells: dict[int, EventBell],
    ) -> None:  # fmt: skip
        self._core, self._slot, self._clock, self._heartbeat = core, slot, clock, heartbeat
        self._load_monitor = load_monitor
        self._rings, self._calls, self._socket = rings, calls, socket
        self._bell, self._own_bells = bell, own_bells
        self._spin_policy = SpinPolicy()
        self._poll = select.epoll()
        self._idle_sleeps = 0
        self._woken_by: frozenset[int] = _NOTHING
        """Descriptors that were readable when the last sleep ended. Cleared after the next pass."""

    def register(self, fds: Iterable[int]) -> None:
        """Wake up when one of these descriptors is readable."""
        for fd in fds:
            self._poll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Close the poll of the descriptors."""
        self._poll.close()

    def should_poll(self, fd: int) -> bool:
        """Return True if this descriptor woke the shard, or in every POLL_EVERY_PASSES-th pass.

        A poll costs as much as the admission of a frame. The regular pass serves shards that never sleep.
        """
        return fd in self._woken_by or not self._heartbeat.passes % POLL_EVERY_PASSES

    def forget_wakeup(self) -> None:
        """Forget which descriptors ended the last sleep, because a pass has polled them."""
        self._woken_by = _NOTHING

    def wait(self, work: int) -> None:
        """Spin briefly after a pass with work, otherwise sleep."""
        if not work:
            self.sleep()
            return
        self._idle_sleeps = 0
        if self._core.wants_intake:
            self._spin()

    def sleep(self) -> None:
        """Sleep until a bell, a message, a completion or the next deadline.

        The shard sets its ASLEEP word first and then polls once more, so that no wake-up is lost.
        """
        slot, load_monitor = self._slot, self._load_monitor
        if load_monitor.window.is_holding and self._core.wants_intake:
            self._clock.sleep_ns(BATCH_WINDOW_POLL_US * 1_000)
            load_monitor.idle_ns += BATCH_WINDOW_POLL_US * 1_000
            return
        slot.set(ProcessField.ASLEEP, 1)
        if not self._has_pending() and not self._socket.has_input(is_readable=False):
            now = self._clock.monotonic_ns()
            deadline = self._core.next_deadline_ns()
            self._idle_sleeps += 1
            is_quiet = not len(self._rings) or self._idle_sleeps > IDLE_SLEEPS
            wait_ms = load_monitor.wait_ms(HEARTBEAT_INTERVAL_MS if is_quiet else SLEEP_MS_MAX)
            if deadline is not None:
                wait_ms = min(wait_ms, max((deadline - now) // 1_000_000 + 1, 0))
            woken = self._poll.poll(wait_ms / 1000)
            load_monitor.idle_ns += self._clock.monotonic_ns() - now
            self._woken_by = frozenset([fd for fd, _ in woken])
            for fd in self._woken_by:
                if fd in self._own_bells:
                    # A helper thread rings after it stored its result, which may have been taken already.
                    # Without this drain, the bell would wake the shard again and again until the next result.
                    self._own_bells[fd].drain()
        slot.set(ProcessField.ASLEEP, 0)
        self._bell.drain()

    def _has_pending(self) -> bool:
        return self._rings.has_pending() or self._calls.has_pending()

    def _spin(self) -> None:
        """Spin on the shared words of the rings before sleeping.

        A client that sends one request after the other sends the next one within microseconds. Spinning saves
        the client the bell and the shard the wake-up.
        """
        began_ns = self._clock.monotonic_ns()
        is_wanted = self._spin_policy.should_spin(began_ns)
        watched = [*self._rings.watched(), *self._calls.watched()] if is_wanted else []
        if 0 < len(watched) <= SPIN_WORDS_MAX:
            spin_wait([word for word, _ in watched], [seen for _, seen in watched], SPIN_REQUEST_NS)
            self._load_monitor.idle_ns += self._clock.monotonic_ns() - began_ns
