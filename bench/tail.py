"""Reads on the same host: the tailer over a gigabyte of log, into Arrow and into bytes objects."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from bench.host import Host
from bench.rows import Row, row
from ringlog.client.read.tail_batch import TailBatch

TOTAL_BYTES = 1 << 30
RECORDS = 1000
SIZE = 100
ROUNDS = 3


def tail_rows() -> list[Row]:
    """Compare with a plain read of the same files by read(2) in pieces of 4 MiB."""
    payloads = [os.urandom(SIZE) for _ in range(RECORDS)]
    frames = TOTAL_BYTES // (RECORDS * SIZE)
    with Host(1) as host:
        host.client.topics.create("tail", durability="disk")
        with host.client.producer("tail", max_buffer_bytes=256 << 20) as out:
            for _ in range(frames):
                out.send_many(payloads)
        arrow: list[float] = []
        listed: list[float] = []
        plain: list[float] = []
        for _ in range(ROUNDS + 1):
            arrow.append(_arrow_rate(host))
            listed.append(_bytes_rate(host))
            plain.append(_plain_rate(host))
    # The first round warms the page cache.
    return [
        row(
            "tailer_to_arrow", "bytes/s", arrow[1:], plain[1:], reach={"min": 1e9}, note="checksums verified"
        ),
        row("tailer_to_bytes", "records/s", listed[1:], reach={"min": 5e6}, note="checksums verified"),
    ]


def batches(host: Host, topic: str) -> Iterator[TailBatch]:
    """Yield all batches of the topic. Raises AssertionError for a lost record."""
    for batch in host.client.tailer(topic, follow=False):
        assert isinstance(batch, TailBatch)
        yield batch


def _arrow_rate(host: Host) -> float:
    begun = time.perf_counter()
    rows = size = 0
    for batch in batches(host, "tail"):
        table = batch.arrow()
        rows += table.num_rows
        size += table.num_rows * SIZE
    _require(rows)
    return size / (time.perf_counter() - begun)


def _bytes_rate(host: Host) -> float:
    begun = time.perf_counter()
    count = 0
    for batch in batches(host, "tail"):
        count += len(batch.bytes())
    _require(count)
    return count / (time.perf_counter() - begun)


def _plain_rate(host: Host) -> float:
    begun = time.perf_counter()
    size = 0
    for path in sorted((host.data_dir / "wal" / "shard-00").glob("*.log")):
        with path.open("rb", buffering=0) as file:
            while data := file.read(4 << 20):
                size += len(data)
    return size / (time.perf_counter() - begun)


def _require(count: int) -> None:
    expected = TOTAL_BYTES // (RECORDS * SIZE) * RECORDS
    if count != expected:
        raise RuntimeError(f"the tailer gave {count} records of {expected}")
