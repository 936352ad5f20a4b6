"""Collects records from frames into one Arrow table, for a row group of Parquet.

Unlike ArrowBatchBuilder, which converts each frame to a batch, it creates constant columns (epoch, columns
that no frame has) once for the whole table. Seqs and times are concatenated once. Only columns that a frame
contains become chunks, as views of the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ringlog.client.read.record_batches import FrameRecordBatch, RecordBatch
from ringlog.frame.arrow import NAMES, producer_arrays
from ringlog.spark.arrow import as_type
from ringlog.spark.schema import bitmap_of

if TYPE_CHECKING:
    from ringlog.frame.layout import Column
    from ringlog.spark.schema import ColumnSpec

ROWS_MAX = 262_144
BYTES_MAX = 128 << 20
"""A group is full at the first of both limits. A task holds this much of the log, plus one frame."""


class RowGroup:
    """Records of one epoch of a topic, ascending, as columns `specs` in the types of `schema`."""

    def __init__(self, specs: Sequence[ColumnSpec], schema: pa.Schema, epoch: int) -> None:
        self._specs = specs
        self._schema = schema
        self._epoch = epoch
        self._bitmap = bitmap_of(tuple(specs))
        self._chunks: list[dict[Column, Any]] = []
        self._seqs: list[Any] = []
        self._stamps: list[Any] = []
        self.rows: int = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the group must be written before more records are added."""
        return self.rows >= ROWS_MAX or self._bytes >= BYTES_MAX

    def add(self, piece: RecordBatch) -> None:
        """Append the records of a non-empty `piece`."""
        self._seqs.append(piece.seqs)
        self._stamps.append(piece.commit_stamps)
        self.rows += len(piece)
        if isinstance(piece, FrameRecordBatch) and piece.is_whole:
            self._chunks.append(producer_arrays(piece.view, self._bitmap))
            self._bytes += len(piece.buffer)
        else:
            (batch,) = piece.arrow_batches(nulls=True, columns=self._bitmap)
            self._chunks.append(
                {
                    spec.column: batch.column(NAMES[spec.column])
                    for spec in self._specs
                    if spec.column is not None
                }
            )
            self._bytes += batch.nbytes

    def table(self) -> pa.Table:
        """Return all records of the non-empty group as a table."""
        columns = [
            self._column(spec, field.type) for spec, field in zip(self._specs, self._schema, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _column(self, spec: ColumnSpec, kind: pa.DataType) -> Any:
        if spec.source == "seq":
            return pa.array(np.concatenate(self._seqs), kind)
        if spec.source == "ts":
            return pa.array(np.concatenate(self._stamps)).view(kind)
        if spec.column is None:
            return pa.repeat(pa.scalar(self._epoch, kind), self.rows)
        if not any(spec.column in chunk for chunk in self._chunks):
            return self._absent(spec, kind, self.rows)
        return pa.chunked_array(
            [
                as_type(chunk[spec.column], kind, spec.source)
                if spec.column in chunk
                else self._absent(spec, kind, len(seqs))
                for chunk, seqs in zip(self._chunks, self._seqs, strict=True)
            ],
            kind,
        )

    @staticmethod
    def _absent(spec: ColumnSpec, kind: pa.DataType, count: int) -> Any:
        return pa.nulls(count, kind) if spec.is_nullable else pa.repeat(pa.scalar(0, kind), count)
