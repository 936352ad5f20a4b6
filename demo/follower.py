"""One reader process: watches its share of the topics while they are written, and records what it reads."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ringlog
from demo import source
from demo.judge import Ledger
from demo.words import FIRST_READER, READY_OFFSET, WRITTEN, SharedCounters
from ringlog.client import Client
from ringlog.client.read.pages import Page, Tombstone
from ringlog.client.watch import Watch

LOOK_S = 0.02
LAST_LOOK_S = 30.0


class Live:
    """Passes the records of a watch to the ledger, and measures their latency."""

    def __init__(self, watch: Watch, ledger: Ledger) -> None:
        self.ledger = ledger
        self.reached: dict[str, int] = {}
        """Topic -> seq of its last delivered record."""
        self._watch = watch
        self._delays_us: list[NDArray[np.int64]] = []

    def turn(self) -> None:
        """Handle the next event; wait a moment for it."""
        event = self._watch.next(LOOK_S)
        if isinstance(event, Tombstone):
            self.ledger.announce()
        elif isinstance(event, Page):
            now_us = time.time_ns() // 1_000
            for piece in event.batches:
                self.ledger.take(event.topic, piece.seq_at(0), piece.payloads())
                self._delays_us.append(now_us - piece.commit_stamps)
            self.reached[event.topic] = event.cursor.seq

    def read_to_heads(self, heads: dict[str, int]) -> None:
        """Continue until every head is reached, or a timeout: records that are missing then are lost."""
        deadline = time.monotonic() + LAST_LOOK_S
        while time.monotonic() < deadline:
            self.turn()
            if all(self.reached.get(topic, 0) >= head for topic, head in heads.items()):
                return

    @property
    def delays_us(self) -> NDArray[np.int64]:
        """(n,) microseconds from the commit of each record to its arrival in this process."""
        return np.concatenate(self._delays_us) if self._delays_us else np.zeros(0, dtype=np.int64)


def main(directory: Path, url: str, number: int, readers: int, producers: int) -> int:
    """Watch until everything is written and delivered; save the ledger in `follower-N.npz`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the main process handles Ctrl-C.
    counters = SharedCounters(directory)
    facts = source.load(directory)
    topics = facts.topics[number::readers]
    live = Ledger(facts, producers)
    with ringlog.connect(url, timeout_ms=60_000, wait=20.0) as client:
        delays_us: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        if topics:
            delays_us = _follow(client, topics, live, counters, number)
        counters[FIRST_READER + READY_OFFSET + number] = (
            1  # With more readers than topics there is no more to do.
        )
        counters[FIRST_READER + number] = live.counts.read
    live.save(directory / f"follower-{number}.npz")
    np.save(directory / f"delays-{number}.npy", delays_us)
    return 0


def _follow(
    client: Client, topics: tuple[str, ...], ledger: Ledger, counters: SharedCounters, number: int
) -> NDArray[np.int64]:
    with client.watch(topics) as watch:
        watch.open()
        live = Live(watch, ledger)
        counters[FIRST_READER + READY_OFFSET + number] = 1
        while not counters[WRITTEN]:
            live.turn()
            counters[FIRST_READER + number] = ledger.counts.read
        live.read_to_heads({topic: client.topics.state(topic).head_seq for topic in topics})
    return live.delays_us


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])))
