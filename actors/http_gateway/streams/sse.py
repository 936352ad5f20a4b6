"""One response of server-sent events, with a bound on what its client has not read.

The bound is that of the connection, which several streams may share: see connection_ledger.py.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request import departure
from ringlog.actors.http_gateway.streams.connection_ledger import LEDGERS, StreamEnded
from ringlog.clock import SystemClock

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.api.request import HttpProtocol, Scope, StreamTransport

HEADERS = [
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
]
EVENT_STREAM = "text/event-stream"
_POLL_S_MIN, _POLL_S_MAX = 0.002, 0.05
_clock = SystemClock()


def require_event_stream(accept: str) -> None:
    """Raise HttpError 406 unless the client accepts an event stream."""
    wanted = [part.split(";", 1)[0].strip().lower() for part in accept.split(",")]
    if accept.strip() and not {EVENT_STREAM, "*/*", "text/*"} & set(wanted):
        raise HttpError(406, "not_acceptable", f"accept must allow {EVENT_STREAM}, got {accept[:80]!r}")


def frame(event: str, data: bytes, cursor: str = "") -> bytes:
    """Return one event. `data` is JSON on one line."""
    if cursor:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (cursor.encode(), event.encode(), data)
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def _now_s() -> float:
    return _clock.monotonic_ns() / 1e9


def heartbeat() -> bytes:
    """Return a comment that keeps a connection alive."""
    return b": hb %d\n\n" % (_clock.now_us() // 1_000)


class EventStream:
    """An open response of server-sent events. It sends a comment whenever it was silent for `heartbeat_s`.

    Example:
        stream = EventStream(request.scope, request.protocol, 15.0)
        await stream.send("job", data)
    """

    def __init__(self, scope: Scope, protocol: HttpProtocol, heartbeat_s: float) -> None:
        """Send status, headers and the first bytes. Raises StreamEnded if the client has gone."""
        self._held = ExitStack()
        """What `close` releases."""
        self._ledger = LEDGERS.join(scope.client, scope.http_version)
        self._held.callback(LEDGERS.leave, scope.client, self._ledger, self)
        self._transport: StreamTransport | None = protocol.response_stream(200, HEADERS)
        self.gone: asyncio.Future[None] = self._held.enter_context(departure(protocol))
        """Done when the client has gone."""
        self._last_write_s = _now_s()
        self.is_ended: bool = False
        self._timer: asyncio.TimerHandle | None = None
        try:
            self.write(b"retry: 2000\n\n" + heartbeat())
        except StreamEnded:
            self.close()
            raise
        self._heartbeat_s = heartbeat_s
        self._timer = asyncio.get_running_loop().call_later(heartbeat_s, self._beat)

    # -- writing --------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether `write` may be called now. Raises StreamEnded."""
        return self._ledger.has_room

    def write(self, data: bytes) -> None:
        """Send frames at once. Call it only while `has_room`. Raises StreamEnded."""
        if self.is_ended or self.gone.done() or self._transport is None:
            raise StreamEnded
        try:
            self._transport.send_bytes(data)  # type: ignore[unused-coroutine]  # It has sent when it returns.
        except RuntimeError:
            self.is_ended = True
            raise StreamEnded from None
        self._ledger.note_written(len(data), self)
        self._last_write_s = _now_s()

    async def send(self, event: str, data: bytes, cursor: str = "") -> None:
        """Send one event, as soon as the client has read enough of the earlier ones. Raises StreamEnded."""
        await self.send_frames(frame(event, data, cursor))

    async def send_frames(self, frames: bytes) -> None:
        """Send frames in one write, as soon as the client has read enough. Raises StreamEnded."""
        if not self.has_room:
            await self.drained()
        self.write(frames)

    def _beat(self) -> None:
        """Send a comment if the stream is silent and has room, and call this again when it may be silent.

        Whatever the stream waits for, a proxy sees that it is alive. A client that has acknowledged nothing
        for too long is disconnected, and then has gone.
        """
        left_s = self._heartbeat_s - (_now_s() - self._last_write_s)
        if left_s <= 0:
            left_s = self._heartbeat_s
            try:
                if self._ledger.outstanding() > 0:
                    self._ledger.require_progress()
                if self.has_room:
                    self.write(heartbeat())
            except StreamEnded:
                self.gone.cancel()  # What waits for it ends the stream.
                return
        self._timer = asyncio.get_running_loop().call_later(left_s, self._beat)

    async def drained(self) -> None:
        """Wait until `has_room`. Raises StreamEnded if the client acknowledges nothing for too long."""
        pause_s = _POLL_S_MIN
        while not self.has_room:
            self._ledger.require_progress()
            await asyncio.wait((self.gone,), timeout=pause_s)
            if self.gone.done():
                raise StreamEnded
            pause_s = min(pause_s * 2, _POLL_S_MAX)

    async def wait_gone(self, timeout: float) -> bool:
        """Wait until the client has gone. Returns False after `timeout` seconds."""
        await asyncio.wait((self.gone,), timeout=timeout)
        return self.gone.done()

    def close(self) -> None:
        """End the response: the server ends it when its transport is dropped. Idempotent."""
        self.is_ended = True
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._held.close()
