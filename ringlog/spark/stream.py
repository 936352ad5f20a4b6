"""StreamReader: reads topics as a Spark stream.

An offset contains the last processed position of each topic (offsets.py). The initial offset names no topics.
If a query fails within its first batch, Spark requests the initial offset again, so it must be a constant.
The end offset of the first batch fixes where reading starts, and Spark logs it. Records follow from the
second batch. With a trigger that runs once (ReadAllAvailable), the first batch contains the records.
"""

# ruff: noqa: N802  Spark calls methods by these names.

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ringlog.client.read.pages import Cursor
from ringlog.errors import TopicNotFound, UsageError
from ringlog.limits import KIB
from ringlog.spark.admission import StreamAdmissionStep, admit_bytes, admit_offsets
from ringlog.spark.batch import SlicePartition, plan_partitions
from ringlog.spark.bounds import check_gaps, start_of
from ringlog.spark.catalog import Catalog, GapRow, TopicState
from ringlog.spark.errors import DataLoss
from ringlog.spark.gap_files import RangeGaps, write_planned
from ringlog.spark.offsets import BEGINNING, TopicCursors, decode, encode
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import WAL, Bounds, Slices, StoredRange
from ringlog.spark.schema import check_schema
from ringlog.spark.slice_reader import DELETED, OnGap, data_loss, log_gap, read_slices
from ringlog.spark.stream_state import (
    SparkStreamState,
    StreamPendingRange,
    TopicBreak,
    advance,
    compare_positions,
)
from ringlog.storage.real_disk import RealDisk
from ringlog.topic.tombstone import RECREATED, RESTART_LOSS

if TYPE_CHECKING:
    import pyarrow as pa

log: logging.Logger = logging.getLogger("ringlog.spark")

UNLIMITED_ROWS = 1 << 62
"""Read limit of a query without one.

ReadAllAvailable does not fit: Spark uses it for triggers that run once.
"""
LOG_STEP_BYTES = 64 * KIB
"""Step size for positions that exist only in the log, where frame boundaries are not known."""
POSITION_BYTES_MIN = 8
"""Assumed minimum size of a record.

It bounds the positions that planning with maxBytesPerTrigger examines.
"""
SCAN_POSITIONS_MIN = 10_000


