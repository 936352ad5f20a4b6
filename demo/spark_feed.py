"""Writes flights at a constant rate to the topic that the live aggregate follows.

The second half starts after the query was killed. Otherwise, on a slow machine, all flights could be written
before.
"""

from __future__ import annotations

import signal
import sys
import time
from itertools import islice
from pathlib import Path

import ringlog
from demo import source

PACE = 4_000
"""Flights per second."""
CHUNK = 200
TIMEOUT_MS = 60_000
GO_ON = "live-go-on"
"""File that the main process creates after the query was killed."""
GO_ON_S = 900.0
LOOK_S = 0.01


def main(directory: Path, url: str, topic: str, count: int) -> int:
    """Send the first `count` flights; return 0 when all are acknowledged."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the main process handles Ctrl-C.
    events = islice(source.share(directory, 0, 1), count)
    with (
        ringlog.connect(url, timeout_ms=TIMEOUT_MS, wait=20.0) as client,
        client.producer(topic, durability="fsync", create=False) as producer,
    ):
        began = time.monotonic()
        for sent, (_, _, payload) in enumerate(events):
            if sent == count // 2:
                _wait(directory / GO_ON)
                began = time.monotonic() - sent / PACE
            if sent % CHUNK == 0:
                time.sleep(max(began + sent / PACE - time.monotonic(), 0.0))
            producer.send(payload)
    return 0


def _wait(path: Path) -> None:
    deadline = time.monotonic() + GO_ON_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
