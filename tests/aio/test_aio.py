"""The asyncio client against a real engine, over rings and over the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest

import ringlog.aio
from ringlog.client import LATEST, ClientState, FlushReport, Page
from ringlog.errors import Backpressure, NotConnected, TopicNotFound, UsageError, WrongLoop

WAIT_S = 20.0


async def test_a_program_can_use_every_operation(client, topic):
    """The asyncio client has the method names of the synchronous one."""
    assert client.state is ClientState.READY
    assert (await client.topics.create(topic, durability="fsync")).created
    assert (await client.append(topic, b"0", tag="t")).first_seq == 1
    assert (await client.append_many(topic, [b"1", b"2"])).last_seq == 3
    async with client.producer(topic) as producer:
        tickets = [await producer.send(b"%d" % n) for n in range(3, 500)]
        each = await producer.send_each([b"500", b"501"])
        assert (await tickets[-1]).first_seq == 500
        assert (await each).seqs.tolist() == [501, 502]
    found = [item.data async for item in client.reader(topic)]
    assert found == [b"%d" % n for n in range(502)]
    assert len(await client.read(topic, 500)) == 2
    assert (await client.topics.state(topic)).head_seq == 502
    assert [s.topic async for s in client.topics.list(topic)] == [topic]
    assert await client.topics.delete(topic)
    with pytest.raises(TopicNotFound):
        await client.append(topic, b"x", create=False)
    assert (await client.close()).is_clean


async def test_concurrent_appends_get_consecutive_seqs(client, topic):
    """The client pipelines requests by default."""
    results = await asyncio.gather(*(client.append(topic, b"%d" % n) for n in range(500)))
    assert [result.first_seq for result in results] == list(range(1, 501))


async def test_a_ticket_resolves_without_another_call_and_runs_its_callback(ringlog_engine, ringlog_topic):
    """The test sends nothing after the record."""
    called = asyncio.Event()
    async with ringlog.aio.connect(ringlog_engine.url) as client:
        ticket = await client.producer(ringlog_topic(), linger_ms=1).send(b"x")
        ticket.on_done(lambda _: called.set())
        await asyncio.wait_for(called.wait(), WAIT_S)
        assert ticket.done()


async def test_a_tailer_follows_new_records(ringlog_engine, topic):
    async with ringlog.aio.connect(ringlog_engine.url) as client:
        await client.append(topic, b"0")
        found = []

        async def follow():
            async for batch in client.tailer(topic):
                found.extend(batch.bytes())
                if len(found) == 3:
                    return

        following = asyncio.create_task(follow())
        await client.append(topic, b"1")
        await client.append(topic, b"2")
        await asyncio.wait_for(following, WAIT_S)
        assert found == [b"0", b"1", b"2"]


async def test_a_timeout_of_the_wait_does_not_cancel_the_send(ringlog_engine, topic):
    async with ringlog.aio.connect(ringlog_engine.url) as client:
        producer = client.producer(topic, linger_ms=60_000)
        ticket = await producer.send(b"x")
        with pytest.raises(TimeoutError):
            await ticket.result(0.01)
        assert (await producer.flush()).acked == 1
        assert (await ticket).first_seq == 1


async def test_a_send_that_waits_for_room_fails_when_the_producer_is_closed(ringlog_engine, topic):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        producer = client.producer(topic, linger_ms=60_000, max_buffer_bytes=4_000)
        await producer.send(b"x" * 3_500)
        sending = asyncio.create_task(producer.send(b"y" * 3_500))
        await asyncio.sleep(0)
        assert (await producer.close()).acked == 1
        with pytest.raises(UsageError, match="closed"):
            await sending
        assert [len(record.data) for record in await client.read(topic)] == [3_500]


async def test_a_cancelled_close_can_be_repeated(tmp_path):
    async with ringlog.aio.connect(f"ringlog://{tmp_path}", timeout_ms=60_000) as client:
        producer = client.producer("t")
        await producer.send(b"x")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="closed"):
            await producer.send(b"y")
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await producer.close(0)).unfinished == 1
        assert (await client.close(0)).unsent == 1


async def test_a_close_during_another_one_reports_what_is_not_settled(tmp_path):
    async with ringlog.aio.connect(f"ringlog://{tmp_path}", timeout_ms=60_000) as client:
        producer = client.producer("t")
        await producer.send(b"x")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        for end in (producer.close, producer.flush, producer.close):
            assert (await end(timeout=0.05)).unfinished == 1
        with pytest.raises(UsageError, match="closed"):
            await producer.send(b"y")
        assert not closing.done()
        assert (await client.close(0)).unsent == 1
        report = await closing
        assert (report.failed, report.unfinished) == (1, 0)
        assert await producer.close() == FlushReport(0, 0, 0)


async def test_leaving_a_producer_block_reports_records_that_an_earlier_close_failed(tmp_path):
    async def leave(ending, client):
        async with client.producer("t") as producer:
            await producer.send(b"x")
            await (producer if ending == "producer" else client).close(0)

    for ending, error in (("producer", NotConnected), ("client", UsageError)):
        async with ringlog.aio.connect(f"ringlog://{tmp_path}", timeout_ms=300) as client:
            with pytest.raises(error):
                await leave(ending, client)


async def test_a_client_refuses_calls_from_another_event_loop(ringlog_engine, ringlog_topic):
    """The error is `WrongLoop`, and the client continues to work in its own loop."""
    topic, raised = ringlog_topic(), []
    async with ringlog.aio.connect(ringlog_engine.url) as client:
        await client.append(topic, b"x")

        def elsewhere():
            try:
                asyncio.run(client.append(topic, b"y"))
            except WrongLoop as e:
                raised.append(e)

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join(WAIT_S)
        assert len(raised) == 1
        assert (await client.append(topic, b"z")).first_seq == 2


def test_a_client_refuses_calls_outside_an_event_loop(ringlog_engine):
    """The error is `WrongLoop`."""
    client = ringlog.aio.connect(ringlog_engine.url)
    with pytest.raises(WrongLoop):
        client.health()


async def test_waits_end_without_an_engine(tmp_path):
    """Connecting, sending to a full buffer and closing are bounded."""
    with pytest.raises(NotConnected):
        await ringlog.aio.connect(f"ringlog://{tmp_path}", wait=0.05)
    client = ringlog.aio.connect(f"ringlog://{tmp_path}", timeout_ms=200)
    producer = client.producer("t", max_buffer_bytes=2_000)
    await producer.send(b"x" * 1_500)
    with pytest.raises(Backpressure):
        await producer.send(b"x" * 1_500)
    await producer.send_many([b"y"] * 3)
    assert (await client.close(0.01)).unsent == 3


async def test_deletes_and_seeking_by_time_work(client, topic, transport):
    """A delete is effective for all readers when it is acknowledged."""
    for n in range(1, 11):
        await client.append(topic, b"%d" % n, tag="even" if n % 2 == 0 else "odd")
    done = await client.topics.delete_records(topic, before_seq=9, match="even")
    assert (done.deleted, done.count, done.earliest_seq) == (4, 6, 1)
    records = (await client.read(topic)).records
    assert [record.seq for record in records] == [1, 3, 5, 7, 9, 10]
    moment = records[3].time
    expected = [record.seq for record in records if record.time >= moment]
    assert [record.seq async for record in client.reader(topic, moment)] == expected
    assert [record.seq for record in (await client.read(topic, start=moment)).records] == expected
    if transport == "ring":
        batches = [batch async for batch in client.tailer(topic, follow=False)]
        assert [data for batch in batches for data in batch.bytes()] == [r.data for r in records]


async def test_a_watch_follows_topics_and_patterns(ringlog_engine, ringlog_topic):
    """The events are those of the synchronous client."""
    from ringlog.client import CaughtUp, Page, TopicDeleted

    stem = ringlog_topic("watched")
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        await client.append(f"{stem}.a", b"1")
        async with client.watch(f"{stem}.*") as watch:
            found = []

            async def until(wanted):
                while not wanted():
                    event = await watch.next(30)
                    assert event is not None
                    found.append(event)

            def data():
                return [r.data for event in found if isinstance(event, Page) for r in event]

            await until(lambda: any(isinstance(event, CaughtUp) for event in found))
            await client.append(f"{stem}.b", b"2")
            await until(lambda: len(data()) == 2)
            assert data() == [b"1", b"2"]
            assert await watch.next(0.001) is None or len(found) > 2
            await client.topics.delete(f"{stem}.a")
            await until(lambda: any(isinstance(event, TopicDeleted) for event in found))
            assert watch.topics == [f"{stem}.b"]
        await client.topics.delete(f"{stem}.b")


async def test_closing_a_watch_ends_a_waiting_call(ringlog_engine, topic):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        await client.topics.create(topic)
        watch = client.watch(topic)
        await watch.next(30)
        waiting = asyncio.create_task(watch.next())
        await asyncio.sleep(0)
        watch.close()
        assert await asyncio.wait_for(waiting, 30) is None


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_a_cancelled_wait_loses_no_event(ringlog_engine, ringlog_topic, transport):
    """Programs use `wait_for(watch.next(), ...)`.

    A grant that the cancelled call took must not be forgotten.
    """
    topic, got = ringlog_topic("cancelled"), []
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        await client.topics.create(topic)
        async with client.watch(topic, limit=1) as watch:
            for n in range(60):
                await client.append(topic, b"%d" % n)
                task = asyncio.create_task(watch.next())
                for _ in range(n % 12):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    got.append(await task)
            while sum(isinstance(event, Page) for event in got) < 60:
                event = await watch.next(30)
                assert event is not None, f"nothing came behind {got[-3:]}"
                got.append(event)
    data = [record.data for event in got if isinstance(event, Page) for record in event.records]
    assert data == [b"%d" % n for n in range(60)]


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_a_cancelled_wait_loses_no_new_topic(ringlog_engine, ringlog_topic, transport):
    """The cancelled call may have begun to follow the topic."""
    stem, got = ringlog_topic("cancelled"), []
    async with (
        ringlog.aio.connect(ringlog_engine.url, wait=10) as writer,
        ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client,
        client.watch(f"{stem}.*") as watch,
    ):
        await watch.open()
        for n in range(60):
            await writer.append(f"{stem}.{n}", b"%d" % n)
            task = asyncio.create_task(watch.next())
            for _ in range(n):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got.append(await task)
        while sum(isinstance(event, Page) for event in got) < 60:
            event = await watch.next(30)
            assert event is not None, f"nothing came behind {got[-3:]}"
            got.append(event)
        assert len(watch.subscription.feeds) == len(watch.topics) == 60
        for n in range(60):
            await writer.topics.delete(f"{stem}.{n}")
    data = [record.data for event in got if isinstance(event, Page) for record in event.records]
    assert sorted(data) == sorted(b"%d" % n for n in range(60))


async def test_a_cancelled_open_leaves_no_file_open(ringlog_engine, topic):
    """The lookup of the topics continues without its caller and closes the files that it opened."""
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        await client.append_many(topic, [b"1", b"2"])
        async with client.watch(topic, start=LATEST) as watch:
            await watch.open()
        before = len(os.listdir("/proc/self/fd"))
        for n in range(60):
            watch = client.watch(topic, start=LATEST)
            task = asyncio.create_task(watch.open())
            for _ in range(n % 15):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            watch.close()
        assert (await client.topics.state(topic)).head_seq == 2  # Replies keep their order.
        assert len(os.listdir("/proc/self/fd")) <= before + 3


def descriptors_of_loop():
    """Return the descriptors in the epoll set of the running loop, as the kernel lists them."""
    epoll = asyncio.get_running_loop()._selector.fileno()  # type: ignore[attr-defined]
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


async def test_a_forked_child_leaves_the_wake_ups_of_its_parent_alone(ringlog_engine, ringlog_topic):
    """Parent and child share the epoll set of the loop. A bell that the child removed would never wake the
    parent again."""
    topic, jobs = ringlog_topic("forked"), ringlog_topic("jobs")
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport="ring") as client:
        await client.append(topic, b"0")
        await client.topics.create(jobs, type="queue")
        assert not await client.queue(jobs).claim()
        watch = client.watch(topic)
        await watch.next(30)
        following = asyncio.create_task(anext(aiter(client.tailer(topic, start=LATEST))))
        before = descriptors_of_loop()
        for _ in range(1_000):  # Passes of the loop, until the tailer has its own ring.
            await client.read(topic)
            if len(descriptors_of_loop()) > len(before):
                break
        before = descriptors_of_loop()
        child = os.fork()
        if child == 0:
            os._exit(0)  # After the hooks of the fork.
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert descriptors_of_loop() == before
        await client.append(topic, b"1")
        assert (await asyncio.wait_for(following, WAIT_S)).bytes() == [b"1"]
