"""One producer process: sends its share of the events one by one, and measures the latency of every ack."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringlog
from demo import source
from demo.words import FIRST_PRODUCER, GO, READY_OFFSET, SharedCounters
from ringlog.client.ticket import Ticket
from ringlog.errors import RinglogError

BUFFER_BYTES = 256 << 10
"""Limit of unsettled bytes per topic. It is small, so that the latency is the engine's, not the queue's."""
TIMEOUT_MS = 60_000


class Acks:
    """Acks and failures of this producer's events."""

    def __init__(self, counters: SharedCounters, number: int) -> None:
        self.ids: list[int] = []
        self.seqs: list[int] = []
        self.latencies_ns: list[int] = []
        self.pause_ns = 0
        """Longest time in which a topic had events in flight and received no ack."""
        self.failures: list[str] = []
        self._heard_ns: dict[str, int] = {}
        self._counters, self._word = counters, FIRST_PRODUCER + number

    def expect(self, ticket: Ticket, event: int, topic: str, sent_ns: int) -> None:
        """Record the result of the event when it is known; it was sent at `sent_ns`."""

        def settled(ticket: Ticket) -> None:
            self._settled(ticket, event, topic, sent_ns)

        ticket.on_done(settled)

    def _settled(self, ticket: Ticket, event: int, topic: str, sent_ns: int) -> None:
        now = time.monotonic_ns()
        try:
            appended = ticket.result(0)
        except RinglogError as e:
            self.failures.append(f"event {event}: {e}")
            return
        self.ids.append(event)
        self.seqs.append(appended.first_seq)
        self.latencies_ns.append(now - sent_ns)
        self.pause_ns = max(self.pause_ns, now - max(self._heard_ns.get(topic, 0), sent_ns))
        self._heard_ns[topic] = now
        self._counters[self._word] = len(self.ids)


def main(directory: Path, url: str, number: int, producers: int) -> int:
    """Send all events of this producer; then save the acks in `producer-N.npz`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the main process handles Ctrl-C.
    counters = SharedCounters(directory)
    events = list(source.share(directory, number, producers))
    acks = Acks(counters, number)
    with ringlog.connect(url, timeout_ms=TIMEOUT_MS, wait=20.0) as client:
        topics = sorted({topic for _, topic, _ in events})
        opened = {
            topic: client.producer(topic, durability="fsync", max_buffer_bytes=BUFFER_BYTES, create=False)
            for topic in topics
        }
        counters[FIRST_PRODUCER + READY_OFFSET + number] = 1
        while not counters[GO]:
            time.sleep(0.001)
        began = time.monotonic_ns()
        for event, topic, payload in events:
            sent_ns = time.monotonic_ns()
            ticket = opened[topic].send(payload, tag=source.tag_of(payload))
            acks.expect(ticket, event, topic, sent_ns)
        for producer in opened.values():
            producer.close(TIMEOUT_MS / 1000)
        ended = time.monotonic_ns()
    np.savez(
        directory / f"producer-{number}.npz",
        ids=np.array(acks.ids, dtype=np.int64),
        seqs=np.array(acks.seqs, dtype=np.uint64),
        latencies_ns=np.array(acks.latencies_ns, dtype=np.int64),
        times_ns=np.array([began, ended, acks.pause_ns]),
        failures=np.array(acks.failures, dtype=np.str_),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
