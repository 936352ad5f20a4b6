"""One reader process: follows its half of the topics while they are written, and judges what it sees."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import ringlog
from demo import source
from demo.judge import Ledger
from demo.words import FIRST_READER, READY_OFFSET, WRITTEN, Words
from ringlog.client import Client
from ringlog.client.pages import Tombstone
from ringlog.client.tailer import Tailer

LOOK_S = 0.02
LAST_LOOK_S = 30.0


def main(directory: Path, url: str, number: int, readers: int, producers: int) -> int:
    """Follow until everything was written and read; leave the ledger in `follower-N.npz`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The conductor decides when we end.
    words = Words(directory)
    facts = source.load(directory)
    ledger = Ledger(facts, producers)
    with ringlog.connect(url, timeout_ms=60_000, wait=20.0) as client:
        tailers = {topic: client.tailer(topic) for topic in facts.topics[number::readers]}
        words[FIRST_READER + READY_OFFSET + number] = 1
        while not words[WRITTEN]:
            if not _turn(tailers, ledger):
                time.sleep(LOOK_S)
            words[FIRST_READER + number] = ledger.counts.read
        _read_to_heads(client, tailers, ledger)
        words[FIRST_READER + number] = ledger.counts.read
    ledger.save(directory / f"follower-{number}.npz")
    return 0


def _turn(tailers: dict[str, Tailer], ledger: Ledger) -> int:
    """Take what every topic has now; returns how many items there were."""
    taken = 0
    for topic, tailer in tailers.items():
        while (item := tailer.next(0)) is not None:
            taken += 1
            if isinstance(item, Tombstone):
                ledger.announce()
            else:
                ledger.take(topic, item.first_seq, item.bytes())
    return taken


def _read_to_heads(client: Client, tailers: dict[str, Tailer], ledger: Ledger) -> None:
    """Read on until every topic's head is reached, for a bounded time: what is missing then was lost."""
    heads = {topic: client.topics.state(topic).head_seq for topic in tailers}
    deadline = time.monotonic() + LAST_LOOK_S
    while time.monotonic() < deadline:
        _turn(tailers, ledger)
        if all(tailer.cursor.seq >= heads[topic] for topic, tailer in tailers.items()):
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])))
