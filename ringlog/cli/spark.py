"""`ringlog spark <job>`: Spark jobs over topics. Imports the extra `spark` when a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.confirm import needs_confirmation, require_confirmation
from ringlog.cli.option_parsing import Rate, human_bytes, parse_seq
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import Format
from ringlog.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ringlog.spark.jobs.report import SparkJobProgress

Given = Annotated[Options, Parameter(parse=False)]
Flag = Annotated[bool, Parameter(negative=())]
Names = Annotated[list[str] | None, Parameter(negative=())]
MISSING = "this command needs PySpark, which is not installed: pip install 'ringlog[spark]'"
LOCAL = "local[*]"


def require_spark() -> None:
    """Raise UsageError with the name of the extra if PySpark is not installed."""
    from importlib.util import find_spec

    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise UsageError(MISSING, extra="spark")


@contextmanager
def _at_work(
    options: Options, master: str, packages: str = ""
) -> Iterator[tuple[SparkSession, SparkJobProgress]]:
    """Yield a session for one job, and its progress display."""
    require_spark()
    from ringlog.spark import session
    from ringlog.spark.jobs.report import progress

    config: dict[str, Any] = {"spark.ui.enabled": False, "spark.ui.showConsoleProgress": False}
    if packages:
        config["spark.jars.packages"] = packages
    from pyspark import SparkContext

    # In a program that already has a session, the command uses that session and does not stop it.
    is_ours = SparkContext._active_spark_context is None
    with progress(options.shows_progress) as shown:
        spark = session("ringlog", master=master, config=config)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield spark, shown
        finally:
            if is_ours:
                spark.stop()


def _print(options: Options, report: Any, lists: tuple[str, ...] = ()) -> None:
    """Print the report as one object; in table format, print its `lists` first, as tables."""
    from ringlog.spark.jobs.report import facts_of

    facts, printer = facts_of(report), options.printer()
    if printer.format is Format.TABLE:
        for name in lists:
            rows = facts.pop(name)
            if rows:
                printer.caption(f"{name}:")
                printer.rows(rows)
                printer.caption("")
        for name in [name for name in facts if name == "bytes" or name.endswith("_bytes")]:
            facts[name] = human_bytes(facts[name])
    printer.item(facts)


def _pairs(given: list[str] | None, what: str) -> dict[str, Any]:
    """Parse `name=value` arguments; raise UsageError."""
    found: dict[str, Any] = dict(each.partition("=")[::2] for each in given or [])
    if any("=" not in each for each in given or []):
        raise UsageError(f"{what} must be name=value, got {given}")
    return found


def archive(
    path: str,
    to: str,
    *,
    topic: Names = None,
    pattern: str | None = None,
    allow_loss: Flag = False,
    codec: str = "zstd",
    master: str = LOCAL,
    options: Given,
) -> int:
    """Archive topics as Parquet files by topic and date.

    A repeated run continues where the previous run ended.

    Parameters
    ----------
    path
        Data directory of a running engine.
    to
        Directory of the archive; its parent must exist.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    allow_loss
        Continue if records were lost before they were archived; the report lists them.
    codec
        Compression: zstd, snappy, lz4, gzip or none.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark archive ./ringlog-data ./archive --topic orders
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import archive as job

        if codec not in job.CODECS:
            raise UsageError(f"--codec must be one of {', '.join(job.CODECS)}, got {codec!r}")
        report = job.run(
            spark, path, to, topic, pattern=pattern, fail_on_data_loss=not allow_loss, codec=codec,
            progress=shown,
        )  # fmt: skip
    _print(options, report, ("bounds", "gaps"))
    return CliExit.DONE


def verify(
    path: str, *, topic: Names = None, pattern: str | None = None, master: str = LOCAL, options: Given
) -> int:
    """Verify every stored frame while the engine runs.

    Exit code 6: damage found.

    Parameters
    ----------
    path
        Data directory of a running engine.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark verify ./ringlog-data
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import verify as job

        report = job.run(spark, path, topic, pattern=pattern, progress=shown)
    _print(options, report, ("bounds", "damage", "missing"))
    return CliExit.DONE if report.is_whole else CliExit.DAMAGE


def stats(
    path: str, *, topic: Names = None, pattern: str | None = None, tags: int = 10, master: str = LOCAL,
    options: Given,
) -> int:  # fmt: skip
    """Show sizes, rates, tags and lag of topics, from indexes alone.

    Parameters
    ----------
    path
        Data directory of a running engine.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    tags
        Number of the most frequent tags to list; 0 = none.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark stats ./ringlog-data --tags 5
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import stats as job

        report = job.run(spark, path, topic, pattern=pattern, tags=tags, progress=shown)
    _print(options, report, ("topics",))
    return CliExit.DONE


