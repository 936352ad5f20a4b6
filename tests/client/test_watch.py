"""Watches of many topics on a real engine."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter

import pytest

import ringlog
from ringlog.client import EARLIEST, LATEST, CaughtUp, Cursor, Page, Tombstone, TopicDeleted
from ringlog.client.watches.events import decode_cursors, encode_cursors
from ringlog.client.write.fields import NewRecord
from ringlog.errors import InvalidRequest, TopicNotFound, UsageError
from ringlog.testing import engine
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from tests.support.engines import client_fixture

__all__ = ["ringlog_engine", "ringlog_topic"]
pytestmark = [pytest.mark.timeout(120)]
WAIT_S = 30.0

client = client_fixture("ring", "ipc")

writer = client_fixture()


def take(watch, wanted, *, timeout=WAIT_S):
    """Return the events up to the first for which `wanted(events so far)` is true."""
    events = []
    while not wanted(events):
        event = watch.next(timeout)
        assert event is not None, f"nothing came for {timeout} s behind {events}"
        events.append(event)
    return events


def data_of(events, topic=None):
    return [
        record.data
        for event in events
        if isinstance(event, Page) and topic in {None, event.topic}
        for record in event.records
    ]


def records(count, topic=None):
    return lambda events: len(data_of(events, topic)) >= count


def kinds(events):
    return [type(event).__name__ for event in events]


def test_a_watch_delivers_old_and_new_records_exactly_once(client, writer, topic):
    """Existing records come first, then new ones, without overlap or gap."""
    writer.append_many(topic, [b"0", b"1"])
    with client.watch(topic) as watch:
        before = take(watch, lambda events: "CaughtUp" in kinds(events))
        assert data_of(before) == [b"0", b"1"]
        assert before[-1] == CaughtUp(topic, 2)
        for n in range(2, 30):
            writer.append(topic, b"%d" % n)
        after = take(watch, records(28))
        assert data_of(after) == [b"%d" % n for n in range(2, 30)]
        numbers = [record.seq for event in after if isinstance(event, Page) for record in event.records]
        assert numbers == list(range(3, 31))
        assert watch.next(0) is None


def test_an_empty_topic_is_caught_up_at_once_and_only_once(client, writer, topic):
    """A second CaughtUp event needs a new backlog."""
    writer.topics.create(topic)
    with client.watch(topic) as watch:
        assert watch.next(WAIT_S) == CaughtUp(topic, 0)
        writer.append(topic, b"1")
        assert data_of([watch.next(WAIT_S)]) == [b"1"]
        assert watch.next(0) is None, "no second word without a new backlog"


def test_a_watch_starts_at_the_given_position_of_each_topic(client, writer, ringlog_topic):
    """A position is a seq, EARLIEST or LATEST."""
    first, second, third = (ringlog_topic(f"start{n}") for n in range(3))
    for topic in (first, second, third):
        writer.append_many(topic, [b"%d" % n for n in range(5)])
    with client.watch({first: 4, second: LATEST, third: EARLIEST}) as watch:
        events = take(watch, lambda events: kinds(events).count("CaughtUp") == 3)
        assert data_of(events, first) == [b"3", b"4"]
        assert data_of(events, second) == []
        assert len(data_of(events, third)) == 5
        writer.append(second, b"new")
        assert data_of(take(watch, records(1)), second) == [b"new"]


def test_a_watch_continues_at_the_composite_cursor_of_an_earlier_one(client, writer, ringlog_topic):
    """No record is skipped or delivered twice."""
    topics = [ringlog_topic(f"resume{n}") for n in range(3)]
    for topic in topics:
        writer.append_many(topic, [b"%s %d" % (topic.encode(), n) for n in range(10)])
    seen = []
    cursor = ""
    for limit in itertools.count(1):
        with client.watch(topics, cursor=cursor, limit=limit) as watch:
            event = take(watch, records(1))[-1]
            seen += data_of([event])
            cursor = watch.cursor
        if len(seen) == 30:
            break
    assert Counter(seen) == Counter(b"%s %d" % (topic.encode(), n) for topic in topics for n in range(10))
    positions = decode_cursors(cursor)
    assert {topic: positions[topic].seq for topic in topics} == dict.fromkeys(topics, 10)


def test_an_invalid_watch_cursor_counts_as_absent(client, writer, topic):
    """The watch starts at its default position."""
    writer.append(topic, b"0")
    for text in ("", "!!", "bm9uc2Vuc2U", encode_cursors({"another": Cursor(1, 5)})):
        with client.watch(topic, cursor=text) as watch:
            assert data_of(take(watch, records(1))) == [b"0"]


def test_a_pattern_includes_topics_that_are_created_later(client, writer, ringlog_topic):
    """A watch of a pattern delivers later topics from their first record on."""
    stem = ringlog_topic("wild")
    writer.append(f"{stem}.eu.a", b"old")
    writer.append(f"{stem}.us.a", b"us")
    with client.watch(f"{stem}.eu.*") as watch:
        assert data_of(take(watch, records(1))) == [b"old"]
        writer.append(f"{stem}.eu.b", b"first")
        writer.append(f"{stem}.us.b", b"us")
        writer.append(f"{stem}.eu.b", b"second")
        events = take(watch, records(2))
        assert data_of(events) == [b"first", b"second"]
        assert {event.topic for event in events if isinstance(event, Page)} == {f"{stem}.eu.b"}
        assert sorted(watch.topics) == [f"{stem}.eu.a", f"{stem}.eu.b"]
    for name in ("eu.a", "us.a", "eu.b", "us.b"):
        writer.topics.delete(f"{stem}.{name}")


def test_filtered_records_advance_the_cursor(client, writer, topic):
    """Own records and other tags cause no event, and CaughtUp is still delivered."""
    for n in range(6):
        writer.append(topic, b"%d" % n, node="me" if n % 2 else "you", tag="a" if n < 4 else "b")
    with client.watch(topic, node="me", tags="a") as watch:
        events = take(watch, lambda events: "CaughtUp" in kinds(events))
        assert data_of(events) == [b"0", b"2"]
        assert decode_cursors(watch.cursor)[topic].seq == 6
        writer.append(topic, b"mine", node="me", tag="a")
        writer.append(topic, b"yours", node="you", tag="a")
        assert data_of(take(watch, records(1))) == [b"yours"]


def test_a_tombstone_precedes_the_records_after_the_loss(client, writer, topic):
    """The topic's cap evicts records. The tombstone contains their range."""
    writer.topics.create(topic, cap_records=3, discard="old")
    writer.append_many(topic, [b"%d" % n for n in range(3)])
    with client.watch({topic: 2}) as watch:
        take(watch, records(2))
        with client.watch({topic: 2}) as late:
            late.open()
            writer.append_many(topic, [b"x%d" % n for n in range(10)])
            events = take(watch, records(3))
            lost = [event for event in events if isinstance(event, Tombstone)]
            assert data_of(events)[-3:] == [b"x7", b"x8", b"x9"]
            gone = sum(event.missed_estimate for event in lost)
            assert gone + len(data_of(events)) == 10
            assert all(event.reason == "cap" for event in lost)


