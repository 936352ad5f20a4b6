"""Damage of any part raises CorruptData with the file name, and the index can be rebuilt from the data."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.errors import CorruptData, DiskError
from ringlog.segment import layout
from ringlog.segment.index_rebuild import rebuild_index, verify_segment
from ringlog.segment.layout import DATA, DEL, IDX, TAGS
from ringlog.segment.segment import Segment, check_data, find_segments, read_data_header
from ringlog.tags import TagMatch
from ringlog.testing.disk import SimulatedDisk
from tests.support.disk_files import overwrite
from tests.support.segment_samples import NUMBER, read_file, simple_topic, write

DATA_DIR = "/data"
PARTS = (DATA, IDX, TAGS, DEL)
EXPIRES = {"expires_at": [None, 50, 70]}


def made(number: int = NUMBER, topic_ids: tuple[int, ...] = (5,), **more) -> tuple[SimulatedDisk, str]:
    disk = SimulatedDisk(DATA_DIR)
    return disk, add(disk, number, topic_ids, **more)


def add(disk, number: int = NUMBER, topic_ids: tuple[int, ...] = (5,), **more) -> str:
    topics = [simple_topic(topic_id, 60, **EXPIRES) for topic_id in topic_ids]
    for topic in topics:
        topic.dead = {9}
    return write(disk, DATA_DIR, topics, number=number, **more).stem


def part(stem: str, suffix: str) -> str:
    return f"{DATA_DIR}/{stem}{suffix}"


def ask_everything(disk, stem: str) -> None:
    """Make every query that a segment supports. Raise what the segment raises."""
    read_data_header(disk, DATA_DIR, stem)
    segment = Segment.open(disk, DATA_DIR, stem)
    try:
        check_data(disk, DATA_DIR, segment)
        for row, topic_id in enumerate(segment.topics["topic_id"].tolist()):
            segment.positions(row, 0, 1 << 62)
            segment.frame_at(row, 5)
            segment.seek_time(row, int(segment.topics["ts_max"][row]))
            segment.expired(row, 60)
            segment.tagged(topic_id, TagMatch(b"tag", is_prefix=True))
            segment.tagged(topic_id, TagMatch(b"tag1"))
            segment.deleted(row)
            segment.mark_deleted(row, BitMap64([1, 2, 3]))
    finally:
        segment.close()


def is_named(error: Exception, stem: str, suffix: str) -> bool:
    return error.detail["file"] == part(stem, suffix)


def test_an_intact_segment_has_no_findings() -> None:
    disk, stem = made(topic_ids=(5, 6))
    ask_everything(disk, stem)
    assert verify_segment(disk, DATA_DIR, stem) == []


@pytest.mark.parametrize("suffix", PARTS)
def test_a_truncated_part_is_reported(suffix) -> None:
    disk, stem = made()
    whole = read_file(disk, part(stem, suffix))
    for length in {0, 7, 40, len(whole) // 2, len(whole) - 8, len(whole) - 1}:
        overwrite(disk, part(stem, suffix), whole[:length])
        with pytest.raises(CorruptData) as caught:
            ask_everything(disk, stem)
        assert is_named(caught.value, stem, suffix)
        assert verify_segment(disk, DATA_DIR, stem)


@pytest.mark.parametrize("suffix", PARTS)
def test_an_extended_part_is_reported(suffix) -> None:
    disk, stem = made()
    overwrite(disk, part(stem, suffix), read_file(disk, part(stem, suffix)) + bytes(8))
    with pytest.raises(CorruptData) as caught:
        ask_everything(disk, stem)
    assert is_named(caught.value, stem, suffix)
    assert verify_segment(disk, DATA_DIR, stem)


@pytest.mark.parametrize("suffix", [DATA, IDX, TAGS])
def test_verify_segment_detects_every_flipped_bit(suffix) -> None:
    """Checksums cover every byte of every part except the deletion marks."""
    disk, stem = made()
    whole = bytearray(read_file(disk, part(stem, suffix)))
    step = max(1, len(whole) // 400)
    for at in range(0, len(whole), step):
        whole[at] ^= 1 << at % 8
        overwrite(disk, part(stem, suffix), bytes(whole))
        assert verify_segment(disk, DATA_DIR, stem), at
        whole[at] ^= 1 << at % 8
    overwrite(disk, part(stem, suffix), bytes(whole))
    assert verify_segment(disk, DATA_DIR, stem) == []


@pytest.mark.parametrize("suffix", PARTS)
def test_a_part_of_another_segment_is_reported(suffix) -> None:
    """The other segment has another number, another salt under the same number, or another topic."""
    for other in ({"number": NUMBER + 1}, {"salt": 99}, {"topic_ids": (6,)}):
        disk, stem = made()
        foreign, foreign_stem = made(**other)
        overwrite(disk, part(stem, suffix), read_file(foreign, part(foreign_stem, suffix)))
        if suffix in (TAGS, DEL) and "topic_ids" in other:
            continue  # the same ordinals under the same number and salt cannot be distinguished
        with pytest.raises(CorruptData):
            ask_everything(disk, stem)
        assert verify_segment(disk, DATA_DIR, stem)


@pytest.mark.parametrize("suffix", PARTS)
def test_an_unknown_version_is_reported(suffix, monkeypatch) -> None:
    monkeypatch.setattr(layout, "VERSION", 2)
    disk, stem = made()
    newer = read_file(disk, part(stem, suffix))
    monkeypatch.undo()
    disk, stem = made()
    overwrite(disk, part(stem, suffix), newer)
    with pytest.raises(CorruptData, match="version") as caught:
        ask_everything(disk, stem)
    assert is_named(caught.value, stem, suffix)


def test_a_missing_index_is_a_disk_error_and_missing_tags_are_corruption() -> None:
    """A process that opens a segment must distinguish a removed segment from a damaged one."""
    disk, stem = made()
    disk.unlink(part(stem, TAGS))
    with pytest.raises(CorruptData, match="tags part is missing"):
        ask_everything(disk, stem)
    disk.unlink(part(stem, IDX))
    with pytest.raises(DiskError) as caught:
        ask_everything(disk, stem)
    assert caught.value.errno == 2
    assert find_segments(disk, DATA_DIR) == [stem]


@pytest.mark.parametrize("suffix", [IDX, TAGS])
def test_a_damaged_index_is_rebuilt_and_deletion_marks_stay(suffix) -> None:
    """The rebuilt index has the same bytes (S2)."""
    disk, stem = made(topic_ids=(5, 6))
    before = read_file(disk, part(stem, suffix))
    overwrite(disk, part(stem, suffix), b"\xff" * 500)
    rebuilt = rebuild_index(disk, DATA_DIR, stem)
    assert [set(rebuilt.deleted(row)) for row in (0, 1)] == [{9}, {9}]
    rebuilt.close()
    assert read_file(disk, part(stem, suffix)) == before
    assert verify_segment(disk, DATA_DIR, stem) == []


def test_an_index_is_not_rebuilt_from_damaged_data() -> None:
    disk, stem = made()
    whole = bytearray(read_file(disk, part(stem, DATA)))
    whole[5_000] ^= 1
    overwrite(disk, part(stem, DATA), bytes(whole))
    with pytest.raises(CorruptData, match="frame is invalid") as caught:
        rebuild_index(disk, DATA_DIR, stem)
    assert (caught.value.detail["offset"], caught.value.detail["seq"]) == (4096, 1)


@pytest.mark.parametrize("beyond", [0, 1, 7, 9, 1_004, -9, -1])
def test_an_index_is_not_rebuilt_from_truncated_data(beyond) -> None:
    """The compactor reads back its segment in the same way. It must not fail on a length that is no multiple
    of 8 (RF-53)."""
    disk, stem = made()
    whole = read_file(disk, part(stem, DATA))
    overwrite(disk, part(stem, DATA), whole[: layout.DATA_HEADER_BYTES + beyond if beyond >= 0 else beyond])
    with pytest.raises(CorruptData) as caught:
        rebuild_index(disk, DATA_DIR, stem)
    assert is_named(caught.value, stem, DATA)


def test_a_stale_tags_part_is_removed_if_the_data_has_no_tags() -> None:
    disk = SimulatedDisk(DATA_DIR)
    stem = write(disk, DATA_DIR, [simple_topic(tags=[None])]).stem
    overwrite(disk, part(stem, TAGS), b"old")
    rebuild_index(disk, DATA_DIR, stem).close()
    assert not disk.exists(part(stem, TAGS))


def test_an_index_is_rebuilt_from_data_in_another_directory() -> None:
    """A cold store has the data part, and the host has the other parts."""
    disk, stem = made()
    for directory in ("/cold", "/cold/topics", f"/cold/topics/{5:016x}"):
        disk.make_dir(directory)
    overwrite(disk, f"/cold/{stem}{DATA}", read_file(disk, part(stem, DATA)))
    disk.unlink(part(stem, DATA))
    disk.unlink(part(stem, IDX))
    rebuild_index(disk, DATA_DIR, stem, source_dir="/cold").close()
    assert verify_segment(disk, DATA_DIR, stem, source_dir="/cold") == []
    assert find_segments(disk, DATA_DIR) == []


def test_invalid_deletion_marks_delete_nothing_and_are_counted() -> None:
    """Only the byte 0xD5 marks a deletion (S6)."""
    disk, stem = made()
    marks = bytearray(read_file(disk, part(stem, DEL)))
    marks[layout.DEL_HEADER_BYTES + 3] = 0x01
    marks[layout.DEL_HEADER_BYTES + 4] = 0xD4
    overwrite(disk, part(stem, DEL), bytes(marks))
    segment = Segment.open(disk, DATA_DIR, stem)
    assert set(segment.deleted(0)) == {9}
    assert segment.bad_marks == 2
    segment.close()
    assert any("2 bytes" in finding for finding in verify_segment(disk, DATA_DIR, stem))


_SOUND = {
    suffix: read_file(disk, part(stem, suffix)) for disk, stem in [made(topic_ids=(5, 6))] for suffix in PARTS
}
_STEM = made(topic_ids=(5, 6))[1]


@st.composite
def damaged_part(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a part with changed bytes and corrected checksums of header and tables, so that only its structure
    can fail."""
    suffix = draw(st.sampled_from(PARTS))
    if draw(st.integers(0, 5)) == 0:
        return suffix, draw(st.binary(max_size=600))
    whole = bytearray(_SOUND[suffix])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(whole), 2_000) - 1) | st.integers(0, len(whole) - 1))
        whole[at] = draw(st.sampled_from([0, 1, 7, 8, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    repair(suffix, whole)
    return suffix, bytes(whole[: draw(st.sampled_from([len(whole)] * 5 + [len(whole) // 2]))])


def repair(suffix: str, whole: bytearray) -> None:
    """Correct the checksums, as far as the part still shows their positions."""

    def sum_of(start: int, stop: int) -> bytes:
        return xxhash.xxh3_64_intdigest(bytes(whole[start:stop])).to_bytes(8, "little")

    if suffix == IDX:
        topics = int.from_bytes(whole[12:16], "little")
        frames = int.from_bytes(whole[32:40], "little")
        whole[64:72] = sum_of(128, 128 + 104 * topics + 88 * frames)
        whole[120:128] = sum_of(0, 120)
    elif suffix == TAGS:
        words = [int.from_bytes(whole[at : at + 8], "little") for at in range(16, 72, 8)]
        header = layout.TagsHeader(int.from_bytes(whole[12:16], "little"), *words)
        whole[64:72] = sum_of(88, 88 + min(header.contents_bytes, len(whole)))
        whole[80:88] = sum_of(0, 80)
    else:
        size = 4096 if suffix == DATA else 48
        whole[size - 8 : size] = sum_of(0, size - 8)


@pytest.mark.slow
@given(damaged_part())
@settings(max_examples=600)
def test_any_bytes_give_an_answer_or_corrupt_data(damage) -> None:
    """Every decoder ends, and allocates no memory by an unchecked number."""
    suffix, data = damage
    disk = SimulatedDisk(DATA_DIR)
    disk.make_dir("/data/packs")
    for each in PARTS:
        overwrite(disk, part(_STEM, each), data if each == suffix else _SOUND[each])
    corrupt = refusal(lambda: ask_everything(disk, _STEM))
    assert corrupt is None or "file" in corrupt.detail
    assert isinstance(verify_segment(disk, DATA_DIR, _STEM), list)
    corrupt = refusal(lambda: rebuild_index(disk, DATA_DIR, _STEM).close())
    assert corrupt is None or (suffix == DATA and "file" in corrupt.detail)


def refusal(action) -> CorruptData | None:
    try:
        action()
    except CorruptData as e:
        return e
    return None
