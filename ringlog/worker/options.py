"""Options of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.errors import UsageError
from ringlog.limits import LEASE_MS_MAX, LEASE_MS_MIN, NACK_DELAY_MS_MAX, WORKER_PROCESSES_MAX
from ringlog.worker.settlement import DEFAULT_BACKOFF, WorkerBackoff
from ringlog.worker.target import check_name, check_payload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Validated options of a worker. Raises UsageError for a value that is malformed or out of range."""

    target: str
    """Name of the function, `package.module:function`. It is called with the payload."""
    queue: str
    concurrency: int = 1
    """Number of processes. Each runs one job at a time."""
    payload: str = "raw"
    """Codec of the payload: raw, text, json, or `package.module:codec`."""
    time_limit_s: float | None = None
    """Run time in seconds after which the process of a job is killed; None: no limit."""
    stop_timeout_s: float = 25.0
    """Time in seconds for which running jobs may continue after a stop request."""
    lease_ms: int | None = None
    node: str | None = None
    backoff: WorkerBackoff = DEFAULT_BACKOFF
    max_jobs_per_process: int = 0
    """Number of jobs after which a process is replaced; 0: never."""
    memory_bytes: int = 0
    """Limit in bytes on the address space of a process; 0: no limit."""
    until_empty: bool = False
    """End when the queue is empty, instead of waiting for more jobs."""

    def __post_init__(self) -> None:
        check_name(self.target)
        check_payload(self.payload)
        if not 1 <= self.concurrency <= WORKER_PROCESSES_MAX:
            raise UsageError(
                f"concurrency must be from 1 to {WORKER_PROCESSES_MAX}",
                found=self.concurrency,
                max=WORKER_PROCESSES_MAX,
            )
        if self.max_jobs_per_process < 0:
            raise UsageError("max_jobs_per_process must be >= 0", found=self.max_jobs_per_process)
        if self.lease_ms is not None and not LEASE_MS_MIN <= self.lease_ms <= LEASE_MS_MAX:
            raise UsageError(
                f"lease_ms must be from {LEASE_MS_MIN} to {LEASE_MS_MAX}",
                found=self.lease_ms,
                min=LEASE_MS_MIN,
                max=LEASE_MS_MAX,
            )
        if not 0 <= self.backoff.base_ms <= self.backoff.most_ms <= NACK_DELAY_MS_MAX:
            raise UsageError(
                f"backoff must satisfy 0 <= base_ms <= most_ms <= {NACK_DELAY_MS_MAX}",
                base_ms=self.backoff.base_ms, most_ms=self.backoff.most_ms, max=NACK_DELAY_MS_MAX,
            )  # fmt: skip
