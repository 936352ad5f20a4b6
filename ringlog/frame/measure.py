"""What a shard must know of each frame before it admits it: structure, limits, accounted bytes.

The verdict agrees with open_frame's on everything but checksums (batch.py looks at those) and limits:
a frame is `Fault.STRUCTURE` or `Fault.TEXT` exactly when open_frame refuses it. Limits are a matter of
admission, not of format.

One-record frames, the hot path, are measured all at once, column by column. Others are walked one by
one, with NumPy inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import layout
from ringlog.frame.batch import (
    FrameBatch,
    codecs_of,
    columns_of,
    counts_of,
    malformed,
    types_of,
    words_of,
)
from ringlog.frame.body import NOT_TEXT, TEXT_COLUMNS, BodyLayout, Span, columns_in, offsets_in
from ringlog.frame.header import Header, header_fault, unpack_header
from ringlog.frame.layout import Column, FrameType
from ringlog.frame.view import checked_body
from ringlog.limits import (
    HEADER_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    NODE_BYTES_MAX,
    TAG_BYTES_MAX,
)
from ringlog.types import Codec

I64 = NDArray[np.int64]
I8 = NDArray[np.int8]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]


class Fault(IntEnum):
    """Why a frame must not be admitted; the first that applies, in this order."""

    OK = 0
    STRUCTURE = 1
    TEXT = 2
    TAG_TOO_LONG = 3
    NODE_TOO_LONG = 4
    KEY_TOO_LONG = 5
    META_TOO_LONG = 6
    HEADERS_TOO_LARGE = 7


_FEW = 12
"""Up to so many frames one by one is faster than side by side."""
FORMAT_FAULTS = frozenset({Fault.STRUCTURE, Fault.TEXT})

_LONGEST: tuple[tuple[Column, int, Fault], ...] = (
    (Column.TAG, TAG_BYTES_MAX, Fault.TAG_TOO_LONG),
    (Column.NODE, NODE_BYTES_MAX, Fault.NODE_TOO_LONG),
    (Column.KEY, KEY_BYTES_MAX, Fault.KEY_TOO_LONG),
    (Column.META, META_BYTES_MAX, Fault.META_TOO_LONG),
)


@dataclass(slots=True)
class Measures:
    """Row i belongs to frame i of the batch. The numbers are 0 where `bad` is STRUCTURE or TEXT."""

    accounted: I64
    """(n,) accounted bytes (R-10): payloads and metas."""
    largest: I64
    """(n,) accounted bytes of the largest record."""
    bad: I8
    """(n,) Fault."""


def measure(buffer: Any, batch: FrameBatch) -> Measures:
    """Measure each frame of a batch found in `buffer`, whose content must not change meanwhile.

    Total: whatever the bodies hold ends in a row. Control frames have no records and measure 0.
    """
    count = len(batch)
    found = Measures(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int8))
    if not count:
        return found
    words = buffer if isinstance(buffer, np.ndarray) else words_of(buffer)
    headers = batch.words
    if count <= _FEW:
        _measure_each(words.data.cast("B"), batch, range(count), found)
        return found
    columns = columns_of(headers)
    wrong = malformed(headers)
    found.bad[wrong] = Fault.STRUCTURE
    single = (
        ~wrong
        & (types_of(headers) == FrameType.APPEND)
        & (counts_of(headers) == 1)
        & (codecs_of(headers) == Codec.NONE)
        & ((columns & np.uint64(1 << Column.HEADERS)) == 0)
    )
    if single.all() and (columns == columns[0]).all():
        _measure_singles(words, batch, slice(None), int(columns[0]), found)
        return found
    for bitmap in np.unique(columns[single]).tolist():
        rows = np.flatnonzero(single & (columns == bitmap))
        _measure_singles(words, batch, rows, bitmap, found)
    others = np.flatnonzero(~wrong & ~single)
    if len(others):
        _measure_each(words.data.cast("B"), batch, others.tolist(), found)
    return found


def measure_alike(buffer: Any, batch: FrameBatch, count: int) -> tuple[I64, I64] | None:
    """(n,) accounted bytes and (n,) largest record of frames that lie back to back, are equally long,
    uncompressed, of `count` records each and hold payloads only: the hot path of a shard.

    None when a frame's structure is anything but that; `measure` then says what is wrong.
    """
    if count == 1:
        lengths = _single_payloads(buffer, batch)
        return None if lengths is None else (lengths, lengths)
    total = int(batch.total_bytes[0])
    data_at = layout.HEADER_BYTES + layout.padded(4 * (count + 1))
    if data_at > total:
        return None
    first, frames = int(batch.offsets[0]), len(batch)
    ends = np.ndarray(
        (frames, count + 1), "<i4", buffer, offset=first + layout.HEADER_BYTES, strides=(total, 4)
    )
    lengths = ends[:, 1:] - ends[:, :-1]
    stops = ends[:, -1].astype(np.int64)
    if ends[:, 0].any() or int(lengths.min()) < 0 or (data_at + ((stops + 7) & ~7) != total).any():
        return None
    if not _is_padded(
        memoryview(buffer).cast("B"), batch.offsets.tolist(), stops.tolist(), count, data_at, total
    ):
        return None
    return stops, lengths.max(axis=1).astype(np.int64)


def _is_padded(
    view: memoryview, starts: list[int], stops: list[int], count: int, data_at: int, total: int
) -> bool:
    """Are the bytes that round offsets and data up to whole words zero?"""
    offsets_stop = layout.HEADER_BYTES + 4 * (count + 1)
    for start, stop in zip(starts, stops, strict=True):
        if any(view[start + offsets_stop : start + data_at]) or any(
            view[start + data_at + stop : start + total]
        ):
            return False
    return True


def _single_payloads(buffer: Any, batch: FrameBatch) -> I64 | None:
    """(n,) payload bytes of one-record frames; None when one is not what it should be."""
    words = buffer if isinstance(buffer, np.ndarray) else words_of(buffer)
    at = (batch.offsets >> 3) + layout.HEADER_WORDS
    prefixes = words[at]
    first = int(prefixes[0])
    length, body_words = first >> 32, (int(batch.total_bytes[0]) >> 3) - layout.HEADER_WORDS
    if first & 0xFFFFFFFF or body_words != 1 + ((length + 7) >> 3):
        return None
    if len(prefixes) > 1 and (prefixes != prefixes[0]).any():
        return None
    if length & 7 and (words[at + (body_words - 1)] >> np.uint64(8 * (length & 7))).any():
        return None
    return np.full(len(prefixes), length, dtype=np.int64)


# -- frames of one record, all at once ----------------------------------------------------------------


def _measure_singles(
    words: U64, batch: FrameBatch, rows: NDArray[Any] | slice, bitmap: int, found: Measures
) -> None:
    """Walk the columns of many one-record frames side by side; all have the columns of `bitmap`.

    Never looks outside of a frame: a row that failed looks at its own header instead.
    """
    starts = batch.offsets[rows] >> 3
    stops = starts + (batch.total_bytes[rows] >> 3)
    at = starts + layout.HEADER_WORDS
    good: Mask = np.ones(len(starts), dtype=np.bool_)
    bad = np.zeros(len(starts), dtype=np.int8)
    lengths: dict[Column, I64] = {}
    for column in columns_in(bitmap):
        good &= at < stops
        first = words[np.where(good, at, starts)]
        if column <= Column.META:
            begins = at + 1
            lengths[column], at = _single_bytes(words, first, begins, starts, stops, good)
            if column in TEXT_COLUMNS:
                _check_texts(words, begins << 3, lengths[column], good, bad)
        else:
            if column == Column.PRIORITY:
                good &= first <= 0xFF
            at = at + 1
    good &= at == stops
    accounted = lengths[Column.PAYLOAD]
    if Column.META in lengths:
        accounted = accounted + lengths[Column.META]
    bad[~good] = Fault.STRUCTURE
    for column, most, code in _LONGEST:
        if column in lengths:
            bad[(bad == Fault.OK) & (lengths[column] > most)] = code
    fits = good & (bad != Fault.TEXT)
    found.accounted[rows] = found.largest[rows] = np.where(fits, accounted, 0)
    found.bad[rows] = bad


def _single_bytes(
    words: U64, offsets: U64, begins: I64, starts: I64, stops: I64, good: Mask
) -> tuple[I64, I64]:
    """Check one bytes column of one entry: two offsets in one word, then the bytes; clears `good`.

    Returns its lengths (0 where not good) and the words where the next column begins.
    """
    good &= (offsets & np.uint64(0xFFFFFFFF)) == 0
    lengths = (offsets >> np.uint64(32)).astype(np.int64)
    ends = begins + ((lengths + 7) >> 3)
    good &= ends <= stops
    lengths = np.where(good, lengths, 0)
    padding = -lengths & 7
    last = words[np.where(padding > 0, ends - 1, starts)]
    # Shifting by 64 is undefined, so rows without padding are shifted by nothing and then ignored.
    beyond = last >> ((64 - 8 * padding) & 63).astype(np.uint64)
    good &= (padding == 0) | (beyond == 0)
    return lengths, ends


def _check_texts(words: U64, starts: I64, lengths: I64, good: Mask, bad: I8) -> None:
    rows = np.flatnonzero(good & (lengths > 0))
    if not len(rows):
        return
    view = words.data.cast("B")
    firsts, lasts = starts[rows].tolist(), (starts[rows] + lengths[rows]).tolist()
    try:
        for a, b in zip(firsts, lasts, strict=True):
            str(view[a:b], "utf-8")
    except UnicodeDecodeError:
        for row, a, b in zip(rows.tolist(), firsts, lasts, strict=True):
            if not _decodes(view[a:b]):
                bad[row] = Fault.TEXT


def _decodes(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


# -- other frames, one by one -------------------------------------------------------------------------


def _measure_each(view: memoryview, batch: FrameBatch, rows: Iterable[int], found: Measures) -> None:
    headers = np.ascontiguousarray(batch.words).data.cast("B")
    for row in rows:
        header = unpack_header(headers, row * layout.HEADER_BYTES)
        if header_fault(header) is not None:
            found.bad[row] = Fault.STRUCTURE
            continue
        start = int(batch.offsets[row])
        stored = view[start + layout.HEADER_BYTES : start + header.total_bytes]
        found.accounted[row], found.largest[row], found.bad[row] = _measure_one(header, stored)


def _measure_one(header: Header, stored: memoryview) -> tuple[int, int, int]:
    try:
        body, places = checked_body(header, stored)
    except FrameInvalid as e:
        return 0, 0, Fault.TEXT if e.reason == NOT_TEXT else Fault.STRUCTURE
    if not header.records:
        return 0, 0, Fault.OK
    sizes = _lengths(body, places.spans[Column.PAYLOAD])
    if Column.META in places.spans:
        sizes = sizes + _lengths(body, places.spans[Column.META])
    accounted = sum(
        places.spans[column].data_bytes for column in (Column.PAYLOAD, Column.META) if column in places.spans
    )
    return accounted, int(sizes.max()), _over_limit(body, places, header.records)


def _over_limit(body: memoryview, places: BodyLayout, count: int) -> Fault:
    for column, most, code in _LONGEST:
        span = places.spans.get(column)
        if span is not None and span.data_bytes > most and int(_lengths(body, span).max()) > most:
            return code
    if places.headers is not None:
        lists = offsets_in(body, places.headers.lists_at, count)
        keys = offsets_in(body, places.headers.keys.offsets_at, places.headers.keys.entries)
        values = offsets_in(body, places.headers.values.offsets_at, places.headers.values.entries)
        sizes = np.diff(keys[lists].astype(np.int64) + values[lists])
        if int(np.diff(lists).max()) > HEADERS_PER_RECORD_MAX or int(sizes.max()) > HEADER_BYTES_MAX:
            return Fault.HEADERS_TOO_LARGE
    return Fault.OK


def _lengths(body: memoryview, span: Span) -> NDArray[np.int32]:
    offsets = offsets_in(body, span.offsets_at, span.entries)
    lengths: NDArray[np.int32] = offsets[1:] - offsets[:-1]
    return lengths
