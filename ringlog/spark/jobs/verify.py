"""verify: read and check every stored frame of a running log; report damaged and missing records.

The engine keeps working during the check. Frames of a segment are located by the index, so damage hides no
later frame. In the log, damage may hide later frames. Missing positions are in no stored frame, and no floor,
deletion or restart loss explains them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ringlog.clock import SystemClock
from ringlog.errors import CorruptData, NotReady, TopicNotFound
from ringlog.spark.catalog import Catalog
from ringlog.spark.clients import client_of
from ringlog.spark.file_locations import TopicLocations, locate_topic, locate_topics
from ringlog.spark.jobs.archive import subscription
from ringlog.spark.jobs.audit_source import (
    FAULT,
    FAULTS_PER_TASK_MAX,
    STORED,
    TOTAL,
    AuditSource,
    merge_seq_ranges,
)
from ringlog.spark.jobs.report import Bound, SilentProgress, SparkJobProgress, show_task_progress
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import HOT, Bounds, Slice
from ringlog.spark.slice_reader import read_batches

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

FINDINGS_MAX = FAULTS_PER_TASK_MAX
"""Maximum number of findings in a report. The report counts all of them."""


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """A damaged frame or part of a segment. `topic` is None if the owner cannot be determined."""

    topic: str | None
    epoch: int | None
    first_seq: int | None
    last_seq: int | None
    file: str
    offset: int
    fault: str


@dataclass(frozen=True, slots=True)
class MissingRange:
    """Unexplained missing positions, inclusive."""

    topic: str
    epoch: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Scope and findings of a check. `bytes` as stored. `is_whole`: nothing is damaged or missing."""

    bounds: tuple[Bound, ...]
    frames: int
    records: int
    bytes: int
    damaged: int
    damage: tuple[DamagedFrame, ...]
    """The first FINDINGS_MAX."""
    missing: tuple[MissingRange, ...]
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
    progress: SparkJobProgress | None = None,
) -> VerifyReport:
    """Check these topics (default: all) up to their current heads. Read-only.

    Raises EngineNotRunning, and TopicNotFound for a name that does not exist.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    options = subscription(path, topics, pattern)
    client = client_of(path)
    with Catalog.open(path) as catalog:
        before = list(locate_topics(client, [each.topic for each in catalog.topics(options)]))
    session.dataSource.register(AuditSource)
    audit = session.read.format(AuditSource.name()).options(**raw_options(options)).load()
    with show_task_progress(session, progress or SilentProgress(), "verify"):
        rows = audit.collect()
    totals = [row for row in rows if row["what"] == TOTAL]
    frames, records, size, damaged = (
        sum(row[name] for row in totals) for name in ("frames", "records", "bytes", "damaged")
    )
    faults = [row for row in rows if row["what"] == FAULT]
    damage = [_damage(row) for row in sorted(faults, key=lambda row: (row["file"], row["offset"]))]
    missing = _missing(list(_holes([row for row in rows if row["what"] == STORED], before)), before, options)
    seconds = (clock.monotonic_ns() - started) / 1e9
    return VerifyReport(
        tuple(Bound(each.topic, each.epoch, 0, each.head_seq) for each in before), frames, records, size,
        damaged, tuple(damage[:FINDINGS_MAX]), tuple(missing[:FINDINGS_MAX]),
        sum(each.last_seq - each.first_seq + 1 for each in missing),
        not damaged and not missing, seconds, size / 1e6 / seconds,
    )  # fmt: skip


def _holes(rows: list[Row], places: list[TopicLocations]) -> Iterator[MissingRange]:
    """Yield the positions up to each topic's head that no stored frame contains, explained or not."""
    stored: dict[tuple[str, int], list[tuple[int, int]]] = {(each.topic, each.epoch): [] for each in places}
    for row in rows:
        owner = row["topic"], row["epoch"]
        if owner in stored:
            stored[owner].append((row["first_seq"], row["last_seq"]))
    for each in places:
        # Sentinels before the first position and after the head. Later records are not part of the check.
        found = [(0, 0), *stored[each.topic, each.epoch], (each.head_seq + 1, each.head_seq + 1)]
        both = merge_seq_ranges(*np.array(found, dtype=np.int64).T)
        for last, first in zip(both.lasts[:-1].tolist(), both.firsts[1:].tolist(), strict=True):
            if last < each.head_seq:
                yield MissingRange(each.topic, each.epoch, last + 1, min(first - 1, each.head_seq))


def _damage(row: Row) -> DamagedFrame:
    fields: dict[str, Any] = row.asDict()
    return DamagedFrame(**{name: fields[name] for name in DamagedFrame.__slots__})


def _missing(
    candidates: list[MissingRange], before: list[TopicLocations], options: SourceOptions
) -> list[MissingRange]:
    """Return the holes that neither the state before nor the state now explains, if a read confirms them."""
    client = client_of(options.path)
    known = {(each.topic, each.epoch): each for each in before}
    now: dict[str, TopicLocations | None] = {}
    found: list[MissingRange] = []
    for topic, epoch, first, last in map(astuple, candidates):
        then = known[topic, epoch]
        if topic not in now:
            try:
                now[topic] = locate_topic(client, topic)
            except TopicNotFound:
                now[topic] = None
        after = now[topic]
        if after is None or after.epoch != epoch:
            continue  # Deleted or recreated meanwhile: nothing is missing.
        holes = [
            MissingRange(topic, epoch, *both)
            for start, stop in then.unaccounted_ranges(first, last)
            for both in after.unaccounted_ranges(start, stop)
        ]
        whole = Bounds(topic, then.topic_id, epoch, first - 1, last)
        if holes and not _is_stored(whole, options):
            found += holes
    return found


def _is_stored(bounds: Bounds, options: SourceOptions) -> bool:
    """Return whether the range can be read: then its frames only moved during the check."""
    try:
        for _ in read_batches([Slice(bounds, 0, HOT)], options):
            continue
    except CorruptData:
        return False
    except NotReady as e:
        # The file that the engine refers to does not exist, even after retries. An unavailable cold store is
        # a different case: it says nothing about the records.
        if e.detail.get("reason") == "cold_unavailable":
            raise
        return False
    return True


def raw_options(options: SourceOptions) -> dict[str, str]:
    """Return path and subscription as options of the data source."""
    raw = {"path": os.path.abspath(options.path)}
    if options.pattern is not None:
        return {**raw, "subscribePattern": options.pattern}
    return {**raw, "subscribe": msgspec.json.encode(list(options.topics)).decode()}
