"""`ringlog spark <job>`: the data pipeline. Needs the extra `spark`; nothing of it is loaded before a job
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import Format
from ringlog.cli.places import human_bytes
from ringlog.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ringlog.spark.jobs.report import Progress

Given = Annotated[Options, Parameter(parse=False)]
Flag = Annotated[bool, Parameter(negative=())]
Names = Annotated[list[str] | None, Parameter(negative=())]
MISSING = "this command needs PySpark, which is not installed: pip install 'ringlog[spark]'"
LOCAL = "local[*]"


def require_spark() -> None:
    """Raise UsageError naming the extra where PySpark is missing."""
    from importlib.util import find_spec

    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise UsageError(MISSING, extra="spark")


@contextmanager
def _at_work(options: Options, master: str, packages: str = "") -> Iterator[tuple[SparkSession, Progress]]:
    """A session for one job, and where it shows how far it is."""
    require_spark()
    from ringlog.spark import session
    from ringlog.spark.jobs.report import progress

    config: dict[str, Any] = {"spark.ui.enabled": False, "spark.ui.showConsoleProgress": False}
    if packages:
        config["spark.jars.packages"] = packages
    from pyspark import SparkContext

    # Called by a program that has a session already, the command uses it and leaves it running.
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
    """The report as one object; for people its `lists` as tables before the rest."""
    from ringlog.spark.jobs.report import facts_of

    facts, printer = facts_of(report), options.printer()
    if printer.format is Format.TABLE:
        for name in lists:
            rows = facts.pop(name)
            if rows:
                printer.say(f"{name}:")
                printer.rows(rows)
                printer.say("")
        for name in [name for name in facts if name == "bytes" or name.endswith("_bytes")]:
            facts[name] = human_bytes(facts[name])
    printer.thing(facts)


def _pairs(given: list[str] | None, what: str) -> dict[str, Any]:
    """`name=value` arguments."""
    found: dict[str, Any] = dict(each.partition("=")[::2] for each in given or [])
    if any("=" not in each for each in given or []):
        raise UsageError(f"{what} is name=value", found=given)
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
    """Write topics into Parquet by topic and date; the next run goes on where this one ends.

    Parameters
    ----------
    path
        The data directory of a running engine.
    to
        The archive: a directory, made if its parent is there.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    allow_loss
        Go on when records were lost before they were archived; the report names them.
    codec
        zstd, snappy, lz4, gzip or none.
    master
        Where Spark runs.
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import archive as job

        if codec not in job.CODECS:
            raise UsageError("--codec is one of " + ", ".join(job.CODECS), found=codec)
        report = job.run(
            spark, path, to, topic, pattern=pattern, fail_on_data_loss=not allow_loss, codec=codec,
            progress=shown,
        )  # fmt: skip
    _print(options, report, ("bounds", "gaps"))
    return Exit.DONE


def verify(
    path: str, *, topic: Names = None, pattern: str | None = None, master: str = LOCAL, options: Given
) -> int:
    """Read and check every stored frame while the engine runs; exit status 6 for damage.

    Parameters
    ----------
    path
        The data directory of a running engine.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    master
        Where Spark runs.
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import verify as job

        report = job.run(spark, path, topic, pattern=pattern, progress=shown)
    _print(options, report, ("bounds", "damage", "missing"))
    return Exit.DONE if report.is_whole else Exit.DAMAGE


def stats(
    path: str, *, topic: Names = None, pattern: str | None = None, tags: int = 10, master: str = LOCAL,
    options: Given,
) -> int:  # fmt: skip
    """Sizes, rates, tags and lag of topics, from indexes alone.

    Parameters
    ----------
    path
        The data directory of a running engine.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    tags
        How many of the most frequent tags to list; 0 = none.
    master
        Where Spark runs.
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import stats as job

        report = job.run(spark, path, topic, pattern=pattern, tags=tags, progress=shown)
    _print(options, report, ("topics",))
    return Exit.DONE


def compact(
    path: str,
    *,
    topic: Names = None,
    pattern: str | None = None,
    tag: Names = None,
    older_than: str | None = None,
    apply: Flag = False,
    out: str | None = None,
    master: str = LOCAL,
    options: Given,
) -> int:
    """Propose records to delete, by tag, age or both, as ranges; delete them with --apply.

    Parameters
    ----------
    path
        The data directory of a running engine.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    tag
        Records with this tag, or with one that begins like `prefix*`; may be given several times.
    older_than
        Records committed before: a time (2026-01-31T12:00:00Z, epoch milliseconds), or an age (90s, 12h,
        30d).
    apply
        Delete them. There is no way back.
    out
        Write all ranges into this directory, as JSON lines.
    master
        Where Spark runs.
    """
    before_us = None if older_than is None else _moment(older_than, options)
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import compact as job

        report = job.run(
            spark, path, topic, pattern=pattern, tags=tag or (), older_than_us=before_us, apply=apply,
            out=out, progress=shown,
        )  # fmt: skip
    _print(options, report, ("proposals",))
    return Exit.DONE


