"""A hundred thousand topics with one record each: create, list, seal, restart."""

from __future__ import annotations

import asyncio
import statistics
import time

import ringlog.aio
from bench import dataset
from bench.host import Host
from bench.rows import Row, progress, row, scaled

TOPICS = 100_000
AT_ONCE = 256
ROUNDS = 3


def many_rows() -> list[Row]:
    """Measure one engine with two shards."""
    count = scaled(TOPICS, AT_ONCE)
    names = [f"sensor.{i:06d}" for i in range(count)]
    with Host(2, "storage.enabled=true", f"limits.max_topics={2 * TOPICS}") as host:
        empty = _memory_after_restart(host)
        progress(f"{count:,} topics")
        created = asyncio.run(_create(host.url, names))
        asyncio.run(_append(host.url, names))
        begun = time.perf_counter()
        before = dataset.segments(host)
        dataset.checkpoint(host)
        took = time.perf_counter() - begun
        made = dataset.segments(host) - before
        pages = _list_pages_ms(host)
        restarts = []
        for _ in range(ROUNDS):
            host.stop()
            host.start()
            restarts.append(host.started_s)
        memory = (host.shard_bytes() - empty) / count
    part = f"{count:,} topics, one record each"
    return [
        row("topics_100k_create", "s", [created], reach={"max": 60}, note=f"{AT_ONCE} at once; {part}"),
        row("topics_100k_list_page", "ms", pages, reach={"max": 5}, note="100 names, both shards"),
        row("topics_100k_restart", "s", restarts, reach={"max": 10}, note=part),
        row("topics_100k_memory_each", "bytes", [memory], reach={"max": 2_048}, note="shards' own memory"),
        row(
            "topics_100k_checkpoint_segments", "segments", [made], reach={"max": 1_000},
            note=f"made by one checkpoint that touches all; at most 4 syncs each; it took {took:.1f} s",
        ),
    ]  # fmt: skip


def _memory_after_restart(host: Host) -> int:
    host.restart()
    return host.shard_bytes()


async def _create(url: str, names: list[str]) -> float:
    async with ringlog.aio.connect(url, wait=10, timeout_ms=60_000) as client:
        begun = time.perf_counter()
        for at in range(0, len(names), AT_ONCE):
            await asyncio.gather(
                *(client.topics.create(name, durability="disk") for name in names[at : at + AT_ONCE])
            )
        return time.perf_counter() - begun


async def _append(url: str, names: list[str]) -> None:
    async with ringlog.aio.connect(url, wait=10, timeout_ms=60_000) as client:
        for at in range(0, len(names), AT_ONCE):
            await asyncio.gather(*(client.append(name, b"one record") for name in names[at : at + AT_ONCE]))


def _list_pages_ms(host: Host) -> list[float]:
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            next(iter(host.client.topics.list("sensor.", page_size=100)))
            times.append(time.perf_counter() - begun)
        rounds.append(statistics.median(times) * 1e3)
    return rounds
