"""The Spark driver of the benchmarks: it reads steps as lines of JSON and writes samples with wall times."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import functions as f
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import ringlog.spark
from bench.dataset import TOPIC

CORES = "local[2]"
MEMORY = "2g"
LATENCY_SKIP = 5
"""Number of first batches of a query that are not counted, because they are slower."""
WAIT_S = 240.0
SINK_BATCH = "2000000"
"""Records per batch of the stream into the sink. It is large, because Spark has a cost per batch."""
BATCH_BYTES, UNCOUNTED = "spark.sql.execution.arrow.maxBytesPerBatch", str((1 << 31) - 1)
"""For small records, as docs/how-to/spark.md advises. With less, Spark sums up the batch size for every
row."""
DATA = ("topic", "epoch", "seq", "ts", "payload", "tag", "priority")
"""Columns that the records have, and so those of the Parquet files."""


class TupleReader(DataSourceReader):
    """The ringlog reader with its batches split into tuples of Python values."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def partitions(self) -> Sequence[InputPartition]:
        """Return the partitions of the real reader."""
        planned: Sequence[InputPartition] = self._inner.partitions()
        return planned

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield one row at a time."""
        for batch in self._inner.read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class TupleSource(DataSource):
    """The same source without Arrow, to measure the benefit of Arrow."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ringlog_tuples"

    def _real(self) -> Any:
        from ringlog.spark.source import RinglogDataSource

        return RinglogDataSource(dict(self.options))

    def schema(self) -> StructType:
        """Return the schema of the real source."""
        schema: StructType = self._real().schema()
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the real reader, wrapped."""
        return TupleReader(self._real().reader(schema))


class DiscardingWriter(DataSourceStreamArrowWriter):
    """Discards its input, to measure the cost of Spark on the way to any Python sink."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Count the rows. Spark would skip its work if the iterator were not consumed."""
        if sum(batch.num_rows for batch in iterator) < 0:
            raise RuntimeError("negative number of rows")
        return WriterCommitMessage()

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        """Do nothing, since no data was kept."""

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803
        """Do nothing, since no data was kept."""


class DiscardingSource(DataSource):
    """A sink with DiscardingWriter."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ringlog_discard"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Return the writer."""
        return DiscardingWriter()