def compact(
    path: str,
    *,
    topic: Names = None,
    pattern: str | None = None,
    tag: Names = None,
    older_than: str | None = None,
    apply: Flag = False,
    out: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    master: str = LOCAL,
    options: Given,
) -> int:
    """List records to delete by tag or age; delete them with --apply.

    Parameters
    ----------
    path
        Data directory of a running engine.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    tag
        Select only records with this tag; a final * matches any ending. May be given several times.
    older_than
        Select only records committed before a time (2026-01-31T12:00:00Z, epoch milliseconds) or before an
        age (90s, 12h, 30d).
    apply
        Delete the records. This cannot be undone.
    out
        Directory for all ranges, written as JSON lines.
    master
        Spark master URL.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog spark compact ./ringlog-data --topic orders --older-than 30d
    ringlog spark compact ./ringlog-data --topic orders --older-than 30d --apply --yes
    """
    before_us = None if older_than is None else _moment(older_than, options)
    if apply and needs_confirmation(yes=yes):
        require_confirmation(f"Delete the matching records of the topics in {path}?")
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import compact as job

        report = job.run(
            spark, path, topic, pattern=pattern, tags=tag or (), older_than_us=before_us, apply=apply,
            out=out, progress=shown,
        )  # fmt: skip
    _print(options, report, ("proposals",))
    return CliExit.DONE


AGES = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _moment(text: str, options: Options) -> int:
    """Convert a time, or an age before now, to microseconds since the epoch."""
    from ringlog.spark.option_values import time_us

    if text[-1:] in AGES and (count := parse_seq(text[:-1])) is not None:
        return max(options.clock.now_us() - count * AGES[text[-1]] * 1_000_000, 0)
    return time_us("--older-than", text)


def replay(
    path: str,
    *,
    topic: Names = None,
    pattern: str | None = None,
    to: str | None = None,
    prefix: str = "",
    suffix: str = "",
    to_path: str | None = None,
    name: str | None = None,
    rate: Rate | None = None,
    source: Names = None,
    sink: Names = None,
    master: str = LOCAL,
    options: Given,
) -> int:
    """Copy records of topics into other topics, each once.

    Parameters
    ----------
    path
        Data directory of a running engine.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    to
        Destination topic of all records.
    prefix
        Prefix of destination topics that are named like their source.
    suffix
        Suffix of destination topics that are named like their source.
    to_path
        Data directory of another engine on this host.
    name
        Name of the job; a run with the same name continues it (default: a new name, printed in the report).
    rate
        Maximum number of records per second.
    source
        Option of the source as name=value, such as startingTimestamp or startingOffsets (the first record,
        inclusive).
    sink
        Option of the sink as name=value, such as durability=fsync.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark replay ./ringlog-data --topic orders --to orders.copy --name copy-1
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import replay as job

        report = job.run(
            spark, path, topic, pattern=pattern, to=to, prefix=prefix, suffix=suffix, to_path=to_path,
            name=name, rate=rate, sink=_pairs(sink, "--sink"), progress=shown, **_pairs(source, "--source"),
        )  # fmt: skip
    _print(options, report, ("bounds",))
    return CliExit.DONE


def backfill(
    path: str,
    source: str,
    *,
    topic: str | None = None,
    column: Names = None,
    name: str | None = None,
    rate: Rate | None = None,
    sink: Names = None,
    master: str = LOCAL,
    options: Given,
) -> int:
    """Write Parquet files into topics, each row once.

    Parameters
    ----------
    path
        Data directory of a running engine.
    source
        Parquet file, directory of Parquet files, or archive.
    topic
        Destination topic (default: the column `topic`).
    column
        Column of the records as an SQL expression: payload=to_json(struct(*)). May be given several times.
    name
        Name of the job; a run with the same name continues it (default: a new name, printed in the report).
    rate
        Maximum number of rows per second.
    sink
        Option of the sink as name=value.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark backfill ./ringlog-data ./archive --name restore-1
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import backfill as job

        report = job.run(
            spark, path, source, topic=topic, columns=_pairs(column, "--column") or None, name=name,
            rate=rate, sink=_pairs(sink, "--sink"), progress=shown,
        )  # fmt: skip
    _print(options, report)
    return CliExit.DONE


