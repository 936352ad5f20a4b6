"""The work of client processes: write, read and delete, and record everything in journals.

Every record contains its own value, which determines all its bytes, so that a reader detects any change at
once. After SIGTERM, a client stops when its current operation is over.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

import ringlog
from ringlog.client import Client
from ringlog.client.read.pages import Cursor, Page
from ringlog.drill.journal import Journal, Outcome, What
from ringlog.drill.tasks import Report, Task, TopicCounts
from ringlog.errors import RinglogError

WINDOW = 4
"""Maximum number of batches in flight per producer."""
PAGE_RECORDS = 1_000
PAUSE_S = 0.05
_FILLER = bytes(range(256)) * 32
_HEAD_BYTES = 8


class EndSignal:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.is_set: bool = False
        signal.signal(signal.SIGTERM, self._set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def _set(self, *_: object) -> None:
        self.is_set = True


def payload_of(value: int, mean_bytes: int) -> bytes:
    """Return the record of this value: at least 8 bytes, and some much longer than others."""
    spread = value * 0x9E3779B1 & 0xFFFF
    size = min((mean_bytes * spread) >> 15, len(_FILLER) - 256)
    start = spread & 0xFF
    return value.to_bytes(_HEAD_BYTES, "little") + _FILLER[start : start + size]


def perform(task: Task, kinds: Mapping[str, Work] | None = None) -> Report:
    """Run the task until SIGTERM; `kinds` are further kinds of work. Raises only errors of the harness."""
    end, report = EndSignal(), Report()
    journal = Journal(task.journal_path, task.client)
    try:
        with ringlog.connect(
            task.url,
            transport=task.transport,
            timeout_ms=round(task.timeout_s * 1000),
        ) as client:
            {**KINDS, **(kinds or {})}[task.kind](client, task, journal, end, report)
            report.retries = client.health().retries
    finally:
        journal.close()
    return report


def _produce(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Send batches of frames, several in flight."""
    topic, waiting = task.topics[task.topic], deque[tuple[Any, Any]]()
    pace = Pace(task.per_s)
    # Values are numbers of operations, which are unique in the run.
    value = task.client << 32
    producer = client.producer(topic, create=False)
    while not end.is_set:
        payloads, ops = begin_batch(task, journal, report, value)
        value += task.batch
        try:
            waiting.append((ops, producer.send_each(payloads, records_per_frame=task.frame)))
        except RinglogError as e:
            note_failure(journal, task.topic, ops, Outcome.FAIL, e, report)
        while len(waiting) >= WINDOW or (waiting and waiting[0][1].done()):
            _settle(*waiting.popleft(), task, journal, report)
        pace.wait(task.batch, end)
    while waiting:
        _settle(*waiting.popleft(), task, journal, report)


def begin_batch(
    task: Task, journal: Journal, report: Report, value: int, *, one_frame: bool = False
) -> tuple[list[bytes], Any]:
    """Return the records of the next `task.batch` values and their operations, recorded as begun."""
    values = range(value, value + task.batch)
    payloads = [payload_of(each, task.record_bytes) for each in values]
    digests = [xxhash.xxh3_64_intdigest(each) for each in payloads]
    frame = len(values) if one_frame else 0
    ops = journal.begin(What.APPEND, task.topic, seq=frame, values=values, digests=digests)
    report.ops += len(ops)
    return payloads, ops


def _settle(ops: Any, ticket: Any, task: Task, journal: Journal, report: Report) -> None:
    try:
        done = ticket.result(task.timeout_s)
    except RinglogError as e:
        # Some records of the batch may have been appended.
        note_failure(journal, task.topic, ops, Outcome.UNKNOWN, e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK, done.seqs)


