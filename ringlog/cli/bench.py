"""`ringlog bench`: measure an engine on this machine through the public client."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from ringlog.cli.bench_engine import engine_for
from ringlog.cli.option_parsing import human_bytes, parse_durability, within
from ringlog.cli.options import Options
from ringlog.cli.output import Format
from ringlog.cli.probe import existing_parent, machine_facts, quantile, time_syncs
from ringlog.errors import Internal
from ringlog.limits import BATCH_RECORDS_MAX, RECORD_BYTES_MAX
from ringlog.types import Durability

if TYPE_CHECKING:
    from ringlog.client import Client
    from ringlog.client.read.tail_batch import TailBatch

Given = Annotated[Options, Parameter(parse=False)]
PRODUCERS_MAX = 64
WINDOW_MAX = 8_192
RECORDS_MAX = 100_000_000
SYNCS_MAX = 100_000
FILL_FRAME_RECORDS = 1_000
SINGLE_APPENDS = 1_000
SYNC_BYTES = (4 << 10, 64 << 10, 1 << 20)
Rows = list[dict[str, Any]]
RecordBytes = Annotated[int, Parameter(validator=within(1, RECORD_BYTES_MAX))]
Seconds = Annotated[float, Parameter(validator=within(0.1, 86_400))]


def append(
    *,
    durability: str = "fsync",
    frame_records: Annotated[int, Parameter(validator=within(1, BATCH_RECORDS_MAX))] = 100,
    record_bytes: RecordBytes = 100,
    producers: Annotated[int, Parameter(validator=within(1, PRODUCERS_MAX))] = 2,
    window: Annotated[int, Parameter(validator=within(1, WINDOW_MAX))] = 256,
    seconds: Seconds = 3.0,
    dir: str = ".",
    options: Given,
) -> None:
    """Measure appends by several processes.

    Parameters
    ----------
    durability
        Durability of the topic: ephemeral, memory, disk or fsync.
    frame_records
        Records per frame.
    record_bytes
        Bytes per record.
    producers
        Number of appending processes.
    window
        Unacknowledged frames per process.
    seconds
        Duration in seconds.
    dir
        Parent directory of the bench's own engine, used without --url and RINGLOG_URL.

    Examples
    --------
    ringlog bench append --durability fsync --seconds 3
    """
    from ringlog.cli.bench_work import AppendWork

    wanted = parse_durability(durability)
    with engine_for(options, dir) as url, _topic(url, wanted) as (_, topic):
        results = _run_processes(
            [AppendWork(url, topic, frame_records, record_bytes, window, seconds)] * producers
        )
    took = max(result.seconds for result in results)
    records = sum(result.records for result in results)
    acks = sorted(ms for result in results for ms in result.ack_ms)
    row = {
        "class": durability, "producers": producers, "frame_records": frame_records,
        "record_bytes": record_bytes, "records_per_s": round(records / took),
        "frames_per_s": round(sum(result.frames for result in results) / took),
        "mb_per_s": round(records * record_bytes / took / 1e6, 1),
        "ack_p50_ms": round(quantile(acks, 0.5), 3), "ack_p99_ms": round(quantile(acks, 0.99), 3),
    }  # fmt: skip
    _report("append", [row], options)


def read(
    *,
    records: Annotated[int, Parameter(validator=within(1, RECORDS_MAX))] = 500_000,
    record_bytes: RecordBytes = 100,
    dir: str = ".",
    options: Given,
) -> None:
    """Fill a topic and measure every way to read it.

    Parameters
    ----------
    records
        Number of records.
    record_bytes
        Bytes per record.
    dir
        Parent directory of the bench's own engine, used without --url and RINGLOG_URL.

    Examples
    --------
    ringlog bench read --records 500000
    """
    with engine_for(options, dir) as url, _topic(url, Durability.DISK) as (client, topic):
        _fill(client, topic, records, record_bytes)
        rows = [
            _timed(method, run, records, record_bytes, options)
            for method, run in _read_methods(client, topic).items()
        ]
    _report("read", rows, options)


def ring(*, record_bytes: RecordBytes = 100, seconds: Seconds = 2.0, dir: str = ".", options: Given) -> None:
    """Measure the round trip to a shard without a disk.

    Appends to an ephemeral topic, one record at a time.

    Parameters
    ----------
    record_bytes
        Bytes per record.
    seconds
        Maximum duration in seconds.
    dir
        Parent directory of the bench's own engine, used without --url and RINGLOG_URL.

    Examples
    --------
    ringlog bench ring
    """
    clock = options.clock
    with engine_for(options, dir) as url, _topic(url, Durability.EPHEMERAL) as (client, topic):
        payload = bytes(record_bytes)
        client.append(topic, payload)
        times: list[float] = []
        end = clock.monotonic_ns() + round(seconds * 1e9)
        while clock.monotonic_ns() < end or len(times) < SINGLE_APPENDS:
            began = clock.monotonic_ns()
            client.append(topic, payload)
            times.append((clock.monotonic_ns() - began) / 1e3)
    times.sort()
    row = {
        "record_bytes": record_bytes, "appends": len(times), "p50_us": round(quantile(times, 0.5), 1),
        "p99_us": round(quantile(times, 0.99), 1), "max_us": round(times[-1], 1),
    }  # fmt: skip
    _report("ring", [row], options)


def sync(
    *,
    dir: str = ".",
    count: Annotated[int, Parameter(validator=within(1, SYNCS_MAX))] = 200,
    options: Given,
) -> None:
    """Measure fdatasync of the disk, without an engine.

    This is the lower bound of every fsync append.

    Parameters
    ----------
    dir
        Directory on the disk to measure.
    count
        Number of syncs per size.

    Examples
    --------
    ringlog bench sync --dir /var/lib/ringlog
    """
    rows: Rows = []
    for size in SYNC_BYTES:
        times = time_syncs(existing_parent(dir), count, options.clock, size)
        rows.append(
            {
                "write": human_bytes(size),
                "p50_ms": round(times.quantile_ms(0.5), 3),
                "p99_ms": round(times.quantile_ms(0.99), 3),
                "max_ms": round(times.quantile_ms(1.0), 3),
            }
        )
    _report("sync", rows, options)


# -- helpers --------------------------------------------------------------------------------------------


@contextmanager
def _topic(url: str, durability: Durability) -> Iterator[tuple[Client, str]]:
    """Yield a topic that is deleted at the end of the benchmark."""
    import ringlog

    topic = f"bench-{secrets.token_hex(6)}"
    with ringlog.connect(url, wait=10.0) as client:
        client.topics.create(topic, durability=durability)
        try:
            yield client, topic
        finally:
            client.topics.delete(topic)


def _run_processes(works: list[Any]) -> list[Any]:
    """Run each work in its own process. All processes start at the same time."""
    from ringlog.cli.bench_work import GO, READY, AppendResult

    command = [sys.executable, "-P", "-m", "ringlog.cli.bench_work"]
    children = [
        subprocess.Popen(
            [*command, msgspec.json.encode(work).decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )
        for work in works
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline().strip() != READY:
                raise Internal("a process of the bench failed", reason="worker")
        for child in children:
            assert child.stdin is not None
            child.stdin.write(GO)
            child.stdin.flush()
        return [msgspec.json.decode(child.communicate()[0], type=AppendResult) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _fill(client: Client, topic: str, records: int, record_bytes: int) -> None:
    payload = bytes(range(256)) * (record_bytes // 256 + 1)
    frame = [payload[:record_bytes]] * min(FILL_FRAME_RECORDS, max(1, (1 << 20) // record_bytes))
    with client.producer(topic, create=False) as producer:
        left = records
        while left > 0:
            producer.send_many(frame[:left])
            left -= len(frame)


def _read_methods(client: Client, topic: str) -> dict[str, Callable[[], int]]:
    """Return method of reading -> function that reads all records and returns their number."""

    def pages() -> int:
        return sum(len(page.bytes()) for page in client.reader(topic).pages(10_000))

    def objects() -> int:
        return sum(1 for _ in client.reader(topic))

    def tailer(take: Callable[[TailBatch], int]) -> Callable[[], int]:
        from ringlog.client.read.tail_batch import TailBatch

        def run() -> int:
            with client.tailer(topic, follow=False) as items:
                return sum(take(item) for item in items if isinstance(item, TailBatch))

        return run

    ways = {"reader, records": objects, "reader, pages of bytes": pages}
    if client.transport == "ring":
        ways["tailer, bytes"] = tailer(lambda batch: len(batch.bytes()))
        if importlib.util.find_spec("pyarrow"):
            ways["tailer, Arrow"] = tailer(lambda batch: batch.arrow().num_rows)
    return ways


def _timed(
    way: str, run: Callable[[], int], records: int, record_bytes: int, options: Options
) -> dict[str, Any]:
    run()  # Warm up the page cache and imports.
    began = options.clock.monotonic_ns()
    seen = run()
    seconds = (options.clock.monotonic_ns() - began) / 1e9
    if seen != records:
        raise Internal("the bench read another number of records than it wrote", read=seen, wrote=records)
    return {
        "way": way, "records_per_s": round(records / seconds),
        "mb_per_s": round(records * record_bytes / seconds / 1e6, 1), "seconds": round(seconds, 3),
    }  # fmt: skip


def _report(name: str, rows: Rows, options: Options) -> None:
    printer = options.printer()
    if printer.format is Format.JSON:
        printer.item({"bench": name, "results": rows, "machine": machine_facts()})
        return
    if printer.format is not Format.TABLE:
        printer.rows([{"bench": name, **row, "machine": machine_facts()} for row in rows])
        return
    printer.rows(rows)
    facts = machine_facts()
    printer.caption("")
    printer.caption("  ".join(f"{key}={value}" for key, value in facts.items()))
