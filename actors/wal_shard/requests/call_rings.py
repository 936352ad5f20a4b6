"""Call rings: requests of local clients through shared memory, one ring for each client. Part of the shell.

A client requests a ring over its socket connection and keeps it as long as the connection. It may use the
socket at any time, and must use it for messages that do not fit into the ring. A new incarnation removes the
rings of the previous one, because their connections are closed. A ring with a corrupt header is closed; its
client continues by socket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ringlog.actors.wal_shard.requests.caller import Caller
from ringlog.board.layout import BoardError
from ringlog.clock import Clock
from ringlog.envelope import wire
from ringlog.envelope.messages import Message
from ringlog.envelope.refusal import error_reply
from ringlog.errors import RingError
from ringlog.leases.holders import ProcessId
from ringlog.limits import CALL_RING_OPEN_TIMEOUT_S, CALL_RING_POLL_MS, CALL_RINGS_MAX
from ringlog.link.channel.call_ring import CallServer, calls_prefix, remove_stale_call_rings
from ringlog.logs import log_event

log: logging.Logger = logging.getLogger("ringlog.shard")


class _ClientCallRing:
    __slots__ = ("caller", "is_opened", "made_ns", "needs_bell", "process_id", "server")

    def __init__(self, caller: Caller, server: CallServer, process_id: ProcessId, made_ns: int) -> None:
        self.caller = caller
        self.server = server
        self.process_id = process_id
        self.made_ns = made_ns
        self.is_opened = False
        """True after the client has opened the ring."""
        self.needs_bell = False
        """True if a reply was written and the client's bell has not been rung since."""


class CallRings:
    """All call rings of one shard."""

    def __init__(self, shm_dir: str, shard: int, incarnation: int, clock: Clock) -> None:
        self._shm_dir, self._shard = shm_dir, shard
        self._clock = clock
        self._prefix = f"{calls_prefix(shard)}{incarnation}-"
        self._made = 0
        self._rings: dict[bytes, _ClientCallRing] = {}
        self._order: list[_ClientCallRing] = []
        self._owed: list[_ClientCallRing] = []
        """Rings whose bell is to be rung."""
        self._ended: list[Caller] = []
        self._first = self._looked = 0
        self._look_ns = 0
        remove_stale_call_rings(shm_dir, shard)

    def __len__(self) -> int:
        return len(self._order)

    def open(self, client: bytes, process_id: ProcessId) -> str:
        """Create a ring for a connection of a process and return its name.

        Return "" if no ring can be created. Idempotent.
        """
        known = self._rings.get(client)
        if known is not None:
            return known.server.name
        if len(self._order) >= CALL_RINGS_MAX:
            return ""
        self._made += 1
        try:
            server = CallServer(self._shm_dir, f"{self._prefix}{self._made}", self._shard)
        except (BoardError, RingError) as e:
            log_event(log, logging.WARNING, "cannot create call ring", reason=str(e))
            return ""
        ring = _ClientCallRing(Caller(client), server, process_id, self._clock.monotonic_ns())
        self._rings[client] = ring
        self._order.append(ring)
        return server.name

    def has_pending(self) -> bool:
        """Return True if a ring has a request. Costs one load for each ring."""
        for ring in self._order:  # noqa: SIM110  a generator takes longer than the look
            if ring.server.has_requests:
                return True
        return False

    def watched(self) -> list[tuple[memoryview, int]]:
        """Return for each ring a shared word, and the value of that word while the ring has no request."""
        return [ring.server.spin_word() for ring in self._order]

    def take_requests(self, most: int) -> Iterator[tuple[Caller, wire.Envelope]]:
        """Yield up to `most` requests, ring by ring. Each call starts at the next ring."""
        rings = self._order
        if not rings:
            return
        self._first = (self._first + 1) % len(rings)
        for ring in rings[self._first :] + rings[: self._first]:
            if most <= 0:
                return
            if not ring.server.has_requests:
                continue
            try:
                requests = ring.server.take_requests(most)
                envelopes = [self._decoded(ring, data) for data in requests]
            except (RingError, wire.EnvelopeInvalid) as e:
                self._remove(ring, str(e))
                continue
            most -= len(envelopes)
            for envelope in envelopes:
                if envelope is not None:
                    yield ring.caller, envelope

    def _decoded(self, ring: _ClientCallRing, data: bytes) -> wire.Envelope | None:
        """Decode a request.

        Return None for a request with an invalid field, after replying with the error.
        """
        try:
            return wire.decode(data)
        except wire.MessageInvalid as e:
            refusal = error_reply(e)
            if not self.answer(ring.caller, refusal, e.corr):
                raise
            return None

    def answer(self, caller: Caller, message: Message, corr: int) -> bool:
        """Write a reply to the ring. `ring_bells` wakes the client later.

        Return False if the ring is full or removed. The caller then replies by socket.
        """
        ring = self._rings.get(caller)
        if ring is None:
            return False
        try:
            is_there = ring.server.send_reply(wire.encode(message, corr))
        except RingError as e:
            self._remove(ring, str(e))
            return False
        if is_there and not ring.needs_bell:
            ring.needs_bell = True
            self._owed.append(ring)
        return is_there

    @property
    def has_unrung(self) -> bool:
        """True if there are replies whose clients were not woken yet."""
        return bool(self._owed)

    def ring_bells(self) -> None:
        """Wake sleeping clients that have replies.

        All replies are written before the first wake-up, because a woken client may take the shard's CPU.
        """
        owed, self._owed = self._owed, []
        for ring in owed:
            ring.needs_bell = False
            ring.server.ring()

    def remove_abandoned(self, now_ns: int) -> None:
        """Check one ring every CALL_RING_POLL_MS, and remove it if its client has exited."""
        if now_ns < self._look_ns or not self._order:
            return
        self._look_ns = now_ns + CALL_RING_POLL_MS * 1_000_000
        # Separate from `_first`, which advances with requests: with one index, some rings might never be
        # checked.
        self._looked = (self._looked + 1) % len(self._order)
        ring = self._order[self._looked]
        if ring.server.has_client():
            ring.is_opened = True
        elif ring.is_opened or now_ns - ring.made_ns > CALL_RING_OPEN_TIMEOUT_S * 1_000_000_000:
            self._remove_ended(ring)

    def remove_of(self, process_id: ProcessId) -> None:
        """Remove the rings of a process that died."""
        for ring in [ring for ring in self._order if ring.process_id == process_id]:
            self._remove_ended(ring)

    def take_ended(self) -> list[Caller]:
        """Return the connections that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _remove_ended(self, ring: _ClientCallRing) -> None:
        self._ended.append(ring.caller)
        self._remove(ring, "")

    def _remove(self, ring: _ClientCallRing, why: str) -> None:
        if self._rings.get(ring.caller) is not ring:
            return  # Removed already, because a reply could not be written.
        if why:
            log_event(log, logging.WARNING, "call ring closed", ring=ring.server.name, reason=why)
        self._order.remove(ring)
        if ring.needs_bell:
            self._owed.remove(ring)
        del self._rings[ring.caller]
        ring.server.close()

    def close(self) -> None:
        """Remove all rings."""
        for ring in self._order:
            ring.server.close()
        self._owed.clear()
        self._order.clear()
        self._rings.clear()
