"""Payloads that name themselves, and who writes them: to queues, and to topics that groups share."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Protocol

from chaos.jobs.journal import Did, Journal, Outcome
from ringlog.client.results import Appended
from ringlog.errors import RinglogError

if TYPE_CHECKING:
    from chaos.kills.tasks import Report, Task

_FILLER = bytes(range(256))
VALUE_BYTES = 8


class End(Protocol):
    """Whether the client was told to end."""

    is_set: bool


def payload_of(value: int) -> bytes:
    """A job of this value."""
    return value.to_bytes(VALUE_BYTES, "little") + _FILLER[: 8 + value % 200]


def value_of(data: bytes) -> int:
    """Whose payload is it? Raises AssertionError for one that nobody put."""
    value = int.from_bytes(data[:VALUE_BYTES], "little")
    assert data == payload_of(value), "a payload is not what was put"
    return value


def put_all(
    send: Callable[[list[bytes]], Appended], task: Task, journal: Journal, end: End, report: Report
) -> None:
    """Single payloads and batches, each with an outcome."""
    random = Random(task.client)
    numbers = count(task.client << 32)
    begun = time.monotonic()
    while not end.is_set:
        values = [next(numbers) for _ in range(random.choice((1, task.batch)))]
        journal.note(Did.PUT, task.topic, values)
        report.ops += len(values)
        try:
            done = send([payload_of(value) for value in values])
        except RinglogError as e:
            report.failed(str(e))
            journal.note(Did.PUT_END, task.topic, values)
            continue
        seqs = [done.first_seq + n for n in range(len(values))] if done.first_seq else [0] * len(values)
        journal.note(Did.PUT_END, task.topic, values, seqs=seqs, outcome=Outcome.OK)
        ahead = begun + report.ops / task.per_s - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
