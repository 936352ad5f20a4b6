"""Messages between gateway processes: over real sockets, in one event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from ringlog.actors.http_gateway.leases.settled_notices import SettledNotices
from ringlog.actors.http_gateway.leases.workers import Workers
from ringlog.actors.http_gateway.siblings import Siblings
from ringlog.aio import connect
from ringlog.board.board import Board
from ringlog.board.processes import http_gateway_slot, http_gateway_socket
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import InvalidRequest, NotConnected, Throttled
from ringlog.limits import (
    HTTP_SETTLED_ROWS_MAX,
    HTTP_SETTLED_SEQS_MAX,
    HTTP_SIBLING_REQUESTS_MAX,
)
from ringlog.link.peer_request import PeerReply

WAIT_S = 20.0


class Gateway:
    """One gateway: it answers with what it was asked, and keeps notices."""

    def __init__(self, number: int, shm_dir: Path, processes: int = 2) -> None:
        self.board = Board.open(shm_dir, writable=True)
        self.slot = self.board.process(http_gateway_slot(number))
        self.client = connect(f"ringlog://{shm_dir}", transport="ring")
        self.siblings = Siblings(number, processes, str(shm_dir), self.board, self.client)
        self.notices: list[m.Message] = []
        self.asked = 0
        self.heard = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.workers = Workers(self.slot, SettledNotices(self.siblings))

    async def answer(self, request: m.Message) -> PeerReply:
        self.asked += 1
        self.heard.set()
        if isinstance(request, m.JobsSettled):
            for jobs in request.jobs:
                self.workers.note_settled(jobs.topic, jobs.node, jobs.seqs, jobs.returned)
            self.notices.append(request)
        if isinstance(request, m.ListSessions):
            raise InvalidRequest("no lists today")
        await self.may_answer.wait()
        if isinstance(request, m.FindSession):
            return PeerReply(m.FoundSession("moved", request.taker), b"attached")
        return PeerReply(m.Noted())

    def serve(self) -> None:
        self.siblings.serve(self.answer)

    async def find(self, number: int, at: int = 1) -> int:
        reply = await self.siblings.ask(at, m.FindSession("wid", "key", number))
        assert bytes(reply.attachment) == b"attached"
        return int(reply.message.holder)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true that a message to this gateway makes true."""
        while not condition():
            self.heard.clear()
            await self.heard.wait()

    async def close(self) -> None:
        self.siblings.close()
        await self.client.close(0.0)


def run(tmp_path: Path, scenario: Callable[[Gateway, Gateway], Awaitable[None]]) -> None:
    """Run a scenario with gateways 0 and 1."""
    Board.create(tmp_path).close()

    async def within() -> None:
        first, second = Gateway(0, tmp_path), Gateway(1, tmp_path)
        try:
            async with asyncio.timeout(WAIT_S):
                await scenario(first, second)
        finally:
            await first.close()
            await second.close()

    asyncio.run(within())


