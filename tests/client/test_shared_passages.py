"""Watches of one client that lag together read each page only once.

For every watch, deleted records stay invisible and limits hold.
"""

from __future__ import annotations

import contextlib

import pytest

from ringlog.client import EARLIEST, LATEST, CaughtUp, Page
from ringlog.client.write.fields import NewRecord
from ringlog.storage.reader import Pause, TopicReader
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
pytestmark = [pytest.mark.timeout(120)]
WAIT_S = 30.0


@pytest.fixture
def reads(monkeypatch):
    """`(reader, position)` of each part of the log or of a segment that a reader read and verified."""
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
    """Return the next event that is a page."""
    for _ in range(1_000):
        event = watch.next(WAIT_S)
        assert event is not None
        if isinstance(event, Page):
            return event
    raise AssertionError("no page")


def in_step(watches, head):
    """Read one page from each watch in rotation. Return the payloads of each watch."""
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
def test_lagging_watches_read_their_backlog_once(client, topic, reads, size):
    for n in range(60):
        client.append_many(topic, [b"%d %d" % (n, m) for m in range(size)])
    wanted = [b"%d %d" % (n, m) for n in range(60) for m in range(size)]
    watches = [client.watch(topic, start=EARLIEST, limit=10 * size).open() for _ in range(6)]
    assert in_step(watches, 60 * size) == [wanted] * 6
    assert len({reader for reader, _ in reads}) <= 2, "the others read nothing"
    for watch in watches:
        assert isinstance(watch.next(WAIT_S), CaughtUp)
    # All watches continue as if each had read the backlog itself.
    client.append(topic, b"more")
    assert [page_of(watch).bytes() for watch in watches] == [[b"more"]] * 6


def test_shared_pages_are_read_only(client, topic):
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
                values[0] = 99  # The array is read-only, or a copy.
    assert [page.batches[1].seqs[0] for page in pages] == [101] * 3
    assert 99 not in [stamp for page in pages for piece in page.batches for stamp in piece.commit_stamps]


def test_records_deleted_after_the_first_read_are_not_returned_to_other_watches(client, topic):
    """The delete is effective when it is acknowledged, even for pages in memory."""
    for n in range(40):
        client.append(topic, b"%d" % n, tag="odd" if n % 2 else "even")
    first, second = (client.watch(topic, start=EARLIEST, limit=10).open() for _ in range(2))
    assert page_of(first).bytes() == [b"%d" % n for n in range(10)]
    client.topics.delete_records(topic, match="odd")
    assert page_of(second).bytes() == [b"%d" % n for n in range(0, 20, 2)]
    assert page_of(first).bytes() == [b"%d" % n for n in range(10, 30, 2)]


def test_a_page_with_deleted_records_is_not_shared(client, topic, reads):
    """Such a page may come from several fetches.

    A record of the first fetch may be deleted before the last one.
    """
    for n in range(40):
        client.append(topic, b"%d" % n, tag="odd" if n % 2 and n < 20 else "even")
    client.topics.delete_records(topic, match="odd")
    watches = [client.watch(topic, start=EARLIEST, limit=10).open() for _ in range(3)]
    wanted = [b"%d" % n for n in range(40) if n >= 20 or not n % 2]
    assert in_step(watches, 40) == [wanted] * 3
    assert len({reader for reader, _ in reads}) == 3, "each has read where something is missing"
    assert len(client._shared_reads) == 2, "what lies behind it was read once"


def test_reads_are_shared_while_the_topic_grows(client, topic, reads):
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


def test_watches_with_other_limits_or_filters_read_separately(client, topic, reads):
    for n in range(30):
        client.append_many(topic, [NewRecord(data=b"%d" % n, tag="a" if n % 3 else "b")] * 2)
    plain = [client.watch(topic, start=EARLIEST, limit=20).open() for _ in range(2)]
    small = client.watch(topic, start=EARLIEST, limit=7).open()
    tagged = client.watch(topic, start=EARLIEST, limit=20, tags="b").open()
    assert [len(page_of(watch)) for watch in plain] == [20, 20]
    assert len(page_of(small)) == 7
    assert set(page_of(tagged).bytes()) == {b"%d" % n for n in range(0, 30, 3)}
    assert len({reader for reader, _ in reads}) == 3


def test_a_single_watch_of_a_topic_stores_no_pages(client, ringlog_topic):
    """Watches of other topics do not count. Stored pages are dropped when only one watch is left."""
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
def test_lagging_watches_read_records_of_every_durability_class(client, ringlog_topic, durability):
    """The client does not store records of class `ephemeral` for other watches.

    They may be lost with their shard.
    """
    topic = ringlog_topic("class-" + durability)
    client.topics.create(topic, durability=durability)
    for n in range(20):
        client.append(topic, b"%d" % n)
    watches = [client.watch(topic, start=EARLIEST, limit=5).open() for _ in range(3)]
    assert in_step(watches, 20) == [[b"%d" % n for n in range(20)]] * 3
    assert (len(client._shared_reads) > 0) == (durability != "ephemeral")


def test_watches_that_start_at_the_head_share_reads_after_they_lag(client, topic, reads):
    client.topics.create(topic)
    watches = [client.watch(topic, start=LATEST, limit=10).open() for _ in range(3)]
    for watch in watches:
        assert isinstance(watch.next(WAIT_S), CaughtUp)
    for n in range(50):
        client.append(topic, b"%d" % n)
    assert in_step(watches, 50) == [[b"%d" % n for n in range(50)]] * 3
    assert len({reader for reader, _ in reads}) <= 1
