"""Watcher processes for benchmarks: number of deliveries, and their time since the begin of the append."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np

_spawn = multiprocessing.get_context("spawn")
STAMP_BYTES = 8
"""Size of the stamp at the start of each frame's first payload: monotonic ns at the begin of its append."""


def stamp() -> bytes:
    """Return the current monotonic time as a stamp. All processes of a host share this clock."""
    return time.monotonic_ns().to_bytes(STAMP_BYTES, "little")


def _watch(
    url: str, topics: list[str], frame: int, count: int, stops: bool, untimed: int, ready: Any, wanted: Any,
    results: Any,
) -> None:  # fmt: skip
    import ringlog
    from ringlog.client import LATEST, Page

    with ringlog.connect(url, wait=30) as client:
        watches = [client.watch(topics, start=LATEST).open() for _ in range(count)]
        for watch in watches:
            while watch.next(0) is not None:
                pass
        ready.release()
        times: list[int] = []
        records = 0
        while True:
            left = wanted.value
            if left and records >= left * count:
                break
            for watch in client.ready_watches(watches, 0.2):
                while watch.has_news and (event := watch.next(0)) is not None:
                    if not isinstance(event, Page):
                        continue
                    for piece in event.batches:
                        records += len(piece)
                        if (piece.seq_at(0) - 1) % frame or piece.seq_at(0) <= untimed:
                            continue  # The rest of a split frame; its stamp was already read.
                        # Only the first record is read. The cost of processing all records is not part of the
                        # measurement.
                        first = piece.slice_rows(0, 1).payload_views()[0] or b""
                        sent = int.from_bytes(bytes(first[:STAMP_BYTES]), "little")
                        times.append(time.monotonic_ns() - sent)
                    if stops:
                        os.kill(os.getpid(), signal.SIGSTOP)
    results.put((records, np.array(times, dtype=np.int64)))


class Watchers:
    """Several processes with watches of the same topics each."""

    def __init__(
        self, url: str, topics: list[str], *, frame: int, processes: int, each: int, stops: bool = False,
        untimed: int = 0,
    ) -> None:  # fmt: skip
        """Start the processes.

        Args:
            frame: number of records of each frame.
            stops: the processes stop themselves after their first delivery.
            untimed: frames up to this position are delivered and counted, but not timed.
        """
        self._ready, self._results = _spawn.Semaphore(0), _spawn.Queue()
        self._wanted = _spawn.Value("Q", 0)
        self.processes = [
            _spawn.Process(
                target=_watch,
                args=(url, topics, frame, each, stops, untimed, self._ready, self._wanted, self._results),
            )
            for _ in range(processes)
        ]
        for process in self.processes:
            process.start()
        for _ in self.processes:
            self._ready.acquire()

    def end(self, records: int) -> tuple[int, np.ndarray[Any, Any]]:
        """Wait until each watch has received `records` records.

        Returns (deliveries, nanoseconds of each frame).
        """
        self._wanted.value = records
        found = [self._results.get(timeout=120) for _ in self.processes]
        for process in self.processes:
            process.join()
        return sum(count for count, _ in found), np.concatenate([times for _, times in found])

    def kill(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.join()
