"""The gateway's sockets: receives requests with the identity of their sender, sends replies without blocking.

A ROUTER socket delivers a message when all its parts have arrived. ZMQ_MAXMSGSIZE limits the size of a part,
and this module limits the number of parts and their total size. Every socket enforces a ZAP domain, so only
authenticated peers get that far.

A peer that does not read its replies first fills its own pipe, then its own outbox here. A ROUTER cannot end
one connection, and a client sends a request again only after a reply or on a new connection. So a large reply
beyond the outbox is replaced by a small one, after which the client repeats its request: no request is left
without a reply. Other peers are not affected.
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
from ringlog.errors import NotReady, StartRefused
from ringlog.limits import (
    ENVELOPE_PARTS_MAX,
    FRAME_BYTES_MAX,
    GATEWAY_OUTBOX_BYTES_MAX,
    GATEWAY_OUTBOX_KEPT_BYTES,
    GATEWAY_OUTBOX_RESERVE_BYTES,
    GATEWAY_SEND_HWM,
    HANDSHAKE_MS,
    MESSAGE_BYTES_MAX,
    SOCKET_COPY_BYTES_MAX,
    SOCKET_HWM,
)
from ringlog.link.curve import CurveKey
from ringlog.runtime.listener import AcceptGuard, Listener

log: logging.Logger = logging.getLogger("ringlog.gateway")

LIBZMQ_MIN = (4, 3, 5)
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
STRIKES_MAX = 16
"""Number of malformed messages after which messages of a connection are ignored."""
_STRIKERS_MAX = 4_096
_RETRY_AFTER_MS = 500


class ReceivedRequest(NamedTuple):
    """One decoded request. `user_id` is the identity that ZAP established for the connection, "" for none."""

    client: bytes
    user_id: str
    envelope: wire.Envelope
    attachment: memoryview | None


def require_libzmq() -> None:
    """Raise StartRefused if libzmq has known vulnerabilities or lacks a feature that the gateway needs."""
    if zmq.zmq_version_info() < LIBZMQ_MIN:
        raise StartRefused(
            "libzmq is too old: install version 4.3.5 or later", found=zmq.zmq_version(), least="4.3.5"
        )
    if not zmq.has("curve"):
        raise StartRefused("libzmq was built without CURVE")


class _SendOutcome(Enum):
    SENT = "now"
    BLOCKED = "later"
    """Its pipe is full."""
    UNREACHABLE = "never"
    """The connection no longer exists."""


class ZmqFrontend:
    """One bound ROUTER socket.

    `tag` is one byte that distinguishes its reply addresses from those of other sockets.
    """

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
        self.malformed: int = 0
        self.undelivered: int = 0

    @property
    def endpoint(self) -> str:
        """The bound endpoint, including a port that the system chose."""
        return self._listener.endpoint

    def guard(self, now_ns: int) -> None:
        """Accept connections only while enough descriptors are free.

        Cheap: call it in every pass of the loop.
        """
        self._guard.check_descriptors(now_ns)

    def owns(self, client: bytes) -> bool:
        """Return whether a reply address is of this socket."""
        return client.startswith(self._tag)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the state changes.

        Edge-triggered: also call has_input.
        """
        return cast(int, self._socket.getsockopt(zmq.FD))

    def has_input(self) -> bool:
        """Return whether a message is waiting."""
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def has_backlog(self) -> bool:
        """Whether replies wait for slow clients. If so, call flush again soon."""
        return bool(self._outboxes)

    def receive(self, most: int) -> Iterator[ReceivedRequest]:
        """Yield up to `most` requests. A malformed message counts as one; its sender receives an error."""
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
        """Send a reply, or queue it for a slow client.

        Return False if the client is disconnected, or reads no replies and has too many small ones.
        """
        parts: list[Any] = [client[1:], wire.encode(message, corr, version)]
        if attachment is not None:
            parts.append(attachment)
        sent = _SendOutcome.BLOCKED if client in self._outboxes else self._try_send(parts)
        return self._queue(client, parts, corr) if sent is _SendOutcome.BLOCKED else sent is _SendOutcome.SENT

    def flush(self) -> list[bytes]:
        """Send queued replies as far as clients accept them; return the clients that are disconnected."""
        disconnected = []
        for client in list(self._outboxes):
            box = self._outboxes[client]
            sent = _SendOutcome.SENT
            while box and (sent := self._try_send(box[0])) is _SendOutcome.SENT:
                self._outbox_bytes[client] -= _size(box.popleft())
            if sent is _SendOutcome.UNREACHABLE:
                disconnected.append(client)
            if not box or sent is _SendOutcome.UNREACHABLE:
                del self._outboxes[client], self._outbox_bytes[client]
        return disconnected

    def close(self) -> None:
        """Send queued messages for at most 1 s, then close the socket."""
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
                wire.EnvelopeInvalid(
                    "message has a wrong number of parts or is too large", parts=len(parts) - 1, bytes=size
                ),
            )
            return None
        try:
            envelope = wire.decode(parts[1].buffer)
        except wire.MessageInvalid as e:
            # A field out of range is a normal refusal and no strike.
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
                log.warning("reply not sent: %s", e.strerror)
            return _SendOutcome.UNREACHABLE
        return _SendOutcome.SENT

    def _queue(self, client: bytes, parts: list[Any], corr: int) -> bool:
        queued_bytes = self._outbox_bytes.get(client, 0) + _size(parts)
        if queued_bytes > GATEWAY_OUTBOX_BYTES_MAX:
            if _size(parts) > GATEWAY_OUTBOX_KEPT_BYTES:
                self.undelivered += 1
                parts = [parts[0], wire.encode(_substitute(corr), corr)]
                queued_bytes = self._outbox_bytes.get(client, 0) + _size(parts)
            if queued_bytes > GATEWAY_OUTBOX_BYTES_MAX + GATEWAY_OUTBOX_RESERVE_BYTES:
                self.undelivered += 1
                return False
        self._outboxes.setdefault(client, deque()).append(parts)
        self._outbox_bytes[client] = queued_bytes
        return True


def _substitute(corr: int) -> m.Message:
    """Return the message that replaces a large one beyond the outbox.

    A request that changes something has been applied, so the outcome is unknown. A client repeats it under
    the same numbers. After SubscriptionsLost it gets all its grants again.
    """
    if not corr:
        return m.SubscriptionsLost()
    return error_reply(
        NotReady(
            "the connection has too many unread replies: read them, then retry", outcome="unknown",
            reason="unread_replies", retry_after_ms=_RETRY_AFTER_MS,
        )
    )  # fmt: skip


def _size(parts: list[Any]) -> int:
    return sum(len(part) for part in parts)


def _user_id(part: Any) -> str:
    """Return the user id that the ZAP handler assigned. libzmq attaches it; a client cannot set it."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""
