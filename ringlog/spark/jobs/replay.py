"""replay: copy records of topics to other topics, each once, in order, at a limited rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F  # noqa: N812  Spark's own usage

from ringlog.clock import SystemClock
from ringlog.spark.bounds import check_gaps, resolve_bounds
from ringlog.spark.catalog import Catalog
from ringlog.spark.clients import client_of
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.job_steps import JobStateFile, check_same_options, step_rows, steps
from ringlog.spark.jobs.report import Bound, SilentProgress, SparkJobProgress
from ringlog.spark.options import (
    SourceOptions,
    TopicOffsets,
    TopicTimes,
    as_text,
    sink_options,
    source_options,
)
from ringlog.spark.sessions import read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ReplayState(msgspec.Struct, frozen=True):
    """Work of a replay, fixed when it starts."""

    path: str
    to_path: str
    log: str
    names: dict[str, str]
    """Source topic -> target topic."""
    bounds: tuple[tuple[str, int, int, int], ...]
    """Tuples of (topic, epoch, after, until)."""
    steps: int
    done: int = 0
    """Number of steps known to be written."""
    options: dict[str, Any] | None = None
    """Options that decide which records are copied, and as what. None: an earlier version started the job,
    and the options of its next run are kept."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a run. `skipped`: steps that an earlier run with this name had written."""

    name: str
    bounds: tuple[Bound, ...]
    targets: dict[str, str]
    positions: int
    """Number of positions within the bounds. Only live records are written."""
    steps: int
    skipped: int
    seconds: float


