"""Where a watch session continues for a client that comes back, and that its stream ends when one leaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.access.keys import ANYONE
from ringlog.actors.http_gateway.streams.event_stream import WatchStream, _cursor_of, _resume
from ringlog.actors.http_gateway.streams.fan_out import Projection, Subscriber
from ringlog.actors.http_gateway.streams.session_state import session_of, state_of
from ringlog.actors.http_gateway.streams.watches import WatchSession
from ringlog.client import Cursor
from ringlog.limits import READ_BYTES_DEFAULT, READ_LIMIT_MAX
from tests.support.server_future import OneSlotFuture


class Server:
    """The server's side of a request. `is_open` = it takes bytes."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_open = True
        self.left = OneSlotFuture()
        """Done when the client has gone."""

    def client_disconnect(self) -> OneSlotFuture:
        return self.left

    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> Server:
        return self

    def send_bytes(self, data: bytes) -> None:
        if not self.is_open:
            raise RuntimeError("the transport is closed")
        self.sent += data


class Watch:
    """A session over two topics with an open stream."""

    def __init__(self, address: str) -> None:
        self.server = Server()
        self.subs = {
            name: Subscriber(name, Cursor(1, 0), Projection(), READ_LIMIT_MAX, READ_BYTES_DEFAULT)
            for name in ("a", "b")
        }
        self.session = WatchSession("wid", ANYONE, self.subs, heartbeat_s=15.0, is_strong=False, tags=None)
        gateway = SimpleNamespace(loop=asyncio.get_running_loop())
        request: Any = SimpleNamespace(
            gateway=gateway, scope=SimpleNamespace(client=address, http_version="1.1"), protocol=self.server
        )
        self.stream = WatchStream(request, self.session)

    def reach(self, topic: str, seq: int) -> None:
        """Read up to a position, behind records that the filter omits."""
        self.subs[topic].seq = seq

    def send(self, topic: str, seq: int) -> str:
        """Read up to a position and send a frame. Returns its cursor."""
        self.reach(topic, seq)
        self.stream.emit(self.subs[topic], [("record", b"{}")], None)
        return _cursor_of({name: sub.seq for name, sub in self.subs.items()})

    @property
    def positions(self) -> list[int]:
        return [sub.seq for sub in self.session.subs.values()]


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, (host, port) = listener.accept()
        with client, server:
            found = Watch(f"{host}:{port}")
            yield found
            found.stream.events.close()


async def test_a_client_that_has_all_frames_does_not_scan_again(watch: Watch) -> None:
    last = watch.send("a", 5)
    watch.reach("a", 900)
    watch.reach("b", 700)
    _resume(watch.session, last)
    assert watch.positions == [900, 700]
    watch.session = session_of("wid", ANYONE, state_of(watch.session))
    _resume(watch.session, last)
    assert watch.positions == [900, 700], "also at another gateway"


async def test_a_client_that_missed_a_frame_gets_it_again(watch: Watch) -> None:
    first = watch.send("a", 5)
    watch.send("b", 7)
    watch.reach("a", 900)
    _resume(watch.session, first)
    assert watch.positions == [5, 0]


async def test_a_frame_that_was_not_sent_is_read_again(watch: Watch) -> None:
    """The last frame that was sent is not the last one that was read."""
    last = watch.send("a", 5)
    watch.server.is_open = False
    watch.send("a", 8)
    watch.reach("b", 700)
    _resume(watch.session, last)
    assert watch.positions == [5, 0]


async def test_a_stream_that_was_full_ends_when_its_client_leaves(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for room waits for the client to leave, too. The topics are live and have no news."""
    monkeypatch.setattr(watch.stream, "begin", lambda sub: watch.stream.subs.update({sub.topic: sub}))
    await watch.stream.events.wait_gone(0)
    running = asyncio.ensure_future(watch.stream.run())
    await asyncio.sleep(0)
    watch.server.left.set_result(None)
    await running
    assert not watch.stream.subs
