"""How a process of a worker ended, when it did so before it had said what became of its job. Pure."""

from __future__ import annotations

import contextlib
from enum import Enum
from signal import Signals


class Cause(Enum):
    """Why a process was killed by its worker."""

    TIME_LIMIT = "time limit"
    STOPPED = "the worker stops"


class Died(Exception):
    """The process ended without a word about what it was doing. `cause` is None when it did so by itself."""

    def __init__(self, status: int, cause: Cause | None) -> None:
        super().__init__(status)
        self.status = status
        self.cause = cause

    @property
    def words(self) -> str:
        """For people: what happened to the process."""
        if self.cause is Cause.TIME_LIMIT:
            return "it ran longer than its time limit"
        if self.cause is Cause.STOPPED:
            return "it was at work when the worker had to stop"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"its process was killed by {Signals(-self.status).name}"
        return f"its process exited with status {self.status}"
