"""recover: finish planned writes of drivers that died."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ringlog.clock import SystemClock
from ringlog.spark import sink
from ringlog.spark.options import as_text, sink_options


@dataclass(frozen=True, slots=True)
class RecoveredPlan:
    """One open plan that was finished: its batch or version, and its content."""

    batch: int
    outcome: str
    rows: int
    frames: int
    repeats: int
    """Frames that the engine already had."""


@dataclass(frozen=True, slots=True)
class FailedPlan:
    """One open plan that could not be finished. It stays open."""

    writer_id: str
    """Id of the writer, which names it in `discard`."""
    writer: str | None
    """Key of the writer: `query/` and the query id, or `txn/` and the txnAppId; None if the plan is
    damaged."""
    batch: int | None
    code: str
    error: str


@dataclass(frozen=True, slots=True)
class RecoverReport:
    """All open plans of a staging directory. Without a crash there are none."""

    plans: tuple[RecoveredPlan, ...]
    failed: tuple[FailedPlan, ...]
    rows: int
    seconds: float


def run(
    session: Any, path: str, *, staging_dir: str | None = None, create_topics: bool = False
) -> RecoverReport:
    """Finish open plans whose writer is not running. Does not use Spark: `session` may be None.

    Idempotent, and safe while writers run. Plans that cannot be finished do not stop it; the report lists
    them. Raises EngineNotRunning, and DiskError if the staging directory cannot be read.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    given: dict[str, Any] = {"path": os.path.abspath(path), "createTopics": create_topics}
    if staging_dir is not None:
        given["stagingDir"] = staging_dir
    done, failed = sink.recover(sink_options(as_text(given)))
    plans = tuple(
        RecoveredPlan(each.batch, each.outcome, each.rows, each.frames, each.repeats) for each in done
    )
    left = tuple(
        FailedPlan(each.writer_id, each.writer, each.batch, each.error.code, str(each.error))
        for each in failed
    )
    return RecoverReport(
        plans, left, sum(each.rows for each in plans), (clock.monotonic_ns() - started) / 1e9
    )
