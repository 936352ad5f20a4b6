"""The header of one frame as named integers. batch.py handles many headers as a matrix."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from ringlog.errors import UsageError
from ringlog.frame import layout
from ringlog.frame.kernel import LIMITS, kernel

_HEADER = struct.Struct("<IBBHQQQIIQQIBBHQQ")
_HEADERS_MAX = 64
"""Cache size. Before topic and producer are set, headers of one client differ only in class and kind."""

assert _HEADER.size == layout.HEADER_BYTES


class FrameHeader(NamedTuple):
    """The header fields in stored order, all unsigned. `records` is the field `count` of layout.py."""

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
    """Includes the reserved byte after it, which is zero."""
    body_xxh3: int
    seal_xxh3: int

    @property
    def total_bytes(self) -> int:
        """Size of the whole frame in bytes."""
        return self.frame_len + layout.LEN_FIELD_BYTES

    @property
    def stored_bytes(self) -> int:
        """Size of the stored body in bytes, with padding and after compression."""
        return self.frame_len - layout.FRAME_LEN_MIN


def pack_header(header: FrameHeader) -> bytes:
    """Return the 80 bytes. Raise UsageError with the fields whose values do not fit."""
    try:
        return _HEADER.pack(*header)
    except struct.error:
        bits = (32, 8, 8, 16, 64, 64, 64, 32, 32, 64, 64, 32, 8, 8, 16, 64, 64)
        wrong = {
            name: value
            for name, value, width in zip(FrameHeader._fields, header, bits, strict=True)
            if not isinstance(value, int) or not 0 <= value < 1 << width
        }
        raise UsageError("frame header field out of range", fields=wrong) from None


@lru_cache(_HEADERS_MAX)
def append_header_template(
    topic_id: int = 0, producer_id: int = 0, producer_seq: int = 0, epoch: int = 0, flags: int = 0
) -> bytes:
    """Return a header template for append frames. The kernel fills in the rest. Raises as pack_header."""
    return pack_header(
        FrameHeader(
            0, layout.FrameType.APPEND, layout.VERSION, 0, topic_id, 0, 0, 0, epoch, producer_id,
            producer_seq, 0, 0, flags, 0, 0, 0,
        )
    )  # fmt: skip


def unpack_header(buffer: Any, offset: int) -> FrameHeader:
    """Read the 80 bytes at `offset`, which must lie inside the buffer. Validates nothing."""
    return FrameHeader._make(_HEADER.unpack_from(buffer, offset))


def header_fault(header: Any) -> str | None:
    """Return why the format does not permit this 80-byte header, or None if it does."""
    return _FAULTS[kernel.header_faults(header, LIMITS)[0]]


_FAULTS = (
    None,
    "frame_len is impossible",
    "unknown frame type",
    "unknown format version",
    "unknown column",
    "reserved bits are set",
    "unknown payload kind",
    "unknown codec",
    "records without payloads",
    "control frame with columns, a codec or hops",
    "no records",
    "control frame with records",
    "seq or time is out of range",
    "raw_len does not match the size of the body",
    "raw_len is impossible",
)
"""Texts for the kernel's codes, in the order of its enum that begins with H_SOUND."""
