"""stats: sizes, rates, tags and lag of each topic, from indexes and headers. No payload is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  Spark's own usage

from ringlog.clock import SystemClock
from ringlog.spark.jobs.archive import subscription
from ringlog.spark.jobs.report import SilentProgress, SparkJobProgress, show_task_progress
from ringlog.spark.jobs.tag_source import TagSource
from ringlog.spark.jobs.verify import raw_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TAGS_SHOWN = 10
RECENT_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class TagCount:
    """Number of stored records with a tag, in segments only."""

    tag: str
    records: int


@dataclass(frozen=True, slots=True)
class TopicStats:
    """One topic. Sizes in bytes: `record_bytes` as accounted, others as stored. Times: µs since the epoch."""

    topic: str
    epoch: int
    earliest_seq: int
    head_seq: int
    records: int
    record_bytes: int
    stored_bytes: int
    hot_bytes: int
    cold_bytes: int
    log_bytes: int
    frames: int
    segments: int
    unsealed: int
    """Positions that are only in the log: the lag of the compactor."""
    first_ts: int | None
    last_ts: int | None
    idle_s: float | None
    """Seconds since the last commit."""
    records_per_s: float
    """Average from the first to the last stored commit; 0 if these are at the same time."""
    recent_records_per_s: float
    """Average over the last hour."""
    tags: tuple[TagCount, ...]
    """The most frequent tags."""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """All requested topics, ordered by name."""

    topics: tuple[TopicStats, ...]
    taken_us: int
    seconds: float


def run(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    tags: int = TAGS_SHOWN,
    progress: SparkJobProgress | None = None,
) -> StatsReport:
    """Report on these topics (default: all). Read-only. Raises EngineNotRunning and TopicNotFound."""
    clock = SystemClock()
    started, now_us = clock.monotonic_ns(), clock.now_us()
    raw = raw_options(subscription(path, topics, pattern))

    def view(name: str) -> DataFrame:
        return session.read.format("ringlog").options(**raw, view=name).load()

    with show_task_progress(session, progress or SilentProgress(), "stats"):
        states = view("topics").collect()
        sizes = {row["topic"]: row for row in _sizes(view("frames"), now_us).collect()}
        segments = {
            row["topic"]: row["count"]
            for row in view("segments").select("topic", "segment").groupBy("topic").count().collect()
        }
        by_tag = _tags(session, raw, tags) if tags else {}
    found = tuple(
        _stats(row, sizes.get(row["topic"]), segments, by_tag, now_us)
        for row in sorted(states, key=lambda row: row["topic"])
    )
    return StatsReport(found, now_us, (clock.monotonic_ns() - started) / 1e9)


def _sizes(frames: DataFrame, now_us: int) -> DataFrame:
    recent = F.unix_micros("ts_max") >= now_us - RECENT_US

    def of_tier(*tiers: str) -> Any:
        return F.coalesce(F.sum(F.when(F.col("tier").isin(*tiers), F.col("bytes"))), F.lit(0))

    return frames.groupBy("topic").agg(
        F.count("*").alias("frames"),
        F.sum("bytes").alias("stored"),
        of_tier("hot", "both").alias("hot"),
        of_tier("cold").alias("cold"),
        of_tier("log").alias("log"),
        F.unix_micros(F.min("ts_min")).alias("first_ts"),
        F.unix_micros(F.max("ts_max")).alias("last_ts"),
        F.sum("records").alias("positions"),
        F.coalesce(F.sum(F.when(recent, F.col("records"))), F.lit(0)).alias("recent"),
    )


def _tags(session: SparkSession, raw: dict[str, str], most: int) -> dict[str, tuple[TagCount, ...]]:
    session.dataSource.register(TagSource)
    counted = session.read.format(TagSource.name()).options(**raw).load()
    totals = counted.groupBy("topic", "tag").agg(F.sum("records").alias("records"))
    packed = F.struct(-F.col("records"), "tag")
    rows = totals.groupBy("topic").agg(F.slice(F.sort_array(F.collect_list(packed)), 1, most).alias("tags"))
    found: dict[str, tuple[TagCount, ...]] = defaultdict(tuple)
    for row in rows.collect():
        found[row["topic"]] = tuple(TagCount(tag, -records) for records, tag in row["tags"])
    return found


def _stats(
    state: Any, size: Any, segments: dict[str, int], by_tag: dict[str, tuple[TagCount, ...]], now_us: int
) -> TopicStats:
    topic = state["topic"]
    first, last = (None, None) if size is None else (size["first_ts"], size["last_ts"])
    span_s = 0.0 if first is None else (last - first) / 1e6
    of = dict.fromkeys(("stored", "hot", "cold", "log", "frames", "positions", "recent"), 0)
    if size is not None:
        of |= {name: size[name] for name in of}
    return TopicStats(
        topic=topic,
        epoch=state["epoch"],
        earliest_seq=state["earliest_seq"],
        head_seq=state["head_seq"],
        records=state["records"],
        record_bytes=state["bytes"],
        stored_bytes=of["stored"],
        hot_bytes=of["hot"],
        cold_bytes=of["cold"],
        log_bytes=of["log"],
        frames=of["frames"],
        segments=segments.get(topic, 0),
        unsealed=state["head_seq"] - max(state["sealed_seq"], state["earliest_seq"] - 1),
        first_ts=first,
        last_ts=last,
        idle_s=None if last is None else max(now_us - last, 0) / 1e6,
        records_per_s=of["positions"] / span_s if span_s else 0.0,
        recent_records_per_s=of["recent"] / (RECENT_US / 1e6),
        tags=by_tag.get(topic, ()),
    )
