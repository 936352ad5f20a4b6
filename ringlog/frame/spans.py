"""Where every value of many frames lies, found for all of them at once.

Opening a frame costs about ten microseconds; here a thousand one-record frames cost a few hundred
nanoseconds a record. The frames are uncompressed and have the same columns; `plain.py` makes others so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.body import columns_in
from ringlog.frame.layout import Column

I64 = NDArray[np.int64]
Span = tuple[I64, I64]
"""(starts, stops) of values, in bytes of the buffer."""


@dataclass(slots=True)
class Spans:
    """Values of many frames. Every array has one entry a record, in the order of the frames."""

    buffer: memoryview
    seqs: I64
    times: I64
    """Commit stamps: the column, or the header's."""
    frame_of: I64
    """Row of the batch that holds the record."""
    spans: dict[Column, Span]
    fixed: dict[Column, NDArray[Any]]
    """Without COMMIT_TS, which is in `times`."""
    headers: tuple[Span, Span, Span] | None
    """(which entries are a record's, where keys lie, where values lie)."""


def spans_of(buffer: Any, batch: FrameBatch) -> Spans:
    """Find the values of uncompressed append frames with the same columns; there is at least one frame.

    Raises FrameInvalid, with the offset of the first frame, when a column does not fit its frame. UTF-8,
    padding and checksums are not looked at.
    """
    words = batch.words
    spans: dict[Column, Span] = {}
    fixed: dict[Column, NDArray[Any]] = {}
    headers = None
    try:
        columns = _Columns(buffer, batch)
        for column in columns_in(int(frames.columns_of(words[:1])[0])):
            if column == Column.HEADERS:
                headers = columns.headers()
            elif column == Column.PRIORITY:
                fixed[column] = columns.priorities()
            elif column > Column.META:
                fixed[column] = columns.times()
            else:
                spans[column] = columns.bytes_column()
        columns.require_end()
    except (_OutOfBounds, IndexError):
        raise FrameInvalid("a column does not fit its frame", offset=int(batch.offsets[0])) from None
    base = words[:, layout.W_BASE_SEQ].astype(np.int64)
    stamps = fixed.pop(Column.COMMIT_TS, None)
    if stamps is None:
        stamps = words[:, layout.W_COMMIT_TS].astype(np.int64)[columns.frame_of]
    return Spans(
        columns.buffer, base[columns.frame_of] + columns.index_of, stamps, columns.frame_of, spans, fixed,
        headers,
    )  # fmt: skip


class _Columns:
    """Walks over the columns of many uncompressed frames at once. Positions are bytes of the buffer.

    Does for all frames what frame.body.walk_body does for one; refuses what that would refuse for
    reaching outside of a frame.
    """

    def __init__(self, buffer: Any, batch: FrameBatch) -> None:
        self.buffer = memoryview(buffer).cast("B").toreadonly()
        usable = len(self.buffer) & ~7
        self._i32 = np.frombuffer(self.buffer[:usable], "<i4")
        self._i64 = np.frombuffer(self.buffer[:usable], "<i8")
        self._u8 = np.frombuffer(self.buffer, np.uint8)
        self._at = batch.offsets + layout.HEADER_BYTES
        self._end = batch.offsets + batch.total_bytes
        self.counts = frames.counts_of(batch.words).astype(np.int64)
        self.frame_of, self.index_of = _expand(self.counts)

    def bytes_column(self) -> Span:
        """The next column, one of bytes."""
        return self._bytes_part(self.counts, self.frame_of, self.index_of)

    def headers(self) -> tuple[Span, Span, Span]:
        """The next column, the headers."""
        at = self._offsets_at(self.counts)
        base = (at >> 2)[self.frame_of] + self.index_of
        entries = self._i32[(at >> 2) + self.counts].astype(np.int64)
        first = (np.cumsum(entries) - entries)[self.frame_of]
        lists = (self._i32[base] + first, self._i32[base + 1] + first)
        _require(bool((entries >= 0).all() and (lists[0] <= lists[1]).all()))
        # Before anything is allocated by it: a header takes eight bytes of offsets in its frame.
        _require(bool((8 * entries <= self._end - self._at).all()))
        frame_of, index_of = _expand(entries)
        keys = self._bytes_part(entries, frame_of, index_of)
        return lists, keys, self._bytes_part(entries, frame_of, index_of)

    def times(self) -> I64:
        """The next column, one of times."""
        at = self._past(_padded(8 * self.counts))
        values: I64 = self._i64[(at >> 3)[self.frame_of] + self.index_of]
        return values

    def priorities(self) -> NDArray[np.uint8]:
        """The next column, the priorities."""
        at = self._past(_padded(self.counts))
        values: NDArray[np.uint8] = self._u8[at[self.frame_of] + self.index_of]
        return values

    def require_end(self) -> None:
        """The columns must fill every frame."""
        _require(bool((self._at == self._end).all()))

    def _past(self, size: I64) -> I64:
        """Move on by `size`; returns where that was."""
        at = self._at
        self._at = at + size
        _require(bool((self._at <= self._end).all()))
        return at

    def _offsets_at(self, entries: I64) -> I64:
        at = self._past(_padded(4 * (entries + 1)))
        _require(bool((self._i32[at >> 2] == 0).all()))
        return at

    def _bytes_part(self, entries: I64, frame_of: I64, index_of: I64) -> Span:
        at = self._offsets_at(entries)
        base = (at >> 2)[frame_of] + index_of
        low, high = self._i32[base].astype(np.int64), self._i32[base + 1].astype(np.int64)
        size = self._i32[(at >> 2) + entries].astype(np.int64)
        _require(bool((size >= 0).all() and (low <= high).all()))
        data = self._past(_padded(size))[frame_of]
        _require(bool((high <= size[frame_of]).all()))
        return data + low, data + high


class _OutOfBounds(Exception):
    """A column reaches outside of its frame."""


def _require(is_so: bool) -> None:
    if not is_so:
        raise _OutOfBounds


def _padded(sizes: I64) -> I64:
    return (sizes + 7) & ~7


def _expand(counts: I64) -> tuple[I64, I64]:
    """For every entry of every frame: which frame, and which entry of it."""
    frame_of = np.repeat(np.arange(len(counts)), counts)
    return frame_of, np.arange(len(frame_of)) - (np.cumsum(counts) - counts)[frame_of]
