"""Spark: read, archive, verify and stream 10 M records of 100 B, compared with the same data in Parquet.

`make bench AREA=spark`. There is one engine, and one session of local[2] in a separate process; log and
Parquet take turns. CPU seconds cover the whole driver, its JVM and all Python workers, without the engine.
Other load on the machine doubles wall times but changes CPU seconds by only a quarter, so trust ratios of CPU
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench import dataset
from bench.compaction import ON
from bench.host import BUILD, Host
from bench.rows import Row, progress, row, scaled

RECORDS = 10_000_000
SINK_ROUNDS = 2
LATENCY_BATCHES = 25
ROUNDS = 3
GIB = 1 << 30
STREAM_TOPIC, SINK_TOPIC, LATENCY_TOPIC = "stream", "sink", "latency"
STOP_S = 60.0
PYTHON = {"reader": "python"}
"""Options of a session that has no reader in the JVM."""

Sample = dict[str, float]
"""Wall and CPU seconds, and further results of a step."""


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    parts: list[tuple[str, Callable[[Bench], list[Row]]]] = [
        ("count", _count_rows),
        ("group", _group_rows),
        ("whole", _whole_rows),
        ("tuples", _tuples_rows),
        ("archive", _archive_rows),
        ("verify", _verify_rows),
        ("latency", _latency_rows),
        ("sink", _sink_rows),
    ]
    chosen = [(name, build) for name, build in parts if only in name]
    found: list[Row] = []
    with _bench() as bench:
        for name, build in chosen:
            progress(name)
            found += build(bench)
    return found


class Bench:
    """The engine with its data, a Spark driver, and a directory for Parquet."""

    def __init__(self, host: Host, directory: Path, records: int) -> None:
        self.host, self.directory, self.records = host, directory, records
        self.driver = Driver(host, directory)
        self.bytes = records * dataset.SIZE

    def rounds(self, *steps: dict[str, Any], count: int = ROUNDS) -> list[list[Sample]]:
        """Return the samples of each step over `count` rounds.

        Steps take turns; an extra first round warms up.
        """
        found: list[list[Sample]] = [[] for _ in steps]
        for number in range(count + 1):
            for samples, step in zip(found, steps, strict=True):
                sample = self.driver.do(**step, round=number)
                samples += [sample] if number else []
        return found


class Driver:
    """Process of bench.spark_driver, which gets one step per line. Measures CPU of it and its descendants."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._log = directory / "driver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.spark_driver", str(host.data_dir), str(directory)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "RINGLOG_ALLOW_ROOT": "1"}, start_new_session=True,
            )  # fmt: skip
        self.do(what="begin")

    def do(self, **step: Any) -> Sample:
        """Run one step. Returns its sample with `cpu`, the CPU seconds of everything in the driver."""
        before = self._cpu_s()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(step) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the driver ended; the end of its log:\n{self._log.read_text()[-3000:]}")
        sample: Sample = json.loads(answer)
        return sample | {"cpu": self._cpu_s() - before}

    def close(self) -> None:
        """End the driver. Processes that do not exit are killed."""
        assert self._process.stdin is not None
        members = self._members()
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for member in psutil.wait_procs(members, timeout=5)[1]:
            member.kill()

    def _members(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _cpu_s(self) -> float:
        """Return the CPU seconds of all live processes, and of those that exited and were waited for."""
        total = 0.0
        for member in self._members():
            try:
                total += sum(member.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return total


@contextmanager
def _bench() -> Iterator[Bench]:
    records = scaled(RECORDS, dataset.FRAME * dataset.CYCLE) // dataset.FRAME * dataset.FRAME
    with Host(1, ON) as host, tempfile.TemporaryDirectory(prefix="spark-", dir=BUILD) as directory:
        progress(f"data set: {records:,} records")
        dataset.grow(host, 0, records)
        dataset.checkpoint(host)
        bench = Bench(host, Path(directory), records)
        try:
            progress("the same in Parquet, by Spark")
            bench.driver.do(what="parquet")
            yield bench
        finally:
            bench.driver.close()


def _rates(samples: list[Sample], amount: float) -> list[float]:
    return [amount / sample["wall"] for sample in samples]


def _cpu(samples: list[Sample]) -> list[float]:
    return [sample["cpu"] for sample in samples]


def _walls(samples: list[Sample]) -> str:
    return f"wall {min(sample['wall'] for sample in samples):.2f} s"


def _count_rows(bench: Bench) -> list[Row]:
    full, python, seq = bench.rounds(
        {"what": "count"}, {"what": "count", **PYTHON}, {"what": "count", "columns": ["seq"], **PYTHON}
    )
    return [
        row("spark_count_full_rows", "records/s", _rates(full, bench.records), reach={"min": 4e6},
            note=f"CPU {min(_cpu(full)):.1f} s; every byte is checksummed"),
        row("spark_count_full_rows_python", "records/s", _rates(python, bench.records),
            note=f"without the reader in the JVM: every column crosses; CPU {min(_cpu(python)):.1f} s"),
        row("spark_count_seq_only_python", "records/s", _rates(seq, bench.records),
            note=f"the same, one column asked for; CPU {min(_cpu(seq)):.1f} s"),
    ]  # fmt: skip


def _group_rows(bench: Bench) -> list[Row]:
    few = ["seq", "ts", "tag"]
    full, some, parquet, python = bench.rounds(
        {"what": "group"}, {"what": "group", "columns": few}, {"what": "group", "source": "parquet"},
        {"what": "group", "columns": few, **PYTHON},
    )  # fmt: skip
    return [
        row("spark_group_by_tag_full_rows", "CPU s", _cpu(full), _cpu(parquet), reach={"ratio_max": 2.1},
            note=f"{_walls(full)}; against Spark's own Parquet ({_walls(parquet)})"),
        row("spark_group_by_tag_three_columns", "CPU s", _cpu(some), _cpu(parquet), reach={"ratio_max": 1.6},
            note=f"{_walls(some)}; against Spark's own Parquet"),
        row("spark_group_by_tag_three_columns_python", "CPU s", _cpu(python), _cpu(parquet),
            note=f"without the reader in the JVM; {_walls(python)}; against Spark's own Parquet"),
    ]  # fmt: skip


def _whole_rows(bench: Bench) -> list[Row]:
    """Read every value of every column, so that omitted columns save nothing."""
    ours, parquet = bench.rounds({"what": "noop"}, {"what": "noop", "source": "parquet"})
    return [
        row("spark_whole_rows", "CPU s", _cpu(ours), _cpu(parquet),
            note=f"all columns into noop; {_walls(ours)}; against Spark's own Parquet ({_walls(parquet)})")
    ]  # fmt: skip


def _tuples_rows(bench: Bench) -> list[Row]:
    """Use a tenth of the data, because row-by-row reading is slow."""
    until = max(bench.records // 10, 1)
    arrow, tuples = bench.rounds(
        {"what": "noop", "until": until, **PYTHON}, {"what": "noop", "source": "tuples", "until": until}
    )
    return [
        row("spark_arrow_against_tuples", "records/s", _rates(arrow, until), _rates(tuples, until),
            reach={"ratio": 5}, note="all columns into noop; against the same reader yielding tuples")
    ]  # fmt: skip


def _archive_rows(bench: Bench) -> list[Row]:
    archive, written, by_jvm = bench.rounds(
        {"what": "archive"}, {"what": "write_parquet", **PYTHON}, {"what": "write_parquet"}
    )
    return [
        row("spark_archive", "records/s", _rates(archive, bench.records), reach={"min": 3.5e6},
            note="zstd Parquet written by tasks"),
        row("spark_write_parquet_cpu_over_archive", "CPU s", _cpu(by_jvm), _cpu(archive), reach={"ratio": 3},
            note=f"df.write.parquet (zstd, {_walls(by_jvm)}) against the archive ({_walls(archive)})"),
        row("spark_write_parquet_python_cpu_over_archive", "CPU s", _cpu(written), _cpu(archive),
            note=f"the same of a read without the reader in the JVM ({_walls(written)})"),
    ]  # fmt: skip


def _verify_rows(bench: Bench) -> list[Row]:
    (found,) = bench.rounds({"what": "verify"})
    size = sum(path.stat().st_size for path in bench.host.data_dir.rglob("*.data"))
    return [
        row("spark_verify", "bytes/s", _rates(found, size), reach={"min": 800e6},
            note=f"{size / GIB:.2f} GiB of segments, CPU {min(_cpu(found)):.1f} s")
    ]  # fmt: skip


def _latency_rows(bench: Bench) -> list[Row]:
    """Measure from a record's commit time to its arrival in foreachBatch, one record every 50 ms."""
    client = bench.host.client
    client.topics.create(LATENCY_TOPIC, durability="fsync", exist_ok=True)
    samples = []
    for number in range(ROUNDS):
        feed = subprocess.Popen(
            [sys.executable, "-m", "bench.spark_feed", bench.host.url, LATENCY_TOPIC],
            env={**os.environ, "RINGLOG_ALLOW_ROOT": "1"},
        )
        try:
            samples.append(
                bench.driver.do(
                    what="latency", topic=LATENCY_TOPIC, round=number, batches=scaled(LATENCY_BATCHES, 2)
                )
            )
        finally:
            feed.terminate()
            feed.wait()
    return [
        row("spark_stream_latency_p50", "s", [one["p50"] for one in samples], reach={"max": 0.6},
            note=f"written until foreachBatch has it; p95 {max(one['p95'] for one in samples):.2f} s")
    ]  # fmt: skip


def _sink_rows(bench: Bench) -> list[Row]:
    """Stream the data set into a topic of the same engine, through staged files, and into a discarding sink.

    As for all rows, an extra first round warms up: in a young JVM it takes twice as long.
    """
    into_topic: list[Sample] = []
    into_nothing: list[Sample] = []
    for number in range(SINK_ROUNDS + 1):
        topic = f"{SINK_TOPIC}-{number}"
        bench.host.client.topics.create(topic, durability="disk", exist_ok=True)
        before = bench.host.shard_cpu_s()
        sample = bench.driver.do(what="sink", topic=topic, round=number)
        sample["shard"] = bench.host.shard_cpu_s() - before
        written = bench.host.client.topics.state(topic).count
        if written != bench.records:
            raise RuntimeError(f"{written} of {bench.records} records arrived")
        idle = bench.driver.do(what="sink", topic="", round=number)
        if number:
            into_topic.append(sample)
            into_nothing.append(idle)
        else:
            progress(f"the first time: {sample['wall']:.1f} s, CPU {sample['cpu']:.1f} s")
    shard = min(sample["shard"] for sample in into_topic)
    return [
        row("spark_stream_to_sink", "records/s", _rates(into_topic, bench.records),
            _rates(into_nothing, bench.records), reach={"min": 0.5e6},
            note=f"two columns asked for; staged, planned, appended; CPU {min(_cpu(into_topic)):.1f} s and "
            f"{shard:.1f} s of the shard; against a writer that discards: {min(_cpu(into_nothing)):.1f} s")
    ]  # fmt: skip
