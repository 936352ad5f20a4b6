"""Pieces: where the frames of a partition lie and what of them is to be seen, in place of the records.

The reader in the JVM (`jvm/`) asks for them and makes Spark's columns of the frames itself. All that has to
be known of a topic is known here, by the code that reads records: bounds, gaps, what was deleted or has
expired, where a segment is now. What is left to the JVM is to copy a frame, to compare its body's checksum
with the header that was verified here, and to find its columns.

A segment's frames are read from its file, which never changes and whose name is never given twice. It may be
taken away in the moment between this answer and the JVM's look: so the worker holds it open, and the JVM goes
by the descriptor first. What lies elsewhere (the log, memory, a cold tier behind the engine) travels as
bytes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from ringlog.client.read.tail_batch import TailBatch
from ringlog.errors import DiskError
from ringlog.spark.batch import BatchReader, SlicePartition
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import Slices
from ringlog.spark.schema import arrow_schema
from ringlog.spark.slice_reader import read_batches
from ringlog.spark.stream import StreamReader
from ringlog.spark.workers import freeze_imports
from ringlog.storage.disk import Disk, RealDisk

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("epoch", LongType()),
        StructField("first_seq", LongType()),
        StructField("last_seq", LongType()),
        StructField("place", StringType()),
        StructField("file", StringType()),
        StructField("held", StringType()),
        StructField("data", BinaryType()),
        StructField("frames", BinaryType()),
        StructField("hidden", BinaryType()),
    ]
)
"""As Pieces.SCHEMA has it in the JVM. `frames`: for each its offset and the words of its header, 11 times 8
bytes; `hidden`: ascending 64-bit positions; `data` only where there is no `file`."""
PINNED_FILES_MAX = 64
"""Segments that a worker holds open for the JVM: those it named last."""


class PinnedFiles:
    """Files that stay readable for another process of this user though their names may go."""

    def __init__(self, disk: Disk, most: int = PINNED_FILES_MAX) -> None:
        self._disk = disk
        self._most = most
        self._open: OrderedDict[str, int] = OrderedDict()

    def pin(self, path: str) -> str | None:
        """Open it, if it is not; returns where the process's descriptor is found, None if it has gone."""
        fd = self._open.get(path)
        if fd is None:
            try:
                fd = self._disk.open_read(path)
            except DiskError:
                return None
            self._open[path] = fd
            if len(self._open) > self._most:
                self._disk.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def __contains__(self, path: object) -> bool:
        return path in self._open

    def close(self) -> None:
        """Let go of all."""
        while self._open:
            self._disk.close(self._open.popitem()[1])


PINNED_FILES = PinnedFiles(RealDisk())
"""Of this worker, until its next task: the JVM may look a moment after a task's last word."""


class JvmFrameReader(BatchReader):
    """A batch read whose tasks give pieces."""

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """See read_jvm_frames."""
        slices = partition.slices if isinstance(partition, SlicePartition) else None
        return read_jvm_frames(slices, self._options)


class JvmFrameStreamReader(StreamReader):
    """A stream whose tasks give pieces."""

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """See read_jvm_frames."""
        return read_jvm_frames(None if partition is None else partition.slices, self._options)


def read_jvm_frames(slices: Slices | None, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The pieces of a partition, a batch of one row for each stretch of frames; raises as read_slices.

    Bodies are compared by whoever looks at them; here only where damage is to be passed over, not to fail.
    """
    if slices:
        # Whoever read this worker's last task has opened all of its files, or it would not be at another one;
        # and a file that was deleted takes its room as long as it is held.
        PINNED_FILES.close()
        for item in read_batches(slices, options, checks_bodies=options.quarantine):
            yield frame_row(item, PINNED_FILES)
        freeze_imports("pieces")


def frame_row(item: TailBatch, held: PinnedFiles) -> pa.RecordBatch:
    """One piece as a row of SCHEMA."""
    import pyarrow as pa

    run, hidden = item.stored
    offsets = run.batch.offsets
    at = held.pin(run.file) if run.file else None
    low = 0 if at is not None else int(offsets.min())
    frames = np.empty((len(run.batch), 11), np.uint64)
    frames[:, 0] = offsets + (run.origin if at is not None else -low)
    frames[:, 1:] = run.batch.words
    data = None
    if at is None:
        data = memoryview(run.buffer)[low : int((offsets + run.batch.total_bytes).max())].tobytes()
    values = [
        item.topic, item.epoch, item.first_seq, item.last_seq, run.path, None if at is None else run.file, at,
        data, frames.tobytes(), np.asarray(hidden, np.int64).tobytes(),
    ]  # fmt: skip
    schema = arrow_schema(SCHEMA)
    arrays = [pa.array([value], type=field.type) for value, field in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
