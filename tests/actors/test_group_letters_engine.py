"""Records that a consumer group gives up move to its dead-letter topic. Processes are killed."""

from __future__ import annotations

import pytest

import ringlog
import ringlog.aio
from ringlog.actors.scheduler.forwarding.dead_letters import copy_producer_id
from ringlog.client import Client
from ringlog.client.group import Group
from ringlog.errors import LeaseLost
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import client_fixture, engine_fixture
from tests.support.topic_contents import records

MOVED_S = 30.0
pytestmark = pytest.mark.slow

running = engine_fixture(
    "module",
    wal={"shards": 2},
    delivery={"schedulers": 1},
    gateway={"enabled": True},
    supervisor={"restart_max": 100},
)

client = client_fixture(timeout_ms=60_000)


def is_moved(group: Group) -> bool:
    found = group.stats()
    return (found.pending, found.undelivered) == (0, 0)


def test_the_copies_of_a_group_have_producers_of_their_own() -> None:
    others = {copy_producer_id(1, 2, 4, 7), copy_producer_id(1, 2, 3, 7, 1), copy_producer_id(1, 2, 3, 7, 2)}
    assert len({copy_producer_id(1, 2, 3, group) for group in (0, 7, 8)} | others) == 6


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_rejected_and_exhausted_records_are_copied_with_their_origin(
    running: TestEngine, transport: str
) -> None:
    """The records stay in their topic for all other readers."""
    topic, dead = f"orders-{transport}", f"dead-{transport}"
    with ringlog.connect(running.url, wait=20, transport=transport) as client:  # type: ignore[arg-type]
        client.topics.create(topic, durability="fsync")
        client.append(topic, b"bad", key=b"k", tag="eu", meta={"own": 1, "$dead_letter_group": "forged"})
        client.append(topic, b"worse")
        client.append(topic, b"good")
        group = client.group(topic, "billing", mode="queue", max_deliveries=2, dead_letter=dead)
        (job,) = group.claim()
        group.reject(job, "no address")
        with pytest.raises(LeaseLost):
            job.reject()
        for _ in range(2):
            group.nack(group.claim(1), reason="no money")
        group.ack(group.claim(9))
        wait_until(lambda: is_moved(group), MOVED_S, "both to be moved", lambda: str(group.stats()))
        assert group.stats().floor == 3
        found = {each.data: each for each in records(client, dead)}
        assert found.keys() == {b"bad", b"worse"}
        bad = found[b"bad"]
        assert (bad.key, bad.tag) == (b"k", "eu")
        assert bad.meta == {
            "own": 1, "$dead_letter_from": topic, "$dead_letter_group": "billing",
            "$dead_letter_deliveries": "1", "$dead_letter_src_seq": "1", "$dead_letter_reason": "no address",
            "$dead_letter_src_id": bad.meta["$dead_letter_src_id"],
            "$dead_letter_last_failure": bad.meta["$dead_letter_last_failure"],
        }  # fmt: skip
        assert int(bad.meta["$dead_letter_src_id"]) > 0
        assert found[b"worse"].meta["$dead_letter_deliveries"] == "2"
        assert found[b"worse"].meta["$dead_letter_reason"] == "no money"
        assert found[b"worse"].meta["$dead_letter_nacks"] == "2"
        assert [record.seq for record in records(client, topic)] == [1, 2, 3]


def test_every_record_is_copied_once_despite_kills(running: TestEngine, client: Client) -> None:
    """A retried move appends no second copy (Q7)."""
    client.append_many("many", [b"%d" % n for n in range(200)])
    group = client.group("many", "g", mode="queue", max_deliveries=1, dead_letter="many-dead")
    for victim in ("scheduler", "wal_shard", "scheduler", "wal_shard"):
        group.nack(group.claim(50, lease_ms=60_000))
        for shard in (0, 1) if victim == "wal_shard" else (0,):
            running.kill(victim, shard=shard)
    wait_until(lambda: is_moved(group), MOVED_S, "all to be moved", lambda: str(group.stats()))
    assert sorted(int(each.data) for each in records(client, "many-dead")) == list(range(200))
    assert group.stats().floor == 200


async def test_the_asyncio_client_rejects_as_well(running: TestEngine) -> None:
    async with ringlog.aio.connect(running.url, wait=20) as client:
        await client.append("aio", b"bad")
        group = client.group("aio", "g", mode="queue", dead_letter="aio-dead")
        (job,) = await group.claim()
        await group.reject(job, "no")
        assert (await group.stats()).in_flight == 0
