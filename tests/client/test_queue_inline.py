"""Jobs whose records are sent with the reply to their claim.

They equal the records in the files. A client that claims recently written jobs opens no file.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import ringlog
from ringlog.client import Client, NewRecord
from ringlog.client.leases.inline_jobs import InlineJobs, decode_inline_jobs
from ringlog.client.leases.lease_operations import LeaseOperations
from ringlog.client.queue import Queue
from ringlog.client.read.local_source import LocalSource
from ringlog.envelope.messages import ClaimReply
from ringlog.errors import CorruptData
from ringlog.limits import INLINE_AHEAD_MIN, INLINE_BYTES_MAX
from ringlog.testing.real_engine import TestEngine

MANY = 4 * INLINE_AHEAD_MIN
NUMBERS = [b"job %d" % n for n in range(1, MANY + 1)]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[ClaimReply]:
    """The replies to claims, in order."""
    found: list[ClaimReply] = []
    read = LeaseOperations._read

    def noting(
        self: LeaseOperations, connection: Any, message: ClaimReply, attached: Any, pieces: Any
    ) -> Any:
        found.append(message)
        return read(self, connection, message, attached, pieces)

    monkeypatch.setattr(LeaseOperations, "_read", noting)
    return found


@pytest.fixture
def queue(client: Client, ringlog_topic: Callable[[str], str]) -> Queue:
    name = ringlog_topic("queue")
    client.topics.create(name, type="queue", durability="disk")
    found = client.queue(name, node="worker")
    found.put(b"first")
    found.ack(found.claim())  # A client requests its call ring with its first request.
    return found


def put_singly(queue: Queue, payloads: list[bytes]) -> None:
    for payload in payloads:
        queue.put(payload)


@pytest.mark.interpreted
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("most", [1, 7, MANY])
def test_inline_jobs_equal_the_stored_records(
    queue: Queue, answers: list[ClaimReply], together: bool, most: int
) -> None:
    if together:
        queue.put_many(NUMBERS)
    else:
        put_singly(queue, NUMBERS)
    stored = {record.seq: record for record in queue.peek(MANY)}
    jobs = [job for _ in range(-(-MANY // most)) for job in queue.claim(most)]
    assert [job.data for job in jobs] == NUMBERS
    assert [job.record for job in jobs] == [stored[job.seq] for job in jobs]
    assert any(answer.payloads for answer in answers)
    assert queue.ack(jobs).is_complete


def test_returned_jobs_and_fresh_jobs_are_delivered_together(queue: Queue, answers: list[ClaimReply]) -> None:
    queue.put_many(NUMBERS)
    first = queue.claim(MANY // 2)
    queue.nack(list(first)[::3])
    again = queue.claim(MANY)
    expected = [*NUMBERS[: MANY // 2 : 3], *NUMBERS[MANY // 2 :]]
    assert sorted(again.payloads()) == sorted(expected)
    assert [job.data for job in again] == again.payloads()


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a client reads a file for a job."""

    def held(*_: Any) -> Any:
        raise AssertionError("a file was read for a job that was put a moment ago")

    monkeypatch.setattr(LocalSource, "read_leased", held)


@pytest.mark.interpreted
@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("kind", ["queue", "group"])
def test_recently_written_jobs_are_sent_inline(
    ringlog_engine: TestEngine, ringlog_topic: Callable[[str], str], client: Client, transport: Any, kind: str
) -> None:
    """This holds for any columns and record sizes, and for claims of one or of many jobs."""
    name, chance = ringlog_topic(), random.Random(f"{transport} {kind}")
    client.topics.create(name, type="queue" if kind == "queue" else "log", durability="disk")
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as other:
        worker: Any = other.queue(name) if kind == "queue" else other.group(name, "g", mode="queue")
        worker.ack(worker.claim())  # The first request of a group creates it.
        for _ in range(40):
            records = [
                NewRecord(
                    data=chance.randbytes(chance.choice((0, 5, 900))),
                    tag=chance.choice((None, "t")),
                    key=chance.choice((None, b"k")),
                    headers=chance.choice((None, {"h": b"v"})),
                )
                for _ in range(chance.choice((1, 1, 2, 9)))
            ]
            client.append_many(name, records, create=False)
            while records:
                jobs = worker.claim(chance.choice((1, 1, 3, 9)))
                given, records = records[: len(jobs)], records[len(jobs) :]
                assert [(job.data, job.tag, job.key, dict(job.headers)) for job in jobs] == [
                    (each.data, each.tag, each.key, dict(each.headers or {})) for each in given
                ]
                assert worker.ack(jobs).is_complete
        for size in (INLINE_BYTES_MAX + 1, 200_000, 1_000_000):
            client.append(name, bytes(size), key=b"k", create=False)
            (job,) = worker.claim(wait_ms=10_000)
            assert (job.data, job.key) == (bytes(size), b"k")
            worker.ack([job])