def run(
    session: SparkSession,
    path: str,
    topics: Iterable[str] | str | None = None,
    *,
    pattern: str | None = None,
    to: str | None = None,
    prefix: str = "",
    suffix: str = "",
    to_path: str | None = None,
    name: str | None = None,
    rate: float | None = None,
    keep_times: bool = True,
    sink: Mapping[str, Any] | None = None,
    progress: SparkJobProgress | None = None,
    **source: Any,
) -> ReplayReport:
    """Copy the current records of these topics to topic `to`, or to `<prefix><topic><suffix>`.

    Args:
        session: session with the source registered.
        path: data directory of the source engine.
        topics: topic names; default: all topics, or those that match `pattern`.
        pattern: regular expression for topic names.
        to: target topic for all records.
        prefix: prefix of the target names.
        suffix: suffix of the target names.
        to_path: another data directory on this host; default: `path`.
        name: name of the job. A repeated run with this name continues it, or does nothing if all is done.
            Topics, targets, bounds, tags and keep_times must be the same; rate and all others may differ.
        rate: maximum positions per second.
        keep_times: use the commit time as event_ts of records without one.
        sink: further options of the sink (durability, createTopics, …).
        progress: receives the progress of the job.
        **source: bounds and other options of the source (startingTimestamp, tags, …).

    Returns:
        What the job copied.

    Raises:
        OptionError: a topic would be written to itself, or the name was used with other options.
        DataLoss, TopicNotFound, EngineNotRunning: as for any read.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    path, target = os.path.abspath(path), os.path.abspath(to_path or path)
    client_of(target)  # Fails before a job file is created if no engine runs there.
    kept = JobStateFile(target, "replay", name)

    def target_of(topic: str) -> str:
        return to or f"{prefix}{topic}{suffix}"

    subscribed: dict[str, Any] = {"subscribePattern": pattern or ".*"}
    if topics is not None:
        subscribed = {"subscribe": [topics] if isinstance(topics, str) else list(topics)}
    selected = source_options(as_text({**subscribed, **source, "path": path}), streaming=False)
    written = as_text({"createTopics": True, **(sink or {})})
    options = {
        **_selection(selected), "keep_times": keep_times,
        "topic": sink_options({**written, "path": target}).topic,
    }  # fmt: skip
    state = kept.load(ReplayState)
    with Catalog.open(path) as catalog:
        if state is None:
            state = _begin(catalog, path, target, selected, target_of, rate)
        names = {topic: target_of(topic) for topic in state.names}
        check_same_options(
            {
                "path": state.path, "to_path": state.to_path, "log": state.log, "names": state.names,
                **(state.options or {}),
            },
            {"path": path, "to_path": target, "log": catalog.log_id, "names": names, **options},
        )  # fmt: skip
        if state.options is None:
            state = msgspec.structs.replace(state, options=options)
            kept.save(state)
        _check_epochs(catalog, state)
    skipped = state.done
    extra = {name: source[name] for name in source if not _is_bound(name)}
    for step in steps(
        state.done, state.steps, partial(_size, state), rate, progress or SilentProgress(), "replay"
    ):
        frame = _step(session, state, step, extra, keep_times)
        if frame is not None:
            _write(frame, target, written, kept.app_id, step)
        state = msgspec.structs.replace(state, done=step + 1)
        kept.save(state)
    return ReplayReport(
        kept.name, tuple(Bound(*each) for each in state.bounds), state.names,
        sum(until - after for _, _, after, until in state.bounds), state.steps, skipped,
        (clock.monotonic_ns() - started) / 1e9,
    )  # fmt: skip


def _selection(options: SourceOptions) -> dict[str, Any]:
    """Return the options that select the records, as JSON values and in one spelling. `*`: other topics."""

    def by_topic(found: TopicOffsets | TopicTimes) -> dict[str, Any]:
        own = {topic: each for topic, each in found.by_topic if each != found.default}
        return {"*": found.default, **own}

    return {
        "subscribe": sorted(options.topics), "subscribePattern": options.pattern,
        "startingOffsets": by_topic(options.starting), "endingOffsets": by_topic(options.ending),
        "startingTimestamp": by_topic(options.starting_ts), "endingTimestamp": by_topic(options.ending_ts),
        "startingOffsetsByTimestampStrategy": "latest" if options.latest_if_too_new else "error",
        "tags": sorted(options.tags),
    }  # fmt: skip


def _begin(
    catalog: Catalog, path: str, target: str, options: SourceOptions, target_of: Callable[[str], str],
    rate: float | None,
) -> ReplayState:  # fmt: skip
    """Resolve the bounds of a new replay and divide it into steps. Raises OptionError."""
    bounds = resolve_bounds(catalog, options)
    check_gaps(catalog, bounds, options)
    names = {each.topic: target_of(each.topic) for each in bounds}
    _check_targets(names, path == target)
    return ReplayState(
        path, target, catalog.log_id, names,
        tuple((each.topic, each.epoch, each.after, each.until) for each in bounds),
        -(-sum(map(len, bounds)) // step_rows(rate)),
    )  # fmt: skip


def _check_targets(names: dict[str, str], is_same_log: bool) -> None:
    own = sorted(set(names) & set(names.values())) if is_same_log else []
    if own:
        raise OptionError("a topic must not be copied to itself: set to, prefix or suffix", topics=own)


def _is_bound(option: str) -> bool:
    """Return whether an option of the source limits the records, which the steps do themselves."""
    return "start" in option.lower() or "end" in option.lower()


def _write(frame: DataFrame, target: str, written: Mapping[str, str], app_id: str, step: int) -> None:
    """Write the rows of a step with the options `written`. A step that was written before is skipped."""
    frame.write.format("ringlog").mode("append").options(
        **written, path=target, txnAppId=app_id, txnVersion=str(step)
    ).save()


def _check_epochs(catalog: Catalog, state: ReplayState) -> None:
    """Check that no topic was recreated: under the same seqs it would contain other records."""
    for topic, epoch, _, _ in state.bounds:
        now = catalog.topic(topic).epoch
        if now != epoch:
            raise OptionError(
                "the topic was recreated since the job started: start a new job", topic=topic, epoch=now,
                began_with=epoch,
            )  # fmt: skip


def _part(state: ReplayState, step: int) -> list[tuple[str, int, int]]:
    """Return (topic, after, until) of a step: the same share of every topic."""
    found = []
    for topic, _, after, until in state.bounds:
        size = until - after
        low, high = after + size * step // state.steps, after + size * (step + 1) // state.steps
        if low < high:
            found.append((topic, low, high))
    return found


def _size(state: ReplayState, step: int) -> int:
    return sum(until - after for _, after, until in _part(state, step))


def _step(
    session: SparkSession, state: ReplayState, step: int, extra: Mapping[str, Any], keep_times: bool
) -> DataFrame | None:
    """Return the rows of a step for the sink.

    Partitions ascend by position, which keeps the order per topic.
    """
    part = _part(state, step)
    if not part:
        return None
    frame = read(
        session,
        [topic for topic, _, _ in part],
        path=state.path,
        **{
            **extra,
            "includeHeaders": True,
            "startingOffsets": {topic: after + 1 for topic, after, _ in part},
            "endingOffsets": {topic: until + 1 for topic, _, until in part},
        },
    )
    if keep_times:
        frame = frame.withColumn("event_ts", F.coalesce("event_ts", "ts"))
    mapping = F.create_map(*[F.lit(each) for pair in state.names.items() for each in pair])
    return frame.withColumn("topic", mapping[F.col("topic")]).drop("epoch", "seq", "ts")
