"""Payload codecs of queues, and the treatment of jobs that cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import pytest

import ringlog.aio
from ringlog.client import JSON, TEXT, Client, NewRecord, PayloadCodec, msgspec_codec
from ringlog.client.queue import Queue
from ringlog.errors import UsageError
from ringlog.testing.real_engine import TestEngine, wait_until


class Email(msgspec.Struct):
    to: str


class Moody:
    """A codec whose `decode` raises an arbitrary exception."""

    kind = JSON.kind

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> str:
        if data == b"bad":
            raise KeyError("never seen")
        return data.decode()


EMAIL = msgspec_codec(Email)


@pytest.fixture
def make(client: Client, ringlog_topic: Callable[[str], str]) -> Callable[..., Queue]:
    def made(payload: PayloadCodec[Any], **config: Any) -> Queue:
        client.topics.create(ringlog_topic("q"), type="queue", **config)
        return client.queue(ringlog_topic("q"), payload=payload)

    return made


@pytest.mark.parametrize(
    ("codec", "value"), [(JSON, {"n": [1, None]}), (TEXT, "grüße"), (EMAIL, Email("ann")), (Moody(), b"x")]
)
def test_values_are_encoded_and_decoded(make: Callable[..., Queue], codec: Any, value: Any) -> None:
    queue = make(codec)
    queue.put(value, tag="t")
    queue.put_many([value, NewRecord(data=value, key=b"k")])
    found = queue.claim(10)
    assert [job.value for job in found] == [codec.decode(codec.encode(value))] * 3
    assert (found[0].tag, found[2].key) == ("t", b"k")
    assert found[0].value is found[0].value, "decoded once"


def test_put_many_accepts_records_without_encoding_them_again(make: Callable[..., Queue]) -> None:
    queue = make(JSON)
    queue.put({"n": 1})
    queue.put_many(queue.peek())
    assert [job.value for job in queue.claim(2)] == [{"n": 1}] * 2


def test_a_queue_without_codec_accepts_only_bytes(make: Callable[..., Queue], client: Client) -> None:
    queue = client.queue(make(JSON).topic)
    with pytest.raises(UsageError):
        queue.put("text")
    queue.put(b"raw")
    assert queue.claim()[0].value == b"raw"


@pytest.mark.parametrize(
    ("codec", "bad", "good", "reason"),
    [(EMAIL, b'{"from": 1}', b'{"to": "ann"}', "ValidationError"), (Moody(), b"bad", b"good", "KeyError")],
)
def test_a_loop_rejects_jobs_that_cannot_be_decoded(
    make: Callable[..., Queue],
    client: Client,
    ringlog_topic: Any,
    codec: Any,
    bad: bytes,
    good: bytes,
    reason: str,
) -> None:
    dead = ringlog_topic("dead")
    queue = make(codec, dead_letter=dead)
    client.queue(queue.topic).put_many([bad, good, bad])
    client.queue(queue.topic).put(good)
    seen = list(islice(queue.jobs(max_in_flight=3), 2))
    assert [job.seq for job in seen] == [2, 4]
    wait_until(lambda: queue.stats().dead_lettered == 2, timeout=20, what="both were moved")
    letters = client.read(dead, limit=10, wait_ms=10_000).records
    assert {letter.data for letter in letters} == {bad}
    assert all(reason in letter.meta["$dead_letter_reason"] for letter in letters)


def test_an_undecodable_job_is_delayed_by_a_loop(make: Callable[..., Queue], client: Client) -> None:
    queue = make(EMAIL)
    client.queue(queue.topic).put_many([b"bad", b'{"to": "ann"}'])
    (job,) = islice(queue.jobs(), 1)
    assert (job.seq, job.value) == (2, Email("ann"))
    assert queue.stats().delayed == 1


def test_a_claim_returns_jobs_that_cannot_be_decoded(make: Callable[..., Queue], client: Client) -> None:
    queue = make(EMAIL)
    client.queue(queue.topic).put(b"bad")
    (job,) = queue.claim()
    with pytest.raises(msgspec.DecodeError):
        _ = job.value
    assert job.data == b"bad"


async def test_the_asyncio_loop_rejects_jobs_that_cannot_be_decoded(
    make: Callable[..., Queue], client: Client, ringlog_topic: Any, ringlog_engine: TestEngine
) -> None:
    dead = ringlog_topic("dead")
    topic = make(EMAIL, dead_letter=dead).topic
    client.queue(topic).put(b"bad")
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as other:
        queue = other.queue(topic, payload=EMAIL)
        await queue.put(Email("ann"))
        await queue.put_many([Email("bob")])
        jobs = queue.jobs()
        async for job in jobs:
            assert (job.seq, job.value) == (2, Email("ann"))
            break
        await jobs.aclose()
    wait_until(lambda: client.queue(topic).stats().dead_lettered == 1, timeout=20, what="it was moved")


async def test_the_asyncio_loop_delays_undecodable_jobs_without_a_dead_letter_topic(
    make: Callable[..., Queue], client: Client, ringlog_engine: TestEngine
) -> None:
    topic = make(EMAIL).topic
    client.queue(topic).put_many([b"bad", b'{"to": "ann"}'])
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as other:
        jobs = other.queue(topic, payload=EMAIL).jobs()
        assert (await anext(jobs)).seq == 2
        await jobs.aclose()
    assert client.queue(topic).stats().delayed == 1
