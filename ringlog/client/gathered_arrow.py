"""Records of many small frames as one Arrow RecordBatch, with the schema that a frame's own view has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringlog.frame.arrow import NAMES
from ringlog.frame.body import TEXT_COLUMNS, columns_in
from ringlog.frame.layout import EVENT_TS_NONE, PRODUCER_COLUMNS, TIME_COLUMNS, Column

if TYPE_CHECKING:
    import pyarrow as pa

    from ringlog.client.gather import GatheredPiece


def gathered_batch(piece: GatheredPiece, *, nulls: bool, columns: int | None) -> pa.RecordBatch:
    """Build seq, ts and the columns of `columns` (default: those there are); see frame.arrow.to_arrow."""
    import pyarrow

    wanted = (piece.bitmap if columns is None else columns | 1) & PRODUCER_COLUMNS
    arrays = [pyarrow.array(piece.seqs.astype(np.uint64)), _times(pyarrow, piece.times, None)]
    names = ["seq", "ts"]
    for column in columns_in(wanted):
        names.append(NAMES[column])
        arrays.append(_column(pyarrow, piece, column, nulls))
    return pyarrow.RecordBatch.from_arrays(arrays, names=names)


def _column(arrow: Any, piece: GatheredPiece, column: Column, nulls: bool) -> Any:
    count = len(piece)
    if column == Column.HEADERS:
        pair = arrow.struct(
            [
                arrow.field("key", arrow.string(), nullable=False),
                arrow.field("value", arrow.binary(), nullable=False),
            ]
        )
        maps = piece.header_maps() or [{}] * count
        lists = [[{"key": key, "value": value} for key, value in one.items()] for one in maps]
        return arrow.array(lists, type=arrow.list_(pair))
    if column == Column.PRIORITY:
        found = piece.fixed_column(column)
        return arrow.array(np.zeros(count, np.uint8) if found is None else found)
    if column in TIME_COLUMNS:
        absent = EVENT_TS_NONE if column == Column.EVENT_TS else 0
        found = piece.fixed_column(column)
        values = np.full(count, absent) if found is None else found
        return _times(arrow, values, values == absent if nulls else None)
    texts: list[Any] = piece.column(column) or [b""] * count
    if nulls and column != Column.PAYLOAD:
        texts = [value or None for value in texts]
    made = arrow.array(texts, type=arrow.binary())
    return made.cast(arrow.string()) if column in TEXT_COLUMNS else made


def _times(arrow: Any, values: Any, mask: Any) -> Any:
    return arrow.array(values, mask=mask, type=arrow.int64()).view(arrow.timestamp("us", tz="UTC"))
