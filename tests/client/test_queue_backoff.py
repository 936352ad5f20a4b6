"""Backoff of queues and groups, and the pending list with the state of single jobs."""

from __future__ import annotations

import pytest

import ringlog
import ringlog.aio
from ringlog.errors import GroupIncompatible, UsageError

HOUR_MS = 3_600_000


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_nack_without_delay_uses_the_queues_backoff(ringlog_engine, ringlog_topic, transport):
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
def test_a_nack_without_delay_uses_the_groups_backoff(ringlog_engine, ringlog_topic, transport):
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        name = ringlog_topic("log")
        client.append_many(name, [b"1", b"2", b"3", b"4", b"5"])
        group = client.group(name, "g", mode="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS)
        one, two, three, *rest = group.claim(5)
        one.nack()
        two.nack(delay_ms=0)
        with pytest.raises(ZeroDivisionError), three:
            _ = 1 / 0
        assert (group.stats().delayed, group.stats().returned) == (2, 1)
        group.nack(rest)
        assert (group.stats().delayed, group.stats().returned) == (4, 1)
        with pytest.raises(GroupIncompatible, match="backoff_ms"):
            client.group(name, "g", mode="queue", backoff_ms=1).claim()
        for options in ({"backoff_ms": -1}, {"backoff_max_ms": 1 << 40}, {"mode": "stream", "backoff_ms": 1}):
            with pytest.raises(UsageError, match="backoff"):
                client.group(name, "other", **{"mode": "queue", **options})


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_jobs_that_were_claimed_and_not_started_get_no_backoff(ringlog_engine, ringlog_topic, transport):
    """When the iteration closes, jobs that the program never received are ready at once."""
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        name = ringlog_topic()
        client.topics.create(name, type="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS)
        queue = client.queue(name)
        queue.put_many([b"1", b"2", b"3"])
        jobs = queue.jobs(max_in_flight=3)
        next(jobs).ack()
        jobs.close()
        assert (queue.stats().delayed, queue.stats().ready) == (0, 2)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_released_jobs_are_ready_at_once_and_count_no_delivery(ringlog_engine, ringlog_topic, transport):
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        name = ringlog_topic()
        client.topics.create(
            name, type="queue", backoff_ms=HOUR_MS, backoff_max_ms=HOUR_MS, max_deliveries=1,
            dead_letter=f"{name}.dead",
        )  # fmt: skip
        queue = client.queue(name)
        queue.put_many([b"1", b"2", b"3"])
        for _ in range(3):
            jobs = queue.claim(3)
            assert [each.deliveries for each in jobs] == [1, 1, 1]
            assert queue.release(jobs).is_complete
        jobs = queue.claim(3)
        jobs[0].ack()
        assert queue.release(jobs).skipped == (1,)
        assert (queue.stats().ready, queue.stats().dead_lettered) == (2, 0)
        group = client.group(name, "g", mode="queue")
        assert group.release(group.claim(2)).is_complete
        assert [each.deliveries for each in group.claim(2)] == [1, 1]


async def test_the_asyncio_client_applies_the_same_backoff(ringlog_engine, ringlog_topic):
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


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_pending_shows_the_holder_and_the_failure_reason_of_a_job(ringlog_engine, ringlog_topic, transport):
    """`pending` returns jobs in seq order, across several requests if needed."""
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        client.topics.create(ringlog_topic(), type="queue", lease_ms=60_000)
        queue = client.queue(ringlog_topic(), node="ann")
        queue.put_many([b"%d" % n for n in range(2_005)])
        assert queue.pending() == []
        first, second, third, done = queue.claim(4)
        first.nack(delay_ms=HOUR_MS, reason="timeout")
        second.nack()
        done.ack()
        one, two, three = queue.pending()
        assert (one.seq, one.state, one.node, one.deliveries, one.nacks, one.reason) == (
            1, "delayed", "", 1, 1, "timeout",
        )  # fmt: skip
        assert one.until - one.failed_at == pytest.approx(HOUR_MS / 1_000)
        assert (two.seq, two.state, two.until, two.nacks, two.reason) == (2, "returned", 0, 0, "")
        assert (three.seq, three.state, three.node, three.until) == (3, "leased", "ann", third.deadline)
        assert queue.pending(1, after=2) == [three]
        for _ in range(2):
            queue.claim(1_000)
        assert [job.seq for job in queue.pending(5_000)] == [1, 2, 3, *range(5, 2_004)]
        assert len(queue.pending(1_500)) == 1_500
        with pytest.raises(UsageError):
            queue.pending(0)
