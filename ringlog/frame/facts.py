"""What retention and deletes must know of each record: its number, size, stamps and tag. Nothing of content.

Frames are taken as verified (checksums looked at). Those without headers and without compression, which
is nearly all, are walked side by side, column by column; the others are opened one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import layout
from ringlog.frame.batch import I64, U64, FrameBatch, codecs_of, columns_of, counts_of
from ringlog.frame.body import columns_in
from ringlog.frame.layout import Column
from ringlog.frame.view import FrameView, open_row

_OPENED = 1 << Column.HEADERS
"""Columns whose frames are opened one by one."""


@dataclass(slots=True)
class RecordFacts:
    """One row a record, numbers ascending. Times are microseconds since the epoch."""

    seqs: U64
    sizes: I64
    """(n,) accounted bytes (R-10)."""
    stamps: I64
    """(n,) commit stamps."""
    expires: I64 | None
    """(n,) own `expires_at`, 0 = none; None when no record has one."""
    tags: list[bytes] | None
    """One a record, b"" = none; None when no record has one, or when they were not asked for."""
    not_before: I64 | None = None
    """(n,) own `not_before`, 0 = none; None when no record has one."""
    priorities: NDArray[np.uint8] | None = None
    """(n,) own priority; None when no record has one."""

    def __len__(self) -> int:
        return len(self.seqs)


NOTHING = RecordFacts(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64), None, None)


def record_facts(buffer: Any, batch: FrameBatch, *, with_tags: bool = False) -> RecordFacts:
    """Facts of every record of a batch of verified APPEND frames of one topic, ascending, found in `buffer`.

    Raises FrameInvalid when a column reaches outside of its frame.
    """
    if not len(batch):
        return NOTHING
    shapes = columns_of(batch.words) | (codecs_of(batch.words) << np.uint64(16))
    if (shapes == shapes[0]).all():
        return _of_shape(buffer, batch, int(shapes[0]), with_tags=with_tags)
    parts = [
        _of_shape(buffer, batch.take(np.flatnonzero(shapes == shape)), shape, with_tags=with_tags)
        for shape in np.unique(shapes).tolist()
    ]
    return joined(parts)


def joined(parts: list[RecordFacts]) -> RecordFacts:
    """All rows of the parts, in the order of their numbers."""
    if len(parts) == 1:
        return parts[0]
    seqs = np.concatenate([part.seqs for part in parts])
    order = np.argsort(seqs, kind="stable")
    tags = None
    if any(part.tags is not None for part in parts):
        flat = [tag for part in parts for tag in (part.tags or [b""] * len(part))]
        tags = [flat[row] for row in order.tolist()]
    return RecordFacts(
        seqs[order],
        np.concatenate([part.sizes for part in parts])[order],
        np.concatenate([part.stamps for part in parts])[order],
        _filled(parts, [part.expires for part in parts], order),
        tags,
        _filled(parts, [part.not_before for part in parts], order),
        _filled(parts, [part.priorities for part in parts], order),
    )


def _filled(parts: list[RecordFacts], columns: list[Any], order: I64) -> Any:
    """One column of all rows, in this order, with 0 where a part has none; None when no part has one."""
    known = next((column for column in columns if column is not None), None)
    if known is None:
        return None
    filled = [
        np.zeros(len(part), known.dtype) if column is None else column
        for part, column in zip(parts, columns, strict=True)
    ]
    return np.concatenate(filled)[order]


def _of_shape(buffer: Any, batch: FrameBatch, shape: int, *, with_tags: bool) -> RecordFacts:
    bitmap = shape & 0xFFFF
    if shape >> 16 or bitmap & _OPENED:
        opened = [open_row(buffer, batch, row) for row in range(len(batch))]
        return joined([_of_view(view, with_tags=with_tags) for view in opened])
    return _Walk(buffer, batch).facts(bitmap, with_tags=with_tags)


def _of_view(view: FrameView, *, with_tags: bool) -> RecordFacts:
    sizes = np.diff(view.payloads.offsets).astype(np.int64)
    metas = view.bytes_column(Column.META)
    if metas is not None:
        sizes = sizes + np.diff(metas.offsets)
    tags = view.bytes_column(Column.TAG) if with_tags else None
    stamps = view.fixed_column(Column.COMMIT_TS)
    return RecordFacts(
        np.arange(view.first_seq, view.last_seq + 1, dtype=np.uint64),
        sizes,
        np.full(len(view), view.commit_ts, np.int64) if stamps is None else stamps.astype(np.int64),
        view.fixed_column(Column.EXPIRES_AT),
        None if tags is None else tags.to_list(),
        view.fixed_column(Column.NOT_BEFORE),
        view.fixed_column(Column.PRIORITY),
    )


class _Walk:
    """Goes over the columns of many frames at once; positions are bytes of the buffer."""

    def __init__(self, buffer: Any, batch: FrameBatch) -> None:
        self._view = memoryview(buffer).cast("B")
        usable = len(self._view) & ~7
        self._i32 = np.frombuffer(self._view[:usable], "<i4")
        self._i64 = np.frombuffer(self._view[:usable], "<i8")
        self._words = batch.words
        self._at = batch.offsets + layout.HEADER_BYTES
        self._end = batch.offsets + batch.total_bytes
        self._counts = counts_of(batch.words).astype(np.int64)
        total = int(self._counts.sum())
        if total == len(batch):
            self._frame_of: Any = slice(None)
            self._index_of: Any = 0
        else:
            self._frame_of = np.repeat(np.arange(len(batch)), self._counts)
            ends = np.cumsum(self._counts)
            self._index_of = np.arange(total) - (ends - self._counts)[self._frame_of]

    def facts(self, bitmap: int, *, with_tags: bool) -> RecordFacts:
        """The facts of all frames, which have the columns of `bitmap`."""
        sizes: Any = 0
        expires = tags = not_before = priorities = None
        stamps = self._words[:, layout.W_COMMIT_TS].astype(np.int64)[self._frame_of]
        for column in columns_in(bitmap):
            if column <= Column.META:
                starts, stops = self._bytes_column()
                if column in (Column.PAYLOAD, Column.META):
                    sizes = sizes + (stops - starts)
                elif column == Column.TAG and with_tags:
                    whole = bytes(self._view[int(starts[0]) : int(stops[-1])])
                    bounds = zip((starts - starts[0]).tolist(), (stops - starts[0]).tolist(), strict=True)
                    tags = [whole[a:b] for a, b in bounds]
            elif column == Column.PRIORITY:
                at = self._past(_padded(self._counts))
                priorities = np.frombuffer(self._view, np.uint8)[at[self._frame_of] + self._index_of]
            else:
                values = self._times()
                if column == Column.EXPIRES_AT:
                    expires = values
                elif column == Column.NOT_BEFORE:
                    not_before = values
                elif column == Column.COMMIT_TS:
                    stamps = values
        bases = self._words[:, layout.W_BASE_SEQ][self._frame_of]
        seqs = bases + np.asarray(self._index_of, dtype=np.uint64)
        return RecordFacts(seqs, sizes, stamps, expires, tags, not_before, priorities)

    def _past(self, sizes: I64) -> I64:
        at = self._at
        self._at = at + sizes
        if (self._at > self._end).any():
            raise FrameInvalid("column runs past the body")
        return at

    def _times(self) -> I64:
        at = self._past(_padded(8 * self._counts))
        values: I64 = self._i64[(at >> 3)[self._frame_of] + self._index_of]
        return values

    def _bytes_column(self) -> tuple[I64, I64]:
        at = self._past(_padded(4 * (self._counts + 1)))
        sizes = self._i32[(at >> 2) + self._counts].astype(np.int64)
        if (sizes < 0).any():
            raise FrameInvalid("offsets do not start at 0 and rise")
        data = self._past(_padded(sizes))[self._frame_of]
        base = (at >> 2)[self._frame_of] + self._index_of
        return data + self._i32[base], data + self._i32[base + 1]


def _padded(sizes: I64) -> I64:
    return (sizes + 7) & ~7
