"""A real engine under real pressure: a shard is stopped while its rings fill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import ringlog
from ringlog.board import pressure
from ringlog.board.board import Board
from ringlog.board.layout import GovernorField
from ringlog.board.processes import scheduler_slot, shard_slot, shard_socket
from ringlog.client import Client
from ringlog.client.read.pages import Record
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import RequestTimeout, RinglogError, Status, Throttled
from ringlog.frame import encode_records, frame
from ringlog.governor import PressureStep
from ringlog.limits import GOVERNOR_SAMPLE_MS, PRESSURE_RETRY_MS
from ringlog.ring.layout import RingWord, WakeupFlags
from ringlog.ring.region import open_ring
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.machine import suspended

pytestmark = pytest.mark.slow

WAIT_S = 20.0
FLOOD = 2_000
"""Several times the number of requests that a shard receives in one pass, and less than its socket holds."""


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[TestEngine]:
    """Run an engine with one shard, one scheduler, and rings of the smallest size."""
    governed = getattr(request, "param", True)
    with engine(
        delivery={"schedulers": 1}, run={"ring_bytes": 65_536}, governor={"enabled": governed}
    ) as found:
        yield found


@pytest.fixture
def board(running: TestEngine) -> Iterator[Board]:
    found = Board.open(running.info.shm_dir, writable=False)
    yield found
    found.close()


def shard_of(board: Board) -> pressure.Pressure:
    return pressure.read(board.process(shard_slot(0)), SystemClock().monotonic_ns())


def instance_of(board: Board) -> pressure.Pressure:
    return pressure.read(board.process(scheduler_slot(1, 0)), SystemClock().monotonic_ns())


def payload(n: int) -> bytes:
    return n.to_bytes(8, "big").ljust(1_000, b".")


def stored(client: ringlog.Client, topic: str) -> list[int]:
    """Return the numbers that the payloads of a topic contain."""
    with client.reader(topic) as reader:
        return [int.from_bytes(record.data[:8], "big") for record in reader if isinstance(record, Record)]


def test_a_full_ring_throttles_and_loses_and_duplicates_no_record(running: TestEngine) -> None:
    """A refused frame is `not_applied` (HTTP status 429), and the client can send it again."""
    with ringlog.connect(running.url, timeout_ms=2_000) as client:
        client.append("t", payload(0))
        producer = client.producer("t", linger_ms=0, max_frame_records=1)
        with suspended(running.pid_of("wal_shard")):
            tickets = {n: producer.send(payload(n)) for n in range(1, 201)}
            fates = {n: fate_of(ticket) for n, ticket in tickets.items()}
        refused = [n for n, fate in fates.items() if isinstance(fate, Throttled)]
        sent = [n for n, fate in fates.items() if isinstance(fate, RequestTimeout)]
        assert sorted(refused + sent) == list(range(1, 201))
        assert 20 < len(sent) < 65, "a ring's worth"
        for n in refused:
            error: Any = fates[n]
            assert (error.detail["reason"], error.detail["topic"]) == ("ingest_full", "t")
            assert error.detail["retry_after_ms"] == PRESSURE_RETRY_MS
            assert (error.outcome, error.http) == ("not_applied", 429)
        for n in refused:
            producer.send(payload(n)).result(WAIT_S)
        producer.close()
        assert sorted(stored(client, "t")) == list(range(201))


def fate_of(ticket: Any) -> RinglogError:
    with pytest.raises((Throttled, RequestTimeout)) as caught:
        ticket.result(WAIT_S)
    return caught.value


def asks_for_no_gathering(running: TestEngine) -> bool:
    """Return whether the only ring of the engine has the flag `NO_BATCH_WINDOW`."""
    (ring,) = Path(running.info.shm_dir).glob("*.ring")
    fd, memory = open_ring(str(ring))
    try:
        return bool(memory.load(RingWord.WANTS) & WakeupFlags.NO_BATCH_WINDOW)
    finally:
        memory.close()
        os.close(fd)


def test_a_ring_has_a_flag_for_frames_that_must_not_wait_for_a_batch_window(
    running: TestEngine, client: Client
) -> None:
    """`disable_backpressure` sets the flag, for an append and for a producer."""
    client.append("t", b"1")
    assert not asks_for_no_gathering(running)
    client.append("t", b"2", disable_backpressure=True)
    assert asks_for_no_gathering(running)
    with client.producer("t", disable_backpressure=True) as producer:
        producer.send(b"3").result(WAIT_S)
        assert asks_for_no_gathering(running)
    client.append("t", b"4")
    assert not asks_for_no_gathering(running)
    with client.reader("t") as reader:
        assert [record.data for record in reader if isinstance(record, Record)] == [
            b"1",
            b"2",
            b"3",
            b"4",
        ]


class Flood:
    """Many appends by message at once, from a client that does not wait for replies."""

    def __init__(self, running: TestEngine) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(shard_socket(running.info.shm_dir, 0))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def send(self, numbers: range, seq: int = 0) -> None:
        """Send appends. The producer numbers are those of the records, or start at `seq`."""
        for i, n in enumerate(numbers):
            data = frame(
                encode_records([payload(n)]), producer_id=77, producer_seq=(seq + i) if seq else n, topic_id=0
            )
            self._socket.send_multipart([encode(m.Append("flood", 1), n), bytes(data)])

    def ask(self, message: m.Message) -> None:
        self._socket.send(encode(message, FLOOD * 10))

    def answers(self, count: int) -> dict[int, m.Message]:
        found: dict[int, m.Message] = {}
        while len(found) < count:
            assert self._socket.poll(WAIT_S * 1_000), f"{len(found)} of {count} answers"
            envelope = decode(self._socket.recv_multipart()[0])
            found[envelope.corr] = envelope.message
        return found


@pytest.fixture
def flood(running: TestEngine) -> Iterator[Flood]:
    made = Flood(running)
    yield made
    made.close()


def is_acked(answer: m.Message) -> bool:
    if not isinstance(answer, m.Appended):
        return False
    return int(np.frombuffer(answer.entries, dtype=np.uint64)[3]) >> 32 & 0xFFFF == Status.OK


def fill_and_flood(
    running: TestEngine, client: ringlog.Client, producer: Any, flood: Flood
) -> dict[int, m.Message]:
    """Fill the ring and send 2,000 requests while the shard is stopped. Return the replies."""
    producer.send(payload(0)).result(WAIT_S)  # Topic and ring exist now.
    with suspended(running.pid_of("wal_shard")):
        producer.send_each([payload(n) for n in range(1, 5_000)])
        flood.ask(m.TopicState("flood"))
        flood.send(range(1, FLOOD + 1))
        # When the shard continues, a sample is due. The sample counts all of this before the shard takes any
        # of it.
        due_ns = SystemClock().monotonic_ns() + 2 * GOVERNOR_SAMPLE_MS * 1_000_000
        wait_until(lambda: SystemClock().monotonic_ns() >= due_ns, WAIT_S, "the next sample to be due")
    return flood.answers(FLOOD + 1)


def test_new_writes_are_refused_under_high_pressure_and_accepted_later(
    running: TestEngine, client: Client, board: Board, flood: Flood
) -> None:
    """Only new writes are refused, and a refusal changes nothing (L5)."""
    client.topics.create("flood")
    with client.producer("ring") as producer:
        answers = fill_and_flood(running, client, producer, flood)
        assert isinstance(answers.pop(FLOOD * 10), m.TopicStateReply), "everything else is answered"
        refused = {n for n, answer in answers.items() if not is_acked(answer)}
        assert len(refused) >= 255, "at least the requests of one pass: only then the intake is full"
        for n in refused:
            answer = answers[n]
            assert isinstance(answer, m.ErrorReply)
            assert Status(answer.status) is Status.THROTTLED
            assert answer.detail == {
                "reason": "pressure", "topic": "flood", "retry_after_ms": PRESSURE_RETRY_MS,
            }  # fmt: skip
    assert sorted(stored(client, "ring")) == list(range(5_000))
    wait_until(lambda: shard_of(board).pressure == 0, WAIT_S, "the shard to have no pressure")
    assert shard_of(board) == pressure.Pressure(refused=len(refused), waited_ns=shard_of(board).waited_ns)
    for again, n in enumerate(sorted(refused), 2 * FLOOD):
        flood.send(range(n, n + 1), again)
        assert is_acked(flood.answers(1)[n])
    assert sorted(stored(client, "flood")) == list(range(1, FLOOD + 1))


def test_a_scheduler_takes_over_the_pressure_of_a_shard_with_a_heartbeat(
    running: TestEngine, board: Board
) -> None:
    """The last words of a process without heartbeat count as 0 (L7)."""
    with ringlog.connect(running.url, timeout_ms=60_000) as client, client.producer("t") as producer:
        producer.send(payload(0)).result(WAIT_S)
        with suspended(running.pid_of("wal_shard")):
            producer.send_each([payload(n) for n in range(1, 20_000)])
        wait_until(lambda: shard_of(board).pressure > 0.9, WAIT_S, "the shard to be under pressure")
        with suspended(running.pid_of("wal_shard")):
            said = shard_of(board)
            wait_until(
                lambda: instance_of(board).pressure >= said.pressure,
                WAIT_S,
                "the instance to take over the pressure",
            )
            assert instance_of(board).step >= PressureStep.WIDEN
            assert instance_of(board).fill < 0.5, "delivery itself has no pressure"
            wait_until(
                lambda: instance_of(board).pressure < 0.5,
                WAIT_S,
                "the pressure of the stopped shard to expire",
            )
        producer.flush(WAIT_S)
        assert sorted(stored(client, "t")) == list(range(20_000))
        wait_until(lambda: instance_of(board).pressure == 0, WAIT_S, "the instance to have no pressure")


@pytest.mark.parametrize("running", [False], indirect=True)
def test_a_disabled_governor_refuses_nothing(
    running: TestEngine, client: Client, board: Board, flood: Flood
) -> None:
    """The governor still publishes its samples."""
    client.topics.create("flood")
    with client.producer("ring") as producer:
        answers = fill_and_flood(running, client, producer, flood)
        del answers[FLOOD * 10]
        assert all(map(is_acked, answers.values()))
    assert board.process(shard_slot(0)).get(GovernorField.SAMPLED_NS)
    assert shard_of(board).waited_ns == 0
