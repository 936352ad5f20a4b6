"""Merging of frames in a segment: where a frame ends, and which records are omitted."""

from __future__ import annotations

import pytest

from ringlog.errors import FrameInvalid, InvariantViolation
from ringlog.frame.layout import Column
from ringlog.limits import SEALED_FRAME_BYTES, SEALED_FRAME_RECORDS
from ringlog.segment.layout import (
    CREATOR_RECLAIMER,
    CREATOR_SHIFT,
    DEL,
    NumberAllocator,
    pack_stem,
    parse_stem,
    split_part,
    topic_stem,
)
from ringlog.segment.parts import part_names
from ringlog.segment.segment import Segment
from ringlog.tags import TagMatch
from ringlog.testing.disk import SimulatedDisk
from ringlog.types import Codec, Durability, PayloadKind
from tests.support.segment_samples import (
    NUMBER,
    STAMP,
    SampleTopic,
    simple_topic,
    stored_frames,
    write,
    writer,
)

DATA_DIR = "/data"


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(DATA_DIR)


def views(disk, ref) -> list:
    return [view for _, view in stored_frames(disk, DATA_DIR, ref.stem)]


def bounds(disk, ref) -> list[tuple[int, int]]:
    return [(view.first_seq, view.last_seq) for view in views(disk, ref)]


def test_small_frames_are_merged_up_to_the_record_limit(disk) -> None:
    topic = simple_topic(records=SEALED_FRAME_RECORDS + 5)
    ref = write(disk, DATA_DIR, [topic], at_once=100)
    assert bounds(disk, ref) == [(1, SEALED_FRAME_RECORDS), (SEALED_FRAME_RECORDS + 1, ref.records)]


def test_a_frame_ends_at_the_size_limit_and_a_large_record_gets_its_own_frame(disk) -> None:
    topic = SampleTopic(5, 1)
    seq = 1
    third = SEALED_FRAME_BYTES * 2 // 7
    for size in (third, third, third, third, SEALED_FRAME_BYTES, 10):
        seq = topic.add(seq, STAMP, {"payloads": [bytes(size)]})
    assert bounds(disk, write(disk, DATA_DIR, [topic])) == [(1, 3), (4, 4), (5, 5), (6, 6)]


def test_a_frame_ends_where_class_or_payload_kind_changes(disk) -> None:
    topic = SampleTopic(5, 1)
    classes = [Durability.DISK, Durability.DISK, Durability.FSYNC, Durability.FSYNC, Durability.FSYNC]
    kinds = [PayloadKind.BYTES, PayloadKind.BYTES, PayloadKind.BYTES, PayloadKind.JSON, PayloadKind.JSON]
    for i, (durability, kind) in enumerate(zip(classes, kinds, strict=True)):
        topic.add(i + 1, STAMP, {"payloads": [b"x"]}, durability=durability, kind=kind)
    ref = write(disk, DATA_DIR, [topic])
    assert bounds(disk, ref) == [(1, 2), (3, 3), (4, 5)]
    assert [view.durability for view in views(disk, ref)] == [
        Durability.DISK,
        Durability.FSYNC,
        Durability.FSYNC,
    ]
    assert views(disk, ref)[2].payload_kind == PayloadKind.JSON


def test_commit_stamps_are_a_column_only_if_they_differ(disk) -> None:
    alike = SampleTopic(5, 1)
    for i in range(3):
        alike.add(i + 1, STAMP, {"payloads": [b"x"]})
    one, other = views(disk, write(disk, DATA_DIR, [alike, simple_topic(6)]))
    assert one.fixed_column(Column.COMMIT_TS) is None
    assert one.commit_stamps.tolist() == [STAMP] * 3
    assert other.commit_ts == STAMP
    assert other.commit_stamps.tolist() == [STAMP + 10 * i for i in range(40)]


@pytest.mark.parametrize("at_once", [1, 7, 1_000])
@pytest.mark.parametrize(("hole", "is_cut"), [(1, False), (63, False), (64, True), (200, True)])
def test_a_frame_is_split_at_64_or_more_dead_records_in_a_row(disk, hole, is_cut, at_once) -> None:
    topic = simple_topic(records=300)
    topic.dead = set(range(20, 20 + hole))
    ref = write(disk, DATA_DIR, [topic], at_once)
    expected = [(1, 19), (20 + hole, 300)] if is_cut else [(1, 300)]
    assert bounds(disk, ref) == expected
    assert disk.exists(f"{DATA_DIR}/{ref.stem}{DEL}") != is_cut
    segment = Segment.open(disk, DATA_DIR, ref.stem)
    assert set(segment.deleted(0)) == (set() if is_cut else topic.dead)
    segment.close()


@pytest.mark.parametrize("at_once", [1, 7, 1_000])
def test_dead_records_at_the_ends_are_omitted(disk, at_once) -> None:
    topic = simple_topic(records=50)
    topic.earliest_seq, topic.dead = 5, {5, 6, 49, 50}
    assert bounds(disk, write(disk, DATA_DIR, [topic], at_once)) == [(7, 48)]


def test_alternating_dead_records_do_not_split_a_frame(disk) -> None:
    topic = simple_topic(records=1_000)
    topic.dead = set(range(2, 1_000, 2))
    ref = write(disk, DATA_DIR, [topic])
    assert bounds(disk, ref) == [(1, 1_000)]


