"""The socket on which an actor takes requests: ROUTER, bounded, undeceived by malformed input.

Limits (SEC-10, SEC-11): the size of a part by ZMQ_MAXMSGSIZE, the number of parts while receiving, a
finite high-water mark both ways. A peer that does not read its replies loses them (it asks again); it
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

log = logging.getLogger("ringlog.runtime")


_POLLIN = int(zmq.POLLIN)
"""Plain: operations of an enumeration cost microseconds, and this is asked at every turn."""
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class RouterSocket:
    """Requests in, replies out; see `receive` for what arrives."""

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
        self.malformed = 0
        self.undelivered = 0
        self._is_quiet = False
        """Nothing waits, unless the descriptor became readable since."""

    def guard(self, now_ns: int) -> None:
        """Listen only while there are descriptors to spare; to be called about every turn, cheap."""
        self._guard.check_descriptors(now_ns)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the state changes (edge-triggered: ask has_input too)."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def has_input(self, *, is_readable: bool = True) -> bool:
        """Is a message waiting? Who waits on the descriptor says when it is not `is_readable`: a look costs
        two system calls, which are spared where nothing can have come since the last one."""
        if not is_readable and self._is_quiet:
            return False
        has_input = bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)
        self._is_quiet = not has_input
        return has_input

    def receive(self, most: int) -> Iterator[tuple[bytes, wire.Envelope, bytearray | None]]:
        """Yield up to `most` requests: (reply address, envelope, private copy of the attached frames).

        What is not an envelope is answered with an error and counted, and costs one of `most`.
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
        """Answer; False when the peer is gone or does not read."""
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
        """Send an encoded message; 0, or why not: EAGAIN when the peer does not read, EHOSTUNREACH when it is
        gone."""
        send = self._socket.send
        self._is_quiet = False
        try:
            # Part by part, which takes half the time of send_multipart; only the first can find no way.
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
        """Send what is queued for at most a second, then let go."""
        self._socket.close()
        self._context.term()
