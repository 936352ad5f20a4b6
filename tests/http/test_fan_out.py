"""Feeds of the HTTP gateway: live delivery to connections, also to those that lag for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import ringlog.aio
from ringlog.actors.http_gateway.streams.fan_out import FanOut, FanOutPage, Projection, Subscriber
from ringlog.client import Cursor, NewRecord
from ringlog.client.read.pages import Filters, tag_filter
from ringlog.errors import CorruptData
from ringlog.limits import READ_BYTES_DEFAULT, READ_LIMIT_MAX
from ringlog.link.futures import Pending
from ringlog.testing.real_engine import TestEngine

WAIT_S = 20.0


class Connection:
    """An outlet that notes what it is given."""

    def __init__(self) -> None:
        self.has_room = True
        self.pages: list[list[int]] = []
        self.lags = 0
        self.changed = asyncio.Event()

    def deliver(self, sub: Subscriber, delivery: FanOutPage) -> None:
        sub.seq = delivery.page.cursor.seq
        self.pages.append([record.seq for record in delivery.page])
        self.changed.set()

    def fell_behind(self, sub: Subscriber) -> None:
        self.lags += 1
        self.changed.set()

    def topic_ended(self, sub: Subscriber, reason: str) -> None:
        raise AssertionError(reason)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a delivery or a lag makes the condition true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Followed:
    """One topic with one record, which a subscriber has read, and the feed that it has joined."""

    def __init__(self, client: ringlog.aio.Client, topic: str, info: object, epoch: int) -> None:
        gateway = SimpleNamespace(loop=asyncio.get_running_loop(), client=client)
        self.fan_out = FanOut(gateway)  # type: ignore[arg-type]
        self.connection = Connection()
        self.sub = Subscriber(topic, Cursor(epoch, 1), Projection(), READ_LIMIT_MAX, READ_BYTES_DEFAULT)
        self.sub.outlet = self.connection
        self.topic, self.info = topic, info
        assert self.fan_out.join(self.sub, info)  # type: ignore[arg-type]
        feed = self.fan_out.feed(topic)
        assert feed is not None
        self.feed = feed


@pytest.fixture
async def client(http_engine: TestEngine) -> AsyncIterator[ringlog.aio.Client]:
    async with ringlog.aio.connect(http_engine.url, wait=WAIT_S) as connected:
        yield connected


@pytest.fixture
async def followed(client: ringlog.aio.Client, topic: str) -> AsyncIterator[Followed]:
    appended = await client.append(topic, b"1")
    info = client.connection.topics.cached(topic)
    found = Followed(client, topic, info, appended.epoch)
    yield found
    found.sub.leave()
    found.feed.close()


async def test_a_feed_stays_open_while_its_only_subscriber_has_no_room(
    client: ringlog.aio.Client, followed: Followed
) -> None:
    connection, sub, feed = followed.connection, followed.sub, followed.feed
    connection.has_room = False
    await client.append(followed.topic, b"2")
    await connection.until(lambda: connection.lags == 1)
    assert not sub.is_live
    assert followed.fan_out.feed(followed.topic) is feed
    found = feed.recent(sub)
    assert found is not None
    assert [record.seq for record in found.page] == [2]
    connection.has_room = True
    connection.deliver(sub, found)
    assert feed.add(sub), "it is live again, and has read nothing from storage"
    await client.append(followed.topic, b"3")
    await connection.until(lambda: connection.pages[-1] == [3])


async def test_a_feed_without_subscribers_reads_nothing_and_closes_soon(
    client: ringlog.aio.Client, followed: Followed
) -> None:
    await client.append(followed.topic, b"2")
    await followed.connection.until(lambda: followed.connection.pages == [[2]])
    followed.sub.leave()
    await client.append(followed.topic, b"3")
    async with asyncio.timeout(WAIT_S):
        while followed.fan_out.feed(followed.topic) is not None:
            await asyncio.sleep(0)
    assert followed.feed.is_closed
    assert (followed.feed.seq, followed.connection.pages) == (2, [[2]])
    assert not followed.feed.add(followed.sub)


async def test_a_feed_closes_at_once_for_damage_so_that_streams_report_it(followed: Followed) -> None:
    done: Pending[Any] = Pending()
    done.fail(CorruptData("stored frames are damaged"))
    followed.feed._found(done)
    assert (followed.sub.is_live, followed.connection.lags) == (False, 1)
    assert followed.fan_out.feed(followed.topic) is None
    assert not followed.feed.add(followed.sub)


async def test_each_filter_has_its_own_text_also_behind_one_that_is_gone(
    client: ringlog.aio.Client, topic: str
) -> None:
    """A filter may be created at the address of one that was deleted. Filters are compared by value."""
    await client.append_many(topic, [NewRecord(data=b"%d" % n, tag=tag) for n, tag in enumerate("abc", 1)])
    delivery = FanOutPage(await client.read(topic), 0)
    for number, tag in enumerate(["a", "b", "c", "a"]):
        projection = Projection(filters=Filters(tag=tag_filter(tag)))
        found = msgspec.json.decode(delivery.body(projection))["records"]
        assert [one["data"] for one in found] == [number % 3 + 1]
        del projection


def test_equal_projections_are_one_key_and_others_are_not() -> None:
    shown = [
        (tag, nodes)
        for tag in (None, "a", "a*", ["tag", "Levels", "a"], ["tag", "Glob", "b*"])
        for nodes in (frozenset(), frozenset({b"a"}))
    ]

    def made() -> list[Projection]:
        return [Projection(filters=Filters(nodes, tag_filter(tag))) for tag, nodes in shown]

    assert made() == made()
    assert len({*made(), *made()}) == len(shown)
