"""One process of a benchmark: takes its work as JSON, waits for the start, and prints its result as JSON."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import msgspec

import ringlog
from ringlog.client.producer import Producer
from ringlog.client.ticket import Ticket
from ringlog.clock import Clock, SystemClock

GO = "go\n"
READY = "ready"
TIMEOUT_MS = 60_000


class AppendWork(msgspec.Struct, frozen=True):
    """Append as fast as the engine accepts, with `window` frames in flight."""

    url: str
    topic: str
    frame_records: int
    record_bytes: int
    window: int
    seconds: float


class AppendResult(msgspec.Struct, frozen=True):
    """Appends of one process, and the latency of their acks in milliseconds."""

    records: int
    frames: int
    seconds: float
    ack_ms: list[float]
    """Sample of at most 10,000 acks, ascending."""


SAMPLE_MAX = 10_000


def append(work: AppendWork, clock: Clock) -> AppendResult:
    """Run the work. With one record per frame, a run of `window` frames has one ticket."""
    payload = bytes(range(256)) * (work.record_bytes // 256 + 1)
    is_single = work.frame_records == 1
    batch = [payload[: work.record_bytes]] * (work.window if is_single else work.frame_records)
    most_open = 2 if is_single else work.window
    with (
        ringlog.connect(work.url, timeout_ms=TIMEOUT_MS, wait=10.0) as client,
        client.producer(work.topic, linger_ms=0, max_buffer_bytes=1 << 28, create=False) as producer,
    ):
        _send(producer, batch, is_single=is_single).result()
        print(READY, flush=True)
        if sys.stdin.readline() != GO:
            return AppendResult(0, 0, 0.0, [])
        return _run(producer, batch, most_open, work, clock, is_single=is_single)


def _run(
    producer: Producer[bytes], batch: list[bytes], most_open: int, work: AppendWork, clock: Clock,
    *, is_single: bool,
) -> AppendResult:  # fmt: skip
    acks: list[float] = []
    sent = 0
    in_flight: deque[tuple[int, Ticket]] = deque()

    def settle_oldest() -> None:
        at, ticket = in_flight.popleft()
        ticket.result()
        acks.append((clock.monotonic_ns() - at) / 1e6)

    began = clock.monotonic_ns()
    end = began + round(work.seconds * 1e9)
    while clock.monotonic_ns() < end:
        in_flight.append((clock.monotonic_ns(), _send(producer, batch, is_single=is_single)))
        sent += len(batch)
        if len(in_flight) >= most_open:
            settle_oldest()
    while in_flight:
        settle_oldest()
    seconds = (clock.monotonic_ns() - began) / 1e9
    step = len(acks) // SAMPLE_MAX + 1
    return AppendResult(sent, sent // work.frame_records, seconds, sorted(acks[::step]))


def _send(producer: Producer[bytes], batch: list[bytes], *, is_single: bool) -> Ticket:
    return producer.send_each(batch) if is_single else producer.send_many(batch)


def main(arguments: list[str]) -> int:
    """Run the work in the single argument; return the exit code."""
    work = msgspec.json.decode(arguments[0], type=AppendWork)
    result: Any = append(work, SystemClock())
    print(msgspec.json.encode(result).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
