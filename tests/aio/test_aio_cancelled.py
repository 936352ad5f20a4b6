"""A cancelled call returns its leases at once, and these do not count as deliveries."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import pytest

import ringlog.aio


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0)


@pytest.fixture(params=["queue", "durable", "group"])
async def client(request, ringlog_engine, ringlog_topic, transport):
    """A client, and a queue or group with three jobs that were never delivered."""
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        topic = ringlog_topic()
        if request.param == "group":
            await client.topics.create(topic)
            await client.append_many(topic, [b"0", b"1", b"2"])
            yield client, client.group(topic, "g", mode="queue")
        else:
            durable = {"leases_durable": True} if request.param == "durable" else {}
            await client.topics.create(topic, type="queue", **durable)
            queue = client.queue(topic, node="w")
            await queue.put_many([b"0", b"1", b"2"])
            yield client, queue


async def in_flight(queue) -> int:
    found = await queue.stats()
    return found.in_flight if hasattr(found, "in_flight") else found.leased


async def test_cancelled_claims_count_no_delivery_at_any_moment(client):
    """Every delivered job has its first delivery."""
    client, queue = client
    chance, given, cancelled, longest_s = random.Random(4), 0, 0, 0.001
    for _ in range(200):
        task = asyncio.ensure_future(queue.claim(2, lease_ms=600_000))
        await asyncio.wait([task], timeout=chance.random() * longest_s)
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        task.cancel()
        try:
            jobs = await task
        except asyncio.CancelledError:
            cancelled += 1
            longest_s *= 1.05
            continue
        longest_s *= 0.9
        if jobs:
            assert [job.deliveries for job in jobs] == [1] * len(jobs)
            given += len(jobs)
            assert (await queue.ack(jobs)).is_complete
            await client.append_many(queue.topic, [b"x"] * len(jobs))
    assert given
    assert cancelled
    await until(lambda: is_idle(queue))
    jobs = await queue.claim(10)
    assert [job.deliveries for job in jobs] == [1, 1, 1]


async def is_idle(queue) -> bool:
    return not await in_flight(queue)


async def test_a_claim_that_times_out_loses_no_delivery(client):
    """A job arrives while the timeout cancels the waiting claim."""
    client, queue = client
    await queue.ack(await queue.claim(3))
    chance = random.Random(5)
    for n in range(60):
        putting = asyncio.ensure_future(client.append(queue.topic, b"%d" % n, create=False))
        jobs = []
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.02):
                jobs = await queue.claim(wait_ms=10_000, lease_ms=600_000)
        await putting
        assert [job.deliveries for job in jobs] == [1] * len(jobs)
        assert (await queue.ack(jobs)).is_complete
    await until(lambda: is_idle(queue))
    while jobs := await queue.claim(10):
        assert [job.deliveries for job in jobs] == [1] * len(jobs)
        await queue.ack(jobs)


async def test_a_client_closed_after_a_cancelled_claim_leaves_no_lease(
    ringlog_engine, ringlog_topic, transport
):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as watcher:
        await watcher.topics.create(ringlog_topic(), type="queue")
        other = watcher.queue(ringlog_topic())
        await other.put(b"job")
        given = 0
        for _ in range(100):
            jobs = []
            async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        # The queue object is dropped at once. The client returns its leases.
                        jobs = await client.queue(ringlog_topic()).claim(lease_ms=600_000)
                for job in jobs:  # The claim was faster than its cancellation, so the program has the job.
                    given += 1
                    await job.nack(delay_ms=0)
        await until(lambda: is_idle(other))
        assert given < 100
        assert [job.deliveries for job in await other.claim(wait_ms=10_000)] == [given + 1]


async def test_jobs_that_a_loop_did_not_start_count_no_delivery(client):
    """The loop is left repeatedly, with the first job returned each time."""
    _, queue = client
    for _ in range(6):
        async with aclosing(queue.jobs(max_in_flight=3)) as jobs:
            await (await anext(jobs)).nack(delay_ms=0)
        await until(lambda: is_idle(queue))
    deliveries = {job.seq: job.deliveries for job in await queue.claim(3)}
    assert (deliveries[2], deliveries[3]) == (1, 1)


async def test_a_cancelled_ack_leaves_its_loop_usable(client):
    """The ack continues. The slot is free for the next job when the ack is done."""
    _, queue = client
    async with aclosing(queue.jobs()) as jobs:
        for _ in range(3):
            job = await anext(jobs)
            acking = asyncio.ensure_future(job.ack())
            await asyncio.sleep(0)
            acking.cancel()
            with suppress(asyncio.CancelledError):
                await acking
    await until(lambda: is_idle(queue))


async def test_cancelled_reads_keep_no_file_and_no_wait(ringlog_engine, ringlog_topic, transport):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        topic = ringlog_topic()
        await client.append(topic, b"0")
        reader = client.reader(topic, follow=True)
        assert (await anext(aiter(reader))).data == b"0"
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    await client.read(topic, after=1, wait_ms=30_000)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    await anext(aiter(reader))
        assert len(os.listdir("/proc/self/fd")) <= before + 10
        await client.append(topic, b"1")
        assert (await anext(aiter(reader))).data == b"1"
        reader.close()


async def test_a_waiting_claim_does_not_block_other_claims(client):
    client, queue = client
    await queue.ack(await queue.claim(3))
    waiting = asyncio.ensure_future(queue.claim(wait_ms=60_000))
    await until(lambda: has_waiting(queue))
    async with asyncio.timeout(5):
        assert list(await queue.claim(wait_ms=0)) == []
    await client.append(queue.topic, b"job", create=False)
    assert [job.data for job in await waiting] == [b"job"]


async def has_waiting(queue) -> bool:
    return (await queue.stats()).waiting > 0