def _produce_one(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Append one record at a time and wait for each ack."""
    pace, value = Pace(task.per_s), task.client << 32
    while not end.is_set:
        payload = payload_of(value, task.record_bytes)
        append_one(client, task, journal, report, value, payload)
        value += 1
        pace.wait(1, end)


def append_one(
    client: Client, task: Task, journal: Journal, report: Report, value: int, payload: bytes, key: str = ""
) -> None:
    digest = xxhash.xxh3_64_intdigest(payload)
    ops = journal.begin(What.APPEND, task.topic, values=[value], digests=[digest])
    report.ops += 1
    name = task.topics[task.topic]
    try:
        if key:
            done = client.append_many(name, [payload], idempotency_key=key, create=False)
        else:
            done = client.append(name, payload, create=False)
    except RinglogError as e:
        note_failure(journal, task.topic, ops, outcome_of(e), e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK, done.first_seq)


def outcome_of(error: RinglogError) -> Outcome:
    """Return whether a failed append may have been applied."""
    return Outcome.UNKNOWN if error.outcome == "unknown" else Outcome.FAIL


def note_failure(
    journal: Journal, topic: int, ops: Any, outcome: Outcome, error: RinglogError, report: Report
) -> None:
    journal.end(topic, ops, outcome)
    report.failed(f"{type(error).__name__}: {error}")


def _read(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Follow a topic."""
    cursor = Cursor(0, 0)
    while not end.is_set:
        page = _page(client, task, journal, report, What.READ, cursor)
        cursor = cursor if page is None else page.cursor


def _reread(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Read a topic from its beginning, repeatedly, including segments and the cold tier."""
    cursor, pace = Cursor(0, 0), Pace(task.per_s)
    while not end.is_set:
        page = _page(client, task, journal, report, What.READ, cursor)
        if page is not None:
            cursor = Cursor(0, 0) if page.caught_up else page.cursor
        pace.wait(task.page, end)


def _page(
    client: Client, task: Task, journal: Journal, report: Report, what: What, cursor: Cursor
) -> Page | None:
    (op,) = journal.begin(what, task.topic, seq=cursor.seq).tolist()
    report.ops += 1
    try:
        page = client.read(
            task.topics[task.topic], cursor, limit=task.page, max_bytes=8 << 20, wait_ms=task.wait_ms
        )
    except RinglogError as e:
        note_failure(journal, task.topic, np.array([op], np.uint64), Outcome.FAIL, e, report)
        time.sleep(PAUSE_S)
        return None
    _note(journal, task.topic, op, page)
    journal.end(task.topic, np.array([op], np.uint64), Outcome.OK, page.head_seq, page.cursor.seq)
    return page


def _note(journal: Journal, topic: int, op: int, page: Page) -> None:
    if page.tombstone is not None:
        journal.gap(topic, op, page.tombstone.gap_from, page.tombstone.gap_to)
    records = page.records
    journal.records(
        topic, op, [record.seq for record in records],
        [int.from_bytes((record.data or b"")[:_HEAD_BYTES], "little") for record in records],
        [xxhash.xxh3_64_intdigest(record.data or b"") for record in records],
    )  # fmt: skip


def _final(client: Client, task: Task, journal: Journal, _: EndSignal, report: Report) -> None:
    """Read every topic once from its beginning to its head, and query its state from the engine."""
    for topic, name in enumerate(task.topics):
        (op,) = journal.begin(What.FINAL, topic).tolist()
        cursor, head, counted, latest = Cursor(0, 0), 0, 0, 0
        for page in client.reader(name).pages(PAGE_RECORDS):
            _note(journal, topic, op, page)
            cursor, head, counted = page.cursor, page.head_seq, counted + len(page)
            for record in page.records:
                if record.ts < latest:
                    report.failed(f"{name}: the stamp of {record.seq} goes back from {latest} to {record.ts}")
                latest = record.ts
        journal.end(topic, np.array([op], np.uint64), Outcome.OK, head, cursor.seq)
        said = client.topics.state(name)
        report.facts.append(TopicCounts(name, said.count, said.head_seq, counted, max(head, cursor.seq)))
        report.ops += 1


def _delete(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Delete all but the last records repeatedly, and once more at the end.

    No other delete follows the last one, so that none can hide that a crash has undone it.
    """
    pace, below = Pace(task.per_s), 0
    while not end.is_set:
        pace.wait(1, end)
        below = _delete_below(client, task, journal, report, below, task.keep)
    _delete_below(client, task, journal, report, below, task.keep // 3)


def _delete_below(client: Client, task: Task, journal: Journal, report: Report, below: int, keep: int) -> int:
    """Delete all but `keep` records. Returns the new begin of the topic, if it is known."""
    name = task.topics[task.topic]
    try:
        wanted = client.topics.state(name).head_seq - keep
    except RinglogError as e:
        report.failed(f"{type(e).__name__}: {e}")
        return below
    if wanted <= below:
        return below
    ops = journal.begin(What.DELETE, task.topic, seq=wanted)
    report.ops += 1
    try:
        client.topics.delete_records(name, before_seq=wanted)
    except RinglogError as e:
        note_failure(journal, task.topic, ops, Outcome.UNKNOWN, e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK)
    return wanted


class Pace:
    """Limits the rate. Lost time is made up for at most 1 s."""

    def __init__(self, per_s: float) -> None:
        self._gap_s, self._next_s = 1.0 / per_s, time.monotonic()

    def wait(self, count: int, end: EndSignal) -> None:
        now = time.monotonic()
        self._next_s = max(self._next_s + count * self._gap_s, now - 1.0)
        while not end.is_set and now < self._next_s:
            time.sleep(min(PAUSE_S, self._next_s - now))
            now = time.monotonic()


Work = Callable[[Client, Task, Journal, EndSignal, Report], None]
KINDS: dict[str, Work] = {
    "produce": _produce, "produce_one": _produce_one, "read": _read, "reread": _reread, "delete": _delete,
    "final": _final,
}  # fmt: skip
"""Kinds of work of every drill."""
