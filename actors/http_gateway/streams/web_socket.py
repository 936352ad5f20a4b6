"""The WebSocket data plane: /v0/ws. Commands and frames are JSON text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw

from ringlog.access.keys import Principal, authorise
from ringlog.actors.http_gateway.api.error_replies import error_body, status_and_code
from ringlog.actors.http_gateway.api.request import Scope, authorization_of, check_structure
from ringlog.actors.http_gateway.records.writes import decode_write
from ringlog.actors.http_gateway.streams.connection_ledger import StreamEnded
from ringlog.actors.http_gateway.streams.fan_out import FanOutPage, Subscriber
from ringlog.actors.http_gateway.streams.subscriptions import Event, Subscriptions
from ringlog.actors.http_gateway.streams.watches import WatchStart, make_subscriber, topic_reply
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, RinglogError, TopicNotFound, Unauthorized
from ringlog.limits import (
    READ_BYTES_DEFAULT,
    READ_LIMIT_MAX,
    STREAM_STALL_S_MAX,
    WATCH_TOPICS_MAX,
    WEB_SOCKET_QUEUE_MAX,
)

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

_CLOSE, _BYTES, _TEXT = 0, 1, 2
_NULL = Raw(b"null")
_encode = msgspec.json.Encoder().encode
_BEGIN = {
    "record": '{"op":"record",', "caught-up": '{"op":"caught_up",', "tombstone": '{"op":"tombstone",',
    "topic-deleted": '{"op":"topic_deleted",',
}  # fmt: skip
"""What replaces the opening brace of an event's JSON text."""
Count = Annotated[int, Meta(ge=0)]


class WebSocketCommand(msgspec.Struct):
    """What every command has."""

    op: str = ""
    request_id: Raw = _NULL


class Subscribe(msgspec.Struct):
    """Fields of `subscribe`."""

    topic: str | None = None
    topics: dict[str, WatchStart | None] | list[str] | None = None
    from_seq: Count = 0
    from_epoch: Count = 0
    tail: bool = False
    node: str | list[str] | None = None
    limit: Count = READ_LIMIT_MAX
    max_batch_bytes: Count = READ_BYTES_DEFAULT
    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = True
    filter: str | list[Any] | None = None
    lenient: bool = False


class Unsubscribe(msgspec.Struct):
    """Fields of `unsubscribe`."""

    topic: str | None = None
    topics: list[str] | dict[str, Any] | None = None


class Publish(msgspec.Struct):
    """The field of `publish` that a write has in its path."""

    topic: str


_decode_command = msgspec.json.Decoder(WebSocketCommand).decode


