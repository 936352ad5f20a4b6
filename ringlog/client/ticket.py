# Generated from ringlog/aio/ticket.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Ticket: the result of records that were sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ringlog.client.requests.results import Appended
from ringlog.client.requests.validation import check_callable, check_timeout
from ringlog.client.write.batch import Batch

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell


class Ticket:
    """Result of `send`: resolves once the engine settles the records. Thread-safe.

    A ticket resolves without any further call of the program.

    Example:
        ticket = producer.send(b"...")
        appended = ticket.result(timeout=5)
    """

    __slots__ = ("_batch", "_index", "_shell")

    def __init__(self, shell: ThreadedShell, batch: Batch, index: int = -1) -> None:
        self._shell = shell
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """Return True if the records are settled: appended, refused or given up."""
        return self._batch.is_done

    def result(self, timeout: float | None = None) -> Appended:
        """Wait until the records are settled and return the seqs that they got.

        Fails with RequestTimeout too when `timeout` ended first; the ticket then stays open.

        Args:
            timeout: Longest time to wait, in seconds. None waits until the client's own timeout ends the
                request.

        Returns:
            The appended records: first and last seq, durability class and commit time.

        Raises:
            Refused: The engine refused the records. The subclass states the reason.
            RequestTimeout: The engine did not settle the records in time. Whether they were appended is
                unknown.
        """
        batch, timeout = self._batch, check_timeout(timeout, "timeout")
        if not batch.is_done and not self._shell.wait(batch, timeout):
            raise self._shell.not_settled_error(batch.stream.topic, timeout)
        return batch.record_result(self._index)

    def error(self) -> Exception | None:
        """Return the error of failed records. None if the ticket succeeded or is still open."""
        return self._batch.record_error(self._index)

    def on_done(self, fn: Callable[[Ticket], None]) -> None:
        """Call `fn(ticket)` once the records are settled, from any thread; at once if they already are."""
        check_callable(fn, "fn")
        self._shell.when_done(self._batch, lambda: fn(self))

    def __repr__(self) -> str:
        how = "done" if self.done() else "open"
        return f"<Ticket {self._batch.stream.topic} {how}>"
