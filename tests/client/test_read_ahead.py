"""Iterators return no record that was removed before the program requests it.

This also holds for records that the iterator has read ahead.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

import ringlog
import ringlog.aio
from ringlog.client import Cursor, NewRecord, Record, Tombstone
from ringlog.client.read.fetch_result import NO_WORD, FetchResult
from ringlog.client.read.pages import Page
from ringlog.client.read.paging import read_page
from ringlog.client.read.read_ahead import ReadAhead, RemoteRecordCheck
from ringlog.clock import SystemClock
from ringlog.errors import TopicNotFound
from ringlog.limits import READ_AHEAD_MS, READ_AHEAD_RECORDS_MAX, READ_AHEAD_RECORDS_MIN
from ringlog.testing.clock import ManualClock
from ringlog.testing.real_engine import wait_until

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0


class Iteration:
    """One way to iterate over records one by one, for threads and for asyncio."""

    def __init__(self, way, url, topic, stack):
        kind, self.transport, is_async = way
        module = ringlog.aio if is_async else ringlog
        self._loop = asyncio.new_event_loop() if is_async else None
        client = module.connect(url, wait=10, transport=self.transport)
        if self._loop is None:
            stack.callback(client.close)
        else:
            stack.callback(self._loop.close)
            client = self._run(client.__aenter__())
            stack.callback(lambda: self._run(client.close()))
        self.reader = client.reader(topic) if kind == "reader" else client.group(topic, "g", mode="stream")
        self._items = self.reader.__aiter__() if is_async else iter(self.reader)
        stack.callback(lambda: self._run(self._items.aclose()) if is_async else self._items.close())

    def _run(self, awaitable):
        return awaitable if self._loop is None else self._loop.run_until_complete(awaitable)

    def next(self):
        if self._loop is None:
            return next(self._items, None)
        with contextlib.suppress(StopAsyncIteration):
            return self._run(self._items.__anext__())
        return None

    def pass_the_bound(self):
        """If the iterator is remote, wait for READ_AHEAD_MS.

        A remote iterator may return prefetched records for that time.
        """
        if self.transport != "ring":
            clock = SystemClock()
            end_ns = clock.monotonic_ns() + READ_AHEAD_MS * 1_000_000
            wait_until(lambda: clock.monotonic_ns() >= end_ns, WAIT_S, "what was read ahead to be too old")


WAYS = [
    (kind, transport, is_async)
    for kind in ("reader", "stream group")
    for transport in ("ring", "ipc")
    for is_async in (False, True)
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}-{'asyncio' if way[2] else 'threads'}")
def iterate(request, ringlog_engine):
    with contextlib.ExitStack() as stack:
        yield lambda topic: Iteration(request.param, ringlog_engine.url, topic, stack)


@pytest.fixture(params=[False, True], ids=["threads", "asyncio"])
def read(request, ringlog_engine):
    """Readers over rings."""
    with contextlib.ExitStack() as stack:
        yield lambda topic: Iteration(("reader", "ring", request.param), ringlog_engine.url, topic, stack)


def filled(client, topic, count=500):
    """Append records 1 to `count`. Their tags are "odd" and "even"."""
    client.append_many(
        topic, [NewRecord(data=b"%d" % n, tag="odd" if n % 2 else "even") for n in range(1, count + 1)]
    )
    return topic


def test_records_deleted_before_they_are_requested_are_not_returned(client, iterate, ringlog_topic):
    """Delete by seq, then by tag.

    The test requests the next record only after the delete was acknowledged.
    """
    topic = filled(client, ringlog_topic())
    items = iterate(topic)
    assert [items.next().seq for _ in range(3)] == [1, 2, 3]
    client.topics.delete_records(topic, before_seq=100)
    items.pass_the_bound()
    assert [items.next().seq for _ in range(3)] == [100, 101, 102]
    client.topics.delete_records(topic, match="even")
    items.pass_the_bound()
    assert [items.next().seq for _ in range(3)] == [103, 105, 107]
    client.topics.delete_records(topic, before_seq=499)
    items.pass_the_bound()
    assert items.next().seq == 499


def test_a_deleted_topic_ends_the_iteration_with_topic_not_found(client, iterate, ringlog_topic):
    topic = filled(client, ringlog_topic())
    items = iterate(topic)
    assert items.next().seq == 1
    client.topics.delete(topic)
    items.pass_the_bound()
    with pytest.raises(TopicNotFound):
        items.next()


def test_a_recreated_topic_is_reported_and_read_from_its_beginning(client, read, ringlog_topic):
    topic = filled(client, ringlog_topic())
    items = read(topic)
    assert items.next().data == b"1"
    client.topics.delete(topic)
    client.append(topic, b"another life")
    gap = items.next()
    assert (type(gap), gap.reason) == (Tombstone, "recreated")
    assert items.next().data == b"another life"


@pytest.mark.parametrize("what", ["own time", "ttl"])
def test_expired_records_are_not_returned(client, read, topic, what):
    clock = SystemClock()
    client.topics.create(topic, **({"ttl_ms": 800} if what == "ttl" else {}))
    items = read(topic)
    expires_at = None if what == "ttl" else clock.now_us() + 800_000
    some = [NewRecord(data=b"%d" % n, expires_at=expires_at) for n in range(500)]
    client.append_many(topic, [*some, NewRecord(data=b"last")])
    first = items.next()
    assert first.data == b"0"
    wait_until(lambda: clock.now_us() > first.ts + 1_000_000, WAIT_S, "the records to expire")
    given = items.next()
    if what == "ttl":
        assert given is None or (isinstance(given, Tombstone) and given.reason == "ttl")
        assert items.next() is None
    else:
        while isinstance(given, Tombstone):
            given = items.next()
        assert given.data == b"last"


@pytest.mark.parametrize("call", ["seek", "close"])
def test_a_seek_or_close_at_a_tombstone_takes_effect_at_once(client, read, topic, call):
    """The next item already comes from the new position."""
    client.topics.create(topic, cap_records=10, discard="old")
    client.append_many(topic, [b"%d" % n for n in range(1, 10)])
    for n in range(10, 31):
        client.append(topic, b"%d" % n)
    items = read(topic)
    items.reader.seek(2)
    gap = items.next()
    assert isinstance(gap, Tombstone)
    if call == "close":
        items.reader.close()
        assert items.next() is None
    else:
        items.reader.seek(Cursor(0, 29))
        assert items.next().data == b"30"


def test_appends_do_not_invalidate_records_read_ahead(client, read, ringlog_topic):
    """The topic's slot on the board changes with each append, but only removals change its version."""
    topic = filled(client, ringlog_topic())
    items = read(topic)
    assert items.next().seq == 1
    page_size = items.reader._ahead.limit
    for n in range(2, 50):
        client.append(topic, b"more")
        assert items.next().seq == n
    assert items.reader._ahead.limit == page_size


