"""Payloads that name themselves, and who writes them: to queues, and to topics that groups share."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from chaos.leases.journal import Did, Journal, Outcome
from ringlog.client.requests.results import Appended, AppendedOnce
from ringlog.client.write.fields import NewRecord
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
MARKS = "marks"
"""Hook of who writes records of several priorities, of which one in so many waits for a later time."""
PRIORITIES = 3
LATER_ONE_IN = 12
LATER_S = 0.3


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
    random, has_marks = Random(task.client), task.hook == MARKS
    numbers = count(task.client << 32)
    begun = time.monotonic()
    while not end.is_set:
        values = [next(numbers) for _ in range(random.choice((1, task.batch)))]
        records = [_record_of(value, has_marks=has_marks) for value in values]
        journal.note(Did.PUT, task.topic, values)
        report.ops += len(values)
        try:
            if random.randrange(TWICE_ONE_IN) == 0:
                seqs = _sent_twice(send, _with_ids(records, values))
            elif random.randrange(MIXED_ONE_IN) == 0:
                # Every second one under an id; one that has none is there once all the same.
                seqs = _sent(send, _with_ids(records, values, one_in=2))
            else:
                seqs = _sent(send, records)
        except RinglogError as e:
            report.failed(str(e))
            journal.note(Did.PUT_END, task.topic, values)
            continue
        journal.note(Did.PUT_END, task.topic, values, seqs=seqs, outcome=Outcome.OK)
        ahead = begun + report.ops / task.per_s - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)


def _record_of(value: int, *, has_marks: bool) -> NewRecord:
    if not has_marks:
        return NewRecord(data=payload_of(value))
    later = datetime.now(UTC) + timedelta(seconds=LATER_S) if value % LATER_ONE_IN == 0 else None
    return NewRecord(data=payload_of(value), priority=value % PRIORITIES, not_before=later)


def _with_ids(records: list[NewRecord], values: list[int], one_in: int = 1) -> list[NewRecord]:
    return [
        structs.replace(record, dedup_id=str(value)) if value % one_in == 0 else record
        for record, value in zip(records, values, strict=True)
    ]


def _sent(send: Callable[[list[Any]], Appended], records: list[NewRecord]) -> list[int]:
    """Their numbers; zeros where they are not known."""
    done = send(records)
    if isinstance(done, AppendedOnce):
        return list(done.seqs)
    return [done.first_seq + n for n in range(len(records))] if done.first_seq else [0] * len(records)


def _sent_twice(send: Callable[[list[Any]], Appended], records: list[NewRecord]) -> list[int]:
    """By a writer that does not know whether they were there before."""
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
