"""The settlement of a job, decided from its outcome or from the end of its process. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.client.leases.job_facts import BACKOFF_MS, BACKOFF_MS_MAX, backoff_ms
from ringlog.limits import NACK_DELAY_MS_MAX
from ringlog.worker import wire
from ringlog.worker.process_exit import KillReason, ProcessExited


@dataclass(frozen=True, slots=True)
class JobSettlement:
    """How the worker settles a job: the request to the engine, and the log event."""

    event: str
    """Text of the log event. The worker also counts jobs by it."""
    is_done: bool = False
    is_rejected: bool = False
    is_begun: bool = True
    """False if the function was not called: the delivery does not count."""
    delay_ms: int = 0
    """For a nack: delay in ms until the job is ready again."""
    reason: str = ""
    trace: str = ""
    ran_ms: float = 0.0


DONE = "job done"
FAILED = "job failed"
REJECTED = "job rejected"
CUT_OFF = "job interrupted"
NOT_BEGUN = JobSettlement(CUT_OFF, is_begun=False, reason="its process ended before the job started")


@dataclass(frozen=True, slots=True)
class WorkerBackoff:
    """Exponential backoff of failed jobs: `base_ms`, doubled with each delivery, at most `most_ms`."""

    base_ms: int
    most_ms: int

    def of(self, deliveries: int) -> int:
        """Return the delay in ms after the delivery with this number (from 1)."""
        return backoff_ms(deliveries, self.base_ms, self.most_ms)


DEFAULT_BACKOFF = WorkerBackoff(BACKOFF_MS, BACKOFF_MS_MAX)


def settlement_of_outcome(outcome: wire.Outcome, deliveries: int, backoff: WorkerBackoff) -> JobSettlement:
    """Return the settlement of a job whose function returned or raised."""
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
    """Return the settlement of a job whose process ended.

    A job that the worker interrupted itself is ready for another worker at once. A job that may have killed
    its process is retried with backoff, like every failed job.
    """
    if died.kill_reason is KillReason.STOPPED:
        return JobSettlement(CUT_OFF, reason=died.description, ran_ms=ran_ms)
    return JobSettlement(FAILED, delay_ms=backoff.of(deliveries), reason=died.description, ran_ms=ran_ms)
