"""Writes flights at an even pace into the topic that the live aggregate follows.

The second half begins once the query has been killed: on a slow machine all could be written before that.
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
"""Flights a second."""
CHUNK = 200
TIMEOUT_MS = 60_000
GO_ON = "live-go-on"
"""Made by the conductor when the query is dead."""
GO_ON_S = 900.0
LOOK_S = 0.01


def main(directory: Path, url: str, topic: str, count: int) -> int:
    """Send the first `count` flights; exit status 0 once all are acknowledged."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The conductor decides when we end.
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
