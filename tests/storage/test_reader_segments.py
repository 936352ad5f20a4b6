"""One topic in the log, in segments or in both, hot or cold: every place gives the same records."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.actors.gateway.events import ReadFiles
from ringlog.actors.gateway.reads.frame_reader import read_files
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor
from ringlog.client.read.paging import read, read_page
from ringlog.client.read.record_batches import visible_record_batches
from ringlog.client.read.tail_batch import tail_batches_of
from ringlog.errors import ColdUnavailable, CorruptData, NotReady
from ringlog.frame import batch as frames
from ringlog.frame.layout import Column
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.reader import Pause, TopicReader
from ringlog.storage.segment_cache import SegmentCache
from ringlog.testing.disk import SimulatedDisk
from tests.support.log_file import TS_US
from tests.support.log_world import LogWorld, log_world_fixture
from tests.support.segment_files import make_segment

world = log_world_fixture()


def fill(world, *counts):
    for count in counts:
        first = world.head_seq + 1
        world.append(
            [b"payload %d" % n for n in range(first, first + count)],
            {Column.TAG: [b"even" if n % 2 == 0 else b"" for n in range(first, first + count)]},
        )


def pages(world, after=0, *, limit=1000, is_mapped=False):
    """Return (seq, payload, stamp) of all records after `after`, page by page."""
    source = LocalSource(world, "t", is_mapped=is_mapped)
    found, cursor = [], Cursor(0, after)
    try:
        while True:
            page = world.run(read_page(source, "t", cursor, limit=limit))
            found += [(record.seq, record.data, record.ts) for record in page.records]
            assert page.cursor.seq > cursor.seq or page.caught_up
            if page.caught_up:
                return found
            cursor = page.cursor
    finally:
        source.close()


def tailed(world, after=0):
    """Return the same by the tailer's batches, from NumPy and from Arrow."""
    source = LocalSource(world, "t", is_mapped=True)
    found, cursor = [], Cursor(0, after)
    try:
        while True:
            portion = world.run(source.fetch(cursor, limit=1 << 62, bytes_max=1 << 16, wait_s=0.0))
            for batch in tail_batches_of(portion, "t"):
                data, offsets = batch.numpy()
                payloads = [data[a:b].tobytes() for a, b in pairwise(offsets.tolist())]
                table = batch.arrow()
                assert table["payload"].to_pylist() == payloads == batch.bytes()
                assert [bytes(view) for view in batch.memoryviews()] == payloads
                assert [p for view in batch.frames() for p in view.to_list()] == payloads
                assert len(batch) == len(payloads)
                stamps = table["ts"].cast("int64").to_pylist()
                assert batch.ts == stamps[-1]
                found += list(zip(table["seq"].to_pylist(), payloads, stamps, strict=True))
            cursor = Cursor(portion.epoch, max(portion.after, portion.examined))
            if cursor.seq >= portion.head_seq:
                return found
    finally:
        source.close()


def sent(world, after=0, *, limit=50, max_bytes=1 << 20):
    """Return the same from what a gateway sends: frames, and the seqs in them to omit."""
    found, cold, data = [], None, None
    shelf = SegmentCache(world.disk, world.data_dir)
    for _ in range(10_000):
        located = world.run(_located(world, after))
        start = max(after, located.earliest_seq - 1)
        wanted = ReadFiles(1, located, start, located.head_seq, limit, max_bytes, _now_us(), cold, data)
        got = read_files(
            wanted, data_dir=world.data_dir, shm_dir=world.shm_dir, disk=world.disk, segment_cache=shelf,
            read_watermark=lambda _: LogHighWatermark(*world.marks(0).wal),
        )  # fmt: skip
        if got.error is not None:
            raise got.error
        if got.cold is not None:
            cold, data = got.cold, world.cold_read(got.cold).result()
            continue
        if got.frames:
            hidden = np.array(BitMap64.deserialize(got.hidden).to_array(), np.int64) if got.hidden else []
            batch = frames.scan(got.data)
            assert frames.first_bad_seal(batch, 0) is None
            for row in range(len(batch)):
                run = FrameRun(memoryview(got.data), batch.take(slice(row, row + 1)), 0, "", 0)
                seen = max(start, found[-1][0] if found else 0)
                for piece in visible_record_batches(
                    run, seen, got.examined, np.asarray(hidden, np.int64), "t"
                ):
                    found += [(record.seq, record.data, record.ts) for record in piece.records()]
        assert got.examined > after or got.examined == located.head_seq
        after, cold, data = got.examined, None, None
        if after >= located.head_seq:
            shelf.close()
            return found
    raise AssertionError("no end")


