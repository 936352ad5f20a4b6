"""`ringlog worker`: runs a plain function for each job of a queue, in separate processes.

This package exports what a job's function may use. It imports little, because every process of a worker
imports it.
"""

from __future__ import annotations

from ringlog.worker.job import CurrentJob, Reject, Retry, current_job

__all__ = ["CurrentJob", "Reject", "Retry", "current_job"]
