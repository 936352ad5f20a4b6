"""Watches of one client that have fallen behind together: pages are read once (DL-9, DR-10 hold for each)."""

from __future__ import annotations

import contextlib

import pytest

import ringlog
from ringlog.client import EARLIEST, LATEST, CaughtUp, Page
from ringlog.client.write.fields import NewRecord
from ringlog.storage.reader import Pause, TopicReader
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
pytestmark = [pytest.mark.timeout(120)]
WAIT_S = 30.0


@pytest.fixture
def client(ringlog_engine):
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected


@pytest.fixture
def reads(monkeypatch):
    """Positions at which a part of the log or of a segment was read and verified, by whom."""
    found, own = [], TopicReader.next_run

    def next_run(reader, *args):
        before = reader.cursor
        run = own(reader, *args)
        if not isinstance(run, Pause):
            found.append((id(reader), before))
        return run

    monkeypatch.setattr(TopicReader, "next_run", next_run)
    return found


def page_of(watch, count=1):
    """The next page that is one."""
    for _ in range(1_000):
        event = watch.next(WAIT_S)
        assert event is not None
        if isinstance(event, Page):
            return event
    raise AssertionError("no page")


def in_step(watches, head):
    """Every watch takes one page after the other, in turns; the payloads of each."""
    data = [[] for _ in watches]
    at = [0] * len(watches)
    while min(at) < head:
        for n, watch in enumerate(watches):
            if at[n] < head:
                page = page_of(watch)
                assert page.cursor.seq > at[n]
                at[n] = page.cursor.seq
                data[n] += page.bytes()
    return data


@pytest.mark.parametrize("size", [1, 100], ids=["small frames", "large frames"])
def test_a_backlog_is_read_once_for_all_who_are_behind(client, ringlog_topic, reads, size):
    topic = ringlog_topic("behind")
    for n in range(60):
        client.append_many(topic, [b"%d %d" % (n, m) for m in range(size)])
    wanted = [b"%d %d" % (n, m) for n in range(60) for m in range(size)]
    watches = [client.watch(topic, start=EARLIEST, limit=10 * size).open() for _ in range(6)]
    assert in_step(watches, 60 * size) == [wanted] * 6
    assert len({reader for reader, _ in reads}) <= 2, "the others read nothing"
    for watch in watches:
        assert isinstance(watch.next(WAIT_S), CaughtUp)
    # All of them go on as if they had read it themselves.
    client.append(topic, b"more")
    assert [page_of(watch).bytes() for watch in watches] == [[b"more"]] * 6


def test_nobody_can_write_to_what_others_read(client, ringlog_topic):
    topic = ringlog_topic("frozen")
    for size in [100, 1, 1, 1, 1, 1, 100]:
        client.append_many(topic, [NewRecord(data=b"%d" % n, event_ts=n) for n in range(size)])
    watches = [client.watch(topic, start=EARLIEST).open() for _ in range(3)]
    pages = [page_of(watch) for watch in watches]
    assert len({tuple(map(id, page.batches)) for page in pages}) == 1
    for piece in pages[0].batches:
        with pytest.raises(TypeError, match="read-only"):
            piece.payload_views()[0][0] = 1
        for values in (piece.seqs, piece.commit_stamps):
            with contextlib.suppress(ValueError):
                values[0] = 99  # It is read-only, or a copy.
    assert [page.batches[1].seqs[0] for page in pages] == [101] * 3
    assert 99 not in [stamp for page in pages for piece in page.batches for stamp in piece.commit_stamps]


def test_what_is_removed_behind_the_first_reader_is_given_to_no_other(client, ringlog_topic):
    """DL-9: at the deletion's ack, whoever has read it before."""
    topic = ringlog_topic("removed")
    for n in range(40):
        client.append(topic, b"%d" % n, tag="odd" if n % 2 else "even")
    first, second = (client.watch(topic, start=EARLIEST, limit=10).open() for _ in range(2))
    assert page_of(first).bytes() == [b"%d" % n for n in range(10)]
    client.topics.delete_records(topic, match="odd")
    assert page_of(second).bytes() == [b"%d" % n for n in range(0, 20, 2)]
    assert page_of(first).bytes() == [b"%d" % n for n in range(10, 30, 2)]