def test_the_deletion_of_a_topic_ends_only_this_topic_of_a_watch(client, writer, ringlog_topic):
    """TopicDeleted comes once, with the last head.

    Other topics continue, and a recreated topic is not followed.
    """
    gone, stays = ringlog_topic("gone"), ringlog_topic("stays")
    writer.append(gone, b"1")
    writer.append(stays, b"1")
    with client.watch([gone, stays]) as watch:
        take(watch, lambda events: kinds(events).count("CaughtUp") == 2)
        writer.topics.delete(gone)
        ended = take(watch, lambda events: "TopicDeleted" in kinds(events))[-1]
        assert (ended.topic, ended.head_seq) == (gone, 1)
        writer.append(gone, b"another life")
        writer.append(stays, b"2")
        events = take(watch, records(1))
        assert data_of(events) == [b"2"]
        writer.topics.delete(stays)
        assert isinstance(take(watch, lambda events: "TopicDeleted" in kinds(events))[-1], TopicDeleted)
        assert watch.next(WAIT_S) is None, "no topic is left"
    writer.topics.delete(gone)


def test_records_deleted_before_they_are_requested_are_not_delivered(client, writer, topic):
    """A delete is effective when it is acknowledged."""
    writer.append_many(topic, [b"%d" % n for n in range(10)])
    with client.watch(topic, limit=2) as watch:
        assert data_of(take(watch, records(2))) == [b"0", b"1"]
        writer.topics.delete_records(topic, before_seq=9)
        assert data_of(take(watch, records(2))) == [b"8", b"9"]


