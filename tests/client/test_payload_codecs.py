"""Payload codecs of reads: pages, readers, watches and groups decode the `value` of each record."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import pytest

import ringlog.aio
from ringlog import EARLIEST, JSON, RAW, TEXT, Client, Page, Record, Tombstone, msgspec_codec
from ringlog.errors import UsageError
from ringlog.testing.real_engine import TestEngine, wait_until


class Order(msgspec.Struct):
    number: int


ORDER = msgspec_codec(Order)
WANTED = [Order(1), Order(2), None]


@pytest.fixture
def topic(client: Client, ringlog_topic: Callable[[str], str]) -> str:
    """A topic with two orders and a null."""
    name = ringlog_topic("orders")
    client.append_many(name, [ORDER.encode(Order(1)), ORDER.encode(Order(2)), None])
    return name


def values_of(records: Any) -> list[Any]:
    return [record.value for record in records]


def test_every_read_decodes_values(client: Client, topic: str) -> None:
    page = client.read(topic, payload=ORDER)
    assert values_of(page) == values_of(page.records) == WANTED
    assert values_of(client.reader(topic, payload=ORDER)) == WANTED
    assert [values_of(each) for each in client.reader(topic, payload=ORDER).pages()] == [WANTED]
    with client.watch(topic, start=EARLIEST, payload=ORDER) as watch:
        assert values_of(next(event for event in watch if isinstance(event, Page))) == WANTED
    assert values_of(islice(client.group(topic, "stream", payload=ORDER).records(), 3)) == WANTED
    group = client.group(topic, "queue", mode="queue", payload=ORDER)
    assert values_of(group.claim(3)) == WANTED


def test_without_a_codec_the_value_is_the_payload(client: Client, topic: str) -> None:
    assert values_of(client.reader(topic)) == [record.data for record in client.reader(topic)]
    assert type(next(iter(client.reader(topic)))) is Record


def test_watches_with_different_codecs_share_what_they_read(client: Client, topic: str) -> None:
    codecs = [ORDER, JSON, RAW]
    watches = [client.watch(topic, start=EARLIEST, payload=codec) for codec in codecs]
    found = [next(event for event in watch if isinstance(event, Page)) for watch in watches]
    assert [values_of(page)[0] for page in found] == [Order(1), {"number": 1}, b'{"number":1}']
    for watch in watches:
        watch.close()


def test_a_group_with_a_codec_rejects_what_it_cannot_decode(
    client: Client, topic: str, ringlog_topic: Callable[[str], str]
) -> None:
    client.append(topic, b"no order")
    dead = ringlog_topic("dead")
    group = client.group(topic, "strict", mode="queue", payload=ORDER, max_deliveries=5, dead_letter=dead)
    done = []
    for job in group.jobs(idle_s=1.0):
        with job:
            done.append(job.value)
    assert done == WANTED
    wait_until(lambda: group.stats().pending == 0, 20, "the rejected record to be moved")


def test_decoded_records_can_be_pickled(client: Client, topic: str) -> None:
    for codec in (JSON, TEXT, ORDER):
        records = [item for item in client.reader(topic, payload=codec) if not isinstance(item, Tombstone)]
        again = pickle.loads(pickle.dumps(records))
        assert values_of(again) == values_of(records)


@pytest.mark.parametrize("call", ["read", "reader", "watch"])
def test_a_payload_that_is_no_codec_is_refused(client: Client, topic: str, call: str) -> None:
    with pytest.raises(UsageError, match="payload"):
        getattr(client, call)(topic, payload="json")


def test_asyncio_reads_decode_values(ringlog_engine: TestEngine, topic: str) -> None:
    async def read() -> list[list[Any]]:
        async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
            page = values_of(await client.read(topic, payload=ORDER))
            reader = [item.value async for item in client.reader(topic, payload=ORDER)]
            async with client.watch(topic, start=EARLIEST, payload=ORDER) as watch:
                event = await watch.next(10)
            assert isinstance(event, Page)
            return [page, reader, values_of(event)]

    assert asyncio.run(read()) == [WANTED] * 3
