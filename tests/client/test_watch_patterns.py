"""Watches of patterns: topics created later, deleted, created again; all transports, threads and asyncio."""

from __future__ import annotations

from urllib.parse import quote

import pytest

import ringlog
import ringlog.aio
from ringlog.client import EARLIEST, LATEST, CaughtUp, Page, Tombstone, TopicDeleted
from ringlog.client.watches.events import decode_cursors
from ringlog.link.curve import key_file_text, new_key
from ringlog.testing import engine
from tests.support.machine import free_port, private_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 20.0
SERVER, KEY = new_key(), new_key()
TRANSPORTS = ["ring", "ipc", "tcp"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """An engine with two shards and two schedulers, so that topics are spread over several processes."""
    root = tmp_path_factory.mktemp("keys")
    keys = f'[[keys]]\nname = "all"\npublic_key = "{KEY.public.decode()}"\n'
    with engine(
        wal={"shards": 2},
        delivery={"schedulers": 2},
        supervisor={"restart_max": 50},
        gateway={"enabled": True},
        native={
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "curve_key_file": private_file(root / "server.key", key_file_text(SERVER)),
        },
        auth={"keys_file": private_file(root / "keys.toml", keys)},
    ) as running:
        yield running


def connect(house, transport, module=ringlog):
    if transport != "tcp":
        return module.connect(house.url, wait=10, transport=transport)
    port = house.info.gateway_tcp.rsplit(":", 1)[1]
    address = f"ringlog://127.0.0.1:{port}?server_key={quote(SERVER.public, safe='')}"
    return module.connect(address, wait=10, key=KEY.secret.decode())


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def client(house, transport):
    with connect(house, transport) as connected:
        yield connected


@pytest.fixture
def writer(house):
    with connect(house, "ring") as connected:
        yield connected


def take_data(watch, count):
    """Read `count` records and return `(topic, data)` for each."""
    found = []
    while len(found) < count:
        event = watch.next(WAIT_S)
        assert event is not None, f"no event for {WAIT_S} s, found {found}"
        if isinstance(event, Page):
            found += [(event.topic, record.data) for record in event.records]
    return found


def take_event(watch, kind):
    while not isinstance(event := watch.next(WAIT_S), kind):
        assert event is not None, f"no {kind.__name__} for {WAIT_S} s"
    return event


@pytest.mark.parametrize("pattern", ["{0}*", "{0}.*.a", "*{0}.eu.*"])
def test_a_pattern_without_match_delivers_topics_that_are_created_later(
    client, writer, ringlog_topic, pattern
):
    """The first topic to match is created after the watch began."""
    stem = ringlog_topic("nothing-yet")
    with client.watch(pattern.format(stem)).open() as watch:
        assert watch.next(0) is None
        writer.append(f"{stem}.eu.a", b"first")
        assert take_data(watch, 1) == [(f"{stem}.eu.a", b"first")]
        writer.append(f"{stem}.eu.a", b"second")
        assert take_data(watch, 1) == [(f"{stem}.eu.a", b"second")]


def test_topics_created_later_are_read_from_their_first_record_even_with_latest(
    client, writer, ringlog_topic
):
    """LATEST refers to the time at which the watch opened."""
    stem = ringlog_topic("latest")
    with client.watch(f"{stem}*", start=LATEST).open() as watch:
        for n in range(20):
            writer.append(f"{stem}.{n}", b"%d" % n)
        assert sorted(take_data(watch, 20)) == sorted((f"{stem}.{n}", b"%d" % n) for n in range(20))
        assert len(watch.topics) == 20


def test_a_matching_topic_is_followed_again_after_it_was_recreated(client, writer, ringlog_topic):
    """Each life ends with TopicDeleted, and the next one is read from its first record."""
    stem = ringlog_topic("again")
    topic = f"{stem}.a"
    with client.watch(f"{stem}*").open() as watch:
        for life in range(3):
            writer.append(topic, b"%d" % life)
            assert take_data(watch, 1) == [(topic, b"%d" % life)]
            assert writer.topics.delete(topic)
            assert take_event(watch, TopicDeleted).topic == topic
            assert watch.topics == []


def test_a_topic_recreated_between_two_reads_is_followed_again(client, writer, ringlog_topic):
    """Deletion and creation happen between two calls of `next()`."""
    stem = ringlog_topic("quickly")
    topic = f"{stem}.a"
    with client.watch(f"{stem}*").open() as watch:
        writer.append(topic, b"old")
        assert take_data(watch, 1) == [(topic, b"old")]
        for life in range(3):
            writer.topics.delete(topic)
            writer.append(topic, b"new %d" % life)
            assert take_event(watch, TopicDeleted).topic == topic
            assert take_data(watch, 1) == [(topic, b"new %d" % life)]


def test_a_watch_ignores_cached_facts_of_an_earlier_life_of_the_topic(client, writer, topic):
    """The client's cached facts of a topic may belong to a life that has ended."""
    for _ in range(3):
        client.append(topic, b"old")
        writer.topics.delete(topic)
        writer.append(topic, b"there")
        for start, before in ((LATEST, 0), ("earliest", 1)):
            options = {} if start == "earliest" else {"start": start}
            with client.watch(topic, **options).open() as watch:
                assert [data for _, data in take_data(watch, before)] == [b"there"][:before]
                take_event(watch, CaughtUp)
                writer.append(topic, b"live")
                assert take_data(watch, 1) == [(topic, b"live")]
                writer.topics.delete_records(topic, before_seq=writer.topics.state(topic).head_seq + 1)
                writer.append(topic, b"there")
                take_data(watch, 1)
        writer.topics.delete_records(topic, before_seq=writer.topics.state(topic).head_seq)


def test_new_topics_are_noticed_after_a_scheduler_or_gateway_died(house, client, writer, ringlog_topic):
    """This includes topics that were created while the scheduler was down."""
    stem = ringlog_topic("deaths")
    with client.watch(f"{stem}*").open() as watch:
        wanted = []
        for number, (kind, which) in enumerate([("scheduler", 0), ("scheduler", 1), ("gateway", 0)]):
            house.kill(kind, shard=which)
            writer.append(f"{stem}.{number}.a", b"a")
            house.wait_ready(kind)
            writer.append(f"{stem}.{number}.b", b"b")
            wanted += [(f"{stem}.{number}.{each}", each.encode()) for each in "ab"]
        assert sorted(take_data(watch, len(wanted))) == sorted(wanted)


async def test_an_asyncio_pattern_watch_delivers_later_topics(house, writer, ringlog_topic, transport):
    """Topics created later, and again after they were deleted."""
    stem = ringlog_topic("aio")
    topic = f"{stem}.a"
    async with connect(house, transport, ringlog.aio) as client:
        watch = client.watch(f"{stem}*")
        await watch.open()
        try:
            assert await watch.next(0) is None
            for life in range(3):
                writer.append(topic, b"%d" % life)
                while not isinstance(page := await watch.next(WAIT_S), Page):
                    assert page is not None
                assert page.bytes() == [b"%d" % life]
                writer.topics.delete(topic)
                while not isinstance(event := await watch.next(WAIT_S), TopicDeleted):
                    assert event is not None
        finally:
            watch.close()


@pytest.mark.parametrize("consistency", ["eventual", "strong"])
@pytest.mark.parametrize("count", [0, 3, 5, 7], ids="{} records".format)
def test_a_watch_resumed_in_a_later_life_of_its_topic_starts_over(
    client, writer, ringlog_topic, count, consistency
):
    """The old cursor is no position of the new life, whether its head is below, at or above it."""
    topic = ringlog_topic("resumed")
    writer.append_many(topic, [b"old %d" % n for n in range(5)])
    with client.watch(topic) as watch:
        assert len(take_data(watch, 5)) == 5
        cursor = watch.cursor
    writer.topics.delete(topic)
    writer.topics.create(topic)
    if count:
        writer.append_many(topic, [b"new %d" % n for n in range(count)])
    with client.watch(topic, cursor=cursor, consistency=consistency) as watch:
        event = watch.next(WAIT_S)
        assert isinstance(event, Tombstone)
        assert event.reason == "recreated"
        assert take_data(watch, count) == [(topic, b"new %d" % n) for n in range(count)]
        assert take_event(watch, CaughtUp).head_seq == count
        writer.append(topic, b"next")
        assert take_data(watch, 1) == [(topic, b"next")]


@pytest.mark.parametrize("start", [EARLIEST, LATEST], ids=["earliest", "latest"])
def test_a_cursor_forgets_deleted_topics_and_loses_no_record_of_their_next_life(
    client, writer, ringlog_topic, start
):
    """With LATEST the position of the ended life is kept, so that the next one is read from its beginning."""
    stem = ringlog_topic("short-lived")
    with client.watch(f"{stem}.*", start=start).open() as watch:
        for n in range(3):
            writer.append(f"{stem}.{n}", b"old")
            assert take_data(watch, 1) == [(f"{stem}.{n}", b"old")]
            writer.topics.delete(f"{stem}.{n}")
            assert take_event(watch, TopicDeleted).topic == f"{stem}.{n}"
        cursor = watch.cursor
    assert len(decode_cursors(cursor)) == (0 if start is EARLIEST else 3)
    writer.append(f"{stem}.1", b"new")
    with client.watch(f"{stem}.*", start=start, cursor=cursor) as watch:
        assert take_data(watch, 1) == [(f"{stem}.1", b"new")]
