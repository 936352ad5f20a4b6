"""Self-identifying payloads, and the producers that write them to queues and to topics of groups."""

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
    from ringlog.drill.tasks import Report, Task

_FILLER = bytes(range(256))
VALUE_BYTES = 8
TWICE_ONE_IN = 4
"""One of TWICE_ONE_IN writes has dedup ids and is sent twice, whatever the outcome of the first attempt. Its
records must still exist only once."""
MIXED_ONE_IN = 4
"""One of MIXED_ONE_IN other writes has dedup ids for only some of its records."""
MARKS = "marks"
"""Hook of producers whose records have priorities. Some of these records also have a `not_before` time."""
PRIORITIES = 3
LATER_ONE_IN = 12
LATER_S = 0.3


class End(Protocol):
    """Whether the client was asked to end."""

    is_set: bool


def payload_of(value: int) -> bytes:
    """Return the payload of the job with this value."""
    return value.to_bytes(VALUE_BYTES, "little") + _FILLER[: 8 + value % 200]


def value_of(data: bytes | None) -> int:
    """Return the value in a payload. Raises AssertionError if no client wrote this payload."""
    assert data is not None, "nobody puts a job without a payload"
    value = int.from_bytes(data[:VALUE_BYTES], "little")
    assert data == payload_of(value), "a payload is not what was put"
    return value


def put_all(
    send: Callable[[list[Any]], Appended], task: Task, journal: Journal, end: End, report: Report
) -> None:
    """Put single payloads and batches, and record their outcomes, until the end."""
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
                # Every second record has a dedup id. Records without one must exist only once as well.
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
    """Return the seqs; zeros where they are unknown."""
    done = send(records)
    if isinstance(done, AppendedOnce):
        return list(done.seqs)
    return [done.first_seq + n for n in range(len(records))] if done.first_seq else [0] * len(records)


def _sent_twice(send: Callable[[list[Any]], Appended], records: list[NewRecord]) -> list[int]:
    """Send the records twice, like a producer that lost the first reply.

    Both replies must have the same seqs.
    """
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
