"""Requests over a connection to a real ROUTER socket, whose misbehaviour the test controls."""

from __future__ import annotations

import time

import pytest
import zmq

from ringlog.client.connection.descriptor_set import Descriptors
from ringlog.clock import SystemClock
from ringlog.envelope.messages import Append, ErrorReply, Ping, Pong
from ringlog.envelope.wire import PROTOCOL, decode, encode
from ringlog.errors import NotConnected, RequestTimeout, Status, TopicNotFound, VersionMismatch
from ringlog.link.peer import Peer
from ringlog.link.timers import Timers
from ringlog.testing.real_engine import wait_until

LONG_S = 10.0


class Server:
    """A ROUTER that replies when the test requests it."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.context = zmq.Context()
        self.open()

    def open(self):
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)

    def take(self):
        """Return the next request as `(client, envelope, attachments)`, or None."""
        try:
            client, data, *more = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return client, decode(data), more

    def answer(self, client, corr, message):
        self.socket.send_multipart([client, encode(message, corr)])

    def leave(self):
        """Send what was not sent yet and end."""
        self.socket.close(LONG_S * 1_000)
        self.context.term()
        self.context = zmq.Context()
        self.open()

    def die(self):
        self.socket.close(0)

    def close(self):
        self.socket.close(0)
        self.context.term()


class Client:
    """A Peer with its environment."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.timers, self.clock, self.fds = Timers(), SystemClock(), Descriptors()
        self.peer = Peer("the peer", context=self.context, timers=self.timers, clock=self.clock, fds=self.fds)
        self.peer.set_endpoint(endpoint)

    def deadline(self, seconds=LONG_S):
        return self.clock.monotonic_ns() + int(seconds * 1e9)

    def until(self, condition):
        """Serve the peer until the condition is true. Return its value."""
        end = time.monotonic() + LONG_S
        while not (found := condition()):
            assert time.monotonic() < end, "waited in vain"
            self.fds.sleep(0.005)
            self.peer.pump()
            self.timers.fire(self.clock.monotonic_ns())
        return found

    def is_woken(self):
        """Wait until a descriptor of the peer is readable."""
        ready = set(self.fds.sleep(LONG_S))
        return ready and ready <= set(self.peer.fds)

    def until_quiet(self):
        """Serve the peer until no descriptor wakes it up.

        The next wake-up belongs to the next step of the test.
        """
        while self.fds.sleep(0.05):
            self.peer.pump()

    def close(self):
        self.peer.close()
        self.context.term()
        self.fds.close()


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def server(endpoint):
    server = Server(endpoint)
    yield server
    server.close()


@pytest.fixture
def client(endpoint):
    client = Client(endpoint)
    yield client
    client.close()


def test_replies_are_matched_by_their_correlation_id(server, client):
    """Replies may arrive in any order."""
    pendings = [client.peer.request(Ping(), client.deadline()) for _ in range(3)]
    requests = [client.until(server.take) for _ in range(3)]
    for turns, (who, envelope, _) in reversed(list(enumerate(requests))):
        server.answer(who, envelope.corr, Pong(1, turns))
    client.until(lambda: all(p.is_done for p in pendings))
    assert [p.result().message.turns for p in pendings] == [0, 1, 2]


def test_unexpected_replies_and_malformed_envelopes_are_dropped(server, client):
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    server.socket.send_multipart([who, b"\xff not an envelope"])
    server.answer(who, envelope.corr + 1000, Pong(9, 9))
    server.answer(who, envelope.corr, Pong(1, 1))
    server.answer(who, envelope.corr, Pong(2, 2))
    client.until(lambda: pending.is_done)
    assert pending.result().message == Pong(1, 1)


def test_open_requests_fail_at_once_if_the_peer_has_another_version(server, client):
    """A peer of the previous version cannot decode the request and replies without its correlation id."""
    pendings = [client.peer.request(Ping(), client.deadline()) for _ in range(2)]
    who, _, _ = client.until(server.take)
    refusal = ErrorReply(int(Status.INVALID_REQUEST), "unknown protocol version", {}, "not_applied")
    server.socket.send_multipart([who, encode(refusal, 0, PROTOCOL - 1)])
    client.until(lambda: all(pending.is_done for pending in pendings))
    for pending in pendings:
        with pytest.raises(VersionMismatch, match=f"{PROTOCOL - 1} and {PROTOCOL}: install the same ringlog"):
            pending.result()


