"""A shard that the supervisor gave up.

Requests fail at once, and clients continue after a restart of the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import ringlog
import ringlog.aio
from ringlog.client import LATEST, Page
from ringlog.errors import NotReady
from ringlog.limits import CREDIT_DEFAULT
from ringlog.placement import home_shard
from ringlog.testing.real_engine import engine, wait_until
from tests.support.engines import fail_shard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
WAIT_S = 20.0
TIMEOUT_MS = 60_000
"""Timeout of requests: far longer than any wait in the test."""


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_requests_to_a_failed_shard_fail_at_once(transport):
    with engine(
        wal={"shards": 1}, gateway={"enabled": True}, supervisor={"restart_max": 0},
    ) as running, ringlog.connect(
        running.url, wait=10, transport=transport, timeout_ms=TIMEOUT_MS
    ) as client:  # fmt: skip
        client.append("t", b"0")
        client.topics.create("q", type="queue")
        queue, producer = client.queue("q"), client.producer("t", linger_ms=0)
        queue.put(b"job")
        producer.send(b"1").result(WAIT_S)
        follower = iter(client.reader("t", follow=True))
        assert [next(follower).data for _ in range(2)] == [b"0", b"1"]
        ended = []

        def follow():
            try:
                next(follower)
            except NotReady as e:
                ended.append(e)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        fail_shard(running, 0)
        for refused in (
            lambda: client.append("t", b"x"),
            lambda: client.append("t", b"x"),
            lambda: client.append("t", b"x", dedup_id="k"),
            lambda: producer.send(b"x").result(WAIT_S),
            lambda: queue.put(b"x"),
            lambda: queue.claim(wait_ms=10_000),
            lambda: list(client.reader("t")),
            lambda: client.topics.state("t"),
        ):
            begun = time.monotonic()
            with pytest.raises(NotReady) as caught:
                refused()
            assert caught.value.detail["reason"] == "shard_failed"
            assert time.monotonic() - begun < TIMEOUT_MS / 2_000
        thread.join(WAIT_S)
        assert [error.detail["reason"] for error in ended] == ["shard_failed"]
        running.restart()
        client.append("t", b"after")
        assert producer.send(b"later").result(WAIT_S)
        assert {record.data for record in client.reader("t")} >= {b"0", b"1", b"after", b"later"}
        assert [job.data for job in queue.claim(10)][:1] == [b"job"]


FAILED = [name for name in (f"w{number}" for number in range(20)) if home_shard(name, 2) == 0][:2]
OTHER = next(name for name in (f"w{number}" for number in range(20)) if home_shard(name, 2) == 1)


def said(watch):
    """Return the next event, or "failed" if the watch raises the error of the failed shard."""
    try:
        event = watch.next(WAIT_S)
    except NotReady as e:
        return "failed" if (e.detail["reason"], e.detail["shard"]) == ("shard_failed", 0) else e
    assert event is not None, "the watch is silent"
    return event


def until_record(watch, topic, data):
    """Return the events up to the one with the record."""
    events = []
    while True:
        event = said(watch)
        events.append(event)
        if isinstance(event, Page) and event.topic == topic and data in [record.data for record in event]:
            return events


def test_a_watch_reports_each_topic_of_a_failed_shard_once():
    with engine(
        wal={"shards": 2}, gateway={"enabled": True}, delivery={"schedulers": 1},
        supervisor={"restart_max": 1},
    ) as running, ringlog.connect(running.url, wait=10) as writer:  # fmt: skip
        for topic in (*FAILED, OTHER):
            writer.append(topic, b"0")
        clients = [ringlog.connect(running.url, wait=10, transport=each) for each in ("ring", "ipc")]
        watches = [
            client.watch(topics, start=LATEST).open()
            for client in clients
            for topics in ([*FAILED, OTHER], "w*")
        ]
        running.kill("wal_shard", shard=0)
        running.wait_ready()
        fail_shard(running, 0)
        for number, watch in enumerate(watches):
            failed = 0
            while failed < len(FAILED):
                failed += said(watch) == "failed"
            # A watch of a pattern may also report that it cannot list the topics of the shard.
            may_list = number % 2
            for data in (b"1", b"2"):
                writer.append(OTHER, data)
                failed += until_record(watch, OTHER, data).count("failed")
            assert failed <= len(FAILED) + may_list
        # After a new subscription the watch may report the failed shard again. It delivers all other records.
        for kind in ("scheduler", "gateway"):
            running.kill(kind)
            writer.append(OTHER, kind.encode())
            for watch in watches:
                until_record(watch, OTHER, kind.encode())
        running.restart()
        for topic in (*FAILED, OTHER):
            writer.append(topic, b"after")
        for watch in watches:
            left = {*FAILED, OTHER}
            while left:
                event = said(watch)
                if isinstance(event, Page) and b"after" in [record.data for record in event]:
                    left.discard(event.topic)
        for client in clients:
            client.close()


async def test_a_waiting_asyncio_watch_reports_a_failed_shard():
    with engine(
        wal={"shards": 2},
        delivery={"schedulers": 1},
        supervisor={"restart_max": 0},
    ) as running:
        async with ringlog.aio.connect(running.url, wait=10) as client:
            await client.append(FAILED[0], b"0")
            watch = client.watch(FAILED[0], start=LATEST)
            await watch.next(WAIT_S)
            waiting = asyncio.ensure_future(watch.next())
            await asyncio.to_thread(fail_shard, running, 0)
            with pytest.raises(NotReady) as caught:
                async with asyncio.timeout(WAIT_S):
                    await waiting
            assert caught.value.detail["reason"] == "shard_failed"


def test_routers_between_other_shards_continue():
    """More sources than the credit of the routers are in the failed shard."""
    names = [f"r{number}" for number in range(300)]
    failed = [name for name in names if home_shard(name, 2) == 0][: CREDIT_DEFAULT + 1]
    source, *dests = [name for name in names if home_shard(name, 2) == 1][: len(failed) + 2]
    with engine(
        wal={"shards": 2}, delivery={"schedulers": 1}, supervisor={"restart_max": 1},
    ) as running, ringlog.connect(running.url, wait=10) as client:  # fmt: skip
        for a, b in zip([*failed, source], dests, strict=True):
            client.routers.create(f"{a}->{b}", a, b)
        client.append(source, b"before")
        router = f"{source}->{dests[-1]}"
        client.routers.settle(router, WAIT_S)
        running.kill("wal_shard", shard=0)
        running.wait_ready()
        fail_shard(running, 0)
        said = "cannot resolve a router source"
        wait_until(lambda: said in running.log_path.read_text(), WAIT_S, "the scheduler to look")
        client.append(source, b"1")
        client.routers.settle(router, WAIT_S)
        running.kill("scheduler")
        client.append(source, b"2")
        assert client.routers.settle(router, WAIT_S).lag == 0
        assert client.read(dests[-1]).bytes() == [b"before", b"1", b"2"]
        # What needs the routers of all shards says why it cannot be done.
        for refused in (
            lambda: list(client.routers.list()),
            lambda: client.routers.create("new", source, "new"),
            lambda: client.routers.get("unknown"),
            lambda: client.routers.delete("unknown"),
        ):
            with pytest.raises(NotReady) as caught:
                refused()
            assert caught.value.detail["reason"] == "shard_failed"
        assert client.routers.delete(router)
        running.restart()
        for name in failed:
            client.append(name, b"after")
        for a, b in zip(failed, dests[:-1], strict=True):
            client.routers.settle(f"{a}->{b}", WAIT_S)
