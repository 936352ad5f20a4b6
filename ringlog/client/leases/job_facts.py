"""Base of a job for both clients, and the limit of jobs in flight of an iteration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Literal, cast

from ringlog.client.leases.lease_extender import Lease
from ringlog.client.read.pages import Record
from ringlog.errors import LeaseLost, RinglogError, TopicNotFound, UsageError
from ringlog.link.futures import Pending
from ringlog.payload import RAW, PayloadCodec, V

BACKOFF_MS = 1_000
BACKOFF_MS_MAX = 60_000
MISSING_QUEUE_RETRIES_MAX = 8
"""Most attempts of a loop to find a deleted queue, with pauses in between: it may be created again."""
REASON_CHARS_MAX = 1_024
_NOT_DECODED: Final = object()
OnError = Callable[[Any, Exception], object] | Literal["log"]
"""Function that receives a failed job and its error, or "log"."""
log: logging.Logger = logging.getLogger("ringlog.client")


def backoff_ms(deliveries: int, base_ms: int = BACKOFF_MS, most_ms: int = BACKOFF_MS_MAX) -> int:
    """Return the backoff of a job whose delivery number `deliveries` failed: it doubles with each delivery.

    Args:
        deliveries: Number of the failed delivery, from 1.
        base_ms: Backoff after the first delivery, in milliseconds.
        most_ms: Longest backoff, in milliseconds.

    Returns:
        The backoff in milliseconds.
    """
    return min(base_ms << min(max(deliveries - 1, 0), 30), most_ms)


def failure_reason(error: BaseException) -> str:
    """Return the reason of a failed job from the exception of its block. Never raises, even if str() of the
    exception does."""
    kind = type(error).__name__
    try:
        text = short_reason(str(error))
    except Exception as e:  # noqa: BLE001  the job has to be given back all the same
        return f"{kind} (its text raised {type(e).__name__})"
    return f"{kind}: {text}" if text else kind


def short_reason(text: str) -> str:
    """Return the stored part of a reason: its first line, with lone surrogates escaped."""
    line = text[:REASON_CHARS_MAX].strip().partition("\n")[0]
    return line.encode(errors="backslashreplace").decode()


def check_reason(reason: Any) -> str:
    """Check the reason of a nack and return its stored part. Raises UsageError if it is not a str.

    Lone surrogates are accepted, since the program is already handling a failure.
    """
    if not isinstance(reason, str):
        raise UsageError(f"reason must be a str, got {type(reason).__name__}")
    return short_reason(reason)


def check_job(job: Any, name: str = "job") -> Any:
    """Check a job. Raises UsageError for anything else."""
    if not isinstance(job, JobFacts):
        raise UsageError(f"{name} must be a job that was claimed, got {type(job).__name__}")
    return job


def check_jobs(jobs: Any, name: str = "jobs") -> Any:
    """Check several jobs. Raises UsageError for anything else. A Jobs object is returned unchanged and
    creates no Job."""
    from ringlog.client.leases.claim_result import Jobs

    # Not isinstance: the compiled class uses the instance check of its base, which accepts a str.
    if type(jobs) is Jobs:
        return jobs
    if isinstance(jobs, str | bytes) or not isinstance(jobs, Iterable):
        raise UsageError(f"{name} must be an iterable of jobs, got {type(jobs).__name__}")
    return [check_job(job, name) for job in jobs]


def report_failure(on_error: OnError, job: Any, error: Exception) -> None:
    """Report a failed job to the `on_error` of a loop. "log" writes a log record."""
    if on_error == "log":
        log.error("job %d of %s failed", job.seq, job.topic, exc_info=error)
    else:
        on_error(job, error)


def check_on_error(on_error: Any) -> OnError | None:
    """Check the `on_error` of a loop. Raises UsageError."""
    if on_error is None or on_error == "log" or callable(on_error):
        return cast("OnError | None", on_error)
    raise UsageError('on_error must be a function of (job, error), "log" or None', found=repr(on_error)[:80])


_forks = [0]
"""Number of forks between the process that imported this module and this one."""


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """Return a number that differs between a process and its forked children."""
    return _forks[0]


class JobFacts(Generic[V]):
    """One job with its lease."""

    __slots__ = (
        "__weakref__",
        "_codec",
        "_forks",
        "_on_error",
        "_slots",
        "_value",
        "deliveries",
        "lease",
        "record",
        "topic",
    )

    def __init__(
        self, topic: str, record: Record, lease: Lease, deliveries: int, codec: PayloadCodec[Any] = RAW
    ) -> None:
        self._slots: InFlightLimit | None = None
        self._on_error: OnError | None = None
        """Receives an error of the job's block, instead of raising it in the loop."""
        self._forks = _forks[0]
        self._codec = codec
        self._value: Any = _NOT_DECODED
        self.topic: str = topic
        self.record: Record[bytes | None] = record
        self.lease: Lease = lease
        self.deliveries: int = deliveries
        """Number of this delivery of the job, from 1."""

    @property
    def seq(self) -> int:
        """Seq of the record."""
        return self.record.seq

    @property
    def data(self) -> bytes | None:
        """Payload; None for a null."""
        return self.record.data

    @property
    def value(self) -> V:
        """Payload decoded by the codec of the queue or group; None for a null. Raises the errors of the
        codec."""
        if self._value is _NOT_DECODED:
            self._value = None if self.data is None else self._codec.decode(self.data)
        return cast("V", self._value)

    @property
    def key(self) -> bytes | None:
        """Key of the record."""
        return self.record.key

    @property
    def tag(self) -> str | None:
        """Tag of the record."""
        return self.record.tag

    @property
    def headers(self) -> Mapping[str, bytes]:
        """Headers of the record."""
        return self.record.headers

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata of the record."""
        return self.record.meta

    @property
    def deadline(self) -> float:
        """End of the lease in seconds since the epoch, on the engine's clock without the adjustments since
        its host booted."""
        return self.lease.deadline_ms / 1_000

    @property
    def lease_id(self) -> str:
        """Id of the lease. The engine never issues it twice."""
        return self.lease.lease_id

    def json(self) -> Any:
        """Return the payload decoded as JSON; None for a null. Raises msgspec.DecodeError if it is not
        JSON."""
        return self.record.json()

    def text(self) -> str | None:
        """Return the payload decoded as UTF-8; None for a null."""
        return self.record.text()

    @property
    def is_from_parent(self) -> bool:
        """True if this process was forked after the claim: the job belongs to the parent."""
        return self._forks != _forks[0]

    def release_slot(self) -> None:
        """Remove the job from the jobs in flight. Call with the client's lock held, or in its loop."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()

    def lease_lost_error(self) -> LeaseLost:
        """Return the error of a job whose lease has ended."""
        return LeaseLost(
            "the lease has ended", topic=self.topic, seq=self.seq, lease_id=self.lease_id,
            deliveries=self.deliveries,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Job {self.topic} seq={self.seq} deliveries={self.deliveries}>"


class MissingQueueRetry:
    """Retries of loops that do not find their queue, which may be in the middle of its re-creation."""

    def __init__(self) -> None:
        self._attempts = 0

    def should_retry(self, error: RinglogError) -> bool:
        """Return True if a retry after a pause may succeed after this error."""
        if isinstance(error, TopicNotFound):
            self._attempts += 1
            return self._attempts <= MISSING_QUEUE_RETRIES_MAX
        return error.retriable

    def reset(self) -> None:
        """Reset the retries: the queue was found."""
        self._attempts = 0


class InFlightLimit:
    """Limit of unsettled jobs of one iteration. Call with the client's lock held, or in its loop."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self.in_flight: int = 0
        self._waits: list[Pending[None]] = []

    def acquire_all(self, jobs: Iterable[JobFacts[Any]]) -> None:
        """Count jobs as in flight, except those whose leases are lost."""
        for job in jobs:
            if not job.lease.is_lost:
                self.acquire(job)

    def acquire(self, job: JobFacts[Any]) -> None:
        """Count a job as in flight until it is settled or its lease is lost. A lost lease still notifies the
        job's holder."""
        previous_on_lost = job.lease.on_lost
        job._slots = self
        self.in_flight += 1

        def lost() -> None:
            if previous_on_lost is not None:
                previous_on_lost()
            job.release_slot()

        job.lease.on_lost = lost

    def release(self) -> None:
        """Count one job less: it was settled, or its lease was lost."""
        self.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Wake up all waiters for room, so that they test again."""
        waits, self._waits = self._waits, []
        for pending in waits:
            pending.resolve(None)

    def wait_room(self) -> Pending[None]:
        """Return a Pending that is done when one more job may be in flight."""
        pending: Pending[None] = Pending()
        if self.in_flight < self.limit:
            pending.resolve(None)
        else:
            self._waits.append(pending)
        return pending
