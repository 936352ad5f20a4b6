"""The work of client processes: write, read and delete, and record everything in journals.

Every record contains its own value, which determines all its bytes, so that a reader detects any change at
once. After SIGTERM, a client stops when its current operation is over.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import xxhash

import ringlog
from chaos.check.journal import Journal, Outcome, What
from chaos.check.keys import KEY_VALUES
from chaos.leases import clients as leases
from chaos.rigs.tasks import Report, Task, TopicFacts
from ringlog import stop_points
from ringlog.client import AppendedOnce, Client, NewRecord
from ringlog.client.read.pages import Cursor, Page
from ringlog.client.watches.events import CaughtUp, Lagged, WatchEvent
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import RinglogError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.link.shard_requests import Requester

WINDOW = 4
"""Maximum number of batches in flight per producer."""
PAGE_RECORDS = 1_000
PAUSE_S = 0.05
KEPT_TOPICS = (0, 1)
"""Topics without deletes, one on each shard."""
TOLD_S = 30.0
"""Time (s) after the load within which watches have received every record."""
_FILLER = bytes(range(256)) * 32
_HEAD_BYTES = 8


class _End:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.is_set = False
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


def perform(task: Task) -> Report:
    """Run the task until it is asked to end. Raises only for errors of the harness."""
    end, report = _End(), Report()
    if task.kind.startswith(("jobs_", "groups_")):
        return leases.perform(task, end)
    _arm(task.hook)
    journal = Journal(task.journal_path, task.client)
    try:
        if task.kind == "operate":
            _operate(task, end, report)
            return report
        with ringlog.connect(
            task.url,
            transport=task.transport,
            timeout_ms=round(task.timeout_s * 1000),
        ) as client:
            _KINDS[task.kind](client, task, journal, end, report)
            report.retries = client.health().retries
    finally:
        journal.close()
    return report


# -- writing --------------------------------------------------------------------------------------------


def _produce(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Send batches of frames, several in flight."""
    topic, waiting = task.topics[task.topic], deque[tuple[Any, Any]]()
    pace = _Pace(task.per_s)
    # Values are numbers of operations, which are unique in the run.
    value = task.client << 32
    producer = client.producer(topic, create=False)
    while not end.is_set:
        payloads, ops = _begin_batch(task, journal, report, value)
        value += task.batch
        try:
            waiting.append((ops, producer.send_each(payloads, records_per_frame=task.frame)))
        except RinglogError as e:
            _failed(journal, task.topic, ops, Outcome.FAIL, e, report)
        while len(waiting) >= WINDOW or (waiting and waiting[0][1].done()):
            _settle(*waiting.popleft(), task, journal, report)
        pace.wait(task.batch, end)
    while waiting:
        _settle(*waiting.popleft(), task, journal, report)


