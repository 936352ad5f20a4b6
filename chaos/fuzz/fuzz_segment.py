"""Segments: the input replaces one part of a valid segment; every read must answer or raise CorruptData.

The first byte selects the part and the corrections. Bits 0..1: data, index, tags, marks. Bit 2: correct the
header's checksum. Bit 3: correct the checksum of the contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash
from pyroaring import BitMap64

from chaos.fuzz import fuzz_wal
from ringlog.errors import CorruptData, DiskError
from ringlog.segment.index_rebuild import rebuild_index, verify_segment
from ringlog.segment.layout import (
    DATA,
    DATA_HEADER_BYTES,
    DEL,
    DEL_HEADER_BYTES,
    IDX,
    IDX_HEADER_BYTES,
    TAGS,
    TAGS_HEADER_BYTES,
)
from ringlog.segment.segment import Segment, check_data, read_data_header
from ringlog.tags import TagMatch
from ringlog.testing.simulated_disk import SimulatedDisk

MAX_LEN = 5_200
SHARE = 1.5
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "segment"
PARTS = (DATA, IDX, TAGS, DEL)
HEADERS = {DATA: DATA_HEADER_BYTES, IDX: IDX_HEADER_BYTES, TAGS: TAGS_HEADER_BYTES, DEL: DEL_HEADER_BYTES}
CONTENTS_AT = {IDX: 64, TAGS: 64}
"""Offset in the header of the checksum of the contents."""
MEND_HEADER, MEND_CONTENTS = 4, 8
ROOT = "/data"
STEM = (GOLDEN / "stem").read_text().strip()
GOOD = {part: bytes.fromhex((GOLDEN / f"part{part}.hex").read_text()) for part in PARTS}
SALT = int.from_bytes(GOOD[DATA][24:32], "little")
_base: list[SimulatedDisk] = []


def check(data: bytes) -> None:
    """Run the reader, the verification and the index rebuild. Each must succeed or raise a typed error."""
    how, rest = (data[0], data[1:]) if data else (0, b"")
    part = PARTS[how & 3]
    disk = disk_with(part, mended(part, rest, how))
    _typed(disk, _ask_everything)
    _typed(disk, lambda d: verify_segment(d, ROOT, STEM))
    if part == DATA:
        _typed(disk, _rebuild)


def _typed(disk: SimulatedDisk, act: object) -> None:
    try:
        act(disk)  # type: ignore[operator]
    except (CorruptData, DiskError):
        return


def _rebuild(disk: SimulatedDisk) -> None:
    rebuild_index(disk, ROOT, STEM).close()


def _ask_everything(disk: SimulatedDisk) -> None:
    read_data_header(disk, ROOT, STEM)
    segment = Segment.open(disk, ROOT, STEM)
    try:
        check_data(disk, ROOT, segment)
        for row, topic_id in enumerate(segment.topics["topic_id"].tolist()):
            segment.positions(row, 0, 1 << 62)
            segment.frame_at(row, 5)
            segment.seek_time(row, int(segment.topics["ts_max"][row]))
            segment.expired(row, 60)
            segment.tagged(topic_id, TagMatch(b"tag", is_prefix=True))
            segment.tags_of(topic_id)
            segment.deleted(row)
            segment.mark_deleted(row, BitMap64([1, 2, 3]))
    finally:
        segment.close()


def mended(part: str, data: bytes, how: int) -> bytes:
    """Return the part with the checksums corrected that `how` selects."""
    made = bytearray(data)
    size = HEADERS[part]
    if len(made) < size:
        return data
    if part == DATA and how & MEND_CONTENTS:
        made = bytearray(fuzz_wal.mended(bytes(made), size, SALT))
    if part in CONTENTS_AT and how & MEND_CONTENTS:
        at = CONTENTS_AT[part]
        made[at : at + 8] = xxhash.xxh3_64_intdigest(bytes(made[size:])).to_bytes(8, "little")
    if how & (MEND_HEADER | MEND_CONTENTS):
        made[size - 8 : size] = xxhash.xxh3_64_intdigest(bytes(made[: size - 8])).to_bytes(8, "little")
    return bytes(made)


def disk_with(part: str, data: bytes) -> SimulatedDisk:
    """Return a disk with the golden segment, with one part of it replaced."""
    if not _base:
        made = SimulatedDisk(ROOT)
        for directory in (f"{ROOT}/packs", f"{ROOT}/topics", f"{ROOT}/tmp"):
            if not made.exists(directory):
                made.make_dir(directory)
        for each, good in GOOD.items():
            made.add_file(f"{ROOT}/{STEM}{each}", good)
        _base.append(made)
    disk = _base[0].copy()
    disk.unlink(f"{ROOT}/{STEM}{part}")
    disk.add_file(f"{ROOT}/{STEM}{part}", data)
    return disk


def seeds() -> Iterator[bytes]:
    """Yield each golden part with each combination of corrections."""
    for number, part in enumerate(PARTS):
        for how in (0, MEND_HEADER, MEND_HEADER | MEND_CONTENTS):
            yield bytes([number | how]) + GOOD[part]
