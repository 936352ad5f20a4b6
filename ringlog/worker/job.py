"""What a job's function sees of its job, and how it says that the job has failed for good, or for now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import msgspec

from ringlog.errors import UsageError


class Reject(Exception):
    """Raise it where a job would fail each time: it goes to the dead letters at once, with the text."""


class Retry(Exception):
    """Raise it to have the job again later: after `delay_ms`, or after as long as failures rest."""

    def __init__(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        super().__init__(reason)
        if delay_ms is not None and delay_ms < 0:
            raise UsageError("a time is not negative", delay_ms=delay_ms)
        self.delay_ms = delay_ms


class CurrentJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that is worked on, besides its payload."""

    queue: str
    seq: int
    """Its number in the queue."""
    deliveries: int
    """Which hand-out of the job this is, from 1: above 1 it may have been worked on before."""
    data: bytes | None
    """The payload as it lies in the queue."""
    key: bytes | None = None
    tag: str | None = None
    headers: dict[str, bytes] = {}
    meta: dict[str, Any] = {}


current_job_var: ContextVar[CurrentJob] = ContextVar("current_job_var")
"""Set around each call of the function."""


def current_job() -> CurrentJob:
    """The job that the calling function works on; raises UsageError where it works on none."""
    try:
        return current_job_var.get()
    except LookupError:
        raise UsageError("no job is worked on here") from None
