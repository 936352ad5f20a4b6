"""Misspelled and invalid settings are refused, and valid settings take effect.

Every test runs over rings and over the gateway.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import ringlog
import ringlog.aio
from ringlog.errors import GroupIncompatible, InvalidRequest, TopicIncompatible, UsageError
from ringlog.types import Durability
from tests.support.engines import client_fixture

client = client_fixture("ring", "ipc")


def test_an_unknown_setting_is_refused_with_the_nearest_name(client: Any, topic: str) -> None:
    with pytest.raises(InvalidRequest, match="no setting 'durabilty'; did you mean durability"):
        client.topics.create(topic, durabilty="fsync")
    client.topics.create(topic)
    with pytest.raises(InvalidRequest, match="did you mean ttl_ms"):
        client.topics.configure(topic, ttl=5)
    with pytest.raises(UsageError, match="did you mean max_deliveries"):
        client.group(topic, "g", mode="queue", max_delivries=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl_ms", 2**64 - 1), ("ttl_ms", 2**70), ("ttl_ms", float("nan")), ("ttl_ms", "1"), ("ttl_ms", -1),
        ("lease_ms", 1), ("priority_levels", 257), ("backoff_ms", 86_400_001), ("cap_records", 2**63),
        ("max_deliveries", 1_000_001), ("durability", "fsyncc"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(client: Any, topic: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be ") as caught:
        client.topics.create(topic, type="queue", **{name: value})
    assert caught.value.detail["field"] == name
    client.topics.create(topic, type="queue")
    with pytest.raises(InvalidRequest, match=f"{name} must be "):
        client.topics.configure(topic, **{name: value})


def test_auto_create_is_refused_where_it_has_no_effect(client: Any, topic: str) -> None:
    with pytest.raises(InvalidRequest, match="create=False"):
        client.topics.create(topic, auto_create=False)
    client.topics.create(topic, auto_create=True)
    with pytest.raises(InvalidRequest, match="auto_create has no effect"):
        client.topics.configure(topic, auto_create=False)


def test_topic_settings_accept_numpy_numbers_and_durability_members(client: Any, ringlog_topic: Any) -> None:
    made = client.topics.create(ringlog_topic(), ttl_ms=np.int64(60_000), durability=Durability.FSYNC)
    assert (made.config["ttl_ms"], made.config["durability"]) == (60_000, "fsync")


def test_exist_ok_returns_an_existing_topic_with_equal_settings(client: Any, topic: str) -> None:
    client.topics.create(topic, durability="fsync", ttl_ms=60_000)
    again = client.topics.create(topic, exist_ok=True, durable=True, ttl_ms=60_000)
    assert not again.created
    assert not client.topics.create(topic, exist_ok=True).created


def test_exist_ok_names_each_difference_with_both_values(client: Any, topic: str) -> None:
    client.topics.create(topic, durability="disk", ttl_ms=60_000)
    with pytest.raises(TopicIncompatible) as caught:
        client.topics.create(topic, exist_ok=True, durability="fsync", ttl_ms=5, cap_records=0)
    differences = {name: tuple(pair) for name, pair in caught.value.detail["differences"].items()}
    assert differences == {"durability": ("disk", "fsync"), "ttl_ms": (60_000, 5)}
    assert "durability is 'disk', asked for 'fsync'" in str(caught.value)
    assert 'exist_ok="update"' in str(caught.value)
    assert client.topics.state(topic).config["ttl_ms"] == 60_000


@pytest.mark.parametrize("exist_ok", [True, "update"])
def test_exist_ok_refuses_a_topic_of_another_type(client: Any, ringlog_topic: Any, exist_ok: Any) -> None:
    queue, log = ringlog_topic("queue"), ringlog_topic("log")
    client.topics.create(queue, type="queue")
    client.topics.create(log)
    with pytest.raises(TopicIncompatible):
        client.topics.create(queue, exist_ok=exist_ok, cap_records=5)
    with pytest.raises(TopicIncompatible):
        client.topics.create(log, type="queue", exist_ok=exist_ok, cap_records=5)
    assert client.topics.state(queue).config["cap_records"] == 0
    assert client.topics.state(log).config["cap_records"] == 0


def test_exist_ok_update_creates_or_configures_the_topic(client: Any, topic: str) -> None:
    assert client.topics.create(topic, exist_ok="update", ttl_ms=60_000).created
    changed = client.topics.create(topic, exist_ok="update", cap_records=7)
    assert not changed.created
    assert (changed.config["cap_records"], changed.config["ttl_ms"]) == (7, 60_000)
    with pytest.raises(UsageError, match="exist_ok"):
        client.topics.create(topic, exist_ok="yes")


def test_group_settings_that_differ_from_the_groups_are_refused(client: Any, ringlog_topic: Any) -> None:
    topic, dead = ringlog_topic("topic"), ringlog_topic("dead")
    client.topics.create(topic)
    client.append(topic, b"x")
    made = client.group(topic, "g", mode="queue", max_in_flight=10)
    assert len(made.claim()) == 1
    client.group(topic, "g", mode="queue").claim()
    client.group(topic, "g", mode="queue", max_in_flight=10).claim()
    for named in (
        {"max_deliveries": 3, "dead_letter": dead}, {"max_in_flight": 11}, {"member_max_in_flight": 1},
    ):  # fmt: skip
        with pytest.raises(GroupIncompatible) as caught:
            client.group(topic, "g", mode="queue", **named).claim()
        assert set(caught.value.detail["differences"]) == set(named)
        assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize("name", ["max_in_flight", "member_max_in_flight", "min_idle_ms"])
def test_a_setting_without_effect_on_a_group_is_refused(client: Any, ringlog_topic: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no effect"):
        client.group(ringlog_topic(), "g", mode="stream", **{name: 5})


def test_call_arguments_out_of_range_are_refused_by_name(client: Any, topic: str) -> None:
    client.topics.create(topic, type="queue")
    queue = client.queue(topic)
    queue.put(b"x")
    for value in (1, 99, 86_400_001, -1, 2**64, 1.5, float("nan")):
        with pytest.raises(UsageError, match="lease_ms"):
            queue.claim(lease_ms=value)
    (job,) = queue.claim(lease_ms=86_400_000)
    for value in (86_400_001, -1, 2**64):
        with pytest.raises(UsageError, match="delay_ms"):
            job.nack(delay_ms=value)
        with pytest.raises(UsageError, match="lease_ms"):
            job.extend(value)
    with pytest.raises(UsageError, match="wait_ms"):
        queue.claim(wait_ms=2**62)
    with pytest.raises(UsageError, match="ttl_ms"):
        client.append(topic, b"x", ttl_ms=2**62)
    job.nack(delay_ms=86_400_000)


def test_the_asyncio_client_makes_the_same_checks(ringlog_engine: Any, ringlog_topic: Any) -> None:
    async def run() -> None:
        topic = ringlog_topic()
        async with await ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
            with pytest.raises(InvalidRequest, match="did you mean durability"):
                await client.topics.create(topic, durabilty="fsync")
            await client.topics.create(topic, durability="disk")
            with pytest.raises(TopicIncompatible, match="asked for 'fsync'"):
                await client.topics.create(topic, durability="fsync", exist_ok=True)
            changed = await client.topics.create(topic, durability="fsync", exist_ok="update")
            assert changed.config["durability"] == "fsync"
            await client.group(topic, "g", mode="queue").stats()
            with pytest.raises(GroupIncompatible, match="max_in_flight"):
                await client.group(topic, "g", mode="queue", max_in_flight=3).claim()

    asyncio.run(run())