def test_open_requests_are_sent_again_in_order_after_a_reconnection(server, client):
    """A restart is a pause for the caller. Producer numbers are safe only if the order is kept."""
    pendings = [client.peer.request(Append(f"t{n}", 1), client.deadline(), bytes([n]) * 8) for n in range(5)]
    before = [client.until(server.take) for _ in range(5)]
    who, envelope, _ = before[1]
    server.answer(who, envelope.corr, Pong(0, 1))
    client.until(lambda: pendings[1].is_done)
    server.die()
    client.until(lambda: not client.peer.is_up)
    late = client.peer.request(Append("t5", 1), client.deadline(), b"\5" * 8)
    server.open()
    again = [client.until(server.take) for _ in range(5)]
    assert [e.message.topic for _, e, _ in again] == ["t0", "t2", "t3", "t4", "t5"]
    assert [e.corr for _, e, _ in again[:4]] == [before[n][1].corr for n in (0, 2, 3, 4)]
    assert [more for _, _, more in again] == [[bytes([n]) * 8] for n in (0, 2, 3, 4, 5)]
    for who, envelope, _ in again:
        server.answer(who, envelope.corr, Pong(0, 0))
    client.until(lambda: late.is_done and all(p.is_done for p in pendings))


def test_a_peer_that_starts_late_is_connected(endpoint, client):
    pending = client.peer.request(Ping(), client.deadline())
    client.until(lambda: client.timers.next_ns() is not None)
    server = Server(endpoint)
    try:
        who, envelope, _ = client.until(server.take)
        server.answer(who, envelope.corr, Pong(1, 1))
        client.until(lambda: pending.is_done)
        assert pending.error is None
    finally:
        server.close()


def test_a_request_refused_as_not_ready_is_retried(server, client):
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, ErrorReply(Status.NOT_READY, "recovering", {"retry_after_ms": 1}))
    who, again, _ = client.until(server.take)
    assert again.corr == envelope.corr
    server.answer(who, again.corr, Pong(1, 1))
    client.until(lambda: pending.is_done)
    assert pending.error is None


def test_a_refusal_after_a_reply_with_unknown_outcome_leaves_the_outcome_unknown(server, client):
    """The first attempt may be applied: with `not_applied` the caller would write again under new numbers."""
    pending = client.peer.request(Append("t", 1), client.deadline(), b"x" * 8)
    who, envelope, _ = client.until(server.take)
    unread = ErrorReply(Status.NOT_READY, "unread replies", {"retry_after_ms": 1}, "unknown")
    server.answer(who, envelope.corr, unread)
    who, again, _ = client.until(server.take)
    server.answer(who, again.corr, ErrorReply(Status.THROTTLED, "too much"))
    client.until(lambda: pending.is_done)
    assert (pending.error.code, pending.error.outcome) == ("throttled", "unknown")


def test_refused_frames_are_not_retried_by_the_connection(server, client):
    """A refused frame needs a new producer number, so its stream decides about the retry."""
    pending = client.peer.request(Append("t", 1), client.deadline(), b"x" * 8, is_patient=False)
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, ErrorReply(Status.NOT_READY, "recovering"))
    client.until(lambda: pending.is_done)
    assert pending.error.code == "not_ready"


@pytest.mark.parametrize("status", [Status.NOT_READY, Status.SHUTTING_DOWN, Status.THROTTLED])
def test_a_refused_retry_has_an_unknown_outcome(server, client, status):
    """The first attempt may still be appended from the ring of a dead gateway (RF-8).

    The outcome `not_applied` would be wrong.
    """
    pending = client.peer.request(Append("t", 1), client.deadline(), b"x" * 8, is_patient=False)
    client.until(server.take)
    server.die()
    client.until(lambda: not client.peer.is_up)
    server.open()
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, ErrorReply(status, "not now", {}, "not_applied"))
    client.until(lambda: pending.is_done)
    assert pending.error.outcome == "unknown"


def test_a_refusal_is_raised_as_its_typed_error_with_details(server, client):
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, ErrorReply(Status.TOPIC_NOT_FOUND, "no such topic", {"topic": "x"}))
    client.until(lambda: pending.is_done)
    with pytest.raises(TopicNotFound, match="topic='x'"):
        pending.result()


def test_a_missing_reply_is_a_timeout_with_unknown_outcome(server, client):
    """The request was sent, so it may have been applied."""
    client.until(lambda: client.peer.is_up)
    pending = client.peer.request(Ping(), client.deadline(0.05))
    client.until(lambda: pending.is_done)
    assert isinstance(pending.error, RequestTimeout)
    assert pending.error.outcome == "unknown"


def test_a_request_that_was_never_sent_was_not_applied(client):
    """The error is `NotConnected`."""
    pending = client.peer.request(Ping(), client.deadline(0.05))
    client.until(lambda: pending.is_done)
    assert isinstance(pending.error, NotConnected)
    assert pending.error.outcome == "not_applied"


