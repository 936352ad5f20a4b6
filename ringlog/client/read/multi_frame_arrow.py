"""Records of many small frames as one Arrow RecordBatch, with the schema of a single frame's view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.frame.arrow import NAMES
from ringlog.frame.body import TEXT_COLUMNS, columns_in
from ringlog.frame.layout import EVENT_TS_NONE, PRODUCER_COLUMNS, TIME_COLUMNS, Column

if TYPE_CHECKING:
    import pyarrow as pa

    from ringlog.client.read.multi_frame_batch import MultiFrameRecordBatch


I64 = NDArray[np.int64]


def gathered_batch(batch: MultiFrameRecordBatch, *, nulls: bool, columns: int | None) -> pa.RecordBatch:
    """Build seq, ts and the columns of `columns` (default: the existing ones). See frame.arrow.to_arrow."""
    import pyarrow

    wanted = (batch.bitmap if columns is None else columns | 1) & PRODUCER_COLUMNS
    arrays = [pyarrow.array(batch.seqs.astype(np.uint64)), _times(pyarrow, batch.times, None)]
    names = ["seq", "ts"]
    for column in columns_in(wanted):
        names.append(NAMES[column])
        arrays.append(_column(pyarrow, batch, column, nulls))
    return pyarrow.RecordBatch.from_arrays(arrays, names=names)


def _column(arrow: Any, batch: MultiFrameRecordBatch, column: Column, nulls: bool) -> Any:
    count = len(batch)
    if column == Column.HEADERS:
        return _headers(arrow, batch)
    if column == Column.PRIORITY:
        found = batch.fixed_column(column)
        return arrow.array(np.zeros(count, np.uint8) if found is None else found)
    if column in TIME_COLUMNS:
        absent = EVENT_TS_NONE if column == Column.EVENT_TS else 0
        found = batch.fixed_column(column)
        values = np.full(count, absent) if found is None else found
        return _times(arrow, values, values == absent if nulls else None)
    starts, stops = batch.span(column)
    absent_rows = None
    if nulls:
        valid = batch.validity(column)
        has_absent = valid is None and (column == Column.META or not batch.bitmap >> column & 1)
        absent_rows = starts == stops if has_absent else None if valid is None else ~valid
    result = _gathered(arrow, batch.buffer, starts, stops, absent_rows)
    return result.cast(arrow.string()) if column in TEXT_COLUMNS else result


def _gathered(arrow: Any, buffer: memoryview, starts: I64, stops: I64, absent: Any = None) -> Any:
    """Return scattered values as one binary array. Arrow copies them once, without a Python object for each.

    The values ascend. Their whole range is viewed as an array in which values and the bytes between them
    alternate, and every other element is selected. `absent` (n,) bool makes nulls.
    """
    count = len(starts)
    if not count:
        return arrow.array([], type=arrow.binary())
    bounds = np.empty(2 * count, np.int64)
    bounds[0::2], bounds[1::2] = starts, stops
    low, high = int(bounds[0]), int(bounds[-1])
    offsets = arrow.py_buffer(bounds - low)
    data = arrow.py_buffer(buffer[low:high])
    alternating = arrow.Array.from_buffers(arrow.large_binary(), 2 * count - 1, [None, offsets, data])
    chosen = arrow.array(np.arange(0, 2 * count - 1, 2), mask=absent)
    return alternating.take(chosen).cast(arrow.binary())


def _headers(arrow: Any, batch: MultiFrameRecordBatch) -> Any:
    """Return list<struct<key, value>>. A record without headers has an empty list."""
    pair = arrow.struct(
        [
            arrow.field("key", arrow.string(), nullable=False),
            arrow.field("value", arrow.binary(), nullable=False),
        ]
    )
    (first, stop), keys, values = batch.header_spans()
    counts = stop - first
    ends = np.concatenate(([0], np.cumsum(counts)))
    entries = np.repeat(first - ends[:-1], counts) + np.arange(ends[-1])
    columns = [
        _gathered(arrow, batch.buffer, starts[entries], stops[entries]) for starts, stops in (keys, values)
    ]
    pairs = arrow.StructArray.from_arrays([columns[0].cast(arrow.string()), columns[1]], fields=list(pair))
    return arrow.ListArray.from_arrays(arrow.array(ends.astype(np.int32)), pairs, type=arrow.list_(pair))


def _times(arrow: Any, values: Any, mask: Any) -> Any:
    return arrow.array(values, mask=mask, type=arrow.int64()).view(arrow.timestamp("us", tz="UTC"))
