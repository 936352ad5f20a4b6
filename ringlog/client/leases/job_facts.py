"""What a job is, for both clients; and how many of them an iteration has out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, cast

from ringlog.client.leases.lease_extender import Lease
from ringlog.client.read.pages import Record
from ringlog.errors import LeaseLost, RinglogError, TopicNotFound, UsageError
from ringlog.link.futures import Pending
from ringlog.payload import RAW, PayloadCodec

BACKOFF_MS = 1_000
BACKOFF_MS_MAX = 60_000
MISSING_QUEUE_RETRIES_MAX = 8
"""Looks of a loop for a queue that is deleted, a pause apart, before the loop ends: it may be made anew."""
REASON_CHARS_MAX = 1_024
_NOT_DECODED: Final = object()
OnError = Callable[[Any, Exception], object] | Literal["log"]
"""Told of a job that failed, and why."""
log = logging.getLogger("ringlog.client")


def backoff_ms(deliveries: int, base_ms: int = BACKOFF_MS, most_ms: int = BACKOFF_MS_MAX) -> int:
    """How long a job rests whose delivery number `deliveries` failed: twice as long each time."""
    return min(base_ms << min(max(deliveries - 1, 0), 30), most_ms)


def failure_reason(error: BaseException) -> str:
    """Why a job failed whose block raised this. Never raises, whatever the error's own text does."""
    kind = type(error).__name__
    try:
        text = short_reason(str(error))
    except Exception as e:  # noqa: BLE001  the job has to be given back all the same
        return f"{kind} (its text raised {type(e).__name__})"
    return f"{kind}: {text}" if text else kind


def short_reason(text: str) -> str:
    """The part of a reason that is kept, as text that can be sent: its first line, no lone surrogates."""
    line = text[:REASON_CHARS_MAX].strip().partition("\n")[0]
    return line.encode(errors="backslashreplace").decode()


def check_reason(reason: Any) -> str:
    """Why a program gives a job back, as it is kept; raises UsageError for what is no text. A lone surrogate
    in it is no reason to refuse it: this is said where something has failed already."""
    if not isinstance(reason, str):
        raise UsageError(f"reason must be a str, got {type(reason).__name__}")
    return short_reason(reason)


def check_job(job: Any, name: str = "job") -> Any:
    """A job; raises UsageError for anything else."""
    if not isinstance(job, JobFacts):
        raise UsageError(f"{name} must be a job that was claimed, got {type(job).__name__}")
    return job


def check_jobs(jobs: Any, name: str = "jobs") -> Any:
    """Several jobs; raises UsageError for anything else. A claim stays one: it makes its jobs when asked."""
    from ringlog.client.leases.claim_result import Jobs

    # Not isinstance: compiled, the class shares what its base says of other classes, and takes a str for one.
    if type(jobs) is Jobs:
        return jobs
    if isinstance(jobs, str | bytes) or not isinstance(jobs, Iterable):
        raise UsageError(f"{name} must be an iterable of jobs, got {type(jobs).__name__}")
    return [check_job(job, name) for job in jobs]


def report_failure(on_error: OnError, job: Any, error: Exception) -> None:
    """Tell a loop's `on_error` that a job has failed; "log" writes it into the log."""
    if on_error == "log":
        log.error("job %d of %s failed", job.seq, job.topic, exc_info=error)
    else:
        on_error(job, error)


def check_on_error(on_error: Any) -> OnError | None:
    """What to do about jobs that fail; raises UsageError."""
    if on_error is None or on_error == "log" or callable(on_error):
        return cast("OnError | None", on_error)
    raise UsageError('on_error must be a function of (job, error), "log" or None', found=repr(on_error)[:80])


_forks = [0]
"""How often this process was forked from one that had us imported."""


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def fork_count() -> int:
    """A number that is another one in a child."""
    return _forks[0]


