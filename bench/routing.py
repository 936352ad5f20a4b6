"""Routers: the cost of copies for producers of the source, and the frames that copies take in the log."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path

from bench.host import Host
from bench.rows import Row, progress, row, scaled
from ringlog.frame.layout import FrameType
from ringlog.verify.wal_decoder import WalFrameWalk, read_header

ROUNDS = 5
TURNS = 8
"""Passes per round. In each pass every source gets its appends, so that variations of the machine affect all
sources alike."""
APPENDS = 10
RECORDS = 100
PAYLOAD = bytes(100)
EVERY_S = 0.02
"""Time (s) between appends. Copies for a thousand destinations take 11 ms of the two CPUs."""
SHARDS = 2
ROUTERS = (0, 1, 10, 100, 1_000)


def rows() -> list[Row]:
    """Compare acks of sources with 1 to 1,000 routers with those of a source without routers.

    Also counts the frames in the log.
    """
    acks: dict[int, list[float]] = {routers: [] for routers in ROUTERS}
    appends = 0
    with Host(SHARDS, "storage.enabled=false") as host:
        for routers in ROUTERS:
            _make(host, routers)
        for i in range(ROUNDS):
            progress(f"  {', '.join(map(str, ROUTERS))} routers, round {i + 1}/{ROUNDS}")
            times: dict[int, list[float]] = {routers: [] for routers in ROUTERS}
            for _ in range(scaled(TURNS, 1)):
                for routers in ROUTERS:
                    times[routers] += _append(host, routers)
            appends += len(times[0])
            for routers in ROUTERS:
                acks[routers].append(statistics.median(times[routers]) * 1e6)
        host.stop()
        frames = _routed_frames(host.data_dir)
    note = f"an append of {RECORDS} records every {EVERY_S * 1e3:.0f} ms; against the same without routers"
    found = [
        row(f"routers_{routers}_ack_p50", "us", acks[routers], acks[0], reach={"ratio_max": 1.1}, note=note)
        for routers in ROUTERS[1:]
    ]
    # The payload is written once for each shard that has destinations. One destination is in one shard.
    most = sum(min(routers, SHARDS) for routers in ROUTERS)
    each = f"an append to each of the sources; by how many copies they hold: {dict(sorted(frames.items()))}"
    found.append(row("routers_frames", "frames", [frames.total() / appends], reach={"max": most}, note=each))
    return found


def _make(host: Host, routers: int) -> None:
    host.client.topics.create(f"source-{routers}", durability="disk")
    for n in range(routers):
        host.client.topics.create(f"copies-{routers}.{n}", durability="disk")
        host.client.routers.create(f"{routers}.{n}", f"source-{routers}", f"copies-{routers}.{n}")


def _append(host: Host, routers: int) -> list[float]:
    """Return the seconds of each append.

    Waits until the copies are made, so that they do not affect the next source.
    """
    times = []
    for _ in range(APPENDS):
        begun = time.perf_counter()
        host.client.append_many(f"source-{routers}", [PAYLOAD] * RECORDS)
        times.append(time.perf_counter() - begun)
        time.sleep(EVERY_S)
    if routers:
        host.client.routers.settle(f"{routers}.{routers - 1}")
    return times


def _routed_frames(data_dir: Path) -> Counter[int]:
    """Count the frames of copies in a log, by their number of copies."""
    found: Counter[int] = Counter()
    for path in data_dir.glob("wal/*/wal-*.log"):
        data = path.read_bytes()
        for seen in WalFrameWalk(data, read_header(data).salt).frames():
            if seen.frame.type == FrameType.ROUTED:
                found[len(seen.frame.copies)] += 1
    return found
