"""Independent decoder of segments, written from docs/reference/format.md only.

It decodes each part of a segment by itself. segment_verifier.py compares them with one another.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, check_frame

DATA_HEADER_BYTES = 4096
INDEX_HEADER_BYTES, TAGS_HEADER_BYTES, MARKS_HEADER_BYTES = 128, 88, 48
DELETED = 0xD5
_DATA_HEADER = struct.Struct("<8sIIQQII16sQQQQQQQ")
_INDEX_HEADER = struct.Struct("<8sIIQQQQQQQQIIII16s")
_TAGS_HEADER = struct.Struct("<8sIIQQQQQQQQ")
_MARKS_HEADER = struct.Struct("<8sIIQQQ")
_TOPIC_ROW = struct.Struct("<Qqqqqqqqqqqqq")
_ENTRY_ROW = struct.Struct("<qqqqqqqqqqq")
_APPEND_HEAD = re.compile(rb"\x01(?=[\x01\x02])")
"""Type and version bytes of an append frame."""
APPEND = 1
_PAGE_POSTINGS = 16_384
_SALTS = (
    (".data", DATA_HEADER_BYTES, b"RLOGSEG1", 24), (".idx", INDEX_HEADER_BYTES, b"RLOGIDX1", 24),
    (".tags", TAGS_HEADER_BYTES, b"RLOGTAG1", 24), (".del", MARKS_HEADER_BYTES, b"RLOGDEL1", 24),
)  # fmt: skip
"""For each part: suffix, bytes of the header, magic, offset of the salt."""


class DecodedDataHeader(NamedTuple):
    """First 4096 bytes of a data part, from the version field on."""

    version: int
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
    topic_id: int
    first_seq: int
    last_seq: int

    def facts(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return self._asdict() | {"engine_id": self.engine_id.hex(), "salt": f"{self.salt:016x}"}


class IndexTopicRow(NamedTuple):
    """A row of the index's topic table."""

    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int
    records: int
    bytes: int
    entry_start: int
    entry_stop: int
    data_start: int
    data_stop: int
    ts_min: int
    ts_max: int
    expires_min: int


class IndexFrameRow(NamedTuple):
    """A row of the index's frame table."""

    base_seq: int
    records: int
    offset: int
    length: int
    ts_min: int
    ts_max: int
    event_min: int
    event_max: int
    expires_min: int
    bytes: int
    columns_at: int


@dataclass(slots=True)
class DecodedIndex:
    """An index part: its header, and its two tables."""

    number: int
    salt: int
    records: int
    data_bytes: int
    has_tags: bool
    topics: list[IndexTopicRow]
    entries: list[IndexFrameRow]
    header: dict[str, Any]
    data: bytes
    """The whole index part, including the record columns."""


def _checked(data: bytes, size: int, magic: bytes, part: str) -> None:
    if len(data) < size:
        raise VerifyError(f"the {part} is shorter than its header")
    if data[:8] != magic:
        raise VerifyError(f"not a segment's {part}")
    (checksum,) = struct.unpack_from("<Q", data, size - 8)
    if xxhash.xxh3_64_intdigest(data[: size - 8]) != checksum:
        raise VerifyError(f"header of the {part}: checksum mismatch")
    (version,) = struct.unpack_from("<I", data, 8)
    if version != 1:
        raise VerifyError(f"unknown version of the {part}", version=version)


# -- data ---------------------------------------------------------------------------------------------


def read_data_header(data: bytes) -> DecodedDataHeader:
    """Decode the header of a data part; raises VerifyError."""
    _checked(data, DATA_HEADER_BYTES, b"RLOGSEG1", "data part")
    return DecodedDataHeader(*_DATA_HEADER.unpack_from(data)[1:])


def next_frame(data: bytes, offset: int, salt: int) -> int:
    """Return the offset of the next valid frame after `offset`, or the end of the data."""
    for found in _APPEND_HEAD.finditer(data, offset + 8 + 4):
        head = found.start()
        if head % 8 == 4 and _is_frame(data, head - 4, salt):
            return head - 4
    return len(data)


def frames_in(data: bytes, salt: int) -> Iterator[tuple[int, DecodedFrame]]:
    """Yield (offset, frame) for every append that verifies by itself, also after damage."""
    at = DATA_HEADER_BYTES
    while at < len(data):
        try:
            frame = check_frame(data, at, salt)[0]
        except VerifyError:
            at = next_frame(data, at, salt)
            continue
        if frame.type == APPEND:
            yield at, frame
        at += frame.total


def salts_of(stem: str) -> list[int]:
    """Return the seal salts that the parts of a segment name. `stem` includes the directory."""
    found: list[int] = []
    for suffix, bytes_max, magic, at in _SALTS:
        try:
            with open(stem + suffix, "rb") as file:
                head = file.read(bytes_max)
            _checked(head, bytes_max, magic, "part")
        except (OSError, VerifyError):
            continue
        found += struct.unpack_from("<Q", head, at)
    return found


