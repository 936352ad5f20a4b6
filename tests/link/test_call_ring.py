"""Requests and replies through shared memory, with one client and one shard."""

from __future__ import annotations

import os
import random
import select

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringlog.board import layout
from ringlog.board.layout import BoardError
from ringlog.board.mapping import BoardFile
from ringlog.errors import RingError
from ringlog.limits import CALL_BYTES_MAX, CALL_RING_BYTES
from ringlog.link.channel.call_ring import CallClient, CallServer, remove_stale_call_rings

NAME = "calls-00-1-1"


@pytest.fixture
def server(shm_dir):
    made = CallServer(str(shm_dir), NAME, 0)
    yield made
    made.close()


@pytest.fixture
def caller(server, shm_dir):
    opened = CallClient(str(shm_dir), NAME)
    yield opened
    opened.close()


def rang(caller):
    return bool(select.select([caller.fileno()], [], [], 0)[0])


def words_of(shm_dir):
    return BoardFile(str(shm_dir / NAME), layout.CALLS_MAGIC, writable=True)


def test_requests_and_replies_arrive_complete_and_in_order(server, caller):
    assert not server.has_requests
    assert caller.send(b"one")
    assert caller.send(b"two, which is longer")
    assert server.has_requests
    assert server.take_requests(10) == [b"one", b"two, which is longer"]
    assert not server.has_requests
    assert not caller.has_replies
    assert server.send_reply(b"12345678")
    assert caller.has_replies
    assert caller.take_replies() == [b"12345678"]
    assert not caller.has_replies


def test_take_requests_returns_at_most_the_given_number(server, caller):
    for n in range(5):
        caller.send(b"%d" % n)
    assert server.take_requests(2) == [b"0", b"1"]
    assert server.has_requests
    assert server.take_requests(10) == [b"2", b"3", b"4"]


def test_a_full_ring_accepts_no_request_until_space_is_free(server, caller):
    """`send` returns False and overwrites nothing, so the client can use the socket."""
    message = b"x" * 1_000
    sent = 0
    while caller.send(message):
        sent += 1
    assert sent == CALL_RING_BYTES // 1_008
    assert not caller.send(message)
    assert server.take_requests(1) == [message]
    assert caller.send(b"y" * 1_000)
    taken = server.take_requests(1_000)
    assert taken == [message] * (sent - 1) + [b"y" * 1_000]


def test_messages_above_the_maximum_size_are_refused(server, caller):
    assert caller.send(b"x" * CALL_BYTES_MAX)
    assert server.take_requests(1) == [b"x" * CALL_BYTES_MAX]
    assert not caller.send(b"x" * (CALL_BYTES_MAX + 1))
    assert not server.send_reply(b"x" * (CALL_BYTES_MAX + 1))
    assert not server.has_requests


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_messages_of_any_size_survive_the_wrap_around(shm_dir, seed):
    rng = random.Random(seed)
    server = CallServer(str(shm_dir), NAME, 0)
    caller = CallClient(str(shm_dir), NAME)
    try:
        waiting: list[bytes] = []
        for _ in range(300):
            if rng.random() < 0.6:
                message = rng.randbytes(rng.choice((1, 7, 8, 9, 100, 4_000, rng.randint(1, CALL_BYTES_MAX))))
                if caller.send(message):
                    waiting.append(message)
                else:
                    assert sum(8 + -(-len(each) // 8) * 8 for each in [*waiting, message]) > CALL_RING_BYTES
            else:
                most = rng.randint(1, 8)
                assert server.take_requests(most) == waiting[:most]
                del waiting[:most]
        assert server.take_requests(1_000) == waiting
    finally:
        caller.close()
        server.close()


def test_the_bell_rings_only_if_the_client_wants_a_wake_up(server, caller):
    server.send_reply(b"a")
    server.ring()
    assert not rang(caller)
    caller.set_wakeup(is_wanted=True)
    server.send_reply(b"b")
    assert not rang(caller)
    server.ring()
    assert rang(caller)
    caller.drain_bell()
    caller.set_wakeup(is_wanted=False)
    server.send_reply(b"c")
    server.ring()
    assert not rang(caller)
    assert caller.take_replies() == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("word", "value"),
    [(64, 4), (64, CALL_RING_BYTES + 8), (64, 1 << 63), (512, 0), (512, CALL_BYTES_MAX + 1), (512, 1 << 40)],
)
def test_invalid_words_are_an_error_and_no_request_is_read(server, caller, shm_dir, word, value):
    """Words and lengths may be overwritten by any process (RF-25)."""
    caller.send(b"sound")
    file = words_of(shm_dir)
    file.words[word] = value
    file.close()
    with pytest.raises(RingError):
        server.take_requests(10)


def test_a_tail_above_the_head_is_an_error(server, caller, shm_dir):
    file = words_of(shm_dir)
    file.words[80] = 1 << 40
    file.close()
    for _ in range(CALL_RING_BYTES // 10_008):
        assert caller.send(b"x" * 10_000)
    with pytest.raises(RingError):
        caller.send(b"x" * 10_000)


def test_a_ring_has_one_client_and_the_shard_detects_its_end(server, shm_dir):
    assert not server.has_client()
    first = CallClient(str(shm_dir), NAME)
    assert server.has_client()
    with pytest.raises(RingError, match="lock"):
        CallClient(str(shm_dir), NAME)
    first.close()
    assert not server.has_client()


def test_closing_a_ring_removes_it_and_notifies_the_client(server, caller, shm_dir):
    caller.set_wakeup(is_wanted=True)
    assert not caller.is_closed
    server.close()
    assert caller.is_closed
    assert rang(caller)
    assert os.listdir(shm_dir) == []
    caller.close()
    caller.close()
    server.close()


def test_a_ring_without_a_bell_cannot_be_opened(shm_dir):
    made = CallServer(str(shm_dir), NAME, 0)
    os.unlink(shm_dir / (NAME + ".bell"))
    with pytest.raises(RingError):
        CallClient(str(shm_dir), NAME)
    assert not made.has_client()
    made.close()


def test_a_file_of_another_kind_cannot_be_opened_as_a_call_ring(shm_dir):
    (shm_dir / NAME).write_bytes(bytes(100))
    (shm_dir / NAME).chmod(0o600)
    os.mkfifo(shm_dir / (NAME + ".bell"), 0o600)
    with pytest.raises(BoardError):
        CallClient(str(shm_dir), NAME)


def test_a_new_shard_removes_stale_call_rings(server, shm_dir):
    CallServer(str(shm_dir), "calls-01-1-1", 1)
    remove_stale_call_rings(str(shm_dir), 0)
    assert sorted(os.listdir(shm_dir)) == ["calls-01-1-1", "calls-01-1-1.bell"]
