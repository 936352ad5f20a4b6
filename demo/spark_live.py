"""One Spark driver: a streaming query that aggregates delays by carrier while flights are written.

It may be killed at any time. Its successor continues from the checkpoint. Its state is in `live.json`, which
is replaced after every micro-batch. It ends when the state includes all `expected` flights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ringlog.spark
from demo.spark_batch import aggregate, config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

READY, STATE, CHECKPOINT = "live-ready", "live.json", "live-checkpoint"
TRIGGER = "200 milliseconds"
LOOK_S = 0.05
END_S = 900.0


def main(directory: Path, data_dir: Path, topic: str, expected: int) -> int:
    """Run the query. Return 0 when all flights are counted, 1 if the query fails or times out."""
    state = directory / STATE
    spark = ringlog.spark.session("ringlog demo, live", config=config())
    stream = (
        spark.readStream.format("ringlog")
        .schema("payload binary")
        .options(path=str(data_dir), subscribe=topic, startingOffsets="earliest")
        .load()
    )

    def keep(batch: DataFrame, number: int) -> None:
        found = {carrier: list(counts) for carrier, *counts in batch.collect()}
        text = json.dumps({"batch": number, "pid": os.getpid(), "carriers": found})
        state.with_suffix(".new").write_text(text)
        state.with_suffix(".new").replace(state)

    query = (
        aggregate(stream, "carrier")
        .writeStream.outputMode("complete")
        .foreachBatch(keep)
        .option("checkpointLocation", str(directory / CHECKPOINT))
        .trigger(processingTime=TRIGGER)
        .start()
    )
    (directory / READY).touch()
    deadline = time.monotonic() + END_S
    try:
        while query.isActive and counted(state) < expected and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    finally:
        query.stop()
        spark.stop()
    return 0 if counted(state) >= expected else 1


def known(state: Path) -> dict[str, Any]:
    """Return the last state that a driver wrote, or an empty one."""
    try:
        found: dict[str, Any] = json.loads(state.read_text())
    except FileNotFoundError:
        return {"batch": -1, "carriers": {}}
    return found


def counted(state: Path) -> int:
    """Return the number of flights in the state."""
    return sum(counts[0] for counts in known(state)["carriers"].values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
