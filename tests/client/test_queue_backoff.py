"""A queue's own back-off, as its workers meet it (L34)."""

from __future__ import annotations

import pytest

import ringlog
import ringlog.aio
from ringlog.errors import UsageError

HOUR_MS = 3_600_000


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_job_given_back_without_a_delay_rests_as_its_queue_says(ringlog_engine, ringlog_topic, transport):
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        name = ringlog_topic()
        client.topics.create(name, type="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS)
        queue = client.queue(name)
        queue.put_many([b"1", b"2", b"3", b"4", b"5"])
        one, two, three, *rest = queue.claim(5)
        one.nack()
        two.nack(delay_ms=0)
        with pytest.raises(ZeroDivisionError), three:
            _ = 1 / 0
        assert (queue.stats().delayed, queue.stats().ready) == (2, 1)
        queue.nack(rest, delay_ms=0)
        queue.nack(queue.claim(3), reason="no")
        assert (queue.stats().delayed, queue.stats().ready) == (5, 0)
        with pytest.raises(UsageError):
            queue.nack([], delay_ms=-1)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_what_was_claimed_and_not_begun_does_not_rest(ringlog_engine, ringlog_topic, transport):
    """CL-10, QW-8."""
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        name = ringlog_topic()
        client.topics.create(name, type="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS)
        queue = client.queue(name)
        queue.put_many([b"1", b"2", b"3"])
        jobs = queue.jobs(max_in_flight=3)
        next(jobs).ack()
        jobs.close()
        assert (queue.stats().delayed, queue.stats().ready) == (0, 2)


async def test_the_asyncio_client_does_the_same(ringlog_engine, ringlog_topic):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        name = ringlog_topic()
        await client.topics.create(name, type="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS)
        queue = client.queue(name)
        await queue.put_many([b"1", b"2", b"3"])
        one, two, three = await queue.claim(3)
        await one.nack(reason="no")
        await two.nack(delay_ms=0)
        with pytest.raises(ZeroDivisionError):
            async with three:
                _ = 1 / 0
        found = await queue.stats()
        assert (found.delayed, found.ready) == (2, 1)
