"""Reading pages and records on real files: section 17, tombstones, filters, long-poll."""

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
from ringlog.testing.log_file import TS_US
from ringlog.testing.log_world import LogWorld


@pytest.fixture
def world(tmp_path):
    made = LogWorld(str(tmp_path))
    yield made
    made.close()


def page(world, after=0, **options):
    return world.run(read(world, "t", after, **options))


def seqs(page_):
    return [record.seq for record in page_.records]


def fill(world, *counts):
    for count in counts:
        world.append([b"%d" % n for n in range(world.head_seq + 1, world.head_seq + 1 + count)])


# -- pages ----------------------------------------------------------------------------------------------


def test_a_page_begins_behind_the_cursor_and_says_where_it_ends(world):
    """DR-4..DR-6, DR-8."""
    fill(world, 3, 4, 5)
    first = page(world, 1, limit=4)
    assert seqs(first) == [2, 3, 4, 5]
    assert (first.cursor, first.head_seq, first.earliest_seq) == (Cursor(1, 5), 12, 1)
    assert (first.caught_up, first.lag) == (False, 7)
    last = page(world, first.cursor)
    assert seqs(last) == [6, 7, 8, 9, 10, 11, 12]
    assert (last.caught_up, last.lag, last.tombstone) == (True, 0, None)
    assert last.bytes() == [b"%d" % n for n in range(6, 13)]


def test_an_empty_topic_is_an_empty_page(world):
    """CL-5: nothing there is no error."""
    empty = page(world)
    assert (seqs(empty), empty.caught_up, empty.cursor) == ([], True, Cursor(1, 0))


def test_a_topic_that_is_not_there_is_refused(world):
    """DR-2."""
    world.exists = False
    with pytest.raises(TopicNotFound):
        page(world)


@pytest.mark.parametrize(("asked", "given"), [(0, 256), (1, 1), (1000, 1000), (1001, 1000), (9999, 1000)])
def test_limits_are_clamped(world, asked, given):
    """DR-1, N-7."""
    fill(world, 1200)
    assert len(page(world, limit=asked)) == given


