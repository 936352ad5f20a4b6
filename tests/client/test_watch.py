"""Watching many topics on a real engine: sections 18 (by its rules, natively), 22, 41."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter

import pytest

import ringlog
from ringlog.client import EARLIEST, LATEST, CaughtUp, Cursor, Page, Tombstone, TopicDeleted
from ringlog.client.watches.events import decode_cursors, encode_cursors
from ringlog.client.write.fields import NewRecord
from ringlog.errors import InvalidRequest, TopicNotFound, UsageError
from ringlog.testing import engine
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
pytestmark = [pytest.mark.timeout(120)]
WAIT_S = 30.0


@pytest.fixture(params=["ring", "ipc"])
def client(ringlog_engine, request):
    """On the host by rings, and through the gateway as from elsewhere."""
    with ringlog.connect(ringlog_engine.url, wait=10, transport=request.param) as connected:
        yield connected


@pytest.fixture
def writer(ringlog_engine):
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected


def take(watch, wanted, *, timeout=WAIT_S):
    """Events until `wanted(events so far)`."""
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


def test_records_come_as_they_are_written_and_each_once(client, writer, ringlog_topic):
    """SSE-16, SSE-24: what was there, then what comes, without overlap or gap."""
    topic = ringlog_topic("live")
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


def test_an_empty_topic_is_caught_up_at_once_and_only_once(client, writer, ringlog_topic):
    """SSE-19."""
    topic = ringlog_topic("empty")
    writer.topics.create(topic)
    with client.watch(topic) as watch:
        assert watch.next(WAIT_S) == CaughtUp(topic, 0)
        writer.append(topic, b"1")
        assert data_of([watch.next(WAIT_S)]) == [b"1"]
        assert watch.next(0) is None, "no second word without a new backlog"


def test_it_starts_where_it_is_told(client, writer, ringlog_topic):
    """SSE-1, SSE-2: from a number, from the end, topic by topic."""
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


def test_the_composite_cursor_goes_on_where_the_last_event_ended(client, writer, ringlog_topic):
    """E-13, SSE-17, SSE-29: nothing is skipped, and nothing that was given comes again."""
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


def test_a_cursor_that_is_none_is_as_good_as_absent(client, writer, ringlog_topic):
    """E-14."""
    topic = ringlog_topic("cursor")
    writer.append(topic, b"0")
    for text in ("", "!!", "bm9uc2Vuc2U", encode_cursors({"another": Cursor(1, 5)})):
        with client.watch(topic, cursor=text) as watch:
            assert data_of(take(watch, records(1))) == [b"0"]


def test_patterns_bring_topics_that_are_made_later(client, writer, ringlog_topic):
    """Prefix and wildcard subscription: those that match now, and from their first record those to come."""
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


def test_what_filters_leave_out_moves_the_cursor(client, writer, ringlog_topic):
    """NF-4, DR-24, SSE-18: own records and other tags are silent, and caught up is said all the same."""
    topic = ringlog_topic("filter")
    for n in range(6):
        writer.append(topic, b"%d" % n, node="me" if n % 2 else "you", tag="a" if n < 4 else "b")
    with client.watch(topic, node="me", tags="a") as watch:
        events = take(watch, lambda events: "CaughtUp" in kinds(events))
        assert data_of(events) == [b"0", b"2"]
        assert decode_cursors(watch.cursor)[topic].seq == 6
        writer.append(topic, b"mine", node="me", tag="a")
        writer.append(topic, b"yours", node="you", tag="a")
        assert data_of(take(watch, records(1))) == [b"yours"]


def test_a_loss_is_announced_before_what_follows(client, writer, ringlog_topic):
    """SSE-25, TB-11: a cap evicts, the tombstone comes first and names the range."""
    topic = ringlog_topic("tombstone")
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


def test_a_deleted_topic_ends_alone(client, writer, ringlog_topic):
    """SSE-26: said once, with the last head; the others go on, and the name is not taken up again."""
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


def test_a_delete_holds_at_its_ack(client, writer, ringlog_topic):
    """DL-9: what was deleted before it was asked for is not given."""
    topic = ringlog_topic("deleted")
    writer.append_many(topic, [b"%d" % n for n in range(10)])
    with client.watch(topic, limit=2) as watch:
        assert data_of(take(watch, records(2))) == [b"0", b"1"]
        writer.topics.delete_records(topic, before_seq=9)
        assert data_of(take(watch, records(2))) == [b"8", b"9"]


def test_strong_gives_what_a_sync_covers(client, writer, ringlog_topic):
    """SSE-35: a record of class disk comes once the device has it; nothing is lost by asking for that."""
    topic = ringlog_topic("strong")
    writer.topics.create(topic, durability="disk")
    with client.watch(topic, consistency="strong") as watch:
        watch.open()
        for n in range(20):
            writer.append(topic, b"%d" % n)
        assert data_of(take(watch, records(20))) == [b"%d" % n for n in range(20)]


def test_one_topics_backlog_does_not_hold_up_another(client, writer, ringlog_topic):
    """SSE-23: a turn each."""
    deep, shallow = ringlog_topic("deep"), ringlog_topic("shallow")
    writer.append_many(deep, [b"%d" % n for n in range(5_000)])
    writer.append(shallow, b"one")
    with client.watch([deep, shallow], limit=100) as watch:
        events = take(watch, records(1, shallow))
        assert len(data_of(events, deep)) <= 1_000


def test_unknown_topics_are_an_error_or_left_out(client, writer, ringlog_topic):
    """SSE-3."""
    topic = ringlog_topic("known")
    writer.append(topic, b"1")
    with pytest.raises(TopicNotFound, match="nowhere"):
        client.watch([topic, "nowhere"]).open()
    with client.watch([topic, "nowhere"], lenient=True) as watch:
        assert data_of(take(watch, records(1))) == [b"1"]
    with pytest.raises(TopicNotFound):
        client.watch(["nowhere"], lenient=True).open()


def test_nonsense_is_refused_by_name(client):
    for wrong, what in (
        ({"topics": []}, "name the topics"),
        ({"topics": "t", "consistency": "perhaps"}, "consistency"),
        ({"topics": "t", "limit": -1}, "limit must be >= 0, got -1"),
        ({"topics": "t", "credit": 0}, "credit"),
    ):
        with pytest.raises(UsageError, match=what):
            client.watch(**wrong).open()


def test_hundreds_of_topics_in_one_watch(client, writer, ringlog_topic):
    """SSE-23, ZC-4: more topics than there is credit, each record once and in order."""
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
def test_a_killed_process_is_a_pause_for_watchers(transport):
    """SCH-9, PR-2: scheduler, shard and gateway are killed in turn; every record comes once and in order."""
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
def test_a_stopped_watcher_costs_the_others_nothing():
    """SSE-41, SC-1: a process that stands still keeps at most its credit of turns; others see everything."""
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
def test_without_schedulers_a_watch_is_refused_with_what_to_do_instead(transport):
    """LIM-2's manner: typed, naming the setting; nobody dies of it, and reading goes on."""
    with (
        engine(wal={"shards": 1}, gateway={"enabled": True}, delivery={"schedulers": 0}) as running,
        ringlog.connect(running.url, transport=transport) as client,
    ):
        client.append("t", b"1")
        with pytest.raises(InvalidRequest, match=r"delivery\.schedulers"):
            client.watch("t").open()
        assert [record.data for record in client.reader("t")] == [b"1"]


