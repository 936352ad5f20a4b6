# Generated from ringlog/aio/ticket.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Ticket: what became of records that were sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ringlog.client.requests.results import Appended
from ringlog.client.requests.validation import check_callable, check_timeout
from ringlog.client.write.batch import Batch

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell


class Ticket:
    """Resolves by itself when the engine settled the records (CL-3). Thread-safe."""

    __slots__ = ("_batch", "_index", "_shell")

    def __init__(self, shell: ThreadedShell, batch: Batch, index: int = -1) -> None:
        self._shell = shell
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """True when the fate is known."""
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> Appended:
        """Wait for the fate, at most `timeout` seconds; the numbers the records got.

        Raises what they were refused for, RequestTimeout (outcome unknown) when the engine did not settle
        in time, and RequestTimeout too when `timeout` ended first: then the ticket is still open.
        """
        batch, timeout = self._batch, check_timeout(timeout, "timeout")
        if not batch.is_done and not self._shell.wait(batch, timeout):
            raise self._shell.not_settled_error(batch.stream.topic, timeout)
        return batch.record_result(self._index)

    def error(self) -> Exception | None:
        """The reason of a failure; None when it is done well or not done."""
        return self._batch.record_error(self._index)

    def on_done(self, fn: Callable[[Ticket], None]) -> None:
        """Call `fn(ticket)` when the fate is known, from whichever thread learns it; at once if it is."""
        check_callable(fn, "fn")
        self._shell.when_done(self._batch, lambda: fn(self))

    def __repr__(self) -> str:
        how = "done" if self.done() else "open"
        return f"<Ticket {self._batch.stream.topic} {how}>"
