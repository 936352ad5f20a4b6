"""What client processes of the class do: put jobs, and work on them as workers do, well and badly."""

from __future__ import annotations

import time
from random import Random

import ringlog
from chaos.jobs.journal import Did, Journal, Outcome
from chaos.jobs.putting import End, put_all, value_of
from chaos.kills.tasks import Report, Task
from ringlog.client.queue import Job, Queue
from ringlog.errors import LeaseLost, RinglogError

LEASE_MS = 1_200
CLAIM_WAIT_MS = 200
CLAIM_MOST = 20
OVERTIME = 1.3
"""A worker that overslept wakes when so many leases have passed."""
PAUSE_S = 0.05
SEQS_TOLD = 10
"""Of so many jobs whose leases had ended a claim that acks names each."""
BAD_EVERY = 40
"""Each so many-th job is rejected, in the queue that has dead letters."""


def perform(task: Task, end: End) -> Report:
    """Do the task until told to end."""
    report, journal = Report(), Journal(task.journal_path, task.client)
    try:
        with ringlog.connect(
            task.url, transport=task.transport, timeout_ms=round(task.timeout_s * 1_000)
        ) as client:
            queue = client.queue(task.topics[task.topic])
            if task.kind == "jobs_put":
                put_all(queue.put_many, task, journal, end, report)
            else:
                _work(queue, task, journal, end, report)
            report.retries = client.health().retries
    finally:
        journal.close()
    return report


# -- working ----------------------------------------------------------------------------------------------


def _work(queue: Queue, task: Task, journal: Journal, end: End, report: Report) -> None:
    """Claim, and then do with the jobs what workers do."""
    random = Random(task.client)
    done: dict[int, Job] = {}
    while not end.is_set:
        begun_ns = time.monotonic_ns()
        acked, done = done, {}
        if acked:
            journal.note(Did.ACK, task.topic, list(acked))
        try:
            jobs = queue.claim(
                random.randint(1, CLAIM_MOST), wait_ms=CLAIM_WAIT_MS, lease_ms=LEASE_MS,
                done=list(acked.values()),
            )  # fmt: skip
        except LeaseLost as e:
            _ended(task, journal, acked, set(e.detail["seqs"]) if e.detail["jobs"] <= SEQS_TOLD else None)
            continue
        except RinglogError as e:
            report.failed(str(e))
            time.sleep(PAUSE_S)
            continue
        _ended(task, journal, acked, set())
        if not jobs:
            continue
        values = [value_of(job.data) for job in jobs]
        journal.note(Did.CLAIMED, task.topic, values, seqs=[job.seq for job in jobs], begun_ns=begun_ns)
        report.ops += len(jobs)
        with_jobs = dict(zip(values, jobs, strict=True))
        if task.hook == "rejects":
            with_jobs = _reject_bad(queue, task, journal, with_jobs, report)
        act = random.random()
        if act < 0.1:
            _nack(queue, task, journal, with_jobs, random.choice((0, 100)), report)
            continue
        if act < 0.13:
            time.sleep(LEASE_MS / 1_000 * OVERTIME)
        if 0.13 <= act < 0.5:
            done = with_jobs  # Acked with the next claim.
        elif act < 0.6:
            for value, job in with_jobs.items():
                _ack(queue, task, journal, {value: job}, report)
        else:
            _ack(queue, task, journal, with_jobs, report)


def _ack(queue: Queue, task: Task, journal: Journal, jobs: dict[int, Job], report: Report) -> None:
    if not jobs:
        return
    journal.note(Did.ACK, task.topic, list(jobs))
    try:
        skipped = set(queue.ack(jobs.values()).skipped)
    except RinglogError as e:
        report.failed(str(e))
        return  # Nobody knows: no end.
    _ended(task, journal, jobs, skipped)


def _ended(task: Task, journal: Journal, jobs: dict[int, Job], skipped: set[int] | None) -> None:
    """These were acked, but for those `skipped`; None: some were, and nobody said which."""
    if not jobs or skipped is None:
        return
    for outcome in (Outcome.OK, Outcome.REFUSED):
        ended = [v for v, job in jobs.items() if (job.seq in skipped) == (outcome is Outcome.REFUSED)]
        journal.note(Did.END, task.topic, ended, outcome=outcome)


def _nack(
    queue: Queue, task: Task, journal: Journal, jobs: dict[int, Job], delay_ms: int, report: Report
) -> None:
    journal.note(Did.NACK, task.topic, list(jobs))
    try:
        queue.nack(jobs.values(), delay_ms=delay_ms)
    except RinglogError as e:
        report.failed(str(e))


def _reject_bad(
    queue: Queue, task: Task, journal: Journal, jobs: dict[int, Job], report: Report
) -> dict[int, Job]:
    """Reject those that are bad; returns the others."""
    for value in [value for value in jobs if value % BAD_EVERY == 0]:
        job = jobs.pop(value)
        journal.note(Did.REJECT, task.topic, [value])
        try:
            queue.reject(job, "bad")
        except LeaseLost:
            journal.note(Did.END, task.topic, [value], outcome=Outcome.REFUSED)
        except RinglogError as e:
            report.failed(str(e))
        else:
            journal.note(Did.END, task.topic, [value], outcome=Outcome.OK)
    return jobs
