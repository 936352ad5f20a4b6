"""Storage: compaction, recovery, seeks, deletes, deep reads, many topics, a slow cold store.

`make bench AREA=storage`; `python -m bench storage --only recovery --scale 10` uses up to 10^8 records.
Recovery, seeks, deep reads and deletes share one data set (bench/dataset.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench import dataset
from bench.cold import cold_rows
from bench.compaction import OFF, ON, compaction_rows
from bench.host import Host
from bench.many import many_rows
from bench.rows import Row, progress, row, scaled
from bench.tail import batches
from ringlog.cli.maintenance import request_actor
from ringlog.envelope.messages import Locate, Located
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.reader import TopicReader
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.segment_cache import SegmentCache

TAIL_BYTES = 64 << 20
STEPS = (100_000, 1_000_000, 10_000_000)
ROUNDS = 3
SEEKS = 300
FEW_ROLLS = "wal.file_bytes=256MiB"
"""The end of the log stays in one file, so that only the setting `storage.enabled` decides when it is
absorbed."""


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("compaction", compaction_rows),
        ("dataset_recovery_memory_seek_read_delete", _dataset_rows),
        ("topics_100k", many_rows),
        ("cold", cold_rows),
    ]
    found: list[Row] = []
    for name, build in parts:
        if only in name:
            progress(name)
            found += build()
    return found


# -- the data set -------------------------------------------------------------------------------------


def _dataset_rows() -> list[Row]:
    """Grow the data set and measure recovery after each step. Then measure reads and deletes."""
    found: list[Row] = []
    memory: list[tuple[int, int]] = []
    with Host(1, ON, FEW_ROLLS) as host:
        have = 0
        for step in STEPS:
            want = scaled(step, dataset.FRAME * dataset.CYCLE) // dataset.FRAME * dataset.FRAME
            progress(f"data set: {want:,} records")
            dataset.grow(host, have, want)
            have = want
            dataset.checkpoint(host)
            memory.append((have, _memory(host)))
            dataset.write_tail(host, min(scaled(TAIL_BYTES, 1 << 20), TAIL_BYTES))
            found.append(_recovery_row(host, have))
            if step == STEPS[-1]:
                found.append(_killed_row(host, have))
            host.restart(ON)
        dataset.checkpoint(host)
        found.append(_memory_row(memory))
        progress("seeks")
        found += _seek_rows(host, have)
        progress("deep reads")
        found += _read_rows(host, have)
        progress("deletes")
        found += _delete_rows(host, have)
    return found


def _memory(host: Host) -> int:
    """Return the minimum private memory of the shard after a start with almost no log to replay."""
    found = []
    for _ in range(ROUNDS):
        host.restart(OFF)
        found.append(host.shard_bytes())
    return min(found)


def _recovery_row(host: Host, records: int) -> Row:
    times = []
    for _ in range(ROUNDS):
        host.stop()
        host.start()
        times.append(host.started_s)
    name = f"recovery_1e{round(math.log10(records))}_records_64MiB_log"
    return row(name, "s", times, reach={"max": 3.0}, note="from the command to ready, after an orderly stop")


def _killed_row(host: Host, records: int) -> Row:
    times = []
    for _ in range(ROUNDS):
        host.kill()
        host.start()
        times.append(host.started_s)
    name = f"recovery_1e{round(math.log10(records))}_records_64MiB_log_killed"
    return row(name, "s", times, reach={"max": 3.0}, note="after SIGKILL of every process")


def _memory_row(memory: list[tuple[int, int]]) -> Row:
    (few, small), (many, large) = memory[0], memory[-1]
    value = (large - small) / max(many - few, 1) * 1e6 / 1024
    note = f"shard's own memory at {many:,} records less that at {few:,}"
    return row("memory_per_1M_records", "KiB", [value], reach={"max": 100}, note=note)


def _seek_rows(host: Host, records: int) -> list[Row]:
    """Measure finding a position, and the time until a reader has the record there."""
    random = np.random.default_rng(7)
    reader = host.client.reader(dataset.TOPIC)
    finder, close = _finder(host)
    by_seq, by_time, first_by_seq, first_by_time = [], [], [], []
    for _ in range(ROUNDS + 1):
        seqs = random.integers(1, records, SEEKS).tolist()
        times, stamps = [], []
        for seq in seqs:
            begun = time.perf_counter()
            finder.seek(seq)
            times.append(time.perf_counter() - begun)
        by_seq.append(statistics.median(times) * 1e6)
        times = []
        for seq in seqs:
            begun = time.perf_counter()
            reader.seek(seq)
            page = next(iter(reader.pages(1)))
            times.append(time.perf_counter() - begun)
            (record,) = page.records
            if record.seq != seq:
                raise RuntimeError(f"seek to {seq} gave {record.seq}")
            stamps.append((record.time, record.ts))
        first_by_seq.append(statistics.median(times) * 1e6)
        times, firsts = [], []
        for moment, ts in stamps:
            begun = time.perf_counter()
            reader.seek(moment)
            found = reader.cursor
            times.append(time.perf_counter() - begun)
            page = next(iter(reader.pages(1)))
            firsts.append(time.perf_counter() - begun)
            if page.records[0].ts < ts or page.records[0].seq != found.seq + 1:
                raise RuntimeError("seek by time gave another record")
        by_time.append(statistics.median(times) * 1e6)
        first_by_time.append(statistics.median(firsts) * 1e6)
    close()
    place, first = "file and offset known, any of 10 M, warm", "the first record in hand and verified"
    return [
        row("seek_by_seq_p50", "us", by_seq[1:], reach={"max": 100}, note=place),
        row(
            "seek_by_time_p50", "us", by_time[1:], reach={"max": 100}, note="number known, any of 10 M, warm"
        ),
        row("first_record_after_seek_by_seq_p50", "us", first_by_seq[1:], note=first),
        row("first_record_after_seek_by_time_p50", "us", first_by_time[1:], note=first),
    ]


def _finder(host: Host) -> tuple[TopicReader, Callable[[], None]]:
    """Return a reader of the whole topic, as in any process of the host, and the function that closes it."""
    disk, data_dir = RealDisk(), str(host.data_dir)
    located = request_actor(host.shm_dir, "wal_shard-00", Locate(dataset.TOPIC, 0), Located, timeout_s=10.0)
    shelf = SegmentCache(disk, data_dir)
    reader = TopicReader(
        located,
        0,
        data_dir=data_dir,
        shm_dir=host.shm_dir,
        read_watermark=lambda _: LogHighWatermark(0, 0),
        disk=disk,
        segment_cache=shelf,
    )

    def close() -> None:
        reader.close()
        shelf.close()

    return reader, close


def _read_rows(host: Host, records: int) -> list[Row]:
    listed, paged, arrow = [], [], []
    for _ in range(ROUNDS + 1):
        begun, count = time.perf_counter(), 0
        for page in host.client.reader(dataset.TOPIC).pages(10_000):
            count += len(page.bytes())
        paged.append(_rate(count, records, begun))
        begun, count = time.perf_counter(), 0
        for batch in batches(host, dataset.TOPIC):
            count += len(batch.bytes())
        listed.append(_rate(count, records, begun))
        begun, count = time.perf_counter(), 0
        for batch in batches(host, dataset.TOPIC):
            count += batch.arrow().num_rows
        arrow.append(_rate(count, records, begun) * dataset.SIZE)
    note = "sealed, tagged records of 100 B, checksums verified"
    return [
        row("deep_read_reader_to_bytes", "records/s", paged[1:], reach={"min": 3e6}, note=note),
        row("deep_read_tailer_to_bytes", "records/s", listed[1:], reach={"min": 3e6}, note=note),
        row("deep_read_to_arrow", "bytes/s", arrow[1:], reach={"min": 1e9}, note=f"{note}; payload bytes"),
    ]


def _rate(count: int, records: int, begun: float) -> float:
    if count != records:
        raise RuntimeError(f"read {count} records of {records}")
    return count / (time.perf_counter() - begun)


def _delete_rows(host: Host, records: int) -> list[Row]:
    each = records // (dataset.FRAME * dataset.CYCLE)
    exact = [_delete_ms(host, f"exact{i}", each) for i in range(dataset.EXACT_TAGS)]
    prefix = [_delete_ms(host, f"p{i}.*", records // 10) for i in range(dataset.PREFIXES)]
    note = "acknowledged: durable, and no reader in any process sees them"
    return [
        row("delete_by_tag_1000_of_10M", "ms", exact, reach={"max": 20}, note=note),
        row("delete_by_prefix_1M_of_10M", "ms", prefix, reach={"max": 1_000}, note=note),
    ]


def _delete_ms(host: Host, match: str, expected: int) -> float:
    begun = time.perf_counter()
    deleted = host.client.topics.delete_records(dataset.TOPIC, match=match).deleted
    took = time.perf_counter() - begun
    if deleted != expected:
        raise RuntimeError(f"{match}: {deleted} deleted, not {expected}")
    return took * 1e3
