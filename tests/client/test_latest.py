"""LATEST reads no record: a reader can start there even if the older records of the topic are unreadable."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

import ringlog
import ringlog.aio
from ringlog.client import LATEST, Page
from ringlog.errors import RinglogError
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 20.0
COLD, DAMAGED = "cold", "damaged"
"""Topics: all segments of COLD are in a missing cold tier; the first frame of DAMAGED is damaged."""


def damage(running, text):
    """Change the last byte of this text in the log."""
    for path in Path(running.data_dir).rglob("*.log"):
        with path.open("r+b") as file:
            at = file.read().find(text)
            if at >= 0:
                at += len(text) - 1
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
                return
    raise AssertionError(f"no log file holds {text!r}")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    cold = tmp_path_factory.mktemp("tier") / "cold"
    cold.mkdir(mode=0o700)
    with engine(
        wal={"shards": 1}, gateway={"enabled": True}, delivery={"schedulers": 1}, storage={"enabled": True},
        cold={"dir": str(cold), "hot_segments": 0, "interval_s": 0.1},
    ) as running:  # fmt: skip
        with ringlog.connect(running.url, wait=10) as client:
            for topic in (COLD, DAMAGED):
                client.topics.create(topic, durability="fsync")
            client.append_many(COLD, [b"%d" % n for n in range(2_000)])
            checkpoint(running)
            data = Path(running.data_dir)
            wait_until(lambda: not list(data.rglob("*.data")), WAIT_S, "the segment to be relocated")
            client.append(DAMAGED, b"the first frame")
            client.append(DAMAGED, b"second")
        cold.rename(cold.with_name("away"))
        damage(running, b"the first frame")
        yield running


@pytest.fixture
def writer(house):
    with ringlog.connect(house.url, wait=10) as connected:
        yield connected


@pytest.fixture(params=[COLD, DAMAGED])
def topic(request):
    return request.param


def pages_of(watch):
    while (event := watch.next(WAIT_S)) is not None:
        if isinstance(event, Page):
            yield from event.records
    raise AssertionError("the watch ended, or nothing came")


def test_the_older_records_cannot_be_read(writer, topic):
    """This is the precondition of the other tests."""
    with pytest.raises(RinglogError):
        list(writer.reader(topic))


def test_a_watch_starts_at_latest(house, writer, transport, topic):
    with (
        ringlog.connect(house.url, wait=10, transport=transport) as client,
        client.watch(topic, start=LATEST).open() as watch,
    ):
        for data in (b"one", b"two"):
            writer.append(topic, data)
            assert next(pages_of(watch)).data == data


def test_a_reader_starts_at_latest(house, writer, transport, topic):
    with (
        ringlog.connect(house.url, wait=10, transport=transport) as client,
        client.reader(topic, LATEST, follow=True) as reader,
    ):
        head = writer.topics.state(topic).head_seq
        assert reader.cursor.seq == head
        assert list(client.reader(topic, LATEST)) == []
        writer.append(topic, b"one")
        writer.append(topic, b"two")
        items = iter(reader)
        assert [next(items).data for _ in range(2)] == [b"one", b"two"]
        assert [record.data for record in client.read(topic, head)] == [b"one", b"two"]


def test_a_tailer_starts_at_latest(writer, topic):
    with writer.tailer(topic, LATEST) as tailer:
        assert tailer.cursor.seq == writer.topics.state(topic).head_seq
        writer.append(topic, b"one")
        assert tailer.next(WAIT_S).bytes() == [b"one"]


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_group_starts_at_latest(house, writer, transport, topic, mode):
    name = f"{mode}-{transport}"
    with (
        ringlog.connect(house.url, wait=10, transport=transport) as client,
        client.group(topic, name, mode=mode, start=LATEST) as group,
    ):
        assert group.stats().undelivered == 0
        writer.append(topic, b"one")
        if mode == "queue":
            (job,) = group.claim(wait_ms=int(WAIT_S * 1000))
            assert job.data == b"one"
            job.ack()
            writer.append(topic, b"two")
            assert group.seek(LATEST) == writer.topics.state(topic).head_seq + 1
        else:
            with closing(iter(group)) as items:
                assert next(items).data == b"one"


async def test_asyncio_starts_at_latest(house, writer, transport, topic):
    async with ringlog.aio.connect(house.url, wait=10, transport=transport) as client:
        reader = client.reader(topic, LATEST, follow=True)
        watch = client.watch(topic, start=LATEST)
        await watch.open()
        assert [item async for item in client.reader(topic, LATEST)] == []
        items = reader.__aiter__()
        reading = asyncio.ensure_future(anext(items))
        while not reader.cursor.epoch:
            await asyncio.sleep(0.005)
        writer.append(topic, b"one")
        event = await watch.next(WAIT_S)
        while not isinstance(event, Page):
            event = await watch.next(WAIT_S)
        assert event.bytes() == [b"one"]
        assert (await reading).data == b"one"
        await items.aclose()
        reader.close()
        watch.close()
