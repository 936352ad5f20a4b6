"""The engine restarts with another number of schedulers: open watches continue with the new ones."""

from __future__ import annotations

import asyncio
import time

import pytest

import ringlog
import ringlog.aio
from ringlog.client import LATEST, Page
from ringlog.errors import InvalidRequest
from ringlog.link.peer import Peer
from ringlog.supervision import control_client
from ringlog.testing.real_engine import engine, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 20.0
TOPICS = [f"t{number}" for number in range(12)]
SETTINGS = {"wal": {"shards": 1}, "gateway": {"enabled": True}, "delivery": {"schedulers": 3}}


def feeds_of(running, number):
    """Return the number of feeds of a scheduler."""
    return sum(
        each.feeds for each in control_client.fetch_consumers(running.run_dir, number, 64, WAIT_S).consumers
    )


def test_feeds_are_redistributed_and_a_watch_fails_without_schedulers():
    with engine(**SETTINGS) as running, ringlog.connect(running.url, wait=10) as writer:
        for topic in TOPICS:
            writer.append(topic, b"0")
        clients = [ringlog.connect(running.url, wait=10, transport=each) for each in ("ring", "ipc")]
        watches = [
            client.watch(topics, start=LATEST).open() for client in clients for topics in (TOPICS, "t*")
        ]
        for schedulers in (1, 2):
            running.stop()
            running.change("delivery.schedulers", schedulers)
            running.start()
            new = b"%d schedulers" % schedulers
            for topic in TOPICS:
                writer.append(topic, new)
            for watch in watches:
                left = set(TOPICS)
                while left:
                    event = watch.next(WAIT_S)
                    assert event is not None, f"nothing of {left} with {schedulers} schedulers"
                    if isinstance(event, Page) and new in [record.data for record in event]:
                        left.discard(event.topic)
            wait_until(
                lambda schedulers=schedulers: all(feeds_of(running, number) for number in range(schedulers)),
                WAIT_S, "each scheduler to look after some of the feeds",
            )  # fmt: skip
        running.stop()
        running.change("delivery.schedulers", 0)
        running.start()
        for client, watch in zip([each for each in clients for _ in range(2)], watches, strict=True):
            with pytest.raises(InvalidRequest) as of_new:
                client.watch(TOPICS).open()
            with pytest.raises(InvalidRequest) as of_live:
                list(watch)
            assert str(of_live.value) == str(of_new.value)
            watch.close()
        for client in clients:
            client.close()


@pytest.mark.interpreted
def test_feeds_are_redistributed_before_a_scheduler_connects(monkeypatch):
    """Feeds are assigned to schedulers before the connections come up.

    Otherwise no scheduler gets the feeds of a removed one if its connection comes up at once.
    """
    set_endpoint = Peer.set_endpoint

    def point_at_and_wait(peer, endpoint):
        set_endpoint(peer, endpoint)
        if endpoint and peer.name.startswith("scheduler"):
            deadline = time.monotonic() + WAIT_S
            while not peer.is_up and time.monotonic() < deadline:
                peer.pump()

    with engine(**SETTINGS) as running, ringlog.connect(running.url, wait=10) as client:
        for topic in TOPICS:
            client.append(topic, b"0")
        with client.watch(TOPICS, start=LATEST).open():
            wait_until(lambda: all(feeds_of(running, n) for n in range(3)), WAIT_S, "the feeds")
            running.stop()
            monkeypatch.setattr(Peer, "set_endpoint", point_at_and_wait)
            running.change("delivery.schedulers", 1)
            running.start()
            wait_until(
                lambda: feeds_of(running, 0) == len(TOPICS), WAIT_S, "all feeds at the one that is left"
            )


async def test_an_asyncio_watch_fails_when_the_engine_has_no_schedulers():
    with engine(**SETTINGS) as running:
        async with ringlog.aio.connect(running.url, wait=10) as client:
            await client.append("t", b"0")
            watch = client.watch("t", start=LATEST)
            await watch.next(WAIT_S)
            waiting = asyncio.ensure_future(watch.next())
            await asyncio.to_thread(running.stop)
            running.change("delivery.schedulers", 0)
            await asyncio.to_thread(running.start)
            with pytest.raises(InvalidRequest, match=r"delivery\.schedulers = 0"):
                async with asyncio.timeout(WAIT_S):
                    await waiting
