"""Reading pages and records from real files: positions, filters, tombstones, long polling, damage."""

from datetime import UTC, datetime, timedelta
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import EARLIEST, LATEST, Cursor, Filters, Record, Tombstone, tag_filter
from ringlog.client.read.paging import read, read_page
from ringlog.client.reader import Reader
from ringlog.errors import CorruptData, InvalidRequest, NotReady, TopicNotFound, UsageError
from ringlog.frame.layout import Column
from tests.support.log_file import TS_US
from tests.support.log_world import LogWorld, log_world_fixture

world = log_world_fixture()


def page(world, after=0, **options):
    return world.run(read(world, "t", after, **options))


def seqs(page_):
    return [record.seq for record in page_.records]


def fill(world, *counts):
    for count in counts:
        world.append([b"%d" % n for n in range(world.head_seq + 1, world.head_seq + 1 + count)])


# -- pages ----------------------------------------------------------------------------------------------


def test_a_page_starts_after_the_cursor_and_reports_its_end(world):
    """A page reports its cursor, the topic's head and first seq, the lag, and whether it is caught up."""
    fill(world, 3, 4, 5)
    first = page(world, 1, limit=4)
    assert seqs(first) == [2, 3, 4, 5]
    assert (first.cursor, first.head_seq, first.earliest_seq) == (Cursor(1, 5), 12, 1)
    assert (first.caught_up, first.lag) == (False, 7)
    last = page(world, first.cursor)
    assert seqs(last) == [6, 7, 8, 9, 10, 11, 12]
    assert (last.caught_up, last.lag, last.tombstone) == (True, 0, None)
    assert last.bytes() == [b"%d" % n for n in range(6, 13)]


def test_an_empty_topic_gives_an_empty_page(world):
    """An empty topic is not an error."""
    empty = page(world)
    assert (seqs(empty), empty.caught_up, empty.cursor) == ([], True, Cursor(1, 0))


def test_a_topic_that_is_not_there_is_refused(world):
    """The error is `TopicNotFound`."""
    world.exists = False
    with pytest.raises(TopicNotFound):
        page(world)


@pytest.mark.parametrize(("asked", "given"), [(0, 256), (1, 1), (1000, 1000), (1001, 1000), (9999, 1000)])
def test_limits_are_clamped(world, asked, given):
    """0 means the default of 256. The maximum is 1,000."""
    fill(world, 1200)
    assert len(page(world, limit=asked)) == given


@pytest.mark.parametrize(
    "wrong", [{"limit": -1}, {"max_bytes": -1}, {"wait_ms": -1}, {"after": -1}, {"after": "x"}]
)
def test_invalid_numbers_are_refused_before_any_request(world, wrong):
    with pytest.raises(UsageError):
        page(world, **wrong)
    assert world.locates == 0


def test_a_page_ends_before_the_record_that_exceeds_its_byte_limit(world):
    """Payload and metadata count. A record that fits exactly is included. A page has at least one record."""
    world.append([b"x" * 60] * 3, {Column.META: [b'{"a":1234567890123456789012345678901}'] * 3})
    size = 60 + len(b'{"a":1234567890123456789012345678901}')
    assert len(page(world, max_bytes=2 * size)) == 2
    assert len(page(world, max_bytes=2 * size - 1)) == 1
    assert len(page(world, max_bytes=1)) == 1
    assert page(world, max_bytes=1).cursor.seq == 1


def test_every_column_arrives(world):
    columns = {
        Column.KEY: [b"k", b""],
        Column.TAG: [b"red", None],
        Column.NODE: [None, b"n1"],
        Column.META: [b'{"a":1}', b""],
    }
    world.append([b'{"x":2}', b""], columns)
    one, two = page(world).records
    assert (one.key, one.tag, one.node, one.meta, one.json()) == (b"k", "red", None, {"a": 1}, {"x": 2})
    assert (two.key, two.tag, two.node, two.meta, two.data) == (b"", None, "n1", {}, b"")
    assert (one.ts, one.time.tzinfo) == (TS_US, UTC)
    assert one == Record(1, TS_US, b'{"x":2}', b"k", "red", None, b'{"a":1}')
    with pytest.raises(AttributeError):
        one.seq = 5


# -- filters --------------------------------------------------------------------------------------------


