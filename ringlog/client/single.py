"""The frame of one record without fields, built without NumPy: what a lone append costs before it is sent.

The same bytes as frame.codec.frame(encode_records([payload])), which a test compares; that way costs
about 25 microseconds for its tables, this one 3.
"""

from __future__ import annotations

from functools import cache

import xxhash

from ringlog.frame.header import Header, pack_header
from ringlog.frame.kernel import encode_plain
from ringlog.frame.layout import (
    FRAME_LEN_MIN,
    HEADER_BYTES,
    PAYLOAD_KIND_SHIFT,
    VERSION,
    W_BODY_XXH3,
    Column,
    FrameType,
)

_OFFSETS_BYTES = 8
_PADS = tuple(bytes(n) for n in range(8))
_hash = xxhash.xxh3_64_intdigest


@cache
def _header(durability: int, payload_kind: int) -> bytes:
    """What such frames have in common; the kernel fills in the rest."""
    return pack_header(
        Header(
            0, FrameType.APPEND, VERSION, 1 << Column.PAYLOAD, 0, 0, 0, 1, 0, 0, 0, 0, 0,
            durability | payload_kind << PAYLOAD_KIND_SHIFT, 0, 0, 0,
        )
    )  # fmt: skip


def single_frame(payload: bytes, *, durability: int, payload_kind: int) -> bytearray:
    """Build the frame; topic, epoch and producer are stamped later. The payload's size was checked."""
    found = encode_plain([payload], 1, _header(durability, payload_kind))
    if found is not None:
        return found[0]
    size = len(payload)
    stored = _OFFSETS_BYTES + size + (-size & 7)
    header = Header(
        FRAME_LEN_MIN + stored, FrameType.APPEND, VERSION, 1 << Column.PAYLOAD, 0, 0, 0, 1, 0, 0, 0,
        stored, 0, durability | payload_kind << PAYLOAD_KIND_SHIFT, 0, 0, 0,
    )  # fmt: skip
    offsets = (size << 32).to_bytes(_OFFSETS_BYTES, "little")
    whole = bytearray().join((pack_header(header), offsets, payload, _PADS[-size & 7]))
    with memoryview(whole) as view, view.cast("Q") as words:
        words[W_BODY_XXH3] = _hash(view[HEADER_BYTES:])
    return whole
