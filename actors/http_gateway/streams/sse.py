"""One response of server-sent events, with a bound on what its client has not read.

The HTTP server queues every write without a bound. Therefore a stream counts what it writes and asks the
kernel (TCP_INFO) how much of it the client has acknowledged. While more than STREAM_BUFFER_BYTES_MAX are not
acknowledged, further writes wait. A client that acknowledges nothing for STREAM_STALL_S_MAX is disconnected.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.clock import SystemClock
from ringlog.limits import STREAM_BUFFER_BYTES_MAX, STREAM_STALL_S_MAX

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.api.request import HttpProtocol, Scope, StreamTransport

T = TypeVar("T")
HEADERS = [
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
]
EVENT_STREAM = "text/event-stream"
_POLL_S_MIN, _POLL_S_MAX = 0.002, 0.05
_clock = SystemClock()
_TCP_INFO_BYTES = 256
_BYTES_ACKED_AT = 120
"""Offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)."""
_CHUNK_FRAMING_BYTES = 8
"""Bytes that HTTP/1.1 adds to a chunk: its length and two line ends."""


class StreamEnded(Exception):
    """The client has gone, or reads no more."""


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
    """An open response of server-sent events.

    Example:
        stream = EventStream(request.scope, request.protocol)
        await stream.send("job", data)
    """

    def __init__(self, scope: Scope, protocol: HttpProtocol, *, stall_s: float = STREAM_STALL_S_MAX) -> None:
        """Send status, headers and the first bytes."""
        self._socket = ClientSocket(scope.client)
        self._acked_base = self._socket.acked_bytes() or 0
        self._transport: StreamTransport | None = protocol.response_stream(200, HEADERS)
        self._stall_s = stall_s
        self._written = 0
        self._checked_at = 0
        self._progress = (0, _now_s())
        self.gone: asyncio.Future[None] = asyncio.ensure_future(protocol.client_disconnect())
        """Done when the client has gone."""
        self._last_write_s = _now_s()
        self.is_ended: bool = False
        self.write(b"retry: 2000\n\n" + heartbeat())

    # -- writing --------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether `write` may be called now. It asks the kernel only once in STREAM_BUFFER_BYTES_MAX / 2."""
        return (
            self._written - self._checked_at < STREAM_BUFFER_BYTES_MAX // 2
            or self._outstanding() < STREAM_BUFFER_BYTES_MAX
        )

    @property
    def silent_s(self) -> float:
        """Time since the last write in seconds, for heartbeats."""
        return _now_s() - self._last_write_s

    def write(self, data: bytes) -> None:
        """Send frames at once. Call it only while `has_room`. Raises StreamEnded."""
        if self.is_ended or self.gone.done() or self._transport is None:
            raise StreamEnded
        try:
            self._transport.send_bytes(data)  # type: ignore[unused-coroutine]  # It has sent when it returns.
        except RuntimeError:
            self.is_ended = True
            raise StreamEnded from None
        self._written += len(data) + _CHUNK_FRAMING_BYTES
        self._last_write_s = _now_s()

    async def send(self, event: str, data: bytes, cursor: str = "") -> None:
        """Send one event, as soon as the client has read enough of the earlier ones. Raises StreamEnded."""
        await self.send_frames(frame(event, data, cursor))

    async def send_frames(self, frames: bytes) -> None:
        """Send frames in one write, as soon as the client has read enough. Raises StreamEnded."""
        if not self.has_room:
            await self.drained()
        self.write(frames)

    def heartbeat(self) -> None:
        """Send a comment. Raises StreamEnded if the client has gone, or has acknowledged nothing for long."""
        if self._outstanding() > 0:
            self._require_progress()
        if self.has_room:
            self.write(heartbeat())

    async def drained(self) -> None:
        """Wait until `has_room`. Raises StreamEnded if the client acknowledges nothing for too long."""
        pause_s = _POLL_S_MIN
        while not self.has_room:
            self._require_progress()
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
        self.gone.cancel()

    # -- what the client has not acknowledged ---------------------------------------------------------

    def _outstanding(self) -> int:
        """Return an estimate of the bytes that the client has not acknowledged. Raises StreamEnded."""
        acked = self._socket.acked_bytes()
        if acked is None:
            raise StreamEnded
        # The connection carries more than the frames: earlier responses, the head, framing, TLS.
        self._acked_base = max(self._acked_base, acked - self._written)
        if acked != self._progress[0]:
            self._progress = (acked, _now_s())
        outstanding = self._written - (acked - self._acked_base)
        self._checked_at = self._written if outstanding < STREAM_BUFFER_BYTES_MAX // 2 else 0
        return outstanding

    def _require_progress(self) -> None:
        if _now_s() - self._progress[1] > self._stall_s:
            self._socket.abort()
            raise StreamEnded


Peer = tuple[str, int]


class _Descriptors:
    """Descriptors of the connections of this process, by peer. Hints: they are checked at each use."""

    def __init__(self) -> None:
        self._links: dict[int, str] = {}
        self._fds: dict[Peer, int] = {}

    def find(self, peer: Peer) -> int:
        """Return the descriptor of a peer as known, -1 if it is not."""
        return self._fds.get(peer, -1)

    def scan(self) -> None:
        """Look at all descriptors of this process that are new since the last scan."""
        links: dict[int, str] = {}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                link = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if not link.startswith("socket:"):
                continue
            links[fd] = link
            if self._links.get(fd) != link and (peer := _on_socket(fd, _peer_of)) is not None:
                self._fds[peer] = fd
        self._links = links
        self._fds = {peer: fd for peer, fd in self._fds.items() if fd in links}


_descriptors = _Descriptors()


class ClientSocket:
    """The TCP socket of a client, which the HTTP server owns. It is found by the address of the client."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._peer = (_plain(host), int(port) if port.isdecimal() else 0)
        self._fd = _descriptors.find(self._peer)

    def acked_bytes(self) -> int | None:
        """Return the number of bytes that the client has acknowledged. None if the socket is closed."""
        return self._call(_acked)

    def abort(self) -> None:
        """Close the connection in both directions. The HTTP server then frees what it has queued."""
        self._call(_shut_down)

    def _call(self, use: Callable[[socket.socket], int]) -> int | None:
        for is_last in (False, True):
            if self._fd >= 0:
                found = _on_socket(self._fd, lambda s: use(s) if _peer_of(s) == self._peer else None)
                if found is not None:
                    return found
            if is_last:
                break
            _descriptors.scan()
            self._fd = _descriptors.find(self._peer)
        return None


def _on_socket(fd: int, use: Callable[[socket.socket], T | None]) -> T | None:
    """Call `use` with the socket of a descriptor, which stays open. Returns None if it is no open socket."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        return use(borrowed)
    except OSError:
        return None
    finally:
        borrowed.detach()


def _peer_of(client: socket.socket) -> Peer | None:
    peer = client.getpeername()
    return (_plain(peer[0]), int(peer[1])) if isinstance(peer, tuple) and len(peer) >= 2 else None


def _acked(client: socket.socket) -> int:
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED_AT)[0])


def _shut_down(client: socket.socket) -> int:
    client.shutdown(socket.SHUT_RDWR)
    return 0


@lru_cache(4_096)
def _plain(host: str) -> str:
    """Return an address in its shortest form, IPv4 in IPv6 as IPv4."""
    try:
        found = ipaddress.ip_address(host.strip("[]").split("%", 1)[0])
    except ValueError:
        return host
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
