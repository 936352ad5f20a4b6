"""`ringlog worker`: a plain function for each job of a queue, in processes of their own.

What a job's function may use is named here and loads little, since each of these processes pays for it.
"""

from __future__ import annotations

from ringlog.worker.job import CurrentJob, Reject, Retry, current_job

__all__ = ["CurrentJob", "Reject", "Retry", "current_job"]
