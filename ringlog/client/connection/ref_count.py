"""Source that a reader uses and that its client may close from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ringlog.client.connection.read_connection import Connection
from ringlog.errors import CalledInside
from ringlog.limits import MIB
from ringlog.link.futures import Steps

if TYPE_CHECKING:
    from ringlog.client.connection.shell import ThreadedShell

WINDOW_BYTES = 4 * MIB
"""Bytes of log that a tailer scans for one batch."""
T = TypeVar("T")


class Closable(Protocol):
    """Object that releases its files on request."""

    def close(self) -> None:
        """Release the files."""


class ReaderClient(Protocol):
    """Interface that readers need of their client."""

    @property
    def connection(self) -> Connection:
        """Connection of the client."""
        ...

    def run(self, steps: Steps[Any]) -> Any:
        """Run an operation to its end and return its result."""
        ...


S = TypeVar("S", bound=Closable)


def open_ref_counted(open: Callable[[], S]) -> RefCounted[S]:
    """Open a source and return it with a count of its users."""
    return RefCounted(open())


class RefCounted(Generic[S]):
    """Source whose files are closed after both its user and its owner are done with it.

    No thread loses the files that it reads: `close_when_unused` leaves the close to the thread that reads.
    """

    def __init__(self, source: S) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._is_over = False
        self._user = 0
        """Ident of the thread that reads now; 0 = none."""
        self.has_detached_run = False
        """Always False here. With asyncio, an operation continues when its caller is cancelled."""

    @contextmanager
    def use(self) -> Iterator[S]:
        """Return a context that yields the source to one thread at a time."""
        if self._user == threading.get_ident():
            raise CalledInside(
                "a signal handler used a reader whose call it had interrupted: use another reader there"
            )
        try:
            with self._lock:
                self._user = threading.get_ident()
                try:
                    yield self._source
                finally:
                    self._user = 0
        finally:
            # Test this after the release of the lock. A later `close_when_unused` gets the lock and closes
            # the source itself.
            if self._is_over:
                self.close_when_unused()

    def read(self, client: ReaderClient, make: Callable[[S], Steps[T]]) -> T:
        """Run an operation that reads from the source."""
        with self.use() as source:
            found: T = client.run(make(source))
            return found

    def read_if_blocking(self, client: ReaderClient, make: Callable[[S], Steps[Any]]) -> None:
        """Run an operation for a property, which can wait in a thread but not in an event loop."""
        self.read(client, make)

    def run(self, shell: ThreadedShell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation of the thread that uses the source."""
        return shell.run(make())

    def close_when_unused(self) -> None:
        """Close the files now, or when the reading thread is done. Idempotent; never waits."""
        self._is_over = True
        if self._lock.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._lock.release()
