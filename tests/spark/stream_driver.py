"""A streaming query in its own process, made to be killed: `python -m tests.spark.stream_driver JSON`.

It copies topics into Parquet files with its own checkpoint, and ends when it has caught up. `die` names the
step at which it kills itself and all its children:

- `offset`: a batch is in the offset log and not read yet.
- `tasks`: during reading.
- `sink`: files are written, and the batch is not committed in the sink.
- `committed`: the batch is committed in the sink and not in Spark's commit log.

`after` is the number of times that the step passes first.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ringlog.spark import session

STEPS = ("offset", "tasks", "sink", "committed")
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
}
CATCH_UP_S = 280


def main(given: dict) -> int:
    """Run until all records that exist at the start are read."""
    os.setpgid(0, 0)
    spark = session("stream-driver", master="local[2]", config=CONFIG | given.get("config", {}))
    spark.sparkContext.setLogLevel("ERROR")
    _tell("session")
    frame = spark.readStream.format("ringlog").options(**given["options"])
    frame = frame.schema("topic string, epoch long, seq long, payload binary").load()
    if given.get("shuffle"):
        frame = frame.repartition(given["shuffle"])
    die = given.get("die")
    if die:
        frame = _mortal(spark, frame, die, given.get("after", 0), given["scratch"])
    writer = frame.writeStream.format("parquet").option("path", given["out"])
    query = writer.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
    _tell("started")
    if die in {"offset", "sink", "committed"}:
        _watch(given, die, given.get("after", 0))
    query.awaitTermination(CATCH_UP_S)
    if query.exception() is not None:
        raise query.exception()
    _tell("done")
    spark.stop()
    return 0


def _tell(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _mortal(spark, frame, die, after, scratch):
    """Let one task kill the whole process group in the middle of a partition."""
    from pyspark.sql.functions import udf

    if die != "tasks":
        return frame
    group = os.getpgid(0)

    @udf("long")
    def pass_or_die(seq):
        if seq % 997 == 500:
            mark = os.path.join(scratch, f"task-{seq}")
            open(mark, "w").close()
            if len(os.listdir(scratch)) > after:
                os.killpg(group, signal.SIGKILL)
        return seq

    return frame.withColumn("seq", pass_or_die("seq"))


def _watch(given: dict, die: str, after: int) -> None:
    """Kill the process group when the checkpoint shows the step, `after` batches later. Spins, to react in
    time."""
    import threading

    logs = {
        "offset": os.path.join(given["checkpoint"], "offsets", str(after)),
        "sink": os.path.join(given["checkpoint"], "offsets", str(after)),
        "committed": os.path.join(given["out"], "_spark_metadata", str(after)),
    }

    def look() -> None:
        while not os.path.exists(logs[die]):
            pass
        if die == "sink":
            before = len(os.listdir(given["out"])) if os.path.exists(given["out"]) else 0
            while len(os.listdir(given["out"])) <= before:
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
