"""What becomes of a job, decided from what its process said or how that ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.client.job_facts import BACKOFF_MS, BACKOFF_MS_MAX, backoff_ms
from ringlog.limits import NACK_DELAY_MS_MAX
from ringlog.worker import wire
from ringlog.worker.death import Cause, Died


@dataclass(frozen=True, slots=True)
class Fate:
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
NOT_BEGUN = Fate(CUT_OFF, reason="the worker stopped before it was begun")


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a failed job rests: from `base_ms`, twice as long each time, `most_ms` at most."""

    base_ms: int
    most_ms: int

    def of(self, deliveries: int) -> int:
        """After the delivery of that number."""
        return backoff_ms(deliveries, self.base_ms, self.most_ms)


DEFAULT_BACKOFF = Backoff(BACKOFF_MS, BACKOFF_MS_MAX)


def fate_of(outcome: wire.Outcome, deliveries: int, backoff: Backoff) -> Fate:
    """The function returned, or raised."""
    match outcome:
        case wire.Done():
            return Fate(DONE, is_done=True, ran_ms=outcome.ran_ms)
        case wire.Refused():
            return Fate(
                REJECTED, is_rejected=True, reason=outcome.reason, trace=outcome.trace, ran_ms=outcome.ran_ms
            )
        case wire.Failed():
            delay_ms = backoff.of(deliveries) if outcome.delay_ms is None else outcome.delay_ms
            return Fate(
                FAILED,
                delay_ms=min(delay_ms, NACK_DELAY_MS_MAX),
                reason=outcome.reason,
                trace=outcome.trace,
                ran_ms=outcome.ran_ms,
            )


def fate_of_death(died: Died, deliveries: int, ran_ms: float, backoff: Backoff) -> Fate:
    """The process ended. A job that the worker itself cut off is ready at once for somebody else; one that
    may have killed its process rests like every one that fails."""
    if died.cause is Cause.STOPPED:
        return Fate(CUT_OFF, reason=died.words, ran_ms=ran_ms)
    return Fate(FAILED, delay_ms=backoff.of(deliveries), reason=died.words, ran_ms=ran_ms)
