"""Requests of an actor to a shard, against a real ROUTER socket whose misbehaviour the test controls."""

from __future__ import annotations

import os
import threading

import pytest
import zmq

from ringlog.envelope.messages import ErrorReply, Ping, Pong
from ringlog.envelope.wire import EnvelopeInvalid, decode, encode
from ringlog.errors import NotReady, RequestTimeout, ShuttingDown, Status, TopicNotFound
from ringlog.link import shard_requests
from ringlog.link.shard_requests import Requester, ShardRequests
from ringlog.testing.real_engine import wait_until

PONG = Pong(1, 2)


class Server:
    """A ROUTER in its own thread. `answer` maps `(corr, attachment)` to the messages that it sends."""

    def __init__(self, endpoint, answer, times=1, *, dies=False):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.bind(endpoint)
        self.may_end = threading.Event()
        if dies:
            self.may_end.set()
        self.thread = threading.Thread(target=self._serve, args=(answer, times))
        self.thread.start()

    def _serve(self, answer, times):
        for _ in range(times):
            if not self.socket.poll(10_000):
                break
            client, data, *more = self.socket.recv_multipart()
            for parts in answer(decode(data).corr, more):
                self.socket.send_multipart([client, *parts])
        self.may_end.wait()
        self.socket.close()

    def close(self):
        self.may_end.set()
        self.thread.join()
        self.context.term()


class Stop:
    def __init__(self):
        self.asked = False

    def is_set(self):
        return self.asked


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/wal_shard-00.sock"


@pytest.fixture
def requester(endpoint):
    requester = Requester("shard 0", endpoint)
    yield requester
    requester.close()


def test_a_reply_contains_its_attachment(endpoint, tmp_path):
    server = Server(endpoint, lambda corr, more: [[encode(PONG, corr), more[0] * 2]])
    requests = ShardRequests(str(tmp_path), 1)
    answer = requests.ask(0, Ping(), Pong, attachment=b"ab")
    assert answer.message == PONG
    assert bytes(answer.attachment) == b"abab"
    requests.close()
    server.close()


def test_a_reply_is_received_although_the_shard_exits_after_it(endpoint, requester):
    server = Server(endpoint, lambda corr, _: [[encode(PONG, corr)]], dies=True)
    assert requester.ask(Ping(), Pong).message == PONG
    server.close()


def test_a_refusal_is_raised_as_its_typed_error(endpoint, requester):
    server = Server(
        endpoint, lambda corr, _: [[encode(ErrorReply(Status.TOPIC_NOT_FOUND, "no such topic", {}), corr)]]
    )
    with pytest.raises(TopicNotFound):
        requester.ask(Ping(), Pong)
    server.close()


def test_a_reply_to_an_earlier_request_is_ignored(endpoint, requester):
    server = Server(
        endpoint, lambda corr, _: [[encode(PONG, corr - 1), b"old"], [encode(PONG, corr), b"new"]]
    )
    assert bytes(requester.ask(Ping(), Pong).attachment) == b"new"
    server.close()


def test_a_reply_of_another_kind_is_refused(endpoint, requester):
    server = Server(endpoint, lambda corr, _: [[encode(Ping(), corr)]])
    with pytest.raises(EnvelopeInvalid):
        requester.ask(Ping(), Pong)
    server.close()


def test_a_request_without_a_listener_fails_with_not_ready(requester, monkeypatch):
    monkeypatch.setattr(shard_requests, "CONNECT_S", 0.05)
    with pytest.raises(NotReady):
        requester.ask(Ping(), Pong)


def test_a_request_without_a_listener_sleeps_and_shows_that_its_process_lives(endpoint, monkeypatch):
    """It waits for a shard that restarts, and its process must neither look stuck nor use a processor."""
    monkeypatch.setattr(shard_requests, "CONNECT_S", 0.5)
    beats = []
    requester = Requester("shard 0", endpoint, beat=lambda: beats.append(0))
    with pytest.raises(NotReady):
        requester.ask(Ping(), Pong)
    requester.close()
    assert 1 <= len(beats) <= 5, "it must sleep in between"


def test_a_request_to_a_dying_shard_fails_and_its_successor_can_be_queried(endpoint, requester):
    first = Server(endpoint, lambda corr, _: [], dies=True)
    with pytest.raises(NotReady) as caught:
        requester.ask(Ping(), Pong)
    assert caught.value.outcome == "unknown"
    first.close()
    second = Server(endpoint, lambda corr, _: [[encode(PONG, corr)]])
    assert requester.ask(Ping(), Pong).message == PONG
    second.close()


def test_a_lost_connection_creates_no_threads(endpoint, requester):
    """libzmq aborts the process if it cannot create a thread.

    A compactor died in this way after the death of a shard.
    """
    ours = set(os.listdir("/proc/self/task"))
    first = Server(endpoint, lambda corr, _: [], dies=True)
    with pytest.raises(NotReady):
        requester.ask(Ping(), Pong)
    first.close()
    second = Server(endpoint, lambda corr, _: [[encode(PONG, corr)]])
    assert requester.ask(Ping(), Pong).message == PONG
    second.close()
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= ours, 5.0, "the servers' threads to be gone")


def test_a_missing_reply_is_a_timeout_and_a_late_reply_is_ignored(endpoint, requester):
    late = []

    def answer(corr, _):
        late.append(corr)
        return [[encode(PONG, each), b""] for each in late[1:]]

    server = Server(endpoint, answer, times=2)
    with pytest.raises(RequestTimeout):
        requester.ask(Ping(), Pong, timeout_s=0.1)
    assert requester.ask(Ping(), Pong).message == PONG
    server.close()


def test_a_stop_request_ends_the_wait(endpoint):
    stop = Stop()
    requester = Requester("shard 0", endpoint, stop=stop, beat=lambda: setattr(stop, "asked", True))
    server = Server(endpoint, lambda corr, _: [], times=1)
    with pytest.raises(ShuttingDown):
        requester.ask(Ping(), Pong)
    requester.close()
    server.close()