def test_replies_belong_to_their_requests(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        assert await asyncio.gather(*(first.find(n) for n in range(200))) == list(range(200))
        with pytest.raises(InvalidRequest, match="no lists today"):
            await first.siblings.ask(1, m.ListSessions(0))

    run(tmp_path, scenario)


def test_a_request_waits_for_a_gateway_that_starts(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        asking = asyncio.ensure_future(first.find(1))
        await asyncio.wait((asking,), timeout=0.05)
        assert not asking.done()
        second.serve()
        assert await asking == 1

    run(tmp_path, scenario)


def test_nobody_waits_longer_for_a_gateway_that_does_not_start(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.workers.listen("q", "n", lambda *_: None)
        first.workers.notify("q", "n", [1], returned=False)
        with pytest.raises(NotConnected, match="HTTP gateway 1"):
            await first.find(1)
        second.serve()
        assert await first.find(1) == 1
        first.workers.notify("q", "n", [2], returned=False)
        await second.until(lambda: bool(second.notices))
        assert second.notices == [m.JobsSettled([m.SettledJobs("q", "n", [2])])], "the first was dropped"

    run(tmp_path, scenario)


def test_a_request_goes_to_the_successor_of_a_gateway_that_ends(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        assert await first.find(1) == 1
        second.may_answer.clear()
        asking = asyncio.ensure_future(first.find(2))
        await second.until(lambda: second.asked == 2)
        await second.close()
        successor = Gateway(1, tmp_path)
        successor.serve()
        assert await asking == 2
        assert await first.find(3) == 3
        await successor.close()

    run(tmp_path, scenario)


def test_requests_in_progress_are_bounded(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        third = Gateway(2, tmp_path, processes=3)
        second.serve()
        await first.find(0)
        second.may_answer.clear()
        waiting = [asyncio.ensure_future(first.find(n)) for n in range(HTTP_SIBLING_REQUESTS_MAX)]
        await second.until(lambda: second.asked == 1 + HTTP_SIBLING_REQUESTS_MAX)
        with pytest.raises(Throttled, match="too slow"):
            await first.find(2)
        with pytest.raises(Throttled, match="too many"):
            await third.find(2)
        second.may_answer.set()
        assert await asyncio.gather(*waiting) == list(range(HTTP_SIBLING_REQUESTS_MAX))
        assert await third.find(3) == 3
        await third.close()

    run(tmp_path, scenario)


HOSTILE: dict[str, list[bytes]] = {
    "no bytes": [b""], "no envelope": [b"\xc1"], "noise": [os.urandom(64)],
    "too many parts": [encode(m.ListSessions(0), 1)] * 100, "too long": [bytes(2 << 20)],
    "an unknown kind": [encode(m.Ping(), 1).replace(b"Ping", b"Pang")],
    "a number out of range": [encode(m.FindSession("w", "k", 1 << 40), 1)],
    "a name out of range": [encode(m.FindSession("w" * 5_000, "k", 1), 1)],
    "another type": [encode(m.JobsSettled(b"\xff"), 1)],  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_request_is_refused(tmp_path: Path, what: str) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(http_gateway_socket(str(tmp_path), 1))
            for _ in range(100):  # More than one turn takes.
                await dealer.send_multipart(HOSTILE[what])
                refused = decode((await dealer.recv_multipart())[0]).message
                assert isinstance(refused, m.ErrorReply), refused
                assert refused.status == InvalidRequest.status
        assert second.asked == 0
        assert await first.find(1) == 1

    run(tmp_path, scenario)


def test_a_flood_is_answered_to_its_end(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(http_gateway_socket(str(tmp_path), 1))
            for n in range(1, 1_001):
                await dealer.send(encode(m.FindSession("wid", "key", n), n))
            found = [decode((await dealer.recv_multipart())[0]) for _ in range(1_000)]
        assert sorted(each.corr for each in found) == list(range(1, 1_001))
        assert await first.find(1) == 1

    run(tmp_path, scenario)


def test_settled_jobs_reach_work_streams_of_other_gateways_together(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        seen: list[tuple[list[int], bool]] = []
        first.workers.notify("q", "n", [1], returned=False)  # No work stream is open.
        second.workers.listen("q", "n", lambda seqs, returned: seen.append((list(seqs), returned)))
        second.may_answer.clear()
        first.workers.notify("q", "n", [2], returned=False)
        first.workers.notify("q", "other", [3], returned=False)
        first.workers.notify("q", "n", [4, 5], returned=False)
        first.workers.notify("q", "n", [], returned=False)
        first.workers.notify("q", "n", [6], returned=True)
        await second.until(lambda: seen == [([2, 4, 5], False), ([6], True)])
        # The first notice has no reply yet: what comes now waits.
        first.workers.notify("q", "n", range(HTTP_SETTLED_SEQS_MAX + 10), returned=False)
        first.workers.notify("q", "n", [1], returned=False)
        for _ in range(2):  # What was sent before the second of these has arrived.
            with pytest.raises(InvalidRequest):
                await first.siblings.ask(1, m.ListSessions(0))
        assert len(second.notices) == 1
        second.may_answer.set()
        await second.until(lambda: seen[2:] == [(list(range(HTTP_SETTLED_SEQS_MAX)), False)])
        assert len(second.notices) == 2

    run(tmp_path, scenario)


def test_the_longest_notice_fits_a_message(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.serve()
        second.workers.listen("q", "n", lambda *_: None)
        part, base = HTTP_SETTLED_SEQS_MAX // HTTP_SETTLED_ROWS_MAX, 1 << 60
        for row in range(HTTP_SETTLED_ROWS_MAX + 1):
            first.workers.notify(f"{row:0255}", f"{row:0128}", range(base, base + part), returned=False)
        await second.until(lambda: bool(second.notices))
        (notice,) = second.notices
        assert isinstance(notice, m.JobsSettled)
        assert [int(jobs.topic) for jobs in notice.jobs] == list(range(HTTP_SETTLED_ROWS_MAX))
        assert sum(len(jobs.seqs) for jobs in notice.jobs) == HTTP_SETTLED_SEQS_MAX

    run(tmp_path, scenario)


def test_one_gateway_opens_no_socket(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        alone = Gateway(0, tmp_path, processes=1)
        alone.serve()
        alone.workers.notify("q", "n", [1], returned=False)
        assert not [path.name for path in tmp_path.iterdir() if path.suffix == ".sock"]
        assert alone.client.connection.timers.next_ns() is None
        await alone.close()

    run(tmp_path, scenario)
