"""Facts of each record that retention and deletes need: seq, size, stamps and tag. No contents.

The frames must be verified already. Compressed frames are decoded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.frame.batch import I64, U64, FrameBatch, codecs_of, shapes_of
from ringlog.frame.layout import Column
from ringlog.frame.spans import spans_of
from ringlog.frame.view import FrameView, open_row

_CODEC_SHIFT = 24
"""Position of the codec in a combined key, above the shape."""


@dataclass(slots=True)
class RecordFacts:
    """One row per record, seqs ascending. Times are microseconds since the epoch."""

    seqs: U64
    sizes: I64
    """(n,) accounted bytes."""
    stamps: I64
    """(n,) commit stamps."""
    expires: I64 | None
    """(n,) own `expires_at`, 0 = none; None if no record has one."""
    tags: list[bytes] | None
    """One tag per record, b"" = none; None if no record has one, or if they were not requested."""
    not_before: I64 | None = None
    """(n,) own `not_before`, 0 = none; None if no record has one."""
    priorities: NDArray[np.uint8] | None = None
    """(n,) own priority; None if no record has one."""

    def __len__(self) -> int:
        return len(self.seqs)


NO_FACTS = RecordFacts(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64), None, None)


def record_facts(buffer: Any, batch: FrameBatch, *, with_tags: bool = False) -> RecordFacts:
    """Return the facts of every record of verified, ascending APPEND frames of one topic in `buffer`.

    Raises FrameInvalid if a column reaches outside of its frame.
    """
    if not len(batch):
        return NO_FACTS
    shapes = shapes_of(batch.words) | (codecs_of(batch.words) << np.uint64(_CODEC_SHIFT))
    if (shapes == shapes[0]).all():
        return _of_shape(buffer, batch, int(shapes[0]), with_tags=with_tags)
    parts = [
        _of_shape(buffer, batch.take(np.flatnonzero(shapes == shape)), shape, with_tags=with_tags)
        for shape in np.unique(shapes).tolist()
    ]
    return concat_facts(parts)


def concat_facts(parts: list[RecordFacts]) -> RecordFacts:
    """Return all rows of the parts, in the order of their seqs."""
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
    """Return one column of all rows in `order`, with 0 for parts without it; None if no part has it."""
    known = next((column for column in columns if column is not None), None)
    if known is None:
        return None
    filled = [
        np.zeros(len(part), known.dtype) if column is None else column
        for part, column in zip(parts, columns, strict=True)
    ]
    return np.concatenate(filled)[order]


def _of_shape(buffer: Any, batch: FrameBatch, shape: int, *, with_tags: bool) -> RecordFacts:
    if shape >> _CODEC_SHIFT:
        opened = [open_row(buffer, batch, row) for row in range(len(batch))]
        return concat_facts([_of_view(view, with_tags=with_tags) for view in opened])
    found = spans_of(buffer, batch)
    starts, stops = found.spans[Column.PAYLOAD]
    sizes = stops - starts
    if Column.META in found.spans:
        starts, stops = found.spans[Column.META]
        sizes += stops - starts
    tags = None
    if with_tags and Column.TAG in found.spans:
        starts, stops = found.spans[Column.TAG]
        first = int(starts[0])
        whole = bytes(found.buffer[first : int(stops[-1])])
        tags = [whole[a:b] for a, b in zip((starts - first).tolist(), (stops - first).tolist(), strict=True)]
    return RecordFacts(
        found.seqs.view(np.uint64), sizes, found.times, found.fixed.get(Column.EXPIRES_AT), tags,
        found.fixed.get(Column.NOT_BEFORE), found.fixed.get(Column.PRIORITY),
    )  # fmt: skip


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
