"""A watch session is not lost when the reply that gives it away is. The test takes sessions as a gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import zmq

from ringlog.access.keys import ANYONE
from ringlog.board.processes import http_gateway_socket
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import InvalidRequest
from ringlog.limits import ENVELOPE_BYTES_MAX
from ringlog.link.shard_requests import Requester, RequesterReply
from ringlog.testing.real_engine import TestEngine
from tests.support.engines import engine_fixture
from tests.support.http_client import EventStream, HttpClient
from tests.support.http_processes import clients_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROCESSES = 3
http_engine = engine_fixture(
    "module", ready="http_gateway", http={"enabled": True, "port": 0, "processes": PROCESSES},
    delivery={"schedulers": 1},
)  # fmt: skip
"""A running engine of this module with three gateway processes, without keys."""


class Sibling:
    """What the gateways of the engine hear from gateway 1, and answer it."""

    def __init__(self, engine: TestEngine) -> None:
        shm_dir = engine.info.shm_dir
        self.ends = [Requester(f"gateway {n}", http_gateway_socket(shm_dir, n)) for n in range(PROCESSES)]

    def take(
        self, number: int, wid: str, *, taker: int = 1, moves: int = 0, principal: str = ANYONE.name
    ) -> RequesterReply[m.FoundSession]:
        return self.ends[number].ask(m.FindSession(wid, principal, taker, moves), m.FoundSession)

    def what(self, number: int, wid: str, **fields: int) -> str:
        return self.take(number, wid, taker=-1, **fields).message.what


@pytest.fixture
def sibling(http_engine: TestEngine) -> Iterator[Sibling]:
    http_engine.wait_ready("http_gateway")
    found = Sibling(http_engine)
    yield found
    for end in found.ends:
        end.close()


@pytest.fixture
def clients(http_engine: TestEngine) -> Iterator[list[HttpClient]]:
    with clients_of(http_engine, PROCESSES) as found:
        yield found


@pytest.fixture
def wid(clients: list[HttpClient], topic: str) -> str:
    """A watch session of gateway 0, on a topic with one record."""
    assert clients[0]("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}).status in {200, 201}
    answer = clients[0]("POST", "/v0/watch", {"topics": {topic: {}}})
    return str(answer.body["wid"])


def goes_on(stream: EventStream) -> bool:
    return stream.status == 200 and [one["$seq"] for one in stream.records(1)] == [1]


def test_a_repeated_request_gets_the_same_session(sibling: Sibling, wid: str) -> None:
    first, again = sibling.take(0, wid), sibling.take(0, wid)
    assert first.message == again.message == m.FoundSession("given")
    assert bytes(first.attachment) == bytes(again.attachment) != b""
    assert sibling.take(0, wid, principal="other").message.what == "foreign"
    assert sibling.take(0, wid, moves=1).message.what == "absent", "it has come there later than it was given"


@pytest.mark.parametrize("number", range(PROCESSES))
def test_a_session_whose_taker_has_not_received_it_streams_everywhere(
    sibling: Sibling, clients: list[HttpClient], wid: str, number: int
) -> None:
    """Gateway 1 has been given the session, and does not know it: the reply was lost or came too late."""
    assert sibling.take(0, wid).message.what == "given"
    with clients[number].into_stream(f"/v0/watch/{wid}") as stream:
        assert goes_on(stream)
        assert [sibling.what(n, wid) for n in range(PROCESSES)][number] == "here"


def test_a_session_may_be_larger_than_an_envelope(clients: list[HttpClient], wid: str, topic: str) -> None:
    nodes = [f"{number:0100}" for number in range(2 * ENVELOPE_BYTES_MAX // 100)]
    answer = clients[0]("POST", "/v0/watch", {"topics": {topic: {}}, "node": nodes})
    assert answer.status == 200, answer
    with clients[1].into_stream(answer.body["stream_url"]) as stream:
        assert goes_on(stream)


def test_head_finds_such_a_session(sibling: Sibling, clients: list[HttpClient], wid: str) -> None:
    assert sibling.take(0, wid).message.what == "given"
    assert [call("HEAD", f"/v0/watch/{wid}").status for call in clients] == [200] * PROCESSES
    assert sibling.what(0, wid) == "here"


def test_a_confirmed_session_is_not_given_again(
    sibling: Sibling, clients: list[HttpClient], wid: str
) -> None:
    with clients[1].into_stream(f"/v0/watch/{wid}") as stream:
        assert goes_on(stream)
        assert sibling.what(1, wid) == "here"
        # The confirmation of gateway 1 may be on its way. This is the same.
        assert sibling.ends[0].ask(m.SessionsHeld(1, [(wid, 1)]), m.Noted).message == m.Noted()
        for _ in range(2):
            assert sibling.take(0, wid).message == m.FoundSession("moved", 1, 1)
        assert sibling.what(1, wid) == "here"


def test_a_session_that_was_taken_back_moves_on(
    sibling: Sibling, clients: list[HttpClient], wid: str
) -> None:
    assert sibling.take(0, wid).message.what == "given"
    assert sibling.take(0, wid, taker=2).message.what == "given", "gateway 1 does not know it"
    assert sibling.what(0, wid) == "here", "nor does gateway 2"
    with clients[2].into_stream(f"/v0/watch/{wid}") as stream:
        assert goes_on(stream)
        assert sibling.take(0, wid, taker=-1).message == m.FoundSession("moved", 2, 3)


def test_a_taker_that_asks_again_meanwhile_keeps_a_session(
    http_engine: TestEngine, sibling: Sibling, wid: str
) -> None:
    """Gateway 0 asks gateway 1 for gateway 2, and gives the session to gateway 1 again before it hears."""
    assert sibling.take(0, wid).message.what == "given"
    pid = http_engine.pid_of("http_gateway", 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(http_gateway_socket(http_engine.info.shm_dir, 0))
        os.kill(pid, signal.SIGSTOP)
        try:
            for taker in (2, 1):  # They arrive in this order.
                dealer.send(encode(m.FindSession(wid, ANYONE.name, taker), taker))
            given = decode(dealer.recv_multipart()[0])
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (given.corr, given.message) == (1, m.FoundSession("given"))
        other = decode(dealer.recv_multipart()[0])
        assert (other.corr, other.message) == (2, m.FoundSession("moved", 1, 1))


def test_a_gateway_that_dies_before_it_confirms_loses_no_session(
    http_engine: TestEngine, sibling: Sibling, clients: list[HttpClient], wid: str
) -> None:
    assert sibling.take(0, wid).message.what == "given"
    http_engine.kill("http_gateway", shard=1)
    http_engine.wait_ready("http_gateway")
    with clients[2].into_stream(f"/v0/watch/{wid}") as stream:
        assert goes_on(stream)


def test_requests_that_no_gateway_sends_are_refused(
    http_engine: TestEngine, sibling: Sibling, clients: list[HttpClient], wid: str
) -> None:
    before = {each.name: each.pid for each in http_engine.status().processes}
    requests: list[m.Message] = [
        m.FindSession(wid, ANYONE.name, 0), m.FindSession(wid, ANYONE.name, PROCESSES),
        m.FindSession(wid, ANYONE.name, 2**31 - 1), m.SessionsHeld(0, [(wid, 7)]),
        m.SessionsHeld(PROCESSES, [(wid, 7)]), m.TopicDelete("t"), m.Noted(), m.FoundSession("given"),
        m.FindSession(wid, ANYONE.name, -2), m.SessionsHeld(-1, []),
    ]  # fmt: skip
    for request in requests:
        with pytest.raises(InvalidRequest):
            sibling.ends[0].ask(request, m.Noted)
    sibling.ends[0].ask(m.SessionsHeld(1, [("", 0), ("x" * 1_000, 2**32 - 1)]), m.Noted)
    sibling.ends[0].ask(m.JobsSettled([m.SettledJobs("", "", [])]), m.Noted)
    assert sibling.what(0, "x" * 1_000) == "moved"
    assert sibling.ends[0].ask(m.ListSessions(2**32 - 1), m.SessionsListed).attachment == b"\x90"
    sibling.ends[0].ask(m.Ping(), m.Pong)
    assert {each.name: each.pid for each in http_engine.status().processes} == before
    assert clients[0]("HEAD", f"/v0/watch/{wid}").status == 200
