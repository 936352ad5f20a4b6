"""Redrive of dead letters of queues: selection, limits, and no duplicates after crashes."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

import ringlog
import ringlog.aio
from ringlog.client.queue import Queue
from ringlog.client.read.pages import Record
from ringlog.errors import InvalidRequest, RinglogError, TopicFull, UsageError
from ringlog.limits import META_BYTES_MAX
from ringlog.testing.real_engine import wait_until
from tests.support.engines import client_fixture
from tests.support.redrive_engine import half_way, lose_power

MOVED_S = 30.0

client = client_fixture("ring", "ipc")


@pytest.fixture
def queue(client, ringlog_topic) -> Queue:
    name = ringlog_topic("queue")
    client.topics.create(name, type="queue", durability="fsync", dead_letter=ringlog_topic("dead"))
    return client.queue(name)


def reject_all(queue: Queue, reason: str = "no use") -> None:
    before = queue.stats()
    for job in (jobs := queue.claim(100)):
        job.reject(reason)
    done = before.dead_lettered + len(jobs)
    wait_until(lambda: queue.stats().dead_lettered == done, MOVED_S, "the jobs to be moved")


def letters(queue: Queue) -> list[Record]:
    return [item for item in queue.dead_letters() if isinstance(item, Record)]


def ready(queue: Queue) -> list[tuple[bytes, dict[str, Any]]]:
    return [(job.data, job.meta) for job in queue.claim(100)]


def test_a_redrive_returns_the_queues_own_letters_with_all_their_fields(queue, client, ringlog_topic):
    other = client.queue(ringlog_topic("other"))
    client.topics.create(other.topic, type="queue", dead_letter=ringlog_topic("dead"))
    queue.put(b"one", key=b"k", tag="t", node="n", meta={"own": 1}, headers={"h": b"v"}, priority=2)
    queue.put(b"two")
    other.put(b"not ours")
    reject_all(queue)
    reject_all(other)
    assert [(each.data, each.meta["$dead_letter_reason"]) for each in letters(queue)] == [
        (b"one", "no use"), (b"two", "no use"),
    ]  # fmt: skip
    report = queue.redrive()
    assert (report.topic, report.dead_letter, report.moved, report.repeated) == (
        queue.topic, ringlog_topic("dead"), 2, 0,
    )  # fmt: skip
    assert letters(queue) == []
    assert [each.data for each in letters(other)] == [b"not ours"]
    one, two = queue.claim(9)
    assert (one.data, one.key, one.tag, one.record.node, one.record.priority, dict(one.headers)) == (
        b"one", b"k", "t", "n", 2, {"h": b"v"},
    )  # fmt: skip
    assert one.meta["own"] == 1
    assert (one.meta["$dead_letter_from"], one.meta["$dead_letter_src_seq"]) == (queue.topic, "1")
    assert (one.deliveries, two.data) == (1, b"two")
    two.reject("again")
    wait_until(lambda: len(letters(queue)) == 1, MOVED_S, "the job to be moved once more")
    assert letters(queue)[0].meta["$dead_letter_reason"] == "again"
    assert letters(queue)[0].meta["$dead_letter_src_seq"] == str(two.seq)


def test_some_come_back_by_number_by_what_they_are_and_by_how_many(queue):
    queue.put_many([b"%d" % n for n in range(1, 11)])
    reject_all(queue)
    seqs = {int(each.data): each.seq for each in letters(queue)}
    assert queue.redrive([seqs[3], seqs[5], 1 << 40]).moved == 2
    assert queue.redrive(lambda record: record.data in {b"7", b"8", b"9"}, limit=2).moved == 2
    assert queue.redrive(limit=0).moved == 0
    assert sorted(int(data) for data, _ in ready(queue)) == [3, 5, 7, 8]
    assert sorted(int(each.data) for each in letters(queue)) == [1, 2, 4, 6, 9, 10]
    began = time.monotonic()
    assert queue.redrive(rate=20).moved == 6
    assert time.monotonic() - began >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_crash_between_copy_and_deletion_duplicates_no_letter(how: str, tmp_path):
    """A redriven letter is deleted only after its copy is durable in its queue (Q9).

    After the crash both exist, and the repeated redrive recognises the copies.
    """
    with half_way(how, tmp_path / "e") as (found, client):
        client.topics.create("q", type="queue", durability="fsync", dead_letter="dead")
        client.topics.create("dead", durability="fsync")
        queue = client.queue("q")
        queue.put_many([b"%d" % n for n in range(20)])
        reject_all(queue)
        with suppress(RinglogError):
            queue.redrive()
        if how == "power":
            assert queue.stats().ready == 20
            assert len(letters(queue)) == 20
            lose_power(found)
        deadline = time.monotonic() + MOVED_S
        while letters(queue) and time.monotonic() < deadline:
            with suppress(RinglogError):
                assert queue.redrive().repeated in {0, 20}
        assert letters(queue) == []
        assert sorted(int(data) for data, _ in ready(queue)) == list(range(20))


def test_letters_that_do_not_fit_into_the_queue_stay_dead_letters(queue, client):
    queue.put_many([b"a", b"b", b"c"])
    reject_all(queue)
    client.topics.configure(queue.topic, cap_records=2, discard="reject")
    with pytest.raises(TopicFull):
        queue.redrive()
    assert queue.stats().ready == 2
    assert [each.data for each in letters(queue)] == [b"c"]
    client.topics.configure(queue.topic, cap_records=3)
    assert queue.redrive().moved == 1
    assert queue.stats().ready == 3


def test_what_cannot_be_redriven_is_said(queue, client, ringlog_topic):
    assert letters(queue) == []
    assert queue.redrive().moved == 0, "nothing ever died, so the other topic is not there"
    client.topics.create(ringlog_topic("plain"), type="queue")
    plain = client.queue(ringlog_topic("plain"))
    with pytest.raises(InvalidRequest):
        plain.redrive()
    with pytest.raises(InvalidRequest):
        plain.dead_letters()
    with pytest.raises(UsageError):
        queue.redrive(limit=-1)
    with pytest.raises(UsageError):
        queue.redrive(rate=0)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_letters_come_back_with_asyncio(ringlog_engine, ringlog_topic, transport):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        await client.topics.create(ringlog_topic("q"), type="queue", dead_letter=ringlog_topic("dead"))
        queue = client.queue(ringlog_topic("q"))
        await queue.put_many([b"a", b"b", b"c"])
        for job in await queue.claim(9):
            await job.reject("no use")
        found: list[Record] = []
        deadline = time.monotonic() + MOVED_S
        while len(found) < 3 and time.monotonic() < deadline:
            found = [item async for item in queue.dead_letters() if isinstance(item, Record)]
        assert [each.data for each in found] == [b"a", b"b", b"c"]
        assert (await queue.redrive(limit=1)).moved == 1
        assert (await queue.redrive()).moved == 2
        assert [job.data for job in await queue.claim(9)] == [b"a", b"b", b"c"]
        with pytest.raises(UsageError):
            await queue.redrive(rate=-1)


def test_a_letter_that_cannot_be_a_job_holds_up_no_other(queue, client, ringlog_topic):
    """A router stamped it, so that its metadata is larger than a client may write."""
    source, dead = ringlog_topic("source"), ringlog_topic("dead")
    queue.put(b"first")
    reject_all(queue)
    client.routers.create(source, source, dead, guarantee="exactly_once")
    meta = {"$dead_letter_from": queue.topic, "large": "x" * (META_BYTES_MAX - len(queue.topic) - 40)}
    client.append(source, b"large", meta=meta)
    client.routers.settle(source)
    queue.put(b"last")
    reject_all(queue)
    with pytest.raises(InvalidRequest, match="meta too long"):
        queue.redrive()
    assert [data for data, _ in ready(queue)] == [b"first", b"last"]
    assert [each.data for each in letters(queue)] == [b"large"]
