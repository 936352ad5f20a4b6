"""Compaction of a gigabyte of one-record frames, alone and beside a client that waits for each ack."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from bench import dataset
from bench.host import Host
from bench.load import Shape, counters, run
from bench.rows import Row, progress, row, scaled
from ringlog.board.board import Board
from ringlog.board.layout import HistogramKind, ProcessState
from ringlog.board.processes import COMPACTOR, shard_slot, slot_of

COMPACTED_BYTES = 1 << 30
FILL_STEP_BYTES = 1 << 28
ROUNDS = 3
IDLE_S = 3.0
READY_S = 20.0
ON, OFF = "storage.enabled=true", "storage.enabled=false"


class Pass(threading.Thread):
    """A checkpoint in the background. `ended` is the time of its end; 0 if it failed."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host
        self.ended = 0.0

    def run(self) -> None:
        """Request the checkpoint and wait for it."""
        dataset.checkpoint(self._host)
        self.ended = time.perf_counter()


def _is_before(deadline: float) -> bool:
    return time.perf_counter() < deadline


def compaction_rows() -> list[Row]:
    """Measure compaction alone and beside a client.

    In each round an engine first absorbs a gigabyte of log without other work. Then it absorbs an eighth of
    that while a client waits for its acks; there the compactor pauses (actors/compactor/throttle.py).
    """
    rates, beside = [], []
    idle, busy = _Acks(), _Acks()
    for i in range(ROUNDS):
        progress(f"compaction round {i + 1}/{ROUNDS}")
        with Host(1, OFF) as host:
            size = _fill(host, scaled(COMPACTED_BYTES, 4 << 20))
            host.restart(ON)
            rates.append(size / _pass_s(host))
            host.restart(OFF)
            size = _fill(host, scaled(COMPACTED_BYTES // 8, 4 << 20))
            host.client.topics.create("lone", durability="fsync")
            deadline = time.perf_counter() + IDLE_S
            idle.measure(host, partial(_is_before, deadline))
            host.restart(ON)
            _wait_compactor(host)
            begun = time.perf_counter()
            made = Pass(host)
            made.start()
            busy.measure(host, made.is_alive)
            made.join()
            if not made.ended or not dataset.segments(host):
                raise RuntimeError("the checkpoint failed")
            beside.append(size / (made.ended - begun))
    return [
        row("compaction_1GiB_of_1x100B", "bytes/s", rates, reach={"min": 100e6}, note="bytes of log"),
        row("compaction_beside_acks", "bytes/s", beside, note="the same beside a client, on two cores"),
        row(
            "shard_fsync_ack_p99_while_compacting", "us", busy.in_shard, idle.in_shard,
            reach={"ratio_max": 1.5}, note="from taken to settled, by the shard; against: no compaction",
        ),
        row(
            "client_fsync_ack_p99_while_compacting", "us", busy.at_client, idle.at_client,
            note="one client, one record at a time, a third party for two cores",
        ),
    ]  # fmt: skip


def _wait_compactor(host: Host) -> None:
    """Wait until the compactor is ready.

    The engine is ready with its shards; the compactor's interpreter takes half a second more.
    """
    board = Board.open(host.shm_dir, writable=False)
    try:
        state = board.process(slot_of(COMPACTOR, host.shards))
        deadline = time.perf_counter() + READY_S
        while state.state != ProcessState.READY:
            if time.perf_counter() > deadline:
                raise RuntimeError("the compactor does not start")
            time.sleep(0.001)
    finally:
        board.close()


def _pass_s(host: Host) -> float:
    _wait_compactor(host)
    begun = time.perf_counter()
    made = Pass(host)
    made.start()
    made.join()
    if not made.ended:
        raise RuntimeError("the checkpoint failed")
    return made.ended - begun


def _fill(host: Host, size: int) -> int:
    """Write at least `size` bytes of log. Returns the number of bytes."""
    begun = int(counters(host.shm_dir, host.shards)[2])
    written = 0
    while written < size:
        seconds = 3.0 if size - written > FILL_STEP_BYTES else 0.5
        run(host, Shape(1, 100, 256, 4, "disk"), seconds, "one")
        written = int(counters(host.shm_dir, host.shards)[2]) - begun
    return written


class _Acks:
    """p99 of single fsync appends, one at a time, at the client and within the shard."""

    def __init__(self) -> None:
        self.at_client: list[float] = []
        self.in_shard: list[float] = []

    def measure(self, host: Host, goes_on: Callable[[], bool]) -> None:
        """Measure one round, in microseconds, while `goes_on()` is true."""
        board = Board.open(host.shm_dir, writable=False)
        try:
            histogram = board.process(shard_slot(0)).histogram(HistogramKind.COMMIT)
            before = histogram.snapshot()
            self.at_client.append(ack_p99_us(host, goes_on))
            self.in_shard.append(histogram.snapshot().since(before).percentile(99) / 1e3)
        finally:
            board.close()


def ack_p99_us(host: Host, goes_on: Callable[[], bool]) -> float:
    """Return the p99 (us) of single fsync appends, one at a time, while `goes_on()` is true."""
    times: list[float] = []
    while goes_on() or len(times) < 100:
        begun = time.perf_counter()
        host.client.append("lone", b"x" * 100)
        times.append(time.perf_counter() - begun)
    return float(np.percentile(times, 99)) * 1e6
