"""Consumer groups through the public client, over rings and over the gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import ringlog
from ringlog.client import EARLIEST, LATEST, Client, Record
from ringlog.client.group import Group
from ringlog.errors import (
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    LeaseLost,
    TopicNotFound,
    UsageError,
)
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from ringlog.verify.directory import verify_directory
from tests.support.engines import client_fixture
from tests.support.queue_jobs import LONG_MS

pytestmark = pytest.mark.slow

client = client_fixture("ring", "ipc")


@pytest.fixture
def topic(client, ringlog_topic) -> str:
    name = ringlog_topic("log")
    client.topics.create(name, durability="fsync", lease_ms=LONG_MS)
    return name


def fill(client: Client, topic: str, count: int, **columns) -> None:
    client.append_many(topic, [b"record %d" % n for n in range(1, count + 1)], **columns)


def queue(client: Client, topic: str, **options) -> Group:
    return client.group(topic, "g", mode="queue", **options)


def seqs(jobs) -> list[int]:
    return [job.seq for job in jobs]


def test_members_share_records_that_stay_in_the_topic(client, topic):
    """Each member gets different records. An ack removes a record from the group, not from the topic."""
    fill(client, topic, 5)
    ann, bob = queue(client, topic, node="ann"), queue(client, topic, node="bob")
    mine, theirs = ann.claim(3), bob.claim(9)
    assert (seqs(mine), seqs(theirs)) == ([1, 2, 3], [4, 5])
    assert [job.data for job in mine] == [b"record 1", b"record 2", b"record 3"]
    assert mine[0].deliveries == 1
    mine[1].ack()
    stats = ann.stats()
    assert (stats.mode, stats.floor, stats.cursor, stats.in_flight, stats.lag) == ("queue", 0, 6, 4, 4)
    assert [(each.name, each.in_flight) for each in ann.members()] == [("ann", 2), ("bob", 2)]
    assert ann.ack([mine[0], mine[2]]).is_complete
    assert ann.stats().floor == 3
    with pytest.raises(LeaseLost):
        mine[1].ack()
    with pytest.raises(InvalidRequest):
        theirs[0].reject("there are no dead letters")
    assert bob.leave() == 2
    assert seqs(ann.claim(9)) == [4, 5]
    assert [record.seq for record in client.read(topic).records] == [1, 2, 3, 4, 5]


def test_jobs_of_a_group_work_as_context_managers_and_in_a_loop(client, topic):
    fill(client, topic, 3)
    group = queue(client, topic)
    found = []
    for job in group.jobs(max_in_flight=2):
        with job:
            found.append(job.text())
        if job.seq == 3:
            break
    assert found == ["record 1", "record 2", "record 3"]
    assert group.lag() == (0, 0)
    client.append(topic, b"bad")
    (job,) = group.claim()
    with pytest.raises(ZeroDivisionError), job:
        _ = 1 / 0
    (entry,) = group.pending()
    assert (entry.first_seq, entry.state, entry.deliveries, list(entry.seqs)) == (4, "delayed", 1, [4])


@pytest.mark.interpreted
def test_acks_are_sent_with_the_next_claim(client, topic, monkeypatch):
    """A group behaves like a queue here, and its records stay in the topic."""
    fill(client, topic, 6)
    group = queue(client, topic)
    sent: list[str] = []
    session = client._shell.session
    request_jobs = session.request_jobs
    jobs = group.claim(2)

    def counted(message, **how):
        sent.append(type(message).__name__)
        return request_jobs(message, **how)

    monkeypatch.setattr(session, "request_jobs", counted)
    found = seqs(jobs)
    while jobs := group.claim(2, done=jobs):
        found += seqs(jobs)
    assert found == [1, 2, 3, 4, 5, 6]
    assert sent == ["AckAndClaim"] * 3 if session.links.transport == "ring" else "Ack" in sent
    assert group.stats().floor == 6


def test_a_member_can_steal_records_from_an_idle_member(client, topic):
    """A stolen record has a new lease, and the previous holder's ack skips it."""
    fill(client, topic, 3)
    ann, bob = queue(client, topic, node="ann"), queue(client, topic, node="bob", min_idle_ms=1)
    lost = ann.claim(3)
    wait_until(lambda: bool(bob.pending(idle_ms=1)), 10, "a millisecond")
    assert bob.pending(node="ann", min_deliveries=2) == []
    stolen = bob.steal([2, 99])
    assert (seqs(stolen), stolen[0].deliveries, stolen[0].data) == ([2], 2, b"record 2")
    assert bob.steal([1], min_idle_ms=LONG_MS) == []
    assert bob.steal([]) == []
    assert ann.ack(lost).skipped == (2,)
    stolen[0].ack()
    client.append(topic, b"new")
    held = ann.claim(1)
    wait_until(lambda: bool(bob.pending(idle_ms=2)), 10, "two milliseconds")
    assert seqs(bob.claim(1)) == seqs(held), "there is nothing else"


