"""Routed copies, read in every way.

The copies are in the log and in segments. They are mapped, requested by message, watched, and verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import ringlog
from ringlog.cli.app import run
from ringlog.cli.outcome import CliExit
from ringlog.client import CaughtUp, Client, NewRecord, Page
from ringlog.client.read.tail_batch import TailBatch
from ringlog.limits import ROUTER_HOPS_MAX
from ringlog.testing.real_engine import TestEngine
from tests.support.checkpoints import checkpoint
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

SETTLE_S = 20.0
DESTS = [f"d{n}" for n in range(6)]

running = engine_fixture(
    "module",
    wal={"shards": 2},
    delivery={"schedulers": 1},
    gateway={"enabled": True},
    storage={"enabled": True},
)


@pytest.fixture(scope="module")
def client(running: TestEngine) -> Iterator[Client]:
    """A source with some thousand records that routers copy to six topics.

    Half of the records are in segments.
    """
    with ringlog.connect(running.url, wait=20) as found:
        for dest in DESTS:
            found.routers.create(f"s->{dest}", "s", dest)
        _fill(found, 0)
        checkpoint(running)
        _fill(found, 2_000)
        yield found


def _fill(client: Client, first: int) -> None:
    for start in range(first, first + 2_000, 100):
        records = [NewRecord(data=b"%d" % n, tag=f"t{n % 5}") for n in range(start, start + 100)]
        client.append_many("s", records)
    for dest in DESTS:
        client.routers.settle(f"s->{dest}", SETTLE_S)


def read(client: Client, topic: str, **options) -> list[bytes]:
    found: list[bytes] = []
    page = client.read(topic, limit=700, **options)
    while not (found.extend(page.bytes()) or page.caught_up):
        page = client.read(topic, page.cursor, limit=700, **options)
    return found


SENT = [b"%d" % n for n in range(4_000)]


def test_pages_contain_the_copies_with_every_transport(running: TestEngine, client: Client):
    for dest in DESTS[:3]:
        assert read(client, dest) == SENT
    with ringlog.connect(running.url, transport="ipc", wait=20) as remote:
        assert read(remote, "d1") == SENT
        assert read(remote, "d1", tags="t3") == [data for data in SENT if int(data) % 5 == 3]
        assert remote.read("d1", 3_990).records[0].seq == 3_991


def test_a_tailer_returns_copies_without_copying_them(client: Client):
    found: list[bytes] = []
    with client.tailer("d2", follow=False) as tailer:
        for item in tailer:
            assert isinstance(item, TailBatch)
            assert [bytes(view) for view in item.memoryviews()] == item.bytes()
            assert item.seqs.tolist() == [record.seq for record in item.records()]
            assert len(item.arrow()) == len(item)
            found += item.bytes()
    assert found == SENT


def test_a_watch_of_a_destination_is_notified_of_copies(client: Client):
    """The scheduler grants the new copy to the watch of the destination."""
    with client.watch({"d3": len(SENT) + 1}) as watch:
        assert watch.next(SETTLE_S) == CaughtUp("d3", len(SENT))
        client.append("s", b"4000", tag="t0")
        event = watch.next(SETTLE_S)
    assert isinstance(event, Page)
    assert event.bytes() == [b"4000"]


def test_copies_have_their_own_commit_time_and_are_found_by_it(client: Client):
    before = datetime.now(UTC)
    client.append("s", b"4001", tag="t1")
    client.routers.settle("s->d4", SETTLE_S)
    assert client.read("d4", start=before).bytes() == [b"4001"]


def test_deletes_in_a_destination_find_copies_in_segments_and_log(client: Client):
    """Copies in other destinations and records of the source stay."""
    deleted = client.topics.delete_records("d5", match="t2")
    assert deleted.deleted == 800
    kept = [data for data in SENT if int(data) % 5 != 2]
    assert read(client, "d5")[: len(kept)] == kept
    assert read(client, "d0")[: len(SENT)] == SENT


def test_compaction_keeps_the_hop_count_of_copies(running: TestEngine, client: Client):
    """The hop count is the same in the log and in segments, so a copy at the limit is not forwarded again."""
    last = ROUTER_HOPS_MAX - 1
    for n in range(last):
        client.routers.create(f"hop{n}", f"h{n}", f"h{n + 1}")
    client.append("h0", b"far")
    for n in range(last):
        client.routers.settle(f"hop{n}", SETTLE_S)
    client.topics.create("full", discard="reject", cap_records=1)
    client.append("full", b"in the way")
    client.routers.create("late", f"h{last}", "full")
    client.routers.create("behind", "full", "end")
    assert client.routers.delete("hop0")
    client.append(f"h{last}", b"near")
    client.routers.create("again", "h0", "h1")
    client.append("h0", b"far again")
    client.routers.settle("again", SETTLE_S)
    for n in range(1, last):
        client.routers.settle(f"hop{n}", SETTLE_S)
    checkpoint(running)
    client.topics.configure("full", cap_records=0)
    client.routers.settle("late", SETTLE_S)
    client.routers.settle("behind", SETTLE_S)
    assert read(client, "full") == [b"in the way", b"near", b"far again"]
    assert read(client, "end") == [b"near"]


def test_offline_verification_finds_every_copy(
    running: TestEngine, client: Client, capsys: pytest.CaptureFixture[str]
):
    """The independent decoder reports no damage and the same heads as the engine."""
    heads = {topic.topic: topic.head_seq for topic in client.topics.list()}
    running.stop()
    capsys.readouterr()
    code = run(["verify", str(Path(running.data_dir)), "--deep", "--output", "json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["damaged"], found["findings"]) == (CliExit.DONE, False, [])
    assert {topic["topic"]: topic["head"] for topic in found["topics"]} == heads
