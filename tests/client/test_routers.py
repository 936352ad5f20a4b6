"""Routers of a real engine, through the client library: delivered copies and refused requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

import ringlog
from ringlog import aio
from ringlog.client import Client, NewRecord, RouterDescription, TopicRemoval
from ringlog.errors import (
    InvalidRequest,
    RouterCycle,
    RouterNotFound,
    Throttled,
    TopicIncompatible,
    TopicNotFound,
)
from ringlog.limits import ROUTER_HOPS_MAX
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.client_threads import shard_of
from tests.support.engines import engine_fixture
from tests.support.machine import suspended
from tests.support.topic_contents import payloads

pytestmark = pytest.mark.slow

SETTLE_S = 20.0
ROUTERS_MAX = 40

running = engine_fixture(
    "module",
    wal={"shards": 3},
    delivery={"schedulers": 2},
    limits={"max_routers": ROUTERS_MAX},
    gateway={"enabled": True},
)


@pytest.fixture
def client(running: TestEngine) -> Iterator[Client]:
    with ringlog.connect(running.url, wait=20) as found:
        yield found
        for router in list(found.routers.list()):
            found.routers.delete(router.router)
        for topic in list(found.topics.list()):
            found.topics.delete(topic.topic)


def settle(client: Client, *names: str) -> list[RouterDescription]:
    return [client.routers.settle(name, SETTLE_S) for name in names]


# -- what arrives ------------------------------------------------------------------------------------------


def test_a_router_copies_records_after_its_creation_in_order(client: Client):
    """Records that were written before the creation are not copied."""
    client.append("a", b"before")
    made = client.routers.create("a->b", "a", "b")
    assert (made.created, made.cursor, made.lag, made.forwarded_total) == (True, 1, 0, 0)
    sent = [b"%d" % n for n in range(2_500)]
    client.append_many("a", sent)
    (found,) = settle(client, "a->b")
    assert payloads(client, "b") == sent
    assert (found.cursor, found.forwarded_total) == (2_501, 2_500)
    client.append("b", b"direct")
    client.append("a", b"late")
    settle(client, "a->b")
    assert payloads(client, "b") == [*sent, b"direct", b"late"]


def test_one_source_feeds_topics_in_all_shards(client: Client):
    """Each shard owns some of the 20 destinations."""
    names = [f"d{n:02d}" for n in range(20)]
    for name in names:
        client.routers.create(f"s->{name}", "s", name)
    shards = {shard_of(client, name) for name in names}
    assert len(shards) == 3
    sent = [b"x%d" % n for n in range(300)]
    client.append_many("s", sent[:100])
    client.append_many("s", sent[100:])
    settle(client, *[f"s->{name}" for name in names])
    for name in names:
        assert payloads(client, name) == sent


def test_copies_keep_all_fields_unless_the_router_omits_them(client: Client):
    """A router can omit node and tag, and can filter by tag."""
    client.routers.create("all", "s", "d1")
    client.routers.create("bare", "s", "d2", preserve_node=False, preserve_tag=False)
    client.routers.create("some", "s", "d3", filter="hot*")
    client.routers.create("one", "s", "d4", filter=["tag", "Eq", "cold"])
    record = NewRecord(
        data=b"one", key=b"k", tag="hot.1", node="n1", meta={"a": 1}, headers={"h": b"v"}, priority=7
    )
    client.append_many("s", [record, NewRecord(data=b"two", tag="cold"), NewRecord(data=b"three", node="n2")])
    settle(client, "all", "bare", "some", "one")
    full = client.read("d1").records
    assert [(r.data, r.key, r.tag, r.node, r.meta, dict(r.headers), r.priority) for r in full[:1]] == [
        (b"one", b"k", "hot.1", "n1", {"a": 1}, {"h": b"v"}, 7)
    ]
    assert [(r.tag, r.node) for r in full] == [("hot.1", "n1"), ("cold", None), (None, "n2")]
    assert [(r.data, r.tag, r.node, r.key) for r in client.read("d2").records] == [
        (b"one", None, None, b"k"), (b"two", None, None, None), (b"three", None, None, None),
    ]  # fmt: skip
    assert payloads(client, "d3") == [b"one"]
    assert payloads(client, "d4") == [b"two"]
    assert client.routers.get("some").forwarded_total == 1
    assert client.routers.get("some").cursor == 3


def test_compressed_records_are_forwarded(client: Client):
    client.routers.create("s->d", "s", "d")
    with client.producer("s", codec="lz4", linger_ms=1) as producer:
        for n in range(3_000):
            producer.send(b"some text that repeats itself %d" % (n % 7))
    settle(client, "s->d")
    assert payloads(client, "d") == [b"some text that repeats itself %d" % (n % 7) for n in range(3_000)]


def test_chains_and_permitted_cycles_end_after_the_maximum_of_hops(client: Client):
    """The maximum is ROUTER_HOPS_MAX."""
    for n in range(ROUTER_HOPS_MAX + 2):
        client.routers.create(f"r{n}", f"t{n}", f"t{n + 1}")
    client.append("t0", b"x")
    for n in range(ROUTER_HOPS_MAX + 1):
        settle(client, f"r{n}")
    assert payloads(client, f"t{ROUTER_HOPS_MAX}") == [b"x"]
    assert payloads(client, f"t{ROUTER_HOPS_MAX + 1}") == []
    client.routers.create("x->y", "x", "y")
    client.routers.create("y->x", "y", "x", allow_cycle=True)
    client.append("x", b"round")

    def is_over() -> bool:
        return all(client.routers.get(name).lag == 0 for name in ("x->y", "y->x")) and (
            len(payloads(client, "x")) == 1 + ROUTER_HOPS_MAX // 2
        )

    wait_until(is_over, SETTLE_S, "the cycle to end")
    assert len(payloads(client, "y")) == ROUTER_HOPS_MAX // 2


def test_exactly_once_copies_contain_their_origin(client: Client):
    """The metadata of a copy contains router, source topic, epoch, seq and idempotency key.

    Metadata with too many entries moves to `_ringlog_original_meta`.
    """
    client.routers.create("first", "s", "d", guarantee="exactly_once")
    client.routers.create("second", "d", "e", guarantee="exactly_once")
    many = {f"k{n}": n for n in range(64)}
    client.append_many("s", [NewRecord(data=b"a", meta={"mine": 1}), NewRecord(data=b"b", meta=many)])
    settle(client, "first")
    settle(client, "second")
    first, other = client.read("d").records
    info = client.topics.state("s")
    stamp = first.meta["_ringlog_router"]
    assert first.meta["mine"] == 1
    assert (stamp["router"], stamp["source_topic"], stamp["source_epoch"], stamp["source_seq"]) == (
        "first", "s", info.epoch, 1,
    )  # fmt: skip
    assert stamp["idempotency_key"] == f"router:first:{stamp['source_topic_id']}:{info.epoch}:1"
    assert other.meta["_ringlog_original_meta"] == many
    again = client.read("e").records
    assert [record.meta["_ringlog_router"]["router"] for record in again] == ["second", "second"]
    assert again[1].meta["_ringlog_original_meta"] == many


def test_copies_have_the_durability_of_their_destination(client: Client):
    """A record that is not durable in its source yet is forwarded after its sync."""
    client.topics.create("s", durability="memory")
    client.topics.create("strong", durability="fsync")
    client.topics.create("weak", durability="ephemeral")
    client.routers.create("s->strong", "s", "strong")
    client.routers.create("s->weak", "s", "weak")
    client.append_many("s", [b"%d" % n for n in range(50)])
    settle(client, "s->strong", "s->weak")
    assert payloads(client, "strong") == payloads(client, "weak") == [b"%d" % n for n in range(50)]


def test_deleted_records_are_not_forwarded_and_copies_stay(client: Client, running: TestEngine):
    """The schedulers are suspended during the delete.

    Otherwise records that they had read before would be forwarded.
    """
    client.topics.create("s")
    client.topics.create("d")
    client.routers.create("s->d", "s", "d")
    client.append("s", b"first")
    settle(client, "s->d")
    schedulers = [running.pid_of("scheduler", number) for number in range(2)]
    with suspended(*schedulers):
        client.append_many("s", [b"second", b"third"])
        client.topics.delete_records("s", before_seq=3)
    settle(client, "s->d")
    assert payloads(client, "d") == [b"first", b"third"]


def test_a_full_destination_delays_only_itself_and_continues_with_room(client: Client):
    """No record is dropped, whatever amount of room there is."""
    client.topics.create("full", discard="reject", cap_records=30)
    client.routers.create("s->full", "s", "full")
    client.routers.create("s->free", "s", "free")
    sent = [b"%d" % n for n in range(100)]
    client.append_many("s", sent)
    settle(client, "s->free")
    assert payloads(client, "free") == sent
    seen: list[bytes] = []

    def has_client() -> bool:
        return client.topics.state("full").count == min(30, len(sent) - len(seen))

    while len(seen) < len(sent):
        wait_until(has_client, SETTLE_S, "room to be used")
        page = client.read("full")
        seen += page.bytes()
        client.topics.delete_records("full", before_seq=page.cursor.seq + 1)
    assert seen == sent


def test_a_router_with_stamps_uses_the_room_for_a_single_copy(client: Client):
    """The cap counts the stamps, which are larger than these records."""
    client.topics.create("small", discard="reject", cap_bytes=300)
    client.routers.create("s->small", "s", "small", guarantee="exactly_once")
    sent = [b"%d" % n for n in range(4)]
    client.append_many("s", sent)
    for data in sent:
        wait_until(lambda: client.topics.state("small").count == 1, SETTLE_S, "room to be used")
        page = client.read("small")
        assert page.bytes() == [data]
        client.topics.delete_records("small", before_seq=page.cursor.seq + 1)


def test_records_lost_in_the_source_are_reported_in_the_destination(client: Client, running: TestEngine):
    """The tombstone has the reason `source_trim`. The destination has one dead seq for each lost record.

    The schedulers are suspended while records are lost. A record that a scheduler has read is copied.
    """
    client.routers.create("s->d", "s", "d")
    client.append("s", b"0")
    settle(client, "s->d")
    schedulers = [running.pid_of("scheduler", number) for number in range(2)]
    with suspended(*schedulers):
        client.topics.configure("s", cap_records=3)
        for n in range(1, 11):
            client.append("s", b"%d" % n)
    settle(client, "s->d")
    first = client.read("d")
    assert first.bytes() == [b"0"]
    page = client.read("d", first.cursor)
    tombstone = page.tombstone
    assert tombstone is not None
    assert (tombstone.gap_from, tombstone.gap_to, tombstone.reason) == (2, 8, "source_trim")
    assert page.bytes() == [b"8", b"9", b"10"]
    assert [record.seq for record in page.records] == [9, 10, 11]


# -- objects -----------------------------------------------------------------------------------------------


def test_invalid_routers_are_refused_and_create_no_topic(client: Client):
    """Invalid names, a second router into one topic, a changed endpoint and a cycle are refused."""
    create = client.routers.create
    create("a->b", "a", "b")
    create("b->c", "b", "c")
    known = {topic.topic for topic in client.topics.list()}
    for name, source, dest, error in (
        ("x", "x", "x", InvalidRequest),
        ("bad name", "x", "y", InvalidRequest),
        ("x", "", "y", InvalidRequest),
        ("x", "x", "bad topic", InvalidRequest),
        ("fan", "other", "b", TopicIncompatible),
        ("a->b", "a", "other", TopicIncompatible),
        ("a->b", "other", "b", TopicIncompatible),
        ("c->a", "c", "a", RouterCycle),
    ):
        with pytest.raises(error):
            create(name, source, dest)
    with pytest.raises(InvalidRequest):
        create("x", "x", "y", guarantee="perhaps")
    with pytest.raises(InvalidRequest):
        create("x", "x", "y", filter=["tag", "Like", "z"])
    with pytest.raises(TopicNotFound):
        create("x", "x", "y", create_dest=False)
    assert {topic.topic for topic in client.topics.list()} == known
    with pytest.raises(RouterCycle) as cycle:
        create("c->a", "c", "a")
    assert cycle.value.detail["cycle"] == ["c", "a", "b", "c"]
    with pytest.raises(TopicIncompatible) as fan_in:
        create("fan", "other", "b")
    assert fan_in.value.detail["reason"] == "router_dest_fan_in"
    with pytest.raises(TopicIncompatible) as moved:
        create("a->b", "a", "other")
    assert moved.value.detail["reason"] == "router_repoint_forbidden"
    assert moved.value.detail["existing_dest"] == "b"
    with pytest.raises(RouterNotFound):
        client.routers.get("nobody")


def test_the_number_of_routers_is_limited(client: Client):
    for n in range(ROUTERS_MAX):
        client.routers.create(f"r{n:02d}", "s", f"d{n}")
    with pytest.raises(Throttled) as error:
        client.routers.create("one-more", "s", "another")
    assert error.value.detail["limit"] == "max_routers"
    client.routers.create("r00", "s", "d0", filter="x")
    assert [r.router for r in client.routers.list(page_size=7)] == [f"r{n:02d}" for n in range(ROUTERS_MAX)]
    assert [r.router for r in client.routers.list(prefix="r1")] == [f"r{n}" for n in range(10, 20)]
    assert [r.router for r in client.routers.list(dest="d7")] == ["r07"]
    assert list(client.routers.list(source="other")) == []


def test_creating_an_existing_router_keeps_its_cursor(client: Client):
    """Filter and options of the router change."""
    client.routers.create("s->d", "s", "d", filter="a")
    client.append_many("s", [NewRecord(data=b"1", tag="a"), NewRecord(data=b"2", tag="b")])
    settle(client, "s->d")
    again = client.routers.create("s->d", "s", "d", filter="b", preserve_tag=False)
    assert (again.created, again.cursor, again.forwarded_total) == (False, 2, 1)
    assert again.filter == ("tag", "Eq", "b")
    client.append_many("s", [NewRecord(data=b"3", tag="a"), NewRecord(data=b"4", tag="b")])
    settle(client, "s->d")
    assert [(r.data, r.tag) for r in client.read("d").records] == [(b"1", "a"), (b"4", None)]


def test_no_copy_appears_after_the_deletion_of_a_router(client: Client):
    """A repeated deletion has no effect, and existing copies stay."""
    client.routers.create("s->d", "s", "d")
    client.append("s", b"1")
    settle(client, "s->d")
    assert client.routers.delete("s->d")
    client.append("s", b"2")
    assert not client.routers.delete("s->d")
    client.routers.create("s->d", "s", "d")
    client.append("s", b"3")
    settle(client, "s->d")
    assert payloads(client, "d") == [b"1", b"3"]


@pytest.mark.parametrize("end", ["s", "d"])
def test_a_router_is_deleted_with_either_of_its_topics(client: Client, end: str):
    """A new topic of that name does not restore the router."""
    client.routers.create("s->d", "s", "d")
    client.append("s", b"1")
    settle(client, "s->d")
    assert client.topics.delete(end) == TopicRemoval(end, True, ("s->d",))

    def is_gone() -> bool:
        return not list(client.routers.list())

    wait_until(is_gone, SETTLE_S, "the router to be gone")
    client.append("s", b"2")
    if end == "s":
        assert payloads(client, "d") == [b"1"]
    client.routers.create("s->d", "s", "d")
    client.append("s", b"3")
    settle(client, "s->d")
    assert payloads(client, "d")[-1:] == [b"3"]
    assert b"2" not in payloads(client, "d")


@pytest.mark.parametrize("transport", ["ipc", "ring"])
def test_both_clients_manage_routers_on_both_transports(running: TestEngine, client: Client, transport):
    async def work() -> list[str]:
        async with aio.connect(running.url, transport=transport) as other:
            await other.routers.create("s->d", "s", "d", filter="t*")
            await other.append("s", b"1", tag="tag")
            found = await other.routers.settle("s->d", SETTLE_S)
            assert (found.cursor, found.forwarded_total) == (1, 1)
            names = [router.router async for router in other.routers.list()]
            assert (await other.routers.get("s->d")).filter == ("tag", "Glob", "t*")
            assert await other.routers.delete("s->d")
            assert not await other.routers.delete("s->d")
            with contextlib.suppress(RouterNotFound):
                await other.routers.get("s->d")
                raise AssertionError("it was deleted")
            return names

    assert asyncio.run(work()) == ["s->d"]
    with ringlog.connect(running.url, transport=transport, wait=20) as plain:
        plain.routers.create("x->y", "x", "y")
        plain.append("x", b"2")
        plain.routers.settle("x->y", SETTLE_S)
        assert plain.read("y").bytes() == [b"2"]


def test_an_engine_without_schedulers_refuses_routers():
    with engine(delivery={"schedulers": 0}, gateway={"enabled": True}) as without:
        for transport in ("ring", "ipc"):
            with (
                ringlog.connect(without.url, transport=transport, wait=20) as found,
                pytest.raises(InvalidRequest, match="schedulers"),
            ):
                found.routers.create("s->d", "s", "d")
