"""mirror: stream topics to any Spark sink: Parquet, Delta, Iceberg, Kafka, …

The delivery guarantee depends on the sink. Spark's file sinks, Delta and Iceberg write each batch of a
checkpoint once. Kafka receives a batch again after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  Spark's own usage

from ringlog.clock import SystemClock
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.report import SilentProgress, SparkJobProgress
from ringlog.spark.options import as_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

KAFKA = "kafka"
POLL_INTERVAL_S = 1
TABLES = frozenset({"iceberg"})
"""Formats whose target is the name of a table."""


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """Result of a run.

    `offset` is the position of the stream: JSON as in its checkpoint; None: no batch yet.
    """

    format: str
    checkpoint: str
    batches: int
    rows: int
    offset: str | None
    seconds: float


def run(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    checkpoint: str,
    format: str = "parquet",
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    partition_by: Iterable[str] = (),
    topic_prefix: str = "",
    interval: str | None = None,
    for_s: float | None = None,
    progress: SparkJobProgress | None = None,
    **source: Any,
) -> MirrorReport:
    """Mirror topics until all current records are written, or continuously with `interval`.

    A run with the same checkpoint continues at its end.

    Args:
        session: session with the source registered.
        path: data directory of the engine.
        topics: topic names; default: all topics, or those that match `pattern`.
        pattern: regular expression for topic names.
        checkpoint: checkpoint directory of the query.
        format: format of the sink.
        target: directory or table name; for Kafka the topic for all records (default:
            `<topic_prefix><topic>`).
        options: options of the sink.
        partition_by: columns to partition the output by.
        topic_prefix: prefix of Kafka topics.
        interval: trigger interval of a continuous run, such as "10 seconds".
        for_s: duration of a continuous run in seconds; default: unlimited.
        progress: receives the progress of the job.
        **source: options of the source (startingOffsets, maxOffsetsPerTrigger, …). The default start is the
            earliest record.

    Returns:
        What the job wrote.

    Raises:
        OptionError: an option is invalid or missing. The error that ended the query is raised unchanged.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    frame = stream(
        session, path, topics, pattern=pattern, is_kafka=format == KAFKA, target=target,
        topic_prefix=topic_prefix, **source,
    )  # fmt: skip
    writer = (
        frame.writeStream.format(format)
        .option("checkpointLocation", checkpoint)
        .options(**{name: str(value) for name, value in (options or {}).items()})
    )
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer = writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)
    if format == KAFKA:
        query = writer.start()
    elif target is None:
        raise OptionError("target is required: a directory or a table name", option="target", format=format)
    else:
        query = writer.toTable(target) if format in TABLES else writer.start(target)
    batches, rows, offset = _watch(query, for_s if interval else None, progress or SilentProgress())
    return MirrorReport(format, checkpoint, batches, rows, offset, (clock.monotonic_ns() - started) / 1e9)


def stream(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    is_kafka: bool = False,
    target: str | None = None,
    topic_prefix: str = "",
    **source: Any,
) -> DataFrame:
    """Return the stream that `run` writes; with `is_kafka`, in the columns of Spark's Kafka sink."""
    given: dict[str, Any] = {"startingOffsets": "earliest", "includeHeaders": True, **source, "path": path}
    if topics is not None:
        given["subscribe"] = [topics] if isinstance(topics, str) else list(topics)
    else:
        given["subscribePattern"] = pattern or ".*"
    if is_kafka:
        given["layout"] = KAFKA
    frame = session.readStream.format("ringlog").options(**as_text(given)).load()
    if not is_kafka:
        return frame
    name = F.lit(target) if target is not None else F.concat(F.lit(topic_prefix), F.col("topic"))
    return frame.select("key", "value", "headers", name.alias("topic"))


def _watch(
    query: StreamingQuery, for_s: float | None, shown: SparkJobProgress
) -> tuple[int, int, str | None]:
    """Wait for the end of the query; return (batches with rows, rows, last end offset).

    A continuous query is stopped after `for_s` seconds.
    """
    clock = SystemClock()
    until = None if for_s is None else clock.monotonic_ns() + int(for_s * 1e9)
    seen: dict[int, int] = {}
    offset: str | None = None
    is_ended = False
    try:
        while not is_ended:
            is_ended = bool(query.awaitTermination(POLL_INTERVAL_S))
            # Spark keeps the last 100 batches. One poll per second misses none if batches take over 10 ms.
            for each in query.recentProgress:
                if each["numInputRows"]:
                    seen[each["batchId"]] = each["numInputRows"]
                    offset = each["sources"][0]["endOffset"]
            shown.show("mirror: rows", sum(seen.values()), 0)
            if until is not None and clock.monotonic_ns() >= until:
                break
    finally:
        query.stop()
    return len(seen), sum(seen.values()), offset
