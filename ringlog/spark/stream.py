"""StreamReader: topics as a stream. Spark asks how far there is something, plans each range and has it read.

An offset says for each topic the last position dealt with (offsets.py). The very first one names no topics:
Spark asks for it again when a query dies within its first batch, and only a constant is the same then.
Where to begin is decided by the end of that batch, which Spark writes down; the records come from the second.
A trigger that asks once for all there is gets them in the first.
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
from ringlog.spark.batch import plan_partitions
from ringlog.spark.bounds import check_gaps, start_of
from ringlog.spark.catalog import Catalog, GapRow, TopicAt
from ringlog.spark.errors import DataLoss
from ringlog.spark.gap_files import write_gaps
from ringlog.spark.offsets import BEGINNING, TopicCursors, decode, encode
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import WAL, Bounds, StoredRange
from ringlog.spark.schema import check_schema
from ringlog.spark.slice_reader import DELETED, data_loss, read_slices
from ringlog.spark.stream_state import (
    SparkStreamState,
    StreamPendingRange,
    TopicBreak,
    advance,
    compare_positions,
)
from ringlog.storage.disk import RealDisk
from ringlog.topic.tombstone import RECREATED, RESTART_LOSS

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("ringlog.spark")

UNLIMITED_ROWS = 1 << 62
"""The limit of a query without one. Not ReadAllAvailable, which is what a trigger asks that runs once."""
LOG_STEP_BYTES = 64 * KIB
"""What lies in the log alone is admitted in steps of about this size: its frames are not known yet."""
POSITION_BYTES_MIN = 8
"""maxBytesPerTrigger looks at no more positions than this allows: a bound on planning, no promise."""
SCAN_POSITIONS_MIN = 10_000


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow. Pickles to options and schema; holds neither a client nor files (SK-15)."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """`schema` says which columns are made; raises SchemaError."""
        check_schema(schema, options)
        self._options = options
        self._schema = schema
        self._frozen: dict[str, TopicAt] | None = None
        self._turn: int | None = None
        self.committed: dict[str, Any] | None = None
        """The last offset that Spark said is dealt with: for metrics, nothing waits for it (SK-21)."""

    # -- how far ------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Before anything; the same each time. Raises what the first look at the topics raises."""
        with Catalog.open(self._options.path) as catalog:
            catalog.topics(self._options)  # A name that does not exist is told before the query runs.
            return encode(catalog.log_id, BEGINNING)

    def getDefaultReadLimit(self) -> ReadLimit:
        """By the options; without one of them, more than any log holds."""
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadMaxRows(self._options.max_offsets or UNLIMITED_ROWS)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far the next batch goes; `start` itself when there is nothing new.

        Raises CheckpointRefused for an offset of another log, and DataLoss when a topic was deleted or made
        anew, unless failOnDataLoss is off.
        """
        with Catalog.open(self._options.path) as catalog:
            places = decode(start, catalog.log_id)
            now = self._topics(catalog, places or {})
            is_once = isinstance(limit, ReadAllAvailable)
            begun = self._begin(catalog, now) if places is BEGINNING else places
            standing = compare_positions(begun, now, subscribed=self._subscribed(begun), frozen=self._frozen)
            self._check(standing.breaks)
            if places is BEGINNING and not is_once:
                return encode(catalog.log_id, begun)
            waiting = standing.waiting
            if not is_once:
                # The start of what is new, or new again, is written down first.
                waiting = {
                    topic: each for topic, each in waiting.items() if _is_same_life(places, standing, topic)
                }
            until = self._admit(catalog, waiting, limit, start)
            following = encode(catalog.log_id, advance(standing.places, until))
        return start if following == start else following

    def reportLatestOffset(self) -> dict[str, Any]:
        """The heads of all topics, for the query's progress."""
        with Catalog.open(self._options.path) as catalog:
            now = catalog.topics(self._options, missing_ok=True)
            return encode(catalog.log_id, {at.topic: Cursor(at.epoch, at.head) for at in now})

    def prepareForTriggerAvailableNow(self) -> None:
        """Take the heads as they are for the end; what comes later, topics too, is for the next run."""
        with Catalog.open(self._options.path) as catalog:
            self._frozen = {at.topic: at for at in catalog.topics(self._options, missing_ok=True)}

    def commit(self, end: dict[str, Any]) -> None:
        """Remember it. Retention does not wait for queries."""
        self.committed = end

    # -- reading ------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Share out what lies between two offsets: exactly that, whatever is subscribed to by now.

        Raises CheckpointRefused, and DataLoss when some of it is gone, unless failOnDataLoss is off: then the
        gaps are logged and go to gapsPath.
        """
        options = self._options
        with Catalog.open(options.path) as catalog:
            before, after = decode(start, catalog.log_id), decode(end, catalog.log_id)
            bounds = self._bounds(catalog, before, after or {})
            found: list[GapRow | TopicBreak] = list(
                breaks_between(before or {}, after or {}, self._subscribed)
            )
            gaps = self._check_heads(catalog, bounds) + check_gaps(catalog, bounds, options)
            if options.gaps_path is not None:
                write_gaps(RealDisk(), options.gaps_path, start, end, [*found, *gaps])
            gone = {gap.topic for gap in gaps if gap.reason in {DELETED, RECREATED}}
            there = [each for each in bounds if each.topic not in gone]
            return plan_partitions(catalog, there, options)

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """A partition's records; see read_slices. Runs in a task."""
        slices = None if partition is None else partition.slices
        return read_slices(slices, self._options, self._schema)

    # -- inside -------------------------------------------------------------------------------------

    def _begin(self, catalog: Catalog, now: Mapping[str, TopicAt]) -> TopicCursors:
        """Where startingOffsets, or the time to start at, puts each topic that there is."""
        seen = now if self._frozen is None else {name: at for name, at in now.items() if name in self._frozen}
        return {name: Cursor(at.epoch, start_of(catalog, self._options, at)) for name, at in seen.items()}

    def _subscribed(self, names: Sequence[str] | Mapping[str, Any]) -> set[str]:
        return {name for name in names if self._options.matches(name)}

    def _topics(self, catalog: Catalog, places: Mapping[str, Cursor]) -> dict[str, TopicAt]:
        """The topics subscribed to that exist; those already known are looked for by name, one by one.

        A list that is made while topics come and go may miss one; only its shard can say that it is gone.
        """
        found = {at.topic: at for at in catalog.topics(self._options, missing_ok=True)}
        for name in self._subscribed(places):
            if name not in found:
                try:
                    found[name] = catalog.topic(name)
                except TopicNotFound:
                    continue
        return found

    def _check(self, breaks: Sequence[TopicBreak]) -> None:
        for each in breaks:
            if self._options.fail_on_data_loss:
                raise _broken_off(each)
            log.warning("topic %s was %s behind position %d", each.topic, each.reason, each.seq)

    def _check_heads(self, catalog: Catalog, bounds: list[Bounds]) -> list[GapRow]:
        """Take out of `bounds` what a restart lost with all behind it; raises DataLoss.

        The numbers may have been given to other records meanwhile, so nothing of such a range is read.
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
        waiting: Mapping[str, StreamPendingRange],
        limit: ReadLimit,
        start: Mapping[str, Any],
    ) -> dict[str, int]:
        """{topic: position to read up to}, within the limit."""
        if isinstance(limit, ReadAllAvailable):
            return {topic: each.until for topic, each in waiting.items()}
        turn = self._next_turn(start)
        if isinstance(limit, ReadMaxRows):
            shares = admit_offsets(
                {topic: len(each) for topic, each in waiting.items()}, limit.max_rows, turn
            )
            return {topic: waiting[topic].after + count for topic, count in shares.items()}
        if isinstance(limit, ReadMaxBytes):
            steps = {topic: _steps(catalog, topic, each, limit.max_bytes) for topic, each in waiting.items()}
            return admit_bytes(steps, limit.max_bytes, turn)
        raise UsageError("this source can be limited by positions or by bytes", found=type(limit).__name__)

    def _next_turn(self, start: Mapping[str, Any]) -> int:
        """Counts up; begins anywhere, so that a query that dies after each batch is fair as well."""
        if self._turn is None:
            self._turn = zlib.crc32(json.dumps(start, sort_keys=True).encode())
        self._turn += 1
        return self._turn

    def _bounds(self, catalog: Catalog, before: TopicCursors | None, after: TopicCursors) -> list[Bounds]:
        """What lies between, of lives that are the same on both sides or begin there."""
        found = []
        for topic, end in after.items():
            known = None if before is BEGINNING else before.get(topic)
            try:
                at = catalog.topic(topic)
            except TopicNotFound:
                at = TopicAt(topic, 0, end.epoch, 1, end.seq)  # Told as a gap where positions were read on.
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
    """Lives that ended between two offsets: topics that went, or begin anew, below where they stood."""
    for topic, place in before.items():
        end = after.get(topic)
        if end is None:
            if subscribed([topic]):
                yield TopicBreak(topic, place.epoch, place.seq, DELETED)
        elif end.epoch != place.epoch or end.seq < place.seq:
            yield TopicBreak(topic, place.epoch, place.seq, RECREATED)


def _is_same_life(places: TopicCursors | None, standing: SparkStreamState, topic: str) -> bool:
    known = (places or {}).get(topic)
    now = standing.places[topic]
    return known is not None and known.epoch == now.epoch and known.seq <= now.seq


def _steps(catalog: Catalog, topic: str, waiting: StreamPendingRange, most: int) -> list[StreamAdmissionStep]:
    """The frames that wait, as far as `most` bytes may reach."""
    reach = max(most // POSITION_BYTES_MIN, SCAN_POSITIONS_MIN)
    until = min(waiting.until, waiting.after + reach)
    found: list[StreamAdmissionStep] = []
    for stretch in catalog.stored_ranges(topic, waiting.after, until):
        found += _steps_of(stretch, most)
    if found and found[-1].until < until:
        found[-1] = replace(found[-1], until=until)  # What lies behind the last frame has gone.
    return found or [StreamAdmissionStep(until, 0)]


def _steps_of(stretch: StoredRange, most: int) -> Iterator[StreamAdmissionStep]:
    positions = stretch.last_seq - stretch.first_seq + 1
    size = max(min(LOG_STEP_BYTES, most // 4), 1)
    parts = min(max(-(-stretch.bytes // size), 1), positions) if stretch.tier == WAL else 1
    for part in range(1, parts + 1):
        until = stretch.first_seq - 1 + positions * part // parts
        yield StreamAdmissionStep(until, stretch.bytes * part // parts - stretch.bytes * (part - 1) // parts)


def _broken_off(found: TopicBreak) -> DataLoss:
    told = "was deleted" if found.reason == DELETED else "was made anew, or lost its end in a restart"
    return DataLoss(
        f"topic {found.topic!r} {told}: what followed position {found.seq} cannot be read. Set "
        "failOnDataLoss=false to go on with what there is, or startingOffsets and a new checkpoint",
        topic=found.topic,
        epoch=found.epoch,
        gap_from=found.seq + 1,
        gap_to=None,
        reason=found.reason,
    )
