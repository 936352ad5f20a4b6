"""The tasks of the archive: a data source whose rows tell of files that its tasks wrote.

Records go from mapped frames into Parquet inside the task, and only one row a file crosses into the JVM.
Reading this source has effects, so the job runs exactly one action on it; every attempt of a task writes
files of its own, and only those that Spark reports become part of the archive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ringlog.spark.batch import SlicePartition, plan_partitions
from ringlog.spark.catalog import Catalog
from ringlog.spark.jobs.archive_files import Archive, ArchivedFile, ArchiveStream
from ringlog.spark.options import SourceOptions, source_options
from ringlog.spark.plan import Bounds
from ringlog.spark.reading import read_slices
from ringlog.spark.schema import arrow_schema, record_schema

FORMAT = "ringlog_archive"
ROW_GROUP_ROWS = 262_144
ROW_GROUP_BYTES = 128 << 20
"""A row group ends at whichever comes first; so much of the log is held by a task."""
FILE_BYTES_MIN = 16 << 20
"""Log that is worth a file and a task of its own."""
DAY_US = 86_400_000_000
_DICTIONARY = ("tag", "node", "epoch", "priority")
_STATISTICS = ("epoch", "seq", "ts", "tag", "node", "event_ts", "expires_at", "not_before", "priority")
_DELTA = ("seq", "ts")
_WIDE = ("payload", "key", "meta", "headers")
"""What makes a record large. Adding up the bytes of all columns took an eighth of a task's time."""
ROW = StructType(
    [
        StructField(name, StringType() if name in {"file", "topic", "dt", "xxh3"} else LongType())
        for name in ArchivedFile.__struct_fields__
    ]
)
"""One row a file: the fields of ArchivedFile."""


class Assignment(msgspec.Struct, frozen=True):
    """What a run archives, and into what: travels as the option `assignment`."""

    path: str
    archive: str
    run: str
    bounds: tuple[tuple[str, int, int, int, int], ...]
    """(topic, topic_id, epoch, after, until)."""
    fail_on_data_loss: bool
    max_partition_bytes: int
    min_partitions: int
    codec: str

    def options(self) -> SourceOptions:
        """Options of the read."""
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
    """Writes Parquet while it is read. For the job alone."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """See ROW."""
        return ROW

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises msgspec.ValidationError for an assignment that is none."""
        return ArchiveReader(msgspec.json.decode(self.options["assignment"], type=Assignment))


class ArchiveReader(DataSourceReader):
    """Plans as every read of records; its tasks write files."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def partitions(self) -> Sequence[InputPartition]:
        """Slices of the bounds that the job fixed; little that is new is not dealt out in tiny files."""
        assignment = self._assignment
        bounds = [Bounds(*each) for each in assignment.bounds]
        with Catalog.open(assignment.path) as catalog:
            stored = [
                stretch
                for each in bounds
                for stretch in catalog.stretches(each.topic, each.after, each.until)
            ]
            worth = sum(stretch.bytes for stretch in stored) // FILE_BYTES_MIN
            options = replace(
                assignment.options(), min_partitions=max(min(assignment.min_partitions, worth), 1)
            )
            return plan_partitions(catalog, bounds, options)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Write what the partition holds; give one row for each file, when it is durable."""
        if not isinstance(partition, SlicePartition):
            return
        assignment = self._assignment
        options = assignment.options()
        schema = record_schema(options)
        files = _Files(Archive(assignment.archive), assignment, arrow_schema(schema))
        found: list[ArchivedFile] = []
        for batch in read_slices(partition.slices, options, schema):
            found += files.add(batch)
        found += files.finish()
        if found:
            rows = [msgspec.to_builtins(each) for each in found]
            yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(ROW))


