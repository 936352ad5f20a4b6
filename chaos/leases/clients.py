"""Client processes of `jobs` and `groups`: put jobs and records; lease, share or follow them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Literal, NamedTuple

import ringlog
from chaos.leases.cancelling import cancel_claims
from chaos.leases.journal import Did, Journal, Outcome
from chaos.leases.putting import End, put_all, value_of
from ringlog.client import Client
from ringlog.client.group import Group
from ringlog.client.job import Job
from ringlog.client.queue import Queue
from ringlog.client.read.pages import Record
from ringlog.drill.tasks import Report, Task
from ringlog.errors import LeaseLost, RinglogError

LEASE_MS = 1_200
CLAIM_WAIT_MS = 200
OVERTIME = 1.3
"""Duration, in leases, for which a worker sleeps to let its lease expire."""
PAUSE_S = 0.05
IDLE_MS = 700
"""Idle time (ms) after which members steal a lease, and members with TAKES_OVER claim it."""
CLAIM_MOST = 40
SEQS_TOLD = 10
"""Maximum number of lost leases that the error of an ack-and-claim lists by seq."""
STEAL_MOST = 10
COMMIT_EVERY = 20
READ_MOST = 400
"""Maximum number of records after which a reader stops, so that another one takes over."""
LOOK_S = 0.1
SEEK_S = 1.5
"""Time (s) between two seeks."""
SEEK_BACK = 200


REJECTS = "rejects"
TAKES_OVER = "takes over"
"""Hooks of tasks: reject bad jobs, or take over idle leases of other members."""


class Kind(NamedTuple):
    """A consumer group of a topic."""

    number: int
    """Index of the group within its topic, as in journals."""
    name: str
    mode: Literal["queue", "stream"]


QUEUE = Kind(0, "", "queue")
"""The unnamed group of a queue."""
SHARE = Kind(0, "share", "queue")
"""A group on every topic. Its members steal from each other."""
FOLLOW = Kind(1, "follow", "stream")
"""A group on two topics, of both classes and shards. Two readers take it over from each other."""
AGAIN = Kind(2, "again", "queue")
"""A group on one topic that is repeatedly moved back by a seek."""
FOLLOWED = (0, 3)
SOUGHT = (1,)
LETTERED = (1, 2)
"""Topics whose group SHARE has dead letters, of both classes and shards."""
DEAD = "dead-letters"
BAD_EVERY = 40
"""One of BAD_EVERY records is rejected, if there is a dead-letter topic."""
REDRIVEN = 2
"""Topic whose group SHARE has its dead letters redriven repeatedly. They are then rejected once more."""
REDRIVE_S = 0.6


def kinds_of(topic: int) -> list[Kind]:
    """Return the groups of the topic with this index."""
    return [SHARE, *([FOLLOW] if topic in FOLLOWED else []), *([AGAIN] if topic in SOUGHT else [])]


def group_of(client: Client, topics: Sequence[str], topic: int, kind: Kind, *, min_idle_ms: int = 0) -> Group:
    """Return the handle of a group for a member that uses this client."""
    dead_letter = DEAD if has_letters(topic, kind) else ""
    return client.group(
        topics[topic], kind.name, mode=kind.mode, min_idle_ms=min_idle_ms, dead_letter=dead_letter
    )


def has_letters(topic: int, kind: Kind) -> bool:
    """Whether this group of the topic has dead letters."""
    return kind is SHARE and topic in LETTERED


def perform(task: Task, end: End) -> Report:
    """Run the task until it is asked to end."""
    report, journal = Report(), Journal(task.journal_path, task.client)
    try:
        with ringlog.connect(
            task.url, transport=task.transport, timeout_ms=round(task.timeout_s * 1_000)
        ) as client:
            _KINDS[task.kind](client, task, journal, end, report)
            report.retries = client.health().retries
    finally:
        journal.close()
    return report


def _put(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    topic = task.topics[task.topic]
    put_all(lambda payloads: client.append_many(topic, payloads), task, journal, end, report)


def _put_jobs(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    put_all(client.queue(task.topics[task.topic]).put_many, task, journal, end, report)


# -- leases -----------------------------------------------------------------------------------------------


def _work(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    _Worker(client.queue(task.topics[task.topic]), task, QUEUE, journal, report).work(end)


def _cancel(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    cancel_claims(task, journal, end, report, group=SHARE.name if task.kind == "groups_cancel" else "")


def _share(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    _Member(client, task, SHARE, journal, report).work(end)


def _again(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    _Member(client, task, AGAIN, journal, report).work(end)


class _Worker:
    """One worker of a queue.

    It acks with the next claim or separately, nacks, rejects, and lets leases expire.
    """

    def __init__(
        self, source: Queue | Group, task: Task, kind: Kind, journal: Journal, report: Report
    ) -> None:
        self._source, self._task, self._kind = source, task, kind
        self._journal, self._report = journal, report
        self._random = Random(task.client)
        self._did, self._has_letters = Did.CLAIMED, task.hook == REJECTS
        self._done: dict[int, Job] = {}
        """Jobs to be acked with the next claim."""

    def work(self, end: End) -> None:
        """Claim jobs and settle them until the end."""
        while not end.is_set:
            begun_ns, self._did = time.monotonic_ns(), Did.CLAIMED
            try:
                jobs = self._claimed()
            except RinglogError as e:
                self._report.failed(str(e))
                time.sleep(PAUSE_S)
                continue
            if not jobs:
                continue
            self._note(
                self._did, list(jobs), seqs=[job.seq for job in jobs.values()], begun_ns=begun_ns,
                deliveries=[job.deliveries for job in jobs.values()] if self._kind is not QUEUE else 0,
            )  # fmt: skip
            self._report.ops += len(jobs)
            if self._has_letters:
                for value in [value for value in jobs if not value % BAD_EVERY]:
                    self._reject(value, jobs.pop(value))
            self._settle(jobs, self._random.random())

    def _claimed(self) -> dict[int, Job]:
        assert isinstance(self._source, Queue)
        done, self._done = self._done, {}
        if done:
            self._note(Did.ACK, list(done))
        try:
            jobs = self._source.claim(
                self._random.randint(1, CLAIM_MOST // 2), wait_ms=CLAIM_WAIT_MS, lease_ms=LEASE_MS,
                done=list(done.values()),
            )  # fmt: skip
        except LeaseLost as e:
            if e.detail["jobs"] <= SEQS_TOLD:  # Otherwise some were acked, and the error does not say which.
                self._ended(done, set(e.detail["seqs"]))
            return {}
        self._ended(done, set())
        return _by_value(jobs)

    def _settle(self, jobs: dict[int, Job], act: float) -> None:
        if act < 0.1:
            self._nack(jobs)
            return
        if act < 0.13:
            time.sleep(LEASE_MS / 1_000 * OVERTIME)
        if 0.13 <= act < 0.5:
            self._done = jobs
        else:
            self._ack_some(jobs, is_single=0.5 <= act < 0.6)

    def _ack_some(self, jobs: dict[int, Job], *, is_single: bool) -> None:
        if is_single:
            for value, job in jobs.items():
                self._ack({value: job})
        else:
            self._ack(jobs)

    def _ack(self, jobs: dict[int, Job]) -> None:
        if not jobs:
            return
        self._note(Did.ACK, list(jobs))
        try:
            skipped = set(self._source.ack(jobs.values()).skipped)
        except RinglogError as e:
            self._report.failed(str(e))
            return  # The outcome is unknown, so no END is recorded.
        self._ended(jobs, skipped)

    def _ended(self, jobs: Mapping[int, Job], skipped: set[int]) -> None:
        """Record the end of acks: REFUSED for seqs in `skipped`, OK for the others."""
        for outcome in (Outcome.OK, Outcome.REFUSED):
            ended = [v for v, job in jobs.items() if (job.seq in skipped) == (outcome is Outcome.REFUSED)]
            self._note(Did.END, ended, outcome=outcome)

    def _reject(self, value: int, job: Job) -> None:
        self._note(Did.REJECT, [value])
        try:
            self._source.reject(job, "bad")
        except LeaseLost:
            self._note(Did.END, [value], outcome=Outcome.REFUSED)
        except RinglogError as e:
            self._report.failed(str(e))
        else:
            self._note(Did.END, [value], outcome=Outcome.OK)

    def _nack(self, jobs: dict[int, Job]) -> None:
        delay_ms = self._random.choice((0, 100))
        self._give_back(jobs, lambda: self._source.nack(jobs.values(), delay_ms=delay_ms))

    def _give_back(self, jobs: dict[int, Job], how: Callable[[], object]) -> None:
        self._note(Did.NACK, list(jobs))
        try:
            how()
        except RinglogError as e:
            self._report.failed(str(e))

    def _note(
        self, did: Did, values: list[int], *, seqs: list[int] | int = 0, begun_ns: int = 0,
        deliveries: list[int] | int = 0, outcome: Outcome = Outcome.UNKNOWN,
    ) -> None:  # fmt: skip
        self._journal.note(
            did, self._task.topic, values, seqs=seqs, outcome=outcome, begun_ns=begun_ns,
            group=self._kind.number, deliveries=deliveries,
        )  # fmt: skip


class _Member(_Worker):
    """A member of a group in queue mode. It also steals, leaves the group and extends leases."""

    def __init__(self, client: Client, task: Task, kind: Kind, journal: Journal, report: Report) -> None:
        self._takes_over = task.hook == TAKES_OVER
        idle_ms = IDLE_MS if self._takes_over else 0
        self._group = group_of(client, task.topics, task.topic, kind, min_idle_ms=idle_ms)
        super().__init__(self._group, task, kind, journal, report)
        self._has_letters = has_letters(task.topic, kind)

    def _claimed(self) -> dict[int, Job]:
        if self._kind is SHARE and self._random.random() < 0.15:
            self._did = Did.STOLEN
            idle = self._group.pending(idle_ms=IDLE_MS, limit=3)
            seqs = [seq for entry in idle for seq in entry.seqs][:STEAL_MOST]
            return _by_value(self._group.steal(seqs, min_idle_ms=IDLE_MS, lease_ms=LEASE_MS))
        self._did = Did.TAKEN_OVER if self._takes_over else Did.CLAIMED
        most = self._random.randint(1, CLAIM_MOST)
        return _by_value(self._group.claim(most, wait_ms=CLAIM_WAIT_MS, lease_ms=LEASE_MS))

    def _settle(self, jobs: dict[int, Job], act: float) -> None:
        if act < 0.08:
            self._nack(jobs)
            return
        if act < 0.11:
            self._give_back(jobs, self._group.leave)
            return
        if act < 0.13:
            time.sleep(LEASE_MS / 1_000 * OVERTIME)
        elif act < 0.16:
            time.sleep(LEASE_MS / 1_000 / 2)
            self._extend(jobs)
        self._ack_some(jobs, is_single=act < 0.3)

    def _extend(self, jobs: dict[int, Job]) -> None:
        begun_ns = time.monotonic_ns()
        try:
            skipped = set(self._group.extend(jobs.values(), LEASE_MS).skipped)
        except RinglogError as e:
            self._report.failed(str(e))
            return
        held = [value for value, job in jobs.items() if job.seq not in skipped]
        self._note(Did.EXTENDED, held, begun_ns=begun_ns)


def _by_value(jobs: Iterable[Job]) -> dict[int, Job]:
    return {value_of(job.data): job for job in jobs}


# -- mode stream ------------------------------------------------------------------------------------------


def _follow(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    """Take the group over, read and commit until another reader takes it, or for a while."""
    random = Random(task.client)
    group = group_of(client, task.topics, task.topic, FOLLOW)
    ending = threading.Thread(target=_end_reading, args=(group, end), daemon=True)
    ending.start()
    while not end.is_set:
        try:
            read_stream(group, task.topic, journal, random.randint(1, READ_MOST), random.random() < 0.5)
        except LeaseLost:
            report.ops += 1
        except RinglogError as e:
            report.failed(str(e))
        time.sleep(PAUSE_S * (1 + 10 * random.random()))
    ending.join()


def _end_reading(group: Group, end: End) -> None:
    """Close the group at the end, because a reader that waits for records does not check `end`."""
    while not end.is_set:
        time.sleep(PAUSE_S)
    group.close()


def read_stream(group: Group, topic: int, journal: Journal, most: int, is_auto: bool) -> int:
    """Read up to `most` records as the group's reader. Returns the last seq.

    With `is_auto` the library commits each record. Otherwise this function commits every COMMIT_EVERY
    records. Raises LeaseLost if another reader took the group over.
    """
    begun_ns, last, committed = time.monotonic_ns(), 0, 0
    records = group.records(auto_commit_ms=0 if is_auto else None)
    note = journal.note
    note(Did.TAKEN, topic, [0], begun_ns=begun_ns, group=FOLLOW.number)
    for count, record in enumerate(records, 1):
        assert isinstance(record, Record), f"nothing is removed, and {record} says so"
        last = record.seq
        note(Did.READ, topic, [value_of(record.data)], seqs=[last], begun_ns=begun_ns, group=FOLLOW.number)
        if is_auto or not count % COMMIT_EVERY:
            # The library commits a record when the next one is requested.
            note(Did.COMMIT, topic, [0], seqs=[last], begun_ns=begun_ns, group=FOLLOW.number)
        if not is_auto and not count % COMMIT_EVERY:
            try:
                group.commit()
            except LeaseLost:
                note(
                    Did.COMMIT_END, topic, [0], seqs=[last], begun_ns=begun_ns, group=FOLLOW.number,
                    outcome=Outcome.REFUSED,
                )  # fmt: skip
                raise
            committed = last
            note(
                Did.COMMIT_END, topic, [0], seqs=[committed], begun_ns=begun_ns, group=FOLLOW.number,
                outcome=Outcome.OK,
            )  # fmt: skip
        if count == most:
            break
    return last


# -- looking ----------------------------------------------------------------------------------------------


def _look(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    """Record the floors of all groups repeatedly, and seek the AGAIN groups back from time to time."""
    every = [(topic, kind) for topic in range(len(task.topics)) for kind in kinds_of(topic)]
    groups = {(topic, kind): group_of(client, task.topics, topic, kind) for topic, kind in every}
    sought = time.monotonic()
    while not end.is_set:
        for (topic, kind), group in groups.items():
            try:
                floor = look_at(group, topic, kind, journal)
                if kind is AGAIN and time.monotonic() > sought + SEEK_S:
                    sought = time.monotonic()
                    _seek(group, topic, max(floor - SEEK_BACK, 0), journal)
            except RinglogError as e:
                report.failed(str(e))
        report.ops += 1
        time.sleep(LOOK_S)


def look_at(group: Group, topic: int, kind: Kind, journal: Journal) -> int:
    """Record the group's floor and return it."""
    begun_ns = time.monotonic_ns()
    floor = group.stats().floor
    journal.note(Did.FLOOR, topic, [0], seqs=[floor], begun_ns=begun_ns, group=kind.number)
    return floor