def _located(world, after):
    return (yield world.locate("t", after))


def _now_us():
    return time.time_ns() // 1000


# -- storage places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("way", [pages, tailed, sent])
def test_log_and_segments_give_the_same_records(world, way, compression):
    """The test compares seqs, payloads and commit stamps."""
    fill(world, 3, 1, 40, 200, 7)
    expected = way(world)
    assert [record[0] for record in expected] == list(range(1, 252))
    world.seal(compression, trims=False)
    assert way(world) == expected
    fill(world, 5)
    assert way(world)[:-5] == expected
    world.seal(compression)
    world.rewrite(compression)
    fill(world, 2)
    assert way(world)[:-7] == expected
    assert [record[0] for record in way(world)] == list(range(1, 259))


def test_reading_starts_at_the_frame_that_contains_the_next_record(world):
    """With the index, the reader reads no earlier frame."""
    for _ in range(4):
        fill(world, 4000)
    world.seal()
    extent = world.sealed[0]
    reader = TopicReader(
        world.run(_located(world, 0)), 12_345, data_dir=world.data_dir, shm_dir=world.shm_dir,
        read_watermark=lambda _: LogHighWatermark(0, 0), disk=world.disk,
        segment_cache=SegmentCache(world.disk, world.data_dir),
    )  # fmt: skip
    run = reader.next_run(world.head_seq)
    reader.close()
    assert run.origin > extent.start
    assert run.first_seq <= 12_346 <= run.last_seq
    assert [record[0] for record in pages(world, 12_345)] == list(range(12_346, 16_001))


def test_one_source_seeks_forward_and_backward(world):
    """It seeks forward by the index and backward by a new location, also across segments."""
    for _ in range(3):
        for _ in range(8):
            fill(world, 4000)
        world.seal()
    fill(world, 10)
    source = LocalSource(world, "t")
    for after in (3, 70_000, 95_999, 96_005, 20, 31_999, 32_000, 64_100, 50_000, 90_000):
        page = world.run(read_page(source, "t", Cursor(1, after), limit=2))
        assert [record.seq for record in page.records] == [after + 1, after + 2]
    source.close()


def test_a_damaged_index_only_makes_reads_slower(world):
    fill(world, 500)
    world.seal()
    path = world.sealed[0].path.replace(".data", ".idx")
    with open(f"{world.data_dir}/{path}", "r+b") as file:
        file.seek(100)
        file.write(b"rot")
    assert [record[0] for record in pages(world, 400)] == list(range(401, 501))


def test_a_segment_needs_no_published_mark(world):
    fill(world, 10)
    world.seal()
    reader = TopicReader(
        world.run(_located(world, 0)), 0, data_dir=world.data_dir, shm_dir=world.shm_dir,
        read_watermark=lambda _: LogHighWatermark(0, 0), disk=world.disk,
    )  # fmt: skip
    assert reader.next_run(10).last_seq == 10
    assert reader.next_run(10) in {Pause.AT_MARK, Pause.MOVED}
    reader.close()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_segment_replaced_during_a_read_is_located_again(world, is_mapped):
    """The reader raises no error and returns no record twice, before and after the replacement."""
    for _ in range(5):
        fill(world, 100)
    world.seal()
    fill(world, 100)
    world.seal()
    source = LocalSource(world, "t", is_mapped=is_mapped)
    first = world.run(read_page(source, "t", Cursor(0, 0), limit=10))
    world.rewrite()
    found = [record.seq for record in first.records]
    cursor = first.cursor
    while not (page := world.run(read_page(source, "t", cursor, limit=100))).caught_up or len(page):
        found += [record.seq for record in page.records]
        cursor = page.cursor
    source.close()
    assert found == list(range(1, 601))