@pytest.mark.interpreted
@pytest.mark.usefixtures("no_files")
def test_a_waiting_claim_gets_the_complete_record(client: Client, queue: Queue) -> None:
    for n in range(20):
        thread = threading.Thread(target=client.append, args=(queue.topic, b"%d" % n), kwargs={"key": b"k"})
        thread.start()
        (job,) = queue.claim(wait_ms=10_000)
        thread.join()
        assert (job.data, job.key) == (b"%d" % n, b"k")
        queue.ack([job])


@pytest.mark.interpreted
def test_many_large_jobs_are_read_from_the_files(queue: Queue, answers: list[ClaimReply]) -> None:
    large = [bytes([n]) * (INLINE_BYTES_MAX // 8) for n in range(MANY)]
    queue.put_many(large)
    assert queue.claim(10).payloads() == large[:10]
    assert not answers[-1].payloads
    assert not answers[-1].frames


def test_deleted_jobs_are_not_delivered(queue: Queue, client: Client) -> None:
    queue.put_many(NUMBERS)
    queue.claim(3)  # After this claim the shard has prefetched further jobs.
    head = client.topics.state(queue.topic).head_seq
    client.topics.delete_records(queue.topic, before_seq=head - 1)
    assert queue.claim(MANY).payloads() == NUMBERS[-2:]


def test_a_recreated_queue_has_its_own_jobs(ringlog_engine: TestEngine, queue: Queue, client: Client) -> None:
    queue.put_many(NUMBERS)
    assert queue.claim(2).payloads() == NUMBERS[:2]
    client.topics.delete(queue.topic)
    client.topics.create(queue.topic, type="queue", durability="disk")
    others = [b"other %d" % n for n in range(MANY)]
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        other.queue(queue.topic).put_many(others)
    assert queue.claim(9).payloads() == others[:9]


def answer(runs: list[tuple[int, int, int, int]], payloads: list[bytes], stamps: bytes) -> ClaimReply:
    return ClaimReply("q", 1, 1, 0, 0, runs, payloads=payloads, stamps=stamps)


def test_inline_jobs_can_be_sliced() -> None:
    stamps = np.array([5, 6, 7], "<i8").tobytes()
    (found,) = decode_inline_jobs(
        "q", answer([(3, 2, 1, 70), (9, 1, 2, 80)], [b"a", b"b", b"c"], stamps), None
    )
    assert (found.seqs.tolist(), found.last_seq, len(found)) == ([3, 4, 9], 9, 3)
    part = found.slice_rows(1, 3)
    assert [(record.seq, record.ts, record.data) for record in part.records()] == [
        (4, 6, b"b"), (9, 7, b"c"),
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["payloads", "stamps", "frames"])
def test_inconsistent_inline_jobs_are_refused_as_corrupt(change: str) -> None:
    payloads = [b"a"] if change == "payloads" else [b"a", b"b"]
    stamps = bytes(8) if change == "stamps" else bytes(16)
    message = answer([(3, 2, 1, 70)], payloads, stamps)
    if change == "frames":
        message = msgspec.structs.replace(message, frames=1)
    with pytest.raises(CorruptData) as told:
        decode_inline_jobs("q", message, bytes(80))
    assert told.value.detail["topic"] == "q"


def test_inline_jobs_of_one_run_have_consecutive_seqs() -> None:
    (found,) = decode_inline_jobs("q", answer([(3, 2, 1, 70)], [b"a", b"b"], bytes(16)), None)
    assert isinstance(found, InlineJobs)
    assert found.slice_rows(1, 2).seqs.tolist() == [4]