def test_records_of_excluded_nodes_are_omitted_and_advance_the_cursor(world):
    """`node` excludes records of one or of several nodes."""
    world.append([b"a", b"b", b"c"], {Column.NODE: [b"me", b"", b"you"]})
    assert seqs(page(world, node="me")) == [2, 3]
    assert seqs(page(world, node=["me", "you"])) == [2]
    world.append([b"d"], {Column.NODE: [b"me"]})
    own_only = page(world, 3, node="me")
    assert (seqs(own_only), own_only.caught_up) == ([], True)
    assert seqs(page(world, 3, node=[])) == [4]


def test_a_topic_can_disable_the_node_filter(world):
    """The setting is `dedupe_node`."""
    world.config["dedupe_node"] = False
    world.append([b"a"], {Column.NODE: [b"me"]})
    assert seqs(page(world, node="me")) == [1]


def test_a_too_long_node_name_is_refused(world):
    """The maximum is 128 bytes."""
    world.append([b"a"])
    assert seqs(page(world, node="n" * 128)) == [1]
    with pytest.raises(InvalidRequest):
        page(world, node="n" * 129)


def test_tags_are_matched_exactly_or_by_prefix(world):
    """A filter never matches records without a tag or with an empty tag."""
    world.append([b"1", b"2", b"3", b"4"], {Column.TAG: [b"a:1", b"a:2", b"b", b""]})
    world.append([b"5"])
    assert seqs(page(world, tags="a:1")) == [1]
    assert seqs(page(world, tags="a:*")) == [1, 2]
    assert seqs(page(world, tags="*")) == [1, 2, 3]
    assert seqs(page(world, tags=["tag", "Eq", "a:*"])) == []
    assert seqs(page(world, tags=["tag", "Glob", "*"])) == [1, 2, 3]
    assert page(world, tags="nothing").caught_up


@pytest.mark.parametrize(
    "wrong", [["tag", "Glob", "a"], ["tag", "Regex", "a*"], ["key", "Eq", "a"], [], ["tag", "Eq", 3]]
)
def test_invalid_filters_are_refused(wrong):
    """A filter is `[tag, operator, text]` with a known operator. A glob ends with `*`."""
    with pytest.raises(InvalidRequest):
        tag_filter(wrong)


def test_filtered_records_do_not_count_towards_the_limit(world):
    """The reader scans until the page contains enough matching records."""
    for n in range(30):
        world.append(
            [b"x"] * 20, {Column.TAG: [b"hit" if n % 10 == 9 and i == 7 else b"miss" for i in range(20)]}
        )
    found = page(world, limit=2, tags="hit")
    assert seqs(found) == [188, 388]
    assert 388 <= found.cursor.seq < 588
    assert seqs(page(world, found.cursor, limit=2, tags="hit")) == [588]


def test_a_page_of_a_selective_filter_ends_after_many_records(world, monkeypatch):
    """The page is empty and not caught up, and its cursor advanced."""
    monkeypatch.setattr("ringlog.client.read.paging.SCAN_RECORDS_MAX", 50)
    for _ in range(20):
        world.append([b"x"] * 20, {Column.TAG: [b"miss"] * 20})
    source = LocalSource(world, "t")
    filters = Filters(tag=tag_filter("hit"))
    found = world.run(read_page(source, "t", Cursor(0, 0), limit=10, max_bytes=1000, filters=filters))
    source.close()
    assert len(found) == 0
    assert not found.caught_up
    assert found.cursor.seq >= 50


# -- tombstones -----------------------------------------------------------------------------------------


def test_an_eviction_past_the_cursor_gives_a_tombstone_with_the_next_records(world):
    """Only a cursor below the evicted records gets the tombstone."""
    fill(world, 1, 1, 1, 1, 1)
    world.cap_floor = world.earliest_seq = 3
    found = page(world)
    assert found.tombstone == Tombstone("t", 1, 2, "cap", 3, 5)
    assert found.tombstone.missed_estimate == 2
    assert seqs(found) == [3, 4, 5]
    assert page(world, 2).tombstone is None
    assert page(world, tags="none").tombstone is not None
    assert page(world, found.cursor).tombstone is None


