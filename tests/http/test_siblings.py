"""Messages between gateway processes: over real sockets, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ringlog.actors.http_gateway.leases.settled_notices import SettledNotices
from ringlog.actors.http_gateway.leases.workers import Workers
from ringlog.actors.http_gateway.siblings.messages import (
    FindSession,
    FoundSession,
    JobsSettled,
    ListSessions,
    SessionsHeld,
    SiblingNotice,
    SiblingRefused,
    SiblingReply,
    SiblingRequest,
)
from ringlog.actors.http_gateway.siblings.siblings import Siblings
from ringlog.board.board import Board
from ringlog.board.layout import ProcessField, ProcessState
from ringlog.board.processes import http_gateway_slot, http_gateway_socket
from ringlog.errors import InvalidRequest
from ringlog.limits import HTTP_SETTLED_SEQS_MAX, HTTP_SIBLING_BYTES_MAX, HTTP_SIBLING_REQUESTS_MAX

WAIT_S = 20.0


class Gateway:
    """One end: it answers with what it was asked, and keeps notices."""

    def __init__(self, number: int, shm_dir: Path, processes: int = 2) -> None:
        self.board = Board.open(shm_dir, writable=True)
        self.slot = self.board.process(http_gateway_slot(number))
        self.siblings = Siblings(number, processes, str(shm_dir), self.board)
        self.notices: list[SiblingNotice] = []
        self.heard = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.workers = Workers(self.slot, SettledNotices(self.siblings))

    async def answer(self, request: SiblingRequest) -> SiblingReply:
        await self.may_answer.wait()
        if isinstance(request, ListSessions):
            raise InvalidRequest("no lists today")
        return FoundSession("moved", holder=request.taker)

    def hear(self, notice: SiblingNotice) -> None:
        self.notices.append(notice)
        if isinstance(notice, JobsSettled):
            for jobs in notice.jobs:
                self.workers.note_settled(jobs.topic, jobs.node, jobs.seqs)
        self.heard.set()

    async def serve(self) -> None:
        await self.siblings.serve(self.answer, self.hear)


def find(number: int) -> FindSession:
    return FindSession("wid", "key", number, 0)


def run(tmp_path: Path, scenario: Callable[[Gateway, Gateway], Awaitable[None]]) -> None:
    """Run a scenario with gateways 0 and 1."""
    Board.create(tmp_path).close()

    async def within() -> None:
        first, second = Gateway(0, tmp_path), Gateway(1, tmp_path)
        try:
            async with asyncio.timeout(WAIT_S):
                await scenario(first, second)
        finally:
            for each in (first, second):
                each.may_answer.set()
                each.siblings.close()
            await asyncio.sleep(0)  # Connections end in the next pass.

    asyncio.run(within())


def test_replies_belong_to_their_requests(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        found = await asyncio.gather(*(first.siblings.ask(1, find(n)) for n in range(200)))
        assert found == [FoundSession("moved", holder=n) for n in range(200)]
        assert await first.siblings.ask(1, ListSessions(0)) == SiblingRefused("no lists today")

    run(tmp_path, scenario)


def test_a_request_waits_for_a_gateway_that_starts(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        asking = asyncio.ensure_future(first.siblings.ask(1, find(1)))
        await asyncio.wait((asking,), timeout=0.05)
        assert not asking.done()
        await second.serve()
        assert await asking == FoundSession("moved", holder=1)

    run(tmp_path, scenario)


def test_a_gateway_that_was_given_up_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        second.slot.set(ProcessField.STATE, ProcessState.GIVEN_UP)
        with pytest.raises(FileNotFoundError):
            await first.siblings.ask(1, find(1))

    run(tmp_path, scenario)


def test_requests_fail_when_the_other_gateway_ends_and_its_successor_answers(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        assert await first.siblings.ask(1, find(1)) == FoundSession("moved", holder=1)
        second.may_answer.clear()
        asking = asyncio.ensure_future(first.siblings.ask(1, find(2)))
        await asyncio.sleep(0)
        second.siblings.close()
        with pytest.raises(ConnectionResetError):
            await asking
        successor = Gateway(1, tmp_path)
        await successor.serve()
        assert await first.siblings.ask(1, find(3)) == FoundSession("moved", holder=3)
        successor.siblings.close()

    run(tmp_path, scenario)


def test_requests_in_progress_are_bounded(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        await first.siblings.ask(1, find(0))
        second.may_answer.clear()
        waiting = [
            asyncio.ensure_future(first.siblings.ask(1, find(1))) for _ in range(HTTP_SIBLING_REQUESTS_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            await first.siblings.ask(1, find(2))
        second.may_answer.set()
        assert len(await asyncio.gather(*waiting)) == HTTP_SIBLING_REQUESTS_MAX

    run(tmp_path, scenario)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x02\0\0\0\x92\x01"])
def test_bytes_that_are_no_message_end_the_connection(tmp_path: Path, data: bytes) -> None:
    assert int.from_bytes(b"\xff\xff\xff\xff", "little") > HTTP_SIBLING_BYTES_MAX

    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        reader, writer = await asyncio.open_unix_connection(http_gateway_socket(str(tmp_path), 1))
        writer.write(data)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        writer.close()
        assert await first.siblings.ask(1, find(1)) == FoundSession("moved", holder=1)

    run(tmp_path, scenario)


def test_a_notice_arrives_also_before_there_is_a_connection(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        held = SessionsHeld(0, [("a", 1), ("b", 2)])
        first.siblings.tell(1, held)
        await second.heard.wait()
        assert second.notices == [held]

    run(tmp_path, scenario)


def test_settled_jobs_reach_work_streams_of_other_gateways_together(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        await second.serve()
        seen: list[list[int]] = []
        first.workers.notify("q", "n", [1])  # No work stream is open.
        second.workers.listen("q", "n", lambda seqs: seen.append(list(seqs)))
        first.workers.notify("q", "n", [2])
        first.workers.notify("q", "other", [3])
        first.workers.notify("q", "n", [4, 5])
        first.workers.notify("q", "n", [])
        await second.heard.wait()
        assert seen == [[2], [4, 5]]
        assert len(second.notices) == 1
        second.heard.clear()
        first.workers.notify("q", "n", range(HTTP_SETTLED_SEQS_MAX + 10))
        first.workers.notify("q", "n", [1])
        await second.heard.wait()
        assert seen[2:] == [list(range(HTTP_SETTLED_SEQS_MAX))]

    run(tmp_path, scenario)


def test_one_gateway_opens_no_socket(tmp_path: Path) -> None:
    async def scenario(first: Gateway, second: Gateway) -> None:
        alone = Gateway(0, tmp_path, processes=1)
        await alone.serve()
        assert not Path(http_gateway_socket(str(tmp_path), 0)).exists()

    run(tmp_path, scenario)
