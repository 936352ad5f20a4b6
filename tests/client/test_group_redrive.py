"""Redrive of the dead letters of consumer groups.

Only the group that gave up a record gets it again, and only once, even if a process dies in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import ringlog
import ringlog.aio
from ringlog.client import EARLIEST, Client
from ringlog.client.group import Group
from ringlog.client.read.pages import Record
from ringlog.errors import InvalidRequest, RinglogError, UsageError
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import client_fixture
from tests.support.redrive_engine import half_way, lose_power

MOVED_S = 30.0
TopicName = Callable[[str], str]

client = client_fixture("ring", "ipc")


@pytest.fixture
def group(client: Client, ringlog_topic: TopicName) -> Group:
    client.topics.create(ringlog_topic("orders"), durability="fsync")
    return client.group(ringlog_topic("orders"), "billing", mode="queue", dead_letter=ringlog_topic("dead"))


def reject(group: Group, most: int = 100) -> None:
    """Reject all records that can be claimed, and wait until they are in the dead-letter topic."""
    for job in group.claim(most):
        group.reject(job, "no use")
    wait_until(lambda: group.stats().exhausted == 0, MOVED_S, "the records to be moved")


def letters(group: Group) -> list[Record]:
    return [item for item in group.dead_letters() if isinstance(item, Record)]


def given(group: Group) -> list[tuple[int, bytes, int]]:
    return [(job.seq, job.data, job.deliveries) for job in group.claim(100)]


def test_a_redrive_delivers_records_only_to_the_group_that_gave_them_up(
    group: Group, client: Client, ringlog_topic: TopicName
) -> None:
    other = client.group(group.topic, "audit", mode="queue", dead_letter=ringlog_topic("dead"))
    queue = ringlog_topic("q")
    client.topics.create(queue, type="queue", dead_letter=ringlog_topic("dead"))
    client.append_many(group.topic, [b"a", b"b", b"c"])
    client.queue(queue).put(b"job")
    (job,) = client.queue(queue).claim()
    job.reject("another one's")
    reject(group, 2)
    reject(other)
    assert [(each.data, each.meta["$dead_letter_src_seq"]) for each in letters(group)] == [
        (b"a", "1"), (b"b", "2"),
    ]  # fmt: skip
    report = group.redrive()
    assert (report.topic, report.dead_letter) == (group.topic, ringlog_topic("dead"))
    assert (report.moved, report.repeated, report.gone) == (2, 0, 0)
    assert letters(group) == []
    assert [each.data for each in letters(other)] == [b"a", b"b", b"c"]
    assert given(group) == [(1, b"a", 1), (2, b"b", 1), (3, b"c", 1)]
    assert given(other) == []
    assert client.topics.state(group.topic).count == 3
    wait_until(lambda: len(list(client.queue(queue).dead_letters())) == 1, MOVED_S, "the queue's own one")


def test_some_come_back_by_number_by_what_they_are_and_by_how_many(group: Group, client: Client) -> None:
    """The number of letters exceeds one request."""
    client.append_many(group.topic, [b"%d" % n for n in range(1, 101)])
    reject(group)
    seqs = {int(each.data): each.seq for each in letters(group)}
    assert len(seqs) == 100
    assert group.redrive([seqs[3], seqs[5], 1 << 40]).moved == 2
    assert group.redrive(lambda record: record.data in {b"7", b"8", b"9"}, limit=2).moved == 2
    assert group.redrive(limit=0).moved == 0
    assert [int(data) for _, data, _ in given(group)] == [3, 5, 7, 8]
    assert group.redrive().moved == 96
    assert len(given(group)) == 96


def test_a_record_that_is_given_up_again_gets_another_dead_letter(group: Group, client: Client) -> None:
    """This also holds after the group seeks back.

    The dead letter of an earlier lease is no duplicate of a later one.
    """
    client.append(group.topic, b"a")
    reject(group)
    assert group.redrive().moved == 1
    reject(group)
    wait_until(lambda: len(letters(group)) == 1, MOVED_S, "the letter of the second time")
    group.seek(EARLIEST)
    reject(group)
    wait_until(lambda: len(letters(group)) == 2, MOVED_S, "the letter of the third time")
    assert group.redrive().moved == 2, "two letters of one record"
    assert given(group) == [(1, b"a", 1)]


def test_dead_letters_of_deleted_records_stay(group: Group, client: Client) -> None:
    client.append_many(group.topic, [b"a", b"b", b"c"])
    reject(group)
    client.topics.delete_records(group.topic, before_seq=3)
    report = group.redrive()
    assert (report.moved, report.gone) == (1, 2)
    assert [each.data for each in letters(group)] == [b"a", b"b"]
    assert given(group) == [(3, b"c", 1)]


def test_dead_letters_of_an_earlier_life_of_the_topic_stay(
    group: Group, client: Client, ringlog_topic: TopicName
) -> None:
    """The same seq belongs to another record in the recreated topic."""
    client.append(group.topic, b"old")
    reject(group)
    client.topics.delete(group.topic)
    client.topics.create(group.topic)
    client.append(group.topic, b"new")
    again = client.group(group.topic, "billing", mode="queue", dead_letter=ringlog_topic("dead"))
    again.ack(again.claim())
    report = again.redrive()
    assert (report.moved, report.gone) == (0, 1)
    assert given(again) == []
    assert [each.data for each in letters(again)] == [b"old"]


def test_forged_dead_letters_deliver_nothing(group: Group, client: Client, ringlog_topic: TopicName) -> None:
    """Invalid seqs in their metadata count as records that do not exist."""
    client.append_many(group.topic, [b"a", b"b"])
    reject(group, 1)
    (letter,) = letters(group)
    for forged in ("0", "-1", "9" * 19, "9" * 5_000, "two", "", "½"):
        meta = {**letter.meta, "$dead_letter_src_seq": forged}
        with suppress(RinglogError):
            client.append(ringlog_topic("dead"), b"forged", meta=meta)
    forged_letters = len(letters(group)) - 1
    report = group.redrive()
    assert (report.moved, report.gone) == (1, forged_letters)
    assert [data for _, data, _ in given(group)] == [b"a", b"b"]


def test_what_cannot_be_redriven_is_said(group: Group, client: Client) -> None:
    assert letters(group) == []
    assert group.redrive().moved == 0, "nothing ever died, so the other topic is not there"
    plain = client.group(group.topic, "plain", mode="queue")
    stream = client.group(group.topic, "stream", mode="stream")
    for without in (plain, stream):
        with pytest.raises(InvalidRequest, match="no dead-letter topic"):
            without.redrive()
        with pytest.raises(InvalidRequest, match="no dead-letter topic"):
            without.dead_letters()
    with pytest.raises(UsageError):
        group.redrive(limit=-1)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_letters_come_back_with_asyncio(
    ringlog_engine: TestEngine, ringlog_topic: TopicName, transport: Any
) -> None:
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        await client.topics.create(ringlog_topic("t"))
        group = client.group(ringlog_topic("t"), "g", mode="queue", dead_letter=ringlog_topic("dead"))
        await client.append_many(ringlog_topic("t"), [b"a", b"b"])
        for job in await group.claim(9):
            await job.reject("no use")
        found: list[Record] = []
        deadline = time.monotonic() + MOVED_S
        while len(found) < 2 and time.monotonic() < deadline:
            found = [item async for item in group.dead_letters() if isinstance(item, Record)]
        assert [each.data for each in found] == [b"a", b"b"]
        assert (await group.redrive(limit=1)).moved == 1
        assert (await group.redrive()).moved == 1
        assert [job.data for job in await group.claim(9)] == [b"a", b"b"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_redrive_delivers_nothing_twice_after_a_crash_before_the_deletion(how: str, tmp_path: Any) -> None:
    """The group has the records while their dead letters still exist.

    A repeated redrive delivers no record that was acked.
    """
    with half_way(how, tmp_path / "e") as (found, client):
        client.topics.create("t", durability="fsync")
        client.topics.create("dead", durability="fsync")
        group = client.group("t", "g", mode="queue", dead_letter="dead")
        client.append_many("t", [b"%d" % n for n in range(20)])
        reject(group)
        with suppress(RinglogError):
            group.redrive()
        if how == "power":
            assert len(letters(group)) == 20
            assert group.ack(group.claim(100)).count == 20
            lose_power(found)
        deadline = time.monotonic() + MOVED_S
        while letters(group) and time.monotonic() < deadline:
            with suppress(RinglogError):
                assert group.redrive().repeated in {0, 20}
        assert letters(group) == []
        assert len(given(group)) == (20 if how == "kill" else 0)