def test_strong_consistency_delivers_only_synced_records(client, writer, topic):
    """A record of class `disk` is delivered after a sync covers it. No record is lost."""
    writer.topics.create(topic, durability="disk")
    with client.watch(topic, consistency="strong") as watch:
        watch.open()
        for n in range(20):
            writer.append(topic, b"%d" % n)
        assert data_of(take(watch, records(20))) == [b"%d" % n for n in range(20)]


def test_the_backlog_of_one_topic_does_not_delay_another(client, writer, ringlog_topic):
    """Topics are read in rotation."""
    deep, shallow = ringlog_topic("deep"), ringlog_topic("shallow")
    writer.append_many(deep, [b"%d" % n for n in range(5_000)])
    writer.append(shallow, b"one")
    with client.watch([deep, shallow], limit=100) as watch:
        events = take(watch, records(1, shallow))
        assert len(data_of(events, deep)) <= 1_000


def test_unknown_topics_are_refused_or_omitted(client, writer, topic):
    """With `lenient=True` they are omitted, and at least one topic must exist."""
    writer.append(topic, b"1")
    with pytest.raises(TopicNotFound, match="nowhere"):
        client.watch([topic, "nowhere"]).open()
    with client.watch([topic, "nowhere"], lenient=True) as watch:
        assert data_of(take(watch, records(1))) == [b"1"]
    with pytest.raises(TopicNotFound):
        client.watch(["nowhere"], lenient=True).open()


def test_invalid_watch_options_are_refused_by_name(client):
    for wrong, what in (
        ({"topics": []}, "topics must have 1 to"),
        ({"topics": "t", "consistency": "perhaps"}, "consistency"),
        ({"topics": "t", "limit": -1}, "limit must be >= 0, got -1"),
        ({"topics": "t", "credit": 0}, "credit"),
    ):
        with pytest.raises(UsageError, match=what):
            client.watch(**wrong).open()


