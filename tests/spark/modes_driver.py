"""A Spark driver for the tests of modes. It reads a topic, writes to another one, and prints the results as
JSON.

python -m tests.spark.modes_driver {"data_dir": …, "master": …} or {"remote": …} [, "scratch": …]

With `scratch`, a directory, one executor dies during the first query, and another one during the write.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

import ringlog.spark

TASKS = 16
DIE_AT_TASK = 6
"""A task kills its executor if at least this many attempts have started.

With two executors of one core each, at least four tasks have finished by then. Their output for the next
stage is lost with the executor.
"""
DIE_AT_ROW = 300
"""The row at which that task kills. A task of the first query has 1,250 rows, and one of the write half as
many."""
EXECUTOR = "CoarseGrainedExecutorBackend"


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Run the driver. The result is printed as the last line of the standard output."""
    kind = {name: given[name] for name in ("master", "remote") if name in given}
    config = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        # Small batches, so that a task has produced rows before it dies.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        **given.get("config", {}),
    }
    spark = ringlog.spark.session("modes", config=config, **kind)
    try:
        records = ringlog.spark.read(spark, "orders", path=given["data_dir"], min_partitions=TASKS)
        found: dict[str, Any] = {
            "tags": {row["tag"]: row["count"] for row in records.groupBy("tag").count().collect()},
            "partitions": records.rdd.getNumPartitions() if "remote" not in given else None,
        }
        rows = records.select("payload", "tag", "seq").where("seq % 2 = 0")
        if "scratch" in given:
            read, written = Path(given["scratch"], "read"), Path(given["scratch"], "written")
            row = mortal(records, read).selectExpr("count(*) n", "sum(seq) total").collect()[0]
            found |= {"n": row["n"], "total": row["total"], "read": deaths(read)}
            rows = mortal(rows, written)
        rows = rows.select("payload", "tag")
        rows.write.format("ringlog").mode("append").options(path=given["data_dir"], topic="copies").save()
        if "scratch" in given:
            found["written"] = deaths(written)
        if "remote" not in given:
            found["java"] = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
        return found
    finally:
        spark.stop()


def mortal(frame: Any, marks: Path) -> Any:
    """Return the same rows. One task that computes them kills its executor in the middle."""
    from pyspark import TaskContext
    from pyspark.sql.functions import col, udf

    marks.mkdir()
    at_task, at_row, executor = DIE_AT_TASK, DIE_AT_ROW, EXECUTOR
    seen: dict[int, int] = {}

    # Executors cannot import the test modules, so the function must contain everything it needs.
    @udf("long")
    def pass_or_die(seq: int) -> int:
        attempt = TaskContext.get().taskAttemptId()
        seen[attempt] = seen.get(attempt, 0) + 1
        if seen[attempt] == 1:
            Path(marks, f"attempt-{attempt}").touch()
        elif seen[attempt] == at_row and len(os.listdir(marks)) >= at_task:
            with contextlib.suppress(FileExistsError), open(os.path.join(marks, "killed"), "x") as told:
                jvm = next(p for p in psutil.Process().parents() if executor in " ".join(p.cmdline()))
                told.write(str(jvm.pid))
                told.flush()
                os.kill(jvm.pid, signal.SIGKILL)
        return seq

    # It is a condition, because Spark does not compute unused columns.
    return frame.where(pass_or_die("seq") == col("seq"))


def deaths(marks: Path) -> dict[str, int]:
    """Return the number of attempts, and the pid of the killed process or 0."""
    killed = marks / "killed"
    return {
        "attempts": len(list(marks.glob("attempt-*"))),
        "killed": int(killed.read_text()) if killed.exists() else 0,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
