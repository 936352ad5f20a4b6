"""backfill: write Parquet files to topics, each row once, in order of files and rows, at a limited rate.

The rows of all files, ordered by path, form one sequence. A step writes a range of this sequence.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812  Spark's own usage

from ringlog.clock import SystemClock
from ringlog.spark.clients import client_of
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.archive_files import STATE_DIR, Archive, topic_of
from ringlog.spark.jobs.job_steps import JobStateFile, check_same_options, step_rows, steps
from ringlog.spark.jobs.report import SilentProgress, SparkJobProgress
from ringlog.spark.options import as_text, sink_options
from ringlog.spark.rows import ENGINE_COLUMNS, ROW_COLUMN_TYPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES_MAX = 1_000_000


class BackfillState(msgspec.Struct, frozen=True):
    """Work of a backfill, fixed when it starts."""

    source: str
    to_path: str
    files: tuple[tuple[str, int], ...]
    """Tuples of (path, rows), ordered by path."""
    steps: int
    done: int = 0
    options: dict[str, Any] | None = None
    """Options that decide what the rows become. None: an earlier version started the job, and the options of
    its next run are kept."""


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """Result of a run. `skipped`: steps that an earlier run with this name had written."""

    name: str
    source: str
    files: int
    rows: int
    steps: int
    skipped: int
    seconds: float


def run(
    session: SparkSession,
    path: str,
    source: str,
    *,
    topic: str | None = None,
    columns: Mapping[str, str] | None = None,
    name: str | None = None,
    rate: float | None = None,
    sink: Mapping[str, Any] | None = None,
    progress: SparkJobProgress | None = None,
) -> BackfillReport:
    """Write the rows of Parquet files to topics.

    Args:
        session: session with the source registered.
        path: data directory to write to.
        source: a Parquet file, a directory, or an archive of the archive job.
        topic: target topic. Without it, the rows need a column `topic`; an archive has the topic in its
            directories.
        columns: record columns as SQL expressions: {"payload": "to_json(struct(*))", "key": "id"}. Default:
            all columns whose names are columns of records. An archive's seqs and commit times are not copied.
        name: name of the job. A repeated run with this name continues it; source, topic and columns must be
            the same, rate and the other options of the sink may differ.
        rate: maximum rows per second.
        sink: further options of the sink.
        progress: receives the progress of the job.

    Returns:
        What the job wrote.

    Raises:
        OptionError: an option or the source is invalid, or the name was used with other options.
        EngineNotRunning: no engine runs on `path`.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    path, source = os.path.abspath(path), os.path.abspath(source)
    client_of(path)
    written = as_text({"createTopics": True, **({"topic": topic} if topic else {}), **(sink or {})})
    options = {"topic": sink_options({**written, "path": path}).topic, "columns": dict(columns or {})}
    kept = JobStateFile(path, "backfill", name)
    state = kept.load(BackfillState)
    if state is None:
        files = tuple((each, pq.read_metadata(each).num_rows) for each in _files(source))
        total = sum(rows for _, rows in files)
        state = BackfillState(source, path, files, -(-total // step_rows(rate)))
    check_same_options(
        {"source": state.source, "to_path": state.to_path, **(state.options or {})},
        {"source": source, "to_path": path, **options},
    )
    if state.options is None:
        state = msgspec.structs.replace(state, options=options)
        kept.save(state)
    work = _StepRanges(state, source)
    skipped = state.done
    for step in steps(state.done, state.steps, work.size, rate, progress or SilentProgress(), "backfill"):
        rows = _records(work.step(session, step), topic, columns)
        rows.write.format("ringlog").mode("append").options(
            **written, path=path, txnAppId=kept.app_id, txnVersion=str(step)
        ).save()
        state = msgspec.structs.replace(state, done=step + 1)
        kept.save(state)
    return BackfillReport(
        kept.name, source, len(state.files), work.total, state.steps, skipped,
        (clock.monotonic_ns() - started) / 1e9,
    )  # fmt: skip


class _StepRanges:
    """Maps steps to ranges of the rows of all files."""

    def __init__(self, state: BackfillState, source: str) -> None:
        self._state, self._source = state, source
        self._stops = list(accumulate(rows for _, rows in state.files))
        self.total = self._stops[-1] if self._stops else 0

    def size(self, step: int) -> int:
        """Return the number of rows in a step."""
        low, high = self._range(step)
        return high - low

    def step(self, session: SparkSession, step: int) -> DataFrame:
        """Return the rows of a step, in order."""
        low, high = self._range(step)
        first, last = bisect_right(self._stops, low), bisect_right(self._stops, high - 1)
        paths = [path for path, _ in self._state.files[first : last + 1]]
        files = session.read.parquet(*paths)
        # Spark formats paths as URLs in its own way, so look up the spelling in its own list.
        spelled = {unquote(urlsplit(url).path): urlsplit(url).path for url in files.inputFiles()}
        starts = [stop - rows for stop, (_, rows) in zip(self._stops, self._state.files, strict=True)]
        bases = [(spelled[path], starts[first + i]) for i, path in enumerate(paths)]
        file_bases = session.createDataFrame(bases, "file_path string, base long")
        # One Spark API returns file:///x, the other file:/x.
        path = F.regexp_replace("_metadata.file_path", "^file:/+", "/").alias("file_path")
        frame = files.select("*", path, "_metadata.row_index")
        unknown = F.raise_error(F.concat(F.lit("not a file of this job: "), "file_path")).cast("long")
        base = F.coalesce("base", unknown)
        placed = frame.join(F.broadcast(file_bases), "file_path", "left").withColumn(
            "place", base + F.col("row_index")
        )
        chosen = placed.filter((F.col("place") >= low) & (F.col("place") < high)).orderBy("place")
        if os.path.isdir(os.path.join(self._source, STATE_DIR)):
            owners = {spelled[path]: topic_of(os.path.relpath(path, self._source)) for path in paths}
            names = F.create_map(*[F.lit(each) for pair in owners.items() for each in pair])
            chosen = chosen.withColumn("topic", names[F.col("file_path")])
        return chosen.drop("file_path", "row_index", "base", "place")

    def _range(self, step: int) -> tuple[int, int]:
        steps_all = self._state.steps
        return self.total * step // steps_all, self.total * (step + 1) // steps_all


def _files(source: str) -> list[str]:
    """Return the Parquet files ordered by path; for an archive, only its committed files."""
    if os.path.isfile(source):
        return [source]
    if not os.path.isdir(source):
        raise OptionError("source must be an existing file or directory", option="source", found=source)
    if os.path.isdir(os.path.join(source, STATE_DIR)):
        listed = [file for each in Archive(source).manifests() for file in each.files]
        listed.sort(key=lambda file: (file.topic, file.epoch, file.first_seq))
        return [os.path.join(source, file.file) for file in listed]
    found = sorted(str(file) for file in Path(source).rglob("*.parquet") if not _is_hidden(file, source))
    if not found or len(found) > FILES_MAX:
        raise OptionError(
            f"source must contain 1 to {FILES_MAX:,} Parquet files",
            found=len(found),
            max=FILES_MAX,
            source=source,
        )
    return found


def _is_hidden(file: Path, source: str) -> bool:
    return any(part.startswith(("_", ".")) for part in file.relative_to(source).parts)


def _records(rows: DataFrame, topic: str | None, columns: Mapping[str, str] | None) -> DataFrame:
    """Select the columns that the sink accepts."""
    if columns:
        return rows.select(*[F.expr(text).alias(name) for name, text in columns.items()])
    names: Iterable[str] = [
        name for name in rows.columns if name in ROW_COLUMN_TYPES and (name != "topic" or not topic)
    ]
    if not {"payload", "value"} & set(names):
        raise OptionError(
            "the files have no column payload: define one with columns, such as columns={'payload': "
            "'to_json(struct(*))'}", columns=rows.columns, assigned=list(ENGINE_COLUMNS),
        )  # fmt: skip
    return rows.select(*names)