@pytest.mark.parametrize(
    "wrong", [{"limit": -1}, {"max_bytes": -1}, {"wait_ms": -1}, {"after": -1}, {"after": "x"}]
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_asked(world, wrong):
    with pytest.raises(UsageError):
        page(world, **wrong)
    assert world.locates == 0


def test_the_byte_budget_stops_before_the_record_that_would_exceed_it(world):
    """DR-12, R-10: payload and metadata count; exact fit is in, one byte less is not."""
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


def test_own_records_are_left_out_and_still_move_the_cursor(world):
    """NF-1..NF-4, DR-13, DR-20."""
    world.append([b"a", b"b", b"c"], {Column.NODE: [b"me", b"", b"you"]})
    assert seqs(page(world, node="me")) == [2, 3]
    assert seqs(page(world, node=["me", "you"])) == [2]
    world.append([b"d"], {Column.NODE: [b"me"]})
    own_only = page(world, 3, node="me")
    assert (seqs(own_only), own_only.caught_up) == ([], True)
    assert seqs(page(world, 3, node=[])) == [4]


def test_a_topic_may_switch_the_node_filter_off(world):
    """NF-5."""
    world.config["dedupe_node"] = False
    world.append([b"a"], {Column.NODE: [b"me"]})
    assert seqs(page(world, node="me")) == [1]


def test_a_node_id_that_is_too_long_is_refused(world):
    """NF-8, N-6d."""
    world.append([b"a"])
    assert seqs(page(world, node="n" * 128)) == [1]
    with pytest.raises(InvalidRequest):
        page(world, node="n" * 129)


def test_tags_are_matched_exactly_or_by_prefix(world):
    """DL-2..DL-4, DR-24."""
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
def test_other_filters_are_refused(wrong):
    """DL-2, DL-3, SEC-16."""
    with pytest.raises(InvalidRequest):
        tag_filter(wrong)


def test_filtered_records_cost_nothing_of_the_limit(world):
    """DR-13: the page goes on until it is full of records that pass."""
    for n in range(30):
        world.append(
            [b"x"] * 20, {Column.TAG: [b"hit" if n % 10 == 9 and i == 7 else b"miss" for i in range(20)]}
        )
    found = page(world, limit=2, tags="hit")
    assert seqs(found) == [188, 388]
    assert 388 <= found.cursor.seq < 588
    assert seqs(page(world, found.cursor, limit=2, tags="hit")) == [588]


def test_a_selective_filter_gives_up_after_many_records_and_says_so(world, monkeypatch):
    """DR-14: an empty page whose cursor advanced."""
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


def test_an_eviction_that_crossed_the_cursor_is_announced_with_the_records_behind_it(world):
    """TB-17 B, TB-8, TB-14."""
    fill(world, 1, 1, 1, 1, 1)
    world.cap_floor = world.earliest_seq = 3
    found = page(world)
    assert found.tombstone == Tombstone("t", 1, 2, "cap", 3, 5)
    assert found.tombstone.missed_estimate == 2
    assert seqs(found) == [3, 4, 5]
    assert page(world, 2).tombstone is None
    assert page(world, tags="none").tombstone is not None
    assert page(world, found.cursor).tombstone is None


def test_a_front_that_was_deleted_is_passed_over_silently(world):
    """TB-17 A and I, inside a frame too."""
    fill(world, 5)
    world.earliest_seq = 4
    found = page(world)
    assert (found.tombstone, seqs(found)) == (None, [4, 5])
    world.earliest_seq = 6
    empty = page(world)
    assert (empty.tombstone, seqs(empty), empty.caught_up, empty.cursor.seq) == (None, [], True, 5)


def test_a_restart_loss_ends_one_page_and_begins_the_next(world):
    """TB-12, TB-17 H."""
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
    """E-7..E-9, TB-9: by epoch, although the old cursor lies below the new head."""
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


def test_leased_records_are_found_wherever_they_lie(world, source):
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


def test_a_waiting_read_wakes_for_a_record(world, source):
    """DR-18, DR-19."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    assert not waiting.is_done
    world.write_other()
    world.publish()
    assert not waiting.is_done
    fill(world, 1)
    assert seqs(waiting.result()) == [2]


def test_a_waiting_read_ends_when_its_time_is_over(world, source):
    """DR-18."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    world.time_out(5.0)
    assert not waiting.is_done
    world.time_out(5.0)
    assert (len(waiting.result()), waiting.result().caught_up) == (0, True)


def test_a_read_that_has_something_to_say_does_not_wait(world, source):
    """DR-18."""
    fill(world, 1)
    assert begin(world, source, 0, 10.0).is_done
    world.earliest_seq = world.ttl_floor = 2
    assert begin(world, source, 0, 10.0).result().tombstone.reason == "ttl"


def test_a_waiting_read_ends_with_the_topic(world, source):
    """DR-21."""
    fill(world, 1)
    waiting = begin(world, source, 1, 10.0)
    world.delete()
    with pytest.raises(TopicNotFound):
        waiting.result()


def test_a_waiting_read_goes_on_over_a_restart_of_the_engine(world, source):
    """CL-7."""
    fill(world, 2)
    waiting = begin(world, source, 2, inf)
    world.restart()
    assert not waiting.is_done
    world.roll(incarnation=2)
    fill(world, 1)
    assert seqs(waiting.result()) == [3]


def test_a_head_without_its_mark_is_waited_for_not_skipped(world, source):
    """S-8: the head of the topic is published an instant before the mark; no record may fall between."""
    fill(world, 1)
    world.write([b"2"])
    world.head_seq = 2
    waiting = begin(world, source, 1, 0.0)
    assert not waiting.is_done
    world.publish()
    assert seqs(waiting.result()) == [2]


def test_a_mark_that_never_comes_gives_a_page_that_is_not_caught_up(world, source):
    """DR-14: never a cursor beyond what was seen."""
    fill(world, 1)
    world.write([b"2"])
    world.head_seq = 2
    waiting = begin(world, source, 1, 0.0)
    for _ in range(100):
        world.time_out(0.05)
    found = waiting.result()
    assert (len(found), found.cursor.seq, found.caught_up) == (0, 1, False)


def test_a_record_above_the_head_is_not_shown_yet(world, source):
    """S-9."""
    fill(world, 1)
    world.write([b"2"])
    world.publish(with_head=False)
    assert seqs(begin(world, source, 0, 0.0).result()) == [1]


def test_a_topic_that_never_holds_still_is_refused_in_the_end(world, source, monkeypatch):
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


def test_a_topic_that_holds_still_after_a_while_is_read(world, source, monkeypatch):
    """Promise 3: who moves its files, or its shard, was being replaced; for the reader that is a pause."""
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


def test_records_before_the_damage_come_first_and_then_the_error(world):
    """DR-16: never null, never skipped."""
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


def test_records_that_are_missing_are_an_error_not_a_gap(world):
    """DR-16: a frame whose topic id rotted looks like somebody else's; its numbers are missed."""
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


def test_a_reader_gives_every_record_and_tombstone_in_order_and_ends_at_the_head(world):
    fill(world, 3, 3)
    world.roll()
    fill(world, 3)
    world.earliest_seq = world.cap_floor = 3
    with Reader(world, "t") as reader:
        items = list(reader)
    assert isinstance(items[0], Tombstone)
    assert [record.seq for record in items[1:]] == [3, 4, 5, 6, 7, 8, 9]


def test_a_readers_cursor_is_behind_the_item_given_last(world):
    """E-3, E-5."""
    fill(world, 5)
    reader = Reader(world, "t", 2)
    for item in reader:
        if item.seq == 3:
            break
    assert reader.cursor == Cursor(1, 3)
    reader.close()
    assert Cursor.parse(str(reader.cursor)) == Cursor(1, 3)
    assert [record.seq for record in Reader(world, "t", reader.cursor)] == [4, 5]


def test_a_reader_may_be_moved_while_it_runs(world):
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
def test_a_reader_starts_where_it_is_told(world, start, first):
    fill(world, 1, 1, 1, 1, 1, 1, 1)
    assert next(iter(Reader(world, "t", start))).seq == first


def test_a_reader_at_the_end_sees_only_what_comes(world):
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
    """Frames a page did not use are kept for the next."""
    fill(world, 1000)
    reader = Reader(world, "t")
    pages = reader.pages(limit=100)
    assert next(pages).cursor.seq == 100
    monkeypatch.setattr(world.disk, "read_into", None)
    monkeypatch.setattr("ringlog.storage.disk.RealDisk.read_into", None)
    assert [len(page_) for page_ in pages] == [100] * 9
    assert world.locates == 1


@settings(max_examples=60, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=25),
    limit=st.integers(1, 40),
    max_bytes=st.integers(1, 300),
    earliest=st.integers(1, 200),
    is_cap=st.booleans(),
)
def test_pages_chained_by_their_cursors_equal_the_list(
    tmp_path_factory, writes, limit, max_bytes, earliest, is_cap
):
    """DR-8, TB-16: every live record once, in order, and each gap announced once."""
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


def test_a_waiting_read_whose_filter_leaves_nothing_waits_for_the_next_record(world):
    """DR-18: no records yield, whatever the reason; DR-20: one wake-up, whatever it brings."""
    world.append([b"a"], {Column.TAG: [b"other"]})
    waiting = world.begin(read(world, "t", 0, tags="mine", wait_ms=1000))
    assert not waiting.is_done
    world.append([b"b"], {Column.TAG: [b"mine"]})
    assert seqs(waiting.result()) == [2]
    waiting = world.begin(read(world, "t", 2, tags="mine", wait_ms=1000))
    world.append([b"c"], {Column.TAG: [b"other"]})
    found = waiting.result()
    assert (seqs(found), found.cursor.seq, found.caught_up) == ([], 3, True)


def test_a_waiting_read_passes_over_what_is_deleted(world):
    """DR-13, DR-18."""
    fill(world, 3)
    world.remove([2, 3])
    waiting = world.begin(read(world, "t", 1, wait_ms=1000))
    assert not waiting.is_done
    fill(world, 1)
    assert seqs(waiting.result()) == [4]