def _seek(group: Group, topic: int, place: int, journal: Journal) -> None:
    begun_ns = time.monotonic_ns()
    journal.note(Did.SEEK, topic, [0], begun_ns=begun_ns, group=AGAIN.number)
    first = group.seek(place + 1)
    journal.note(Did.SEEK_END, topic, [0], seqs=[first], begun_ns=begun_ns, group=AGAIN.number)


def _redrive(client: Client, task: Task, journal: Journal, end: End, report: Report) -> None:
    """Redrive all dead letters of one group, repeatedly."""
    group = group_of(client, task.topics, task.topic, SHARE)
    sent = time.monotonic()
    while not end.is_set:
        time.sleep(PAUSE_S)
        if time.monotonic() < sent + REDRIVE_S:
            continue
        sent = time.monotonic()
        try:
            _send_back(group, task.topic, journal)
        except RinglogError as e:
            report.failed(str(e))
        else:
            report.ops += 1


def _send_back(group: Group, topic: int, journal: Journal) -> None:
    letters = [item for item in group.dead_letters() if isinstance(item, Record)]
    if not letters:
        return
    begun_ns, seqs = time.monotonic_ns(), [letter.seq for letter in letters]
    values = [value_of(letter.data) for letter in letters]
    journal.note(Did.REDRIVE, topic, values, seqs=seqs, begun_ns=begun_ns, group=SHARE.number)
    group.redrive(seqs)
    journal.note(Did.REDRIVE_END, topic, values, seqs=seqs, begun_ns=begun_ns, group=SHARE.number)


_KINDS: Mapping[str, Callable[[Client, Task, Journal, End, Report], None]] = {
    "jobs_put": _put_jobs, "jobs_work": _work, "jobs_cancel": _cancel, "groups_cancel": _cancel,
    "groups_put": _put, "groups_share": _share, "groups_again": _again, "groups_follow": _follow,
    "groups_look": _look, "groups_redrive": _redrive,
}  # fmt: skip
