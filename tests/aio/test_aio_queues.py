"""Queues with asyncio, over rings and over the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

import pytest

import ringlog.aio
from ringlog.client import AppendedOnce, NewRecord
from ringlog.errors import InvalidRequest, LeaseLost, NotAQueue, UsageError


async def counts(queue) -> tuple[int, int, int]:
    found = await queue.stats()
    return found.ready, found.in_flight, found.delayed


async def test_jobs_are_put_claimed_and_acked(client, ringlog_topic):
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put(b"one", tag="t")
    await queue.put_many([b"two", b"three"])
    one, two, three = await queue.claim(5)
    assert [job.data for job in (one, two, three)] == [b"one", b"two", b"three"]
    await one.ack()
    with pytest.raises(LeaseLost):
        await one.ack()
    async with two:
        assert two.deliveries == 1
    with pytest.raises(ZeroDivisionError):
        async with three:
            _ = 1 / 0
    assert await counts(queue) == (0, 0, 1)
    await queue.put(b"four")
    (four,) = await queue.claim()
    with pytest.raises(InvalidRequest):
        await four.reject("there are no dead letters")
    await four.ack()
    assert [record.seq for record in await queue.peek(5)] == [3]
    assert (await queue.purge()).deleted == 1
    await client.topics.create(ringlog_topic("log"))
    with pytest.raises(NotAQueue):
        await client.queue(ringlog_topic("log")).put(b"x")
    for wrong in (
        queue.claim(0),
        queue.claim(wait_ms=-1),
        queue.nack([], delay_ms=-1),
        queue.extend([], 0),
    ):
        with pytest.raises(UsageError):
            await wrong


async def test_an_iteration_extends_leases_and_returns_jobs(client, ringlog_topic):
    """It also waits while the queue is empty."""
    await client.topics.create(ringlog_topic(), type="queue", lease_ms=1_200)
    queue = client.queue(ringlog_topic())
    done: list[bytes] = []

    async def work() -> None:
        async with aclosing(queue.jobs(max_in_flight=4)) as jobs:
            async for job in jobs:
                async with job:
                    if not done:
                        before = job.deadline
                        while job.deadline == before:
                            await asyncio.sleep(0)
                    done.append(job.data)
                if len(done) == 6:
                    return

    working = asyncio.create_task(work())
    while not (await queue.stats()).waiting:
        await asyncio.sleep(0)
    await queue.put_many([b"%d" % n for n in range(10)])
    await asyncio.wait_for(working, 20)
    assert done == [b"%d" % n for n in range(6)]
    assert await counts(queue) == (4, 0, 0)


async def test_closing_the_client_returns_unstarted_jobs(ringlog_engine, ringlog_topic, transport):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as looking:
        await looking.topics.create(ringlog_topic(), type="queue")
        queue = looking.queue(ringlog_topic())
        await queue.put_many([b"%d" % n for n in range(10)])
        client = await ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport)
        jobs = client.queue(ringlog_topic()).jobs(max_in_flight=4)
        first = await anext(jobs)
        assert await counts(queue) == (6, 4, 0)
        await client.close()
        assert await counts(queue) == (9, 1, 0)
        assert [job async for job in jobs] == []
        assert first.seq == 1


@pytest.mark.parametrize("how", ["break", "error", "held"])
async def test_closing_the_client_returns_the_jobs_of_batches(ringlog_engine, ringlog_topic, transport, how):
    """The event loop ends a generator that the program left only in a later pass, after `async with` began to
    close the client. A generator that the program holds keeps its started batch, as `jobs` keeps its job."""
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as looking:
        await looking.topics.create(ringlog_topic(), type="queue", lease_ms=600_000)
        queue = looking.queue(ringlog_topic())
        await queue.put_many([b"%d" % n for n in range(100)])
        async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
            batches = client.queue(ringlog_topic()).batches(10, max_in_flight=100)
            if how == "held":
                await anext(batches)
            else:
                with contextlib.suppress(ZeroDivisionError):
                    async for _ in batches:
                        del batches
                        assert await counts(queue) == (0, 100, 0)
                        if how == "error":
                            raise ZeroDivisionError
                        break
        assert await counts(queue) == ((90, 10, 0) if how == "held" else (100, 0, 0))
        if how == "held":
            assert [batch async for batch in batches] == []


async def test_a_cancelled_claim_keeps_no_job(client, ringlog_topic):
    """The client returns a job at once if its last request still got one."""
    await client.topics.create(ringlog_topic(), type="queue")
    queue = client.queue(ringlog_topic())
    waiting = asyncio.create_task(queue.claim(wait_ms=60_000))
    while not (await queue.stats()).waiting:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queue.put_many([b"one", b"two"])
    first, second = sorted(
        [*await queue.claim(wait_ms=10_000), *await queue.claim(wait_ms=10_000)], key=lambda job: job.seq
    )
    assert [first.data, second.data] == [b"one", b"two"]
    assert (await queue.ack([first, second])).is_complete
    assert await counts(queue) == (0, 0, 0)


async def test_pipelined_acks_are_complete_when_the_loop_ends(client, ringlog_topic):
    """`tests/client/test_queue_behind.py` tests the same in the synchronous client."""
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put_many([b"%d" % n for n in range(200)])
    found = []
    async with aclosing(queue.jobs(max_in_flight=16, pipelined_acks=True)) as jobs:
        async for job in jobs:
            async with job:
                found.append(job.data)
            if len(found) == 190:
                break
    assert found == [b"%d" % n for n in range(190)]
    assert await counts(queue) == (10, 0, 0)
    async with aclosing(queue.jobs(pipelined_acks=True)) as jobs:
        with pytest.raises(ZeroDivisionError):
            async with await anext(jobs):
                _ = 1 / 0
    assert await counts(queue) == (9, 0, 1)


async def test_what_is_done_and_the_next_claim_in_one_request(client, ringlog_topic):
    """`tests/client/test_queue_next.py` tests the same in the synchronous client."""
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put_many([b"%d" % n for n in range(50)])
    jobs = await queue.claim(2)
    found = list(jobs.payloads())
    for _ in range(9):
        jobs = await queue.claim(2, done=jobs)
        assert await counts(queue) == (50 - len(found) - 2, 2, 0)
        found += jobs.payloads()
    one, two = jobs
    await queue.nack([one])
    with pytest.raises(LeaseLost):
        await queue.claim(done=[one, two])
    async with aclosing(queue.jobs(pipelined_acks=True)) as loop:
        async for job in loop:
            assert (await counts(queue))[1] == 1, "the one before is gone"
            async with job:
                found.append(job.data)
            if len(found) == 51:
                break
    assert sorted({int(data) for data in found}) == list(range(50))
    assert await counts(queue) == (0, 0, 0)


async def test_a_cancelled_loop_has_acked_its_finished_jobs(client, ringlog_topic):
    """This holds at any moment of the cancellation."""
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put_many([b"%d" % n for n in range(200)])
    done: list[int] = []

    async def work() -> None:
        async with aclosing(queue.jobs(pipelined_acks=True)) as loop:
            async for job in loop:
                async with job:
                    done.append(job.seq)

    for _ in range(5):
        before = len(done)
        task = asyncio.create_task(work())
        while len(done) < before + 20:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ready, in_flight, _ = await counts(queue)
        assert 200 - len(done) - 1 <= ready + in_flight <= 200 - len(done)
        while (await counts(queue))[1] > 1:
            await asyncio.sleep(0)  # Leases of the abandoned claim are being returned.
    assert len(set(done)) == len(done)


async def test_batches(client, ringlog_topic):
    """`tests/client/test_queue_behind.py` tests the same in the synchronous client."""
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put_many([b"%d" % n for n in range(50)])
    async with aclosing(queue.batches(20)) as batches:
        assert (await anext(batches)).payloads() == [b"%d" % n for n in range(20)]
        second = await anext(batches)
        await second[0].ack()
        assert (await anext(batches)).seqs.tolist() == list(range(41, 51))
        assert await counts(queue) == (0, 10, 0)
    assert await counts(queue) == (10, 0, 0)


async def test_finished_batches_of_a_claim_are_acked_after_a_moment(client, ringlog_topic):
    await client.topics.create(ringlog_topic(), type="queue", durability="fsync")
    queue = client.queue(ringlog_topic(), node="w")
    await queue.put_many([b"%d" % n for n in range(50)])
    async with aclosing(queue.batches(10, max_in_flight=40)) as batches:
        for first in (0, 10):
            assert (await anext(batches)).payloads() == [b"%d" % n for n in range(first, first + 10)]
        async with asyncio.timeout(20):
            while await counts(queue) != (10, 30, 0):
                """Finished batches are acked while the next batch takes long."""
    assert await counts(queue) == (40, 0, 0)
    with pytest.raises(UsageError):
        await anext(queue.batches(10, max_in_flight=5))


async def test_a_claim_in_seq_order_ignores_priorities(client, ringlog_topic):
    """`order="seq"` is the only order besides the default."""
    await client.topics.create(ringlog_topic(), type="queue", record_priority=True)
    queue = client.queue(ringlog_topic())
    await queue.put(b"plain")
    await queue.put(b"urgent", priority=2)
    assert [job.data for job in await queue.claim(order="seq")] == [b"plain"]
    with pytest.raises(UsageError):
        await queue.claim(order="")


async def test_an_asyncio_job_with_a_dedup_id_is_put_once(client, ringlog_topic):
    """A batch reports the seqs of first writes for repeated ids."""
    await client.topics.create(ringlog_topic(), type="queue")
    queue = client.queue(ringlog_topic())
    assert (await queue.put(b"one", dedup_id="1", dedup_window_ms=60_000)).deduped is False
    assert (await queue.put(b"again", dedup_id="1")).deduped is True
    done = await queue.put_many(
        [NewRecord(data=b"again", dedup_id="1"), NewRecord(data=b"two", dedup_id="2")]
    )
    assert isinstance(done, AppendedOnce)
    assert (done.seqs, done.repeated, done.deduped) == ((1, 2), {0}, False)
    assert [job.data for job in await queue.claim(5)] == [b"one", b"two"]
    with pytest.raises(UsageError):
        await client.append(ringlog_topic(), b"x", dedup_id="")
