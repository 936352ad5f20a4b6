"""Jobs of a queue of the public client."""

from __future__ import annotations

from ringlog.client.queue import Queue

LONG_MS = 60_000
"""A lease or delay that does not end within its test."""


def fill(queue: Queue, count: int) -> None:
    queue.put_many([b"job %d" % n for n in range(1, count + 1)])


def counts(queue: Queue) -> tuple[int, int, int]:
    """Return how many jobs are ready, in flight and delayed."""
    found = queue.stats()
    return found.ready, found.in_flight, found.delayed
