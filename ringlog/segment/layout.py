"""Names and headers of a segment's parts. Pure.

A segment is up to four files with one stem:

topics/<topic_id>/seg-<first_seq>-<number>   records of one topic
packs/pack-<number>                          records of topics too small for a segment of their own

.data   header of 4096 bytes, then sealed frames: topics ascending by id, each topic's frames ascending
.idx    which topics and frames there are, and of each frame everything that is asked without its data
.tags   which records have which tag; only when one has a tag
.del    one byte a record: 0x00, or 0xD5 for deleted; only when one is

The first three are written under temporary names in packs/, synced and renamed, `.data` last: a segment
exists when its data part does. `.del` alone is changed later. Every part carries number and salt of the
segment, so that parts of two segments are never taken for one; every part but `.del` has a checksum over
all of it. See docs/reference/format.md for the drawing of each.

To change a layout: new version number, teach the readers both, then write it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from ringlog.errors import CorruptData

DATA, IDX, TAGS, DEL = ".data", ".idx", ".tags", ".del"
SUFFIXES = (DATA, IDX, TAGS, DEL)
TOPICS_DIR = "topics"
PACKS_DIR = "packs"

VERSION = 1
DATA_MAGIC, IDX_MAGIC, TAGS_MAGIC, DEL_MAGIC = b"RLOGSEG1", b"RLOGIDX1", b"RLOGTAG1", b"RLOGDEL1"
DATA_HEADER_BYTES = 4_096
IDX_HEADER_BYTES = 128
TAGS_HEADER_BYTES = 88
DEL_HEADER_BYTES = 48
DELETED = 0xD5
FLAG_TAGS = 1
"""There is a tags part."""

MAKER_COMPACTOR, MAKER_RECLAIMER = 1, 2
MAKER_SHIFT = 48
NUMBER_MAX = (1 << 64) - 1
RECORDS_MAX = (1 << 32) - 1
"""Records are counted in 32 bits inside of a segment."""

TOPIC_DTYPE = np.dtype(
    [
        ("topic_id", "<u8"), ("epoch", "<i8"), ("first_seq", "<i8"), ("last_seq", "<i8"), ("records", "<i8"),
        ("bytes", "<i8"), ("entry_start", "<i8"), ("entry_stop", "<i8"), ("data_start", "<i8"),
        ("data_stop", "<i8"), ("ts_min", "<i8"), ("ts_max", "<i8"), ("expires_min", "<i8"),
    ]
)  # fmt: skip
"""One topic of a segment. `records` counts stored positions, deleted ones too; `bytes` are accounted
(R-10); `data_*` bound its frames in the data part; `expires_min` is 0 when no record expires by itself."""

ENTRY_DTYPE = np.dtype(
    [
        ("base_seq", "<i8"), ("count", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("ts_min", "<i8"),
        ("ts_max", "<i8"), ("event_min", "<i8"), ("event_max", "<i8"), ("expires_min", "<i8"),
        ("bytes", "<i8"), ("columns_at", "<i8"),
    ]
)  # fmt: skip
"""One frame. `event_*` are -2**63 when no record has one; `columns_at` is the place in the index part of
what differs from record to record, 0 when nothing does."""

HAS_SIZES, HAS_STAMPS, HAS_EXPIRES, HAS_NOT_BEFORE, HAS_PRIORITY = 1, 2, 4, 8, 16
"""What a block of record columns holds (docs/reference/format.md). The last two are present wherever one
record has a value, alike or not: the table of frames has no place for them."""
BLOCK_HEAD_BYTES = 16
POSTINGS_PER_PAGE = 16_384
"""Postings are checked in pages of so many."""

_OWN = re.compile(r"^topics/([0-9a-f]{16})/seg-(\d{20})-([0-9a-f]{16})$")
_PACK = re.compile(r"^packs/pack-([0-9a-f]{16})$")
_DATA_HEADER = struct.Struct("<8sIIQQII16sQQQQQQQ")
_IDX_HEADER = struct.Struct("<8sIIQQQQQQQQIIII16s")
_TAGS_HEADER = struct.Struct("<8sIIQQQQQQQQ")
_DEL_HEADER = struct.Struct("<8sIIQQQ")


def topic_stem(topic_id: int, first_seq: int, number: int) -> str:
    """Stem of a segment that holds one topic."""
    return f"{TOPICS_DIR}/{topic_id:016x}/seg-{first_seq:020d}-{number:016x}"


def pack_stem(number: int) -> str:
    """Stem of a segment that topics share."""
    return f"{PACKS_DIR}/pack-{number:016x}"


def parse_stem(stem: str) -> tuple[int, int, int] | None:
    """(topic_id, first_seq, number), with 0 for topic and seq of a pack; None for what is no stem."""
    own = _OWN.match(stem)
    if own:
        return int(own[1], 16), int(own[2]), int(own[3], 16)
    pack = _PACK.match(stem)
    return (0, 0, int(pack[1], 16)) if pack else None


def split_part(path: str) -> tuple[str, str] | None:
    """(stem, suffix) of a part's path below the data directory, or None for a path that is not one."""
    stem, dot, suffix = path.rpartition(".")
    return (stem, dot + suffix) if dot + suffix in SUFFIXES and parse_stem(stem) else None


class NumberAllocator:
    """Numbers of one maker's segments, above all it ever gave: `maker << 48 | n`."""

    def __init__(self, maker: int, known: Iterable[int] = ()) -> None:
        """`known` are the numbers on disk and in snapshots, of whatever maker."""
        own = [number for number in known if number >> MAKER_SHIFT == maker]
        self._last = max(own, default=maker << MAKER_SHIFT)

    def allocate(self) -> int:
        """The next number."""
        self._last += 1
        return self._last


