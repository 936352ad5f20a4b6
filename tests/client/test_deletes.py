"""Deletes, caps, TTL and seeking by time through the public client, over rings and over the gateway."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ringlog.client import Tombstone
from ringlog.errors import InvalidRequest, TopicNotFound, UsageError
from ringlog.testing.real_engine import wait_until
from tests.support.engines import client_fixture

WAIT_S = 20.0

other = client_fixture("ring", "ipc")


def filled(client, topic, count=20):
    for n in range(1, count + 1):
        client.append(topic, b"%d" % n, tag="even" if n % 2 == 0 else "odd")
    return topic


def seqs(client, topic, start=1, **options):
    return [record.seq for record in client.reader(topic, start, **options)]


def test_a_delete_is_visible_to_all_readers_when_it_returns(client, other, ringlog_topic):
    """A repeated delete deletes nothing. Deletes cause no tombstone."""
    topic = filled(client, ringlog_topic())
    done = other.topics.delete_records(topic, before_seq=5)
    assert (done.topic, done.deleted, done.earliest_seq, done.head_seq, done.count) == (topic, 4, 5, 20, 16)
    for reader in (client, other):
        assert seqs(reader, topic) == list(range(5, 21))
        assert reader.read(topic).tombstone is None
    again = other.topics.delete_records(topic, before_seq=5)
    assert (again.deleted, again.count) == (0, 16)


def test_a_delete_by_tag_removes_only_matching_records(client, other, ringlog_topic):
    """The match is exact, by prefix, or a filter list. It never matches untagged records."""
    topic = filled(client, ringlog_topic())
    client.append(topic, b"untagged")
    assert other.topics.delete_records(topic, before_seq=11, match="even").deleted == 5
    assert seqs(client, topic) == [1, 3, 5, 7, 9, *range(11, 22)]
    assert other.topics.delete_records(topic, match="od*").deleted == 10
    assert seqs(other, topic) == [12, 14, 16, 18, 20, 21]
    assert other.topics.delete_records(topic, match=["tag", "Glob", "*"]).deleted == 5
    assert seqs(client, topic) == seqs(other, topic) == [21]
    assert client.topics.state(topic).count == 1


def test_a_delete_keeps_records_that_are_written_later(client, other, ringlog_topic):
    """This includes later records with the same tag."""
    topic = filled(client, ringlog_topic(), 4)
    other.topics.delete_records(topic, match="even")
    assert client.append(topic, b"5", tag="even").first_seq == 5
    assert seqs(other, topic) == [1, 3, 5]


def test_a_reader_does_not_return_records_deleted_while_it_reads(client, other, topic):
    """This includes records that the reader has already read ahead."""
    client.append_many(topic, [b"%d" % n for n in range(1, 2001)])
    pages = other.reader(topic).pages(10)
    assert [record.seq for record in next(pages).records] == list(range(1, 11))
    client.topics.delete_records(topic, before_seq=1996)
    assert [record.seq for page in pages for record in page.records] == [1996, 1997, 1998, 1999, 2000]


def test_the_tailer_omits_deleted_records(client, topic):
    with client.producer(topic) as producer:
        for n in range(1, 1001):
            producer.send(b"%d" % n, tag="a" if n % 3 == 0 else "b")
    client.topics.delete_records(topic, match="a")
    with client.tailer(topic, follow=False) as tailer:
        batches = list(tailer)
    assert [int(data) for batch in batches for data in batch.bytes()] == [n for n in range(1, 1001) if n % 3]
    assert sum(map(len, batches)) == 667


def test_a_page_of_deleted_records_only_advances_the_cursor(client, other, ringlog_topic):
    """The page is empty and caught up, and it has no tombstone."""
    topic = filled(client, ringlog_topic())
    other.topics.delete_records(topic, match="*")
    page = other.read(topic)
    assert (len(page), page.caught_up, page.cursor.seq, page.lag) == (0, True, 20, 0)
    assert client.topics.state(topic).earliest_seq == 21


@pytest.mark.parametrize("wrong", [{}, {"match": ["tag", "Eq"]}, {"match": ["node", "Eq", "x"]}])
def test_a_delete_without_or_with_an_invalid_selection_is_refused(client, other, ringlog_topic, wrong):
    """No record is deleted."""
    topic = filled(client, ringlog_topic(), 2)
    with pytest.raises(InvalidRequest):
        other.topics.delete_records(topic, **wrong)
    with pytest.raises(UsageError):
        other.topics.delete_records(topic, before_seq=-1)
    assert seqs(client, topic) == [1, 2]


def test_a_delete_in_a_missing_topic_fails(other, ringlog_topic):
    """The error is `TopicNotFound`."""
    with pytest.raises(TopicNotFound):
        other.topics.delete_records(ringlog_topic(), before_seq=1)


def test_a_cap_causes_a_tombstone_and_a_delete_does_not(client, other, topic):
    """Only involuntary losses are reported to readers."""
    client.topics.create(topic, cap_records=3)
    for n in range(1, 6):
        client.append(topic, b"%d" % n)
    first, *records = list(other.reader(topic))
    assert isinstance(first, Tombstone)
    assert (first.gap_from, first.gap_to, first.reason) == (1, 2, "cap")
    assert [record.seq for record in records] == [3, 4, 5]
    client.topics.delete_records(topic, before_seq=4)
    assert other.read(topic, 2).tombstone is None
    assert seqs(other, topic, 3) == [4, 5]


def test_expired_records_are_reported_and_not_delivered(client, other, topic):
    """The tombstone has the reason `ttl`."""
    client.topics.create(topic, ttl_ms=250)
    for n in range(3):
        client.append(topic, b"%d" % n)
    wait_until(lambda: not len(other.read(topic)), WAIT_S, "the records expire")
    page = other.read(topic)
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (1, 3, "ttl")
    assert (page.cursor.seq, page.caught_up) == (3, True)
    client.append(topic, b"young")
    assert [r.data for r in other.read(topic, 3).records] == [b"young"]


def test_reading_starts_at_a_given_time(client, other, ringlog_topic):
    """Reading starts at the first record with that commit time or a later one.

    For a future time it starts after the last record.
    """
    topic = filled(client, ringlog_topic(), 10)
    records = client.read(topic).records
    for record in (records[0], records[4], records[9]):
        expected = [r.seq for r in records if r.ts >= record.ts]
        assert [r.seq for r in other.read(topic, start=record.time).records] == expected
        assert seqs(other, topic, record.time) == expected
    late = datetime.now(UTC) + timedelta(hours=1)
    assert len(other.read(topic, start=late)) == 0
    early = datetime(2000, 1, 1, tzinfo=UTC)
    assert len(other.read(topic, start=early)) == 10
    with pytest.raises(UsageError):
        other.read(topic, start=datetime(2026, 1, 1))


def test_a_waiting_read_waits_if_its_filter_matches_nothing(client, other, ringlog_topic):
    """After `wait_ms` it returns an empty page whose cursor is at the head."""
    topic = filled(client, ringlog_topic(), 4)
    page = other.read(topic, tags="other", wait_ms=50)
    assert (len(page), page.caught_up, page.cursor.seq) == (0, True, 4)
