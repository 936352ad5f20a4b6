"""Shared helpers of the Spark tests: records, segments, and readers that the test drives as Spark does."""

from __future__ import annotations

import pickle

import pyarrow as pa

from ringlog.client.write.fields import NewRecord
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import NotReady
from ringlog.link.address import read_engine_file
from ringlog.link.shard_requests import Requester
from ringlog.spark.batch import BatchReader
from ringlog.spark.options import source_options
from ringlog.spark.schema import arrow_schema, record_schema, select
from ringlog.testing.real_engine import wait_until


def checkpoint(running):
    """Let the compactor turn everything written so far into segments."""
    requester = Requester("compactor", f"ipc://{read_engine_file(running.run_dir).shm_dir}/compactor.sock")
    made = []

    def is_made():
        try:
            made.append(requester.ask(CheckpointNow(), CheckpointMade, timeout_s=30).message)
        except NotReady:
            return False  # The compactor starts after the shards, and restarts with each of them.
        return True

    try:
        wait_until(is_made, 30, "the compactor makes a checkpoint")
    finally:
        requester.close()
    return made[0].files


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
