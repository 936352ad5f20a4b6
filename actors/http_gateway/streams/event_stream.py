"""The stream of a watch session: GET /v0/watch/{}."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.streams.connection_ledger import StreamEnded
from ringlog.actors.http_gateway.streams.fan_out import FanOutPage, Subscriber
from ringlog.actors.http_gateway.streams.sse import EventStream, frame, require_event_stream
from ringlog.actors.http_gateway.streams.subscriptions import Event, Subscriptions, error_json
from ringlog.client.watches.events import decode_cursors
from ringlog.envelope import messages as m

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.streams.watches import WatchSession

_HEARTBEAT_S = 1.0
"""Of a stream that ends at once."""
_encode = msgspec.json.Encoder().encode


class WatchStream(Subscriptions):
    """One open stream of a session."""

    def __init__(self, request: Request, session: WatchSession) -> None:
        super().__init__(request.gateway, is_strong=session.is_strong)
        self._session = session
        self._is_single = len(session.subs) == 1
        self.events: EventStream = EventStream(request.scope, request.protocol, session.heartbeat_s)
        self.events.gone.add_done_callback(self._leave)
        self.is_superseded: bool = False

    @property
    def has_room(self) -> bool:
        """Whether the client has read enough of the earlier frames."""
        try:
            return self.events.has_room
        except StreamEnded:
            self.wake.set()
            return False

    async def room(self) -> None:
        """Wait until `has_room`."""
        if not self.events.has_room:
            await self.events.drained()

    def emit(self, sub: Subscriber, events: list[Event], delivery: FanOutPage | None) -> None:
        """Send events in one write. Streams at the same position of one topic send the same bytes."""
        cursor = self._cursor(sub, delivery)
        key = ("sse", cursor, sub.projection, len(events))
        found = None if delivery is None else delivery.cache.get(key)
        if found is None:
            found = b"".join([frame(kind, body, "" if kind == "error" else cursor) for kind, body in events])
            if delivery is not None:
                delivery.cache[key] = found
        try:
            self.events.write(found)  # type: ignore[arg-type]
        except StreamEnded:
            self._session.sent_cursor = ""  # The positions are those behind frames that were not sent.
            self.wake.set()
        else:
            if events[-1][0] != "error":
                self._session.sent_cursor = cursor

    def _cursor(self, sub: Subscriber, delivery: FanOutPage | None) -> str:
        """Return the position behind this event: base64url of {topic: seq}."""
        if not self._is_single:
            return _cursor_of({each.topic: each.seq for each in self._session.subs.values()})
        if delivery is None:
            return _cursor_of({sub.topic: sub.seq})
        found = delivery.cache.get("cursor")
        if found is None:
            found = delivery.cache["cursor"] = _cursor_of({sub.topic: sub.seq})
        return str(found)

    def topic_ended(self, sub: Subscriber, reason: str) -> None:
        """Send `topic-deleted`, and drop the topic from the session."""
        super().topic_ended(sub, reason)
        self._session.subs.pop(sub.topic, None)

    def supersede(self) -> None:
        """End this stream: another GET of the session has come."""
        self.is_superseded = True
        self._leave()

    def _leave(self, _: object = None) -> None:
        self.end_all()
        self.wake.set()

    async def run(self) -> None:
        """Send events until the client has gone, another stream takes over, or no topic is left."""
        events = self.events
        for sub in tuple(self._session.subs.values()):
            self.begin(sub)
        while not (self.is_superseded or events.is_ended or events.gone.done()):
            if self.has_backlog:
                await self.turn()
                continue
            if not self.subs and not self.is_superseded:
                return
            self.wake.clear()
            await self.wake.wait()


async def open_stream(request: Request) -> Response | None:
    """Stream the events of a watch session."""
    gateway = request.gateway
    require_event_stream(request.header("accept"))
    wid, moves = request.params[0], gateway.moves
    if request.scope.method == "HEAD":
        _authorise(request, await moves.topics_of(wid, request.principal))
        return Response(200, b"", (("content-type", "text/event-stream"),))
    moves.find(wid, request.principal)  # First: a limit is no answer to a session that cannot exist.
    stream: WatchStream | None = None
    with gateway.stream(request.principal):
        session = await moves.take(wid, request.principal)
        if session is None:
            with contextlib.suppress(StreamEnded):
                EventStream(request.scope, request.protocol, _HEARTBEAT_S).close()
            return None
        _authorise(request, session.subs)
        try:
            request.release_slot()
            if session.stream is not None:
                session.stream.supersede()
            _resume(session, request.header("last-event-id") or request.query.get("last_event_id", ""))
            session.stream = stream = WatchStream(request, session)
            gateway.watches.note_use(session)
            await stream.run()
        except StreamEnded:
            return None
        except asyncio.CancelledError:
            error = gateway.ending_error()
            if error is None or stream is None:
                raise
            with contextlib.suppress(StreamEnded):
                stream.events.write(frame("error", error_json(error)))
        finally:
            if stream is not None:
                stream.end_all()
                stream.events.close()
                if session.stream is stream:
                    session.stream = None
                    gateway.watches.note_use(session)
    return None


def _authorise(request: Request, topics: Iterable[str]) -> None:
    """Raise Forbidden unless the key may read the topics of a session now.

    A session outlives changes of the keys file, and its key may have had other rights when it was made.
    """
    request.authorise(*(m.Read(topic, 0) for topic in topics))


def _resume(session: WatchSession, text: str) -> None:
    """Move the positions of a session back to those of its client, never forward.

    A client that has got all frames continues where the session is: behind records that its filter omits, and
    that are not read again.
    """
    if text == session.sent_cursor:
        return
    for topic, cursor in decode_cursors(text).items() if text else ():
        sub = session.subs.get(topic)
        if sub is not None and (not cursor.epoch or cursor.epoch <= sub.epoch) and cursor.seq < sub.seq:
            sub.seq = cursor.seq
            sub.epoch = cursor.epoch or sub.epoch


def _cursor_of(positions: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(_encode(positions)).decode().rstrip("=")


ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "/v0/watch/{}", open_stream, None, "Stream the events of a watch session", is_stream=True,
        params=("wid",), query={"token": "Key, for browsers."},
    ),
)  # fmt: skip
