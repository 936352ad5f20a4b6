"""Load from producer processes through the public client, with a fixed number of frames in flight."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlog.board.board import Board
from ringlog.board.layout import ProcessField
from ringlog.placement import home_shard

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Shape:
    """Load of one producer: frames of `records` records of `size` bytes, `in_flight` frames at a time."""

    records: int
    size: int
    in_flight: int
    producers: int
    durability: str


@dataclass(frozen=True)
class Measured:
    """One round: acked frames per second over all producers, and the work of the shards."""

    frames_per_s: float
    groups: int
    syncs: int
    bytes: int
    frames: int
    seconds: float
    shard_cpu_s: float


def _produce(url: str, topic: str, shape: Shape, seconds: float, ready: Any, go: Any, results: Any) -> None:
    import ringlog

    # Send large frames in half windows: one half is encoded while the other is synced.
    step = shape.in_flight if shape.records == 1 else max(shape.in_flight // 2, 1)
    payloads = [os.urandom(shape.size) for _ in range(shape.records)] * step
    with ringlog.connect(url, wait=10) as client, client.producer(topic, max_buffer_bytes=256 << 20) as out:
        tickets: deque[tuple[int, Any]] = deque()
        out.send_many(payloads[:1]).result(10)
        ready.release()
        go.wait()
        begun = time.perf_counter()
        acked = flying = 0
        while time.perf_counter() - begun < seconds:
            while flying < shape.in_flight:
                tickets.append((step, out.send_each(payloads, records_per_frame=shape.records)))
                flying += step
            tickets[0][1].result(30)
            while tickets and tickets[0][1].done():
                frames, ticket = tickets.popleft()
                ticket.result(0)
                acked += frames
                flying -= frames
        took = time.perf_counter() - begun
        for _, ticket in tickets:
            ticket.result(30)
    results.put((acked, took))


def topics_for(shards: int, producers: int, prefix: str) -> list[str]:
    """Return one topic name per producer, spread evenly over the shards."""
    names: list[str] = []
    k = 0
    for i in range(producers):
        while home_shard(f"{prefix}{k}", shards) != i % shards:
            k += 1
        names.append(f"{prefix}{k}")
        k += 1
    return names


def counters(shm_dir: str, shards: int) -> np.ndarray[Any, Any]:
    """Return an array of 4: commit batches, syncs, bytes and frames of all shards so far."""
    board = Board.open(shm_dir, writable=False)
    try:
        words = (ProcessField.GROUPS, ProcessField.SYNCS, ProcessField.BYTES, ProcessField.FRAMES)
        found = [[board.process(1 + s).get(w) for w in words] for s in range(shards)]
        total: np.ndarray[Any, Any] = np.array(found).sum(axis=0)
        return total
    finally:
        board.close()


def run(host: Any, shape: Shape, seconds: float, prefix: str) -> Measured:
    """Run one round of load on an engine."""
    names = topics_for(host.shards, shape.producers, prefix)
    for name in names:
        host.client.topics.create(name, durability=shape.durability, exist_ok=True)
    ready, go, results = _spawn.Semaphore(0), _spawn.Event(), _spawn.Queue()
    processes = [
        _spawn.Process(target=_produce, args=(host.url, name, shape, seconds, ready, go, results))
        for name in names
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    before, cpu = counters(host.shm_dir, host.shards), host.shard_cpu_s()
    begun = time.perf_counter()
    go.set()
    found = [results.get() for _ in processes]
    took = time.perf_counter() - begun
    after, cpu_after = counters(host.shm_dir, host.shards), host.shard_cpu_s()
    for process in processes:
        process.join()
    groups, syncs, size, frames = (after - before).tolist()
    rate = sum(acked / seconds_ for acked, seconds_ in found)
    return Measured(rate, groups, syncs, size, frames, took, cpu_after - cpu)
