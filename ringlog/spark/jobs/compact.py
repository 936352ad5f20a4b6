"""compact: list records to delete, by tag or age, as seq ranges; delete them through the engine on request.

Spark never rewrites a segment. A proposal is a list of positions. Its application is an ordinary delete; the
reclaimer then frees the space. Records are immutable, and a proposal is bounded by the head at its creation.
So a later or repeated application deletes exactly the listed records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  Spark's own usage
from pyspark.sql.window import Window

from ringlog.clock import SystemClock
from ringlog.errors import StaleEpoch
from ringlog.spark.catalog import Catalog, TopicState
from ringlog.spark.clients import client_of
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.archive import subscription
from ringlog.spark.jobs.report import SilentProgress, SparkJobProgress, show_task_progress
from ringlog.spark.sessions import read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RANGES_SHOWN = 1_000
"""Ranges per topic that a report lists. `out` contains all of them."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Records of one epoch that may be deleted: below `before_seq`, with a tag that matches `tags`."""

    topic: str
    epoch: int
    before_seq: int
    tags: tuple[str, ...]
    """Exact tags, and prefixes that end in `*`; empty: any tag."""
    records: int
    """Number of live records."""
    ranges: tuple[tuple[int, int], ...]
    """Inclusive runs of such records; the first RANGES_SHOWN."""
    ranges_total: int


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Proposals, and the number of records that were deleted."""

    proposals: tuple[Proposal, ...]
    records: int
    applied: bool
    deleted: int
    seconds: float


def run(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    tags: Sequence[str] = (),
    older_than_us: int | None = None,
    apply: bool = False,
    out: str | None = None,
    progress: SparkJobProgress | None = None,
) -> CompactReport:
    """Find records that have one of these tags, or were committed before a time, or both.

    Args:
        session: session with the source registered.
        path: data directory of the engine.
        topics: topic names; default: all topics, or those that match `pattern`.
        pattern: regular expression for topic names.
        tags: exact tags, and prefixes `prefix*`.
        older_than_us: commit time in microseconds since the epoch.
        apply: delete the records.
        out: directory for all ranges, as JSON lines of (topic, epoch, first_seq, last_seq, records).
        progress: receives the progress of the job.

    Returns:
        The records that were found, and whether they were deleted.

    Raises:
        OptionError: neither tags nor a time is given.
        StaleEpoch: a topic was recreated after the proposal (only with `apply`).
        EngineNotRunning, TopicNotFound: the engine or a topic does not exist.
    """
    if not tags and older_than_us is None:
        raise OptionError("set tags, older_than_us, or both", option="tags")
    clock = SystemClock()
    started = clock.monotonic_ns()
    with Catalog.open(path) as catalog:
        found = catalog.topics(subscription(path, topics, pattern))
        bounds = [(at, _before(catalog, at, older_than_us)) for at in found]
    wanted = [(at, before) for at, before in bounds if before > at.earliest]
    proposals: tuple[Proposal, ...] = ()
    if wanted:
        ranges = _ranges(session, path, wanted, tags).cache()
        try:
            with show_task_progress(session, progress or SilentProgress(), "compact"):
                proposals = _proposals(ranges, wanted, tuple(tags))
                if out is not None:
                    ranges.write.mode("overwrite").json(out)
        finally:
            ranges.unpersist()
    deleted = sum(_apply(path, each) for each in proposals) if apply else 0
    total = sum(each.records for each in proposals)
    return CompactReport(proposals, total, apply, deleted, (clock.monotonic_ns() - started) / 1e9)


def _before(catalog: Catalog, at: TopicState, older_than_us: int | None) -> int:
    """Return the first position to keep."""
    if older_than_us is None:
        return at.head + 1
    position = catalog.position_at(at.topic, older_than_us)
    return at.head + 1 if position is None else min(position, at.head) + 1


def _ranges(
    session: SparkSession, path: str, wanted: list[tuple[TopicState, int]], tags: Sequence[str]
) -> DataFrame:
    """Return (topic, epoch, first_seq, last_seq, records) of each run of matching live records."""
    options: dict[str, Any] = {"endingOffsets": {at.topic: before for at, before in wanted}}
    if tags:
        options["tags"] = list(tags)
    columns = ["topic", "epoch", "seq"]
    # Lost records cannot be deleted, so a loss is no reason to fail.
    options["failOnDataLoss"] = False
    rows = read(session, [at.topic for at, _ in wanted], path=path, columns=columns, **options)
    # In a run of consecutive seqs, seq - rank is constant.
    rank = F.row_number().over(Window.partitionBy("topic", "epoch").orderBy("seq"))
    return (
        rows.withColumn("run", F.col("seq") - rank)
        .groupBy("topic", "epoch", "run")
        .agg(F.min("seq").alias("first_seq"), F.max("seq").alias("last_seq"), F.count("*").alias("records"))
        .drop("run")
    )


def _proposals(
    ranges: DataFrame, wanted: list[tuple[TopicState, int]], tags: tuple[str, ...]
) -> tuple[Proposal, ...]:
    totals = {
        (row["topic"], row["epoch"]): row
        for row in ranges.groupBy("topic", "epoch")
        .agg(F.sum("records").alias("records"), F.count("*").alias("ranges"))
        .collect()
    }
    place = F.row_number().over(Window.partitionBy("topic", "epoch").orderBy("first_seq"))
    shown: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    few = ranges.withColumn("place", place).filter(F.col("place") <= RANGES_SHOWN)
    for row in few.orderBy("topic", "first_seq").collect():
        shown[row["topic"], row["epoch"]].append((row["first_seq"], row["last_seq"]))
    return tuple(
        Proposal(
            at.topic, at.epoch, before, tags, total["records"], tuple(shown[at.topic, at.epoch]),
            total["ranges"],
        )
        for at, before in wanted
        if (total := totals.get((at.topic, at.epoch))) is not None
    )  # fmt: skip


def _apply(path: str, proposal: Proposal) -> int:
    """Delete the records of a proposal; return the number of deleted live records."""
    topics = client_of(path).topics
    epoch = topics.state(proposal.topic, touch=False).epoch
    if epoch != proposal.epoch:
        raise StaleEpoch(
            "the topic was recreated since the proposal", topic=proposal.topic, epoch=epoch,
            expected=proposal.epoch,
        )  # fmt: skip
    return sum(
        topics.delete_records(proposal.topic, before_seq=proposal.before_seq, match=tag).deleted
        for tag in (proposal.tags or (None,))
    )
