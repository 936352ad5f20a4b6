"""Shared helpers of the Spark tests: records, segments, and readers that the test drives as Spark does."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa

from ringlog.client.write.fields import NewRecord
from ringlog.spark.batch import BatchReader
from ringlog.spark.catalog import Catalog
from ringlog.spark.options import source_options
from ringlog.spark.schema import arrow_schema, record_schema, select
from ringlog.spark.views import view_reader, view_schema


def records(first, last, size=0):
    """Return records first..last: the payload is the number, the tag is t0..t9, and two of three have a
    key."""
    return [
        NewRecord(
            data=b"%d" % n + b"." * size,
            tag=f"t{n % 10}" if n % 7 else None,
            key=b"k%d" % n if n % 3 else None,
        )
        for n in range(first, last + 1)
    ]


def write(client, topic, first, last, *, frame=1_000, size=0):
    """Append these records in frames of `frame` records."""
    with client.producer(topic) as producer:
        for start in range(first, last + 1, frame):
            producer.send_many(records(start, min(start + frame - 1, last), size))


def copied(value):
    """Return the value after pickling, as another process receives it."""
    return pickle.loads(pickle.dumps(value))


def reader_of(running, topics, *, columns=None, **options):
    """Return a reader as Spark's planner gets it, and its schema."""
    given = {"path": running.data_dir, "subscribe": topics, **options}
    parsed = source_options(given, streaming=False)
    struct = select(parsed, columns.split()) if columns else record_schema(parsed)
    return copied(BatchReader(parsed, struct)), struct


def batches_by_partition(running, topics, **options):
    """Return the batches of each task, checked as Spark checks them and for their types."""
    reader, struct = reader_of(running, topics, **options)
    found = []
    for partition in reader.partitions() or [None]:
        batches = list(copied(reader).read(copied(partition)))
        for batch in batches:
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema is arrow_schema(struct) or batch.schema.equals(arrow_schema(struct))
            batch.validate(full=True)
        found.append(batches)
    return found


def table(running, topics, **options):
    """Return all records of a read as one Arrow table."""
    _reader, struct = reader_of(running, topics, **options)
    batches = [batch for each in batches_by_partition(running, topics, **options) for batch in each]
    return pa.Table.from_batches(batches, schema=arrow_schema(struct))


def seqs(running, topics, **options):
    return table(running, topics, columns="seq", **options)["seq"].to_pylist()


def rows_of(running, view, topics, **options):
    """Return all rows of a view. Each step is pickled, and each batch is checked as Spark does."""
    reader = copied(view_reader(running.data_dir, view, topics, **options))
    schema = arrow_schema(view_schema(view))
    batches = []
    for partition in reader.partitions() or [None]:
        for batch in copied(reader).read(copied(partition)):
            assert batch.schema.equals(schema)
            batch.validate(full=True)
            batches.append(batch)
    return pa.Table.from_batches(batches, schema=schema).to_pylist()


def damage(running, seq, last):
    """Flip a byte in the body of the frame that contains `seq`. Return the frame's first and last seq."""
    with Catalog.open(running.data_dir) as catalog:
        (stretch,) = [s for s in catalog.stored_ranges("t", 0, last) if s.first_seq <= seq <= s.last_seq]
        (extent,) = catalog.segments("t")
        place = catalog._record_index(0).segment(extent.path)
        row = place.row(catalog.topic("t").topic_id)
        offset, _ = place.frame_at(row, seq)
    with (Path(running.data_dir) / extent.path).open("r+b") as file:
        at = offset + 2_000
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))
        os.fsync(file.fileno())
    return stretch.first_seq, stretch.last_seq
