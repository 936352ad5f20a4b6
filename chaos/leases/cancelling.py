"""Clients of `jobs` and `groups` that cancel their claims, each from a connection that has just been opened.

The first requests of a connection may take different channels, so a claim may arrive after its undo. Leases
are long: if a cancelled claim keeps one, its jobs are not done at the end of the run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import Any

import ringlog.aio
from chaos.leases.journal import Did, Journal, Outcome
from chaos.leases.putting import End, value_of
from ringlog.drill.tasks import Report, Task
from ringlog.errors import RinglogError

LEASE_MS = 600_000
"""Length of the leases, far beyond that of a run."""
CLAIM_MOST = 20
WAITS_MS = (0, 0, 100)
CANCEL_S_MAX = 0.012
"""Longest time (s) after which a claim is cancelled. A new connection answers its first claim after 1 to 5
ms."""
PAUSE_S = 0.05
ACKED_SHARE = 0.3
"""Share of the claims in time whose jobs are acked. The jobs of the others go back."""


def cancel_claims(task: Task, journal: Journal, end: End, report: Report, *, group: str = "") -> None:
    """Claim jobs of a queue, or records of a group in queue mode, and cancel most claims, until the end."""
    random = Random(task.client)
    while not end.is_set:
        try:
            asyncio.run(_claim_once(task, journal, report, random, group))
        except RinglogError as e:
            report.failed(str(e))
            time.sleep(PAUSE_S)


async def _claim_once(task: Task, journal: Journal, report: Report, random: Random, group: str) -> None:
    jobs: list[Any] = []
    async with ringlog.aio.connect(
        task.url, transport=task.transport, timeout_ms=round(task.timeout_s * 1_000)
    ) as client:
        topic = task.topics[task.topic]
        source = client.group(topic, group, mode="queue") if group else client.queue(topic)
        begun_ns = time.monotonic_ns()
        with suppress(TimeoutError):
            async with asyncio.timeout(random.random() * CANCEL_S_MAX):
                claimed = await source.claim(
                    random.randint(1, CLAIM_MOST), wait_ms=random.choice(WAITS_MS), lease_ms=LEASE_MS
                )
                jobs = list(claimed)
        report.ops += 1
        if not jobs:
            return
        values = [value_of(job.data) for job in jobs]
        number = task.topic
        journal.note(
            Did.CLAIMED, number, values, seqs=[job.seq for job in jobs], begun_ns=begun_ns,
            deliveries=[job.deliveries for job in jobs] if group else 0,
        )  # fmt: skip
        is_acked = random.random() < ACKED_SHARE
        journal.note(Did.ACK if is_acked else Did.NACK, number, values)
        settled = await (source.ack(jobs) if is_acked else source.nack(jobs, delay_ms=0))
        if is_acked:
            skipped = set(settled.skipped)
            for value, job in zip(values, jobs, strict=True):
                outcome = Outcome.REFUSED if job.seq in skipped else Outcome.OK
                journal.note(Did.END, number, [value], outcome=outcome)