class WebSocket(Subscriptions):
    """One connection. Its commands run in the order of their receipt."""

    def __init__(self, gateway: Gateway, principal: Principal, transport: Any) -> None:
        super().__init__(gateway)
        self._principal, self._transport = principal, transport
        self._queue: deque[str] = deque()
        self._is_sending = False
        self._sent = asyncio.Event()
        self._stall: asyncio.TimerHandle | None = None
        self.is_ended: bool = False
        self._bytes_max = gateway.settings.limits.max_body_bytes

    # -- sending --------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether fewer than WEB_SOCKET_QUEUE_MAX messages wait for the socket."""
        return len(self._queue) < WEB_SOCKET_QUEUE_MAX and not self.is_ended

    async def room(self) -> None:
        """Wait until `has_room`. Raises StreamEnded."""
        while not self.has_room:
            if self.is_ended:
                raise StreamEnded
            self._sent.clear()
            await self._sent.wait()

    def emit(self, sub: Subscriber, events: list[Event], delivery: FanOutPage | None) -> None:
        """Send events of one topic. Connections at the same position send the same text."""
        for kind, body in events:
            key = ("ws", kind, sub.projection)
            text = None if delivery is None else delivery.cache.get(key)
            if text is None:
                text = self._text(kind, body)
                if delivery is not None:
                    delivery.cache[key] = text
            self._send(str(text))

    @staticmethod
    def _text(kind: str, body: bytes) -> str:
        if kind == "error":
            found = msgspec.json.decode(body)
            fields = {"op": "error", "code": found["error"], "message": found["message"], "request_id": None}
            return _encode(fields | ({"topic": found["topic"]} if "topic" in found else {})).decode()
        return _BEGIN[kind] + body[1:].decode()

    def _send(self, text: str) -> None:
        """Queue a message. Events are emitted only while there is room, answers wait for it first."""
        if self.is_ended:
            return
        self._queue.append(text)
        if not self._is_sending:
            self._send_next()

    def _send_next(self) -> None:
        if not self._queue or self.is_ended:
            self._is_sending = False
            return
        self._is_sending = True
        sending = self._transport.send_str(self._queue.popleft())
        if self._stall is None:
            self._stall = self.gateway.loop.call_later(STREAM_STALL_S_MAX, self.stop)
        asyncio.ensure_future(sending).add_done_callback(self._was_sent)

    def _was_sent(self, done: asyncio.Future[None]) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if done.cancelled() or done.exception() is not None:
            self.stop()
            return
        self._send_next()
        self._sent.set()
        self.wake.set()

    def stop(self) -> None:
        """End the connection: the client has gone, or accepts nothing."""
        self.is_ended = True
        self._queue.clear()
        self._sent.set()
        self.wake.set()

    async def _answer(self, op: str, request_id: Raw, fields: bytes) -> None:
        """Send a direct answer. `fields` is the JSON text of an object."""
        await self.room()
        rest = b"," + fields[1:] if len(fields) > 2 else b"}"
        self._send((b'{"op":"%b","request_id":%b' % (op.encode(), bytes(request_id)) + rest).decode())

    # -- the two loops --------------------------------------------------------------------------------

    async def deliver_backlogs(self) -> None:
        """Read from storage for subscriptions that are behind, until the connection ends."""
        with suppress(StreamEnded):
            while not self.is_ended:
                if self.has_backlog:
                    await self.turn()
                else:
                    self.wake.clear()
                    await self.wake.wait()

    async def receive(self) -> None:
        """Run commands until the connection ends."""
        with suppress(StreamEnded, RuntimeError):  # RuntimeError: the server has closed the connection.
            await self._receive()

    async def _receive(self) -> None:
        while not self.is_ended:
            message = await self._transport.receive()
            kind = int(message.kind)
            if kind == _CLOSE:
                return
            request_id = _NULL
            try:
                if kind != _TEXT:
                    raise _Unsupported
                text = message.data.encode()
                if len(text) > self._bytes_max:
                    raise InvalidRequest(
                        f"a message must have at most {self._bytes_max} bytes", max=self._bytes_max
                    )
                command = _command(text)
                request_id = command.request_id
                await self._run(command, text)
            except _Unsupported:
                await self._error("unsupported_message", "messages must be text", request_id)
            except _InvalidJson as e:
                await self._error("invalid_json", str(e), request_id)
            except RinglogError as e:
                found = error_body(e)["error"]
                await self._error(found["code"], found["message"], request_id, found.get("detail"))

    async def _error(self, code: str, message: str, request_id: Raw, detail: Any = None) -> None:
        fields = {"code": code, "message": message} | ({"detail": detail} if detail else {})
        await self._answer("error", request_id, _encode(fields))

    async def _run(self, command: WebSocketCommand, text: bytes) -> None:
        self.gateway.require_serving()
        if command.op == "publish":
            await self._publish(command.request_id, text)
        elif command.op == "subscribe":
            await self._subscribe(command.request_id, _fields(text, Subscribe))
        elif command.op == "unsubscribe":
            await self._unsubscribe(command.request_id, _fields(text, Unsubscribe))
        elif command.op == "ping":
            await self._answer("pong", command.request_id, b"{}")
        else:
            raise InvalidRequest(
                f"op must be subscribe, unsubscribe, publish or ping, got {command.op[:40]!r}"
            )

    # -- commands -------------------------------------------------------------------------------------

    async def _publish(self, request_id: Raw, text: bytes) -> None:
        topic = _fields(text, Publish).topic
        authorise(self._principal, m.Append(topic, 1))
        reply = await self.gateway.lanes.publish(self._principal, topic, decode_write(text))
        await self._answer("ack", request_id, _encode(reply))

    async def _subscribe(self, request_id: Raw, wanted: Subscribe) -> None:
        default = WatchStart(wanted.from_seq, wanted.tail, wanted.from_epoch)
        starts: dict[str, WatchStart] = {}
        if isinstance(wanted.topics, dict):
            starts = {name: start or default for name, start in wanted.topics.items()}
        elif wanted.topics is not None:
            starts = dict.fromkeys(wanted.topics, default)
        if wanted.topic is not None:
            starts[wanted.topic] = default
        if not 1 <= len(starts | dict.fromkeys(self.subs)) <= WATCH_TOPICS_MAX or not starts:
            raise InvalidRequest(
                f"a connection may subscribe to 1 to {WATCH_TOPICS_MAX} topics", max=WATCH_TOPICS_MAX
            )
        for name in starts:
            authorise(self._principal, m.Read(name, 0))
        found: list[Subscriber] = []
        told: dict[str, dict[str, Any]] = {}
        for name, start in starts.items():
            try:
                sub, state = await make_subscriber(
                    self.gateway, name, start, wanted.filter, wanted.node,
                    limit=wanted.limit or READ_LIMIT_MAX,
                    max_bytes=wanted.max_batch_bytes or READ_BYTES_DEFAULT,
                    include_data=wanted.include_data, include_tags=wanted.include_tags,
                    include_meta=wanted.include_meta,
                )  # fmt: skip
            except TopicNotFound:
                if wanted.lenient:
                    continue
                raise
            found.append(sub)
            told[name] = topic_reply(sub, state)
        fields: dict[str, Any] = {"topics": told}
        if wanted.topic is not None and wanted.topics is None and told:
            fields = {"topic": wanted.topic, **told[wanted.topic], **fields}
        for sub in found:
            earlier = self.subs.get(sub.topic)
            if earlier is not None:
                self.end(earlier)
        await self._answer("subscribed", request_id, _encode(fields))
        for sub in found:
            self.begin(sub)

    async def _unsubscribe(self, request_id: Raw, wanted: Unsubscribe) -> None:
        names = [*(wanted.topics or ())] + ([wanted.topic] if wanted.topic is not None else [])
        if not names:
            raise InvalidRequest("unsubscribe needs topic or topics")
        for name in names:
            sub = self.subs.get(name)
            if sub is not None:
                self.end(sub)
        fields: dict[str, Any] = {"topics": names}
        if wanted.topic is not None:
            fields["topic"] = wanted.topic
        await self._answer("unsubscribed", request_id, _encode(fields))


