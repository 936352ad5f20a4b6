"""Oracle of the kernel: the same functions in NumPy and plain Python, written for reading, one frame at a
time."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import layout
from ringlog.frame.body import (
    NOT_TEXT,
    TEXT_COLUMNS,
    BodyLayout,
    BytesColumnSpan,
    HeaderSpans,
    columns_in,
    offsets_in,
    validity_in,
)
from ringlog.frame.header import FrameHeader, pack_header, unpack_header
from ringlog.frame.layout import Column, padded
from ringlog.frame.measure import FrameFault
from ringlog.limits import (
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    NODE_BYTES_MAX,
    ROUTER_HOPS_MAX,
    SEQ_MAX,
    TAG_BYTES_MAX,
)
from ringlog.types import Codec, Durability

_CODEC_MAX = max(Codec)
_SMALL = 16

_LONGEST: tuple[tuple[Column, int, FrameFault], ...] = (
    (Column.TAG, TAG_BYTES_MAX, FrameFault.TAG_TOO_LONG),
    (Column.NODE, NODE_BYTES_MAX, FrameFault.NODE_TOO_LONG),
    (Column.KEY, KEY_BYTES_MAX, FrameFault.KEY_TOO_LONG),
    (Column.META, META_BYTES_MAX, FrameFault.META_TOO_LONG),
)


def header_fault(header: FrameHeader) -> str | None:
    """Return why the header is not allowed in its version, or None."""
    if (
        header.frame_len < layout.FRAME_LEN_MIN
        or header.total_bytes & 7
        or header.total_bytes > FRAME_BYTES_MAX
    ):
        return "frame_len is impossible"
    fault = shape_fault(header.type, header.version, header.columns, header.codec, header.flags, header.hops)
    return fault or _number_fault(header)


def shape_fault(frame_type: int, version: int, columns: int, codec: int, flags: int, hops: int) -> str | None:
    """Check the fields that seldom differ between frames of one producer. Return the fault, or None."""
    if not 0 < frame_type <= layout.FRAME_TYPE_MAX:
        return "unknown frame type"
    if not layout.VERSION_FIRST <= version <= layout.VERSION:
        return "unknown format version"
    known = layout.COLUMNS_KNOWN if version > 1 else (1 << layout.VALID_SHIFT) - 1
    if columns & ~known or columns >> layout.VALID_SHIFT & ~columns:
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


def _number_fault(header: FrameHeader) -> str | None:
    holds_records = header.type in layout.TYPES_WITH_COLUMNS
    if (header.records > 0) != holds_records:
        return "no records" if holds_records else "control frame with records"
    if header.base_seq + header.records > SEQ_MAX + 1 or header.commit_ts > SEQ_MAX:
        return "seq or time is out of range"
    if holds_records and header.raw_len & 7:
        return "raw_len does not match the size of the body"
    if header.codec == Codec.NONE:
        if layout.padded(header.raw_len) != header.stored_bytes:
            return "raw_len does not match the size of the body"
    elif not 0 < header.raw_len <= FRAME_BYTES_MAX - layout.HEADER_BYTES:
        return "raw_len is impossible"
    return None


def walk_body(body: memoryview, columns: int, count: int) -> BodyLayout:
    """Locate every column of an uncompressed body of `count` (>= 1) records.

    Raises FrameInvalid unless the columns fill the body exactly. Its offset is relative to the body.
    """
    found = BodyLayout()
    at = 0
    for column in columns_in(columns):
        if column == Column.HEADERS:
            found.headers, at = _headers_at(body, at, count)
        elif column <= Column.META:
            found.spans[column], at = _span_at(body, at, count, column in TEXT_COLUMNS)
        else:
            found.fixed[column] = at
            at = _past_fixed(body, at, count if column == Column.PRIORITY else 8 * count)
    for column in validity_in(columns):
        found.valid[column], past = at, _past_fixed(body, at, (count + 7) // 8)
        bits = np.unpackbits(np.frombuffer(body[at : at + (count + 7) // 8], np.uint8), bitorder="little")
        if bits[count:].any():
            raise FrameInvalid("padding is not zero", offset=at)
        if (_lengths(body, found.spans[column])[bits[:count] == 0] > 0).any():
            raise FrameInvalid("a null has bytes", offset=at)
        at = past
    if at != len(body):
        raise FrameInvalid("unexpected bytes after the last column", offset=at)
    return found


def _headers_at(body: memoryview, at: int, count: int) -> tuple[HeaderSpans, int]:
    lists_at = at
    entries, at = _offsets_at(body, at, count)
    keys, at = _span_at(body, at, entries, text=True)
    values, at = _span_at(body, at, entries, text=False)
    return HeaderSpans(lists_at, keys, values), at


def _span_at(body: memoryview, at: int, entries: int, text: bool) -> tuple[BytesColumnSpan, int]:
    offsets_at = at
    data_bytes, data_at = _offsets_at(body, at, entries)
    stop = data_at + data_bytes
    at = padded(stop)
    if at > len(body):
        raise FrameInvalid("column runs past the body", offset=offsets_at)
    _check_zeros(body, stop, at)
    if text and not _is_text(body, offsets_at, entries, data_at, stop):
        raise FrameInvalid(NOT_TEXT, offset=data_at)
    return BytesColumnSpan(entries, offsets_at, data_at, data_bytes), at


def _offsets_at(body: memoryview, at: int, entries: int) -> tuple[int, int]:
    """Check the offsets at `at`. Return the last offset and the position after the padded offsets."""
    stop = at + 4 * (entries + 1)
    past = padded(stop)
    if past > len(body):
        raise FrameInvalid("offsets run past the body", offset=at)
    _check_zeros(body, stop, past)
    if entries <= _SMALL:
        few = struct.unpack_from(f"<{entries + 1}i", body, at)
        rising, last = few[0] == 0 and list(few) == sorted(few), few[-1]
    else:
        many = offsets_in(body, at, entries)
        rising, last = many[0] == 0 and bool((many[1:] >= many[:-1]).all()), int(many[-1])
    if not rising:
        raise FrameInvalid("offsets must start at 0 and not decrease", offset=at)
    return last, past


def _past_fixed(body: memoryview, at: int, size: int) -> int:
    stop = at + size
    past = padded(stop)
    if past > len(body):
        raise FrameInvalid("column runs past the body", offset=at)
    _check_zeros(body, stop, past)
    return past


def _check_zeros(body: memoryview, start: int, stop: int) -> None:
    if start != stop and any(body[start:stop]):
        raise FrameInvalid("padding is not zero", offset=start)


def _is_text(body: memoryview, offsets_at: int, entries: int, start: int, stop: int) -> bool:
    """Return True if every entry is UTF-8: the whole data decodes, and no entry begins inside a character."""
    data = bytes(body[start:stop])
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    begins = offsets_in(body, offsets_at, entries)
    begins = begins[begins < len(data)]
    firsts: NDArray[Any] = np.frombuffer(data, dtype=np.uint8)[begins]
    return not bool(((firsts & 0xC0) == 0x80).any())


def judge(body: memoryview, header: FrameHeader) -> tuple[int, int, int]:
    """Return (accounted bytes, bytes of the largest record, fault) of an uncompressed append."""
    try:
        places = walk_body(body, header.columns, header.records)
    except FrameInvalid as e:
        return 0, 0, FrameFault.TEXT if e.reason == NOT_TEXT else FrameFault.STRUCTURE
    sizes = _lengths(body, places.spans[Column.PAYLOAD]).astype(np.int64)
    if Column.META in places.spans:
        sizes += _lengths(body, places.spans[Column.META])
    return int(sizes.sum()), int(sizes.max()), _over_limit(body, places, header.records)


def judge_sent(data: bytes) -> tuple[int, int, int]:
    """Return the same as `judge` for one frame as a producer sends it, without the flag FOLLOWS.

    The fault of a sound compressed frame is UNCHECKED.
    """
    header = unpack_header(data, 0)
    is_append = header.type == layout.FrameType.APPEND and not header.columns & ~layout.PRODUCER_COLUMNS
    if (
        header_fault(header)
        or not is_append
        or header.hops
        or not header.producer_id
        or not header.producer_seq
    ):
        return 0, 0, FrameFault.UNSOUND
    body = memoryview(data)[layout.HEADER_BYTES :]
    if xxhash.xxh3_64_intdigest(body) != header.body_xxh3:
        return 0, 0, FrameFault.CORRUPT
    return (0, 0, FrameFault.UNCHECKED) if header.codec else judge(body, header)


def _over_limit(body: memoryview, places: BodyLayout, count: int) -> FrameFault:
    for column, most, code in _LONGEST:
        span = places.spans.get(column)
        if span is not None and span.data_bytes > most and int(_lengths(body, span).max()) > most:
            return code
    if places.headers is not None:
        lists = offsets_in(body, places.headers.lists_at, count)
        keys = offsets_in(body, places.headers.keys.offsets_at, places.headers.keys.entries)
        values = offsets_in(body, places.headers.values.offsets_at, places.headers.values.entries)
        sizes = np.diff(keys[lists].astype(np.int64) + values[lists])
        longest = max((int(np.diff(each).max()) for each in (keys, values) if len(each) > 1), default=0)
        is_over = longest > HEADER_BYTES_MAX or int(sizes.max()) > HEADERS_BYTES_MAX
        if is_over or int(np.diff(lists).max()) > HEADERS_PER_RECORD_MAX:
            return FrameFault.HEADERS_TOO_LARGE
    return FrameFault.OK


def _lengths(body: memoryview, span: BytesColumnSpan) -> NDArray[np.int32]:
    offsets = offsets_in(body, span.offsets_at, span.entries)
    lengths: NDArray[np.int32] = offsets[1:] - offsets[:-1]
    return lengths


# -- encoding -----------------------------------------------------------------------------------------


def body_of(columns: Mapping[Column, Sequence[Any]]) -> bytes:
    """Encode a body from these values without any check.

    Bytes columns take bytes or None. The headers column takes lists of pairs of bytes. Other columns take
    integers.
    """
    whole = b""
    for column in sorted(columns):
        values = columns[column]
        if column == Column.HEADERS:
            pairs = [pair for each in values for pair in each]
            whole += _offsets_of([len(each) for each in values])
            whole += _values_of([key for key, _ in pairs]) + _values_of([value for _, value in pairs])
        elif column <= Column.META:
            whole += _values_of([value or b"" for value in values])
        else:
            whole += _padded(
                struct.pack(f"<{len(values)}{'B' if column == Column.PRIORITY else 'q'}", *values)
            )
    for column in _with_nulls(columns):
        bits = [value is not None for value in columns[column]]
        whole += _padded(np.packbits(bits, bitorder="little").tobytes())
    return whole


def _with_nulls(columns: Mapping[Column, Sequence[Any]]) -> list[Column]:
    return [column for column in layout.NULLABLE if None in columns.get(column, ())]


def frame_of(columns: Mapping[Column, Sequence[Any]], **fields: int) -> bytearray:
    """Return a frame of records with these columns and these header fields."""
    body = body_of(columns)
    header = FrameHeader(
        layout.FRAME_LEN_MIN + len(body), layout.FrameType.APPEND, layout.VERSION,
        sum(1 << bit for bit in (*columns, *(layout.VALID_SHIFT + each for each in _with_nulls(columns)))),
        0, 0, 0, len(columns[Column.PAYLOAD]), 0, 0, 0, len(body), 0,
        Durability.DISK, 0, xxhash.xxh3_64_intdigest(body), 0,
    )  # fmt: skip
    return bytearray(pack_header(header._replace(**fields)) + body)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) & 7)


def _offsets_of(lengths: Sequence[int]) -> bytes:
    return _padded(struct.pack(f"<{len(lengths) + 1}i", 0, *itertools.accumulate(lengths)))


def _values_of(values: Sequence[bytes]) -> bytes:
    return _offsets_of([len(value) for value in values]) + _padded(b"".join(values))