class Steps:
    """One session and its steps. Every step returns a sample: `wall` seconds and more."""

    def __init__(self, data_dir: Path, directory: Path) -> None:
        self._data_dir, self._directory = data_dir, directory
        self._spark: Any = None

    def do(self, step: dict[str, Any]) -> dict[str, float]:
        """Call the method named `what` with the other entries as arguments.

        A method may return its own `wall`.
        """
        arguments = dict(step)
        method = getattr(self, f"_{arguments.pop('what')}")
        begun = time.perf_counter()
        found = method(**arguments) or {}
        return {"wall": time.perf_counter() - begun, **found}

    def close(self) -> None:
        """End the session."""
        if self._spark is not None:
            self._spark.stop()

    def _begin(self) -> None:
        config = {
            "spark.driver.memory": MEMORY,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        self._spark = ringlog.spark.session("bench", master=CORES, config=config)
        self._spark.dataSource.register(TupleSource)
        self._spark.dataSource.register(DiscardingSource)

    def _parquet(self) -> None:
        """Write the data to Parquet, with default settings of Spark."""
        self._frame("log", list(DATA)).write.parquet(str(self._directory / "parquet"))

    def _frame(
        self, source: str, columns: list[str] | None = None, until: int | None = None, reader: str = "jvm"
    ) -> Any:
        if source == "parquet":
            found = self._spark.read.parquet(str(self._directory / "parquet"))
            return found.select(*columns) if columns else found
        options = {} if until is None else {"endingOffsets": json.dumps({TOPIC: until + 1})}
        options["reader"] = reader
        if source == "tuples":
            taken = self._spark.read.format("ringlog_tuples").option("minPartitions", 2)
            return taken.options(path=str(self._data_dir), subscribe=TOPIC, **options).load()
        return ringlog.spark.read(self._spark, TOPIC, path=str(self._data_dir), columns=columns, **options)

    def _count(self, round: int, columns: list[str] | None = None, reader: str = "jvm") -> dict[str, float]:
        return {"rows": self._frame("log", columns, reader=reader).count()}

    def _group(
        self, round: int, source: str = "log", columns: list[str] | None = None, reader: str = "jvm"
    ) -> dict[str, float]:
        """Use every requested column. Otherwise Parquet would read only the tag."""
        frame = self._frame(source, columns, reader=reader)
        rows = frame.groupBy("tag").agg(f.count("*"), f.max("seq"), f.max("ts")).collect()
        return {"rows": len(rows)}

    def _noop(self, round: int, source: str = "log", until: int | None = None, reader: str = "jvm") -> None:
        self._frame(source, list(DATA) if source != "tuples" else None, until, reader).write.format(
            "noop"
        ).mode("overwrite").save()

    def _archive(self, round: int) -> None:
        from ringlog.spark.jobs import archive

        place = self._directory / f"archive-{round}"
        report = archive.run(self._spark, str(self._data_dir), str(place), TOPIC)
        if not report.rows:
            raise RuntimeError("nothing was archived")
        shutil.rmtree(place)

    def _write_parquet(self, round: int, reader: str = "jvm") -> None:
        place = self._directory / f"written-{round}-{reader}"
        self._frame("log", reader=reader).write.option("compression", "zstd").parquet(str(place))
        shutil.rmtree(place)

    def _verify(self, round: int) -> None:
        from ringlog.spark.jobs import verify

        verify.run(self._spark, str(self._data_dir), TOPIC)

    def _stream(self, topic: str, schema: str | None = None, **options: Any) -> Any:
        reader = self._spark.readStream.format("ringlog")
        reader = reader if schema is None else reader.schema(schema)
        return reader.options(path=str(self._data_dir), subscribe=topic, **options).load()

    def _latency(self, topic: str, round: int, batches: int) -> dict[str, float]:
        """Return quantiles of the age of records in foreachBatch, after the first LATENCY_SKIP batches."""
        ages: list[list[float]] = []

        def look(batch: Any, number: int) -> None:
            now = time.time()
            ages.append([now - row.ts.timestamp() for row in batch.select(f.col("ts")).collect()])

        query = (
            self._stream(topic, startingOffsets="latest")
            .writeStream.foreachBatch(look)
            .option("checkpointLocation", str(self._directory / f"latency-{round}"))
            .start()
        )
        _wait(lambda: len(ages) >= LATENCY_SKIP + batches, query)
        query.stop()
        found = [age for batch in ages[LATENCY_SKIP:] for age in batch]
        cuts = statistics.quantiles(found, n=20)
        return {"p50": statistics.median(found), "p95": cuts[-1]}

    def _sink(self, topic: str, round: int) -> dict[str, float]:
        """Stream all records of the data set into another topic, from the start of the query to its end.

        Without a topic the records go to a writer that discards them.
        """
        self._spark.conf.set(BATCH_BYTES, UNCOUNTED)
        stream = self._stream(
            TOPIC, "payload binary, tag string", startingOffsets="earliest", maxOffsetsPerTrigger=SINK_BATCH
        )
        query = (
            stream.writeStream.format("ringlog" if topic else DiscardingSource.name())
            .options(path=str(self._data_dir), topic=topic)
            .option("checkpointLocation", str(self._directory / f"sink-{topic}-{round}"))
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(WAIT_S):
            query.stop()
            raise RuntimeError("the stream into the sink was too slow")
        self._spark.conf.unset(BATCH_BYTES)
        return {"rows": _rows_of(query)}


def _rows_of(query: Any) -> int:
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def _wait(condition: Any, query: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if not query.isActive or time.monotonic() > deadline:
            raise RuntimeError(f"the query ended or was too slow: {query.exception()}")
        time.sleep(0.01)


def main(data_dir: str, directory: str) -> int:
    """Run steps until the input ends."""
    steps = Steps(Path(data_dir), Path(directory))
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        for line in sys.stdin:
            answers.write(json.dumps(steps.do(json.loads(line))) + "\n")
            answers.flush()
    finally:
        steps.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