class _Unsupported(Exception):
    """A binary message."""


class _InvalidJson(Exception):
    """Text that is not JSON."""


def _command(text: bytes) -> WebSocketCommand:
    """Decode what every command has. Raises _InvalidJson, InvalidRequest."""
    check_structure(text)
    try:
        return _decode_command(text)
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"the command is not valid: {e}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise _InvalidJson(f"the message is not JSON: {e}") from None


def _fields(text: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the command is not valid: {e}") from None


async def serve_web_socket(
    gateway: Gateway, scope: Scope, protocol: Any, find_key: Callable[[str], Principal | None]
) -> None:
    """Serve one WebSocket until it ends."""
    principal = find_key(authorization_of(scope.headers))
    if scope.path != "/v0/ws":
        protocol.close(404)
        return
    if principal is None:
        protocol.close(Unauthorized.http)
        return
    try:
        gateway.require_serving()
        with gateway.stream(principal):
            await _serve_stream(gateway, principal, protocol)
    except RinglogError as e:
        protocol.close(status_and_code(e)[0])


async def _serve_stream(gateway: Gateway, principal: Principal, protocol: Any) -> None:
    socket: WebSocket | None = None
    backlogs: asyncio.Task[None] | None = None
    try:
        socket = WebSocket(gateway, principal, await protocol.accept())
        backlogs = gateway.loop.create_task(socket.deliver_backlogs())
        receiving = gateway.loop.create_task(socket.receive())
        try:
            done, _ = await asyncio.wait((receiving, backlogs), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            receiving.cancel()
    except asyncio.CancelledError:
        error = gateway.ending_error()
        if error is None or socket is None or backlogs is None:
            raise
        backlogs.cancel()
        socket.end_all()  # The key may not read any more, and the error needs room.
        await socket._error(status_and_code(error)[1], error.message, _NULL)
    finally:
        if socket is not None:
            socket.stop()
            socket.end_all()
        if backlogs is not None:
            backlogs.cancel()
        protocol.close(1001 if gateway.is_draining else 1000)