def test_a_reply_before_the_end_of_the_connection_is_received(server, client):
    """At its end, a connection with ZMQ_IMMEDIATE or without reconnects drops messages that were not read.

    A gateway that stopped sent the reply to an append, and the client waited for its successor."""
    client.until(lambda: client.peer.is_up)
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, Pong(1, 1))
    server.leave()
    wait_until(lambda: client.peer._socket.state() == "ended", LONG_S, "the end of the connection")
    assert client.peer.pump()
    assert pending.result().message == Pong(1, 1)


def test_a_reply_after_the_last_receive_wakes_the_client(server, client):
    client.until(lambda: client.peer.is_up)
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    client.until_quiet()
    server.answer(who, envelope.corr, Pong(1, 1))
    assert client.is_woken()
    client.peer.pump()
    assert pending.is_done


def test_an_endpoint_without_a_listener_keeps_no_descriptor_readable(endpoint, client):
    """A client that cannot connect would use a whole processor."""
    client.until(lambda: client.peer._socket.state() == "ended")
    client.until_quiet()
    assert not client.fds.sleep(0.0)


def test_a_oneway_send_detects_the_end_of_the_connection(server, client):
    """A client with watches may send no request for hours."""
    client.until(lambda: client.peer.is_up)
    client.until_quiet()
    server.die()
    assert client.is_woken()
    client.peer.send_oneway(Ping())
    assert not client.peer.is_up
    server.open()
    client.until(lambda: client.peer.is_up)
    assert client.peer.connections == 2


@pytest.mark.interpreted
def test_a_connection_that_ends_during_resends_is_detected(server, client):
    """A send consumes the wake-up, and the peer would not poll again before some deadline."""
    client.until(lambda: client.peer.is_up)
    server.die()
    client.until(lambda: not client.peer.is_up)
    pending = client.peer.request(Ping(), client.deadline())
    server.open()
    send = client.peer._send

    def send_as_the_server_dies(asked):
        client.peer._send = send
        server.die()
        assert client.is_woken()
        send(asked)

    client.peer._send = send_as_the_server_dies
    client.until(lambda: client.peer.connections == 2)
    assert not client.peer.is_up
    server.open()
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, Pong(1, 1))
    client.until(lambda: pending.is_done)


def test_an_idle_connection_has_no_timers(server, client):
    """An idle client sleeps until its next request."""
    pending = client.peer.request(Ping(), client.deadline())
    who, envelope, _ = client.until(server.take)
    server.answer(who, envelope.corr, Pong(1, 1))
    client.until(lambda: pending.is_done)
    assert client.timers.next_ns() is None


class Lane:
    """A fast path that accepts every request and sends no reply."""

    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(decode(data).corr)
        return True


@pytest.fixture
def lane(server, client):
    client.until(lambda: client.peer.is_up)
    client.peer.fast_path = found = Lane()
    return found


def awaited(client, seconds=LONG_S):
    return client.peer.request(Ping(), client.deadline(seconds), by_fast_path=True, is_awaited=True)


def test_a_request_that_is_spun_for_needs_no_timer(client, lane):
    asked = awaited(client)
    assert client.timers.next_ns() is None
    client.peer.on_message(encode(Pong(1, 1), lane.sent[0]), None)
    assert asked.result().message == Pong(1, 1)
    asked.start_timer()
    assert client.timers.next_ns() is None


def test_the_timeout_of_a_spun_request_starts_when_its_caller_sleeps(client, lane):
    """At the timeout the outcome is unknown."""
    asked = awaited(client, 0.05)
    asked.start_timer()
    client.until(lambda: asked.is_done)
    assert isinstance(asked.error, RequestTimeout)
    assert asked.error.outcome == "unknown"
    assert client.timers.next_ns() is None


def test_a_refusal_can_be_handled_and_the_request_settled_later(client, lane):
    asked, again = awaited(client), awaited(client)
    seen = []
    asked.on_refused = lambda error: bool(seen.append(error)) or True
    client.peer.on_message(
        encode(ErrorReply(int(Status.TOPIC_NOT_FOUND), "no such topic"), lane.sent[0]), None
    )
    assert not asked.is_done
    assert [type(error).__name__ for error in seen] == ["TopicNotFound"]
    asked.start_timer()
    assert client.timers.next_ns() is None
    again.when_done(lambda done: done.forward_to(asked))
    client.peer.on_message(encode(Pong(1, 2), lane.sent[1]), None)
    assert asked.result().message == Pong(1, 2)
