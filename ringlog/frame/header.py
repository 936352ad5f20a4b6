"""One frame's header as named numbers. Many headers at once are batch.py's matrix."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from ringlog.errors import UsageError
from ringlog.frame import layout
from ringlog.frame.kernel import LIMITS, kernel

_HEADER = struct.Struct("<IBBHQQQIIQQIBBHQQ")
_HEADERS_MAX = 64
"""Headers kept: a client's frames get topic and producer later, and differ in class and kind alone."""

assert _HEADER.size == layout.HEADER_BYTES


class FrameHeader(NamedTuple):
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


def pack_header(header: FrameHeader) -> bytes:
    """Return the 80 bytes; raises UsageError naming the fields that do not fit theirs."""
    try:
        return _HEADER.pack(*header)
    except struct.error:
        bits = (32, 8, 8, 16, 64, 64, 64, 32, 32, 64, 64, 32, 8, 8, 16, 64, 64)
        wrong = {
            name: value
            for name, value, width in zip(FrameHeader._fields, header, bits, strict=True)
            if not isinstance(value, int) or not 0 <= value < 1 << width
        }
        raise UsageError("a frame's header field is out of range", fields=wrong) from None


@lru_cache(_HEADERS_MAX)
def append_header(
    topic_id: int = 0, producer_id: int = 0, producer_seq: int = 0, epoch: int = 0, flags: int = 0
) -> bytes:
    """What a frame of records says of itself, for the kernel to fill in the rest; raises as pack_header."""
    return pack_header(
        FrameHeader(
            0, layout.FrameType.APPEND, layout.VERSION, 0, topic_id, 0, 0, 0, epoch, producer_id,
            producer_seq, 0, 0, flags, 0, 0, 0,
        )
    )  # fmt: skip


def unpack_header(buffer: Any, offset: int) -> FrameHeader:
    """Read the 80 bytes at `offset`, which must lie inside the buffer. Judges nothing."""
    return FrameHeader._make(_HEADER.unpack_from(buffer, offset))


def header_fault(header: Any) -> str | None:
    """Say what makes these 80 bytes a header that its version does not allow, or None."""
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
    "raw_len does not agree with the body",
    "raw_len is impossible",
)
"""By the kernel's numbers, the enum with H_SOUND."""
