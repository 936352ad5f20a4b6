"""The ROUTER socket on which an actor receives requests. It is bounded and robust against malformed input.

ZMQ_MAXMSGSIZE limits the size of a part. The number of parts is checked on receipt. Both directions have a
finite high-water mark. A peer that does not read its replies loses them and must repeat its requests. It
never blocks the actor.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from typing import Any, cast

import zmq

from ringlog.envelope import messages as m
from ringlog.envelope import wire
from ringlog.envelope.refusal import error_reply
from ringlog.limits import ENVELOPE_PARTS_MAX, HANDSHAKE_MS, MESSAGE_BYTES_MAX, SOCKET_HWM
from ringlog.runtime.listener import AcceptGuard, Listener

log: logging.Logger = logging.getLogger("ringlog.runtime")


_POLLIN = int(zmq.POLLIN)
"""Plain integer: an operation on an enum member costs microseconds, and this one runs in every pass."""
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class RouterSocket:
    """Requests in, replies out; `receive` documents the requests."""

    def __init__(self, endpoint: str, *, parts_max: int = ENVELOPE_PARTS_MAX) -> None:
        self._parts_max = parts_max
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._guard = AcceptGuard([Listener(self._socket, endpoint)])
        self.malformed: int = 0
        self.undelivered: int = 0
        self._is_quiet = False
        """No message waits, unless the descriptor became readable since."""

    def guard(self, now_ns: int) -> None:
        """Stop accepting connections while descriptors are scarce. Cheap; call once a pass of the loop."""
        self._guard.check_descriptors(now_ns)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable on a change (edge-triggered: check has_input too)."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def has_input(self, *, is_readable: bool = True) -> bool:
        """Return whether a message waits.

        A caller that polls the descriptor passes the result as `is_readable`. A check costs two system
        calls, which are skipped if nothing can have arrived since the last one.
        """
        if not is_readable and self._is_quiet:
            return False
        has_input = bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)
        self._is_quiet = not has_input
        return has_input

    def receive(self, most: int) -> Iterator[tuple[bytes, wire.Envelope, bytearray | None]]:
        """Yield up to `most` requests: (reply address, envelope, own copy of the attached frames or None).

        A message that is not an envelope is refused and counted in `malformed`. It counts towards `most`.
        """
        self._is_quiet = False
        for _ in range(most):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            client = parts[0].bytes
            if not 2 <= len(parts) <= self._parts_max:
                self._refuse(client, wire.EnvelopeInvalid("wrong number of parts", parts=len(parts) - 1))
                continue
            try:
                envelope = wire.decode(parts[1].buffer)
            except wire.EnvelopeInvalid as e:
                self._refuse(client, e)
                continue
            attachment = bytearray(parts[2].buffer) if len(parts) > 2 else None
            yield client, envelope, attachment

    def _refuse(self, client: bytes, error: wire.EnvelopeInvalid) -> None:
        self.malformed += 1
        self.send(client, error_reply(error), error.corr, version=error.version or wire.PROTOCOL)

    def send(
        self, client: bytes, message: m.Message, corr: int, attachment: Any = None,
        version: int = wire.PROTOCOL,
    ) -> bool:  # fmt: skip
        """Send a reply. Returns False if the peer has disconnected or does not read."""
        parts: list[Any] = [client, wire.encode(message, corr, version)]
        if attachment is not None:
            parts.append(attachment)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.undelivered += 1
            return False
        return True

    def post(self, client: bytes, data: bytes, attachment: Any) -> int:
        """Send an encoded message. Returns 0, or an errno.

        EAGAIN: the peer does not read. EHOSTUNREACH: the peer has disconnected.
        """
        send = self._socket.send
        self._is_quiet = False
        try:
            # Sending part by part takes half the time of send_multipart. Only the first part can fail.
            send(client, _NOBLOCK_MORE)
            if attachment is None:
                send(data, _NOBLOCK)
            else:
                send(data, _NOBLOCK_MORE)
                send(attachment, _NOBLOCK)
        except zmq.ZMQError as e:
            self.undelivered += 1
            return e.errno or errno.EAGAIN
        return 0

    def close(self) -> None:
        """Send queued replies for at most 1 s, then close the socket."""
        self._socket.close()
        self._context.term()
