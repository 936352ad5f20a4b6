"""Views: tables about the log instead of its records. Batch reads only.

    frames    one row per stored frame: seqs, location, sizes, times; from indexes, and headers of the log
    segments  one row per topic of each segment, from indexes only
    topics    one row per topic: bounds, counts, configuration
    gaps      one row per range that was lost within the bounds; with onCorrupt=quarantine damaged frames too
    audit     one row per stored frame, after a check of seal, structure, body, and index against data.
              `fault` is the damage, or null. Rows of kind `part` report damage in other parts of a segment

Partitions consist of segments and log files. Tasks send one small row per item to the JVM. The views frames
and audit show stored data. This includes deleted and expired records that still use disk space. A record that
a restart copied appears once per copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from ringlog.client.client import Client
from ringlog.errors import NotReady, TopicNotFound
from ringlog.spark.bounds import gaps_of, resolve_bounds
from ringlog.spark.catalog import Catalog, GapRow
from ringlog.spark.clients import client_of
from ringlog.spark.errors import SchemaError
from ringlog.spark.file_locations import (
    LogFileLocation,
    Roots,
    SegmentLocation,
    TopicLocations,
    locate_topic,
    locate_topics,
    log_of,
    roots_of,
    segments_of,
)
from ringlog.spark.options import SourceOptions, source_options
from ringlog.spark.schema import arrow_schema
from ringlog.spark.view_rows import (
    ROWS_PER_BATCH,
    Columns,
    StaleFileLocation,
    audit_log,
    audit_segment,
    log_frame_rows,
    record_batch,
    sealed_frame_rows,
    segment_rows,
    tag_rows,
)
from ringlog.spark.workers import freeze_imports

TRIES_MAX = 5
"""Attempts to find records whose file is merged or moved before it is read."""
FILES_PER_PARTITION = 64
"""Maximum number of indexes per task, for views that read only indexes."""

_TEXT, _LONG, _TIME = StringType(), LongType(), TimestampType()
_OWNER = {"topic": _TEXT, "topic_id": _TEXT, "epoch": _LONG}
_RANGE = {"first_seq": _LONG, "last_seq": _LONG, "records": _LONG}

_COLUMNS: dict[str, dict[str, Any]] = {
    "frames": {
        **_OWNER, **_RANGE, "file": _TEXT, "tier": _TEXT, "segment": _LONG, "offset": _LONG, "bytes": _LONG,
        "record_bytes": _LONG, "ts_min": _TIME, "ts_max": _TIME, "event_min": _TIME, "event_max": _TIME,
        "expires_min": _TIME,
    },
    "segments": {
        **_OWNER, **_RANGE, "deleted": _LONG, "segment": _LONG, "file": _TEXT, "tier": _TEXT, "frames": _LONG,
        "bytes": _LONG, "record_bytes": _LONG, "tags": _LONG, "ts_min": _TIME, "ts_max": _TIME,
        "created": _TIME,
    },
    "topics": {
        **_OWNER, "type": _TEXT, "earliest_seq": _LONG, "head_seq": _LONG, "sealed_seq": _LONG,
        "records": _LONG, "bytes": _LONG, "evict_floor": _LONG, "last_write": _TIME, "last_read": _TIME,
        "config": _TEXT,
    },
    "gaps": {
        "topic": _TEXT, "epoch": _LONG, "gap_from": _LONG, "gap_to": _LONG, "reason": _TEXT,
        "earliest_seq": _LONG, "head_seq": _LONG, "missed_estimate": _LONG,
    },
    "audit": {
        **_OWNER, **_RANGE, "file": _TEXT, "tier": _TEXT, "offset": _LONG, "bytes": _LONG, "kind": _TEXT,
        "fault": _TEXT,
    },
    "tags": {"topic": _TEXT, "tag": _TEXT, "records": _LONG},
}  # fmt: skip
"""Columns of each view. topic_id: 16 hexadecimal digits, as in directory names. Sizes in bytes: `bytes` as
stored, `record_bytes` as accounted (null in the log). tier: hot, both, cold or log. `sealed_seq`: last
position that is in a segment. Only jobs read the view `tags`."""


def view_schema(view: str) -> StructType:
    """Return Spark's schema of a view. Every column is nullable."""
    return StructType([StructField(name, kind) for name, kind in _COLUMNS[view].items()])


def check_view_schema(struct: StructType, view: str) -> StructType:
    """Check a user's schema: any columns of the view in any order, with their exact types.

    Returns the schema; raises SchemaError.
    """
    known = _COLUMNS[view]
    for field in struct.fields:
        if field.name not in known:
            raise SchemaError("no such column", column=field.name, view=view, known=list(known))
        if field.dataType != known[field.name]:
            raise SchemaError(
                "wrong column type", column=field.name, found=field.dataType.simpleString(),
                expected=known[field.name].simpleString(),
            )  # fmt: skip
    if not struct.fields or len(set(struct.fieldNames())) != len(struct.fields):
        raise SchemaError("a schema must name at least one column, each once", found=struct.fieldNames())
    return struct


