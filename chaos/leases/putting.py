"""Payloads that name themselves, and who writes them: to queues, and to topics that groups share."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from chaos.leases.journal import Did, Journal, Outcome
from ringlog.client.fields import NewRecord
from ringlog.client.results import Appended, AppendedOnce
from ringlog.errors import RinglogError

if TYPE_CHECKING:
    from chaos.rigs.tasks import Report, Task

_FILLER = bytes(range(256))
VALUE_BYTES = 8
TWICE_ONE_IN = 4
"""Of so many writes one has dedup ids and is sent twice, whatever became of it the first time: nothing may be
there twice then either."""
MIXED_ONE_IN = 4
"""Of the others one has dedup ids for some of its records only."""


class End(Protocol):
    """Whether the client was told to end."""

    is_set: bool


def payload_of(value: int) -> bytes:
    """A job of this value."""
    return value.to_bytes(VALUE_BYTES, "little") + _FILLER[: 8 + value % 200]


def value_of(data: bytes | None) -> int:
    """Whose payload is it? Raises AssertionError for one that nobody put."""
    assert data is not None, "nobody puts a job without a payload"
    value = int.from_bytes(data[:VALUE_BYTES], "little")
    assert data == payload_of(value), "a payload is not what was put"
    return value


def put_all(
    send: Callable[[list[Any]], Appended], task: Task, journal: Journal, end: End, report: Report
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
            if random.randrange(TWICE_ONE_IN) == 0:
                seqs = _sent_twice(send, values)
            elif random.randrange(MIXED_ONE_IN) == 0:
                seqs = _sent_mixed(send, values)
            else:
                seqs = _sent(send, values)
        except RinglogError as e:
            report.failed(str(e))
            journal.note(Did.PUT_END, task.topic, values)
            continue
        journal.note(Did.PUT_END, task.topic, values, seqs=seqs, outcome=Outcome.OK)
        ahead = begun + report.ops / task.per_s - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)


def _sent(send: Callable[[list[Any]], Appended], values: list[int]) -> list[int]:
    """Their numbers; zeros where they are not known."""
    done = send([payload_of(value) for value in values])
    return [done.first_seq + n for n in range(len(values))] if done.first_seq else [0] * len(values)


def _sent_mixed(send: Callable[[list[Any]], Appended], values: list[int]) -> list[int]:
    """Every second one under an id; one that has none is there once all the same."""
    records = [
        NewRecord(data=payload_of(value), dedup_id=str(value)) if value % 2 else payload_of(value)
        for value in values
    ]
    done = send(records)
    return (
        list(done.seqs) if isinstance(done, AppendedOnce) else [done.first_seq + n for n in range(done.count)]
    )


def _sent_twice(send: Callable[[list[Any]], Appended], values: list[int]) -> list[int]:
    """The same under ids, by a writer that does not know whether it was there before."""
    records = [NewRecord(data=payload_of(value), dedup_id=str(value)) for value in values]
    try:
        first = send(records)
    except RinglogError as e:
        if e.outcome != "unknown":
            raise
        first = None
    again = send(records)
    assert isinstance(again, AppendedOnce)
    assert first is None or first.seqs == again.seqs, "a repeat is told other numbers"  # type: ignore[attr-defined]
    return list(again.seqs)
