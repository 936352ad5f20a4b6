"""Requests of clients on the host through shared memory: one ring for each client. Part of the shell.

A client asks for one over its connection, holds it as long as that lasts, and may use the socket beside it at
any time; what has no room in a ring goes there as well. Rings of the incarnation before are removed: its
connections are gone. A ring whose words make no sense is closed, and its client goes on by socket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from actors.wal_shard.requests.caller import Caller
from ringlog.board.layout import BoardError
from ringlog.clock import Clock
from ringlog.envelope import wire
from ringlog.envelope.messages import Message
from ringlog.envelope.refusal import error_reply
from ringlog.errors import RingError
from ringlog.limits import CALL_RING_GRACE_S, CALL_RING_POLL_MS, CALL_RINGS_MAX
from ringlog.link.channel.call_ring import CallServer, calls_prefix, remove_stale_call_rings
from ringlog.logs import log_event

log = logging.getLogger("ringlog.shard")


class _ClientCallRing:
    __slots__ = ("caller", "is_opened", "made_ns", "needs_bell", "server")

    def __init__(self, caller: Caller, server: CallServer, made_ns: int) -> None:
        self.caller = caller
        self.server = server
        self.made_ns = made_ns
        self.is_opened = False
        """Its client has opened it."""
        self.needs_bell = False
        """It was answered, and its bell was not rung."""


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
        """Those to be rung."""
        self._first = self._looked = 0
        self._look_ns = 0
        remove_stale_call_rings(shm_dir, shard)

    def __len__(self) -> int:
        return len(self._order)

    def open(self, client: bytes) -> str:
        """Make one for a connection; its name, or "" when there is to be none. Asked again it is the same."""
        known = self._rings.get(client)
        if known is not None:
            return known.server.name
        if len(self._order) >= CALL_RINGS_MAX:
            return ""
        self._made += 1
        try:
            server = CallServer(self._shm_dir, f"{self._prefix}{self._made}", self._shard)
        except (BoardError, RingError) as e:
            log_event(log, logging.WARNING, "no ring for calls", reason=str(e))
            return ""
        ring = _ClientCallRing(Caller(client), server, self._clock.monotonic_ns())
        self._rings[client] = ring
        self._order.append(ring)
        return server.name

    def has_pending(self) -> bool:
        """Is there a request? A load a ring."""
        for ring in self._order:  # noqa: SIM110  a generator takes longer than the look
            if ring.server.has_requests:
                return True
        return False

    def watched(self) -> list[tuple[memoryview, int]]:
        """Of each ring, a word and its value as long as there is no request."""
        return [ring.server.spin_word() for ring in self._order]

    def take_requests(self, most: int) -> Iterator[tuple[Caller, wire.Envelope]]:
        """Up to `most` requests, one ring after the other, another one first each time."""
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
        """A request; None for one with a field out of range, which is answered here."""
        try:
            return wire.decode(data)
        except wire.MessageInvalid as e:
            refusal = error_reply(e)
            if not self.answer(ring.caller, refusal, e.corr):
                raise
            return None

    def answer(self, caller: Caller, message: Message, corr: int) -> bool:
        """Answer through the ring, which is rung with the others; False when it has no room, or is gone: the
        socket takes it."""
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
        """Are there answers whose clients were not woken?"""
        return bool(self._owed)

    def ring_bells(self) -> None:
        """Wake those who sleep and were answered. Many at once: whoever is woken may be given the processor
        that the others' answers would need."""
        owed, self._owed = self._owed, []
        for ring in owed:
            ring.needs_bell = False
            ring.server.ring()

    def remove_abandoned(self, now_ns: int) -> None:
        """Now and then: remove a ring whose client is gone."""
        if now_ns < self._look_ns or not self._order:
            return
        self._look_ns = now_ns + CALL_RING_POLL_MS * 1_000_000
        # A turn of its own: requests that keep moving the other one must not keep this one from any ring.
        self._looked = (self._looked + 1) % len(self._order)
        ring = self._order[self._looked]
        if ring.server.has_client():
            ring.is_opened = True
        elif ring.is_opened or now_ns - ring.made_ns > CALL_RING_GRACE_S * 1_000_000_000:
            self._remove(ring, "")

    def _remove(self, ring: _ClientCallRing, why: str) -> None:
        if self._rings.get(ring.caller) is not ring:
            return  # Done already, when an answer to it could not be written.
        if why:
            log_event(log, logging.WARNING, "call ring closed", ring=ring.server.name, reason=why)
        self._order.remove(ring)
        if ring.needs_bell:
            self._owed.remove(ring)
        del self._rings[ring.caller]
        ring.server.close()

    def close(self) -> None:
        """Remove all of them."""
        for ring in self._order:
            ring.server.close()
        self._owed.clear()
        self._order.clear()
        self._rings.clear()