@dataclass(frozen=True)
class ViewPartition(InputPartition):
    """Files for one task, or finished rows from the driver; plain values."""

    roots: Roots
    segments: tuple[SegmentLocation, ...] = ()
    logs: tuple[LogFileLocation, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    """Values of the view's columns, in column order."""


class ViewReader(DataSourceReader):
    """Reads one view. `options` has path, subscription and bounds; `schema` selects the columns."""

    def __init__(self, options: SourceOptions, schema: StructType, view: str | None = None) -> None:
        """Create a reader. `view` overrides `options.view`. Raises SchemaError."""
        self._options = options
        self._view = view or options.view
        self._schema = check_view_schema(schema, self._view)

    def partitions(self) -> Sequence[InputPartition]:
        """Query the engine for all current locations; raise EngineNotRunning or TopicNotFound."""
        options = self._options
        with Catalog.open(options.path) as catalog:
            client = client_of(options.path)
            names = [each.topic for each in catalog.topics(options)]
            roots = roots_of(client, options.path)
            if self._view == "topics":
                return _cut(roots, [row for name in names for row in _topic_row(client, name)])
            found: list[ViewPartition] = []
            if self._view == "gaps":
                found = _cut(roots, [_gap_row(gap) for gap in _gaps(catalog, options)])
                if not options.quarantine:
                    return found
        places = list(locate_topics(client, names))
        most = options.max_partition_bytes if self._view in {"audit", "gaps"} else None
        return found + _pack_partitions(roots, places, most, options.min_partitions, self._view)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, in batches of Spark's schema."""
        if not isinstance(partition, ViewPartition):
            return
        schema = arrow_schema(self._schema)
        if partition.rows:
            names = list(_COLUMNS[self._view])
            values = list(zip(*partition.rows, strict=True))
            yield record_batch({name: list(values[i]) for i, name in enumerate(names)}, schema)
        for columns in self._rows(partition):
            batch = record_batch(columns, schema)
            for at in range(0, batch.num_rows, ROWS_PER_BATCH):
                yield batch.slice(at, ROWS_PER_BATCH)
        freeze_imports("view")

    def _rows(self, partition: ViewPartition) -> Iterator[Columns]:
        for segment in partition.segments:
            yield from self._of_segment(partition.roots, segment, TRIES_MAX)
        for log_file in partition.logs:
            yield from self._of_log(partition.roots, log_file, TRIES_MAX)

    def _of_segment(self, roots: Roots, place: SegmentLocation, tries: int) -> Iterator[Columns]:
        client = client_of(roots.url)
        makers: dict[str, Callable[[], Iterable[Columns]]] = {
            "segments": lambda: [segment_rows(roots, place)],
            "tags": lambda: [tag_rows(roots, place)],
            "frames": lambda: sealed_frame_rows(roots, place),
            "audit": lambda: audit_segment(roots, place, client),
            "gaps": lambda: _damage_as_gaps(audit_segment(roots, place, client)),
        }
        try:
            yield from makers[self._view]()
        except StaleFileLocation as e:
            yield from self._relocated_rows(roots, place.topics, (place.stem, place.tier), tries, str(e))

    def _of_log(self, roots: Roots, place: LogFileLocation, tries: int) -> Iterator[Columns]:
        makers: dict[str, Callable[[], Iterable[Columns]]] = {
            "frames": lambda: log_frame_rows(roots, place),
            "audit": lambda: audit_log(roots, place),
            "gaps": lambda: _damage_as_gaps(audit_log(roots, place)),
        }
        try:
            yield from makers[self._view]()
        except StaleFileLocation as e:
            yield from self._relocated_rows(roots, place.topics, (place.path, 0), tries, str(e))

    def _relocated_rows(
        self, roots: Roots, topics: dict[int, tuple[str, int]], was: tuple[str, int], tries: int, path: str
    ) -> Iterator[Columns]:
        """Yield rows for a missing file, from newer segments or from the same one in another tier.

        If the engine still refers to the missing file, that is damage: `audit` and `gaps` report it. The
        other views raise NotReady. No view leaves rows out silently.
        """
        client = client_of(roots.url)
        places = [
            place
            for topic_id, (name, _) in sorted(topics.items())
            for place in _places_or_none(client, name)
            if place.topic_id == topic_id
        ]
        planned = was[0]
        for segment in segments_of(places):
            is_same = segment.stem == planned
            if is_same and segment.tier == was[1] and tries <= 1 and self._view in {"audit", "gaps"}:
                yield from self._missing(segment, path)
            elif is_same or segment.number > _number_of(planned):
                # Another one was merged or sealed after planning, so it is not in the plan.
                if tries <= 1:
                    raise NotReady(
                        f"a file of the view {self._view} is missing or keeps moving: {path}; run the query "
                        "again, and `ringlog verify` if it fails again",
                        view=self._view,
                    )
                yield from self._of_segment(roots, segment, tries - 1)

    def _missing(self, segment: SegmentLocation, path: str) -> Iterator[Columns]:
        rows = {
            "file": path, "tier": "hot", "records": 0, "offset": 0, "bytes": 0, "kind": "part",
            "fault": ["file is missing"],
        }  # fmt: skip
        yield from _damage_as_gaps([rows]) if self._view == "gaps" else [rows]


def _number_of(stem: str) -> int:
    """Return the number of a segment from its name, or 0 for a log file: every segment is newer."""
    tail = stem.rpartition("-")[2]
    return int(tail, 16) if "seg-" in stem or "pack-" in stem else 0


def _places_or_none(client: Client, topic: str) -> list[TopicLocations]:
    try:
        return [locate_topic(client, topic)]
    except TopicNotFound:
        return []


def _pack_partitions(
    roots: Roots, places: list[TopicLocations], bytes_max: int | None, least: int, view: str
) -> list[ViewPartition]:
    """Group adjacent files into partitions of about `bytes_max` bytes, or of FILES_PER_PARTITION indexes."""
    segments = segments_of(places)
    logs = log_of(places) if view in {"frames", "audit", "gaps"} else []
    sized: list[tuple[SegmentLocation | LogFileLocation, int]] = [
        *((each, each.bytes if bytes_max else 1) for each in segments),
        *((each, each.stop - each.start if bytes_max else 1) for each in logs),
    ]
    most = min(bytes_max or FILES_PER_PARTITION, -(-sum(size for _, size in sized) // least) or 1)
    groups: list[list[SegmentLocation | LogFileLocation]] = []
    filled = 0
    for place, size in sized:
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(place)
        filled += size
    return [
        ViewPartition(
            roots,
            tuple(each for each in group if isinstance(each, SegmentLocation)),
            tuple(each for each in group if isinstance(each, LogFileLocation)),
        )
        for group in groups
    ]


# -- rows from the driver -----------------------------------------------------------------------------------


def _cut(roots: Roots, rows: Iterable[tuple[Any, ...]]) -> list[ViewPartition]:
    """Split rows into partitions of ROWS_PER_BATCH."""
    rest = iter(rows)
    found = []
    while part := tuple(islice(rest, ROWS_PER_BATCH)):
        found.append(ViewPartition(roots, rows=part))
    return found


def _topic_row(client: Client, name: str) -> Iterator[tuple[Any, ...]]:
    try:
        state = client.topics.state(name, touch=False)
        places = locate_topic(client, name)
    except TopicNotFound:
        return
    sealed = [each.last_seq for each in places.extents if each.segment]
    yield (
        name, f"{places.topic_id:016x}", state.epoch, state.type, state.earliest_seq, state.head_seq,
        max(sealed, default=0), state.count, state.bytes, state.evict_floor, state.last_write_ts,
        state.last_read_ts, msgspec.json.encode(state.config, enc_hook=str, order="sorted").decode(),
    )  # fmt: skip


def _gaps(catalog: Catalog, options: SourceOptions) -> Iterator[GapRow]:
    for bounds in resolve_bounds(catalog, options):
        yield from gaps_of(catalog, bounds)


def _gap_row(gap: GapRow) -> tuple[Any, ...]:
    return (*astuple(gap), gap.missed_estimate)


def _damage_as_gaps(found: Iterable[Columns]) -> Iterator[Columns]:
    """Convert faults of an audit to rows of the gaps view, with the reason corrupt."""
    for columns in found:
        faults = columns["fault"]
        rows = [row for row, fault in enumerate(faults) if fault is not None]
        if rows:
            chosen = {name: _chosen(value, rows) for name, value in columns.items()}
            firsts, lasts = chosen.get("first_seq"), chosen.get("last_seq")
            yield {
                "topic": chosen.get("topic"), "epoch": chosen.get("epoch"), "gap_from": firsts,
                "gap_to": lasts, "reason": ["corrupt"] * len(rows), "missed_estimate": chosen.get("records"),
            }  # fmt: skip


def _chosen(value: Any, rows: list[int]) -> Any:
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value] * len(rows)
    return [value[row] for row in rows]


def view_reader(path: str, view: str, topics: Sequence[str] = (), **options: str) -> ViewReader:
    """Return a reader of a view for use without Spark: call `partitions()` and `read(partition)` directly."""
    raw = {"path": path, "view": "segments" if view == "tags" else view, **options}
    raw |= {"subscribe": msgspec.json.encode(list(topics)).decode()} if topics else {"subscribePattern": ".*"}
    return ViewReader(source_options(raw, streaming=False), view_schema(view), view)
