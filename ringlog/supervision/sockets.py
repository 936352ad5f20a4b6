"""The supervisor's sockets: one for requests, and one to each shard. Neither ever blocks.

The socket to a shard lives as long as one incarnation of the shard. Messages that were queued for a dead
incarnation must not reach its successor: the supervisor sends the successor the complete state again.
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

log: logging.Logger = logging.getLogger("ringlog.supervision")

RECEIVE_MAX = 256
"""Messages that one pass of the loop takes from one socket. More would delay the supervision of children."""
_LINGER_MS = 200


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
    socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)


class SupervisorControlSocket:
    """Socket for requests of clients, the gateway and the command line.

    Where a method takes an `address`, it is the opaque reply address of one request.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _set_limits(self.socket)
        # A reply to a client that has disconnected must fail. By default ROUTER drops it silently.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._guard = AcceptGuard([Listener(self.socket, endpoint)])

    def guard(self, now_ns: int) -> None:
        """Stop accepting connections while file descriptors are scarce. Cheap; call once a pass of the loop.

        `now_ns` is monotonic.
        """
        self._guard.check_descriptors(now_ns)

    def receive(self) -> Iterator[tuple[bytes, Envelope]]:
        """Yield the waiting requests as (address, envelope). Malformed requests are refused here."""
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
        """Send a reply. If the client has disconnected or does not read, the reply is dropped and logged."""
        try:
            self.socket.send_multipart([address, encode(message, corr, version)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            log_event(
                log, logging.WARNING, "reply not delivered", kind=type(message).__name__, reason=e.strerror
            )

    def close(self) -> None:
        """Close the socket. Queued replies are sent for at most 200 ms."""
        self.socket.close()


class ShardControlLink:
    """Connection to one incarnation of one shard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _set_limits(self.socket)
        self.socket.connect(endpoint)
        self._corr = 0

    def send(self, message: Message) -> int:
        """Queue a message and return its correlation id. Returns 0 if the shard's queue is full."""
        self._corr += 1
        try:
            self.socket.send(encode(message, self._corr), zmq.NOBLOCK)
        except zmq.Again:
            return 0
        return self._corr

    def receive(self) -> Iterator[Envelope]:
        """Yield the waiting replies. A reply that does not decode is dropped and logged."""
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
        """Close the socket and drop queued messages."""
        self.socket.close(linger=0)
