"""Golden segments: bytes that must never change, read by the engine's decoder and by the verifier's
decoder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import DATA, SUFFIXES
from ringlog.segment.segment import Segment
from ringlog.storage.real_disk import RealDisk
from ringlog.tags import TagMatch
from ringlog.testing.disk import SimulatedDisk
from ringlog.types import Durability
from ringlog.verify import segment_decoder, segment_verifier
from tests.support.segment_samples import STAMP, SampleTopic, read_file, write

GOLDEN = Path(__file__).parents[1] / "golden"
STEM = (GOLDEN / "segment" / "stem").read_text().strip()


def parts_of(place: str) -> dict[str, bytes]:
    return {suffix: bytes.fromhex((GOLDEN / place / f"part{suffix}.hex").read_text()) for suffix in SUFFIXES}


PARTS = parts_of("segment")


def golden_topics() -> list[SampleTopic]:
    """Return two topics with different stamps, sizes and expiries, tags, a gap, a change of class and a dead
    record."""
    one, two = SampleTopic(0x11, 3), SampleTopic(0xFEDC_BA98_7654_3210, 1)
    one.add(7, STAMP, {"payloads": [b"hello", b"ringlog!"], "tags": ["red", "größe"]})
    one.add(9, STAMP + 1, {"payloads": [b"gone"], "tags": ["red"]})
    one.add(10, STAMP + 2, {"payloads": [b"third"], "metas": [b"{}"], "expires_at": [STAMP + 60]})
    one.add(100, STAMP + 3, {"payloads": [b"x"] * 3, "event_ts": [None, -5, 9]})
    one.dead = {9}
    two.add(1, STAMP, {"payloads": [b"a"], "tags": ["red"]})
    two.add(2, STAMP, {"payloads": [b"b"]}, durability=Durability.FSYNC)
    return [one, two]


@pytest.fixture(params=["segment", "v1/segment"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A data directory with the golden segment, or with the golden segment whose frames have version 1."""
    (tmp_path / STEM).parent.mkdir(mode=0o700)
    for suffix, data in parts_of(request.param).items():
        path = tmp_path / f"{STEM}{suffix}"
        path.write_bytes(data)
        os.chmod(path, 0o600)
    return tmp_path


def test_the_writer_reproduces_the_golden_bytes() -> None:
    disk = SimulatedDisk("/data")
    ref = write(disk, "/data", golden_topics())
    assert ref.stem == STEM
    for suffix, data in PARTS.items():
        assert read_file(disk, f"/data/{STEM}{suffix}") == data, suffix


def test_the_engine_reads_the_golden_segment(root: Path) -> None:
    disk = RealDisk()
    assert verify_segment(disk, str(root), STEM) == []
    segment = Segment.open(disk, str(root), STEM)
    seqs, sizes, stamps = segment.positions(0, 0, 1 << 60)
    assert seqs.tolist() == [7, 8, 9, 10, 100, 101, 102]
    assert sizes.tolist() == [5, 8, 0, 7, 1, 1, 1]
    assert (stamps - STAMP).tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert segment.expired(0, STAMP + 60).tolist() == [10]
    assert segment.tagged(0x11, TagMatch(b"red")).tolist() == [7]
    assert segment.tags_of(0x11) == ["größe".encode(), b"red"]
    assert set(segment.deleted(0)) == {9}
    assert segment.positions(1, 0, 9)[0].tolist() == [1, 2]
    segment.close()


def test_the_verifier_reads_the_golden_segment(root: Path) -> None:
    report = segment_verifier.verify_segment(str(root), STEM, is_deep=True)
    assert report.findings == []
    assert report.stored == {(0x11, 3): [(7, 10), (100, 102)], (0xFEDC_BA98_7654_3210, 1): [(1, 2)]}
    assert report.marked == {(0x11, 3): [(9, 9)]}
    tags = segment_decoder.read_tags(PARTS[".tags"])
    assert tags.dictionary == [(0, "größe", [1]), (0, "red", [0]), (1, "red", [7])]


def test_the_data_header_has_the_offsets_of_the_page() -> None:
    """The first words of the data part match docs/reference/format.md."""
    head = PARTS[DATA]
    assert head[:16] == b"RLOGSEG1" + bytes.fromhex("01000000 02000000")
    assert int.from_bytes(head[64:72], "little") == 9
    assert int.from_bytes(head[80:88], "little") == len(head)
