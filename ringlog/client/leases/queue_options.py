"""What calls of a queue are given, checked before anything is sent; and what both clients do with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringlog.client.connection.session import Session
from ringlog.client.leases.job_facts import JobFacts, check_reason
from ringlog.client.leases.lease_operations import NackOptions, check_claim_size
from ringlog.client.leases.redrive import Redrive
from ringlog.client.read.pages import Record
from ringlog.client.requests.results import Settled
from ringlog.client.requests.validation import check_call_setting, check_int, check_str
from ringlog.errors import LeaseLost, RinglogError, UsageError
from ringlog.limits import CLAIM_JOBS_MAX, LEASE_MS_MIN
from ringlog.link.futures import Pending, run_steps

GIVE_BACK_S = 5.0
"""Longest that leaving waits for an engine to take back what was not begun."""
ORDERS = ("priority", "seq")
"""In which a claim is given jobs that nobody had."""
RETRY_S = 0.25
"""Pause of an iteration whose engine cannot answer for now."""


def begin_move(plan: Redrive, letters: Sequence[Record], session: Session) -> Pending[None]:
    return run_steps(plan.move(session, letters))


def release_settled_slots(jobs: Iterable[JobFacts]) -> None:
    """Those of them that are settled are in flight no longer."""
    for job in jobs:
        if job.lease.is_over:
            job.release_slot()


def release_slots(jobs: Sequence[JobFacts], _: Settled | None, error: BaseException | None) -> None:
    """They are in flight no longer. After an error nobody knows what became of them: kept alive, jobs that
    nobody works on would never come back."""
    if error is None:
        for job in jobs:
            job.release_slot()
    elif isinstance(error, RinglogError):
        for job in jobs:
            job.lease.mark_lost()


def lease_lost_before_claim(topic: str, settled: Settled) -> LeaseLost:
    """What to raise when jobs were to be acked before others were claimed, and leases had ended."""
    skipped = settled.skipped
    return LeaseLost(
        "leases had ended before their jobs were acked; nothing was claimed", topic=topic,
        jobs=len(skipped), seqs=list(skipped[:10]),
    )  # fmt: skip


def check_claim(most: int, wait_ms: int, lease_ms: int | None) -> tuple[int, int, int | None]:
    """The same; raises UsageError for numbers that make no sense, and so do the others."""
    most, wait_ms, lease_ms = (
        check_int(most, "max"),
        check_call_setting(wait_ms, "wait_ms"),
        check_claim_lease(lease_ms),
    )
    check_claim_size(most)
    return most, wait_ms, lease_ms


def check_claim_lease(lease_ms: int | None) -> int | None:
    """How long jobs of a claim are held; None or 0 = as long as the topic says."""
    return None if lease_ms is None else check_call_setting(lease_ms, "lease_ms")


def is_seq_order(order: str) -> bool:
    """Is a claim to be given the lowest numbers, whatever their priority?"""
    if check_str(order, "order") not in ORDERS:
        raise UsageError("a claim is by priority or by number", order=order, known=list(ORDERS))
    return order == "seq"


def check_iteration(max_in_flight: int) -> int:
    """How many jobs may be out at once."""
    max_in_flight = check_int(max_in_flight, "max_in_flight")
    if not 1 <= max_in_flight <= CLAIM_JOBS_MAX:
        raise UsageError("max_in_flight out of range", found=max_in_flight, max=CLAIM_JOBS_MAX)
    return max_in_flight


def check_batches(size: int, max_in_flight: int | None) -> tuple[int, int]:
    """Jobs of a batch, and of one claim; raises UsageError."""
    size = check_iteration(size)
    if max_in_flight is None:
        return size, size
    most = check_iteration(max_in_flight)
    if most < size:
        raise UsageError("a batch is not larger than what may be in flight", found=most, min=size)
    return size, most


def check_nack_options(delay_ms: int | None, reason: str) -> NackOptions:
    """How a job is given back; None = to rest as its topic says."""
    reason = check_reason(reason)
    if delay_ms is None:
        return NackOptions(0, reason, True)
    return NackOptions(check_call_setting(delay_ms, "delay_ms"), reason)


def check_lease(lease_ms: int) -> int:
    """How long a job is held."""
    if check_int(lease_ms, "lease_ms") == 0:
        raise UsageError("lease_ms must say how long the job is held, got 0", found=0, min=LEASE_MS_MIN)
    return check_call_setting(lease_ms, "lease_ms")