# -- damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pages, tailed, sent])
def test_damage_in_a_segment_is_reported_after_the_records_before_it(world, way):
    """The error contains topic, first_seq, last_seq and file."""
    for _ in range(4):
        fill(world, 4000)
    world.seal()
    extent = world.sealed[0]
    located = world.run(_located(world, 0))
    place = SegmentCache(world.disk, world.data_dir).frame_at(extent.path, world.topic_id, 9000)
    with open(f"{world.data_dir}/{extent.path}", "r+b") as file:
        file.seek(place.offset + 300)
        byte = file.read(1)
        file.seek(place.offset + 300)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptData) as e:
        way(world)
    detail = e.value.detail
    assert (detail["topic"], detail["file"]) == ("t", extent.path)
    assert (detail["first_seq"], detail["last_seq"]) == (place.first_seq, place.last_seq)
    source = LocalSource(world, "t")
    page = world.run(read_page(source, "t", Cursor(0, place.first_seq - 10), limit=1000))
    source.close()
    assert [record.seq for record in page.records] == list(range(place.first_seq - 9, place.first_seq))
    assert located.head_seq == 16_000


def test_a_frame_of_another_topic_in_a_segments_range_is_damage(world):
    fill(world, 10)
    world.seal()
    world.topic_id = 6
    with pytest.raises(CorruptData, match="another topic"):
        pages(world)


# -- hidden records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pages, tailed, sent])
@pytest.mark.parametrize("seals", ["no", "before", "after", "rewritten"])
def test_deleted_records_are_skipped_wherever_they_are_stored(world, way, seals):
    """Deleted records give no tombstone."""
    fill(world, 100, 300, 100)
    if seals not in {"no", "after"}:
        world.seal()
    gone = set(range(1, 10)) | {50, 99, 101} | set(range(200, 300)) | {500}
    world.remove(gone)
    if seals == "after":
        world.seal()
    if seals == "rewritten":
        world.rewrite()
    fill(world, 3)
    world.remove({502})
    found = [record[0] for record in way(world)]
    assert found == [n for n in range(1, 504) if n not in gone | {502}]


@pytest.mark.parametrize("way", [pages, tailed, sent])
def test_a_reader_reaches_the_head_if_the_last_records_are_deleted(world, way):
    """The segment omits the deleted records, and no record follows."""
    fill(world, 100, 200)
    world.remove(range(150, 301))
    world.seal()
    assert [record[0] for record in way(world)] == list(range(1, 150))
    assert way(world, 149) == []
    page = world.run(read(world, "t", 149))
    assert (page.caught_up, page.cursor.seq, page.tombstone) == (True, 300, None)


def test_a_delete_hides_records_that_a_reader_read_ahead(world):
    """The reader already has the frames in memory."""
    fill(world, 1000)
    source = LocalSource(world, "t")
    first = world.run(read_page(source, "t", Cursor(0, 0), limit=10))
    world.remove(range(15, 900))
    second = world.run(read_page(source, "t", first.cursor, limit=10))
    source.close()
    assert [record.seq for record in second.records] == [11, 12, 13, 14, *range(900, 906)]


@pytest.mark.parametrize("way", [pages, tailed, sent])
@pytest.mark.parametrize("compression", ["log", "none", "zstd"])
def test_expired_records_are_skipped(world, way, compression):
    """Expired records are hidden before the shard removes them, in one-record frames and in large ones."""
    past, future = _now_us() - 1_000_000, _now_us() + 3_600_000_000
    times = [0, past, future, past, 0, past]
    for at in times:
        world.write([b"small"], {Column.EXPIRES_AT: [at]})
    large = {Column.EXPIRES_AT: [times[n % 6] for n in range(100)], Column.NOT_BEFORE: [0] * 100}
    world.write([b"large %d" % n for n in range(100)], large)
    world.publish()
    if compression != "log":
        world.seal(compression)
    expected = [1, 3, 5, *(7 + n for n in range(100) if times[n % 6] != past)]
    assert [record[0] for record in way(world)] == expected


