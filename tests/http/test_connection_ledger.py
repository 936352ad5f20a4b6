"""Event streams of one connection have one bound on what their client has not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server

from ringlog.actors.http_gateway.streams.connection_ledger import (
    ConnectionLedger,
    ConnectionLedgers,
    StreamEnded,
)
from ringlog.actors.http_gateway.streams.sse import EventStream
from ringlog.limits import STREAM_BUFFER_BYTES_MAX, STREAM_FORGIVEN_BYTES_MAX, STREAM_STALL_S_MAX
from ringlog.testing import ManualClock
from tests.support.http2_client import FIRST_WINDOW, Http2Client

pytestmark = pytest.mark.timeout(60)

_KIB = 1_024


class Wire:
    """The socket of a client that acknowledges what the test says."""

    def __init__(self, acked: int = 1_000) -> None:
        self.acked: int | None = acked
        self.is_aborted = False

    def acked_bytes(self) -> int | None:
        return self.acked

    def abort(self) -> None:
        self.is_aborted = True

    def forget(self) -> None:
        self.acked = None

    def ack(self, count: int) -> None:
        assert self.acked is not None
        self.acked += count


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(wire: Wire, clock: ManualClock) -> ConnectionLedger:
    return ConnectionLedger(cast("Any", wire), clock, "1.1")


def fill(ledger: ConnectionLedger, piece: int = 64 * _KIB, stream: object = "a") -> int:
    """Write while there is room. Returns the number of bytes."""
    count = 0
    while ledger.has_room:
        ledger.note_written(piece, stream)
        count += piece
    return count


def test_all_that_is_not_acknowledged_counts(ledger: ConnectionLedger, wire: Wire) -> None:
    assert STREAM_BUFFER_BYTES_MAX <= fill(ledger) < STREAM_BUFFER_BYTES_MAX + 64 * _KIB
    wire.ack(200 * _KIB)
    assert fill(ledger) in {192 * _KIB, 256 * _KIB}


def test_other_responses_are_not_taken_for_frames(ledger: ConnectionLedger, wire: Wire) -> None:
    """A client that reads large responses, but no stream, frees no room for streams."""
    fill(ledger)
    for _ in range(10):
        ledger.note_response(8 << 20)
        wire.ack(8 << 20)
        assert not ledger.has_room


@pytest.mark.parametrize(
    ("http_version", "size", "framing"),
    [("1", 20, 0), ("1", 300, 0), ("1.1", 20, 6), ("1.1", 300, 7), ("2", 20, 9), ("2", 300, 9)],
)
def test_many_small_frames_that_are_read_leave_nothing(
    wire: Wire, clock: ManualClock, http_version: str, size: int, framing: int
) -> None:
    ledger = ConnectionLedger(cast("Any", wire), clock, http_version)
    for _ in range(100_000):
        ledger.note_written(size, "a")
        wire.ack(size + framing)
    assert ledger.outstanding() == 0


def test_a_client_that_acknowledges_nothing_is_disconnected(
    ledger: ConnectionLedger, wire: Wire, clock: ManualClock
) -> None:
    clock.advance(100 * STREAM_STALL_S_MAX)
    ledger.note_written(2 * STREAM_BUFFER_BYTES_MAX, "a")
    assert not ledger.has_room
    ledger.require_progress()
    clock.advance(STREAM_STALL_S_MAX)
    assert not ledger.has_room
    ledger.require_progress()
    clock.advance(0.001)
    with pytest.raises(StreamEnded):
        ledger.require_progress()
    assert wire.is_aborted


@pytest.mark.parametrize(("acked", "is_alive"), [(10_000, True), (17, False)])
def test_only_a_slow_client_is_waited_for(
    ledger: ConnectionLedger, wire: Wire, clock: ManualClock, acked: int, is_alive: bool
) -> None:
    """Answers to the pings of a client are acknowledged also while none of its streams is read."""
    ledger.note_written(4 * STREAM_BUFFER_BYTES_MAX, "a")
    assert not ledger.has_room
    with contextlib.nullcontext() if is_alive else pytest.raises(StreamEnded):
        for _ in range(4):
            clock.advance(STREAM_STALL_S_MAX * 2 / 3)
            wire.ack(acked)
            assert not ledger.has_room
            ledger.require_progress()


def test_a_stream_takes_with_it_what_was_dropped_of_it(ledger: ConnectionLedger, wire: Wire) -> None:
    """The client has reset it, and reads the other stream."""
    fill(ledger, stream="a")
    wire.ack(FIRST_WINDOW)
    fill(ledger, stream="a")
    ledger.note_left("a")
    for _ in range(100):
        assert ledger.has_room
        ledger.note_written(64 * _KIB, "b")
        wire.ack(64 * _KIB)


def test_streams_that_leave_free_no_room_without_a_bound(ledger: ConnectionLedger, wire: Wire) -> None:
    """They were read, and the one that stays was not."""
    unread = 0
    for _ in range(100):
        for _ in range(16):
            ledger.note_written(64 * _KIB, "read")
            wire.ack(64 * _KIB)
        unread += fill(ledger, stream="unread")
        ledger.note_left("read")
    assert unread <= STREAM_FORGIVEN_BYTES_MAX + 2 * STREAM_BUFFER_BYTES_MAX


def test_a_response_that_is_dropped_counts_for_a_while(
    ledger: ConnectionLedger, wire: Wire, clock: ManualClock
) -> None:
    ledger.note_response(8 << 20)
    assert not ledger.has_room
    clock.advance(STREAM_STALL_S_MAX)
    for _ in range(1_000):
        assert ledger.has_room
        ledger.require_progress()
        ledger.note_written(_KIB, "a")
        wire.ack(_KIB + 7)


def test_a_closed_connection_ends_its_streams(ledger: ConnectionLedger, wire: Wire) -> None:
    wire.acked = None
    with pytest.raises(StreamEnded):
        ledger.outstanding()


def test_a_ledger_lives_as_long_as_a_connection_has_streams() -> None:
    ledgers = ConnectionLedgers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, (host, port) = listener.accept()
        address = f"{host}:{port}"
        with client, server:
            first, second = ledgers.join(address, "1.1"), ledgers.join(address, "1.1")
            assert first is second
            ledgers.note_response(address, 3 << 20)
            assert first.outstanding() >= 3 << 20
            ledgers.leave(address, first, "a")
            assert ledgers.join(address, "1.1") is first
        later = ledgers.join(address, "1.1")
        assert later is not first, "the connection has ended, and another may have its address"
        for each in (first, first, later):
            ledgers.leave(address, each, "a")
        assert ledgers.join(address, "1.1") not in {first, later}


# -- with the HTTP server -----------------------------------------------------------------------------

_FRAME = b"data: " + b"x" * 65_000 + b"\n\n"
_FRAMES = 100


class Streams:
    """An application with one event stream of _FRAMES for each request. That of /silent sends none.

    That of /quiet then waits as a watch does: only for what is called when its client has gone.
    """

    def __init__(self) -> None:
        self.open: dict[str, EventStream] = {}
        self.written: Counter[str] = Counter()

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        stream = self.open[scope.path] = EventStream(scope, protocol, 0.01)
        left = asyncio.Event()
        stream.gone.add_done_callback(lambda _: left.set())
        try:
            if scope.path == "/silent":
                await stream.wait_gone(60)
            for _ in range(_FRAMES):
                await stream.send_frames(_FRAME)
                self.written[scope.path] += len(_FRAME)
            if scope.path == "/quiet":
                await left.wait()
        except StreamEnded:
            return
        finally:
            stream.close()


async def listening(port: int) -> None:
    """Wait until the server accepts connections."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0)


