"""Queues, compared with Redis and beanstalkd. `make bench AREA=queue`.

The systems take turns in each round, each with a new server. Rows without a peer's name in their id are
compared with Redis; a comparison with beanstalkd has rows of its own. bench/systems states how each peer is
used. A missing peer is an error: `make peers` installs the peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from bench.host import Host
from bench.rows import Row, progress, row, scaled
from bench.systems import registry
from bench.systems.base import LEASE_MS, TOPIC, QueueServer, Way
from bench.systems.processes import How, deliveries, empty
from bench.systems.ringlog import ALONE, fill
from ringlog.client import NewRecord
from ringlog.client.job import Job

ROUNDS = 3
SECONDS = 5.0
"""Maximum duration (s) of a round that measures a rate."""
SYNCED_JOBS = 20_000
"""Number of jobs for peers that sync each job."""
PAYLOAD = bytes(100)
HOUR_MS = 3_600_000
SYSTEMS = ("ringlog", "redis", "beanstalkd")
"""ringlog is first."""
PUT_EVERY_S = 0.003

READY = 10_000_000
DELAYED = 1_000_000
CLAIMS = 5_000


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    registry.require(*SYSTEMS)
    found: list[Row] = []
    parts: tuple[tuple[str, Callable[[], list[Row]]], ...] = (
        ("batch", lambda: _rate_rows("queue_batch_100_4_workers", 4, 100, "memory", 400_000, 100, 300_000)),
        ("batch loop", lambda: _loop_rows("queue_loop_100_4_workers", 4, 100, "memory", 1_600_000, 300_000)),
        ("single", lambda: _rate_rows("queue_single_disk_1_worker", 1, 1, "disk", 20_000, 1, 10_000)),
        ("single loop", lambda: _loop_rows("queue_loop_disk_1_worker", 1, 1, "disk", 150_000, 10_000)),
        ("fsync", lambda: _rate_rows("queue_single_fsync_64_workers", 64, 1, "fsync", 100_000, 1, 20_000)),
        ("fsync loop", lambda: _loop_rows("queue_loop_fsync_64_workers", 64, 1, "fsync", 100_000, 20_000)),
        ("large", _large_rows),
        ("fair", _fair_rows),
        ("wake", _wake_rows),
    )
    for name, build in parts:
        if only in name:
            progress(name)
            found += build()
    return found


def _rounds(durability: str, measure: Callable[[QueueServer], Any]) -> dict[str, list[Any]]:
    """Return the results of `measure`, by system."""
    found: dict[str, list[Any]] = {name: [] for name in SYSTEMS}
    for i in range(ROUNDS):
        for name, results in found.items():
            progress(f"  {name}, round {i + 1}/{ROUNDS}")
            results.append(_with_server(name, durability, measure))
    return found


def _with_server(name: str, durability: str, measure: Callable[[QueueServer], Any], *sets: str) -> Any:
    """Return the result of `measure` on a new server with one empty queue."""
    server: QueueServer = registry.start(name, durability, *sets)
    try:
        server.create(TOPIC, Way.QUEUE)
        return measure(server)
    finally:
        server.close()


def _against_peers(
    id: str, unit: str, found: dict[str, list[float]], reach: dict[str, float] | None, note: str
) -> list[Row]:
    """Return the row that compares ringlog with Redis, and the one with beanstalkd."""
    ours = found["ringlog"]
    return [
        row(id, unit, ours, found["redis"], reach=reach, note=f"{note}; Redis beside it"),
        row(f"{id}_to_beanstalkd", unit, ours, found["beanstalkd"], note=note),
    ]


def _rate_rows(
    id: str, workers: int, batch: int, durability: str, jobs: int, frame: int, least: float
) -> list[Row]:
    """Measure workers that empty a prefilled queue, at most for SECONDS."""
    count = scaled(jobs, workers * batch * 4)

    def measure_how(how: How) -> Callable[[QueueServer], float]:
        def measure(server: QueueServer) -> float:
            server.fill(TOPIC, PAYLOAD, count + 2 * workers, frame)
            return empty(server, workers, batch, SECONDS, how=how).jobs_per_s

        return measure

    note = f"{count:,} jobs of 100 B put {frame} a frame, {batch} a call, class {durability}"
    return [
        *_against_peers(
            id, "jobs/s", _rounds(durability, measure_how(How.NEXT)), {"min": least}, f"{note}; {How.NEXT}"
        ),
        *_against_peers(
            f"{id}_apart", "jobs/s", _rounds(durability, measure_how(How.APART)), None, f"{note}; {How.APART}"
        ),
    ]


def _loop_rows(id: str, workers: int, batch: int, durability: str, jobs: int, least: float) -> list[Row]:
    """Measure the client's worker loop: each ack is sent with the next claim and not waited for."""
    count = scaled(jobs, workers * max(batch, 64) * 4)

    def measure(server: QueueServer) -> float:
        # The peers sync each put job. A loop of theirs ends when no job is left, as that of ringlog does.
        is_slow = durability == "fsync" and server.name != "ringlog"
        some = min(count, SYNCED_JOBS) if is_slow else count
        server.fill(TOPIC, PAYLOAD, some + workers, 100 if batch > 1 else 1)
        server.end(TOPIC, workers)
        return empty(server, workers, batch, SECONDS, how=How.LOOP).jobs_per_s

    way = (
        "batches(100, max_in_flight=1_000)"
        if batch > 1
        else "jobs(max_in_flight=64, pipelined_acks=True), each job a block of its own"
    )
    note = f"{count:,} jobs of 100 B, class {durability}, {way}; the peers claim and ack as many at once"
    return _against_peers(id, "jobs/s", _rounds(durability, measure), {"min": least}, note)