@pytest.mark.parametrize("way", [pages, tailed, sent])
def test_records_older_than_the_topics_ttl_are_skipped(world, way):
    """They are hidden before the shard removes them."""
    now = _now_us()
    for seconds in (100, 50, 20, 5):
        world.write([b"a", b"b"], ts=now - seconds * 1_000_000)
        world.publish()
    world.ttl_us = 30_000_000
    world.version += 1
    assert [record[0] for record in way(world)] == [5, 6, 7, 8]
    world.seal()
    assert [record[0] for record in way(world)] == [5, 6, 7, 8]


def test_a_reader_queries_the_shard_first_if_records_are_due_to_expire(world):
    """The shard's answer makes tombstones exact."""
    fill(world, 10)
    source = LocalSource(world, "t")
    world.run(read_page(source, "t", Cursor(0, 0), limit=2))
    before = world.locates
    world.due_us = _now_us() - 1
    world.ttl_floor = world.earliest_seq = 6
    page = world.run(read_page(source, "t", Cursor(1, 2), limit=2))
    source.close()
    assert world.locates == before + 1
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (3, 5, "ttl")
    assert [record.seq for record in page.records] == [6, 7]


def test_a_topic_with_constantly_expiring_records_can_be_read(world):
    """Records that come due during the query are left to the next read."""
    fill(world, 10)

    class Hasty:
        """A source in which a record is always due just after the shard answered."""

        def __getattr__(self, name):
            return getattr(world, name)

        def facts(self, located):
            world.due_us = _now_us() - 1
            return world.facts(located)

    source = LocalSource(Hasty(), "t")
    page = world.run(read_page(source, "t", Cursor(0, 0), limit=100))
    source.close()
    assert len(page) == 10
    assert world.locates <= 2


def test_a_lost_range_inside_a_segments_frame_gives_a_tombstone(world):
    """The reader returns the records before the range, then the tombstone, then the records after it."""
    fill(world, 20)
    world.lost = [21, 30]
    world.skip_to(31)
    world.write([b"after"] * 10)
    world.publish()
    world.seal()
    source = LocalSource(world, "t")
    first = world.run(read_page(source, "t", Cursor(0, 5), limit=100))
    second = world.run(read_page(source, "t", first.cursor, limit=100))
    source.close()
    assert [record.seq for record in first.records] == list(range(6, 21))
    assert (second.tombstone.gap_from, second.tombstone.gap_to) == (21, 30)
    assert [record.seq for record in second.records] == list(range(31, 41))


