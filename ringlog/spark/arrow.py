"""Batches: records as they lie in frames, as Arrow batches with exactly the schema Spark demands.

Columns of a large frame are views of the mapped file; small frames are copied once, when they are put
together. A column that a frame lacks, the topic and the epoch are slices of arrays made once. Spark checks
the schema of the first batch only, so all of them are made with one and the same schema object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringlog.client.pieces import FramePiece, Piece
from ringlog.client.tailer import TailBatch
from ringlog.frame.arrow import NAMES
from ringlog.frame.layout import Column
from ringlog.spark.options import SourceOptions
from ringlog.spark.schema import arrow_schema, bitmap_of, check_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ringlog.spark.schema import ColumnSpec

WHOLE_ROWS_MIN = 512
"""From this many rows on a frame goes on by itself: putting frames together gains little then."""
_CACHED_ROWS = 16_384
_CACHED_TOPICS_MAX = 1_024
_TAG_FIELD = NAMES[Column.TAG]


class Batches:
    """Makes batches of what is added, in its order; `rest` gives what waits for company."""

    def __init__(self, struct: StructType, options: SourceOptions) -> None:
        """Raises SchemaError when `struct` asks for what is not there."""
        self._specs: tuple[ColumnSpec, ...] = check_schema(struct, options)
        self._schema = arrow_schema(struct)
        self._filter = TagFilter(options.tags) if options.tags else None
        self._bitmap = bitmap_of(self._specs) | (1 << Column.TAG if self._filter else 0)
        self._constants = _Constants()
        self._rows_wanted = options.rows_per_batch
        self._waiting: list[pa.RecordBatch] = []
        self._rows_waiting = 0

    def add(self, item: TailBatch) -> Iterator[pa.RecordBatch]:
        """What is ready when the records of `item` have been added."""
        for piece in item.pieces:
            if len(piece):
                batch = self._convert(piece, item.topic, item.epoch)
                if batch.num_rows >= WHOLE_ROWS_MIN:
                    yield from self.rest()
                    yield batch
                elif batch.num_rows:
                    self._waiting.append(batch)
                    self._rows_waiting += batch.num_rows
                    if self._rows_waiting >= self._rows_wanted:
                        yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What waits, as one batch."""
        waiting, self._waiting, self._rows_waiting = self._waiting, [], 0
        if len(waiting) == 1:
            yield waiting[0]
        elif waiting:
            yield pa.concat_batches(waiting)

    def _convert(self, piece: Piece, topic: str, epoch: int) -> pa.RecordBatch:
        fields = _fields_of(piece, self._bitmap)
        count = len(piece)
        arrays = [
            self._array(spec, field.type, fields, count, topic, epoch)
            for spec, field in zip(self._specs, self._schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if self._filter is None:
            return batch
        tags = fields.get(_TAG_FIELD)
        return batch.slice(0, 0) if tags is None else self._filter.apply(batch, tags)

    def _array(
        self, spec: ColumnSpec, kind: pa.DataType, fields: dict[str, Any], count: int, topic: str, epoch: int
    ) -> Any:
        found = fields.get(spec.source)
        if found is None:
            return self._constants.array(spec.source, kind, topic, epoch, count)
        if found.type == kind:
            return found
        if spec.source == "seq":
            return found.view(kind)  # Numbers stay below 2**63.
        if spec.source == "headers":
            return _headers(found, kind)
        return found.cast(kind)


class TagFilter:
    """Exact tags and prefixes over an Arrow column; records without a tag never match."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._exact = pa.array([tag for tag in tags if not tag.endswith("*")], type=pa.string())
        self._prefixes = [tag[:-1] for tag in tags if tag.endswith("*")]

    def apply(self, batch: pa.RecordBatch, tags: Any) -> pa.RecordBatch:
        """The rows of `batch` whose tag matches; the batch itself when all do."""
        mask = pc.is_in(tags, value_set=self._exact)
        for prefix in self._prefixes:
            mask = pc.or_(mask, pc.fill_null(pc.starts_with(tags, prefix), False))
        count = mask.true_count
        if count == batch.num_rows:
            return batch
        return batch.filter(mask) if count else batch.slice(0, 0)


class _Constants:
    """Arrays of one value, kept and sliced: making one costs more than all the rest of a batch."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Any] = {}

    def array(self, source: str, kind: pa.DataType, topic: str, epoch: int, count: int) -> Any:
        key: tuple[Any, ...] = (source, kind)
        if source in {"topic", "epoch"}:
            key = (source, topic, epoch)
        held = self._held.get(key)
        if held is None or len(held) < count:
            if len(self._held) >= _CACHED_TOPICS_MAX:
                self._held.clear()
            held = self._made(source, kind, topic, epoch, max(count, _CACHED_ROWS))
            self._held[key] = held
        return held.slice(0, count)

    @staticmethod
    def _made(source: str, kind: pa.DataType, topic: str, epoch: int, count: int) -> Any:
        value = {"topic": topic, "epoch": epoch, "zero": 0, "priority": 0}.get(source)
        if value is None:
            return pa.nulls(count, kind)
        return pa.repeat(pa.scalar(value, type=kind), count)


def _fields_of(piece: Piece, bitmap: int) -> dict[str, Any]:
    """Arrow arrays of the piece by name: seq, ts and those of the wanted columns that its frames have."""
    if isinstance(piece, FramePiece):
        bitmap &= piece.view.columns
    (batch,) = piece.record_batches(nulls=True, columns=bitmap)
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _headers(found: Any, kind: pa.DataType) -> Any:
    """Lists of pairs in Spark's type; a record without headers has null, as in Kafka."""
    lengths = np.diff(found.offsets.to_numpy(zero_copy_only=False))
    pairs = found.values.cast(kind.value_type)
    has_none = lengths == 0
    mask = pa.array(has_none) if has_none.any() else None
    offsets = found.offsets
    return pa.ListArray.from_arrays(offsets, pairs, type=kind, mask=mask)
