"""Names and headers of a segment's parts. Pure.

A segment has up to four files with a common stem:

topics/<topic_id>/seg-<first_seq>-<number>   records of one topic
packs/pack-<number>                          records of several topics that are too small for an own segment

.data   header of 4096 bytes, then sealed frames: topics ascending by id, each topic's frames ascending
.idx    table of topics, table of frames, and all facts that queries need without the data
.tags   records of each tag; only if a record has a tag
.del    one byte per record: 0x00, or 0xD5 for deleted; only if a record is deleted

The first three are written under temporary names in packs/, synced and renamed, `.data` last. A segment
exists if its data part exists (S1). Only `.del` changes later (S6). Every part contains number and salt of
the segment, so that parts of different segments are never combined (S3). Every part except `.del` has
checksums over all of its bytes. See docs/reference/format.md for the layout of each part.

To change a layout, add a version number, teach the readers both versions, and only then write the new one.
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
"""The segment has a tags part."""

CREATOR_COMPACTOR, CREATOR_RECLAIMER = 1, 2
CREATOR_SHIFT = 48
NUMBER_MAX = (1 << 64) - 1
RECORDS_MAX = (1 << 32) - 1
"""Record ordinals within a segment have 32 bits."""

TOPIC_DTYPE = np.dtype(
    [
        ("topic_id", "<u8"), ("epoch", "<i8"), ("first_seq", "<i8"), ("last_seq", "<i8"), ("records", "<i8"),
        ("bytes", "<i8"), ("entry_start", "<i8"), ("entry_stop", "<i8"), ("data_start", "<i8"),
        ("data_stop", "<i8"), ("ts_min", "<i8"), ("ts_max", "<i8"), ("expires_min", "<i8"),
    ]
)  # fmt: skip
"""One topic of a segment. `records` counts stored records, including deleted ones. `bytes` are accounted
bytes. `data_*` is the byte range of its frames in the data part. `expires_min` is 0 if no record expires."""

ENTRY_DTYPE = np.dtype(
    [
        ("base_seq", "<i8"), ("count", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("ts_min", "<i8"),
        ("ts_max", "<i8"), ("event_min", "<i8"), ("event_max", "<i8"), ("expires_min", "<i8"),
        ("bytes", "<i8"), ("columns_at", "<i8"),
    ]
)  # fmt: skip
"""One frame. `event_*` are -2**63 if no record has an event time. `columns_at` is the offset in the index
part of the columns that differ between records, 0 if there are none."""

HAS_SIZES, HAS_STAMPS, HAS_EXPIRES, HAS_NOT_BEFORE, HAS_PRIORITY = 1, 2, 4, 8, 16
"""Columns in a block of record columns (docs/reference/format.md). The last two are present if any record has
a value, even if all records have the same, because the table of frames has no field for them."""
BLOCK_HEAD_BYTES = 16
POSTINGS_PER_PAGE = 16_384
"""Postings per page. Each page has its own checksum."""

_OWN = re.compile(r"^topics/([0-9a-f]{16})/seg-(\d{20})-([0-9a-f]{16})$")
_PACK = re.compile(r"^packs/pack-([0-9a-f]{16})$")
_DATA_HEADER = struct.Struct("<8sIIQQII16sQQQQQQQ")
_IDX_HEADER = struct.Struct("<8sIIQQQQQQQQIIII16s")
_TAGS_HEADER = struct.Struct("<8sIIQQQQQQQQ")
_DEL_HEADER = struct.Struct("<8sIIQQQ")


def topic_stem(topic_id: int, first_seq: int, number: int) -> str:
    """Return the stem of a segment with a single topic."""
    return f"{TOPICS_DIR}/{topic_id:016x}/seg-{first_seq:020d}-{number:016x}"


def pack_stem(number: int) -> str:
    """Return the stem of a segment that several topics share."""
    return f"{PACKS_DIR}/pack-{number:016x}"


def parse_stem(stem: str) -> tuple[int, int, int] | None:
    """Return (topic_id, first_seq, number); topic and seq are 0 for a pack. None if it is not a stem."""
    own = _OWN.match(stem)
    if own:
        return int(own[1], 16), int(own[2]), int(own[3], 16)
    pack = _PACK.match(stem)
    return (0, 0, int(pack[1], 16)) if pack else None


def split_part(path: str) -> tuple[str, str] | None:
    """Return (stem, suffix) of a part's path below the data directory, or None for any other path."""
    stem, dot, suffix = path.rpartition(".")
    return (stem, dot + suffix) if dot + suffix in SUFFIXES and parse_stem(stem) else None


class NumberAllocator:
    """Assigns segment numbers of one kind of creator: `creator << 48 | n`, above all that it used before."""

    def __init__(self, creator: int, known: Iterable[int] = ()) -> None:
        """`known` are the numbers on disk and in snapshots, of all kinds of creators."""
        own = [number for number in known if number >> CREATOR_SHIFT == creator]
        self._last = max(own, default=creator << CREATOR_SHIFT)

    def allocate(self) -> int:
        """Return the next number."""
        self._last += 1
        return self._last