def test_a_page_with_holes_is_kept_for_nobody(client, ringlog_topic, reads):
    """It may be of several looks, and what the first saw may be gone by the last."""
    topic = ringlog_topic("holes")
    for n in range(40):
        client.append(topic, b"%d" % n, tag="odd" if n % 2 and n < 20 else "even")
    client.topics.delete_records(topic, match="odd")
    watches = [client.watch(topic, start=EARLIEST, limit=10).open() for _ in range(3)]
    wanted = [b"%d" % n for n in range(40) if n >= 20 or not n % 2]
    assert in_step(watches, 40) == [wanted] * 3
    assert len({reader for reader, _ in reads}) == 3, "each has read where something is missing"
    assert len(client._shared_reads) == 2, "what lies behind it was read once"


def test_a_topic_that_grows_meanwhile_is_shared_all_the_same(client, ringlog_topic, reads):
    topic = ringlog_topic("growing")
    client.append_many(topic, [b"%d" % n for n in range(1_000)])
    watches = [client.watch(topic, start=EARLIEST, limit=100).open() for _ in range(4)]
    for n in range(9):
        pages = []
        for watch in watches:
            pages.append(page_of(watch))
            client.append(topic, b"more")
        assert [page.bytes() for page in pages] == [[b"%d" % m for m in range(100 * n, 100 * n + 100)]] * 4
        assert [page.head_seq for page in pages] == [1_000 + 4 * n + m for m in range(4)]
    assert len({reader for reader, _ in reads}) == 1


def test_who_takes_less_at_once_or_leaves_something_out_reads_alone(client, ringlog_topic, reads):
    topic = ringlog_topic("alone")
    for n in range(30):
        client.append_many(topic, [NewRecord(data=b"%d" % n, tag="a" if n % 3 else "b")] * 2)
    plain = [client.watch(topic, start=EARLIEST, limit=20).open() for _ in range(2)]
    small = client.watch(topic, start=EARLIEST, limit=7).open()
    tagged = client.watch(topic, start=EARLIEST, limit=20, tags="b").open()
    assert [len(page_of(watch)) for watch in plain] == [20, 20]
    assert len(page_of(small)) == 7
    assert set(page_of(tagged).bytes()) == {b"%d" % n for n in range(0, 30, 3)}
    assert len({reader for reader, _ in reads}) == 3


def test_a_watch_that_nobody_follows_with_keeps_nothing(client, ringlog_topic):
    """Others there are, of another topic; and what was kept for two goes with one of them."""
    topic, other = ringlog_topic("single"), ringlog_topic("other")
    client.append_many(topic, [b"x"] * 100)
    client.append_many(other, [b"x"] * 100)
    with client.watch(topic, start=EARLIEST, limit=10) as watch, client.watch(other, limit=10) as beside:
        pages = [page_of(watch) for _ in range(5)] + [page_of(beside)]
        assert sum(map(len, pages)) == 60
        assert len(client._shared_reads) == 0
        with client.watch(topic, start=EARLIEST, limit=10) as second:
            page_of(second)
            assert len(client._shared_reads) == 1
        assert len(client._shared_reads) == 0
        assert len(page_of(watch)) == 10


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_every_class_is_read_whole_by_who_is_behind(client, ringlog_topic, durability):
    """Records that are in memory only may go with their shard: they are not kept for others."""
    topic = ringlog_topic("class-" + durability)
    client.topics.create(topic, durability=durability)
    for n in range(20):
        client.append(topic, b"%d" % n)
    watches = [client.watch(topic, start=EARLIEST, limit=5).open() for _ in range(3)]
    assert in_step(watches, 20) == [[b"%d" % n for n in range(20)]] * 3
    assert (len(client._shared_reads) > 0) == (durability != "ephemeral")


def test_a_watch_that_began_at_the_head_falls_behind_and_shares(client, ringlog_topic, reads):
    topic = ringlog_topic("fell-behind")
    client.topics.create(topic)
    watches = [client.watch(topic, start=LATEST, limit=10).open() for _ in range(3)]
    for watch in watches:
        assert isinstance(watch.next(WAIT_S), CaughtUp)
    for n in range(50):
        client.append(topic, b"%d" % n)
    assert in_step(watches, 50) == [[b"%d" % n for n in range(50)]] * 3
    assert len({reader for reader, _ in reads}) <= 1
