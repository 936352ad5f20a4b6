"""What a worker is told."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.errors import UsageError
from ringlog.limits import LEASE_MS_MAX, LEASE_MS_MIN, NACK_DELAY_MS_MAX, WORKER_PROCESSES_MAX
from ringlog.worker.settlement import DEFAULT_BACKOFF, WorkerBackoff
from ringlog.worker.target import check_name, check_payload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Raises UsageError for what makes no sense."""

    target: str
    """`package.module:function`, called with the payload."""
    queue: str
    concurrency: int = 1
    """Processes, each with one job at a time."""
    payload: str = "raw"
    """What the function is called with: raw, text, json, or `package.module:codec`."""
    time_limit_s: float | None = None
    """A job that runs longer loses its process."""
    stop_timeout_s: float = 25.0
    """How long jobs at work may go on after the worker was told to stop."""
    lease_ms: int | None = None
    node: str | None = None
    backoff: WorkerBackoff = DEFAULT_BACKOFF
    max_jobs_per_process: int = 0
    """A process that has done so many is replaced; 0: never."""
    memory_bytes: int = 0
    """Address space of a process; 0: no limit."""
    until_empty: bool = False
    """End when there is nothing to do, in place of waiting for more."""

    def __post_init__(self) -> None:
        check_name(self.target)
        check_payload(self.payload)
        if not 1 <= self.concurrency <= WORKER_PROCESSES_MAX:
            raise UsageError("concurrency out of range", found=self.concurrency, max=WORKER_PROCESSES_MAX)
        if self.max_jobs_per_process < 0:
            raise UsageError("a number of jobs is not negative", found=self.max_jobs_per_process)
        if self.lease_ms is not None and not LEASE_MS_MIN <= self.lease_ms <= LEASE_MS_MAX:
            raise UsageError("lease out of range", found=self.lease_ms, min=LEASE_MS_MIN, max=LEASE_MS_MAX)
        if not 0 <= self.backoff.base_ms <= self.backoff.most_ms <= NACK_DELAY_MS_MAX:
            raise UsageError(
                "back-off begins at 0 or more and grows to a day at most",
                base_ms=self.backoff.base_ms, most_ms=self.backoff.most_ms, max=NACK_DELAY_MS_MAX,
            )  # fmt: skip
