"""A Spark driver for the tests of modes: reads a topic, writes into another, tells what it found as JSON.

python -m tests.spark.modes_driver {"data_dir": …, "master": …} or {"remote": …} [, "kill_executor": true]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil

import ringlog.spark

SLOW_MS = 2
"""How long the slow query holds each record."""
FIND_S = 120.0
EXECUTOR = "CoarseGrainedExecutorBackend"


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Run it; the answer goes to standard output as the last line."""
    kind = {name: given[name] for name in ("master", "remote") if name in given}
    config = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **given.get("config", {}),
    }
    spark = ringlog.spark.session("modes", config=config, **kind)
    try:
        records = ringlog.spark.read(spark, "orders", path=given["data_dir"], min_partitions=16)
        found: dict[str, Any] = {
            "tags": {row["tag"]: row["count"] for row in records.groupBy("tag").count().collect()},
            "partitions": records.rdd.getNumPartitions() if "remote" not in given else None,
        }
        if given.get("kill_executor"):
            found |= _with_an_executor_killed(spark, records)
        rows = records.select("payload", "tag").where("seq % 2 = 0")
        rows.write.format("ringlog").mode("append").options(path=given["data_dir"], topic="copies").save()
        if "remote" not in given:
            found["java"] = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
        return found
    finally:
        spark.stop()


def _with_an_executor_killed(spark: Any, records: Any) -> dict[str, Any]:
    """A slow sum; when some of its tasks are done and others are not, an executor gets SIGKILL."""
    facts: dict[str, Any] = {}

    def kill() -> None:
        deadline = time.monotonic() + FIND_S
        while time.monotonic() < deadline:
            stages = map(
                spark.sparkContext.statusTracker().getStageInfo,
                spark.sparkContext.statusTracker().getActiveStageIds(),
            )
            for stage in filter(None, stages):
                if 0 < stage.numCompletedTasks < stage.numTasks - 4:
                    facts["done_at_kill"], facts["tasks"] = stage.numCompletedTasks, stage.numTasks
                    facts["killed"] = _kill_an_executor(spark.sparkContext.applicationId)
                    return
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    slow = f"count(1 + coalesce(reflect('java.lang.Thread', 'sleep', {SLOW_MS}L), 0))"
    row = records.selectExpr("count(*) n", "sum(seq) total", f"{slow} slow").collect()[0]
    killer.join()
    return facts | {"n": row["n"], "total": row["total"]}


def _kill_an_executor(application: str) -> int:
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if EXECUTOR in command and application in command and "java" in command.split()[0]:
            os.kill(process.pid, signal.SIGKILL)
            return int(process.pid)
    return 0


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