@dataclass(frozen=True, slots=True)
class SegmentDataHeader:
    """First 4096 bytes of a data part. `topic_id`, `first_seq` and `last_seq` are 0 in a pack."""

    topics: int
    number: int
    salt: int
    shard: int
    shards: int
    engine_id: bytes
    created_us: int
    records: int
    frames: int
    data_bytes: int
    """Size of the whole part."""
    topic_id: int
    first_seq: int
    last_seq: int

    def encode(self) -> bytes:
        """The 4096 bytes."""
        return _checked(
            _DATA_HEADER.pack(
                DATA_MAGIC, VERSION, self.topics, self.number, self.salt, self.shard, self.shards,
                self.engine_id, self.created_us, self.records, self.frames, self.data_bytes, self.topic_id,
                self.first_seq, self.last_seq,
            ), DATA_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> SegmentDataHeader:
        """Decode and verify; raises CorruptData naming the path and what is wrong."""
        _verify(data, DATA_HEADER_BYTES, DATA_MAGIC, path, "data")
        return cls(*_DATA_HEADER.unpack_from(data)[2:])


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """First 128 bytes of an index part."""

    topics: int
    number: int
    salt: int
    frames: int
    records: int
    data_bytes: int
    columns_bytes: int
    tables_xxh3: int
    """Of both tables; each block of record columns has its own."""
    created_us: int
    shard: int
    shards: int
    flags: int
    engine_id: bytes

    def encode(self) -> bytes:
        """The 128 bytes."""
        return _checked(
            _IDX_HEADER.pack(
                IDX_MAGIC, VERSION, self.topics, self.number, self.salt, self.frames, self.records,
                self.data_bytes, self.columns_bytes, self.tables_xxh3, self.created_us, self.shard,
                self.shards, self.flags, 0, self.engine_id,
            ), IDX_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> IndexHeader:
        """Decode and verify; raises CorruptData naming the path and what is wrong."""
        _verify(data, IDX_HEADER_BYTES, IDX_MAGIC, path, "index")
        *fields, _, engine_id = _IDX_HEADER.unpack_from(data)[2:]
        return cls(*[*fields, engine_id])

    @property
    def tables_stop(self) -> int:
        """Where the tables end and the record columns begin."""
        return IDX_HEADER_BYTES + self.topics * TOPIC_DTYPE.itemsize + self.frames * ENTRY_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class TagsHeader:
    """First 88 bytes of a tags part."""

    topics: int
    number: int
    salt: int
    tags: int
    postings: int
    text_bytes: int
    records: int
    contents_xxh3: int
    """Of everything between this header and the postings."""

    def encode(self) -> bytes:
        """The 88 bytes."""
        return _checked(
            _TAGS_HEADER.pack(
                TAGS_MAGIC, VERSION, self.topics, self.number, self.salt, self.tags, self.postings,
                self.text_bytes, self.records, self.contents_xxh3, 0,
            ), TAGS_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> TagsHeader:
        """Decode and verify; raises CorruptData naming the path and what is wrong."""
        _verify(data, TAGS_HEADER_BYTES, TAGS_MAGIC, path, "tags")
        return cls(*_TAGS_HEADER.unpack_from(data)[2:10])

    @property
    def pages(self) -> int:
        """Pages the postings are checked in."""
        return -(-self.postings // POSTINGS_PER_PAGE)

    @property
    def contents_bytes(self) -> int:
        """Bytes between this header and the postings."""
        words = (self.topics + 1) + 2 * (self.tags + 1) + self.pages
        return 8 * words + ((self.text_bytes + 7) & ~7)


@dataclass(frozen=True, slots=True)
class DeletionMarksHeader:
    """First 48 bytes of a `.del` part."""

    number: int
    salt: int
    records: int

    def encode(self) -> bytes:
        """The 48 bytes."""
        head = _DEL_HEADER.pack(DEL_MAGIC, VERSION, 0, self.number, self.salt, self.records)
        return _checked(head, DEL_HEADER_BYTES)

    @classmethod
    def decode(cls, data: bytes, path: str) -> DeletionMarksHeader:
        """Decode and verify; raises CorruptData naming the path and what is wrong."""
        _verify(data, DEL_HEADER_BYTES, DEL_MAGIC, path, "deletion marks")
        return cls(*_DEL_HEADER.unpack_from(data)[3:])


def _checked(head: bytes, size: int) -> bytes:
    body = head.ljust(size - 8, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _verify(data: bytes, size: int, magic: bytes, path: str, part: str) -> None:
    if len(data) < size:
        raise CorruptData(f"{part} part is shorter than its header", file=path, bytes=len(data), header=size)
    if data[:8] != magic:
        raise CorruptData(f"not a segment's {part} part", file=path, offset=0)
    if xxhash.xxh3_64_intdigest(data[: size - 8]) != int.from_bytes(data[size - 8 : size], "little"):
        raise CorruptData(f"header of the {part} part does not verify", file=path, offset=0)
    version = int.from_bytes(data[8:12], "little")
    if version != VERSION:
        raise CorruptData(f"{part} part of a version this engine does not know", file=path, version=version)


assert _DATA_HEADER.size <= DATA_HEADER_BYTES - 8
assert _IDX_HEADER.size <= IDX_HEADER_BYTES - 8
assert _TAGS_HEADER.size == TAGS_HEADER_BYTES - 8
assert _DEL_HEADER.size == DEL_HEADER_BYTES - 8
