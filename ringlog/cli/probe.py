"""Measurements and facts of this machine that need no engine: sync latency, CPU, memory, kernel."""

from __future__ import annotations

import os
import platform
import secrets
from dataclasses import dataclass
from typing import Any

from ringlog.clock import Clock
from ringlog.storage.disk import Disk
from ringlog.storage.real_disk import RealDisk

PROBE_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Durations of single syncs in seconds, ascending."""

    sorted_s: list[float]

    def quantile_ms(self, q: float) -> float:
        """Return the q-quantile (nearest rank) in milliseconds."""
        return quantile(self.sorted_s, q) * 1000


def quantile(ascending: list[float], q: float) -> float:
    """Return the nearest-rank quantile of a non-empty ascending list."""
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
    """Return `path`, or its nearest existing parent directory: the file system where its data would be."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def machine_facts() -> dict[str, Any]:
    """Return the facts of the machine that are needed to interpret a measurement."""
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