def test_watches_of_one_client_share_what_they_read(ringlog_engine, writer, ringlog_topic):
    """A frame is read and verified once for all of them; each gets every record once."""
    topic = ringlog_topic("shared")
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


def test_what_was_deleted_before_a_watcher_came_to_it_is_not_read(ringlog_engine, writer, ringlog_topic):
    """DL-9: the turn names the place of a record that is gone by the time of the read."""
    topic = ringlog_topic("gone")
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
def test_what_one_watch_has_read_is_read_by_no_other(ringlog_engine, writer, ringlog_topic, consistency):
    """The first delivery, too: all of them began at the head."""
    topic = ringlog_topic("together")
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


def test_what_is_deleted_behind_one_watchs_read_is_given_to_no_other(ringlog_engine, writer, ringlog_topic):
    """DL-9: what the first has read is in memory; the second comes to it after the deletion's ack."""
    topic = ringlog_topic("deleted-between")
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


def test_watches_that_stand_at_different_places_read_for_themselves(ringlog_engine, writer, ringlog_topic):
    """What is in memory is of one place: who is behind it, or wants less of it, gets what is his."""
    topic = ringlog_topic("apart")
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


def test_no_other_thread_is_woken_for_what_a_watcher_waits_for(ringlog_engine, writer, ringlog_topic):
    """CL-2: the daemon thread leaves everything to threads that come back; each event woke both before."""
    topic = ringlog_topic("alone")
    writer.topics.create(topic)
    with ringlog.connect(ringlog_engine.url, wait=10) as client, client.watch(topic, start=LATEST) as watch:
        take(watch, lambda events: "CaughtUp" in kinds(events))

        def deliver(count):
            for n in range(count):
                writer.append(topic, b"%d" % n)
                assert data_of([watch.next(WAIT_S)]) == [b"%d" % n]

        deliver(20)
        (background,) = {client._shell._background}
        status = f"/proc/self/task/{background.native_id}/status"
        before = _switches(status)
        deliver(300)
        assert _switches(status) - before < 150


def _switches(status):
    with open(status) as lines:
        return int(next(line for line in lines if line.startswith("voluntary")).split()[1])
