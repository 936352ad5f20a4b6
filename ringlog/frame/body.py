"""Offsets of the columns in a body, determined and checked in one pass.

A body that passes needs no further bounds check. Its offsets start at 0, never decrease and end inside the
body, so no slice, NumPy view or Arrow array made from them reaches outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame.kernel import kernel
from ringlog.frame.layout import VALID_SHIFT, Column

T = TypeVar("T")

NOT_TEXT = "text is not UTF-8"
TEXT_COLUMNS = frozenset({Column.TAG, Column.NODE, Column.META})
FAULTS = (
    "",
    "offsets run past the body",
    "offsets must start at 0 and not decrease",
    "column runs past the body",
    "padding is not zero",
    NOT_TEXT,
    "unexpected bytes after the last column",
    "a null has bytes",
)
"""Texts for the kernel's codes, in the order of its enum that begins with B_SOUND."""


class BytesColumnSpan(NamedTuple):
    """One bytes column: `entries + 1` int32 offsets at `offsets_at`, then the bytes. Offsets in the body."""

    entries: int
    offsets_at: int
    data_at: int
    data_bytes: int


class HeaderSpans(NamedTuple):
    """The three parts of the headers column."""

    lists_at: int
    keys: BytesColumnSpan
    values: BytesColumnSpan


@dataclass(slots=True)
class BodyLayout:
    """Offsets in the body of the columns that the frame has. `fixed` has the offsets of the values."""

    spans: dict[Column, BytesColumnSpan] = field(default_factory=dict)
    headers: HeaderSpans | None = None
    fixed: dict[Column, int] = field(default_factory=dict)
    valid: dict[Column, int] = field(default_factory=dict)
    """Offsets of validity bitmaps. In version 2, a column without a bitmap has no nulls."""


@cache
def columns_in(bitmap: int) -> tuple[Column, ...]:
    """Return the columns of a bitmap in bit order. `bitmap` is at most layout.COLUMNS_KNOWN."""
    return tuple(column for column in Column if bitmap >> column & 1)


@cache
def validity_in(bitmap: int) -> tuple[Column, ...]:
    """Return the columns with a validity bitmap, in bit order."""
    return columns_in(bitmap >> VALID_SHIFT)


def walk_body(body: memoryview, columns: int, count: int) -> BodyLayout:
    """Find every column of an uncompressed body of `count` (>= 1) records.

    Raises FrameInvalid unless the columns fill the body exactly. Its offset counts from the start of the
    body.
    """
    places: Any = kernel.walk(body, columns, count)
    found = BodyLayout()
    if isinstance(places[0], int):
        raise FrameInvalid(FAULTS[places[0]], offset=places[1])
    known = columns_in(columns)
    for column, place in zip(known, places, strict=False):
        if column == Column.HEADERS:
            lists_at, entries, *both = place
            found.headers = HeaderSpans(
                lists_at, BytesColumnSpan(entries, *both[:3]), BytesColumnSpan(entries, *both[3:])
            )
        elif column <= Column.META:
            found.spans[column] = BytesColumnSpan(count, *place)
        else:
            [found.fixed[column]] = place
    for column, (place,) in zip(validity_in(columns), places[len(known) :], strict=True):
        found.valid[column] = place
    return found


def with_nulls(values: list[T], valid: NDArray[np.bool_] | None) -> list[T | None]:
    """Return the values with None for nulls. `valid` None = no nulls."""
    found: list[T | None] = values  # type: ignore[assignment]
    if valid is None:
        return found
    return [value if is_there else None for value, is_there in zip(values, valid.tolist(), strict=True)]


def offsets_in(body: memoryview, at: int, entries: int) -> NDArray[np.int32]:
    """Return a view of the `entries + 1` offsets at `at`."""
    return np.frombuffer(body, dtype="<i4", count=entries + 1, offset=at)
