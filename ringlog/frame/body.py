"""Where each column lies in a body, found and checked in one walk.

A body that passes can be read without a further check: offsets start at 0, never fall and end inside
the body, so that no slice, NumPy view or Arrow array made from them reaches outside of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame.layout import Column, padded

NOT_TEXT = "text is not UTF-8"
TEXT_COLUMNS = frozenset({Column.TAG, Column.NODE, Column.META})

_SMALL = 16
"""Up to so many entries plain integers are faster than an array."""


class Span(NamedTuple):
    """One bytes column: `entries + 1` int32 offsets at `offsets_at`, then the bytes; places in the body."""

    entries: int
    offsets_at: int
    data_at: int
    data_bytes: int


class HeaderSpans(NamedTuple):
    """The three parts of the headers column."""

    lists_at: int
    keys: Span
    values: Span


@dataclass(slots=True)
class BodyLayout:
    """Places of the columns that are there; fixed columns by the offset of their values."""

    spans: dict[Column, Span] = field(default_factory=dict)
    headers: HeaderSpans | None = None
    fixed: dict[Column, int] = field(default_factory=dict)


@cache
def columns_in(bitmap: int) -> tuple[Column, ...]:
    """Columns of a bitmap, in the order of their bits. `bitmap` is at most layout.COLUMNS_KNOWN."""
    return tuple(column for column in Column if bitmap >> column & 1)


def walk_body(body: memoryview, columns: int, count: int) -> BodyLayout:
    """Find every column of an uncompressed body of `count` (>= 1) records.

    Raises FrameInvalid (its offset counts in the body) unless the columns fill the body exactly.
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
    if at != len(body):
        raise FrameInvalid("bytes left over in the body", offset=at)
    return found


def offsets_in(body: memoryview, at: int, entries: int) -> NDArray[np.int32]:
    """View the `entries + 1` offsets at `at`."""
    return np.frombuffer(body, dtype="<i4", count=entries + 1, offset=at)


def _headers_at(body: memoryview, at: int, count: int) -> tuple[HeaderSpans, int]:
    lists_at = at
    entries, at = _offsets_at(body, at, count)
    keys, at = _span_at(body, at, entries, text=True)
    values, at = _span_at(body, at, entries, text=False)
    return HeaderSpans(lists_at, keys, values), at


def _span_at(body: memoryview, at: int, entries: int, text: bool) -> tuple[Span, int]:
    offsets_at = at
    data_bytes, data_at = _offsets_at(body, at, entries)
    stop = data_at + data_bytes
    at = padded(stop)
    if at > len(body):
        raise FrameInvalid("column runs past the body", offset=offsets_at)
    _check_zeros(body, stop, at)
    if text and not _is_text(body, offsets_at, entries, data_at, stop):
        raise FrameInvalid(NOT_TEXT, offset=data_at)
    return Span(entries, offsets_at, data_at, data_bytes), at


def _offsets_at(body: memoryview, at: int, entries: int) -> tuple[int, int]:
    """Check the offsets at `at`; return the last one and the place just past them."""
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
        raise FrameInvalid("offsets do not start at 0 and rise", offset=at)
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
    """True if every entry is UTF-8: the whole decodes and no entry begins inside a character."""
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