class StreamPartition(SlicePartition):
    """Slices of one task, and the gap files of the offset range; None without gapsPath."""

    def __init__(self, slices: Slices, bounds: tuple[Bounds, ...], range_gaps: RangeGaps | None) -> None:
        super().__init__(slices, bounds)
        self.range_gaps = range_gaps


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. Pickles to options and schema, and holds neither a client nor open files."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Create a reader of the columns in `schema`; raise SchemaError if a column does not exist."""
        check_schema(schema, options)
        self._options = options
        self._schema = schema
        self._frozen: dict[str, TopicState] | None = None
        self._rotation: int | None = None
        self.committed: dict[str, Any] | None = None
        """Last offset that Spark committed. Used for metrics only: no component waits for it."""

    # -- offsets ------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return the constant offset before the first batch.

        Raises TopicNotFound or OptionError if the subscription does not fit the existing topics.
        """
        with Catalog.open(self._options.path) as catalog:
            catalog.topics(self._options)  # Fails for a missing topic before the query starts.
            return encode(catalog.log_id, BEGINNING)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of maxBytesPerTrigger or maxOffsetsPerTrigger; without either, UNLIMITED_ROWS."""
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadMaxRows(self._options.max_offsets or UNLIMITED_ROWS)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end offset of the next batch, or `start` if there is nothing new.

        Raises CheckpointRefused for an offset of another log. Raises DataLoss if a topic was deleted or
        recreated and failOnDataLoss is on.
        """
        with Catalog.open(self._options.path) as catalog:
            positions = decode(start, catalog.log_id)
            now = self._topics(catalog, positions or {})
            is_once = isinstance(limit, ReadAllAvailable)
            start_positions = self._start_positions(catalog, now) if positions is BEGINNING else positions
            standing = compare_positions(
                start_positions, now, subscribed=self._subscribed(start_positions), frozen=self._frozen
            )
            self._check(standing.breaks)
            if positions is BEGINNING and not is_once:
                return encode(catalog.log_id, start_positions)
            pending = standing.pending
            if not is_once:
                # A new or changed starting point is logged by Spark before records after it are read.
                pending = {
                    topic: each
                    for topic, each in pending.items()
                    if _is_same_life(positions, standing, topic)
                }
            until = self._admit(catalog, pending, limit, start)
            following = encode(catalog.log_id, advance(standing.positions, until))
        return start if following == start else following

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the heads of all subscribed topics, for the progress report of the query."""
        with Catalog.open(self._options.path) as catalog:
            now = catalog.topics(self._options, missing_ok=True)
            return encode(catalog.log_id, {at.topic: Cursor(at.epoch, at.head) for at in now})

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the current heads as the end of this run. Later records and topics belong to the next run."""
        with Catalog.open(self._options.path) as catalog:
            self._frozen = {at.topic: at for at in catalog.topics(self._options, missing_ok=True)}

    def commit(self, end: dict[str, Any]) -> None:
        """Store the committed offset. Retention does not wait for queries."""
        self.committed = end

    # -- reading ------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split the positions between two offsets into partitions.

        The partitions cover exactly these positions, even if the subscription changed. Raises
        CheckpointRefused. Raises DataLoss if positions are lost and failOnDataLoss is on. If it is off, the
        gaps are logged and written to gapsPath.
        """
        options = self._options
        with Catalog.open(options.path) as catalog:
            before, after = decode(start, catalog.log_id), decode(end, catalog.log_id)
            bounds = self._bounds(catalog, before, after or {})
            found: list[GapRow | TopicBreak] = list(
                breaks_between(before or {}, after or {}, self._subscribed)
            )
            gaps = self._check_heads(catalog, bounds) + check_gaps(catalog, bounds, options)
            range_gaps = None
            if options.gaps_path is not None:
                range_gaps = write_planned(RealDisk(), options.gaps_path, start, end, [*found, *gaps])
            removed_topics = {gap.topic for gap in gaps if gap.reason in {DELETED, RECREATED}}
            existing = [each for each in bounds if each.topic not in removed_topics]
            planned = plan_partitions(catalog, existing, options)
            return [StreamPartition(each.slices, each.bounds, range_gaps) for each in planned]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the records of a partition; see read_slices. Runs in a Spark task.

        With failOnDataLoss=false, gaps that occurred after planning are logged and written to gapsPath. For a
        plan without partitions Spark creates one partition itself, which has no records.
        """
        if not isinstance(partition, StreamPartition):
            return
        found: list[GapRow] = []

        def on_gap(gap: GapRow) -> None:
            log_gap(gap)
            found.append(gap)

        try:
            yield from self._read_slices(partition.slices, on_gap)
        finally:
            # Also if the query ends the task early: what was missed so far is missing in its result.
            if partition.range_gaps is not None:
                partition.range_gaps.write_read(RealDisk(), found)

    def _read_slices(self, slices: Slices, on_gap: OnGap) -> Iterator[pa.RecordBatch]:
        return read_slices(slices, self._options, self._schema, on_gap)

    # -- internals ----------------------------------------------------------------------------------

    def _start_positions(self, catalog: Catalog, now: Mapping[str, TopicState]) -> TopicCursors:
        """Return the start position of each existing topic, from startingOffsets or the starting time."""
        seen = now if self._frozen is None else {name: at for name, at in now.items() if name in self._frozen}
        return {name: Cursor(at.epoch, start_of(catalog, self._options, at)) for name, at in seen.items()}

    def _subscribed(self, names: Sequence[str] | Mapping[str, Any]) -> set[str]:
        return {name for name in names if self._options.matches(name)}

    def _topics(self, catalog: Catalog, positions: Mapping[str, Cursor]) -> dict[str, TopicState]:
        """Return the subscribed topics that exist. Known topics are resolved one by one.

        A topic listing that runs while topics are created and deleted may miss one. Only the topic's shard
        knows whether the topic is deleted.
        """
        found = {at.topic: at for at in catalog.topics(self._options, missing_ok=True)}
        for name in self._subscribed(positions):
            if name not in found:
                try:
                    found[name] = catalog.topic(name)
                except TopicNotFound:
                    continue
        return found

    def _check(self, breaks: Sequence[TopicBreak]) -> None:
        for each in breaks:
            if self._options.fail_on_data_loss:
                raise _break_error(each)
            log.warning("topic %s was %s after position %d", each.topic, each.reason, each.seq)

    def _check_heads(self, catalog: Catalog, bounds: list[Bounds]) -> list[GapRow]:
        """Remove from `bounds` each range whose end a restart lost, and return the gaps; raise DataLoss.

        The engine may have assigned the lost seqs to other records, so no part of such a range is read.
        """
        found = []
        for each in list(bounds):
            at = catalog.topic(each.topic) if each.topic_id else None
            if at is not None and at.epoch == each.epoch and at.head < each.until:
                lost = each.after + 1, each.until
                found.append(GapRow(each.topic, each.epoch, *lost, RESTART_LOSS, at.earliest, at.head))
                bounds.remove(each)
        if found and self._options.fail_on_data_loss:
            raise data_loss(found[0])
        return found

    def _admit(
        self,
        catalog: Catalog,
        pending: Mapping[str, StreamPendingRange],
        limit: ReadLimit,
        start: Mapping[str, Any],
    ) -> dict[str, int]:
        """Return {topic: last position to read}, within the limit."""
        if isinstance(limit, ReadAllAvailable):
            return {topic: each.until for topic, each in pending.items()}
        rotation = self._next_rotation(start)
        if isinstance(limit, ReadMaxRows):
            shares = admit_offsets(
                {topic: len(each) for topic, each in pending.items()}, limit.max_rows, rotation
            )
            return {topic: pending[topic].after + count for topic, count in shares.items()}
        if isinstance(limit, ReadMaxBytes):
            steps = {topic: _steps(catalog, topic, each, limit.max_bytes) for topic, each in pending.items()}
            return admit_bytes(steps, limit.max_bytes, rotation)
        raise UsageError(
            "unsupported read limit: use maxOffsetsPerTrigger or maxBytesPerTrigger",
            found=type(limit).__name__,
        )

    def _next_rotation(self, start: Mapping[str, Any]) -> int:
        """Return the next rotation number.

        The first one is a hash, so a query that fails after each batch is fair too.
        """
        if self._rotation is None:
            self._rotation = zlib.crc32(json.dumps(start, sort_keys=True).encode())
        self._rotation += 1
        return self._rotation

    def _bounds(self, catalog: Catalog, before: TopicCursors | None, after: TopicCursors) -> list[Bounds]:
        """Return the positions between two offsets, for epochs on both sides or that start there."""
        found = []
        for topic, end in after.items():
            known = None if before is BEGINNING else before.get(topic)
            try:
                at = catalog.topic(topic)
            except TopicNotFound:
                at = TopicState(topic, 0, end.epoch, 1, end.seq)  # check_gaps reports it as a gap.
            if known is not None and known.epoch == end.epoch:
                first = known.seq
            elif at.epoch != end.epoch:
                continue
            else:
                first = at.earliest - 1 if before is not BEGINNING else start_of(catalog, self._options, at)
            if first < end.seq:
                found.append(Bounds(topic, at.topic_id, end.epoch, first, end.seq))
        return found


def breaks_between(before: TopicCursors, after: TopicCursors, subscribed: Any) -> Iterator[TopicBreak]:
    """Yield a break for each topic that was deleted, or recreated, between two offsets.

    An offset below the previous one also means that the topic was recreated.
    """
    for topic, cursor in before.items():
        end = after.get(topic)
        if end is None:
            if subscribed([topic]):
                yield TopicBreak(topic, cursor.epoch, cursor.seq, DELETED)
        elif end.epoch != cursor.epoch or end.seq < cursor.seq:
            yield TopicBreak(topic, cursor.epoch, cursor.seq, RECREATED)


def _is_same_life(positions: TopicCursors | None, standing: SparkStreamState, topic: str) -> bool:
    known = (positions or {}).get(topic)
    now = standing.positions[topic]
    return known is not None and known.epoch == now.epoch and known.seq <= now.seq


def _steps(catalog: Catalog, topic: str, pending: StreamPendingRange, most: int) -> list[StreamAdmissionStep]:
    """Return the pending frames as admission steps, as far as `most` bytes can reach."""
    reach = max(most // POSITION_BYTES_MIN, SCAN_POSITIONS_MIN)
    until = min(pending.until, pending.after + reach)
    found: list[StreamAdmissionStep] = []
    for stored_range in catalog.stored_ranges(topic, pending.after, until):
        found += _steps_of(stored_range, most)
    if found and found[-1].until < until:
        found[-1] = replace(found[-1], until=until)  # Positions after the last frame are deleted.
    return found or [StreamAdmissionStep(until, 0)]


def _steps_of(stored_range: StoredRange, most: int) -> Iterator[StreamAdmissionStep]:
    positions = stored_range.last_seq - stored_range.first_seq + 1
    size = max(min(LOG_STEP_BYTES, most // 4), 1)
    parts = min(max(-(-stored_range.bytes // size), 1), positions) if stored_range.tier == WAL else 1
    for part in range(1, parts + 1):
        until = stored_range.first_seq - 1 + positions * part // parts
        share = stored_range.bytes * part // parts - stored_range.bytes * (part - 1) // parts
        yield StreamAdmissionStep(until, share)


def _break_error(found: TopicBreak) -> DataLoss:
    event = "was deleted" if found.reason == DELETED else "was recreated, or lost its end in a restart"
    return DataLoss(
        f"topic {found.topic!r} {event}: records after position {found.seq} cannot be read. Set "
        "failOnDataLoss=false to continue with the existing records, or use a new checkpoint",
        topic=found.topic,
        epoch=found.epoch,
        gap_from=found.seq + 1,
        gap_to=None,
        reason=found.reason,
    )
