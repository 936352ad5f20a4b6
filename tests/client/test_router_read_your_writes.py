"""A client that received the ack of a source record finds its copy in the destinations of the routers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import ringlog
import ringlog.aio
from ringlog.client import Client
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine
from tests.support.machine import suspended

pytestmark = pytest.mark.slow

ROUNDS = 60
CHAIN = 3


@pytest.fixture(scope="module", params=[1, 3])
def running(request: pytest.FixtureRequest) -> Iterator[TestEngine]:
    """Run with one and with several schedulers: the queried scheduler may not have the router."""
    with engine(
        wal={"shards": 2}, delivery={"schedulers": request.param}, gateway={"enabled": True}
    ) as found:
        yield found


@pytest.fixture(scope="module", params=["ring", "ipc"])
def client(request: pytest.FixtureRequest, running: TestEngine) -> Iterator[Client]:
    with ringlog.connect(running.url, transport=request.param, wait=20) as found:
        yield found


def named(client: Client, name: str) -> str:
    """Return a topic name of this client, because several clients use the engine."""
    return f"{client.transport}-{name}"


def test_a_read_to_the_head_finds_the_copies_of_acked_records(client: Client):
    source, dest = named(client, "s"), named(client, "d")
    client.routers.create(f"{source}->{dest}", source, dest)
    for n in range(ROUNDS):
        client.append(source, b"%d" % n)
        assert client.read(dest, n).bytes() == [b"%d" % n]
        assert client.topics.state(dest).head_seq == n + 1
    with client.reader(dest) as reader:
        client.append(source, b"more")
        assert len([record for page in reader.pages() for record in page.records]) == ROUNDS + 1


def test_a_read_finds_copies_through_a_chain_of_routers(client: Client):
    names = [named(client, f"chain-{n}") for n in range(CHAIN + 1)]
    for n in range(CHAIN):
        client.routers.create(f"{names[n]}->", names[n], names[n + 1])
    for n in range(ROUNDS // 3):
        client.append(names[0], b"%d" % n)
        assert client.read(names[-1], n).bytes() == [b"%d" % n]


def test_a_read_also_waits_for_records_that_the_filter_skips(client: Client):
    source, dest = named(client, "f"), named(client, "filtered")
    client.routers.create(f"{source}->{dest}", source, dest, filter="a*")
    for n in range(ROUNDS // 3):
        client.append(source, b"%d" % n, tag="ab" if n % 2 else "b")
        assert client.read(dest).bytes() == [b"%d" % each for each in range(1, n + 1, 2)]


def test_a_read_finds_copies_in_a_more_durable_destination(client: Client):
    """The router forwards only records that are durable in the source, so the read waits for their sync."""
    source, dest = named(client, "weak"), named(client, "durable")
    client.topics.create(source, durability="disk")
    client.topics.create(dest, durability="fsync")
    client.routers.create(f"{source}->{dest}", source, dest)
    for n in range(5):
        client.append(source, b"%d" % n)
        assert client.read(dest, n).bytes() == [b"%d" % n]


def test_a_read_of_a_full_destination_does_not_wait(client: Client):
    """The copies cannot arrive until an operator makes room. Then reads find them."""
    source, dest = named(client, "much"), named(client, "full")
    client.topics.create(dest, discard="reject", cap_records=2)
    client.routers.create(f"{source}->{dest}", source, dest)
    client.append_many(source, [b"1", b"2"])
    assert client.read(dest).bytes() == [b"1", b"2"]
    client.append(source, b"3")
    assert client.read(dest).bytes() == [b"1", b"2"]
    client.topics.configure(dest, cap_records=0)
    client.routers.settle(f"{source}->{dest}", 20.0)
    assert client.read(dest).bytes() == [b"1", b"2", b"3"]


def test_a_claim_without_waiting_finds_the_forwarded_job(client: Client):
    source, dest, log = named(client, "orders"), named(client, "jobs"), named(client, "log")
    client.topics.create(dest, type="queue")
    client.routers.create(f"{source}->{dest}", source, dest)
    client.routers.create(f"{source}->{log}", source, log)
    group = client.group(log, "g", mode="queue")
    for n in range(ROUNDS // 3):
        client.append(source, b"%d" % n)
        for worker in (client.queue(dest), group):
            [job] = worker.claim()
            assert job.data == b"%d" % n
            job.ack()


def test_a_destination_without_router_is_read_like_any_other_topic(client: Client):
    source, dest = named(client, "once"), named(client, "fed")
    client.routers.create(f"{source}->{dest}", source, dest)
    client.append(source, b"1")
    assert client.read(dest).bytes() == [b"1"]
    assert client.routers.delete(f"{source}->{dest}")
    client.append(source, b"2")
    client.append(dest, b"3")
    assert client.read(dest).bytes() == [b"1", b"3"]


def test_an_open_reader_notices_a_new_router_to_its_topic(client: Client):
    source, dest = named(client, "late"), named(client, "fed-late")
    client.append(dest, b"direct")
    with client.reader(dest) as reader:
        assert [page.bytes() for page in reader.pages()] == [[b"direct"]]
        client.routers.create(f"{source}->{dest}", source, dest)
        client.append(source, b"copy")
        assert [page.bytes() for page in reader.pages()] == [[b"copy"]]


def test_the_asyncio_client_finds_the_copies(client: Client, running: TestEngine):
    source, dest = named(client, "as"), named(client, "ad")
    client.routers.create(f"{source}->{dest}", source, dest)

    async def work() -> None:
        async with ringlog.aio.connect(running.url, transport=client.transport) as found:
            for n in range(ROUNDS // 3):
                await found.append(source, b"%d" % n)
                page = await found.read(dest, n)
                assert page.bytes() == [b"%d" % n]

    asyncio.run(work())


def test_a_tailer_without_follow_finds_the_copies(running: TestEngine):
    with ringlog.connect(running.url, wait=20) as client:
        client.routers.create("tailed", "ts", "td")
        for n in range(10):
            client.append("ts", b"%d" % n)
            with client.tailer("td", follow=False) as tailer:
                found = [data for batch in tailer for data in batch.bytes()]
            assert found == [b"%d" % each for each in range(n + 1)]


def test_a_suspended_scheduler_blocks_no_read(running: TestEngine):
    with ringlog.connect(running.url, wait=20) as client:
        client.routers.create("stood", "ss", "sd")
        client.append("ss", b"1")
        assert client.read("sd").bytes() == [b"1"]
        with suspended(running.pid_of("scheduler")):
            client.append("ss", b"2")
            assert client.read("sd").bytes() in ([b"1"], [b"1", b"2"])
        client.routers.settle("stood", 20.0)
        assert client.read("sd").bytes() == [b"1", b"2"]
