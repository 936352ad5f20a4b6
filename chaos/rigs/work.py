"""Kinds of work that only the fault classes have: keyed and mixed batches, watches, checkpoints, jobs.

A producer can also kill itself at a place within a push.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from chaos.check.keys import KEY_VALUES
from chaos.leases import clients as leases
from ringlog import stop_points
from ringlog.client import AppendedOnce, Client, NewRecord
from ringlog.client.read.pages import Page
from ringlog.client.watches.events import CaughtUp, Lagged, WatchEvent
from ringlog.drill import work
from ringlog.drill.journal import Journal, Outcome
from ringlog.drill.tasks import Report, Task
from ringlog.drill.work import (
    PAGE_RECORDS,
    PAUSE_S,
    EndSignal,
    Pace,
    append_one,
    begin_batch,
    note_failure,
    outcome_of,
    payload_of,
)
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import RinglogError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.link.shard_requests import Requester

KEPT_TOPICS = (0, 1)
"""Topics without deletes, one on each shard."""
TOLD_S = 30.0
"""Time (s) after the load within which watches have received every record."""


def perform(task: Task) -> Report:
    """Run the task until it is asked to end. Raises only for errors of the harness."""
    if task.kind.startswith(("jobs_", "groups_")):
        return leases.perform(task, EndSignal())
    _arm(task.hook)
    if task.kind == "operate":
        return _operate(task, EndSignal())
    return work.perform(task, _KINDS)


def _produce_frames(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Append each batch as one frame and wait for its ack."""
    _append_frames(client, task, journal, end, report, every_second=False)


def _produce_mixed(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Append batches in which only every second record has a dedup id."""
    _append_frames(client, task, journal, end, report, every_second=True)


def _append_frames(
    client: Client, task: Task, journal: Journal, end: EndSignal, report: Report, *, every_second: bool
) -> None:
    pace, value = Pace(task.per_s), task.client << 32
    name = task.topics[task.topic]
    while not end.is_set:
        values = range(value, value + task.batch)
        records, ops = begin_batch(task, journal, report, value, one_frame=True)
        value += task.batch
        mixed = [
            NewRecord(data=data, dedup_id=f"id-{each}" if each % 2 else None)
            for each, data in zip(values, records, strict=True)
        ]
        try:
            done = client.append_many(name, mixed if every_second else records, create=False)
        except RinglogError as e:
            note_failure(journal, task.topic, ops, outcome_of(e), e, report)
            time.sleep(PAUSE_S)
        else:
            seqs = done.seqs if isinstance(done, AppendedOnce) else done.first_seq + np.arange(done.count)
            journal.end(task.topic, ops, Outcome.OK, seqs)
        pace.wait(task.batch, end)


def _produce_keyed(client: Client, task: Task, journal: Journal, end: EndSignal, report: Report) -> None:
    """Append records one at a time under keys that other clients use too, from `key_from` on."""
    pace, number = Pace(task.per_s), task.key_from
    while not end.is_set:
        payload = payload_of(KEY_VALUES + number, task.record_bytes)
        append_one(client, task, journal, report, KEY_VALUES + number, payload, key=f"key-{number}")
        number += 1
        pace.wait(1, end)


def _watch(client: Client, task: Task, _: Journal, end: EndSignal, report: Report) -> None:
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


def _operate(task: Task, end: EndSignal) -> Report:
    """Request checkpoints, so that segments are made, moved and rewritten all the time."""
    pace, report = Pace(task.per_s), Report()
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
    return report


class _Flag:
    def __init__(self, end: EndSignal) -> None:
        self._end = end

    def is_set(self) -> bool:
        return self._end.is_set


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


_KINDS: dict[str, work.Work] = {
    "produce_frames": _produce_frames, "produce_mixed": _produce_mixed, "produce_keyed": _produce_keyed,
    "watch": _watch,
}  # fmt: skip
