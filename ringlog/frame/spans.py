"""Places of all values of many frames, determined together.

The frames must be uncompressed, of one version and with the same columns. Nulls may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.body import FAULTS, columns_in, validity_in
from ringlog.frame.kernel import kernel
from ringlog.frame.layout import NULLABLE, Column

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]
ValueRanges = tuple[I64, I64]
"""(starts, stops) of values, in bytes of the buffer."""


@dataclass(slots=True)
class ValueSpans:
    """Values of many frames. Every array has one entry per record, in the order of the frames."""

    buffer: memoryview
    seqs: I64
    times: I64
    """Commit stamps from the column COMMIT_TS, or else from the headers."""
    batch_rows: I64
    """Row in the batch of the record's frame."""
    spans: dict[Column, ValueRanges]
    fixed: dict[Column, NDArray[Any]]
    """Without COMMIT_TS, which is in `times`."""
    valid: dict[Column, Mask]
    """True where there is a value. Only for NULLABLE columns. A column without an entry has no nulls."""
    headers: tuple[ValueRanges, ValueRanges, ValueRanges] | None
    """(range of entries of each record, places of the keys, places of the values)."""


def spans_of(buffer: Any, batch: FrameBatch) -> ValueSpans:
    """Return the values of one or more uncompressed append frames with equal batch.shapes_but_nulls_of.

    Raises FrameInvalid, with the offset of the frame, if a body contradicts its header. Checksums are not
    verified.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    words = np.ascontiguousarray(batch.words)
    found = kernel.spans(view, np.ascontiguousarray(batch.offsets), words)
    if len(found) == 2:
        raise FrameInvalid(FAULTS[found[0]], offset=int(batch.offsets[found[1]]))
    table, records, entries = found
    whole = np.frombuffer(table, np.int64)
    head = int(np.bitwise_or.reduce(words[:, layout.W_HEAD]))
    columns, nullable = columns_in(head >> layout.COLUMNS_SHIFT), validity_in(head >> layout.COLUMNS_SHIFT)
    rows = iter(whole[: len(whole) - 4 * entries].reshape(-1, records))
    seqs, times, frame_of = next(rows), next(rows), next(rows)
    spans: dict[Column, ValueRanges] = {}
    fixed: dict[Column, NDArray[Any]] = {}
    headers = None
    for column in columns:
        if column == Column.HEADERS:
            keys_start, keys_stop, values_start, values_stop = whole[len(whole) - 4 * entries :].reshape(
                4, -1
            )
            headers = (next(rows), next(rows)), (keys_start, keys_stop), (values_start, values_stop)
        elif column <= Column.META:
            spans[column] = next(rows), next(rows)
        elif column == Column.COMMIT_TS:
            times = next(rows)
        else:
            values = next(rows)
            fixed[column] = values.astype(np.uint8) if column == Column.PRIORITY else values
    valid = {column: next(rows) != 0 for column in nullable}
    if head >> layout.VERSION_SHIFT & 0xFF == layout.VERSION_FIRST:
        valid = {column: empty_is_null(spans[column]) for column in NULLABLE[1:] if column in spans}
    return ValueSpans(view, seqs, times, frame_of, spans, fixed, valid, headers)


def empty_is_null(span: ValueRanges) -> Mask:
    """Return which keys, tags or nodes of version 1 have a value: those that are not empty."""
    starts, stops = span
    found: Mask = starts != stops
    return found
