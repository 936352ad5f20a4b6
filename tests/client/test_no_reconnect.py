"""With `connect(reconnect=False)`, a stop of the engine ends every waiting call with NotConnected."""

from __future__ import annotations

import asyncio
import threading

import pytest

import ringlog
import ringlog.aio
from ringlog.client import LATEST, CaughtUp
from ringlog.errors import NotConnected
from ringlog.testing.real_engine import engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
WAIT_S = 20.0
SETTINGS = {"wal": {"shards": 1}, "gateway": {"enabled": True}, "delivery": {"schedulers": 1}}


def opened(client):
    """Open all kinds of waiting reads. Return each as a function that blocks until it returns or raises."""
    watch = client.watch("t", start=LATEST).open()
    assert isinstance(watch.next(WAIT_S), CaughtUp)
    pattern = client.watch("none.*").open()
    reader, group = client.reader("t", follow=True), iter(client.group("t", "g", mode="stream"))
    items, jobs = iter(reader), client.queue("q").jobs()
    assert next(items).data == next(group).data == b"0"
    waits = {
        "watch": watch.next, "pattern": pattern.next, "reader": lambda: next(items),
        "stream group": lambda: next(group), "jobs": lambda: next(jobs),
    }  # fmt: skip
    if client.connection.transport == "ring":
        tailer = client.tailer("t")
        tailer.next(WAIT_S)
        waits["tailer"] = tailer.next
    return waits


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_waits_end_with_not_connected(transport):
    with engine(**SETTINGS) as running:
        with ringlog.connect(running.url, wait=10) as writer:
            writer.append("t", b"0")
            writer.topics.create("q", type="queue")
        client = ringlog.connect(running.url, wait=10, reconnect=False, transport=transport)
        waits = opened(client)
        ended = {}
        begun = threading.Barrier(len(waits) + 1)

        def wait(name, call):
            begun.wait(WAIT_S)
            try:
                ended[name] = call()
            except Exception as e:  # noqa: BLE001  what it is, is compared below
                ended[name] = e

        threads = [threading.Thread(target=wait, args=each, daemon=True) for each in waits.items()]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        running.stop()
        for thread in threads:
            thread.join(WAIT_S)
        assert {name: type(found) for name, found in ended.items()} == dict.fromkeys(waits, NotConnected)
        for again in (lambda: client.watch("t").open(), lambda: list(client.reader("t"))):
            with pytest.raises(NotConnected):
                again()
        client.close()


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_asyncio_waits_end_with_not_connected(transport):
    with engine(**SETTINGS) as running:
        async with ringlog.aio.connect(running.url, wait=10, reconnect=False, transport=transport) as client:
            await client.append("t", b"0")
            watch = client.watch("t", start=LATEST)
            assert isinstance(await watch.next(WAIT_S), CaughtUp)
            items = client.reader("t", follow=True).__aiter__()
            assert (await anext(items)).data == b"0"
            waits = [asyncio.ensure_future(each) for each in (watch.next(), anext(items))]
            await asyncio.to_thread(running.stop)
            async with asyncio.timeout(WAIT_S):
                found = await asyncio.gather(*waits, return_exceptions=True)
            assert [type(each) for each in found] == [NotConnected, NotConnected]