class _Files:
    """Cuts batches where topic, life or day change, and writes a file for each stretch between."""

    def __init__(self, archive: Archive, assignment: Assignment, schema: pa.Schema) -> None:
        self._archive, self._assignment = archive, assignment
        # The topic is the name of the directory, and readers of Parquet take it from there.
        self._schema = schema.remove(schema.get_field_index("topic"))
        self._open: _File | None = None

    def add(self, batch: pa.RecordBatch) -> list[ArchivedFile]:
        """Write a batch of one topic and life; returns files that are finished."""
        done: list[ArchivedFile] = []
        for part in _by_owner(batch):
            owner = (part.column("topic")[0].as_py(), part.column("epoch")[0].as_py())
            for day, rows in _by_day(part):
                key = (*owner, day)
                if self._open is None or self._open.key != key:
                    done += self.finish()
                    stream = self._archive.create(
                        owner[0], day, owner[1], rows.column("seq")[0].as_py(), self._assignment.run
                    )
                    self._open = _File(key, stream, self._schema, self._assignment.codec)
                self._open.add(rows)
        return done

    def finish(self) -> list[ArchivedFile]:
        """End the file that is open."""
        file, self._open = self._open, None
        return [] if file is None else [file.finish()]


class _File:
    """One Parquet file being written."""

    def __init__(
        self, key: tuple[str, int, str], stream: ArchiveStream, schema: pa.Schema, codec: str
    ) -> None:
        self.key = key
        self._stream = stream
        self._schema = schema
        names = schema.names
        self._writer = pq.ParquetWriter(
            stream, schema, compression=codec, version="2.6", coerce_timestamps="us",
            compression_level=1 if codec == "zstd" else None,
            use_dictionary=[name for name in _DICTIONARY if name in names],
            write_statistics=[name for name in _STATISTICS if name in names],
            column_encoding=dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
        )  # fmt: skip
        self._wide = [at for at, name in enumerate(names) if name in _WIDE]
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = self._rows = 0
        self._first = self._last = self._ts_min = self._ts_max = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows, ascending by seq."""
        seqs, stamps = batch.column("seq"), batch.column("ts").view(pa.int64())
        if not self._rows:
            self._first, self._ts_min = seqs[0].as_py(), stamps[0].as_py()
        self._last, self._ts_max = seqs[-1].as_py(), stamps[-1].as_py()
        self._rows += batch.num_rows
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += sum(batch.column(at).nbytes for at in self._wide)
        if self._held_rows >= ROW_GROUP_ROWS or self._held_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def finish(self) -> ArchivedFile:
        """Write what is held, and the footer; durable when it returns."""
        self._write_group()
        self._writer.close()
        size, digest = self._stream.finish()
        topic, epoch, day = self.key
        return ArchivedFile(
            self._stream.file, topic, epoch, day, self._first, self._last, self._rows, size, self._ts_min,
            self._ts_max, digest,
        )  # fmt: skip

    def _write_group(self) -> None:
        held, self._held, self._held_rows, self._held_bytes = self._held, [], 0, 0
        if held:
            table = pa.Table.from_batches(held).select(self._schema.names)
            self._writer.write_table(table, row_group_size=table.num_rows)


def _by_owner(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch, cut where topic or epoch change: only batches of small frames hold several."""
    topics, epochs = batch.column("topic"), batch.column("epoch")
    if topics[0] == topics[-1] and epochs[0] == epochs[-1]:
        yield batch
        return
    changes = pc.or_(
        pc.not_equal(topics.slice(1), topics.slice(0, len(topics) - 1)),
        pc.not_equal(epochs.slice(1), epochs.slice(0, len(epochs) - 1)),
    )
    yield from _cut(batch, np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1)


def _by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(date in UTC, rows), ascending. Commit stamps of a topic never fall, so a day is one stretch."""
    stamps = np.asarray(batch.column("ts").view(pa.int64()))
    days = stamps // DAY_US
    if days[0] == days[-1]:
        yield _date(days[0]), batch
        return
    for part in _cut(batch, np.flatnonzero(np.diff(days)) + 1):
        yield _date(part.column("ts").view(pa.int64())[0].as_py() // DAY_US), part


def _date(day: Any) -> str:
    return str(np.datetime64(int(day), "D"))


def _cut(batch: pa.RecordBatch, places: Any) -> Iterator[pa.RecordBatch]:
    bounds = [0, *(int(each) for each in places), batch.num_rows]
    for start, stop in pairwise(bounds):
        yield batch.slice(start, stop - start)