def _fair_rows() -> list[Row]:
    """Measure how evenly a hundred workers share the jobs."""
    workers, seconds = 100, scaled(5, 1)

    def measure(server: QueueServer) -> float:
        server.fill(TOPIC, PAYLOAD, 100_000 * seconds, 100)
        return empty(server, workers, 1, seconds).variation

    note = f"{workers} processes, one job a claim and an ack, {seconds} s, class memory"
    found = _rounds("memory", measure)
    return _against_peers("queue_fair_100_workers", "coefficient of variation", found, {"max": 0.1}, note)


def _wake_rows() -> list[Row]:
    """Measure a waiting worker while jobs are put one at a time."""
    count = scaled(500, 20)
    puts: list[float] = []

    def measure(server: QueueServer) -> tuple[float, float]:
        times, put = deliveries(server, TOPIC, Way.QUEUE, count, PUT_EVERY_S)
        if server.name == "ringlog":
            puts.append(float(np.percentile(put, 50)) / 1e3)
        return float(np.percentile(times, 50)) / 1e3, float(np.percentile(times, 99)) / 1e3

    found = _rounds("disk", measure)
    p50 = {name: [first for first, _ in values] for name, values in found.items()}
    p99 = {name: [second for _, second in values] for name, values in found.items()}
    note = (
        "a job put every 3 ms, class disk; from before the put to the job in the waiting worker's hands; "
        f"our put alone takes {np.median(puts):.0f} us of it"
    )
    return [
        *_against_peers("queue_wake_up_p50", "us", p50, {"max": 500}, note),
        row("queue_wake_up_p99", "us", p99["ringlog"], p99["redis"], note=f"{note}; Redis beside it"),
    ]


# -- ten million jobs ------------------------------------------------------------------------------------


def _large_rows() -> list[Row]:
    """Measure single claims from a queue of ten million jobs, and the shard's memory.

    A further million jobs are delayed.
    """
    ready, delayed = scaled(READY, 20_000), scaled(DELAYED, 2_000)
    with Host(2, ALONE) as host:
        host.client.topics.create(TOPIC, type="queue", durability="disk", lease_ms=LEASE_MS)
        host.client.topics.create("little", type="queue", durability="disk", lease_ms=LEASE_MS)
        host.client.queue("little").put(PAYLOAD)
        host.client.queue("little").claim()
        before = _shards_bytes(host)
        how = _put_delayed(host, delayed)
        progress(f"  {delayed:,} delayed by {how}")
        fill(host, TOPIC, PAYLOAD, ready, 1_000)
        stats = host.client.queue(TOPIC).stats()
        assert (stats.ready, stats.delayed) == (ready, delayed), f"the queue holds what was put: {stats}"
        progress("  claims")
        host.client.queue(TOPIC).claim()
        memory = (_shards_bytes(host) - before) / (ready + delayed)
        p99s = [_claim_p99_ms(host) for _ in range(ROUNDS)]
        after = (_shards_bytes(host) - before) / (ready + delayed)
    part = f"{ready:,} ready and {delayed:,} delayed by {how}, class disk"
    claims = scaled(CLAIMS, 200)
    return [
        row("queue_10m_claim_p99", "ms", p99s, reach={"max": 2.0},
            note=f"{claims:,} claims of one job each round, as the client sees them; {part}"),
        row("queue_10m_memory_each", "bytes", [memory, after], reach={"max": 50},
            note=f"shards' own memory, before and after the claims; {part}"),
    ]  # fmt: skip


def _put_delayed(host: Host, count: int) -> str:
    """Put jobs that are delayed for more than an hour. Returns how."""
    queue = host.client.queue(TOPIC)
    step = max(count // 1_000, 1)
    begin_us = time.time_ns() // 1_000 + HOUR_MS * 1_000
    for n in range(0, count, step):
        # Each job has its own time, in no order.
        instants = (begin_us + (at * 7_919 % count) * 1_000 for at in range(n, min(n + step, count)))
        queue.put_many([NewRecord(data=PAYLOAD, not_before=at) for at in instants])
    if queue.stats().delayed == count:
        return "not_before, each its own"
    # For an engine without `not_before`: claim all jobs and nack them with a delay.
    for n in range(0, count, step):
        queue.nack(queue.claim(step), delay_ms=HOUR_MS + (n * 7_919 % count))
    return f"nack, {step} at a time"


def _shards_bytes(host: Host) -> int:
    return sum(psutil.Process(pid).memory_full_info().uss for pid in host.shard_pids())


def _claim_p99_ms(host: Host) -> float:
    queue = host.client.queue(TOPIC)
    times: list[float] = []
    jobs: list[Job] = []
    for _ in range(scaled(CLAIMS, 200)):
        begun = time.perf_counter()
        jobs += queue.claim()
        times.append(time.perf_counter() - begun)
    for at in range(0, len(jobs), 1_000):
        queue.ack(jobs[at : at + 1_000])
    return float(np.percentile(times, 99)) * 1e3
