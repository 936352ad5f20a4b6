"""Which jobs a work stream counts as its own when their settlements are heard of late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.actors.http_gateway.leases import work_stream
from ringlog.actors.http_gateway.leases.work_stream import _WorkStream
from ringlog.actors.http_gateway.leases.workers import Workers
from ringlog.envelope import messages as m
from tests.support.server_future import OneSlotFuture

_LEASED = 1


class Transport:
    """The connection of a client that stays."""

    def client_disconnect(self) -> OneSlotFuture:
        return OneSlotFuture()

    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> Transport:
        return self

    def send_bytes(self, data: bytes) -> None:
        """Take everything."""


class Stream:
    """A work stream with jobs, and the leases that the engine has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slot: Any = SimpleNamespace(add=lambda field, count: None)
        self.workers = Workers(slot, None)
        self.leases: dict[int, int] = {}
        self.asked = 0
        gateway = SimpleNamespace(loop=asyncio.get_running_loop(), workers=self.workers)
        scope = SimpleNamespace(client="127.0.0.1:1", http_version="1.1")
        request: Any = SimpleNamespace(gateway=gateway, scope=scope, protocol=Transport(), topic="q")
        operations: Any = SimpleNamespace(node="n")
        self.stream = _WorkStream(request, operations, 8, None)
        self.workers.listen("q", "n", self.stream._on_settled)
        monkeypatch.setattr(work_stream, "ask", self._pending)

    async def _pending(self, gateway: Any, message: m.ListPending) -> m.PendingReply:
        self.asked += 1
        rows = [(seq, 1, _LEASED, 1, 0, 0, 0, 0, token) for seq, token in sorted(self.leases.items())]
        return m.PendingReply("q", rows, ["n"], more=False, now_ms=0)

    def lease(self, **jobs: int) -> None:
        """Lease jobs to the stream: `lease(_1=10)` is job 1 with token 10."""
        found = {int(name[1:]): token for name, token in jobs.items()}
        self.leases |= found
        self.stream._held |= found

    async def held(self) -> dict[int, int]:
        """Return what the stream holds after what it does before its next claim."""
        if self.stream._held and self.stream._checked == work_stream._NEVER:
            await self.stream._check()
        return self.stream._held


@pytest.fixture
async def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Stream(monkeypatch)
    yield found
    found.stream._stream.close()


async def test_a_late_nack_does_not_take_the_next_lease_of_a_job(stream: Stream) -> None:
    """The job was returned, and has come to the stream again before it heard of that."""
    stream.lease(_7=1)
    stream.lease(_7=2)
    stream.workers.notify("q", "n", [7], returned=True)
    assert stream.stream._freed.is_set()
    assert await stream.held() == {7: 2}


async def test_a_nack_frees_the_slot_of_a_job_that_is_gone(stream: Stream) -> None:
    stream.lease(_7=1, _8=2)
    await stream.stream._check()
    del stream.leases[7]
    stream.workers.notify("q", "n", [7], returned=True)
    assert await stream.held() == {8: 2}


async def test_what_is_done_frees_its_slot_without_a_question(stream: Stream) -> None:
    stream.lease(_7=1, _8=2)
    await stream.stream._check()
    stream.workers.notify("q", "n", [7, 9], returned=False)
    assert stream.stream._freed.is_set()
    assert await stream.held() == {8: 2}
    assert stream.asked == 1


async def test_jobs_of_others_wake_no_stream(stream: Stream) -> None:
    stream.lease(_7=1)
    stream.workers.notify("q", "n", [9], returned=True)
    stream.workers.notify("q", "other", [7], returned=True)
    assert not stream.stream._freed.is_set()
