"""Describes the frames of a partition (location, visible records) for the JVM reader.

The JVM reader (`jvm/`) requests these descriptions and decodes frames into Spark's columns. The Python code
decides everything about a topic: bounds, gaps, deleted and expired records, and the current location of
segments. The JVM only copies a frame, compares its body checksum with the header that was verified here, and
decodes its columns.

Frames of a segment are read from its file, which never changes and whose name is never reused. The file may
be deleted before the JVM opens it. So the Python worker keeps it open, and the JVM opens the worker's
descriptor first. Frames from other places (log, shared memory, cold tier through the engine) are sent as
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
from ringlog.spark.slice_reader import OnGap, read_batches
from ringlog.spark.stream import StreamReader
from ringlog.spark.workers import freeze_imports
from ringlog.storage.disk import Disk
from ringlog.storage.real_disk import RealDisk

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
"""Same as Pieces.SCHEMA in the JVM. `frames`: per frame 11 words of 8 bytes: its offset and the words of its
header. `hidden`: ascending 64-bit seqs to omit. `data` is set only if there is no `file`."""
PINNED_FILES_MAX = 64
"""Maximum number of segments that a worker keeps open for the JVM; the least recently used are closed."""


class PinnedFiles:
    """Open files that another process of this user can read even if their names are deleted."""

    def __init__(self, disk: Disk, most: int = PINNED_FILES_MAX) -> None:
        self._disk = disk
        self._most = most
        self._open: OrderedDict[str, int] = OrderedDict()

    def pin(self, path: str) -> str | None:
        """Open the file if needed; return the /proc path of its descriptor, or None if it is deleted."""
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
        """Close all files."""
        while self._open:
            self._disk.close(self._open.popitem()[1])


PINNED_FILES = PinnedFiles(RealDisk())
"""Files of this worker, open until its next task: the JVM may read them after the task's end."""


class JvmFrameReader(BatchReader):
    """Batch read whose tasks return frame descriptions."""

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the frame descriptions of a partition; see read_jvm_frames."""
        slices = partition.slices if isinstance(partition, SlicePartition) else None
        return read_jvm_frames(slices, self._options)


class JvmFrameStreamReader(StreamReader):
    """Stream whose tasks return frame descriptions."""

    def _read_slices(self, slices: Slices, on_gap: OnGap) -> Iterator[pa.RecordBatch]:
        return read_jvm_frames(slices, self._options, on_gap)


def read_jvm_frames(
    slices: Slices | None, options: SourceOptions, on_gap: OnGap | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield one batch of one row (see SCHEMA) for each range of frames; raise as read_slices does.

    The JVM verifies the bodies. Only for onCorrupt=quarantine they are verified here, because damage is then
    skipped.
    """
    if slices:
        # The reader of this worker's previous task has opened all of that task's files, since Spark gives a
        # worker one task at a time. Deleted files use disk space as long as they are open.
        PINNED_FILES.close()
        for item in read_batches(slices, options, on_gap, checks_bodies=options.quarantine):
            yield frame_row(item, PINNED_FILES)
        freeze_imports("pieces")


def frame_row(item: TailBatch, held: PinnedFiles) -> pa.RecordBatch:
    """Return one range of frames as a row of SCHEMA."""
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
