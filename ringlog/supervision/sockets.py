"""The supervisor's sockets: where clients ask, and one to each shard. Neither ever blocks.

The socket to a shard lives as long as one incarnation of it: what was queued for a dead one must not
reach its successor, which is told everything anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from ringlog.envelope.messages import Message
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import PROTOCOL, Envelope, EnvelopeInvalid, decode, encode
from ringlog.limits import ENVELOPE_BYTES_MAX, ENVELOPE_PARTS_MAX, HANDSHAKE_MS, SOCKET_HWM
from ringlog.logs import log_event
from ringlog.runtime.listener import AcceptGuard, Listener

log = logging.getLogger("ringlog.supervision")

RECEIVE_MAX = 256
"""Messages one turn takes from one socket, so that no peer keeps the children waiting."""
_LINGER_MS = 200


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
    socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)


class SupervisorControlSocket:
    """Where clients, the gateway and the command line ask. `address` below is an opaque reply address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _set_limits(self.socket)
        # A reply to somebody who left fails instead of vanishing (SEC-11).
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._guard = AcceptGuard([Listener(self.socket, endpoint)])

    def guard(self, now_ns: int) -> None:
        """Listen only while there are descriptors to spare; to be called about every turn, cheap."""
        self._guard.check_descriptors(now_ns)

    def receive(self) -> Iterator[tuple[bytes, Envelope]]:
        """Requests that wait, as (address, envelope); malformed ones are answered here."""
        for _ in range(RECEIVE_MAX):
            try:
                address, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if not 1 <= len(parts) <= ENVELOPE_PARTS_MAX:
                    raise EnvelopeInvalid("wrong number of parts", parts=len(parts))
                yield address, decode(parts[0])
            except EnvelopeInvalid as e:
                self.send(address, e.corr, error_reply(e), e.version or PROTOCOL)

    def send(self, address: bytes, corr: int, message: Message, version: int = PROTOCOL) -> None:
        """Answer; who does not read, or left, goes without."""
        try:
            self.socket.send_multipart([address, encode(message, corr, version)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            log_event(
                log, logging.WARNING, "reply not delivered", kind=type(message).__name__, reason=e.strerror
            )

    def close(self) -> None:
        """Send what is queued for a moment, then let go."""
        self.socket.close()


class ShardControlLink:
    """The way to one incarnation of one shard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        _set_limits(self.socket)
        self.socket.connect(endpoint)
        self._corr = 0

    def send(self, message: Message) -> int:
        """Queue a message; returns its correlation id, or 0 when the shard takes no more now."""
        self._corr += 1
        try:
            self.socket.send(encode(message, self._corr), zmq.NOBLOCK)
        except zmq.Again:
            return 0
        return self._corr

    def receive(self) -> Iterator[Envelope]:
        """Replies that wait; what is not an envelope is dropped and said."""
        for _ in range(RECEIVE_MAX):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield decode(parts[0])
            except EnvelopeInvalid as e:
                log_event(log, logging.WARNING, "shard reply does not decode", reason=str(e))

    def close(self) -> None:
        """Drop what is queued and let go."""
        self.socket.close(linger=0)
