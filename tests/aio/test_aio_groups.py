"""Consumer groups with asyncio, over rings and over the gateway."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

import ringlog.aio
from ringlog.errors import LeaseLost, UsageError


async def test_members_share_records(client, ringlog_topic):
    topic = ringlog_topic()
    await client.topics.create(topic, durability="fsync")
    await client.append_many(topic, [b"1", b"2", b"3", b"4"])
    ann = client.group(topic, "g", mode="queue", node="ann")
    bob = client.group(topic, "g", mode="queue", node="bob")
    mine, theirs = await ann.claim(2), await bob.claim(9)
    assert [[job.data for job in jobs] for jobs in (mine, theirs)] == [[b"1", b"2"], [b"3", b"4"]]
    (listed,) = await client.topics.groups(topic)
    assert (listed.name, listed.mode, listed.tags, listed.cursor, listed.pending) == (
        "g", "queue", None, 5, 4,
    )  # fmt: skip
    async with mine[0]:
        assert mine[0].deliveries == 1
    (stolen,) = await bob.steal([2], auto_extend=True)
    with pytest.raises(LeaseLost):
        await mine[1].ack()
    assert (await bob.ack([stolen, theirs[0]])).count == 2
    assert [entry.node for entry in await ann.pending()] == ["bob"]
    assert await ann.lag() == (0, 1)
    assert (await bob.nack(theirs[1:])).is_complete
    async with aclosing(ann.jobs()) as jobs:
        async for job in jobs:
            assert (job.seq, job.deliveries) == (4, 2)
            await job.ack()
            break
    assert (await ann.stats()).floor == 4
    assert await ann.seek(2) == 2
    assert (await ann.claim())[0].seq == 2
    assert [each.name for each in await ann.members()] == ["ann", "bob"]
    assert await ann.leave() == 1
    assert await ann.delete()
    with pytest.raises(UsageError):
        await ann.commit()


async def test_a_stream_can_be_read_and_committed(client, ringlog_topic):
    topic = ringlog_topic()
    await client.topics.create(topic, durability="fsync")
    await client.append_many(topic, [b"1", b"2", b"3"])
    group = client.group(topic, "s")
    async with aclosing(group.records(auto_commit_ms=0)) as records:
        async for record in records:
            if record.seq == 3:
                break
    assert (await group.stats()).floor == 2
    found = asyncio.Queue()

    async def read() -> None:
        async for record in group:
            await found.put(record.seq)

    reading = asyncio.create_task(read())
    assert await asyncio.wait_for(found.get(), 10) == 3
    await client.append(topic, b"4")
    assert await asyncio.wait_for(found.get(), 10) == 4
    await group.commit()
    assert (await group.stats()).floor == 4
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("how", ["break", "held"])
async def test_closing_the_client_commits_what_a_stream_processed(
    ringlog_engine, ringlog_topic, transport, how
):
    """The event loop ends the generator that the program left only after the client is closed."""
    topic = ringlog_topic()
    runs = []
    for last in (10, 12):
        async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
            await client.append_many(topic, [b"x"] * 20)
            records = client.group(topic, "report").records(auto_commit_ms=60_000)
            runs.append([])
            if how == "held":
                while last not in runs[-1]:
                    runs[-1].append((await anext(records)).seq)
            else:
                async for record in records:
                    runs[-1].append(record.seq)
                    if record.seq == last:
                        del records
                        break
    assert runs == [list(range(1, 11)), [10, 11, 12]]