def _is_frame(data: bytes, offset: int, salt: int) -> bool:
    try:
        check_frame(data, offset, salt)
    except VerifyError:
        return False
    return True


# -- index --------------------------------------------------------------------------------------------


def read_index(data: bytes) -> DecodedIndex:
    """Decode the header and the tables of an index part; raises VerifyError."""
    _checked(data, INDEX_HEADER_BYTES, b"RLOGIDX1", "index")
    (_, _, topics, number, salt, frames, records, data_bytes, columns_bytes, tables, created, shard, shards,
     flags, _, engine_id) = _INDEX_HEADER.unpack_from(data)  # fmt: skip
    middle = INDEX_HEADER_BYTES + topics * _TOPIC_ROW.size
    stop = middle + frames * _ENTRY_ROW.size
    if stop + columns_bytes != len(data):
        raise VerifyError("the index has another size than its header says")
    if xxhash.xxh3_64_intdigest(data[INDEX_HEADER_BYTES:stop]) != tables:
        raise VerifyError("index tables: checksum mismatch")
    header = {
        "topics": topics, "number": number, "salt": f"{salt:016x}", "frames": frames, "records": records,
        "data_bytes": data_bytes, "created_us": created, "shard": shard, "shards": shards,
        "engine_id": engine_id.hex(),
    }  # fmt: skip
    rows = [IndexTopicRow(*row) for row in _TOPIC_ROW.iter_unpack(data[INDEX_HEADER_BYTES:middle])]
    entries = [IndexFrameRow(*row) for row in _ENTRY_ROW.iter_unpack(data[middle:stop])]
    return DecodedIndex(number, salt, records, data_bytes, bool(flags & 1), rows, entries, header, data)


# -- tags and marks -----------------------------------------------------------------------------------


@dataclass(slots=True)
class DecodedTags:
    """A tags part. `dictionary` has (row of the topic, tag, ordinals of its records), in order."""

    number: int
    records: int
    header: dict[str, Any]
    dictionary: list[tuple[int, str, list[int]]]


def read_tags(data: bytes) -> DecodedTags:
    """Decode a whole tags part; raises VerifyError."""
    _checked(data, TAGS_HEADER_BYTES, b"RLOGTAG1", "tags part")
    (_, _, topics, number, salt, tags, postings, text_bytes, records, checksum, _) = _TAGS_HEADER.unpack_from(
        data
    )
    pages = -(-postings // _PAGE_POSTINGS)
    stop = TAGS_HEADER_BYTES + 8 * ((topics + 1) + 2 * (tags + 1) + pages) + ((text_bytes + 7) & ~7)
    if stop + 4 * postings != len(data):
        raise VerifyError("the tags part has another size than its header says")
    if xxhash.xxh3_64_intdigest(data[TAGS_HEADER_BYTES:stop]) != checksum:
        raise VerifyError("tags part: checksum mismatch")
    at = TAGS_HEADER_BYTES
    found: list[tuple[int, ...]] = []
    for words in (topics + 1, tags + 1, tags + 1, pages):
        found.append(struct.unpack_from(f"<{words}Q", data, at))
        at += 8 * words
    starts, bounds, ends, checks = found
    for page, check in enumerate(checks):
        start = stop + page * 4 * _PAGE_POSTINGS
        if xxhash.xxh3_64_intdigest(data[start : start + 4 * _PAGE_POSTINGS]) != check:
            raise VerifyError("postings: checksum mismatch")
    if starts[-1] != tags or bounds[-1] != text_bytes or ends[-1] != postings:
        raise VerifyError("the dictionary of tags is invalid")
    rows = struct.unpack_from(f"<{postings}I", data, stop)
    dictionary = [
        (topic, _text(data[at + bounds[i] : at + bounds[i + 1]]), list(rows[ends[i] : ends[i + 1]]))
        for topic in range(topics)
        for i in range(starts[topic], starts[topic + 1])
    ]
    header = {"topics": topics, "number": number, "salt": f"{salt:016x}", "tags": tags, "postings": postings}
    return DecodedTags(number, records, header | {"records": records}, dictionary)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise VerifyError("a tag is not UTF-8") from None


def read_marks(data: bytes) -> tuple[int, int, bytes]:
    """Return (number, salt, one byte per record) of the deletion marks; raises VerifyError."""
    _checked(data, MARKS_HEADER_BYTES, b"RLOGDEL1", "deletion marks")
    (_, _, _, number, salt, records) = _MARKS_HEADER.unpack_from(data)
    marks = data[MARKS_HEADER_BYTES : MARKS_HEADER_BYTES + records]
    if len(data) != MARKS_HEADER_BYTES + records:
        raise VerifyError("the deletion marks have another size than their header says")
    return number, salt, marks