def test_a_watch_of_150_topics_delivers_every_record(client, writer, ringlog_topic):
    """The number of topics exceeds the credit. Each record comes once and in order."""
    topics = [ringlog_topic(f"many{n}") for n in range(150)]
    for topic in topics:
        writer.topics.create(topic)
    with client.watch(topics, credit=4) as watch:
        watch.open()
        for n in range(4):
            for topic in topics:
                writer.append(topic, b"%d" % n)
        events = take(watch, records(600))
        for topic in topics:
            assert data_of(events, topic) == [b"0", b"1", b"2", b"3"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_watch_continues_after_kills_of_any_process(transport):
    """Scheduler, shard and gateway are killed in turn. Every record comes once and in order."""
    with (
        engine(
            wal={"shards": 2},
            supervisor={"restart_max": 50},
            gateway={"enabled": True},
            delivery={"schedulers": 1},
        ) as running,
        ringlog.connect(running.url) as writer,
        ringlog.connect(running.url, transport=transport) as client,
    ):
        topics = [f"t{n}" for n in range(8)]
        for topic in topics:
            writer.topics.create(topic)
        sent = Counter()
        with client.watch(topics) as watch:
            watch.open()
            events = []
            for kind in ("scheduler", "wal_shard", "gateway", "scheduler"):
                running.kill(kind)
                for topic in topics:
                    for _ in range(5):
                        writer.append(topic, b"%d" % sent[topic])
                        sent[topic] += 1
                wanted = sum(sent.values()) - len(data_of(events))
                events += take(watch, records(wanted), timeout=60)
            for topic in topics:
                assert data_of(events, topic) == [b"%d" % n for n in range(sent[topic])]


@pytest.mark.slow
def test_a_suspended_watcher_does_not_delay_others():
    """A suspended process blocks at most the grants of its credit. Other watches get every record."""
    with (
        engine(wal={"shards": 1}, delivery={"schedulers": 1}) as running,
        ringlog.connect(running.url) as writer,
    ):
        writer.topics.create("t")
        pid = os.fork()
        if pid == 0:
            with ringlog.connect(running.url) as stopped:
                for _ in stopped.watch("t"):
                    os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        try:
            with ringlog.connect(running.url) as client, client.watch("t") as watch:
                writer.append("t", b"0")
                os.waitpid(pid, os.WUNTRACED)
                for n in range(1, 300):
                    writer.append("t", b"%d" % n)
                assert data_of(take(watch, records(300))) == [b"%d" % n for n in range(300)]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_watch_without_schedulers_is_refused_with_a_remedy(transport):
    """The error names the setting `delivery.schedulers`. Readers continue to work."""
    with (
        engine(wal={"shards": 1}, gateway={"enabled": True}, delivery={"schedulers": 0}) as running,
        ringlog.connect(running.url, transport=transport) as client,
    ):
        client.append("t", b"1")
        with pytest.raises(InvalidRequest, match=r"delivery\.schedulers"):
            client.watch("t").open()
        assert [record.data for record in client.reader("t")] == [b"1"]


def test_watches_of_one_client_share_their_reads(ringlog_engine, writer, topic):
    """The client reads and verifies a frame once. Each watch gets every record once."""
    writer.append_many(topic, [b"0", b"1"])
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        watches = [client.watch(topic).open() for _ in range(5)]
        for watch in watches:
            take(watch, lambda events: "CaughtUp" in kinds(events))
        for n in range(2, 12):
            writer.append(topic, b"%d" % n)
            pages = [take(watch, records(1))[-1] for watch in watches]
            assert [[record.data for record in page.records] for page in pages] == [[b"%d" % n]] * 5
            data = {memoryview(page.batches[0].payload_views()[0]).obj.ctypes.data for page in pages}
            assert len(data) == 1, "one place in memory"
            with pytest.raises(TypeError, match="read-only"):
                pages[0].batches[0].payload_views()[0][0] = 1
        records_of_page = pages[0].records
        records_of_page.clear()
        assert len(pages[1].records) == 1, "what one does with its list is nobody else's"


def test_records_deleted_before_a_granted_read_are_not_delivered(ringlog_engine, writer, topic):
    """The grant contains the position of a record that is deleted before the read."""
    writer.append_many(topic, [b"0", b"1"])
    with ringlog.connect(ringlog_engine.url, wait=10) as client, client.watch(topic) as watch:
        take(watch, lambda events: "CaughtUp" in kinds(events))
        for n in range(2, 8):
            writer.append(topic, b"%d" % n, tag="odd" if n % 2 else "even")
            assert client.ready_watches([watch], WAIT_S) == [watch]
            if n % 2:
                writer.topics.delete_records(topic, match="odd")
        left = take(watch, lambda events: b"6" in data_of(events))
        assert data_of(left) == [b"2", b"4", b"6"]


@pytest.mark.parametrize("consistency", ["eventual", "strong"])
def test_a_frame_is_read_by_only_one_of_several_watches(ringlog_engine, writer, topic, consistency):
    """This includes the first delivery after the watches opened at the head."""
    writer.topics.create(topic, durability="fsync")
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        watches = [client.watch(topic, start=LATEST, consistency=consistency).open() for _ in range(4)]
        for watch in watches:
            assert kinds([watch.next(WAIT_S)]) == ["CaughtUp"]
        for n in range(5):
            writer.append_many(topic, [b"%d" % n] * 3)
            pages = [take(watch, records(3))[-1] for watch in watches]
            assert [page.bytes() for page in pages] == [[b"%d" % n] * 3] * 4
            assert len({id(page.batches[0]) for page in pages}) == 1
            with pytest.raises(TypeError, match="read-only"):
                pages[0].batches[0].payload_views()[0][0] = 1


def test_records_deleted_behind_one_watchs_read_stay_deleted(ringlog_engine, writer, topic):
    """The first watch's read is in memory. The second watch reads after the delete was acknowledged."""
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        writer.topics.create(topic)
        first, second = (client.watch(topic, start=LATEST).open() for _ in range(2))
        take(first, lambda events: "CaughtUp" in kinds(events))
        take(second, lambda events: "CaughtUp" in kinds(events))
        for n in range(6):
            writer.append(topic, b"%d" % n, tag="odd" if n % 2 else "even")
            assert client.ready_watches([second], WAIT_S) == [second]
            assert data_of(take(first, records(1))) == [b"%d" % n]
            if n % 2:
                writer.topics.delete_records(topic, match="odd")
                assert second.next(0) is None
            else:
                assert data_of(take(second, records(1))) == [b"%d" % n]


def test_watches_at_different_positions_read_separately(ringlog_engine, writer, topic):
    """Stored reads belong to one position.

    A lagging watch, or one with a filter or a smaller limit, reads for itself.
    """
    writer.topics.create(topic)
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        every = client.watch(topic, start=LATEST).open()
        tagged = client.watch(topic, start=LATEST, tags="a").open()
        small = client.watch(topic, start=LATEST, limit=2).open()
        for watch in (every, tagged, small):
            take(watch, lambda events: "CaughtUp" in kinds(events))
        behind = client.watch(topic, start=LATEST).open()
        take(behind, lambda events: "CaughtUp" in kinds(events))
        for n in range(4):
            every_tag = zip(b"abc", "aba", strict=True)
            writer.append_many(topic, [NewRecord(data=b"%c%d" % (c, n), tag=tag) for c, tag in every_tag])
            assert data_of(take(every, records(3))) == [b"a%d" % n, b"b%d" % n, b"c%d" % n]
            assert data_of(take(tagged, records(2))) == [b"a%d" % n, b"c%d" % n]
            assert data_of(take(small, records(3))) == [b"a%d" % n, b"b%d" % n, b"c%d" % n]
        assert data_of(take(behind, records(12))) == [b"%c%d" % (c, n) for n in range(4) for c in b"abc"]


def test_an_event_wakes_up_only_the_waiting_thread(ringlog_engine, writer, topic):
    """The client's background thread leaves events to threads that wait for them.

    Otherwise each event would wake up both.
    """
    writer.topics.create(topic)
    with ringlog.connect(ringlog_engine.url, wait=10) as client, client.watch(topic, start=LATEST) as watch:
        take(watch, lambda events: "CaughtUp" in kinds(events))

        leadership, waiting = client._shell.leadership, threading.current_thread()
        taken, is_over = 0, False

        def append(first, count):
            for n in range(first, first + count):
                while (taken < n or leadership.leader is not waiting) and not is_over:
                    time.sleep(0)
                writer.append(topic, b"%d" % n)

        def deliver(count):
            nonlocal taken, is_over
            appending = threading.Thread(target=append, args=(taken, count))
            appending.start()
            try:
                for n in range(taken, taken + count):
                    assert data_of([watch.next(WAIT_S)]) == [b"%d" % n]
                    taken += 1
            except BaseException:
                is_over = True
                raise
            finally:
                appending.join()

        deliver(20)
        (background,) = {leadership.daemon.thread}
        status = f"/proc/self/task/{background.native_id}/status"
        before = _switches(status)
        deliver(300)
        assert _switches(status) - before < 150


def _switches(status):
    with open(status) as lines:
        return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
