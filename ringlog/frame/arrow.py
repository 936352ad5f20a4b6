"""Convert frames to Arrow and back. Columns with Arrow's memory layout are not copied.

pyarrow is optional (extra `arrow`), so it is imported only inside the functions that need it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import InvalidRequest, UsageError
from ringlog.frame.body import BytesColumnSpan, columns_in
from ringlog.frame.columns import (
    COLUMN_NAMES,
    BufferColumn,
    BufferHeaders,
    EncodedRecords,
    Values,
    buffer_values,
    check_record_count,
    encode_values,
)
from ringlog.frame.header import append_header_template
from ringlog.frame.layout import EVENT_TS_NONE, NULLABLE, PRODUCER_COLUMNS, TIME_COLUMNS, Column
from ringlog.frame.view import FrameView

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = {column: column.name.lower() for column in Column if PRODUCER_COLUMNS >> column & 1}
"""Arrow field name of each column. Commit stamps have the field `ts`."""
_TEXT = frozenset({Column.TAG, Column.NODE, Column.META})


def to_arrow(view: FrameView, *, nulls: bool = False, columns: int | None = None) -> pa.RecordBatch:
    """Return a frame's records as a RecordBatch: seq, ts, then the columns in bit order.

    Types: seq uint64; ts, event_ts, expires_at, not_before timestamp[us, UTC]; payload, key binary; tag,
    node, meta string; headers list<struct<key: string, value: binary>>; priority uint8.

    Args:
        view: Frame with records.
        nulls: Represent values that a record lacks as nulls. Otherwise they are empty, -2**63 in event_ts,
            and 0 in expires_at and not_before.
        columns: Bitmap of columns that fixes the schema (default: those of the frame). A column that the
            frame lacks is filled with absent values.

    Raises:
        UsageError: The frame is a control frame, or pyarrow is missing.
    """
    if not view.columns:
        raise UsageError("frame must be an append, got a control frame", frame_type=view.frame_type.name)
    found = column_arrays(view, view.columns if columns is None else columns | 1, nulls=nulls)
    return _pyarrow().RecordBatch.from_arrays(list(found.values()), names=list(found))


def column_arrays(view: FrameView, columns: int, *, nulls: bool = False) -> dict[str, Any]:
    """Return Arrow arrays by field name: seq, ts, then exactly the columns of the bitmap, as in to_arrow.

    The frame must have records. Raises UsageError if pyarrow is missing.
    """
    arrow = _pyarrow()
    body = arrow.py_buffer(view.body)
    seqs = np.arange(view.first_seq, view.first_seq + view.count, dtype=np.uint64)
    times = arrow.py_buffer(view.commit_stamps)
    found = {
        "seq": arrow.Array.from_buffers(arrow.uint64(), view.count, [None, arrow.py_buffer(seqs)]),
        "ts": arrow.Array.from_buffers(arrow.timestamp("us", tz="UTC"), view.count, [None, times]),
    }
    for column in _in(columns):
        found[NAMES[column]] = _arrow_column(arrow, view, body, column, nulls)
    return found


def producer_arrays(view: FrameView, columns: int) -> dict[Column, Any]:
    """Return Arrow arrays of the bitmap's columns that the frame has, as to_arrow does with `nulls`.

    Raises UsageError if pyarrow is missing.
    """
    arrow = _pyarrow()
    body = arrow.py_buffer(view.body)
    return {column: _arrow_column(arrow, view, body, column, True) for column in _in(columns & view.columns)}


def encode_arrow(source: Any, header: bytes = append_header_template()) -> EncodedRecords:
    """Encode an Arrow array of payloads, or a RecordBatch or Table with the field names of to_arrow.

    Payloads may be (large_)binary or (large_)string. A null means that the record has no value. Slices are
    read without a copy. Raises as encode_records, and UsageError for unknown fields, for types that do not
    convert, and if pyarrow is missing.
    """
    arrow = _pyarrow()
    named = _named_arrays(arrow, source)
    try:
        values, count = _arrow_values(arrow, named)
        return EncodedRecords(encode_values(values, header, count)[0])
    except arrow.ArrowException as e:
        raise UsageError("Arrow column cannot be converted", reason=str(e)) from None


# -- out ----------------------------------------------------------------------------------------------


def _in(columns: int) -> tuple[Column, ...]:
    return columns_in(columns & PRODUCER_COLUMNS)


def _arrow_column(arrow: ModuleType, view: FrameView, body: Any, column: Column, nulls: bool) -> Any:
    if not view.columns >> column & 1:
        return _absent_column(arrow, column, view.count, nulls)
    if column == Column.HEADERS:
        return _arrow_headers(arrow, view, body)
    if column in view.body_layout.spans:
        valid = None
        if nulls and column in NULLABLE:
            valid = view.validity(column)
        elif nulls:
            found = view.bytes_column(column)
            assert found is not None, "spans hold what the bitmap names"
            valid = np.diff(found.offsets) > 0
        span = view.body_layout.spans[column]
        return _arrow_bytes(arrow, body, span, view.start, view.count, column in _TEXT, valid)
    return _arrow_fixed(arrow, view, body, column, nulls)


def _arrow_bytes(
    arrow: ModuleType,
    body: Any,
    span: BytesColumnSpan,
    start: int,
    count: int,
    text: bool,
    valid: NDArray[np.bool_] | None,
) -> Any:
    offsets = body.slice(span.offsets_at + 4 * start, 4 * (count + 1))
    data = body.slice(span.data_at, span.data_bytes)
    kind = arrow.StringArray if text else arrow.BinaryArray
    if text:
        return kind.from_buffers(count, offsets, data, _bitmap(arrow, valid))
    return kind.from_buffers(arrow.binary(), count, [_bitmap(arrow, valid), offsets, data])


def _arrow_headers(arrow: ModuleType, view: FrameView, body: Any) -> Any:
    found = view.body_layout.headers
    assert found is not None, "headers are there when the bitmap names them"
    keys = _arrow_bytes(arrow, body, found.keys, 0, found.keys.entries, True, None)
    values = _arrow_bytes(arrow, body, found.values, 0, found.values.entries, False, None)
    pairs = arrow.StructArray.from_arrays([keys, values], fields=list(_pair_type(arrow)))
    lists = body.slice(found.lists_at + 4 * view.start, 4 * (view.count + 1))
    return arrow.ListArray.from_buffers(
        arrow.list_(_pair_type(arrow)), view.count, [None, lists], children=[pairs]
    )


def _arrow_fixed(arrow: ModuleType, view: FrameView, body: Any, column: Column, nulls: bool) -> Any:
    width = 1 if column == Column.PRIORITY else 8
    values = body.slice(view.body_layout.fixed[column] + width * view.start, width * view.count)
    valid = None
    if nulls and column in TIME_COLUMNS:
        found = view.fixed_column(column)
        assert found is not None, "places hold what the bitmap names"
        valid = np.asarray(found != _absent(column))
    return arrow.Array.from_buffers(_fixed_type(arrow, column), view.count, [_bitmap(arrow, valid), values])


def _absent_column(arrow: ModuleType, column: Column, count: int, nulls: bool) -> Any:
    if column == Column.HEADERS:
        return arrow.array([[]] * count, type=arrow.list_(_pair_type(arrow)))
    if column in TIME_COLUMNS:
        kind, value = _fixed_type(arrow, column), _absent(column)
        return arrow.nulls(count, kind) if nulls else arrow.array(np.full(count, value)).view(kind)
    if column == Column.PRIORITY:
        return arrow.array(np.zeros(count, dtype=np.uint8))
    kind = arrow.string() if column in _TEXT else arrow.binary()
    return arrow.nulls(count, kind) if nulls else arrow.array([b""] * count, type=arrow.binary()).cast(kind)


def _bitmap(arrow: ModuleType, valid: NDArray[np.bool_] | None) -> Any:
    if valid is None or valid.all():
        return None
    return arrow.py_buffer(np.packbits(valid, bitorder="little").tobytes())


def _pair_type(arrow: ModuleType) -> Any:
    return arrow.struct(
        [
            arrow.field("key", arrow.string(), nullable=False),
            arrow.field("value", arrow.binary(), nullable=False),
        ]
    )


def _fixed_type(arrow: ModuleType, column: Column) -> Any:
    return arrow.uint8() if column == Column.PRIORITY else arrow.timestamp("us", tz="UTC")


def _absent(column: Column) -> int:
    return EVENT_TS_NONE if column == Column.EVENT_TS else 0


# -- in -----------------------------------------------------------------------------------------------


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            "pyarrow is not installed; install ringlog with the extra 'arrow'", extra="arrow"
        ) from None
    module: ModuleType = pyarrow
    return module


def _named_arrays(arrow: ModuleType, source: Any) -> dict[Column, Any]:
    if isinstance(source, arrow.Array | arrow.ChunkedArray):
        return {Column.PAYLOAD: _one_array(arrow, source)}
    if not isinstance(source, arrow.RecordBatch | arrow.Table):
        found = type(source).__name__
        raise UsageError(f"source must be an Arrow array, RecordBatch or Table, got {found}", found=found)
    by_name = {name: column for column, name in NAMES.items()}
    unknown = [name for name in source.schema.names if name not in by_name]
    if (
        unknown
        or len(set(source.schema.names)) != len(source.schema.names)
        or "payload" not in source.schema.names
    ):
        raise UsageError(
            "Arrow field names must be unique, known, and include payload",
            found=source.schema.names,
            known=list(by_name),
        )
    return {by_name[name]: _one_array(arrow, source.column(name)) for name in source.schema.names}


def _one_array(arrow: ModuleType, values: Any) -> Any:
    if isinstance(values, arrow.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, arrow.ChunkedArray):
        values = (
            arrow.concat_arrays(values.chunks) if values.num_chunks else arrow.array([], type=values.type)
        )
    return values.dictionary_decode() if arrow.types.is_dictionary(values.type) else values


def _arrow_values(arrow: ModuleType, named: dict[Column, Any]) -> tuple[Values, int]:
    count = len(named[Column.PAYLOAD])
    check_record_count(count)
    found: list[Any] = [None] * len(COLUMN_NAMES)
    for column, values in named.items():
        if column == Column.HEADERS:
            found[column] = _headers_of(arrow, values)
        elif column <= Column.META:
            found[column] = _bytes_of(arrow, NAMES[column], values, column in _TEXT)
        else:
            found[column] = _numbers_of(arrow, column, values)
    return tuple(found), count


def _bytes_of(arrow: ModuleType, name: str, values: Any, text: bool) -> BufferColumn:
    """Return a bytes column without a copy. Bytes in a null slot are marked as no value."""
    types = arrow.types
    if text and not (types.is_string(values.type) or types.is_large_string(values.type)):
        values = values.cast(arrow.string())
    wide = types.is_large_binary(values.type) or types.is_large_string(values.type)
    if not (wide or types.is_binary(values.type) or types.is_string(values.type)):
        values = values.cast(arrow.binary())
    _, offsets, data = values.buffers()
    if not len(values):
        return BufferColumn(memoryview(b""), np.zeros(1, dtype=np.int64))
    dtype = np.dtype("<i8" if wide else "<i4")
    bounds = np.frombuffer(offsets, dtype=dtype, count=len(values) + 1, offset=values.offset * dtype.itemsize)
    found = buffer_values(name, b"" if data is None else data, bounds)
    return found._replace(valid=np.asarray(values.is_valid())) if values.null_count else found


def _numbers_of(arrow: ModuleType, column: Column, values: Any) -> NDArray[Any]:
    if arrow.types.is_temporal(values.type):
        values = values.cast(arrow.timestamp("us", tz=getattr(values.type, "tz", None))).view(arrow.int64())
    elif not arrow.types.is_integer(values.type):
        found = str(values.type)
        raise UsageError(f"{NAMES[column]} must be integers or timestamps, got {found[:64]}", found=found)
    if values.null_count:
        values = values.cast(arrow.int64()).fill_null(_absent(column))
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return numbers


def _headers_of(arrow: ModuleType, values: Any) -> BufferHeaders:
    """Convert list<struct<key, value>> or map<string, binary>. A null list means no headers."""
    types = arrow.types
    if not (types.is_list(values.type) or types.is_large_list(values.type) or types.is_map(values.type)):
        found = str(values.type)
        raise UsageError(f"headers must be list<struct<key, value>> or map, got {found[:64]}", found=found)
    counts = np.diff(np.asarray(values.offsets).astype(np.int64))
    if values.null_count:
        # A null list may still span entries: use only the valid lists, and count 0 for the others.
        valid = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
        counts = np.where(valid, counts, 0)
        values = values.drop_null()
    if types.is_map(values.type):
        first, last = int(values.offsets[0].as_py()), int(values.offsets[-1].as_py())
        keys, items = values.keys.slice(first, last - first), values.items.slice(first, last - first)
    else:
        pairs = values.flatten()
        if not types.is_struct(pairs.type) or {f.name for f in pairs.type} != {"key", "value"}:
            found = str(pairs.type)
            raise UsageError(f"headers: entries must be struct<key, value>, got {found[:64]}", found=found)
        if pairs.null_count:
            raise InvalidRequest("headers: entries must not be null")
        flat = dict(zip((f.name for f in pairs.type), pairs.flatten(), strict=True))
        keys, items = flat["key"], flat["value"]
    if keys.null_count:
        raise InvalidRequest("headers: keys must not be null")
    lists = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if items.null_count:
        items = items.fill_null(
            "" if types.is_string(items.type) or types.is_large_string(items.type) else b""
        )
    of_keys = _bytes_of(arrow, "header keys", keys, True)
    return BufferHeaders(lists, of_keys, _bytes_of(arrow, "header values", items, False))
