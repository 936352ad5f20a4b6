"""Delivery, from an append to the watches. `make bench AREA=delivery`."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from bench import routing
from bench.floor import Floor
from bench.host import Host
from bench.rows import Row, progress, row, scaled
from bench.watchers import Watchers, stamp
from ringlog.client import Page
from ringlog.types import Durability

ROUNDS = 5
APPENDS = 300
FRAME = 1_000
PAYLOAD = bytes(92)
FIRST = 50
"""Number of appends to one watcher that are not timed: the first one opens a ring, the next ones warm up the
processes."""
ALONE = "storage.enabled=false"
LEVELS = ("disk", "fsync")
BEHIND = 2_000
"""Approximate backlog of each topic in records: twice the number that is added at once."""
BANDS = {750: 8, 500: 4, 250: 2, 0: 1, -500: 1}
"""A priority in each band, and the band's weight. Each priority is the lowest of its band: a topic that waits
for 1.5 s rises by 150, which must not lead into the next band."""


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, or those of parts whose name contains `only`."""
    found: list[Row] = []
    for name, build in (
        ("one_watcher", _one_rows),
        ("fan_out", _fan_out_rows),
        ("thousand", _thousand_row),
        ("stopped", _stopped_row),
        ("routers", routing.rows),
        ("saturation", _saturation_rows),
    ):
        if only in name:
            progress(name)
            built = build()
            found += built if isinstance(built, list) else [built]
    return found


def _one_rows() -> list[Row]:
    """Measure one watcher on a quiet host. The time starts before the append."""
    p50s: dict[str, list[float]] = {level: [] for level in LEVELS}
    p99s: dict[str, list[float]] = {level: [] for level in LEVELS}
    floors: list[float] = []
    for i in range(ROUNDS):
        progress(f"  round {i + 1}/{ROUNDS}")
        with Host(2, ALONE) as host:
            floor = Floor(host.directory)
            floors.append(statistics.median(floor.single_writes(328, 300)) * 1e6)
            floor.close()
            for level in LEVELS:
                times = _one_watcher(host, level)
                p50s[level].append(float(np.percentile(times, 50)) / 1e3)
                p99s[level].append(float(np.percentile(times, 99)) / 1e3)
    note = "an append every 2 ms; from before the append to the record in the watcher's hands"
    return [
        row("delivery_disk_p50", "us", p50s["disk"], reach={"max": 500}, note=note),
        row("delivery_disk_p99", "us", p99s["disk"], reach={"max": 3_000}, note=note),
        row(
            "delivery_fsync_p50", "us", p50s["fsync"], floors, reach={"above_floor": 500},
            note=f"floor: one write and one sync; {note}",
        ),
        row("delivery_fsync_p99", "us", p99s["fsync"], note=note),
    ]  # fmt: skip


def _one_watcher(host: Host, level: str) -> NDArray[np.int64]:
    """Return nanoseconds from before each append to the watcher.

    The first appends, which open rings, are left out.
    """
    host.client.topics.create(level, durability=Durability.parse(level))
    warm, count = scaled(FIRST, 5), scaled(APPENDS, 20)
    watchers = Watchers(host.url, [level], frame=1, processes=1, each=1, untimed=warm)
    for _ in range(warm + count):
        host.client.append(level, stamp() + PAYLOAD)
        time.sleep(0.002)
    _, times = watchers.end(warm + count)
    return times


WARM_UP = 10
"""Number of frames to a thousand watchers that are not timed. Their processes have just created some ten
thousand objects each, and collect garbage once because of them."""


def _frames(host: Host, topic: str, count: int, every_s: float = 0.0) -> float:
    """Append frames of 1,000 records. Returns the seconds that this took."""
    begun = time.perf_counter()
    for n in range(count):
        host.client.append_many(topic, [stamp() + PAYLOAD] + [PAYLOAD + b"12345678"] * (FRAME - 1))
        ahead = begun + (n + 1) * every_s - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)
    return time.perf_counter() - begun


def _fan_out_rows() -> list[Row]:
    """Measure the maximum rate of 1, 10 and 100 watchers of one topic."""
    found = []
    for watchers, processes, frames in ((1, 1, 2_000), (10, 2, 1_000), (100, 2, 300)):
        rates = []
        for i in range(3):
            progress(f"fan-out {watchers}, round {i + 1}/3")
            with Host(2, ALONE) as host:
                host.client.topics.create("t", durability="disk")
                crowd = Watchers(
                    host.url, ["t"], frame=FRAME, processes=processes, each=watchers // processes
                )
                count = scaled(frames, 20)
                begun = time.perf_counter()
                _frames(host, "t", count)
                deliveries, _ = crowd.end(count * FRAME)
                rates.append(deliveries / (time.perf_counter() - begun))
        reach: dict[str, float] | None = {"min": 5e6} if watchers == 100 else None
        note = f"{processes} processes, frames of 1,000 records of 100 bytes"
        found.append(row(f"fan_out_{watchers}", "deliveries/s", rates, reach=reach, note=note))
    return found


