"""How a process of a worker ended before it reported the outcome of its job. Pure."""

from __future__ import annotations

import contextlib
from enum import Enum
from signal import Signals


class KillReason(Enum):
    """Why the worker killed a process."""

    TIME_LIMIT = "time limit"
    STOPPED = "the worker stops"


class ProcessExited(Exception):
    """The process ended before it reported an outcome. `cause` is None if the worker did not kill it."""

    def __init__(self, status: int, cause: KillReason | None) -> None:
        super().__init__(status)
        self.status = status
        self.kill_reason = cause

    @property
    def description(self) -> str:
        """What happened to the process, as text for people."""
        if self.kill_reason is KillReason.TIME_LIMIT:
            return "it ran longer than its time limit"
        if self.kill_reason is KillReason.STOPPED:
            return "it was still running when the worker had to stop"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"its process was killed by {Signals(-self.status).name}"
        return f"its process exited with status {self.status}"
