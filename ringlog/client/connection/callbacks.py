"""Callbacks of the program (`Ticket.on_done`).

They run without the lock of the session, in the thread that served the result.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

log: logging.Logger = logging.getLogger("ringlog.client")


class Callbacks:
    """Functions of the program that are due, in order."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()

    @property
    def are_due(self) -> bool:
        """True if callbacks of the program are due. See `run`."""
        return bool(self._due)

    def add(self, call: Callable[[], None]) -> None:
        """Add a function that is due now."""
        self._due.append(call)

    def run(self) -> None:
        """Call the callbacks that are due. Call without the lock."""
        while self._due:
            try:
                call = self._due.popleft()
            except IndexError:
                return  # Another thread took the last callback.
            try:
                call()
            except Exception:
                log.exception("a callback of the program failed")
