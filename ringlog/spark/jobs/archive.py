"""archive: append topics to Parquet files, by topic and date, from the end of the previous run.

The archive contains the records that were live when they were read. Records that are deleted from the log
later stay in the archive, and so do records of a topic's earlier epochs. `read_all` reads archive and log as
one table.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from ringlog.clock import SystemClock
from ringlog.errors import Internal
from ringlog.spark.bounds import gaps_of
from ringlog.spark.catalog import Catalog, GapRow
from ringlog.spark.clients import client_of
from ringlog.spark.jobs.archive_files import (
    VERSION,
    Archive,
    ArchivedFile,
    ArchivedGap,
    ArchivedRange,
    ArchiveManifest,
    archived_positions,
    check_same_log,
)
from ringlog.spark.jobs.report import SilentProgress, SparkJobProgress, show_task_progress
from ringlog.spark.options import SourceOptions, source_options
from ringlog.spark.plan import Bounds
from ringlog.spark.sessions import read
from ringlog.spark.slice_reader import data_loss

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_BYTES = 128 << 20
"""Approximate bytes of log per file."""
CODECS = ("zstd", "snappy", "lz4", "gzip", "none")


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """Result of a run. If `number` is 0, there were no new records, and no manifest was written."""

    archive: str
    number: int
    bounds: tuple[ArchivedRange, ...]
    rows: int
    files: int
    bytes: int
    gaps: tuple[ArchivedGap, ...]
    recovered: bool
    """True if the run first finished the commit of an earlier run that died."""
    swept: int
    """Number of deleted files that earlier runs had left uncommitted."""
    seconds: float


def run(
    session: SparkSession,
    path: str,
    archive: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    fail_on_data_loss: bool = True,
    codec: str = "zstd",
    max_partition_bytes: int = PARTITION_BYTES,
    progress: SparkJobProgress | None = None,
) -> ArchiveReport:
    """Archive the new records of these topics (default: all). A repeated run adds only newer records.

    Raises DataLoss if records were lost before they were archived; with fail_on_data_loss=False the report
    and the manifest list the gaps instead. Raises NotReady while another run writes the archive, OptionError
    if the archive belongs to another log, and EngineNotRunning.
    """
    from ringlog.spark.jobs.archive_tasks import FORMAT, ArchiveSource, Assignment

    clock = SystemClock()
    started = clock.monotonic_ns()
    options = subscription(path, topics, pattern)
    place = Archive(archive).make()
    with place.lock():
        recovered, swept = place.recover(), place.sweep()
        manifests = place.manifests()
        client_of(path)
        with Catalog.open(path) as catalog:
            check_same_log(manifests, catalog.log_id, place.directory)
            bounds = _new_bounds(catalog, options, manifests)
            gaps = [gap for each in bounds for gap in gaps_of(catalog, each)]
            if gaps and fail_on_data_loss:
                raise data_loss(gaps[0])
            log_id = catalog.log_id
        files: list[ArchivedFile] = []
        number = 0
        if bounds:
            session.dataSource.register(ArchiveSource)
            assignment = Assignment(
                os.path.abspath(path), place.directory, secrets.token_hex(4),
                tuple((b.topic, b.topic_id, b.epoch, b.after, b.until) for b in bounds), fail_on_data_loss,
                max_partition_bytes, _parallelism(session), codec,
            )  # fmt: skip
            frame = session.read.format(FORMAT).option("assignment", msgspec.json.encode(assignment).decode())
            with show_task_progress(session, progress or SilentProgress(), "archive"):
                files = [ArchivedFile(**row.asDict()) for row in frame.load().collect()]
            files.sort(key=lambda file: (file.topic, file.epoch, file.first_seq))
            _check_disjoint(files)
            if not fail_on_data_loss:
                with Catalog.open(path) as catalog:  # Add the losses that happened while the tasks read.
                    gaps = [gap for each in bounds for gap in gaps_of(catalog, each)]
            number = (manifests[-1].number if manifests else 0) + 1
            manifest = ArchiveManifest(
                VERSION, log_id, number, clock.now_us(),
                tuple(ArchivedRange(b.topic, b.epoch, b.after, b.until) for b in bounds), tuple(files),
                tuple(map(_gap, gaps)),
            )  # fmt: skip
            place.commit(manifest)
    return ArchiveReport(
        place.directory, number, tuple(ArchivedRange(b.topic, b.epoch, b.after, b.until) for b in bounds),
        sum(file.rows for file in files), len(files), sum(file.bytes for file in files),
        tuple(map(_gap, gaps)), recovered, swept, (clock.monotonic_ns() - started) / 1e9,
    )  # fmt: skip


def read_all(
    session: SparkSession,
    path: str,
    *,
    archive: str,
    topics: Iterable[str] | str | None = None,
    pattern: str | None = None,
    columns: Iterable[str] | None = None,
    **options: Any,
) -> DataFrame:
    """Return archive and log as one table with the columns of the log, including headers: each record once.

    Archived records come from the archive, all others from the log. `options` are those of
    `ringlog.spark.read`, without offsets. The result is a snapshot; call again to see newer records.
    """
    from ringlog.spark.schema import record_schema

    wanted = subscription(path, topics, pattern)
    place = Archive(archive)
    manifests = place.manifests()
    with Catalog.open(path) as catalog:
        check_same_log(manifests, catalog.log_id, place.directory)
        present = catalog.topics(wanted, missing_ok=True)
    done = archived_positions(manifests)
    starts = {
        each.topic: done[each.topic][1] + 1
        for each in present
        if each.topic in done and done[each.topic][0] == each.epoch and done[each.topic][1] > 0
    }
    frames: list[DataFrame] = []
    if present:
        given = {"startingOffsets": starts, **options} if starts else options
        frames.append(
            read(session, [each.topic for each in present], path=path, includeHeaders=True, **given)
        )
    files = [file for manifest in manifests for file in manifest.files if wanted.matches(file.topic)]
    schema = record_schema(source_options({"path": path, "subscribePattern": ".*", "includeHeaders": "true"},
                                          streaming=False))  # fmt: skip
    if files or not frames:
        frames.append(_archived(session, place, files, schema))
    names = list(columns) if columns is not None else schema.fieldNames()
    found = frames[0].select(*names)
    for each in frames[1:]:
        found = found.unionByName(each.select(*names))
    return found


def _archived(session: SparkSession, place: Archive, files: list[ArchivedFile], schema: Any) -> DataFrame:
    if not files:
        return session.createDataFrame([], schema)
    paths = [os.path.join(place.directory, file.file) for file in files]
    # Spark takes the topic from the directory name. The explicit schema keeps a numeric name a string.
    return session.read.schema(schema).option("basePath", place.directory).parquet(*paths)


def subscription(path: str, topics: Iterable[str] | str | None, pattern: str | None) -> SourceOptions:
    """Return the options for a read of these topics, or of those that match the pattern; default: all."""
    raw = {"path": os.path.abspath(path)}
    if topics is not None:
        names = [topics] if isinstance(topics, str) else list(topics)
        raw["subscribe"] = msgspec.json.encode(names).decode()
    if pattern is not None or topics is None:
        raw["subscribePattern"] = pattern or ".*"
    return source_options(raw, streaming=False)


def _new_bounds(catalog: Catalog, options: SourceOptions, manifests: list[ArchiveManifest]) -> list[Bounds]:
    """Return the unarchived positions of each topic. A recreated topic starts at its earliest record."""
    done = archived_positions(manifests)
    found = []
    for at in catalog.topics(options):
        epoch, seq = done.get(at.topic, (0, 0))
        after = seq if epoch == at.epoch else at.earliest - 1
        if at.head > after:
            found.append(Bounds(at.topic, at.topic_id, at.epoch, after, at.head))
    return found


def _check_disjoint(files: list[ArchivedFile]) -> None:
    """Check that files of one epoch do not overlap: a row would be in the archive twice."""
    for before, after in pairwise(files):
        same = (before.topic, before.epoch) == (after.topic, after.epoch)
        if same and after.first_seq <= before.last_seq:
            raise Internal(
                "two files of one run contain the same records", first=before.file, second=after.file
            )


def _gap(gap: GapRow) -> ArchivedGap:
    return ArchivedGap(gap.topic, gap.epoch, gap.gap_from, gap.gap_to, gap.reason)


def _parallelism(session: SparkSession) -> int:
    return max(int(session.sparkContext.defaultParallelism), 1) if hasattr(session, "_jsc") else 1