class TwoLooks:
    """A fake source whose topic loses a record between two fetches of one page."""

    def __init__(self, versions):
        self.versions = list(versions)

    def fetch(self, cursor, *, limit, bytes_max, wait_s):
        hidden = np.array([cursor.seq + 1], dtype=np.int64)
        yield from ()
        return FetchResult(1, 9, 1, None, cursor.seq, (), cursor.seq + 1, hidden, self.versions.pop(0))


def drive(steps):
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def test_a_page_ends_where_the_topic_changed_between_two_fetches():
    """The page has the version of its first records and contains none of a later version."""
    page = drive(read_page(TwoLooks([4, 4, 5, 5]), "t", Cursor(1, 0), limit=100))
    assert (page.version, page.cursor.seq) == (4, 2)


class Stale:
    """A fake source whose records become stale after `left` of them."""

    words, at, seen = NO_WORD, 0, -1

    def __init__(self, left):
        self.left = left

    def record_check(self, version):
        return self

    def __call__(self, record):
        self.left -= 1
        return self.left > 0


class Pieces:
    def __init__(self, count):
        self.count = count

    def records(self):
        return [Record(seq=n, ts=0, data=b"") for n in range(1, self.count + 1)]


def page_of(count):
    return Page("t", [Pieces(count)], Cursor(1, count), tombstone=None, head_seq=count, earliest_seq=1)


def test_read_ahead_shrinks_when_records_become_stale_and_grows_again():
    ahead = ReadAhead()
    assert ahead.limit == READ_AHEAD_RECORDS_MAX
    assert len(list(ahead.records(page_of(100), Stale(5)))) == 5
    assert (ahead.is_stale, ahead.seq, ahead.limit) == (True, 5, READ_AHEAD_RECORDS_MIN)
    limits = []
    while ahead.limit < READ_AHEAD_RECORDS_MAX:
        assert len(list(ahead.records(page_of(10), Stale(100)))) == 10
        assert not ahead.is_stale
        limits.append(ahead.limit)
    assert limits == [32, 64, 128, 256, 512, 1024, 2048, 4096]


def test_a_remote_iterator_queries_the_engine_again_within_the_bound():
    clock = ManualClock()
    check = RemoteRecordCheck(clock)
    record = Record(seq=1, ts=0, data=b"")
    clock.advance(READ_AHEAD_MS / 1000 - 0.001)
    assert check(record)
    clock.advance(0.001)
    assert not check(record)
