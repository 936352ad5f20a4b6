"""One Spark driver: computes delays by carrier and hour, from the log and from its archive."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ringlog.spark
from demo.answers import FIELDS
from ringlog.spark.jobs import archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DRIVER_MEMORY = "1g"
RESULT = "spark-batch.json"
ARCHIVE = "archive"


def main(directory: Path, data_dir: Path, topics: list[str]) -> int:
    """Write durations and answers to `spark-batch.json`."""
    facts: dict[str, Any] = {}
    began = time.monotonic()
    spark = ringlog.spark.session("ringlog demo", config=config())
    try:
        facts["session_s"] = _since(began)
        log = ringlog.spark.read(spark, topics, path=str(data_dir), columns=["payload"])
        facts["log_s"], facts["log"] = _timed(log)
        began = time.monotonic()
        report = archive.run(spark, str(data_dir), str(directory / ARCHIVE), topics)
        facts["archive_s"], facts["archived"] = _since(began), report.rows
        parquet = spark.read.parquet(str(directory / ARCHIVE)).select("payload")
        facts["parquet_s"], facts["parquet"] = _timed(parquet)
    finally:
        spark.stop()
    (directory / RESULT).write_text(json.dumps(facts))
    return 0


def config() -> dict[str, str]:
    """Return the settings of all Spark drivers of the demo."""
    return {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def aggregate(records: DataFrame, *keys: str) -> DataFrame:
    """Return rows (keys…, flights, departed, minutes) for records with the column payload."""
    from pyspark.sql import functions as f

    event = f.from_json(f.col("payload").cast("string"), FIELDS)
    return (
        records.select(event.alias("event"))
        .groupBy(*[f.col(f"event.{key}") for key in keys])
        .agg(
            f.count("*").alias("flights"),
            f.count("event.dep_delay").alias("departed"),
            f.coalesce(f.sum("event.dep_delay"), f.lit(0)).cast("long").alias("minutes"),
        )
    )


def _timed(records: DataFrame) -> tuple[float, list[list[Any]]]:
    began = time.monotonic()
    rows = [list(row) for row in aggregate(records, "carrier", "hour").collect()]
    return _since(began), rows


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")))
