"""discard: give up one planned write that cannot be finished."""

from __future__ import annotations

import os
from typing import Any

from ringlog.spark import sink
from ringlog.spark.commit import PlanDiscardReport
from ringlog.spark.options import as_text, sink_options


def run(
    session: Any, path: str, writer: str, batch: int, *, staging_dir: str | None = None
) -> PlanDiscardReport:
    """Discard the open plan of a batch, so that later batches of its writer can be written.

    If nothing of the batch was appended, it is forgotten and can be written again. Otherwise it counts as
    written, and its other rows are lost: the report has their number. Does not use Spark: `session` may be
    None.

    Args:
        session: not used.
        path: data directory of the running engine.
        writer: id of the writer, as `recover` reports it.
        batch: batch or txnVersion of the plan.
        staging_dir: staging directory of the write, if it is not in the data directory.

    Returns:
        What was given up, and what had been appended before.

    Raises:
        OptionError: the writer has no open plan of this batch.
        NotReady: a process is committing for this writer.
        CorruptData: the plan is damaged. EngineNotRunning: no engine runs on `path`.
    """
    given: dict[str, Any] = {"path": os.path.abspath(path)}
    if staging_dir is not None:
        given["stagingDir"] = staging_dir
    return sink.committer_of(sink_options(as_text(given))).discard(writer, batch)