AGES = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _moment(text: str, options: Options) -> int:
    """Microseconds since the epoch of a time, or of an age before now."""
    from ringlog.spark.option_values import time_us

    if text[-1:] in AGES and text[:-1].isascii() and text[:-1].isdigit():
        return options.clock.now_us() - int(text[:-1]) * AGES[text[-1]] * 1_000_000
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
    rate: float | None = None,
    source: Names = None,
    sink: Names = None,
    master: str = LOCAL,
    options: Given,
) -> int:
    """Write records of topics into other topics, each once; run again by its name, it goes on.

    Parameters
    ----------
    path
        The data directory of a running engine.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    to
        One topic for everything.
    prefix, suffix
        Or: topics named like their sources, with these around.
    to_path
        Another data directory on this host.
    name
        The job's name; without one it gets a new one, which the report tells.
    rate
        Records a second at most.
    source
        Further options of the source, name=value: startingTimestamp=…, tags=….
    sink
        Further options of the sink, name=value: durability=fsync, createTopics=false.
    master
        Where Spark runs.
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import replay as job

        report = job.run(
            spark, path, topic, pattern=pattern, to=to, prefix=prefix, suffix=suffix, to_path=to_path,
            name=name, rate=rate, sink=_pairs(sink, "--sink"), progress=shown, **_pairs(source, "--source"),
        )  # fmt: skip
    _print(options, report, ("bounds",))
    return Exit.DONE


def backfill(
    path: str,
    source: str,
    *,
    topic: str | None = None,
    column: Names = None,
    name: str | None = None,
    rate: float | None = None,
    sink: Names = None,
    master: str = LOCAL,
    options: Given,
) -> int:
    """Write Parquet into topics, each row once; run again by its name, it goes on.

    Parameters
    ----------
    path
        The data directory of a running engine.
    source
        A Parquet file, a directory of them, or an archive.
    topic
        Where to; without it the column `topic` says so.
    column
        A column of the records as an SQL expression: payload=to_json(struct(*)); may be given several times.
    name
        The job's name; without one it gets a new one, which the report tells.
    rate
        Rows a second at most.
    sink
        Further options of the sink, name=value.
    master
        Where Spark runs.
    """
    with _at_work(options, master) as (spark, shown):
        from ringlog.spark.jobs import backfill as job

        report = job.run(
            spark, path, source, topic=topic, columns=_pairs(column, "--column") or None, name=name,
            rate=rate, sink=_pairs(sink, "--sink"), progress=shown,
        )  # fmt: skip
    _print(options, report)
    return Exit.DONE


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
    """Stream topics into a Spark sink: Parquet, Delta, Iceberg, Kafka. With --interval it goes on for ever.

    Parameters
    ----------
    path
        The data directory of a running engine.
    checkpoint
        Where Spark keeps how far it is; the same one again goes on there.
    topic
        Which one; may be given several times (default: all).
    pattern
        Or all whose name matches this regular expression.
    format
        parquet, delta, iceberg, kafka, or another sink's name.
    target
        Directory, or name of a table; of kafka one topic for everything.
    option
        Options of the sink, name=value: kafka.bootstrap.servers=localhost:9092.
    source
        Options of the source, name=value: maxOffsetsPerTrigger=100000.
    partition_by
        Columns that directories are made by.
    topic_prefix
        Of kafka: put before names of topics.
    interval
        Time between batches, such as "10 seconds"; without it the job ends when all has arrived.
    packages
        Maven coordinates of the sink, comma list.
    master
        Where Spark runs.
    """
    with _at_work(options, master, packages) as (spark, shown):
        from ringlog.spark.jobs import mirror as job

        report = job.run(
            spark, path, topic, pattern=pattern, checkpoint=checkpoint, format=format, target=target,
            options=_pairs(option, "--option"), partition_by=partition_by or (), topic_prefix=topic_prefix,
            interval=interval, progress=shown, **_pairs(source, "--source"),
        )  # fmt: skip
    _print(options, report)
    return Exit.DONE


def recover(path: str, *, staging_dir: str | None = None, create_topics: Flag = False, options: Given) -> int:
    """Finish writes whose driver died in the middle. Starts no Spark.

    Parameters
    ----------
    path
        The data directory of a running engine.
    staging_dir
        Where the writes were staged, if not beside the data.
    create_topics
        Make topics that are absent, as the write was told to.
    """
    require_spark()
    from ringlog.spark.jobs import recover as job

    report = job.run(None, path, staging_dir=staging_dir, create_topics=create_topics)
    _print(options, report, ("plans",))
    return Exit.DONE
