"""Source that a reader uses and that its client may close while an operation on it is still running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from ringlog.aio.shell import LoopShell
from ringlog.client.connection.read_connection import Connection
from ringlog.client.connection.ref_count import Closable
from ringlog.limits import MIB
from ringlog.link.futures import Pending, Steps, run_steps

WINDOW_BYTES = 1 * MIB
"""Bytes of log that a tailer scans for one batch. The event loop runs nothing else meanwhile."""
T = TypeVar("T")
S = TypeVar("S", bound=Closable)


class ReaderClient(Protocol):
    """Interface that readers need of their client."""

    _shell: LoopShell

    @property
    def connection(self) -> Connection:
        """Connection of the client."""
        ...


def open_ref_counted(open: Callable[[], S]) -> RefCounted[S]:
    """Return a source that is opened at its first use, in the event loop."""
    return RefCounted(open)


class RefCounted(Generic[S]):
    """Source whose files are closed after both its user and its owner are done with it.

    No operation loses the files that it reads: `close_when_unused` waits for a running operation.
    """

    def __init__(self, open: Callable[[], S]) -> None:
        self._open = open
        self._source: S | None = None
        self._is_over = False
        self._running: Pending[Any] | None = None

    @property
    def has_detached_run(self) -> bool:
        """True while an operation of `run` continues although its caller was cancelled. The next `run` gets
        its result."""
        return self._running is not None

    @contextmanager
    def use(self) -> Iterator[S]:
        """Return a context that opens the source if necessary, and yields it."""
        if self._source is None:
            self._source = self._open()
        try:
            yield self._source
        finally:
            if self._is_over:
                self.close_when_unused()

    async def read(self, client: ReaderClient, make: Callable[[S], Steps[T]]) -> T:
        """Run an operation that reads from the source. Cancelling the caller ends the operation."""
        with self.use() as source:
            return await client._shell.run_reading(make(source))

    def read_if_blocking(self, client: ReaderClient, make: Callable[[S], Steps[Any]]) -> None:
        """Do nothing: a property cannot await. The next coroutine call does this read."""

    async def run(self, shell: LoopShell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation that reads from the source, or wait for the one that a cancelled caller left
        running."""
        if self._running is None:
            self._running = run_steps(make())
            self._running.when_done(lambda _: self.close_when_unused() if self._is_over else None)
        running: Pending[T] = self._running
        await shell.wait(running)
        self._running = None
        return running.result()

    def close_when_unused(self) -> None:
        """Close the files now, or after the running operation ends. Idempotent; never waits."""
        self._is_over = True
        if self._source is not None and (self._running is None or self._running.is_done):
            self._source.close()
