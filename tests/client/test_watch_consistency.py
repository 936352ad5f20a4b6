"""A watch with `consistency="strong"` shows no record that a power loss could still take away.

The engine of these tests syncs nothing for a minute, except for appends that request it.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.client import Client, Page
from ringlog.testing.real_engine import TestEngine
from tests.support.engines import client_fixture, engine_fixture
from tests.support.http_client import HttpClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
WAIT_S, QUIET_S = 20.0, 0.5

running = engine_fixture(
    "module",
    wal={"shards": 1, "flush_interval_ms": 60_000},
    delivery={"schedulers": 1},
    gateway={"enabled": True},
    http={"enabled": True, "port": 0},
)
client = client_fixture("ring", "ipc")


def data(watch: Any, count: int) -> list[bytes | None]:
    """Return the payloads of the next `count` records."""
    found: list[bytes | None] = []
    while len(found) < count:
        event = watch.next(WAIT_S)
        assert event is not None, found
        found += [record.data for record in event.records] if isinstance(event, Page) else []
    return found


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> str:
    name: str = request.node.name.replace("[", "-").rstrip("]")
    client.topics.create(name, durability="disk")
    # The first record reserves numbers for the following ones, with a sync.
    client.append(name, b"first")
    return name


def test_records_are_shown_after_the_sync_that_covers_them(client: Client, topic: str) -> None:
    client.append(topic, b"old", durability="fsync")
    with client.watch(topic) as eventual, client.watch(topic, consistency="strong") as strong:
        assert data(eventual, 2) == data(strong, 2) == [b"first", b"old"]
        client.append(topic, b"new")
        assert data(eventual, 1) == [b"new"]
        assert [event for event in iter(lambda: strong.next(QUIET_S), None) if isinstance(event, Page)] == []
        client.append(topic, b"synced", durability="fsync")
        assert data(strong, 2) == [b"new", b"synced"]


def test_a_backlog_shows_nothing_that_is_not_synced(client: Client, topic: str) -> None:
    client.append(topic, b"old", durability="fsync")
    client.append(topic, b"new")
    with client.watch(topic, consistency="strong") as strong:
        seen = [event for event in iter(lambda: strong.next(QUIET_S), None) if isinstance(event, Page)]
        shown = [record.data for page in seen for record in page.records]
        assert b"new" not in shown
        client.append(topic, b"synced", durability="fsync")
        assert shown + data(strong, 4 - len(shown)) == [b"first", b"old", b"new", b"synced"]


def test_event_streams_keep_the_same_promise(client: Client, running: TestEngine, topic: str) -> None:
    client.append(topic, b"2", durability="fsync")
    call = HttpClient(running.http_url)
    with (
        call.watch({"topics": {topic: {}}}) as eventual,
        call.watch({"topics": {topic: {}}, "consistency": "strong"}) as strong,
    ):
        assert [one["$seq"] for one in eventual.records(2)] == [1, 2]
        assert [one["$seq"] for one in strong.records(2)] == [1, 2]
        client.append(topic, b"3")
        assert [one["$seq"] for one in eventual.records(1)] == [3]
        while not strong.is_silent(QUIET_S):
            block = strong.block()
            assert block is not None
            assert block.event != "record"
        client.append(topic, b"4", durability="fsync")
        assert [one["$seq"] for one in strong.records(2)] == [3, 4]
    call.close()
