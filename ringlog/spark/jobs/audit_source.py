"""Data source with a summary of the view `audit` per task: totals, faults and ranges of stored positions.

The view `audit` has one row for every frame. Jobs that only look for damage need few of these rows. So each
task returns its totals, its damaged frames, and the positions that it saw, merged to ranges. For a log
without holes that is one range per topic and task. The driver merges the ranges of all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ringlog.spark.options import source_options
from ringlog.spark.schema import arrow_schema
from ringlog.spark.views import ViewReader, view_schema
from ringlog.spark.workers import freeze_imports

FAULTS_PER_TASK_MAX = 1_000
"""Maximum number of faults that a task lists, ordered by file and offset. It counts all of them."""
TOTAL, FAULT, STORED = "total", "fault", "stored"

I64 = NDArray[np.int64]
_TEXT, _LONG = StringType(), LongType()
_COLUMNS = {
    "what": _TEXT, "topic": _TEXT, "epoch": _LONG, "first_seq": _LONG, "last_seq": _LONG, "frames": _LONG,
    "records": _LONG, "bytes": _LONG, "damaged": _LONG, "file": _TEXT, "offset": _LONG, "fault": _TEXT,
}  # fmt: skip
SCHEMA = StructType([StructField(name, kind) for name, kind in _COLUMNS.items()])
"""`what` defines the columns in use. TOTAL: frames, records, bytes, damaged. FAULT: those of the view
`audit`. STORED: topic, epoch, first_seq, last_seq."""


class SeqRangeArrays(NamedTuple):
    """Positions as ascending, disjoint, non-adjacent inclusive ranges: (n,) first and last of each."""

    firsts: I64
    lasts: I64


def merge_seq_ranges(firsts: I64, lasts: I64) -> SeqRangeArrays:
    """Merge ranges that are given in any order."""
    if not len(firsts):
        return SeqRangeArrays(firsts, lasts)
    order = np.argsort(firsts, kind="stable")
    firsts, reached = firsts[order], np.maximum.accumulate(lasts[order])
    starts = np.append(0, np.flatnonzero(firsts[1:] > reached[:-1] + 1) + 1)
    return SeqRangeArrays(firsts[starts], reached[np.append(starts[1:], len(firsts)) - 1])


class AuditSource(DataSource):
    """Data source for jobs; see SCHEMA. Options: path and subscription."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ringlog_audit"

    def schema(self) -> StructType:
        """Return SCHEMA."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; raise OptionError."""
        options = source_options({**self.options, "view": "audit"}, streaming=False)
        return AuditReader(ViewReader(options, view_schema("audit")))


class AuditReader(DataSourceReader):
    """Plans like the view `audit` and summarizes its rows."""

    def __init__(self, view: ViewReader) -> None:
        self._view = view

    def partitions(self) -> Sequence[InputPartition]:
        """Return the partitions of the view."""
        return self._view.partitions()

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield one batch with the summary of this partition."""
        yield summarize_audit(self._view.read(partition))
        freeze_imports("audit")


def summarize_audit(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """Return rows of SCHEMA for batches of the view `audit`."""
    frames = records = size = damaged = 0
    faults: list[dict[str, Any]] = []
    stored: dict[tuple[str, int], SeqRangeArrays] = {}
    for batch in batches:
        kinds = batch.column("kind")
        frames += len(batch) - _count(pc.equal(kinds, "part"))
        records += pc.sum(batch.column("records")).as_py() or 0
        size += pc.sum(batch.column("bytes")).as_py() or 0
        is_damaged = pc.is_valid(batch.column("fault"))
        found = _count(is_damaged)
        damaged += found
        if found:
            faults += batch.filter(is_damaged).to_pylist()
            faults = sorted(faults, key=lambda row: (row["file"], row["offset"]))[:FAULTS_PER_TASK_MAX]
        is_append = pc.and_(pc.equal(kinds, "append"), pc.is_valid(batch.column("topic")))
        for owner, part in _by_owner(batch.filter(is_append)):
            stored[owner] = _merge(stored[owner], part) if owner in stored else part
    rows: list[dict[str, Any]] = [
        {"what": TOTAL, "frames": frames, "records": records, "bytes": size, "damaged": damaged}
    ]
    rows += [{**{name: row[name] for name in _COLUMNS if name in row}, "what": FAULT} for row in faults]
    rows += [
        {"what": STORED, "topic": topic, "epoch": epoch, "first_seq": first, "last_seq": last}
        for (topic, epoch), all_of in stored.items()
        for first, last in zip(all_of.firsts.tolist(), all_of.lasts.tolist(), strict=True)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(SCHEMA))


def _count(mask: Any) -> int:
    return int(pc.sum(mask).as_py() or 0)


def _merge(one: SeqRangeArrays, other: SeqRangeArrays) -> SeqRangeArrays:
    return merge_seq_ranges(
        np.concatenate((one.firsts, other.firsts)), np.concatenate((one.lasts, other.lasts))
    )


def _by_owner(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], SeqRangeArrays]]:
    """Yield the positions of each (topic, epoch) in a batch of frames."""
    if not len(batch):
        return
    topics = pc.dictionary_encode(batch.column("topic"))
    names = topics.dictionary.to_pylist()
    epochs, life = np.unique(batch.column("epoch").to_numpy(), return_inverse=True)
    owners = topics.indices.to_numpy().astype(np.int64) * len(epochs) + life
    firsts, lasts = batch.column("first_seq").to_numpy(), batch.column("last_seq").to_numpy()
    order = np.argsort(owners, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
        topic, epoch = divmod(int(owners[rows[0]]), len(epochs))
        yield (names[topic], int(epochs[epoch])), merge_seq_ranges(firsts[rows], lasts[rows])
