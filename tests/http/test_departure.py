"""A request that waits for its client to leave notices that, and releases what the server keeps for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ringlog.actors.http_gateway
from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request import departure
from ringlog.actors.http_gateway.leases import claims
from ringlog.actors.http_gateway.records import diffs
from ringlog.actors.http_gateway.streams.connection_ledger import StreamEnded
from ringlog.actors.http_gateway.streams.sse import EventStream
from tests.support.bare_gateway import bare_gateway
from tests.support.server_future import OneSlotFuture


class Server:
    """The server's side of a request: it keeps every future that it is asked for."""

    def __init__(self, *, takes_bytes: bool = True) -> None:
        self.kept: list[OneSlotFuture] = []
        self._takes_bytes = takes_bytes

    def client_disconnect(self) -> OneSlotFuture:
        self.kept.append(OneSlotFuture())
        return self.kept[-1]

    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> Server:
        return self

    def send_bytes(self, data: bytes) -> None:
        if not self._takes_bytes:
            raise RuntimeError("the transport is closed")

    @property
    def is_free(self) -> bool:
        return bool(self.kept) and all(each.done() for each in self.kept)


class Claim:
    """A claim whose steps run in a client of the test."""

    def __init__(self, server: Server, outcome: Any) -> None:
        async def run(_: Any) -> Any:
            if isinstance(outcome, asyncio.Event):
                await outcome.wait()
            return outcome

        self.undone = 0
        session = SimpleNamespace(track_claim_cancel=lambda _: None)
        client = SimpleNamespace(run=run, connection=session)
        self.gateway = bare_gateway(client=client)
        self.request: Any = SimpleNamespace(gateway=self.gateway, protocol=server)
        self.operations: Any = SimpleNamespace(cancel_claim=self._undo)

    def _undo(self, *_: Any) -> None:
        self.undone += 1

    async def run(self, wait_s: float) -> Any:
        nothing: Any = None
        return await claims._claimed(self.request, self.operations, nothing, nothing, wait_s)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    assert found.is_free


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
async def test_an_answered_claim_keeps_nothing(server: Server, wait_s: float) -> None:
    jobs = object()
    claim = Claim(server, jobs)
    assert await claim.run(wait_s) is jobs
    assert claim.undone == 0


async def test_a_claim_of_a_client_that_left_is_undone_once(server: Server) -> None:
    claim = Claim(server, asyncio.Event())
    running = asyncio.ensure_future(claim.run(5.0))
    while not server.kept:
        await asyncio.sleep(0)
    server.kept[0].set_result(None)
    with pytest.raises(HttpError, match="the client left"):
        await running
    assert claim.undone == 1


async def test_a_cancelled_claim_keeps_nothing(server: Server) -> None:
    claim = Claim(server, asyncio.Event())
    running = asyncio.ensure_future(claim.run(5.0))
    while not server.kept:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert claim.undone == 1


async def test_a_stream_keeps_nothing_when_it_is_closed(server: Server) -> None:
    EventStream(
        cast("Any", SimpleNamespace(client="127.0.0.1:1", http_version="1.1")), cast("Any", server), 1.0
    ).close()


async def test_a_stream_that_cannot_begin_keeps_nothing() -> None:
    server = Server(takes_bytes=False)
    with pytest.raises(StreamEnded):
        EventStream(
            cast("Any", SimpleNamespace(client="127.0.0.1:1", http_version="1.1")), cast("Any", server), 1.0
        )
    assert server.is_free


async def test_a_diff_that_waited_keeps_nothing(server: Server) -> None:
    page = SimpleNamespace(batches=(), tombstone=None, caught_up=True)

    async def read(_: Any) -> Any:
        return page

    client = SimpleNamespace(_shell=SimpleNamespace(run_reading=read))
    gateway = bare_gateway(client=client, loop=asyncio.get_running_loop())
    request: Any = SimpleNamespace(gateway=gateway, protocol=server)
    assert await diffs._run(request, cast("Any", SimpleNamespace(steps=lambda _: None)), 5.0) is page


async def test_all_who_wait_are_told_that_the_client_has_gone(server: Server) -> None:
    """The future of the server tells the last one only, and not even that one once it waits no more."""
    with departure(cast("Any", server)) as gone:
        told = asyncio.Event()
        gone.add_done_callback(lambda _: told.set())
        await asyncio.wait((gone,), timeout=0)
        server.kept[0].set_result(None)
        await told.wait()
        assert not gone.cancelled()


def test_the_server_is_asked_in_one_place() -> None:
    (package,) = ringlog.actors.http_gateway.__path__
    found = [
        path.name
        for path in Path(package).rglob("*.py")
        for _ in re.findall(r"\.client_disconnect\(", path.read_text())
    ]
    assert found == ["request.py"]