class JobFacts:
    """One job and the right to it."""

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
        """Told when its block fails, instead of who iterates."""
        self._forks = _forks[0]
        self._codec = codec
        self._value: Any = _NOT_DECODED
        self.topic = topic
        self.record = record
        self.lease = lease
        self.deliveries = deliveries
        """Which hand-out of the job this is, from 1."""

    @property
    def seq(self) -> int:
        """Its number in the topic."""
        return self.record.seq

    @property
    def data(self) -> bytes | None:
        """The payload; None for a null."""
        return self.record.data

    @property
    def value(self) -> Any:
        """The payload as the queue's codec reads it, None for a null; raises what the codec raises."""
        if self._value is _NOT_DECODED:
            self._value = None if self.data is None else self._codec.decode(self.data)
        return self._value

    @property
    def key(self) -> bytes | None:
        """The record's key."""
        return self.record.key

    @property
    def tag(self) -> str | None:
        """The record's tag."""
        return self.record.tag

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The record's headers."""
        return self.record.headers

    @property
    def meta(self) -> dict[str, Any]:
        """The record's metadata."""
        return self.record.meta

    @property
    def deadline(self) -> float:
        """When the lease ends, in seconds since the epoch, by the engine's clock; as if that had not been set
        since its host booted."""
        return self.lease.deadline_ms / 1_000

    @property
    def lease_id(self) -> str:
        """Names this lease; never given twice."""
        return self.lease.lease_id

    def json(self) -> Any:
        """The payload as JSON, None for a null; raises msgspec.DecodeError when it is not."""
        return self.record.json()

    def text(self) -> str | None:
        """The payload as UTF-8; None for a null."""
        return self.record.text()

    @property
    def is_from_parent(self) -> bool:
        """Was this process forked since the job was claimed? Then it is the parent's."""
        return self._forks != _forks[0]

    def release_slot(self) -> None:
        """It is in flight no longer. With the client's lock held, or in its loop."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()

    def lease_lost_error(self) -> LeaseLost:
        """What to raise when its lease has ended."""
        return LeaseLost(
            "the lease has ended", topic=self.topic, seq=self.seq, lease_id=self.lease_id,
            deliveries=self.deliveries,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Job {self.topic} seq={self.seq} deliveries={self.deliveries}>"


class MissingQueueRetry:
    """A queue that loops do not find: perhaps it is just deleted and made anew."""

    def __init__(self) -> None:
        self._looks = 0

    def should_retry(self, error: RinglogError) -> bool:
        """Is it of use to ask again after this error, behind a pause?"""
        if isinstance(error, TopicNotFound):
            self._looks += 1
            return self._looks <= MISSING_QUEUE_RETRIES_MAX
        return error.retriable

    def reset(self) -> None:
        """It answers."""
        self._looks = 0


class InFlightLimit:
    """How many jobs of one iteration are with its user. With the client's lock held, or in its loop."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self.in_flight = 0
        self._waits: list[Pending[None]] = []

    def acquire_all(self, jobs: Iterable[JobFacts]) -> None:
        """Those whose leases are not lost are in flight."""
        for job in jobs:
            if not job.lease.is_lost:
                self.acquire(job)

    def acquire(self, job: JobFacts) -> None:
        """It is in flight until it is settled or lost; then its holder is told as well."""
        tell = job.lease.on_lost
        job._slots = self
        self.in_flight += 1

        def lost() -> None:
            if tell is not None:
                tell()
            job.release_slot()

        job.lease.on_lost = lost

    def release(self) -> None:
        """A job was settled, or its lease lost."""
        self.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Have who waits for room look again."""
        waits, self._waits = self._waits, []
        for pending in waits:
            pending.resolve(None)

    def wait_room(self) -> Pending[None]:
        """Done when there is room for one more."""
        pending: Pending[None] = Pending()
        if self.in_flight < self.limit:
            pending.resolve(None)
        else:
            self._waits.append(pending)
        return pending
