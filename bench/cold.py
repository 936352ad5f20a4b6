"""A cold store that takes 2 s per request, and its effect on writers and live readers."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np

from bench import dataset
from bench.host import Host
from bench.rows import Row, progress, row, scaled
from bench.slow_store import SlowStore

SECONDS = 6.0
ROUNDS = 3
DELAY_S = 2.0
SEALED_RECORDS = 400_000
SMALL = ("storage.segment_bytes=1MiB", "storage.own_segment_bytes=64KiB", "wal.file_bytes=4MiB")

_spawn = multiprocessing.get_context("spawn")


def cold_rows() -> list[Row]:
    """Measure rounds with the slow store, each beside a round without a cold tier."""
    write: dict[bool, list[float]] = {True: [], False: []}
    live: dict[bool, list[float]] = {True: [], False: []}
    requests = []
    for i in range(ROUNDS):
        progress(f"cold round {i + 1}/{ROUNDS}")
        for is_cold in (False, True):
            with SlowStore(DELAY_S) as store:
                sets = (
                    ("cold.url=s3://bench/cold", "cold.hot_segments=0", "cold.interval_s=0.2")
                    if is_cold
                    else ()
                )
                with Host(1, "storage.enabled=true", *SMALL, *sets, environ=store.environ) as host:
                    written, seen = _measure(host)
                write[is_cold].append(written)
                live[is_cold].append(seen)
                requests += [store.requests] if is_cold else []
    if not min(requests):
        raise RuntimeError("the cold store received no request")
    note = f"{DELAY_S:.0f} s a request, {min(requests)} requests a round; against: no cold tier"
    return [
        row(
            "write_p99_with_slow_cold_store",
            "us",
            write[True],
            write[False],
            reach={"ratio_max": 1.25},
            note=note,
        ),
        row(
            "live_read_p99_with_slow_cold_store",
            "us",
            live[True],
            live[False],
            reach={"ratio_max": 1.25},
            note=note,
        ),
    ]


def _measure(host: Host) -> tuple[float, float]:
    """Return (p99 of an append's ack, p99 until a follower has the record), in microseconds."""
    client = host.client
    client.topics.create("old", durability="disk")
    with client.producer("old") as out:
        out.send_each([b"x" * 100] * scaled(SEALED_RECORDS, 40_000), records_per_frame=1_000)
    dataset.checkpoint(host)
    client.topics.create("live", durability="fsync")
    ended = _spawn.Event()
    reader = _spawn.Process(target=_read_old, args=(host.url, ended))
    reader.start()
    tailer = client.tailer("live")
    acks, seen = [], []
    deadline = time.perf_counter() + scaled(round(SECONDS * 1_000), 1_000) / 1_000
    while time.perf_counter() < deadline:
        begun = time.perf_counter()
        client.append("live", b"x" * 100)
        acked = time.perf_counter()
        if tailer.next(10.0) is None:
            raise RuntimeError("the follower did not get the record")
        seen.append(time.perf_counter() - acked)
        acks.append(acked - begun)
    tailer.close()
    ended.set()
    reader.join(60)
    return float(np.percentile(acks, 99)) * 1e6, float(np.percentile(seen, 99)) * 1e6


def _read_old(url: str, ended: Any) -> None:
    """Read the relocated records repeatedly. This reader waits for the cold store; no other client may."""
    import ringlog
    from ringlog.errors import RinglogError

    with ringlog.connect(url, wait=10) as client:
        while not ended.is_set():
            try:
                for _ in client.reader("old").pages(1_000):
                    if ended.is_set():
                        break
            except RinglogError:
                continue
