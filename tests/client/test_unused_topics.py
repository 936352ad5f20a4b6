"""Topics with `expire_unused_ms` on a real engine.

A topic is deleted after its idle time (X8). Every reader that follows a topic keeps it in use.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable

import pytest

import ringlog
from ringlog import aio
from ringlog.client import CaughtUp, TopicDeleted
from ringlog.client.client import Client
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.testing import engine
from ringlog.testing.pytest_plugin import ringlog_engine
from tests.support.engines import client_fixture

__all__ = ["ringlog_engine"]
pytestmark = [pytest.mark.timeout(120)]
PERIOD_MS = 2_000
LONG_S = 5.0
"""Well above the idle time."""
CLAIM_MS = 8_000
GONE_S = 30.0
_numbers = itertools.count()

client = client_fixture("ring", "ipc")

other = client_fixture()
"""It lists topics, which does not count as a use."""


def make(client: Client, **config: object) -> str:
    name = f"unused-{next(_numbers)}"
    client.topics.create(name, expire_unused_ms=PERIOD_MS, **config)
    return name


def there(other: Client) -> set[str]:
    return {each.topic for each in other.topics.list("unused-")}


def require_kept(other: Client, names: set[str]) -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        assert names <= there(other), f"gone: {names - there(other)}"
        time.sleep(0.05)


def require_gone(other: Client, names: set[str]) -> None:
    until = time.monotonic() + GONE_S
    while left := names & there(other):
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.05)


def in_thread(run: Callable[[], object], found: list[object]) -> threading.Thread:
    def note() -> None:
        try:
            found.append(run())
        except RinglogError as e:
            found.append(e)

    thread = threading.Thread(target=note)
    thread.start()
    return thread


def test_followers_keep_a_topic_and_it_is_deleted_after_they_left(client, other):
    """Followers are a watch, a waiting reader, an idle tailer, a waiting claim and a stream group."""
    watched, followed, claimed, streamed = (
        make(client, type=kind) for kind in ("log", "log", "queue", "log")
    )
    tailed = make(client)
    found: list[object] = []

    watch = client.watch([watched])
    assert isinstance(watch.next(10), CaughtUp)
    group = client.group(streamed, "g", mode="stream")
    reading = iter(group)
    threads = [
        in_thread(lambda: list(client.reader(followed, follow=True)), found),
        in_thread(lambda: client.queue(claimed).claim(1, wait_ms=CLAIM_MS), found),
        in_thread(lambda: next(reading, None), found),
    ]
    tailer = client.tailer(tailed) if client.transport == "ring" else client.reader(tailed, follow=True)
    tailer.cursor  # noqa: B018  looks its start up, no more
    if client.transport == "ring":
        tailer.next(0.01)
        kept = {watched, followed, claimed, streamed, tailed}
    else:
        kept = {watched, followed, claimed, streamed}
    require_kept(other, kept)
    watch.close()
    require_gone(other, {watched})
    tailer.close()
    require_gone(other, {tailed})
    require_gone(other, {claimed})
    other.topics.delete(followed)
    other.topics.delete(streamed)
    for thread in threads:
        thread.join(GONE_S)
        assert not thread.is_alive()
    assert [] in found, "the claim ended in vain"
    assert len([each for each in found if isinstance(each, TopicNotFound)]) == 2
    group.close()


def test_an_unused_topic_is_deleted(client, other):
    """The deletion has the same effect as a delete by a client. A new topic of that name is another life."""
    name = make(client)
    client.append(name, b"left behind")
    require_gone(other, {name})
    with pytest.raises(TopicNotFound):
        list(client.reader(name))
    client.append(name, b"new")
    assert [record.data for record in client.reader(name)] == [b"new"]
    client.topics.delete(name)


def test_a_garbage_collected_reader_does_not_keep_its_topic(client, other):
    """A program need not close its readers."""
    name = make(client)
    client.append(name, b"r")
    reader = client.reader(name, follow=True)
    assert next(iter(reader)).data == b"r"
    require_kept(other, {name})
    del reader
    gc.collect()
    require_gone(other, {name})


def test_a_client_without_expiring_topics_has_no_keep_alive_timer(client):
    """An idle client sleeps."""
    name = f"ordinary-{next(_numbers)}"
    client.topics.create(name)
    client.append(name, b"r")
    with client.reader(name, follow=True) as reader:
        assert next(iter(reader)).data == b"r"
        assert not client._shell.session.topic_keep_alive._followed
    client.topics.delete(name)


def test_a_router_keeps_its_source_and_destination(client, other):
    """This holds until the router is deleted."""
    source, dest = make(client), make(client)
    client.routers.create(f"{source}-{dest}", source, dest)
    require_kept(other, {source, dest})
    client.append(source, b"r")
    client.routers.delete(f"{source}-{dest}")
    require_gone(other, {source, dest})


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_asyncio_followers_keep_their_topics(ringlog_engine, other, transport):
    """The asyncio client renews the use of followed topics like the threaded one."""

    async def consume() -> None:
        async with aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
            names = [f"unused-{next(_numbers)}" for _ in range(4)]
            watched, followed, claimed, tailed = names
            for name in names:
                kind = "queue" if name == claimed else "log"
                await client.topics.create(name, expire_unused_ms=PERIOD_MS, type=kind)
            watch = await client.watch([watched]).open()
            reader, tailer = client.reader(followed, follow=True), None
            tasks = [
                asyncio.create_task(anext(aiter(reader))),
                asyncio.create_task(client.queue(claimed).claim(1, wait_ms=CLAIM_MS)),
            ]
            if transport == "ring":
                tailer = client.tailer(tailed)
                tasks.append(asyncio.create_task(anext(aiter(tailer))))
            else:
                names.remove(tailed)
            await asyncio.to_thread(require_kept, other, set(names))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            watch.close()
            reader.close()
            if tailer is not None:
                tailer.close()
            await asyncio.to_thread(require_gone, other, set(names))

    asyncio.run(consume())


@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.night
def test_followers_keep_their_topics_over_kills_of_all_processes(transport):
    """The idle time starts again with the restart of a shard, and followers reconnect within it."""
    with (
        engine(
            wal={"shards": 2},
            supervisor={"restart_max": 50},
            delivery={"schedulers": 1},
            gateway={"enabled": True},
        ) as running,
        ringlog.connect(running.url, wait=10) as other,
        ringlog.connect(running.url, wait=10, transport=transport) as client,
    ):
        period_ms = 3_000
        watched, followed, source, dest = names = [f"unused-{next(_numbers)}" for _ in range(4)]
        for name in names:
            client.topics.create(name, expire_unused_ms=period_ms)
        client.routers.create("kept", source, dest)
        client.append(followed, b"r")
        with client.watch([watched]) as watch, client.reader(followed, follow=True) as reader:
            assert isinstance(watch.next(10), CaughtUp)
            assert next(iter(reader)).data == b"r"
            for kind in ("wal_shard", "scheduler", "gateway"):
                running.kill(kind)
                require_kept(other, set(names))
        client.routers.delete("kept")
        require_gone(other, set(names))


def test_a_watch_gets_an_event_when_its_topic_is_deleted(client, other):
    """A topic in use can be deleted, and its followers do not recreate it."""
    name = make(client)
    with client.watch([name]) as watch:
        assert isinstance(watch.next(10), CaughtUp)
        other.topics.delete(name)
        assert isinstance(watch.next(10), TopicDeleted)
    require_gone(other, {name})