@pytest.mark.parametrize("way", [pages, sent])
@pytest.mark.parametrize("frame_records", [1, 7, 400])
def test_hidden_records_do_not_count_towards_a_limit(world, way, frame_records):
    """A range of many frames is cut where the limit of visible records is reached, and no record is
    skipped."""
    for _ in range(2800 // frame_records):
        fill(world, frame_records)
    gone = {n for n in range(1, 2801) if n % 2 == 0 or 100 < n < 900}
    world.remove(gone)
    expected = [n for n in range(1, 2801) if n not in gone]
    for options in ({"limit": 1000}, {"limit": 11}):
        assert [record[0] for record in way(world, **options)] == expected
    if way is sent:
        assert [record[0] for record in sent(world, max_bytes=500)] == expected


# -- cold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pages, tailed, sent])
@pytest.mark.parametrize("has_dir", [True, False])
def test_cold_records_are_the_same_from_a_directory_or_the_relocator(world, way, has_dir):
    """The reader opens a directory on this host itself. The relocator reads any other store."""
    fill(world, 100, 4000, 4000)
    world.seal()
    expected = way(world)
    world.cold_dir = f"{world.data_dir}/cold" if has_dir else ""
    world.move_to_cold()
    fill(world, 5)
    assert way(world)[:-5] == expected
    assert bool(world.cold_reads) == (not has_dir or way is sent)


@pytest.mark.parametrize("way", [pages, tailed, sent])
def test_cold_frames_without_visible_records_are_skipped(world, way):
    """The frames are fetched one by one, and the first ones contain only hidden records."""
    for _ in range(5):
        fill(world, 4000)
    world.seal()
    world.move_to_cold()
    world.remove(range(2, 12_300))
    assert [record[0] for record in way(world)] == [1, *range(12_300, 20_001)]


@pytest.mark.parametrize("has_dir", [True, False])
def test_a_missing_cold_store_gives_not_ready_and_no_data_loss(world, has_dir):
    """The records are readable again when the store returns."""
    fill(world, 100)
    world.seal()
    world.cold_dir = f"{world.data_dir}/cold" if has_dir else ""
    world.move_to_cold()
    os.rename(f"{world.data_dir}/cold", f"{world.data_dir}/elsewhere")
    with pytest.raises(NotReady) as e:
        pages(world)
    assert e.value.detail["reason"] == "cold_unavailable"
    os.rename(f"{world.data_dir}/elsewhere", f"{world.data_dir}/cold")
    assert len(pages(world)) == 100


def test_a_cold_segment_of_another_engine_with_the_same_name_is_not_ready_and_no_damage(world):
    """The wrong volume is mounted. Only the salts of the segments differ."""
    fill(world, 100)
    world.seal()
    world.cold_dir = f"{world.data_dir}/cold"
    world.move_to_cold()
    (extent,) = world.sealed
    theirs = SimulatedDisk("/theirs")
    ref = make_segment(theirs, "/theirs", extent.segment, {world.topic_id: range(1, 101)})
    before = _swap(f"{world.cold_dir}/{extent.path}", theirs.contents()[f"/theirs/{ref.stem}.data"])
    with pytest.raises(ColdUnavailable, match="of another engine"):
        pages(world)
    _swap(f"{world.cold_dir}/{extent.path}", before)
    assert len(pages(world)) == 100


def _swap(path: str, data: bytes) -> bytes:
    with open(path, "rb+") as file:
        before = file.read()
        file.seek(0)
        file.write(data)
        file.truncate()
    return before


# -- time ------------------------------------------------------------------------------------------------


def test_a_start_by_time_is_exact_wherever_the_records_are_stored(world):
    """The records of one segment frame have different stamps."""
    for n in range(60):
        world.write([b"x", b"y"], ts=TS_US + 10 * n)
    world.publish()
    for _ in range(3):
        for wanted, after in ((0, 0), (10, 2), (11, 4), (590, 118), (591, 120)):
            source = LocalSource(world, "t")
            cursor = world.run(source.seek_time(TS_US + wanted))
            source.close()
            assert cursor == Cursor(1, after)
        world.seal()


# -- any history ------------------------------------------------------------------------------------------

_RANGES = st.lists(st.tuples(st.integers(0, 999), st.integers(1, 90)), max_size=3)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 120)),
        st.tuples(st.just("remove"), _RANGES),
        st.tuples(st.just("seal"), st.sampled_from(["none", "zstd"])),
        st.tuples(st.just("keep"), st.sampled_from(["none", "lz4"])),
        st.tuples(st.just("rewrite"), st.sampled_from(["none", "zstd"])),
        st.tuples(st.just("chill"), st.just(0)),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_STEPS, st.integers(0, 300), st.sampled_from([1, 7, 1000]))
def test_every_read_path_agrees_with_a_list_after_any_history(tmp_path_factory, steps, after, limit):
    """The history mixes log, segments, rewritten and cold segments, and deletes before and after each
    step."""
    world = LogWorld(str(tmp_path_factory.mktemp("w")))
    world.cold_dir = f"{world.data_dir}/cold"
    model = {}
    for step, value in steps:
        if step == "append":
            first = world.head_seq + 1
            fill(world, value)
            model |= {n: b"payload %d" % n for n in range(first, first + value)}
        elif step == "remove":
            for start, count in value:
                first = start % (world.head_seq + 1) + 1
                gone = {n for n in range(first, min(first + count, world.head_seq + 1)) if n in model}
                world.remove(gone)
                model = {n: data for n, data in model.items() if n not in gone}
        elif step in {"seal", "keep"}:
            world.seal(value, trims=step == "seal")
        elif step == "rewrite":
            world.rewrite(value)
        else:
            world.move_to_cold()
    expected = [(seq, data) for seq, data in sorted(model.items()) if seq > after]
    if after <= world.head_seq:
        assert [found[:2] for found in pages(world, after, limit=limit)] == expected
        assert [found[:2] for found in tailed(world, after)] == expected
        assert [found[:2] for found in sent(world, after, limit=limit)] == expected
    world.close()
