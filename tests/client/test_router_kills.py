"""Kills of processes while routers work: every record arrives once and in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ringlog
from ringlog import stop_points
from ringlog.client import Client
from ringlog.client.read.pages import Page
from ringlog.errors import RinglogError
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.client_threads import BETWEEN, KILLS, ClientThread, shard_of
from tests.support.engines import engine_fixture
from tests.support.topic_contents import payloads

pytestmark = pytest.mark.slow

SETTLE_S = 40.0
CLASSES = ("fsync", "disk", "memory")

running = engine_fixture(wal={"shards": 2}, delivery={"schedulers": 2}, supervisor={"restart_max": 100})


class Writer(ClientThread):
    """Appends numbers to a topic, one after the other, until it is stopped."""

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(url)
        self._topic = topic
        self.sent = 0

    def work(self, client: Client) -> None:
        producer = client.producer(self._topic, linger_ms=0)
        while not self.is_stopped.is_set():
            producer.send(b"%d" % self.sent).result(60)
            self.sent += 1
        producer.close()


def pages(client: Client, topic: str) -> list[Page]:
    found = [client.read(topic, limit=1_000)]
    while not found[-1].caught_up:
        found.append(client.read(topic, found[-1].cursor, limit=1_000))
    return found


def head(client: Client, topic: str) -> int:
    try:
        return client.topics.state(topic, touch=False).head_seq
    except RinglogError:
        return 0


def under_kills(running: TestEngine, kill: Callable[[Client, int], None]) -> None:
    """Write to a source while `kill` runs, then check all destinations.

    Routers lead from the source to a topic of each durability class, and from one of them to another topic.
    """
    with ringlog.connect(running.url, wait=20, timeout_ms=60_000) as client:
        client.topics.create("s", durability="fsync")
        dests = [f"d-{name}" for name in CLASSES]
        for name, dest in zip(CLASSES, dests, strict=True):
            client.topics.create(dest, durability=name)
            client.routers.create(f"s->{dest}", "s", dest)
        client.topics.create("end", durability="fsync")
        client.routers.create("on", "d-fsync", "end")
        topics = [*dests, "end"]
        writer = Writer(running.url, "s")
        writer.start()
        for number in range(KILLS):
            wanted = head(client, "end") + BETWEEN

            def is_on(wanted: int = wanted) -> bool:
                return writer.error is not None or head(client, "end") >= wanted

            wait_until(is_on, SETTLE_S, "copies to arrive")
            kill(client, number)
        writer.stop()
        for name in ["s->" + dest for dest in dests] + ["on"]:
            client.routers.settle(name, 30)
        sent = [b"%d" % n for n in range(writer.sent)]
        assert payloads(client, "s") == sent
        for topic in topics:
            assert payloads(client, topic) == sent, topic
        assert {router.forwarded_total for router in client.routers.list()} == {len(sent)}


def test_kills_of_schedulers_lose_and_duplicate_no_copy(running: TestEngine):
    """The destination shards keep the cursors of routers, so no record is forwarded twice."""
    under_kills(running, lambda client, number: running.kill("scheduler", shard=number % 2))


def test_kills_of_the_source_shard_lose_and_duplicate_no_copy(running: TestEngine):
    under_kills(running, lambda client, _: running.kill("wal_shard", shard=shard_of(client, "s")))


def test_kills_of_destination_shards_lose_and_duplicate_no_copy(running: TestEngine):
    """The cursor of a router moves in the same frame as its copies (F1)."""

    def kill(client: Client, number: int) -> None:
        running.kill("wal_shard", shard=number % 2)

    under_kills(running, kill)


def test_routers_continue_after_an_engine_crash(running: TestEngine):
    """Records that were not forwarded before the crash are forwarded after the restart."""
    with ringlog.connect(running.url, wait=20, timeout_ms=60_000) as client:
        client.topics.create("s", durability="fsync")
        client.routers.create("s->d", "s", "d")
        sent = [b"%d" % n for n in range(5_000)]
        for start in range(0, len(sent), 1_000):
            client.append_many("s", sent[start : start + 1_000])
    running.crash()
    running.start()
    with ringlog.connect(running.url, wait=20, timeout_ms=60_000) as client:
        found = client.routers.settle("s->d", 30)
        assert (found.cursor, found.forwarded_total) == (len(sent), len(sent))
        assert payloads(client, "d") == sent


def test_records_after_the_loss_of_an_ephemeral_source_are_forwarded(running: TestEngine):
    """Lost seqs are not reused, so no new record is below the router's cursor."""
    with ringlog.connect(running.url, wait=20, timeout_ms=60_000) as client:
        client.topics.create("s", durability="ephemeral")
        client.routers.create("r", "s", "d")
        for life in range(3):
            for n in range(5):
                client.append("s", b"%d-%d" % (life, n))
            client.routers.settle("r", 30)
            running.kill("wal_shard", shard=shard_of(client, "s"))
        client.append("s", b"end")
        found = client.routers.settle("r", 30)
        assert found.forwarded_total == 3 * 5 + 1
        assert payloads(client, "d") == [b"%d-%d" % (life, n) for life in range(3) for n in range(5)] + [
            b"end"
        ]
        gaps = [page.tombstone for page in pages(client, "d") if page.tombstone is not None]
        assert [gap.reason for gap in gaps] == ["source_trim"] * 3


@pytest.mark.parametrize("point", [name for name in stop_points.POINTS if name.startswith("route_")])
def test_a_scheduler_may_die_at_every_stop_point(point: str):
    """The scheduler dies at the first and at the second time that it reaches the point."""
    plan = f"{point}:1:kill;{point}:2:kill"
    with (
        engine(
            wal={"shards": 2}, delivery={"schedulers": 1}, supervisor={"restart_max": 100},
            environ={"RINGLOG_TEST_STOP_POINTS": plan},
        ) as found,
        ringlog.connect(found.url, wait=20, timeout_ms=60_000) as client,
    ):  # fmt: skip
        client.topics.create("s", durability="disk")
        sent: list[bytes] = []
        for n in range(4):
            client.routers.create(f"r{n}", "s", f"d{n}")
            more = [b"%d" % i for i in range(500 * n, 500 * n + 500)]
            client.append_many("s", more)
            sent += more
            client.routers.settle(f"r{n}", 30)
        for n in range(4):
            client.routers.settle(f"r{n}", 30)
            assert payloads(client, f"d{n}") == sent[500 * n :]
            assert client.routers.get(f"r{n}").forwarded_total == len(sent) - 500 * n
        (restarts,) = [each.restarts for each in found.status().processes if each.kind == "scheduler"]
        assert restarts >= 2


def test_creating_a_router_survives_the_death_of_a_scheduler(running: TestEngine):
    """The client retries the request, and only one router is created."""
    with ringlog.connect(running.url, wait=20, timeout_ms=60_000) as client:
        for number in range(6):
            if number % 2:
                running.kill("scheduler", shard=0)
            made = client.routers.create(f"r{number}", "s", f"d{number}")
            assert made.cursor == 0
        assert [router.router for router in client.routers.list()] == [f"r{n}" for n in range(6)]
        running.kill("scheduler", shard=0)
        assert client.routers.delete("r0")
        client.append("s", b"x")
        for number in range(1, 6):
            client.routers.settle(f"r{number}", 30)
            assert payloads(client, f"d{number}") == [b"x"]
        assert payloads(client, "d0") == []
