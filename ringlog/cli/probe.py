"""Measuring this machine without an engine: how long its disk needs, what it runs on."""

from __future__ import annotations

import os
import platform
import secrets
from dataclasses import dataclass
from typing import Any

from ringlog.clock import Clock
from ringlog.storage.disk import Disk, RealDisk

PROBE_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Times of single syncs, seconds, ascending."""

    sorted_s: list[float]

    def quantile_ms(self, q: float) -> float:
        """The q-quantile (nearest rank) in milliseconds."""
        return quantile(self.sorted_s, q) * 1000


def quantile(ascending: list[float], q: float) -> float:
    """Nearest-rank quantile of a non-empty ascending list."""
    return ascending[min(int(q * len(ascending)), len(ascending) - 1)]


def time_syncs(directory: str, count: int, clock: Clock, write_bytes: int = 4096) -> SyncTimes:
    """Write `write_bytes` to a preallocated file in `directory` and sync them, `count` times."""
    disk = RealDisk()
    path = os.path.join(directory, f".ringlog-probe-{secrets.token_hex(4)}")
    fd = disk.create(path)
    try:
        disk.zero_fill(fd, 0, max(PROBE_FILE_BYTES, write_bytes))
        disk.sync_file(fd)
        return SyncTimes(sorted(_time_one(disk, fd, i, clock, write_bytes) for i in range(count)))
    finally:
        disk.close(fd)
        disk.unlink(path)


def _time_one(disk: Disk, fd: int, i: int, clock: Clock, write_bytes: int) -> float:
    block = os.urandom(write_bytes)
    offset = i * write_bytes % max(PROBE_FILE_BYTES, write_bytes)
    began = clock.monotonic_ns()
    disk.write_at(fd, [block], offset)
    disk.sync_data(fd)
    return (clock.monotonic_ns() - began) / 1e9


def existing_parent(path: str) -> str:
    """`path`, or the nearest directory above it that exists: where its data would lie."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def machine_facts() -> dict[str, Any]:
    """What a figure needs beside it to mean something."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return "unknown"
    return "unknown"
