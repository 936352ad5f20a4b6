"""One frame's header as named numbers. Many headers at once are batch.py's matrix.

`header_fault` here and `malformed` in batch.py judge the same things, one for a header and one for a
matrix of them; a test compares the two on arbitrary headers.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ringlog.errors import UsageError
from ringlog.frame import layout
from ringlog.frame.layout import Column
from ringlog.limits import FRAME_BYTES_MAX, ROUTER_HOPS_MAX, SEQ_MAX
from ringlog.types import Codec

_HEADER = struct.Struct("<IBBHQQQIIQQIBBHQQ")
_CODEC_MAX = max(Codec)

assert _HEADER.size == layout.HEADER_BYTES


class Header(NamedTuple):
    """The fields in the order in which they lie; all are unsigned. `records` is the drawing's count."""

    frame_len: int
    type: int
    version: int
    columns: int
    topic_id: int
    base_seq: int
    commit_ts: int
    records: int
    epoch: int
    producer_id: int
    producer_seq: int
    raw_len: int
    codec: int
    flags: int
    hops: int
    """With the reserved byte behind it, which is zero."""
    body_xxh3: int
    seal_xxh3: int

    @property
    def total_bytes(self) -> int:
        """Whole size of the frame."""
        return self.frame_len + layout.LEN_FIELD_BYTES

    @property
    def stored_bytes(self) -> int:
        """Size of the body as it lies there, padding and compression included."""
        return self.frame_len - layout.FRAME_LEN_MIN


def pack_header(header: Header) -> bytes:
    """Return the 80 bytes; raises UsageError naming the fields that do not fit theirs."""
    try:
        return _HEADER.pack(*header)
    except struct.error:
        bits = (32, 8, 8, 16, 64, 64, 64, 32, 32, 64, 64, 32, 8, 8, 16, 64, 64)
        wrong = {
            name: value
            for name, value, width in zip(Header._fields, header, bits, strict=True)
            if not isinstance(value, int) or not 0 <= value < 1 << width
        }
        raise UsageError("a frame's header field is out of range", fields=wrong) from None


def unpack_header(buffer: Any, offset: int) -> Header:
    """Read the 80 bytes at `offset`, which must lie inside the buffer. Judges nothing."""
    return Header._make(_HEADER.unpack_from(buffer, offset))


def header_fault(header: Header) -> str | None:
    """Say what makes this a header that version 1 does not allow, or None."""
    if (
        header.frame_len < layout.FRAME_LEN_MIN
        or header.total_bytes & 7
        or header.total_bytes > FRAME_BYTES_MAX
    ):
        return "frame_len is impossible"
    fault = shape_fault(header.type, header.version, header.columns, header.codec, header.flags, header.hops)
    return fault or _number_fault(header)


def shape_fault(frame_type: int, version: int, columns: int, codec: int, flags: int, hops: int) -> str | None:
    """Judge the fields in which frames of one producer seldom differ."""
    if not 0 < frame_type <= layout.FRAME_TYPE_MAX:
        return "unknown frame type"
    if version != layout.VERSION:
        return "unknown format version"
    if columns & ~layout.COLUMNS_KNOWN:
        return "unknown column"
    if hops > ROUTER_HOPS_MAX or flags & ~layout.FLAGS_KNOWN:
        return "reserved bits are set"
    if flags & layout.PAYLOAD_KIND_MASK == layout.PAYLOAD_KIND_MASK:
        return "unknown payload kind"
    if codec > _CODEC_MAX:
        return "unknown codec"
    if frame_type in layout.TYPES_WITH_COLUMNS:
        return None if columns & 1 << Column.PAYLOAD else "records without payloads"
    return "control frame with columns, a codec or hops" if columns or codec or hops else None


def _number_fault(header: Header) -> str | None:
    holds_records = header.type in layout.TYPES_WITH_COLUMNS
    if (header.records > 0) != holds_records:
        return "no records" if holds_records else "control frame with records"
    if header.base_seq + header.records > SEQ_MAX + 1 or header.commit_ts > SEQ_MAX:
        return "seq or time is out of range"
    if holds_records and header.raw_len & 7:
        return "raw_len does not agree with the body"
    if header.codec == Codec.NONE:
        if layout.padded(header.raw_len) != header.stored_bytes:
            return "raw_len does not agree with the body"
    elif not 0 < header.raw_len <= FRAME_BYTES_MAX - layout.HEADER_BYTES:
        return "raw_len is impossible"
    return None
