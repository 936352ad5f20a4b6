"""How long producers wait when their shard is killed, with 64 MiB of log to replay."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import Any

from bench.host import Host
from bench.rows import Row, progress, row

KILLS = 30
LOG_BYTES = 68 << 20
FRAME_BYTES = 192


def kill_rows() -> list[Row]:
    """Measure the pause: the longest time between two acks around a kill, as a producer sees it."""
    with Host(1, "supervisor.restart_max=100") as host:
        host.client.topics.create("kill", durability="fsync")
        with host.client.producer("kill") as out:
            for _ in range(LOG_BYTES // FRAME_BYTES // 4096):
                out.send_each([bytes(100)] * 4096)
        pauses: list[float] = []
        stop = threading.Event()
        acks: list[float] = []
        thread = threading.Thread(target=_trickle, args=(host, stop, acks))
        thread.start()
        for i in range(KILLS):
            progress(f"kill {i + 1}/{KILLS}")
            time.sleep(0.7)
            killed = time.perf_counter()
            pid = host.shard_pids()[0]
            os.kill(pid, signal.SIGKILL)
            while not acks or acks[-1] < killed + 0.3:
                time.sleep(0.01)
                if time.perf_counter() - killed > 30:
                    raise RuntimeError("no ack within 30 s of a kill")
            around = [t for t in acks if killed - 0.5 < t]
            pauses.append(max(b - a for a, b in itertools.pairwise(around)))
        stop.set()
        thread.join()
    pauses.sort()
    found = row(
        "kill_pause_p50", "s", pauses, note=f"{KILLS} kills, {LOG_BYTES >> 20} MiB of 1-record frames"
    )
    worst = row("kill_pause_p99", "s", [pauses[-1]], reach={"max": 1.0}, note="the longest of all kills")
    return [found, worst]


def _trickle(host: Host, stop: threading.Event, acks: list[float]) -> None:
    """Send a few frames at a time, slowly, so that the log hardly grows."""
    with host.client.producer("kill") as out:
        while not stop.is_set():
            tickets: list[Any] = [out.send_each([bytes(100)] * 4)]
            for ticket in tickets:
                ticket.result(30)
            acks.append(time.perf_counter())
            time.sleep(0.004)
