"""RingChannel: frames to one shard through a ring, and their settlements.

Runs wait in the outbox until the ring has space. Then they are in flight until they are settled. The first
run opens the ring. If the ring is lost, the channel opens another one. Frames that were in flight return to
the front of the outbox, in order, and are pushed again under the same producer numbers, so the shard
recognizes them.

The first ring is small. If it was full, or a frame is too large for it, the channel requests a larger one, up
to `run.ring_bytes`. The channel switches when the old ring is empty, so that frames keep their order.

Two kinds of frames go by Append message: frames that are too large for the largest ring, and all frames while
shared memory has no space for a ring. Everything after them waits for the reply, because a lower producer
number must never arrive after a higher one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringlog.clock import Clock
from ringlog.envelope.messages import Append, RingClose, RingOpen
from ringlog.errors import (
    CorruptFrame,
    InvariantViolation,
    NotReady,
    Outcome,
    RingError,
    RinglogError,
    Throttled,
)
from ringlog.frame.settle_entry import WORDS
from ringlog.limits import RING_BYTES_MAX, RING_FRAME_FRACTION, RING_GROWTH
from ringlog.link.channel.client_ring import ClientRing, RingLocation
from ringlog.link.channel.outbound_frames import InFlight, OutboundFrames
from ringlog.link.futures import Pending
from ringlog.link.peer import MS, FdSet, Peer
from ringlog.link.peer_request import FINAL_REASONS, PeerReply
from ringlog.link.timers import Timer, Timers
from ringlog.logs import log_event
from ringlog.process_id import own_process_id
from ringlog.ring.layout import WakeupFlags
from ringlog.ring.producer import RingProducer

log: logging.Logger = logging.getLogger("ringlog.client")

OPEN_REQUEST_NS = 2_000 * MS
OPEN_RETRY_NS = 100 * MS
GROW_RETRY_NS = 10_000 * MS
"""Time before the next request for a larger ring, after the engine refused one."""
BY_MESSAGE_NS = 1_000 * MS
"""Time for which frames go by message, after shared memory had no space for a ring."""
BY_MESSAGE_BYTES = 1 << 20
"""Frames are combined into messages up to this size. A larger frame is sent on its own."""
RING_CHECK_NS = 1_000 * MS
"""Interval of checks of the ring while frames wait: it may have been removed."""
CLOSES_PER_FRAME_MAX = 2
"""Number of rings that a shard may close with the same oldest frame before that frame is given up."""


class RingChannel:
    """The frames of one client to one shard. Not thread-safe."""

    def __init__(
        self,
        client_id: str,
        *,
        clock: Clock,
        timers: Timers,
        fds: FdSet,
        control: Peer,
        on_displaced: Callable[[OutboundFrames], None],
    ) -> None:
        self._client_id = client_id
        self._clock, self._timers, self._fds = clock, timers, fds
        self._control = control
        self._on_displaced = on_displaced
        self._location: RingLocation | None = None
        self._ring: ClientRing | None = None
        self._next_ring: ClientRing | None = None
        """The next ring, which is used once the current one is empty."""
        self._grow_after_ns = 0
        self._by_message_until_ns = 0
        self._opening: Pending[PeerReply] | None = None
        self._retry: Timer | None = None
        self._check_timer: Timer | None = None
        self._outbox: deque[OutboundFrames] = deque()
        self._in_flight = InFlight()
        self._is_sending_message = False
        self._last_oldest: tuple[OutboundFrames, int] | None = None
        self._close_count = 0
        self.frames_resent: int = 0

    # -- calls of the owner ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Frames wait or are in flight."""
        return bool(self._outbox) or self._in_flight.frames > 0

    @property
    def in_flight(self) -> int:
        """Number of frames in the ring that are not settled."""
        return self._in_flight.frames if self._ring is not None else 0

    @property
    def is_open(self) -> bool:
        """There is a ring."""
        return self._ring is not None

    @property
    def is_full(self) -> bool:
        """Frames wait for space in an existing ring, because its shard does not empty it."""
        return self._ring is not None and bool(self._outbox) and self._in_flight.frames > 0

    def spin_word(self) -> tuple[memoryview, int] | None:
        """Return the word to spin on, and its value now; another value means settlements.

        None without a ring.
        """
        return None if self._ring is None else self._ring.producer.spin_word()

    def submit(self, run: OutboundFrames) -> None:
        """Send the run after all runs that were submitted before."""
        self._outbox.append(run)
        if len(self._outbox) == 1:
            self._push()

    def pump(self) -> bool:
        """Process settlements and push frames that fit. Return True if settlements arrived."""
        ring = self._ring
        if ring is None or not (self._in_flight.frames or self._outbox):
            return False  # A ring that its shard closes meanwhile is detected with the next frame.
        try:
            count = self._in_flight.match(ring.producer.take_settlements())
            is_closed = self._ring is ring and ring.producer.is_consumer_closed
            if is_closed:
                # The flag was read after the entries. A second read gets the frames that were settled before
                # the ring was closed.
                self._in_flight.match(ring.producer.take_settlements())
        except RingError as e:
            if self._ring is ring:
                self._displace(f"ring unusable: {e}")
            return True
        if is_closed and self._ring is ring:
            self._displace("the ring was closed by its shard")
            return True
        if count or self._outbox:
            self._push()
        return count > 0

    def on_bell(self, fd: int) -> bool:
        """Clear the bell. Return False if this descriptor is not ours."""
        if self._ring is None or self._ring.fd != fd:
            return False
        self._ring.drain_bell()
        return True

    def arm(self, *, is_wanted: bool) -> None:
        """Request wake-ups for settlements, or cancel the request."""
        if self._ring is not None:
            self._ring.set_wakeups(WakeupFlags.SETTLEMENTS if is_wanted and self.has_work else 0)

    def move(self, location: RingLocation | None) -> None:
        """Use another start of the engine (None: no engine). Unsettled frames are displaced."""
        self._location = None
        self.close_ring()
        self._close_count = 0
        runs = self._withdraw_runs()
        self._location = location
        for run in runs:
            self._on_displaced(run)

    def close(self) -> list[OutboundFrames]:
        """Close the channel. Return the unsettled runs, oldest first."""
        self._location = None
        ring = self._ring
        if ring is not None:
            # A corrupt ring has no last settlements. Its frames stay unsettled.
            with contextlib.suppress(RingError):
                self._in_flight.match(ring.producer.take_settlements())
        self.close_ring()
        return self._withdraw_runs()

    # -- the ring -----------------------------------------------------------------------------------

    def _open(self, ring_bytes: int = 0) -> None:
        """Request a ring: the first one, or one of `ring_bytes` to replace the current one."""
        location = self._location
        if location is None or self._opening is not None or self._retry is not None:
            return
        deadline = self._clock.monotonic_ns() + OPEN_REQUEST_NS
        request = RingOpen(
            self._client_id, os.getpid(), location.shard, ring_bytes, pid_started=own_process_id()[1]
        )
        self._opening = opening = location.supervisor.request(request, deadline)
        opening.when_done(lambda done: self._opened(location, done))

    def _opened(self, location: RingLocation, opening: Pending[PeerReply]) -> None:
        is_awaited = self._opening is opening
        if is_awaited:
            self._opening = None
        if self._location is not location or not is_awaited:
            if opening.error is None:
                # A ring of another start of the engine, for a location that this channel has left. It is not
                # used.
                self._send_ring_close(location, opening.result().message.ring)
            if is_awaited:
                self._try_again()  # This request was the one that detected the end of the previous engine.
            return
        try:
            ring = ClientRing(location, opening.result().message, self._fds)
        except RinglogError as e:
            if opening.error is None:
                # The ring exists, but this client cannot use it (no descriptors). Without a close each retry
                # would leave one.
                self._send_ring_close(location, opening.result().message.ring)
            self._not_opened(e)
            return
        if self._ring is None:
            self._ring, self._by_message_until_ns = ring, 0
        elif ring.producer.capacity > self._ring.producer.capacity:
            self._next_ring = ring
        else:
            ring.close()
            self._send_ring_close(location, ring.name)
            self._grow_after_ns = self._clock.monotonic_ns() + GROW_RETRY_NS
        self._push()

    def _not_opened(self, error: RinglogError) -> None:
        """Handle a failed request for a ring: no space, the shard does not run, or the engine stops."""
        now = self._clock.monotonic_ns()
        if self._ring is not None:
            self._grow_after_ns = now + GROW_RETRY_NS
            self._push()  # A frame may have waited for the larger ring. It goes by message.
            return
        if isinstance(error, Throttled):
            if not self._by_message_until_ns:
                log_event(
                    log, logging.WARNING, "no ring available, frames are sent by socket", reason=error.message
                )
            self._by_message_until_ns = now + BY_MESSAGE_NS
            self._push()
            return
        if error.detail.get("reason") in FINAL_REASONS:
            self._fail_waiting(error)
            return
        # Frames wait for the next attempt or their deadline.
        self._retry = self._timers.call_at(now + OPEN_RETRY_NS, self._try_again)

    def _fail_waiting(self, error: RinglogError) -> None:
        """Fail all waiting frames, because no shard accepts them. Later runs request a ring again."""
        waiting, self._outbox = self._outbox, deque()
        for run in waiting:
            if not run.is_abandoned:
                outcome: Outcome = "unknown" if run.was_rewound else "not_applied"
                failed = NotReady(error.message, outcome=outcome, **error.detail)
                run.fail_next(run.count - run.settled, failed)

    def _grow(self, ring: ClientRing, frame_bytes: int) -> None:
        """Request a larger ring: this one was full, or is too small for a frame of this size."""
        if self._next_ring is None and self._clock.monotonic_ns() >= self._grow_after_ns:
            wanted = max(ring.producer.capacity * RING_GROWTH, frame_bytes * RING_FRAME_FRACTION)
            self._open(min(wanted, RING_BYTES_MAX))

    def _switch_ring(self) -> ClientRing | None:
        """Return the ring to push into: the larger one once the current one is empty, None until then."""
        ring, next_ring = self._ring, self._next_ring
        if ring is None or next_ring is None or ring.producer.is_consumer_closed:
            return ring
        if self._in_flight.frames:
            return None
        self._ring, self._next_ring = next_ring, None
        ring.close()
        if self._location is not None:
            self._send_ring_close(self._location, ring.name)
        return next_ring

    def _send_ring_close(self, location: RingLocation, name: str) -> None:
        location.supervisor.request(RingClose(name), self._clock.monotonic_ns() + OPEN_REQUEST_NS)

    def _try_again(self) -> None:
        self._retry = None
        if self._outbox:
            self._push()

    def close_ring(self) -> None:
        """Close the ring. Its frames still count as in flight."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        self._opening = None
        for ring in (self._ring, self._next_ring):
            if ring is not None:
                ring.close()
        self._ring = self._next_ring = None

    def _displace(self, reason: str) -> None:
        """Replace a ring that is lost. Its unsettled frames are pushed again."""
        ring, location = self._ring, self._location
        self.close_ring()
        if ring is not None and location is not None:
            self._send_ring_close(location, ring.name)
        self._outbox.extend(self._withdraw_runs())
        self._count_close(reason)
        self._push()

    def _count_close(self, reason: str) -> None:
        if not self._outbox:
            return
        oldest = (self._outbox[0], self._outbox[0].settled)
        self._close_count = self._close_count + 1 if oldest == self._last_oldest else 1
        self._last_oldest = oldest
        if self._close_count > CLOSES_PER_FRAME_MAX:
            self._close_count = 0
            run = self._outbox[0]
            run.fail_next(
                1,
                CorruptFrame(
                    "the shard closed the ring repeatedly at this frame", outcome="unknown", reason=reason
                ),
            )
            if run.settled == run.count:
                self._outbox.popleft()

    def _withdraw_runs(self) -> list[OutboundFrames]:
        """Remove and return all unsettled runs, oldest first. Their unsettled frames count as not pushed."""
        runs = list(dict.fromkeys([*self._in_flight.drain(), *self._outbox]))
        self._outbox.clear()
        self._is_sending_message = False
        unsettled = []
        for run in runs:
            if run.is_abandoned or run.settled == run.count:
                continue
            self.frames_resent += run.rewind()
            unsettled.append(run)
        return unsettled

    # -- pushing ------------------------------------------------------------------------------------

    def _push(self) -> None:
        if self._ring is None:
            self._push_without_ring()
            return
        try:
            ring = self._switch_ring()
            pushed = 0 if ring is None else self._push_what_fits(ring)
        except RingError as e:
            # The ring is corrupt. All unsettled frames, also those of this call, go into another ring.
            self._displace(f"ring unusable: {e}")
            return
        if pushed and ring is not None:
            ring.wake_shard()
        if self.has_work:
            self._schedule_check()

    def _push_without_ring(self) -> None:
        """Request a ring, or send the next frames by message while shared memory has no space for a ring."""
        if self._clock.monotonic_ns() >= self._by_message_until_ns:
            if self._outbox:
                self._open()
            return
        while self._outbox and not self._is_sending_message:
            run = self._outbox[0]
            if run.is_abandoned:
                self._outbox.popleft()
                continue
            limit = int(run.offsets[run.pushed]) + BY_MESSAGE_BYTES
            stop = int(np.searchsorted(run.offsets, limit, side="right")) - 1
            self._send_message(run, max(1, stop - run.pushed))

    def _schedule_check(self) -> None:
        if self._check_timer is None:
            self._check_timer = self._timers.call_at(
                self._clock.monotonic_ns() + RING_CHECK_NS, self._check_ring_name
            )

    def _check_ring_name(self) -> None:
        """Check whether the ring was removed: it works while its shard lives, but no successor would find
        it."""
        self._check_timer = None
        if self._ring is None or not self.has_work:
            return
        producer = self._ring.producer
        if producer.is_removed:
            self._displace("the ring was removed")
        else:
            self._schedule_check()

    def _push_what_fits(self, ring: ClientRing) -> int:
        """Push frames that fit and return their number. Raises RingError for a corrupt ring."""
        pushed = 0
        while self._outbox and not self._is_sending_message and not ring.producer.is_consumer_closed:
            run = self._outbox[0]
            if run.is_abandoned:
                self._outbox.popleft()
                continue
            large_at = run.first_larger(ring.producer.frame_bytes_max)
            if large_at == run.pushed:
                self._grow(ring, run.size_of(large_at))
                if self._in_flight.frames == 0 and self._next_ring is None and self._opening is None:
                    self._send_message(run, 1)
                break
            if run.disable_backpressure is not ring.is_urgent and (
                run.disable_backpressure or not self._in_flight.frames
            ):
                ring.set_urgent(is_urgent=run.disable_backpressure)
            count = self._push_part(ring.producer, run, large_at)
            pushed += count
            if run.pushed == run.count:
                self._outbox.popleft()
            elif run.pushed < large_at:
                self._grow(ring, 0)
                break
        return pushed

    def _push_part(self, producer: RingProducer, run: OutboundFrames, stop: int) -> int:
        """Push frames of the run up to `stop`, as many as fit. Return their number."""
        start = run.pushed
        if stop - start == 1:
            position = producer.push_one(run.view(start, stop))
            if position is None:
                return 0
            positions: Any = range(position, position + 1)
        elif run.frame_bytes:
            _, positions = producer.push_run(run.view(start, stop), run.frame_bytes)
        else:
            offsets = run.offsets[start:stop]
            _, positions = producer.push_buffer(run.view(start, stop), offsets - offsets[0])
        count = len(positions)
        if count:
            run.pushed += count
            self._in_flight.add(run, positions)
        return count

    def _send_message(self, run: OutboundFrames, count: int) -> None:
        """Send the next frames of the run by message. No later frame overtakes them."""
        self._is_sending_message = True
        row = run.pushed
        run.pushed += count
        request = Append(run.topic, count, disable_backpressure=run.disable_backpressure)
        frames = run.view(row, row + count)
        reply = self._control.request(request, run.deadline_ns, frames, is_patient=False)
        reply.when_done(lambda done: self._message_done(run, row, count, done))

    def _message_done(self, run: OutboundFrames, row: int, count: int, reply: Pending[PeerReply]) -> None:
        if run.settled != row or run.pushed != row + count or not self._is_sending_message:
            return  # The run was taken back in the meantime, and its frames are sent again.
        self._is_sending_message = False
        if run.pushed == run.count and self._outbox and self._outbox[0] is run:
            self._outbox.popleft()
        if reply.error is None:
            run.take_entries(
                np.frombuffer(reply.result().message.entries, dtype=np.uint64).reshape(-1, WORDS)
            )
        elif isinstance(reply.error, RinglogError):
            run.fail_next(count, reply.error)
        else:
            raise InvariantViolation("a request failed with an error outside RinglogError") from reply.error
        self._push()