@pytest.fixture
async def streams() -> AsyncIterator[tuple[Streams, int]]:
    """The application, and the port on which it is served."""
    application = Streams()
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        port = int(kept.getsockname()[1])
        server = Server(
            application, address="127.0.0.1", port=port, interface=Interfaces.RSGI, http=HTTPModes.auto,
            log_enabled=False,
        )  # fmt: skip
        serving = asyncio.ensure_future(server.serve())
        await listening(port)
        yield application, port
        server.stop()
        await serving


async def test_a_stream_that_is_not_read_is_bounded_beside_one_that_is(
    streams: tuple[Streams, int],
) -> None:
    application, port = streams
    client = await Http2Client.connect("127.0.0.1", port)
    try:
        client.get("/unread", 1)
        client.get("/read", 3)
        client.take(3)

        def is_held_up() -> bool:
            has_all = client.received[3] >= application.written["/read"]
            return has_all and not application.open["/read"].has_room

        await client.until(lambda: client.received[1] == FIRST_WINDOW and client.received[3] > 0)
        while 3 not in client.ended and not is_held_up():
            await asyncio.sleep(0)
        unread = application.written["/unread"] - client.received[1]
        assert unread < STREAM_BUFFER_BYTES_MAX + 2 * len(_FRAME)
        client.take(1)
        await client.until(lambda: client.ended == {1, 3})
        assert application.written == {"/unread": _FRAMES * len(_FRAME), "/read": _FRAMES * len(_FRAME)}
        assert min(client.received[1], client.received[3]) >= _FRAMES * len(_FRAME)
    finally:
        await client.close()


async def test_a_stream_goes_on_when_another_one_was_reset(streams: tuple[Streams, int]) -> None:
    """The third one keeps the ledger of the connection."""
    application, port = streams
    client = await Http2Client.connect("127.0.0.1", port)
    try:
        client.get("/silent", 1)
        client.get("/unread", 3)
        await client.until(lambda: client.received[1] > 0 and client.received[3] == FIRST_WINDOW)
        while application.open["/unread"].has_room:
            await asyncio.sleep(0)
        client.reset(3)
        client.get("/read", 5)
        client.take(5)
        await client.until(lambda: 5 in client.ended)
        assert client.received[5] >= _FRAMES * len(_FRAME)
    finally:
        await client.close()


async def test_a_silent_stream_sends_comments_whatever_it_waits_for(streams: tuple[Streams, int]) -> None:
    application, port = streams
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /silent HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"retry: 2000\n\n")
    for _ in range(4):
        await reader.readuntil(b": hb ")
    writer.close()
    while not application.open["/silent"].is_ended:
        await asyncio.sleep(0)


async def test_a_stream_that_was_full_ends_when_its_client_leaves(streams: tuple[Streams, int]) -> None:
    application, port = streams
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 * _KIB)
    writer.write(b"GET /quiet HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"retry: 2000\n\n")
    stream = application.open["/quiet"]
    while stream.has_room:
        await asyncio.sleep(0)
    while application.written["/quiet"] < _FRAMES * len(_FRAME):
        await reader.read(64 * _KIB)
    writer.close()
    while not stream.is_ended:
        await asyncio.sleep(0)
