"""Connections between the HTTP gateways of one engine: messages of length and msgpack over Unix sockets.

A connection carries requests and notices in one direction, and replies in the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from ringlog.actors.http_gateway.siblings.messages import (
    FindSession,
    JobsSettled,
    ListSessions,
    SessionsHeld,
    SiblingEnvelope,
    SiblingNotice,
    SiblingRefused,
    SiblingReply,
    SiblingRequest,
)
from ringlog.errors import RinglogError
from ringlog.limits import (
    HTTP_SIBLING_BUFFER_BYTES_MAX,
    HTTP_SIBLING_BYTES_MAX,
    HTTP_SIBLING_MS_MAX,
    HTTP_SIBLING_NOTICES_MAX,
    HTTP_SIBLING_REQUESTS_MAX,
    HTTP_SIBLING_RETRY_MS,
)
from ringlog.logs import log_event

log: logging.Logger = logging.getLogger("ringlog.http_gateway")

Answer = Callable[[SiblingRequest], Awaitable[SiblingReply]]
Hear = Callable[[SiblingNotice], None]
_LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SiblingEnvelope).decode


def _framed(number: int, body: SiblingRequest | SiblingReply | SiblingNotice) -> bytes:
    data = _encode(SiblingEnvelope(number, body))
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class SiblingProtocol(asyncio.Protocol):
    """One end of a connection. A subclass receives whole messages."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether the connection has not ended."""
        return self._transport is not None

    @property
    def is_full(self) -> bool:
        """Whether the other end has not read HTTP_SIBLING_BUFFER_BYTES_MAX of what was sent."""
        found = self._transport
        return found is None or found.get_write_buffer_size() > HTTP_SIBLING_BUFFER_BYTES_MAX

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Send nothing any more."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Pass whole messages on. A message that is too long or not valid ends the connection."""
        received = self._received
        received += data
        while len(received) >= _LENGTH_BYTES:
            length = int.from_bytes(received[:_LENGTH_BYTES], "little")
            if length > HTTP_SIBLING_BYTES_MAX:
                self._fail(f"message of {length} bytes, at most {HTTP_SIBLING_BYTES_MAX}")
                return
            end = _LENGTH_BYTES + length
            if len(received) < end:
                return
            message = bytes(received[_LENGTH_BYTES:end])
            del received[:end]
            try:
                envelope = _decode(message)
            except msgspec.DecodeError as e:
                self._fail(str(e))
                return
            self.receive(envelope)

    def receive(self, envelope: SiblingEnvelope) -> None:
        """Handle a message."""
        raise NotImplementedError

    def send(self, frame: bytes) -> None:
        """Send a message, unless the connection has ended."""
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        log_event(log, logging.ERROR, "connection to another gateway ended", reason=reason)
        self._received.clear()
        if self._transport is not None:
            self._transport.abort()


class SiblingAnswers(SiblingProtocol):
    """The end that answers requests and hears notices."""

    def __init__(self, answer: Answer, hear: Hear, opened: set[SiblingAnswers]) -> None:
        """`opened` contains this connection while it is open."""
        super().__init__()
        self._answer, self._hear, self._opened = answer, hear, opened
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is open."""
        super().connection_made(transport)
        self._opened.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended. Requests in progress run to their end."""
        super().connection_lost(exc)
        self._opened.discard(self)

    def receive(self, envelope: SiblingEnvelope) -> None:
        """Answer a request in a task of its own, so that one that waits delays no other."""
        body = envelope.body
        if isinstance(body, FindSession | ListSessions):
            if self.is_full or len(self._tasks) >= HTTP_SIBLING_REQUESTS_MAX:
                self.send(_framed(envelope.number, SiblingRefused("too many requests")))
                return
            task = asyncio.ensure_future(self._reply(envelope.number, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(body, SessionsHeld | JobsSettled):
            self._hear(body)

    async def _reply(self, number: int, request: SiblingRequest) -> None:
        reply: SiblingReply
        try:
            reply = await self._answer(request)
        except RinglogError as e:
            reply = SiblingRefused(e.message)
        self.send(_framed(number, reply))


class SiblingCalls(SiblingProtocol):
    """The end that sends requests and notices."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[SiblingReply]] = {}
        self._number = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests without a reply."""
        super().connection_lost(exc)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the other gateway has ended"))

    def receive(self, envelope: SiblingEnvelope) -> None:
        """Resolve the request of a reply."""
        waiting = self._waiting.get(envelope.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(cast("SiblingReply", envelope.body))

    async def ask(self, request: SiblingRequest) -> SiblingReply:
        """Send a request and return its reply. Raises OSError if the connection ends or takes no more."""
        if self.is_full or len(self._waiting) >= HTTP_SIBLING_REQUESTS_MAX:
            raise BlockingIOError("the other gateway is too slow")
        self._number += 1
        number = self._number
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send(_framed(number, request))
        try:
            reply: SiblingReply = await waiting
            return reply
        finally:
            del self._waiting[number]

    def tell(self, notice: SiblingNotice) -> None:
        """Send a notice. It is dropped if the other end does not read."""
        if not self.is_full:
            self.send(_framed(0, notice))


class SiblingLink:
    """The way to one other gateway. It connects at the first use, and again after the other one has died."""

    def __init__(self, path: str, is_given_up: Callable[[], bool]) -> None:
        """`path` is the Unix socket of the other gateway. `is_given_up`: it will never run again."""
        self._path, self._is_given_up = path, is_given_up
        self._calls: SiblingCalls | None = None
        self._connecting: asyncio.Task[SiblingCalls] | None = None
        self._notices: deque[SiblingNotice] = deque(maxlen=HTTP_SIBLING_NOTICES_MAX)

    async def ask(self, request: SiblingRequest) -> SiblingReply:
        """Send a request and return its reply. A connection may take HTTP_SIBLING_MS_MAX, a reply any time.

        Raises:
            OSError: There is no connection, it has ended, or the other gateway is too slow.
        """
        calls = self._open()
        if calls is None:
            calls = await asyncio.shield(self._connect())
        return await calls.ask(request)

    def tell(self, notice: SiblingNotice) -> None:
        """Send a notice now or when there is a connection. It may be lost."""
        calls = self._open()
        if calls is not None:
            calls.tell(notice)
        else:
            self._notices.append(notice)
            self._connect()

    def close(self) -> None:
        """End the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._calls is not None:
            self._calls.close()

    def _open(self) -> SiblingCalls | None:
        return self._calls if self._calls is not None and self._calls.is_open else None

    def _connect(self) -> asyncio.Task[SiblingCalls]:
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connected())
            self._connecting.add_done_callback(self._was_connected)
        return self._connecting

    async def _connected(self) -> SiblingCalls:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HTTP_SIBLING_MS_MAX / 1_000
        while True:
            try:
                _, calls = await loop.create_unix_connection(SiblingCalls, self._path)
                return calls
            except OSError:
                if self._is_given_up() or loop.time() >= deadline:
                    raise
            await asyncio.sleep(HTTP_SIBLING_RETRY_MS / 1_000)

    def _was_connected(self, done: asyncio.Task[SiblingCalls]) -> None:
        self._connecting = None
        if done.cancelled() or done.exception() is not None:
            self._notices.clear()
            return
        self._calls = done.result()
        while self._notices:
            self._calls.tell(self._notices.popleft())
