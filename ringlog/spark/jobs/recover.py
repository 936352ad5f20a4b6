"""recover: finish what drivers that died had planned to write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ringlog.clock import SystemClock
from ringlog.spark import sink
from ringlog.spark.options import as_text, sink_options


@dataclass(frozen=True, slots=True)
class RecoveredPlan:
    """One open plan that was finished: batch or version, and what it held."""

    batch: int
    outcome: str
    rows: int
    frames: int
    repeats: int
    """Frames the engine had already."""


@dataclass(frozen=True, slots=True)
class RecoverReport:
    """All open plans of a staging directory; none is what one finds when nothing died."""

    plans: tuple[RecoveredPlan, ...]
    rows: int
    seconds: float


def run(
    session: Any, path: str, *, staging_dir: str | None = None, create_topics: bool = False
) -> RecoverReport:
    """Finish open plans whose writer is not at it. Spark is not needed: `session` may be None.

    Harmless to repeat, and while writers work. Raises EngineNotRunning, StagingLost, CorruptData.
    """
    clock = SystemClock()
    started = clock.monotonic_ns()
    given: dict[str, Any] = {"path": os.path.abspath(path), "createTopics": create_topics}
    if staging_dir is not None:
        given["stagingDir"] = staging_dir
    done = sink.recover(sink_options(as_text(given)))
    plans = tuple(
        RecoveredPlan(each.batch, each.outcome, each.rows, each.frames, each.repeats) for each in done
    )
    return RecoverReport(plans, sum(each.rows for each in plans), (clock.monotonic_ns() - started) / 1e9)
