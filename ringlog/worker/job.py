"""What a job's function can use: the current job, and exceptions for a permanent or a temporary failure."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import msgspec

from ringlog.errors import UsageError
from ringlog.limits import NACK_DELAY_MS_MAX


class Reject(Exception):
    """Raise it if the job would fail each time. The job moves to the dead-letter topic with this text.

    Example:
        raise Reject("unknown customer")
    """


class Retry(Exception):
    """Raise it to retry the job later.

    Args:
        reason: Why the job failed.
        delay_ms: Delay in whole milliseconds; above a day, a day. None uses the worker's backoff.

    Example:
        raise Retry("the service is down", delay_ms=30_000)
    """

    def __init__(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        super().__init__(reason)
        if delay_ms is not None and (type(delay_ms) is not int or delay_ms < 0):
            raise UsageError("delay_ms must be a whole number >= 0", delay_ms=repr(delay_ms))
        self.delay_ms: int | None = None if delay_ms is None else min(delay_ms, NACK_DELAY_MS_MAX)


class CurrentJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a function works on, with its metadata."""

    queue: str
    seq: int
    """Its seq in the queue."""
    deliveries: int
    """Number of this delivery, from 1. Above 1, an earlier delivery may have run the function."""
    data: bytes | None
    """The payload as stored in the queue, not decoded."""
    key: bytes | None = None
    tag: str | None = None
    headers: dict[str, bytes] = {}
    meta_json: bytes | None = None
    """Metadata as stored in the queue, not parsed. JSON has numbers that MessagePack does not have."""

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata, parsed at each access; empty if there is none."""
        return msgspec.json.decode(self.meta_json) if self.meta_json else {}


current_job_var: ContextVar[CurrentJob] = ContextVar("current_job_var")
"""Set during each call of the function."""


def current_job() -> CurrentJob:
    """Return the job that the calling function works on. Raises UsageError outside of such a function."""
    try:
        return current_job_var.get()
    except LookupError:
        raise UsageError("current_job() must be called inside the function of a worker") from None