def mirror(
    path: str,
    *,
    checkpoint: str,
    topic: Names = None,
    pattern: str | None = None,
    format: str = "parquet",
    target: str | None = None,
    option: Names = None,
    source: Names = None,
    partition_by: Names = None,
    topic_prefix: str = "",
    interval: str | None = None,
    packages: str = "",
    master: str = LOCAL,
    options: Given,
) -> int:
    """Stream topics into a Spark sink: Parquet, Delta, Iceberg or Kafka.

    With --interval it runs until interrupted.

    Parameters
    ----------
    path
        Data directory of a running engine.
    checkpoint
        Checkpoint directory; a run with the same one continues where the previous run ended.
    topic
        Topic name; may be given several times (default: all topics).
    pattern
        Regular expression: all topics whose name matches it.
    format
        Format of the sink: parquet, delta, iceberg, kafka, or the name of another sink.
    target
        Directory or table name; for kafka, one topic for all records.
    option
        Option of the sink as name=value, such as kafka.bootstrap.servers=localhost:9092.
    source
        Option of the source as name=value, such as startingOffsets (the first record, inclusive) or
        maxOffsetsPerTrigger.
    partition_by
        Columns to partition directories by.
    topic_prefix
        Prefix of topic names in kafka.
    interval
        Time between batches, such as '10 seconds' (default: end when all current records are copied).
    packages
        Maven coordinates of the sink, separated by commas.
    master
        Spark master URL.

    Examples
    --------
    ringlog spark mirror ./ringlog-data --checkpoint ./mirror-state --topic orders --target ./mirror
    """
    with _at_work(options, master, packages) as (spark, shown):
        from ringlog.spark.jobs import mirror as job

        report = job.run(
            spark, path, topic, pattern=pattern, checkpoint=checkpoint, format=format, target=target,
            options=_pairs(option, "--option"), partition_by=partition_by or (), topic_prefix=topic_prefix,
            interval=interval, progress=shown, **_pairs(source, "--source"),
        )  # fmt: skip
    _print(options, report)
    return CliExit.DONE


def recover(path: str, *, staging_dir: str | None = None, create_topics: Flag = False, options: Given) -> int:
    """Finish writes whose driver failed before the commit.

    Does not start Spark. A write that cannot be finished is listed, and the others are finished. Exit code 1:
    a write is left unfinished.

    Parameters
    ----------
    path
        Data directory of a running engine.
    staging_dir
        Staging directory of the writes, if it is not in the data directory.
    create_topics
        Create missing topics; use it if the write did.

    Examples
    --------
    ringlog spark recover ./ringlog-data
    """
    require_spark()
    from ringlog.spark.jobs import recover as job

    report = job.run(None, path, staging_dir=staging_dir, create_topics=create_topics)
    _print(options, report, ("plans", "failed"))
    return CliExit.FAILED if report.failed else CliExit.DONE


def discard(
    path: str,
    writer: str,
    batch: int,
    *,
    staging_dir: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    options: Given,
) -> int:
    """Give up a write that cannot be finished.

    Use it if `recover` lists a write whose cause cannot be removed: later batches of the same query or
    txnAppId wait for it. If nothing of the batch was appended, the batch is forgotten and can be written
    again. Otherwise it counts as written, and rows that were not appended are lost. Does not start Spark.

    Parameters
    ----------
    path
        Data directory of a running engine.
    writer
        Id of the writer, from `recover`.
    batch
        Batch or txnVersion of the write, from `recover`.
    staging_dir
        Staging directory of the write, if it is not in the data directory.
    yes
        Do not ask for confirmation. Required without a terminal.

    Examples
    --------
    ringlog spark discard ./ringlog-data 45d8c9b761e2c907 3 --yes
    """
    require_spark()
    from ringlog.spark.jobs import discard as job

    if needs_confirmation(yes=yes):
        require_confirmation(f"Give up batch {batch} of writer {writer} in {path}?")
    report = job.run(None, path, writer, batch, staging_dir=staging_dir)
    _print(options, report, ("topics",))
    return CliExit.DONE
