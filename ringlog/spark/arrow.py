"""Convert stored frames to Arrow batches with exactly the schema that Spark requires.

Columns of a large frame are views of the mapped file. Small frames are copied once, when they are
concatenated. Missing columns, the topic and the epoch are arrays that are created once and reused. Spark
checks only the schema of the first batch, so all batches use the same schema object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringlog.client.read.record_batches import FrameRecordBatch, RecordBatch
from ringlog.client.read.tail_batch import TailBatch
from ringlog.frame.arrow import NAMES, column_arrays
from ringlog.frame.layout import Column
from ringlog.spark.options import SourceOptions
from ringlog.spark.schema import arrow_schema, bitmap_of, check_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ringlog.spark.schema import ColumnSpec

WHOLE_ROWS_MIN = 512
"""A frame with at least this many rows becomes a batch of its own: concatenation would gain little."""
_TEMPLATES_MAX = 1_024
_NUMBERS = frozenset({"topic", "epoch", "seq", "zero"})
_TAG_FIELD = NAMES[Column.TAG]


class ArrowBatchBuilder:
    """Builds Arrow batches from added records, in order. `flush` returns the rows that wait for more rows."""

    def __init__(self, struct: StructType, options: SourceOptions) -> None:
        """Raise SchemaError if `struct` contains a column that does not exist."""
        self._specs: tuple[ColumnSpec, ...] = check_schema(struct, options)
        self._schema = arrow_schema(struct)
        self._filter = TagFilter(options.tags) if options.tags else None
        self._bitmap = bitmap_of(self._specs) | (1 << Column.TAG if self._filter else 0)
        self._templates = _Templates(self._specs, self._schema)
        self._is_numbers = not self._bitmap and all(spec.source in _NUMBERS for spec in self._specs)
        self._rows_wanted = options.rows_per_batch
        self._waiting: list[pa.RecordBatch] = []
        self._rows_waiting = 0

    def add(self, item: TailBatch) -> Iterator[pa.RecordBatch]:
        """Add the records of `item` and yield the batches that are complete."""
        if self._is_numbers:
            yield self._numbers(item)
            return
        for piece in item.batches:
            if len(piece):
                batch = self._convert(piece, item.topic, item.epoch)
                if batch.num_rows >= WHOLE_ROWS_MIN:
                    yield from self.flush()
                    yield batch
                elif batch.num_rows:
                    self._waiting.append(batch)
                    self._rows_waiting += batch.num_rows
                    if self._rows_waiting >= self._rows_wanted:
                        yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the waiting rows as one batch, if there are any."""
        waiting, self._waiting, self._rows_waiting = self._waiting, [], 0
        if len(waiting) == 1:
            yield waiting[0]
        elif waiting:
            yield pa.concat_batches(waiting)

    def _numbers(self, item: TailBatch) -> pa.RecordBatch:
        """Build a batch of seqs and constants only: the frames were verified, and need no decoding."""
        seqs = pa.array(item.seqs.view(np.uint64))
        arrays = self._templates.arrays(len(seqs), item.topic, item.epoch, {"seq": seqs})
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _convert(self, piece: RecordBatch, topic: str, epoch: int) -> pa.RecordBatch:
        fields = _fields_of(piece, self._bitmap)
        arrays = self._templates.arrays(len(piece), topic, epoch, fields)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if self._filter is None:
            return batch
        tags = fields.get(_TAG_FIELD)
        return batch.slice(0, 0) if tags is None else self._filter.apply(batch, tags)


class TagFilter:
    """Exact tags and prefixes over an Arrow column. Tag filters never match untagged records."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._exact = pa.array([tag for tag in tags if not tag.endswith("*")], type=pa.string())
        self._prefixes = [tag[:-1] for tag in tags if tag.endswith("*")]

    def apply(self, batch: pa.RecordBatch, tags: Any) -> pa.RecordBatch:
        """Return the rows of `batch` with a matching tag; the batch itself if all rows match."""
        mask = pc.is_in(tags, value_set=self._exact)
        for prefix in self._prefixes:
            mask = pc.or_(mask, pc.fill_null(pc.starts_with(tags, prefix), False))
        count = mask.true_count
        if count == batch.num_rows:
            return batch
        return batch.filter(mask) if count else batch.slice(0, 0)


class _Templates:
    """Cache of column lists with the constant columns filled in.

    Creating an array of one repeated value costs more than the rest of a batch, and most batches are alike.
    """

    def __init__(self, specs: tuple[ColumnSpec, ...], schema: pa.Schema) -> None:
        self._columns = [(spec.source, field.type) for spec, field in zip(specs, schema, strict=True)]
        self._held: dict[tuple[Any, ...], tuple[list[Any], list[tuple[int, str, Any]]]] = {}

    def arrays(self, count: int, topic: str, epoch: int, fields: dict[str, Any]) -> list[Any]:
        """Return the columns in order: columns of the frame from `fields`, and constants for the others."""
        key = (count, topic, epoch, *fields)
        held = self._held.get(key)
        if held is None:
            if len(self._held) >= _TEMPLATES_MAX:
                self._held.clear()
            held = self._held[key] = self._made(count, topic, epoch, fields)
        constants, varying = held
        arrays = constants.copy()
        for place, source, kind in varying:
            arrays[place] = as_type(fields[source], kind, source)
        return arrays

    def _made(
        self, count: int, topic: str, epoch: int, fields: dict[str, Any]
    ) -> tuple[list[Any], list[tuple[int, str, Any]]]:
        values = {"topic": topic, "epoch": epoch, "zero": 0, "priority": 0}
        constants: list[Any] = []
        varying = []
        for place, (source, kind) in enumerate(self._columns):
            if source in fields:
                varying.append((place, source, kind))
                constants.append(None)
            elif source in values:
                constants.append(pa.repeat(pa.scalar(values[source], type=kind), count))
            else:
                constants.append(pa.nulls(count, kind))
        return constants, varying


def as_type(found: Any, kind: Any, source: str) -> Any:
    """Return a frame's Arrow column `source` in Spark's type, as a view if possible."""
    if source == "seq":
        return found.view(kind)  # Seqs are below 2**63.
    if source == "headers":
        return _headers(found, kind)
    return found if found.type == kind else found.cast(kind)


def _fields_of(piece: RecordBatch, bitmap: int) -> dict[str, Any]:
    """Return the piece's Arrow arrays by name: seq, ts, and the wanted columns that its frames have."""
    if isinstance(piece, FrameRecordBatch):
        bitmap &= piece.view.columns
        if piece.is_whole:
            return column_arrays(piece.view, bitmap, nulls=True)
    (batch,) = piece.arrow_batches(nulls=True, columns=bitmap)
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _headers(found: Any, kind: pa.DataType) -> Any:
    """Return lists of header pairs in Spark's type. A record without headers has null, as in Kafka."""
    lengths = np.diff(found.offsets.to_numpy(zero_copy_only=False))
    pairs = found.values.cast(kind.value_type)
    has_none = lengths == 0
    mask = pa.array(has_none) if has_none.any() else None
    offsets = found.offsets
    return pa.ListArray.from_arrays(offsets, pairs, type=kind, mask=mask)
