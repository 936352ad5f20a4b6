"""The commit path, from producers to acks, compared with the floor of the disk. `make bench AREA=commit`."""

from __future__ import annotations

import statistics
import time

from bench import encode, imports
from bench.floor import FILLED_BELOW_BYTES_PER_S, Floor
from bench.host import Host, ran_s
from bench.kills import kill_rows
from bench.load import Measured, Shape, run
from bench.rows import Row, progress, row
from bench.tail import tail_rows

ROUNDS = 5
SECONDS = 1.5
COMMIT_ALONE = "storage.enabled=false"
"""Measure only the path from producers to acks. The cost of compaction is a row of area `storage`."""

LOADS: list[tuple[str, Shape, dict[str, float]]] = [
    ("fsync_1x100B_4x256", Shape(1, 100, 256, 4, "fsync"), {"min": 100_000, "ratio": 0.6}),
    ("fsync_100x100B_2", Shape(100, 100, 256, 2, "fsync"), {"min": 4_000_000, "ratio": 0.7}),
    ("fsync_1000x100B_2", Shape(1000, 100, 16, 2, "fsync"), {"min": 4_000_000, "ratio": 0.7}),
    ("disk_1000x100B_2", Shape(1000, 100, 16, 2, "disk"), {"min": 8_000_000}),
    ("disk_1000x1KiB_2", Shape(1000, 1024, 4, 2, "disk"), {"ratio": 0.6}),
]


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those whose id contains `only`."""
    found: list[Row] = []
    if only in "encode_100B_x_10000":
        progress("encode")
        found += encode.rows()
    for name, shape, reach in LOADS:
        if only in name:
            found.append(_load_row(name, shape, reach))
    for name, build in (
        ("lone_fsync", _lone_row),
        ("start", _start_rows),
        ("import", imports.rows),
        ("tail", tail_rows),
        ("kill", kill_rows),
    ):
        if only in name:
            progress(name)
            built = build()
            found += built if isinstance(built, list) else [built]
    return found


def _load_row(name: str, shape: Shape, reach: dict[str, float]) -> Row:
    """Measure rounds of load, each followed by the floor for the same work."""
    values: list[float] = []
    floors: list[float] = []
    groups: list[float] = []
    # A new engine for each round. Its files disappear with it, so that no round pays for the page cache that
    # earlier rounds filled.
    for i in range(ROUNDS):
        progress(f"{name} round {i + 1}/{ROUNDS}")
        with Host(2, COMMIT_ALONE) as host:
            warm = run(host, shape, 0.4, "load")
            is_slow = warm.bytes / warm.seconds / host.shards < FILLED_BELOW_BYTES_PER_S
            measured = run(host, shape, SECONDS, "load")
            floor = Floor(host.directory, filled=is_slow)
            values.append(measured.frames_per_s * shape.records)
            floors.append(_floor_rate(floor, measured) * shape.records)
            groups.append(measured.frames / max(measured.groups, 1))
            floor.close()
    unit = "acks/s" if shape.records == 1 else "records/s"
    note = f"{statistics.median(groups):.0f} frames a group; floor: one loop, same groups, same syncs"
    return row(name, unit, values, floors, reach=reach, note=note)


def _floor_rate(floor: Floor, measured: Measured) -> float:
    size = measured.bytes // max(measured.groups, 1)
    return measured.frames / floor.write(size, measured.groups, measured.syncs)


def _lone_row() -> Row:
    """Measure one record at a time, from one thread, to a device sync and back."""
    values: list[float] = []
    floors: list[float] = []
    with Host(2, COMMIT_ALONE) as host:
        floor = Floor(host.directory)
        host.client.topics.create("lone", durability="fsync")
        payload = bytes(100)
        for i in range(ROUNDS + 1):
            times = []
            for _ in range(300):
                begun = time.perf_counter()
                host.client.append("lone", payload)
                times.append(time.perf_counter() - begun)
            bare = floor.single_writes(328, 300)
            if i:
                values.append(statistics.median(times) * 1e6)
                floors.append(statistics.median(bare) * 1e6)
        floor.close()
    return row("lone_fsync_append_p50", "us", values, floors, reach={"above_floor": 150})


def _start_rows() -> list[Row]:
    """Measure the start on an empty directory, and memory and CPU of an idle engine."""
    starts: list[float] = []
    memory: list[float] = []
    busy: list[float] = []
    for i in range(3):
        with Host(2, "gateway.enabled=true", "storage.enabled=true") as host:
            starts.append(host.started_s)
            if i < 2:
                continue
            processes = host.processes()
            time.sleep(1)
            for _ in range(3):
                before = sum(ran_s(p.pid) for p in processes)
                time.sleep(4)
                busy.append((sum(ran_s(p.pid) for p in processes) - before) / 4 * 100)
                memory.append(sum(p.memory_full_info().pss for p in processes) / (1 << 20))
    return [
        row("start_to_ready_empty", "s", starts, reach={"max": 2.0}, note="2 shards and a gateway"),
        row(
            "idle_memory_pss",
            "MiB",
            memory,
            reach={"max": 250},
            note="whole engine, shared pages counted once",
        ),
        row("idle_cpu", "% of a core", busy, reach={"max": 1.0}, note="whole engine"),
    ]