@dataclass(frozen=True, slots=True)
class SegmentDataHeader:
    """The first 4096 bytes of a data part. `topic_id`, `first_seq` and `last_seq` are 0 in a pack."""

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
    """Size of the whole part in bytes."""
    topic_id: int
    first_seq: int
    last_seq: int

    def encode(self) -> bytes:
        """Return the 4096 bytes."""
        return _checked(
            _DATA_HEADER.pack(
                DATA_MAGIC, VERSION, self.topics, self.number, self.salt, self.shard, self.shards,
                self.engine_id, self.created_us, self.records, self.frames, self.data_bytes, self.topic_id,
                self.first_seq, self.last_seq,
            ), DATA_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> SegmentDataHeader:
        """Decode and verify. Raise CorruptData with the path and the reason."""
        _verify(data, DATA_HEADER_BYTES, DATA_MAGIC, path, "data")
        return cls(*_DATA_HEADER.unpack_from(data)[2:])


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The first 128 bytes of an index part."""

    topics: int
    number: int
    salt: int
    frames: int
    records: int
    data_bytes: int
    columns_bytes: int
    tables_xxh3: int
    """Checksum of both tables. Each block of record columns has its own."""
    created_us: int
    shard: int
    shards: int
    flags: int
    engine_id: bytes

    def encode(self) -> bytes:
        """Return the 128 bytes."""
        return _checked(
            _IDX_HEADER.pack(
                IDX_MAGIC, VERSION, self.topics, self.number, self.salt, self.frames, self.records,
                self.data_bytes, self.columns_bytes, self.tables_xxh3, self.created_us, self.shard,
                self.shards, self.flags, 0, self.engine_id,
            ), IDX_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> IndexHeader:
        """Decode and verify. Raise CorruptData with the path and the reason."""
        _verify(data, IDX_HEADER_BYTES, IDX_MAGIC, path, "index")
        *fields, _, engine_id = _IDX_HEADER.unpack_from(data)[2:]
        return cls(*[*fields, engine_id])

    @property
    def tables_stop(self) -> int:
        """Offset at which the tables end and the record columns begin."""
        return IDX_HEADER_BYTES + self.topics * TOPIC_DTYPE.itemsize + self.frames * ENTRY_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class TagsHeader:
    """The first 88 bytes of a tags part."""

    topics: int
    number: int
    salt: int
    tags: int
    postings: int
    text_bytes: int
    records: int
    contents_xxh3: int
    """Checksum of all bytes between this header and the postings."""

    def encode(self) -> bytes:
        """Return the 88 bytes."""
        return _checked(
            _TAGS_HEADER.pack(
                TAGS_MAGIC, VERSION, self.topics, self.number, self.salt, self.tags, self.postings,
                self.text_bytes, self.records, self.contents_xxh3, 0,
            ), TAGS_HEADER_BYTES,
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, path: str) -> TagsHeader:
        """Decode and verify. Raise CorruptData with the path and the reason."""
        _verify(data, TAGS_HEADER_BYTES, TAGS_MAGIC, path, "tags")
        return cls(*_TAGS_HEADER.unpack_from(data)[2:10])

    @property
    def pages(self) -> int:
        """Number of pages of postings. Each page has its own checksum."""
        return -(-self.postings // POSTINGS_PER_PAGE)

    @property
    def contents_bytes(self) -> int:
        """Number of bytes between this header and the postings."""
        words = (self.topics + 1) + 2 * (self.tags + 1) + self.pages
        return 8 * words + ((self.text_bytes + 7) & ~7)


@dataclass(frozen=True, slots=True)
class DeletionMarksHeader:
    """The first 48 bytes of a `.del` part."""

    number: int
    salt: int
    records: int

    def encode(self) -> bytes:
        """Return the 48 bytes."""
        head = _DEL_HEADER.pack(DEL_MAGIC, VERSION, 0, self.number, self.salt, self.records)
        return _checked(head, DEL_HEADER_BYTES)

    @classmethod
    def decode(cls, data: bytes, path: str) -> DeletionMarksHeader:
        """Decode and verify. Raise CorruptData with the path and the reason."""
        _verify(data, DEL_HEADER_BYTES, DEL_MAGIC, path, "deletion marks")
        return cls(*_DEL_HEADER.unpack_from(data)[3:])


def _checked(head: bytes, size: int) -> bytes:
    body = head.ljust(size - 8, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _verify(data: bytes, size: int, magic: bytes, path: str, part: str) -> None:
    if len(data) < size:
        raise CorruptData(
            f"{part} part must have at least {size} bytes, got {len(data)}",
            file=path,
            bytes=len(data),
            header=size,
        )
    if data[:8] != magic:
        raise CorruptData(
            f"{part} part: magic must be {magic!r}, got {bytes(data[:8])!r}", file=path, offset=0
        )
    if xxhash.xxh3_64_intdigest(data[: size - 8]) != int.from_bytes(data[size - 8 : size], "little"):
        raise CorruptData(f"{part} part header: checksum mismatch", file=path, offset=0)
    version = int.from_bytes(data[8:12], "little")
    if version != VERSION:
        raise CorruptData(
            f"{part} part: version must be {VERSION}, got {version}; upgrade ringlog",
            file=path,
            version=version,
        )


assert _DATA_HEADER.size <= DATA_HEADER_BYTES - 8
assert _IDX_HEADER.size <= IDX_HEADER_BYTES - 8
assert _TAGS_HEADER.size == TAGS_HEADER_BYTES - 8
assert _DEL_HEADER.size == DEL_HEADER_BYTES - 8