def test_a_group_with_a_tag_filter_delivers_only_matching_records(client, topic):
    """The filter is part of the group's identity: the same name with another filter is another group."""
    for tag in ("eu.1", "us.1", "eu.2", None, "eu", "eu.3"):
        client.append(topic, b"x", **({"tag": tag} if tag else {}))
    group = queue(client, topic, tags="eu.*")
    assert group.name == "g@^eu."
    assert seqs(group.claim(2)) == [1]
    assert seqs(group.claim(2)) == [3]
    assert seqs(group.claim(9)) == [6]
    assert group.lag() == (0, 3)
    assert seqs(queue(client, topic, tags=["tag", "Eq", "eu"]).claim(9)) == [5]
    assert seqs(queue(client, topic).claim(9)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidRequest):
        queue(client, topic, tags=["tag", "Like", "x"])


def test_a_group_starts_and_seeks_at_positions_and_times(client, topic):
    """A new group starts at `start`. A seek ends all leases of the group."""
    fill(client, topic, 5)
    late = client.group(topic, "late", mode="queue", start=LATEST)
    assert late.claim(9) == []
    assert seqs(client.group(topic, "mid", mode="queue", start=4).claim(9)) == [4, 5]
    ago = datetime.now(UTC) - timedelta(hours=1)
    assert seqs(client.group(topic, "hour", mode="queue", start=ago).claim(9)) == [1, 2, 3, 4, 5]
    jobs = (group := queue(client, topic)).claim(4)
    assert group.seek(3) == 3
    assert group.ack(jobs).count == 0
    assert seqs(group.claim(9)) == [3, 4, 5]
    assert group.seek(LATEST) == 6
    assert group.seek(EARLIEST) == 1
    with pytest.raises(UsageError):
        group.seek(ringlog.client.STORED)
    assert group.delete()
    assert not group.delete()
    assert seqs(group.claim(1)) == [1], "made anew"


def test_what_is_wrong_is_said(client, topic, ringlog_topic):
    with pytest.raises(UsageError):
        client.group(topic, "g", mode="both")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        client.group(topic, "g", max_in_flight=-1)
    with pytest.raises(TopicNotFound):
        client.group(ringlog_topic("none"), "g", mode="queue").claim()
    with pytest.raises(InvalidRequest):
        client.group(topic, "not a name", mode="queue").claim()
    queue(client, topic).claim()
    with pytest.raises(GroupIncompatible):
        next(iter(client.group(topic, "g", mode="stream")))
    with pytest.raises(UsageError):
        queue(client, topic).commit()


def test_a_waiting_claim_gets_a_new_record(client, topic, ringlog_engine):
    group = queue(client, topic)
    found = []
    waiting = threading.Thread(target=lambda: found.extend(group.claim(wait_ms=20_000)))
    waiting.start()
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        theirs = queue(other, topic)
        wait_until(lambda: theirs.stats().waiting == 1, 10, "the claim to wait")
        other.append(topic, b"late")
    waiting.join(20)
    assert [job.data for job in found] == [b"late"]


def test_leases_are_extended_while_the_program_works(client, topic):
    """With `auto_extend` the client extends the lease until the job is settled."""
    fill(client, topic, 1)
    group = queue(client, topic)
    (job,) = group.claim(lease_ms=1_200, auto_extend=True)
    before = group.pending()[0].until
    wait_until(lambda: group.pending()[0].until > before + 0.3, 10, "two extensions")
    assert not job.lost.is_set()
    job.ack()


# -- streams ----------------------------------------------------------------------------------------------


def take(stream: Iterator, count: int) -> list[int]:
    found = []
    for item in stream:
        assert isinstance(item, Record)
        found.append(item.seq)
        if len(found) == count:
            break
    return found


