"""The gateway's sockets: requests in with who sent them, answers out without waiting for anybody.

A ROUTER hands over a message when all its parts are there; the size of a part is bounded by
ZMQ_MAXMSGSIZE, their number and sum by us (SEC-10). Only authenticated peers get that far: every socket
has a ZAP domain that is enforced (SEC-2). A peer that does not take its answers fills its own pipe, then
its own outbox here, and is then forgotten; the others notice nothing (SEC-11, SEC-19).
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, cast

import zmq

from ringlog.envelope import messages as m
from ringlog.envelope import wire
from ringlog.envelope.refusal import error_reply
from ringlog.errors import StartRefused
from ringlog.limits import (
    ENVELOPE_PARTS_MAX,
    FRAME_BYTES_MAX,
    GATEWAY_OUTBOX_BYTES_MAX,
    GATEWAY_SEND_HWM,
    HANDSHAKE_MS,
    MESSAGE_BYTES_MAX,
    SOCKET_COPY_BYTES_MAX,
    SOCKET_HWM,
)
from ringlog.link.curve import CurveKey
from ringlog.runtime.listener import AcceptGuard, Listener

log = logging.getLogger("ringlog.gateway")

LIBZMQ_MIN = (4, 3, 5)
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
STRIKES_MAX = 16
"""Malformed messages after which a connection is not listened to any more."""
_STRIKERS_MAX = 4_096


class ReceivedRequest(NamedTuple):
    """One decoded request. `user_id` is what ZAP established about the connection, "" for nothing."""

    client: bytes
    user_id: str
    envelope: wire.Envelope
    attachment: memoryview | None


def require_libzmq() -> None:
    """Refuse to serve with a libzmq that has known holes, or none of the means we rely on (SEC-8)."""
    if zmq.zmq_version_info() < LIBZMQ_MIN:
        raise StartRefused("libzmq is too old", found=zmq.zmq_version(), least="4.3.5")
    if not zmq.has("curve"):
        raise StartRefused("libzmq was built without CURVE")


class _SendOutcome(Enum):
    SENT = "now"
    BLOCKED = "later"
    """Its pipe is full."""
    UNREACHABLE = "never"
    """There is no such connection any more."""


class ZmqFrontend:
    """One bound ROUTER. `tag` is one byte that makes its reply addresses differ from other sockets'."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        tag: bytes,
        zap_domain: str,
        server: CurveKey | None = None,
    ) -> None:
        self._tag = tag
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        options = {
            zmq.LINGER: 1_000, zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: GATEWAY_SEND_HWM, zmq.RCVHWM: SOCKET_HWM,
            zmq.MAXMSGSIZE: MESSAGE_BYTES_MAX, zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.IPV6: int("[" in endpoint),
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }  # fmt: skip
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, zap_domain.encode())
        if server is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret)
        try:
            self._listener = Listener(self._socket, endpoint)
        except zmq.ZMQError as e:
            self._socket.close(0)
            raise StartRefused("cannot listen", endpoint=endpoint, reason=str(e)) from None
        self._guard = AcceptGuard([self._listener])
        self._outboxes: dict[bytes, deque[list[Any]]] = {}
        self._outbox_bytes: dict[bytes, int] = {}
        self._strikes: dict[bytes, int] = {}
        self.malformed = 0
        self.undelivered = 0

    @property
    def endpoint(self) -> str:
        """Where it listens, a port chosen by the system included."""
        return self._listener.endpoint

    def guard(self, now_ns: int) -> None:
        """Listen only while there are descriptors to spare; to be called about every turn, cheap."""
        self._guard.check_descriptors(now_ns)

    def owns(self, client: bytes) -> bool:
        """True for reply addresses of this socket."""
        return client.startswith(self._tag)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the state changes (edge-triggered: ask has_input too)."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def has_input(self) -> bool:
        """Is a message waiting?"""
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def has_backlog(self) -> bool:
        """Answers wait for slow clients: call flush again soon."""
        return bool(self._outboxes)

    def receive(self, most: int) -> Iterator[ReceivedRequest]:
        """Yield up to `most` requests; what is none is answered with an error, counted, and costs one."""
        for _ in range(most):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            request = self._decoded(parts)
            if request is not None:
                yield request

    def send(
        self, client: bytes, message: m.Message, corr: int, attachment: Any = None,
        version: int = wire.PROTOCOL,
    ) -> bool:  # fmt: skip
        """Answer, now or when the client takes it; False when it is gone or was let go as too slow."""
        parts: list[Any] = [client[1:], wire.encode(message, corr, version)]
        if attachment is not None:
            parts.append(attachment)
        sent = _SendOutcome.BLOCKED if client in self._outboxes else self._try_send(parts)
        return self._queue(client, parts) if sent is _SendOutcome.BLOCKED else sent is _SendOutcome.SENT

    def flush(self) -> list[bytes]:
        """Send what slow clients take by now; returns those that are gone."""
        gone = []
        for client in list(self._outboxes):
            box = self._outboxes[client]
            sent = _SendOutcome.SENT
            while box and (sent := self._try_send(box[0])) is _SendOutcome.SENT:
                self._outbox_bytes[client] -= _size(box.popleft())
            if sent is _SendOutcome.UNREACHABLE:
                gone.append(client)
            if not box or sent is _SendOutcome.UNREACHABLE:
                del self._outboxes[client], self._outbox_bytes[client]
        return gone

    def close(self) -> None:
        """Send what is queued for at most a second, then let go."""
        self._socket.close()

    def _decoded(self, parts: list[Any]) -> ReceivedRequest | None:
        client = self._tag + parts[0].bytes
        if self._strikes.get(client, 0) >= STRIKES_MAX:
            self.malformed += 1
            return None
        size = sum(len(part) for part in parts)
        if not 2 <= len(parts) <= ENVELOPE_PARTS_MAX or size > MESSAGE_BYTES_MAX + FRAME_BYTES_MAX:
            self._strike(
                client,
                wire.EnvelopeInvalid("wrong number or size of parts", parts=len(parts) - 1, bytes=size),
            )
            return None
        try:
            envelope = wire.decode(parts[1].buffer)
        except wire.MessageInvalid as e:
            # A field out of range is a request like others, and refused like others.
            self.malformed += 1
            self.send(client, error_reply(e), e.corr)
            return None
        except wire.EnvelopeInvalid as e:
            self._strike(client, e)
            return None
        attachment = parts[2].buffer if len(parts) > 2 else None
        return ReceivedRequest(client, _user_id(parts[1]), envelope, attachment)

    def _strike(self, client: bytes, error: wire.EnvelopeInvalid) -> None:
        self.malformed += 1
        if len(self._strikes) >= _STRIKERS_MAX:
            self._strikes.pop(next(iter(self._strikes)))
        self._strikes[client] = self._strikes.get(client, 0) + 1
        self.send(client, error_reply(error), error.corr, version=error.version or wire.PROTOCOL)

    def _try_send(self, parts: list[Any]) -> _SendOutcome:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=_size(parts) <= SOCKET_COPY_BYTES_MAX)
        except zmq.Again:
            return _SendOutcome.BLOCKED
        except zmq.ZMQError as e:
            self.undelivered += 1
            if e.errno != errno.EHOSTUNREACH:
                log.warning("an answer could not be sent: %s", e.strerror)
            return _SendOutcome.UNREACHABLE
        return _SendOutcome.SENT

    def _queue(self, client: bytes, parts: list[Any]) -> bool:
        held = self._outbox_bytes.get(client, 0) + _size(parts)
        if held > GATEWAY_OUTBOX_BYTES_MAX:
            self.undelivered += 1 + len(self._outboxes.pop(client, ()))
            self._outbox_bytes.pop(client, None)
            return False
        self._outboxes.setdefault(client, deque()).append(parts)
        self._outbox_bytes[client] = held
        return True


def _size(parts: list[Any]) -> int:
    return sum(len(part) for part in parts)


def _user_id(part: Any) -> str:
    """What the ZAP handler called the sender; libzmq attaches it, no client can."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""