def _thousand_row() -> Row:
    """Measure a thousand watchers of one topic at ten frames per second, after a warm-up."""
    p99s = []
    for _ in range(3):
        with Host(2, ALONE) as host:
            host.client.topics.create("t", durability="disk")
            _frames(host, "t", 1)  # The first append opens the producer's ring.
            crowd = Watchers(
                host.url, ["t"], frame=FRAME, processes=4, each=250, untimed=(1 + WARM_UP) * FRAME
            )
            count = WARM_UP + scaled(100, 8)
            _frames(host, "t", count, every_s=0.1)
            deliveries, times = crowd.end(count * FRAME)
            assert deliveries == count * FRAME * 1_000, "every watcher has every record once"
            p99s.append(float(np.percentile(times, 99)) / 1e6)
    note = "4 processes of 250, none of a million deliveries a frame lost"
    return row("watchers_1000_p99", "ms", p99s, reach={"max": 20}, note=note)


def _stopped_row() -> Row:
    """Compare 99 watchers beside a stopped one with 99 beside a running one."""
    beside: list[float] = []
    alone: list[float] = []
    for _ in range(3):
        for stops, into in ((False, alone), (True, beside)):
            with Host(2, ALONE) as host:
                host.client.topics.create("t", durability="disk")
                _frames(host, "t", 1)
                one = Watchers(host.url, ["t"], frame=FRAME, processes=1, each=1, stops=stops)
                crowd = Watchers(host.url, ["t"], frame=FRAME, processes=3, each=33)
                count = scaled(100, 10)
                _frames(host, "t", count, every_s=0.05)
                _, times = crowd.end(count * FRAME)
                into.append(float(np.percentile(times, 99)) / 1e6)
                one.kill()
    note = "p99 of the 99 others, in ms, against the same with all 100 awake"
    return row("stopped_watcher", "ms", beside, alone, reach={"ratio_max": 1.1}, note=note)


def _saturation_rows() -> list[Row]:
    """Measure a thousand lagging topics in five bands, with a watcher that reads less than is available."""
    seconds = scaled(300, 10)
    with Host(2, ALONE) as host:
        names = {priority: [f"p{priority}.{n}" for n in range(200)] for priority in BANDS}
        for priority, topics in names.items():
            for name in topics:
                host.client.topics.create(name, durability="disk", priority=priority)
        every = [name for topics in names.values() for name in topics]
        band_of = {name: priority for priority, topics in names.items() for name in topics}
        for name in every:
            host.client.append_many(name, [PAYLOAD] * BEHIND)
        left = dict.fromkeys(every, BEHIND)
        memory: list[float] = []
        served: Counter[int] = Counter()
        last: dict[str, float] = {}
        longest = 0.0
        begun = time.perf_counter()
        with host.client.watch(every, limit=10, credit=8) as watch:
            watch.open()
            looked = 0.0
            while (now := time.perf_counter() - begun) < seconds:
                event = watch.next(1.0)
                if isinstance(event, Page):
                    served[band_of[event.topic]] += 1
                    longest = max(longest, now - last.get(event.topic, 0.0))
                    last[event.topic] = now
                    left[event.topic] -= len(event)
                    if left[event.topic] < BEHIND // 2:
                        # A topic that is read to its end would no longer take part.
                        left[event.topic] += BEHIND // 2
                        host.client.append_many(event.topic, [PAYLOAD] * (BEHIND // 2))
                if now >= looked:
                    looked = now + seconds / 20
                    memory.append(_scheduler_mib(host))
        starved = len(every) - len(last)
    total = sum(BANDS.values())
    off = max(
        abs(served[priority] / served.total() - weight / total) / (weight / total)
        for priority, weight in BANDS.items()
    )
    shares = ", ".join(f"{served[p]}" for p in BANDS)
    note = f"{seconds} s; turns by band {shares}; longest wait of a topic {longest:.1f} s"
    return [
        row("saturation_shares_off", "part of the weight", [off], reach={"max": 0.05}, note=note),
        row("saturation_starved", "topics", [starved], reach={"max": 0}, note=note),
        row(
            "saturation_memory_growth",
            "part",
            [memory[-1] / memory[len(memory) // 4] - 1],
            reach={"max": 0.05},
            note=f"scheduler's own memory, last against a quarter in; {memory[-1]:.1f} MiB",
        ),
    ]


def _scheduler_mib(host: Host) -> float:
    pids = [p.pid for p in host.processes() if p.name().startswith("scheduler")]
    uss: Any = sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
    return float(uss) / (1 << 20)
