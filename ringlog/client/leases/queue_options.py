"""Arguments of queue and group calls, checked before a request is sent, and helpers of both clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ringlog.client.connection.session import Session
from ringlog.client.leases.job_facts import JobFacts, check_reason
from ringlog.client.leases.lease_operations import NackOptions
from ringlog.client.leases.redrive import Redrive
from ringlog.client.read.pages import Record
from ringlog.client.requests.results import Settled
from ringlog.client.requests.validation import (
    check_call_setting,
    check_claim_size,
    check_int,
    check_str,
)
from ringlog.errors import LeaseLost, RinglogError, UsageError
from ringlog.limits import CLAIM_JOBS_MAX, LEASE_MS_MIN
from ringlog.link.futures import Pending, run_steps

GIVE_BACK_S = 5.0
"""Longest time in seconds that the end of a loop waits for the engine to accept unstarted jobs."""
ORDERS = ("priority", "seq")
"""Orders in which a claim gets jobs that were never delivered."""
RETRY_S = 0.25
"""Pause in seconds of an iteration while the engine cannot answer."""


def begin_move(plan: Redrive, letters: Sequence[Record], session: Session) -> Pending[None]:
    return run_steps(plan.move(session, letters))


def release_settled_slots(jobs: Iterable[JobFacts[Any]]) -> None:
    """Remove the settled ones of these jobs from the jobs in flight."""
    for job in jobs:
        if job.lease.is_over:
            job.release_slot()


def release_slots(jobs: Sequence[JobFacts[Any]], _: Settled | None, error: BaseException | None) -> None:
    """Remove jobs from the jobs in flight after a request.

    After an error the outcome is unknown, and the leases are marked as lost. If they were still extended,
    unprocessed jobs would never be delivered again.
    """
    if error is None:
        for job in jobs:
            job.release_slot()
    elif isinstance(error, RinglogError):
        for job in jobs:
            job.lease.mark_lost()


def lease_lost_before_claim(topic: str, settled: Settled) -> LeaseLost:
    """Return the error of a claim with acks if leases had ended before their ack."""
    skipped = settled.skipped
    return LeaseLost(
        "leases had ended before their jobs were acked; nothing was claimed", topic=topic,
        jobs=len(skipped), seqs=list(skipped[:10]),
    )  # fmt: skip


def check_claim(most: int, wait_ms: int, lease_ms: int | None) -> tuple[int, int, int | None]:
    """Check the arguments of a claim. This and the following functions raise UsageError for invalid
    values."""
    most, wait_ms, lease_ms = (
        check_int(most, "max"),
        check_call_setting(wait_ms, "wait_ms"),
        check_claim_lease(lease_ms),
    )
    check_claim_size(most)
    return most, wait_ms, lease_ms


def check_claim_lease(lease_ms: int | None) -> int | None:
    """Check the length of a claim's leases in milliseconds; None or 0 = the topic's `lease_ms`."""
    return None if lease_ms is None else check_call_setting(lease_ms, "lease_ms")


def is_seq_order(order: str) -> bool:
    """Return True if a claim gets the lowest seqs, whatever their priority."""
    if check_str(order, "order") not in ORDERS:
        raise UsageError(
            f"order must be priority or seq, got {order[:64]!r}", order=order, known=list(ORDERS)
        )
    return order == "seq"


def check_iteration(jobs: int, name: str = "max_in_flight") -> int:
    """Check the number of jobs in flight, or of a batch."""
    jobs = check_int(jobs, name)
    if not 1 <= jobs <= CLAIM_JOBS_MAX:
        raise UsageError(
            f"{name} must be from 1 to {CLAIM_JOBS_MAX}, got {jobs}", found=jobs, max=CLAIM_JOBS_MAX
        )
    return jobs


def check_batches(size: int, max_in_flight: int | None) -> tuple[int, int]:
    """Check the number of jobs of a batch, and of one claim."""
    size = check_iteration(size, "size")
    if max_in_flight is None:
        return size, size
    most = check_iteration(max_in_flight)
    if most < size:
        raise UsageError(f"max_in_flight must be >= size {size}, got {most}", found=most, min=size)
    return size, most


def check_nack_options(delay_ms: int | None, reason: str) -> NackOptions:
    """Check the options of a nack. A delay of None uses the topic's backoff."""
    reason = check_reason(reason)
    if delay_ms is None:
        return NackOptions(0, reason, True)
    return NackOptions(check_call_setting(delay_ms, "delay_ms"), reason)


def check_lease(lease_ms: int) -> int:
    """Check a new lease length in milliseconds."""
    if check_int(lease_ms, "lease_ms") == 0:
        raise UsageError(f"lease_ms must be >= {LEASE_MS_MIN}, got 0", found=0, min=LEASE_MS_MIN)
    return check_call_setting(lease_ms, "lease_ms")
