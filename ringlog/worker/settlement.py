"""What becomes of a job, decided from what its process said or how that ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.client.leases.job_facts import BACKOFF_MS, BACKOFF_MS_MAX, backoff_ms
from ringlog.limits import NACK_DELAY_MS_MAX
from ringlog.worker import wire
from ringlog.worker.process_exit import KillReason, ProcessExited


@dataclass(frozen=True, slots=True)
class JobSettlement:
    """What the engine is told of a job, and the line that is logged."""

    event: str
    """A constant phrase; also what jobs are counted by."""
    is_done: bool = False
    is_rejected: bool = False
    delay_ms: int = 0
    """How long the job rests, if it is given back."""
    reason: str = ""
    trace: str = ""
    ran_ms: float = 0.0


DONE = "job done"
FAILED = "job failed"
REJECTED = "job rejected"
CUT_OFF = "job cut off"
NOT_BEGUN = JobSettlement(CUT_OFF, reason="the worker stopped before it was begun")


@dataclass(frozen=True, slots=True)
class WorkerBackoff:
    """How long a failed job rests: from `base_ms`, twice as long each time, `most_ms` at most."""

    base_ms: int
    most_ms: int

    def of(self, deliveries: int) -> int:
        """After the delivery of that number."""
        return backoff_ms(deliveries, self.base_ms, self.most_ms)


DEFAULT_BACKOFF = WorkerBackoff(BACKOFF_MS, BACKOFF_MS_MAX)


def settlement_of_outcome(outcome: wire.Outcome, deliveries: int, backoff: WorkerBackoff) -> JobSettlement:
    """The function returned, or raised."""
    match outcome:
        case wire.JobDone():
            return JobSettlement(DONE, is_done=True, ran_ms=outcome.ran_ms)
        case wire.JobRejected():
            return JobSettlement(
                REJECTED, is_rejected=True, reason=outcome.reason, trace=outcome.trace, ran_ms=outcome.ran_ms
            )
        case wire.JobFailed():
            delay_ms = backoff.of(deliveries) if outcome.delay_ms is None else outcome.delay_ms
            return JobSettlement(
                FAILED,
                delay_ms=min(delay_ms, NACK_DELAY_MS_MAX),
                reason=outcome.reason,
                trace=outcome.trace,
                ran_ms=outcome.ran_ms,
            )


def settlement_of_exit(
    died: ProcessExited, deliveries: int, ran_ms: float, backoff: WorkerBackoff
) -> JobSettlement:
    """The process ended. A job that the worker itself cut off is ready at once for somebody else; one that
    may have killed its process rests like every one that fails."""
    if died.kill_reason is KillReason.STOPPED:
        return JobSettlement(CUT_OFF, reason=died.description, ran_ms=ran_ms)
    return JobSettlement(FAILED, delay_ms=backoff.of(deliveries), reason=died.description, ran_ms=ran_ms)
