"""verify: read and check every stored frame of a running log; tell what is damaged and what is missing.

Checks go on while the engine works. A frame of a segment is found by the index, so damage hides nothing
behind it; in the log it may. Missing are positions that no stored frame has and nothing accounts for: not
below a floor, not deleted, not lost in a restart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F  # noqa: N812  Spark's own usage
from pyspark.sql.window import Window

from ringlog.clock import SystemClock
from ringlog.errors import CorruptData, NotReady, TopicNotFound
from ringlog.spark.catalog import Catalog
from ringlog.spark.clients import client_of
from ringlog.spark.jobs.archive import subscription
from ringlog.spark.jobs.report import Bound, Progress, Silence, tasks_shown
from ringlog.spark.options import SourceOptions
from ringlog.spark.places import TopicPlaces, places_of, places_of_all
from ringlog.spark.plan import HOT, Bounds, Slice
from ringlog.spark.reading import read_items
from ringlog.spark.views import view_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

FINDINGS_MAX = 1_000
"""Findings that a report lists; it counts all."""
ROWS_MAX = 1_000_000
"""Rows with findings that are looked at."""
_END = "end"


@dataclass(frozen=True, slots=True)
class Damage:
    """A frame or a part of a segment that does not verify. `topic` None: it cannot be told whose it is."""

    topic: str | None
    epoch: int | None
    first_seq: int | None
    last_seq: int | None
    file: str
    offset: int
    fault: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Positions that nothing accounts for, both ends included."""

    topic: str
    epoch: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and what is wrong. `bytes` as stored; `is_whole`: nothing is."""

    bounds: tuple[Bound, ...]
    frames: int
    records: int
    bytes: int
    damaged: int
    damage: tuple[Damage, ...]
    """The first FINDINGS_MAX."""
    missing: tuple[Missing, ...]
    """The first FINDINGS_MAX."""
    missing_positions: int
    is_whole: bool
    seconds: float
    mb_per_s: float


def run(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check these topics (default: all) up to their heads as of now. Changes nothing.

    Raises EngineNotRunning, TopicNotFound for a name that does not exist.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    options = subscription(path, topics, pattern)
    client = client_of(path)
    with Catalog.open(path) as catalog:
        before = list(places_of_all(client, [each.topic for each in catalog.topics(options)]))
    audit = session.read.format("ringlog").options(**raw_options(options), view="audit").load().persist()
    try:
        with tasks_shown(session, progress or Silence(), "verify"):
            found = _totals(audit)
            rows = _findings(session, audit, before).collect()
    finally:
        audit.unpersist()
    damage = [_damage(row) for row in rows if row["fault"] is not None]
    missing = _missing([row for row in rows if row["fault"] is None], before, options)
    seconds = (clock.monotonic_ns() - started) / 1e9
    return VerifyReport(
        tuple(Bound(each.topic, each.epoch, 0, each.head_seq) for each in before), found["frames"],
        found["records"], found["bytes"], found["damaged"], tuple(damage[:FINDINGS_MAX]),
        tuple(missing[:FINDINGS_MAX]),
        sum(each.last_seq - each.first_seq + 1 for each in missing),
        not found["damaged"] and not missing, seconds, found["bytes"] / 1e6 / seconds,
    )  # fmt: skip


def _totals(audit: DataFrame) -> Any:
    """Reads and checks everything; what is asked of `audit` later comes from memory."""
    return audit.agg(
        F.count(F.when(F.col("kind") != "part", 1)).alias("frames"),
        F.coalesce(F.sum("records"), F.lit(0)).alias("records"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("bytes"),
        F.count("fault").alias("damaged"),
    ).collect()[0]


def _findings(session: SparkSession, audit: DataFrame, places: list[TopicPlaces]) -> DataFrame:
    """Faults, and appends before which something is not stored: column `reached` is where the chain broke."""
    ends = session.createDataFrame(
        [
            {"topic": each.topic, "epoch": each.epoch, "first_seq": each.head_seq + 1,
             "last_seq": each.head_seq + 1, "kind": _END}
            for each in places
        ],
        view_schema("audit"),
    )  # fmt: skip
    before = (
        Window.partitionBy("topic", "epoch")
        .orderBy("first_seq", "last_seq")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    reached = F.coalesce(F.max("last_seq").over(before), F.lit(0))
    is_linked = F.col("kind").isin("append", _END) & F.col("topic").isNotNull()
    return (
        audit.unionByName(ends)
        .withColumn("reached", reached)
        .filter(F.col("fault").isNotNull() | (is_linked & (F.col("first_seq") > F.col("reached") + 1)))
        .orderBy("file", "offset")
        .limit(ROWS_MAX)
    )


def _damage(row: Row) -> Damage:
    fields: dict[str, Any] = row.asDict()
    return Damage(**{name: fields[name] for name in Damage.__slots__})


def _missing(rows: list[Row], before: list[TopicPlaces], options: SourceOptions) -> list[Missing]:
    """Those holes that neither what was known before nor what is known now explains, and reading confirms."""
    client = client_of(options.path)
    known = {(each.topic, each.epoch): each for each in before}
    now: dict[str, TopicPlaces | None] = {}
    found: list[Missing] = []
    for row in rows:
        topic, epoch = row["topic"], row["epoch"]
        then = known.get((topic, epoch))
        if then is None:
            continue
        if topic not in now:
            try:
                now[topic] = places_of(client, topic)
            except TopicNotFound:
                now[topic] = None
        after = now[topic]
        if after is None or after.epoch != epoch:
            continue  # Deleted or made anew meanwhile: nothing is missing of it.
        last = min(row["first_seq"] - 1, then.head_seq)
        holes = [
            Missing(topic, epoch, *both)
            for first, stop in then.unexplained(row["reached"] + 1, last)
            for both in after.unexplained(first, stop)
        ]
        whole = Bounds(topic, then.topic_id, epoch, row["reached"], last)
        if holes and not _is_stored(whole, options):
            found += holes
    return found


def _is_stored(bounds: Bounds, options: SourceOptions) -> bool:
    """Can the range be read? Then its frames only moved while we looked."""
    try:
        for _ in read_items([Slice(bounds, 0, HOT)], options):
            continue
    except CorruptData:
        return False
    except NotReady as e:
        # The file that the engine leads to is not there, however often it is asked; a cold store that does
        # not answer is another matter (TI-10).
        if e.detail.get("reason") == "cold_unavailable":
            raise
        return False
    return True


def raw_options(options: SourceOptions) -> dict[str, str]:
    """Path and subscription as options of the data source."""
    raw = {"path": os.path.abspath(options.path)}
    if options.pattern is not None:
        return {**raw, "subscribePattern": options.pattern}
    return {**raw, "subscribe": msgspec.json.encode(list(options.topics)).decode()}