def test_a_gap_in_the_log_stays_a_gap(disk) -> None:
    """A reader would return an empty record in place of the gap, however small the gap is."""
    topic = SampleTopic(5, 1, dead={2})
    for seq in (1, 3, 4, 6):
        topic.add(seq, STAMP, {"payloads": [b"x"]})
    assert bounds(disk, write(disk, DATA_DIR, [topic])) == [(1, 1), (3, 4), (6, 6)]


@pytest.mark.parametrize("dead", [set(), {2}])
def test_the_fast_path_for_one_frame_gives_the_general_result(disk, dead) -> None:
    """The fast path and the general path agree on every column. Neither keeps the producer."""
    columns = {
        "payloads": [b"a", b"bc"], "tags": ["x", None], "metas": [None, b"{}"], "expires_at": [None, 70],
        "event_ts": [3, None],
    }  # fmt: skip
    for topic_id, at_once in ((5, 1), (6, 2)):
        topic = SampleTopic(topic_id, 1, dead=dead)
        topic.add(1, STAMP, columns)
        if topic_id == 6:
            topic.add(3, STAMP, columns)
        ref = write(disk, DATA_DIR, [topic], at_once, number=NUMBER + topic_id)
        assert [view.producer_id for view in views(disk, ref)] == [0]
        segment = Segment.open(disk, DATA_DIR, ref.stem)
        assert segment.tagged(topic_id, TagMatch(b"x")).tolist() == ([1, 3] if topic_id == 6 else [1])
        assert [part.tolist()[:1] for part in segment.positions(0, 1, 2)] == [[1], [1], [STAMP]]
        segment.close()


def test_a_frame_above_the_record_limit_is_split(disk) -> None:
    topic = SampleTopic(5, 1)
    topic.add(1, STAMP, {"payloads": [b"x"] * 10_000})
    ref = write(disk, DATA_DIR, [topic])
    size = SEALED_FRAME_RECORDS
    assert bounds(disk, ref) == [(at, min(at + size - 1, 10_000)) for at in range(1, 10_001, size)]


def test_no_live_records_give_no_segment(disk) -> None:
    topic = simple_topic()
    topic.earliest_seq = 1_000
    assert write(disk, DATA_DIR, [topic]) is None
    assert part_names(disk, DATA_DIR) == []


@pytest.mark.parametrize(("name", "codec"), [("lz4", Codec.LZ4), ("zstd", Codec.ZSTD)])
def test_compression_is_used_only_if_it_saves_enough(disk, name, codec) -> None:
    topic = simple_topic(records=500)
    assert [view.codec for view in views(disk, write(disk, DATA_DIR, [topic], compression=name))] == [codec]
    never = write(disk, DATA_DIR, [topic], compression=name, compression_saving=0.99, number=NUMBER + 1)
    small = write(disk, DATA_DIR, [topic], compression=name, compression_min_bytes=1 << 20, number=NUMBER + 2)
    assert {view.codec for ref in (never, small) for view in views(disk, ref)} == {Codec.NONE}


def test_topics_and_seqs_out_of_order_are_refused(disk) -> None:
    made = writer(disk, DATA_DIR)
    topic = simple_topic()
    made.add_topic(5, 1, topic.runs())
    with pytest.raises(InvariantViolation):
        made.add_topic(5, 1, topic.runs())
    with pytest.raises(InvariantViolation):
        made.add_topic(6, 1, topic.runs() + topic.runs())
    made.abandon()
    assert part_names(disk, DATA_DIR) == []


def test_an_invalid_frame_body_is_refused(disk) -> None:
    made = writer(disk, DATA_DIR)
    frames = simple_topic(records=3).frames
    whole = bytearray(frames[2])
    whole[84:88] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(FrameInvalid, match="past"):
        made.add_topic(5, 1, SampleTopic(5, 1, [*frames[:2], bytes(whole)]).runs())
    with pytest.raises(FrameInvalid, match="past"):
        made.add_topic(6, 1, SampleTopic(6, 1, [bytes(whole)]).runs())
    made.abandon()


def test_stems_encode_topic_first_seq_and_number() -> None:
    number = CREATOR_RECLAIMER << CREATOR_SHIFT | 5
    assert parse_stem(topic_stem(0xAB, 12, number)) == (0xAB, 12, number)
    assert parse_stem(pack_stem(number)) == (0, 0, number)
    assert parse_stem("packs/pack-1") is None
    assert split_part(pack_stem(number) + ".idx") == (pack_stem(number), ".idx")
    assert split_part(pack_stem(number) + ".idx.tmp") is None
    assert split_part("wal/shard-00/wal-1-0.log") is None


def test_segment_numbers_continue_above_the_known_ones_of_their_maker() -> None:
    first = CREATOR_RECLAIMER << CREATOR_SHIFT
    assert NumberAllocator(CREATOR_RECLAIMER).allocate() == first + 1
    allocator = NumberAllocator(CREATOR_RECLAIMER, [first + 9, NUMBER, first + 4])
    assert [allocator.allocate(), allocator.allocate()] == [first + 10, first + 11]
