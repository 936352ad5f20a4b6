"""Tasks of the archive job: a data source whose tasks write Parquet files and return one row per file.

A task writes records from mapped frames directly to Parquet, and sends only one row per file to the JVM.
Reading this source has side effects, so the job runs exactly one action on it. Every attempt of a task writes
its own files. Only files that Spark reports become part of the archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ringlog.client.read.record_batches import RecordBatch
from ringlog.spark.batch import SlicePartition, plan_partitions
from ringlog.spark.catalog import Catalog
from ringlog.spark.jobs.archive_files import Archive, ArchivedFile, ArchiveStream
from ringlog.spark.jobs.row_group import RowGroup
from ringlog.spark.options import SourceOptions, source_options
from ringlog.spark.plan import Bounds
from ringlog.spark.schema import arrow_schema, columns_of, record_schema
from ringlog.spark.slice_reader import read_batches
from ringlog.spark.workers import freeze_imports

if TYPE_CHECKING:
    from ringlog.spark.schema import ColumnSpec

FORMAT = "ringlog_archive"
FILE_BYTES_MIN = 16 << 20
"""Minimum bytes of log for a separate task and file."""
DAY_US = 86_400_000_000
_DICTIONARY = ("tag", "node", "epoch", "priority")
_STATISTICS = ("epoch", "seq", "ts", "tag", "node", "event_ts", "expires_at", "not_before", "priority")
_DELTA = ("seq", "ts")
ROW = StructType(
    [
        StructField(name, StringType() if name in {"file", "topic", "dt", "xxh3"} else LongType())
        for name in ArchivedFile.__struct_fields__
    ]
)
"""Schema of the rows: one per file, with the fields of ArchivedFile."""


class Assignment(msgspec.Struct, frozen=True):
    """Bounds, target and settings of a run. Sent to Spark as the option `assignment`, in JSON."""

    path: str
    archive: str
    run: str
    bounds: tuple[tuple[str, int, int, int, int], ...]
    """Tuples of (topic, topic_id, epoch, after, until)."""
    fail_on_data_loss: bool
    max_partition_bytes: int
    min_partitions: int
    codec: str

    def options(self) -> SourceOptions:
        """Return the options of the read."""
        return source_options(
            {
                "path": self.path,
                "subscribe": msgspec.json.encode([each[0] for each in self.bounds]).decode(),
                "includeHeaders": "true",
                "failOnDataLoss": str(self.fail_on_data_loss).lower(),
                "maxPartitionBytes": str(self.max_partition_bytes),
                "minPartitions": str(self.min_partitions),
            },
            streaming=False,
        )


class ArchiveSource(DataSource):
    """Data source that writes Parquet files when it is read. Used only by the archive job."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return ROW."""
        return ROW

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; raise msgspec.ValidationError for an invalid assignment."""
        return ArchiveReader(msgspec.json.decode(self.options["assignment"], type=Assignment))


class ArchiveReader(DataSourceReader):
    """Plans like any read of records; its tasks write files."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def partitions(self) -> Sequence[InputPartition]:
        """Split the bounds of the job into slices. A small amount of new log gets fewer partitions."""
        assignment = self._assignment
        bounds = [Bounds(*each) for each in assignment.bounds]
        with Catalog.open(assignment.path) as catalog:
            stored = [
                stored_range
                for each in bounds
                for stored_range in catalog.stored_ranges(each.topic, each.after, each.until)
            ]
            worth = sum(stored_range.bytes for stored_range in stored) // FILE_BYTES_MIN
            options = replace(
                assignment.options(), min_partitions=max(min(assignment.min_partitions, worth), 1)
            )
            return plan_partitions(catalog, bounds, options)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Write the records of the partition; yield one row per file when the files are durable."""
        if not isinstance(partition, SlicePartition):
            return
        assignment = self._assignment
        options = assignment.options()
        files = _ParquetFiles(Archive(assignment.archive), assignment, options)
        found: list[ArchivedFile] = []
        for item in read_batches(partition.slices, options):
            found += files.add(item.topic, item.epoch, item.batches)
        found += files.finish()
        freeze_imports("archive")
        if found:
            rows = [msgspec.to_builtins(each) for each in found]
            yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(ROW))


class _ParquetFiles:
    """Writes a new file whenever topic, epoch or day changes."""

    def __init__(self, archive: Archive, assignment: Assignment, options: SourceOptions) -> None:
        self._archive, self._assignment = archive, assignment
        # Without the column topic: readers of Parquet take it from the name of the directory.
        self._specs = [spec for spec in columns_of(options) if spec.source != "topic"]
        schema = arrow_schema(record_schema(options))
        self._schema = schema.remove(schema.get_field_index("topic"))
        self._open: _ParquetFile | None = None

    def add(self, topic: str, epoch: int, pieces: Sequence[RecordBatch]) -> list[ArchivedFile]:
        """Add records of one epoch of a topic, in ascending order; return the finished files."""
        done: list[ArchivedFile] = []
        for day, batches in _by_day([piece for piece in pieces if len(piece)]):
            key = (topic, epoch, day)
            if self._open is None or self._open.key != key:
                done += self.finish()
                stream = self._archive.create(topic, day, epoch, batches[0].seq_at(0), self._assignment.run)
                self._open = _ParquetFile(key, stream, self._specs, self._schema, self._assignment.codec)
            self._open.add(batches)
        return done

    def finish(self) -> list[ArchivedFile]:
        """Finish the open file."""
        file, self._open = self._open, None
        return [] if file is None else [file.finish()]


class _ParquetFile:
    """One open Parquet file."""

    def __init__(
        self, key: tuple[str, int, str], stream: ArchiveStream, specs: list[ColumnSpec], schema: pa.Schema,
        codec: str,
    ) -> None:  # fmt: skip
        self.key = key
        self._stream = stream
        self._specs = specs
        self._schema = schema
        names = schema.names
        self._writer = pq.ParquetWriter(
            stream, schema, compression=codec, version="2.6", coerce_timestamps="us",
            compression_level=1 if codec == "zstd" else None,
            use_dictionary=[name for name in _DICTIONARY if name in names],
            write_statistics=[name for name in _STATISTICS if name in names],
            column_encoding=dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
        )  # fmt: skip
        self._group = self._new_group()
        self._rows = self._first = self._last = self._ts_min = self._ts_max = 0

    def add(self, pieces: Sequence[RecordBatch]) -> None:
        """Append records in ascending order."""
        if not self._rows:
            self._first, self._ts_min = pieces[0].seq_at(0), pieces[0].commit_ts
        last = pieces[-1]
        self._last, self._ts_max = last.seq_at(len(last) - 1), _last_stamp(last)
        for piece in pieces:
            self._rows += len(piece)
            self._group.add(piece)
            if self._group.is_full:
                self._write_group()

    def finish(self) -> ArchivedFile:
        """Write the remaining rows and the footer, and make the file durable."""
        self._write_group()
        self._writer.close()
        size, digest = self._stream.finish()
        topic, epoch, day = self.key
        return ArchivedFile(
            self._stream.file, topic, epoch, day, self._first, self._last, self._rows, size, self._ts_min,
            self._ts_max, digest,
        )  # fmt: skip

    def _write_group(self) -> None:
        group, self._group = self._group, self._new_group()
        if group.rows:
            self._writer.write_table(group.table(), row_group_size=group.rows)

    def _new_group(self) -> RowGroup:
        return RowGroup(self._specs, self._schema, self.key[1])


def _by_day(pieces: Sequence[RecordBatch]) -> Iterator[tuple[str, Sequence[RecordBatch]]]:
    """Yield (UTC date, records), ascending.

    Commit times of a topic never decrease, so each day is contiguous.
    """
    if not pieces:
        return
    first = pieces[0].commit_ts // DAY_US
    if first == _last_stamp(pieces[-1]) // DAY_US:
        yield _date(first), pieces
        return
    for piece in pieces:
        days = piece.commit_stamps // DAY_US
        bounds = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(piece)]
        for start, stop in pairwise(bounds):
            yield _date(int(days[start])), [piece.slice_rows(start, stop)]


def _last_stamp(piece: RecordBatch) -> int:
    return int(piece.commit_stamps[-1])


def _date(day: int) -> str:
    return str(np.datetime64(day, "D"))