def test_deleted_records_at_the_beginning_are_skipped_without_a_tombstone(world):
    """The deleted records may end in the middle of a frame."""
    fill(world, 5)
    world.earliest_seq = 4
    found = page(world)
    assert (found.tombstone, seqs(found)) == (None, [4, 5])
    world.earliest_seq = 6
    empty = page(world)
    assert (empty.tombstone, seqs(empty), empty.caught_up, empty.cursor.seq) == (None, [], True, 5)


def test_a_restart_loss_ends_one_page_and_starts_the_next(world):
    """A page has at most one tombstone, and the tombstone precedes its records."""
    fill(world, 33)
    world.skip_to(258)
    world.lost = [34, 257]
    world.append([b"x"])
    first = page(world)
    assert (len(first), first.cursor.seq, first.tombstone, first.caught_up) == (33, 33, None, False)
    second = page(world, first.cursor)
    assert second.tombstone == Tombstone("t", 34, 257, "restart_loss", 1, 258)
    assert (seqs(second), second.caught_up) == ([258], True)


def test_a_recreated_topic_is_read_from_its_beginning(world):
    """The reader compares epochs: the seq of the old cursor is below the new head."""
    fill(world, 3)
    old = page(world).cursor
    world.recreate()
    fill(world, 5)
    found = page(world, old)
    assert found.tombstone == Tombstone("t", 1, 5, "recreated", 1, 5)
    assert (seqs(found), found.cursor) == ([1, 2, 3, 4, 5], Cursor(2, 5))
    assert page(world, 9).tombstone.reason == "recreated"
    assert page(world, found.cursor).tombstone is None


# -- leased records -------------------------------------------------------------------------------------


def test_leased_records_are_read_from_any_position(world, source):
    fill(world, 2, 3)
    found: list = []
    world.run(source.read_leased(1, 2, 1, found))
    world.write([b"job"] * 3)
    world.publish()
    world.run(source.read_leased(3, 8, 1, found))
    assert [int(seq) for piece in found for seq in piece.seqs] == list(range(1, 9))


# -- long-poll ------------------------------------------------------------------------------------------


def begin(world, source, after, wait_s):
    return world.begin(read_page(source, "t", Cursor(0, after), limit=10, max_bytes=1000, wait_s=wait_s))


@pytest.fixture
def source(world):
    made = LocalSource(world, "t", clock=world.clock)
    yield made
    made.close()


def test_a_waiting_read_wakes_up_for_a_new_record(world, source):
    """Records of other topics do not end the wait."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    assert not waiting.is_done
    world.write_other()
    world.publish()
    assert not waiting.is_done
    fill(world, 1)
    assert seqs(waiting.result()) == [2]


def test_a_waiting_read_ends_at_its_timeout(world, source):
    """The page is empty and caught up."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    world.time_out(5.0)
    assert not waiting.is_done
    world.time_out(5.0)
    assert (len(waiting.result()), waiting.result().caught_up) == (0, True)


def test_a_read_with_records_or_a_tombstone_does_not_wait(world, source):
    """A tombstone also ends the wait."""
    fill(world, 1)
    assert begin(world, source, 0, 10.0).is_done
    world.earliest_seq = world.ttl_floor = 2
    assert begin(world, source, 0, 10.0).result().tombstone.reason == "ttl"