def test_a_stream_continues_after_its_last_commit(client, topic):
    """An iteration commits a record only after the program requested the next one."""
    fill(client, topic, 6)
    group = client.group(topic, "s")
    assert take(group.records(auto_commit_ms=0), 4) == [1, 2, 3, 4]
    assert group.stats().floor == 3, "the fourth was not done"
    assert group.lag() == (3, 0)
    stream = group.records(auto_commit_ms=None)
    assert [next(stream).seq for _ in range(2)] == [4, 5]
    with pytest.raises(UsageError):
        group.commit(6)
    group.commit(4)
    group.commit()
    stream.close()
    assert group.stats().floor == 5
    client.append(topic, b"7")
    assert take(group.records(), 2) == [6, 7]


def test_a_stream_commits_before_it_waits(client, topic):
    fill(client, topic, 3)
    group = client.group(topic, "s")
    found: list[int] = []

    def read() -> None:
        for record in group:
            found.append(record.seq)
            if len(found) == 4:
                return

    reading = threading.Thread(target=read)
    reading.start()
    other = client.group(topic, "s")
    wait_until(lambda: other.stats().floor == 3, 10, "the commit before the wait")
    client.append(topic, b"4")
    reading.join(20)
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize("closes", ["group", "client"])
def test_closing_a_stream_commits_what_was_processed(running, client, topic, closes):
    """The record of the last step is delivered again: the program did not ask for the next one."""
    fill(client, topic, 5)
    with ringlog.connect(running.url, transport=client.transport) as reading:
        group = reading.group(topic, "g")
        stream = group.records(auto_commit_ms=60_000)
        assert take(stream, 3) == [1, 2, 3]
        (group if closes == "group" else reading).close()
        assert list(stream) == []
    assert take(client.group(topic, "g").records(), 2) == [3, 4]


def test_closing_a_stream_without_automatic_commits_commits_nothing(client, topic):
    fill(client, topic, 3)
    group = client.group(topic, "g")
    assert take(group.records(auto_commit_ms=None), 3) == [1, 2, 3]
    group.close()
    assert group.stats().floor == 0


def test_the_latest_reader_of_a_stream_fences_the_earlier_one(client, topic):
    fill(client, topic, 4)
    first, second = (client.group(topic, "s", node=node) for node in ("a", "b"))
    stream = first.records(auto_commit_ms=None)
    assert next(stream).seq == 1
    other = second.records(auto_commit_ms=None)
    assert next(other).seq == 1
    with pytest.raises(LeaseLost):
        first.commit(1)
    second.commit(1)
    assert second.stats().holder == "b"
    second.seek(0)
    with pytest.raises(UsageError):
        second.commit(1)
    assert list(other) == [], "it was told to be elsewhere"
    stream.close()


def test_a_stream_with_a_tag_filter_delivers_only_matching_records(client, topic):
    for n, tag in enumerate(("a", "b", "a", "b")):
        client.append(topic, b"%d" % n, tag=tag)
    group = client.group(topic, "s", tags="b")
    assert take(group.records(), 2) == [2, 4]


# -- when things die --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_groups_survive_kills_of_shard_and_gateway(transport):
    """An acked job does not return, an unacked one does, and leases survive the kill."""
    with engine(wal={"shards": 2}, gateway={"enabled": True}) as running:
        options = {"wait": 20, "timeout_ms": 20_000, "transport": transport}
        with ringlog.connect(running.url, **options) as client:
            client.topics.create("t", durability="fsync", lease_ms=LONG_MS)
            fill(client, "t", 6)
            group = client.group("t", "g", mode="queue")
            stream_group = client.group("t", "s")
            stream = stream_group.records(auto_commit_ms=0)
            assert [next(stream).seq for _ in range(3)] == [1, 2, 3]
            jobs = group.claim(4)
            jobs[0].ack()
            for actor in ("wal_shard", "gateway"):
                running.kill(actor)
                running.wait_ready(actor)
                assert group.ack([jobs[1]]).count in {0, 1}
            assert group.stats().floor == 2
            jobs[2].ack()
            assert seqs(group.claim(9)) == [5, 6]
            assert next(stream).seq == 4
            stream_group.commit()
            assert stream_group.stats().floor == 4
        running.stop()
        assert not verify_directory(running.data_dir, is_deep=True).is_damaged


def test_calls_of_a_deleted_group_fail_with_group_not_found(client, topic):
    fill(client, topic, 2)
    group = queue(client, topic)
    (job,) = group.claim()
    queue(client, topic).delete()
    with pytest.raises(GroupNotFound):
        job.ack()