def _begin_batch(
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
        _failed(journal, task.topic, ops, Outcome.UNKNOWN, e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK, done.seqs)


def _produce_one(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Append one record at a time and wait for each ack."""
    pace, value = _Pace(task.per_s), task.client << 32
    while not end.is_set:
        payload = payload_of(value, task.record_bytes)
        _append(client, task, journal, report, value, payload)
        value += 1
        pace.wait(1, end)


def _produce_frames(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Append each batch as one frame and wait for its ack."""
    _append_frames(client, task, journal, end, report, every_second=False)


def _produce_mixed(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Append batches in which only every second record has a dedup id."""
    _append_frames(client, task, journal, end, report, every_second=True)


def _append_frames(
    client: Client, task: Task, journal: Journal, end: _End, report: Report, *, every_second: bool
) -> None:
    pace, value = _Pace(task.per_s), task.client << 32
    name = task.topics[task.topic]
    while not end.is_set:
        values = range(value, value + task.batch)
        records, ops = _begin_batch(task, journal, report, value, one_frame=True)
        value += task.batch
        mixed = [
            NewRecord(data=data, dedup_id=f"id-{each}" if each % 2 else None)
            for each, data in zip(values, records, strict=True)
        ]
        try:
            done = client.append_many(name, mixed if every_second else records, create=False)
        except RinglogError as e:
            _failed(journal, task.topic, ops, outcome_of(e), e, report)
            time.sleep(PAUSE_S)
        else:
            seqs = done.seqs if isinstance(done, AppendedOnce) else done.first_seq + np.arange(done.count)
            journal.end(task.topic, ops, Outcome.OK, seqs)
        pace.wait(task.batch, end)


def _produce_keyed(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Append records one at a time under keys that other clients use too, from `key_from` on."""
    pace, number = _Pace(task.per_s), task.key_from
    while not end.is_set:
        payload = payload_of(KEY_VALUES + number, task.record_bytes)
        _append(client, task, journal, report, KEY_VALUES + number, payload, key=f"key-{number}")
        number += 1
        pace.wait(1, end)


def _append(
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
        _failed(journal, task.topic, ops, outcome_of(e), e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK, done.first_seq)


def outcome_of(error: RinglogError) -> Outcome:
    """Return whether a failed append may have been applied."""
    return Outcome.UNKNOWN if error.outcome == "unknown" else Outcome.FAIL


def _failed(
    journal: Journal, topic: int, ops: Any, outcome: Outcome, error: RinglogError, report: Report
) -> None:
    journal.end(topic, ops, outcome)
    report.failed(f"{type(error).__name__}: {error}")


# -- reading --------------------------------------------------------------------------------------------


def _read(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Follow a topic."""
    cursor = Cursor(0, 0)
    while not end.is_set:
        page = _page(client, task, journal, report, What.READ, cursor)
        cursor = cursor if page is None else page.cursor


def _reread(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Read a topic from its beginning, repeatedly, including segments and the cold tier."""
    cursor, pace = Cursor(0, 0), _Pace(task.per_s)
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
        _failed(journal, task.topic, np.array([op], np.uint64), Outcome.FAIL, e, report)
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


def _watch(client: Client, task: Task, _: Journal, end: _End, report: Report) -> None:
    """Watch the topics without deletes. Each record must arrive once and in order.

    After the load all records must arrive, even if processes that knew the subscription have died.
    """
    reached = dict.fromkeys([task.topics[number] for number in KEPT_TOPICS], 0)
    longest_s = 0.0
    with client.watch(list(reached), limit=PAGE_RECORDS) as watch:
        while not end.is_set:
            began_s = time.monotonic()
            _take_told(watch.next(PAUSE_S), reached, report)
            longest_s = max(longest_s, time.monotonic() - began_s)
        heads = {name: client.topics.state(name, touch=False).head_seq for name in reached}
        deadline = time.monotonic() + TOLD_S
        while any(reached[name] < heads[name] for name in reached):
            if time.monotonic() > deadline:
                report.failed(
                    f"a watch over {client.transport} was told of {reached} within {TOLD_S:.0f} s, and there"
                    f" is {heads}; its longest call took {longest_s:.1f} s; {watch.subscription}"
                )
                return
            _take_told(watch.next(PAUSE_S), reached, report)


def _take_told(event: WatchEvent | None, reached: dict[str, int], report: Report) -> None:
    if isinstance(event, Page):
        report.ops += 1
        seqs = [record.seq for record in event.records]
        if seqs != list(range(reached[event.topic] + 1, reached[event.topic] + 1 + len(seqs))):
            report.failed(f"{event.topic}: told of {seqs[0]}..{seqs[-1]} behind {reached[event.topic]}")
        reached[event.topic] = max(reached[event.topic], event.cursor.seq)
    elif event is not None and not isinstance(event, CaughtUp | Lagged):
        report.failed(f"told of {event}")


def _final(client: Client, task: Task, journal: Journal, _: _End, report: Report) -> None:
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
        report.facts.append(TopicFacts(name, said.count, said.head_seq, counted, max(head, cursor.seq)))
        report.ops += 1


# -- deleting, and what operators do ----------------------------------------------------------------------


def _delete(client: Client, task: Task, journal: Journal, end: _End, report: Report) -> None:
    """Delete all but the last records repeatedly, and once more at the end.

    No other delete follows the last one, so that none can hide that a crash has undone it.
    """
    pace, below = _Pace(task.per_s), 0
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
        _failed(journal, task.topic, ops, Outcome.UNKNOWN, e, report)
    else:
        journal.end(task.topic, ops, Outcome.OK)
    return wanted


def _operate(task: Task, end: _End, report: Report) -> None:
    """Request checkpoints, so that segments are made, moved and rewritten all the time."""
    pace = _Pace(task.per_s)
    while not end.is_set:
        pace.wait(1, end)
        info = read_engine_file(parse_url(task.url).run_dir)
        if info is None:
            continue
        requester = Requester("compactor", f"ipc://{info.shm_dir}/compactor.sock", stop=_Flag(end))
        try:
            requester.ask(CheckpointNow(), CheckpointMade, timeout_s=10.0)
            report.ops += 1
        except RinglogError:
            # The compactor, or a shard that it queried, is being replaced. An operator would retry.
            time.sleep(PAUSE_S)
        finally:
            requester.close()


class _Flag:
    def __init__(self, end: _End) -> None:
        self._end = end

    def is_set(self) -> bool:
        return self._end.is_set


class _Pace:
    """Limits the rate. Lost time is made up for at most 1 s."""

    def __init__(self, per_s: float) -> None:
        self._gap_s, self._next_s = 1.0 / per_s, time.monotonic()

    def wait(self, count: int, end: _End) -> None:
        now = time.monotonic()
        self._next_s = max(self._next_s + count * self._gap_s, now - 1.0)
        while not end.is_set and now < self._next_s:
            time.sleep(min(PAUSE_S, self._next_s - now))
            now = time.monotonic()


# -- ends -------------------------------------------------------------------------------------------------


def _arm(hook: str) -> None:
    """Make this process kill itself at the n-th pass of a place within a push."""
    if not hook:
        return
    place, _, number = hook.partition(":")
    if place == "ring_after_publish":
        stop_points.configure(f"{hook}:kill")
        return
    from ringlog.ring.memory import RingMemory
    from ringlog.ring.producer import RingProducer

    passes = count(1)

    def is_due() -> bool:
        return next(passes) == int(number)

    if place == "filled":
        _wrap(RingProducer, "_publish", lambda *_: _die() if is_due() else None)
    elif place == "before":
        _wrap(RingMemory, "write", lambda *_: _die() if is_due() else None)
    elif place == "inside":
        write = RingMemory.write

        def torn(memory: RingMemory, index: int, data: Any) -> None:
            if is_due():
                write(memory, index, bytes(data)[: max(len(data) // 2, 1)])
                _die()

        _wrap(RingMemory, "write", torn)
    else:
        raise ValueError(
            f"hook must be PLACE:N with PLACE before, inside, filled or ring_after_publish, got {hook!r}"
        )


def _wrap(owner: Any, name: str, first: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        first(*args)
        return real(*args)

    setattr(owner, name, wrapped)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_KINDS: dict[str, Callable[[Client, Task, Journal, _End, Report], None]] = {
    "produce": _produce, "produce_one": _produce_one, "produce_frames": _produce_frames,
    "produce_mixed": _produce_mixed, "produce_keyed": _produce_keyed, "read": _read, "reread": _reread,
    "watch": _watch, "delete": _delete,
    "final": _final,
}  # fmt: skip