def test_a_waiting_read_fails_when_its_topic_is_deleted(world, source):
    """The error is `TopicNotFound`."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    world.delete()
    with pytest.raises(TopicNotFound):
        waiting.result()


def test_a_waiting_read_continues_over_an_engine_restart(world, source):
    """The reader continues in the files of the next incarnation."""
    fill(world, 2)
    waiting = begin(world, source, 2, inf)
    world.restart()
    assert not waiting.is_done
    world.roll(incarnation=2)
    fill(world, 1)
    assert seqs(waiting.result()) == [3]


def test_a_reader_waits_for_the_published_mark_of_a_visible_head(world, source):
    """The shard publishes the head of a topic an instant before the mark.

    The reader must skip no record in between.
    """
    fill(world, 1)
    world.write([b"2"])
    world.head_seq = 2
    waiting = begin(world, source, 1, 0.0)
    assert not waiting.is_done
    world.publish()
    assert seqs(waiting.result()) == [2]


def test_a_page_is_not_caught_up_if_the_published_mark_never_comes(world, source):
    """The cursor never passes the last record that was read."""
    fill(world, 1)
    world.write([b"2"])
    world.head_seq = 2
    waiting = begin(world, source, 1, 0.0)
    for _ in range(100):
        world.time_out(0.05)
    found = waiting.result()
    assert (len(found), found.cursor.seq, found.caught_up) == (0, 1, False)


def test_a_record_above_the_head_is_not_returned(world, source):
    """The file may contain records that the shard has not published yet."""
    fill(world, 1)
    world.write([b"2"])
    world.publish(with_head=False)
    assert seqs(begin(world, source, 0, 0.0).result()) == [1]


def test_a_read_fails_if_the_topic_facts_stay_unreadable(world, source, monkeypatch):
    fill(world, 1)
    monkeypatch.setattr(world, "facts", lambda _: None)
    waiting = begin(world, source, 0, 0.0)
    for _ in range(150):
        world.time_out(0.05)
        assert not waiting.is_done, "seconds are a pause"
    for _ in range(60):
        world.time_out(0.05)
    with pytest.raises(NotReady):
        waiting.result()


def test_a_read_continues_when_the_topic_facts_become_readable(world, source, monkeypatch):
    """The process that moves the topic's files, or its shard, was being replaced.

    For the reader this is a pause.
    """
    fill(world, 2)
    with monkeypatch.context() as patch:
        patch.setattr(world, "facts", lambda _: None)
        waiting = begin(world, source, 0, 0.0)
        for _ in range(100):
            world.time_out(0.05)
        assert not waiting.is_done
    world.time_out(0.05)
    assert seqs(waiting.result()) == [1, 2]


# -- damage ---------------------------------------------------------------------------------------------


def test_records_before_the_damage_are_returned_before_the_error(world):
    """A damaged record is neither skipped nor returned without its payload."""
    fill(world, 2)
    bad = world.write([b"bad"])
    fill(world, 2)
    world.file.damage(bad + 90)
    reader = Reader(world, "t")
    items = iter(reader)
    assert [next(items).seq, next(items).seq] == [1, 2]
    with pytest.raises(CorruptData) as e:
        next(items)
    reader.close()
    assert (e.value.detail["seq"], e.value.detail["offset"]) == (3, bad)
    assert reader.cursor.seq == 2


def test_missing_records_are_an_error_and_no_gap(world):
    """If the topic id of a frame is damaged, the frame seems to belong to another topic.

    The reader notices the missing seqs.
    """
    fill(world, 2)
    bad = world.write([b"lost"])
    fill(world, 2)
    world.file.damage(bad + 8, flip=8)
    items = iter(Reader(world, "t"))
    assert [next(items).seq, next(items).seq] == [1, 2]
    with pytest.raises(CorruptData, match="missing") as e:
        next(items)
    assert (e.value.detail["seq"], e.value.detail["found_seq"]) == (3, 4)
    assert world.locates <= 4


# -- the iterator ---------------------------------------------------------------------------------------


def test_a_reader_returns_records_and_tombstones_in_order_up_to_the_head(world):
    fill(world, 3, 3)
    world.roll()
    fill(world, 3)
    world.earliest_seq = world.cap_floor = 3
    with Reader(world, "t") as reader:
        items = list(reader)
    assert isinstance(items[0], Tombstone)
    assert [record.seq for record in items[1:]] == [3, 4, 5, 6, 7, 8, 9]


def test_the_cursor_of_a_reader_is_after_the_last_returned_item(world):
    """A cursor can be stored as text and parsed again."""
    fill(world, 5)
    reader = Reader(world, "t", 2)
    for item in reader:
        if item.seq == 3:
            break
    assert reader.cursor == Cursor(1, 3)
    reader.close()
    assert Cursor.parse(str(reader.cursor)) == Cursor(1, 3)
    assert [record.seq for record in Reader(world, "t", reader.cursor)] == [4, 5]


def test_a_reader_can_seek_during_an_iteration(world):
    fill(world, 5)
    got = []
    reader = Reader(world, "t")
    for item in reader:
        got.append(item.seq)
        if got == [1, 2, 3]:
            reader.seek(2)
    reader.close()
    assert got == [1, 2, 3, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (EARLIEST, 1),
        (0, 1),
        (4, 4),
        (Cursor(1, 4), 5),
        (datetime.fromtimestamp(TS_US / 1e6, UTC) + timedelta(microseconds=5), 6),
        (datetime(2000, 1, 1, tzinfo=UTC), 1),
    ],
)
def test_a_reader_starts_at_the_given_position(world, start, first):
    fill(world, 1, 1, 1, 1, 1, 1, 1)
    assert next(iter(Reader(world, "t", start))).seq == first


def test_a_reader_at_latest_returns_only_later_records(world):
    fill(world, 3)
    reader = Reader(world, "t", LATEST)
    assert list(reader) == []
    fill(world, 1)
    assert [record.seq for record in reader] == [4]
    assert list(Reader(world, "t", datetime(2100, 1, 1, tzinfo=UTC))) == []


def test_a_time_without_a_zone_is_refused(world):
    with pytest.raises(UsageError, match="time zone"):
        list(Reader(world, "t", datetime(2020, 1, 1)))


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "a:b", "1:2:3", "-1:2"])
def test_what_is_no_cursor_is_refused(text):
    with pytest.raises(UsageError):
        Cursor.parse(text)


def test_pages_of_a_large_frame_read_the_file_once(world, monkeypatch):
    """The reader keeps frames that a page did not use for the next page."""
    fill(world, 1000)
    reader = Reader(world, "t")
    pages = reader.pages(limit=100)
    assert next(pages).cursor.seq == 100
    monkeypatch.setattr(world.disk, "read_into", None)
    monkeypatch.setattr("ringlog.storage.real_disk.RealDisk.read_into", None)
    assert [len(page_) for page_ in pages] == [100] * 9
    assert world.locates == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=25),
    limit=st.integers(1, 40),
    max_bytes=st.integers(1, 300),
    earliest=st.integers(1, 200),
    is_cap=st.booleans(),
)
def test_pages_chained_by_cursors_contain_every_live_record_once(
    tmp_path_factory, writes, limit, max_bytes, earliest, is_cap
):
    """Records are in order, and each gap is reported once."""
    world = LogWorld(str(tmp_path_factory.mktemp("w")))
    tags = []
    for count, roll, others in writes:
        if roll:
            world.roll()
        if others:
            world.write_other()
        part = [b"a" if (world.head_seq + i) % 3 else b"b" for i in range(count)]
        world.append([b"%d" % (world.head_seq + 1 + i) for i in range(count)], {Column.TAG: part})
        tags += part
    earliest = min(earliest, world.head_seq + 1)
    world.earliest_seq = earliest
    world.cap_floor = earliest if is_cap else 1
    for wanted in (None, "b"):
        cursor, got, gaps = Cursor(0, 0), [], []
        for _ in range(2000):
            found = world.run(read(world, "t", cursor, limit=limit, max_bytes=max_bytes, tags=wanted))
            got += [(record.seq, record.data) for record in found]
            gaps += [found.tombstone] if found.tombstone else []
            assert found.cursor.seq >= cursor.seq
            cursor = found.cursor
            if found.caught_up:
                break
        live = range(earliest, world.head_seq + 1)
        assert got == [(s, b"%d" % s) for s in live if wanted is None or tags[s - 1] == b"b"]
        assert len(gaps) == (is_cap and earliest > 1)
    world.close()


def test_a_waiting_read_waits_if_its_filter_leaves_no_record(world):
    """A new record ends the wait even if the filter does not match it."""
    world.append([b"a"], {Column.TAG: [b"other"]})
    waiting = world.begin(read(world, "t", 0, tags="mine", wait_ms=1000))
    assert not waiting.is_done
    world.append([b"b"], {Column.TAG: [b"mine"]})
    assert seqs(waiting.result()) == [2]
    waiting = world.begin(read(world, "t", 2, tags="mine", wait_ms=1000))
    world.append([b"c"], {Column.TAG: [b"other"]})
    found = waiting.result()
    assert (seqs(found), found.cursor.seq, found.caught_up) == ([], 3, True)


def test_a_waiting_read_skips_deleted_records(world):
    """A page without records waits, although the cursor is below the head."""
    fill(world, 3)
    world.remove([2, 3])
    waiting = world.begin(read(world, "t", 1, wait_ms=1000))
    assert not waiting.is_done
    fill(world, 1)
    assert seqs(waiting.result()) == [4]
