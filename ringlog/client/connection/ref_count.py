"""A source that its reader uses and that its client ends, each perhaps in a thread of its own."""

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
"""Log scanned for one batch of a tailer."""
T = TypeVar("T")


class Closable(Protocol):
    """What lets go of its files when it is told to."""

    def close(self) -> None:
        """Let go of files."""


class ReaderClient(Protocol):
    """What a Reader needs of its client."""

    @property
    def connection(self) -> Connection:
        """The client's connection."""
        ...

    def run(self, steps: Steps[Any]) -> Any:
        """Run to the end, waiting as needed."""
        ...


S = TypeVar("S", bound=Closable)


def open_ref_counted(open: Callable[[], S]) -> RefCounted[S]:
    """Open a source, to use it."""
    return RefCounted(open())


class RefCounted(Generic[S]):
    """Nobody closes the files under a thread that reads them: the last of user and ender does."""

    def __init__(self, source: S) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._is_over = False
        self._user = 0
        """The thread that reads now; 0 = none does."""
        self.has_detached_run = False
        """With asyncio an operation goes on when who waits for it is cancelled."""

    @contextmanager
    def use(self) -> Iterator[S]:
        """Read from it, one thread at a time."""
        if self._user == threading.get_ident():
            raise CalledInside(
                "a reader was used by a signal handler that interrupted a call of it; use another one there"
            )
        try:
            with self._lock:
                self._user = threading.get_ident()
                try:
                    yield self._source
                finally:
                    self._user = 0
        finally:
            # Looked at with the lock free: whoever ends it later finds it so and closes it himself.
            if self._is_over:
                self.close_when_unused()

    def read(self, client: ReaderClient, make: Callable[[S], Steps[T]]) -> T:
        """Run an operation that reads from it."""
        with self.use() as source:
            found: T = client.run(make(source))
            return found

    def read_if_blocking(self, client: ReaderClient, make: Callable[[S], Steps[Any]]) -> None:
        """The same where a property asks, which can wait for it in a thread alone."""
        self.read(client, make)

    def run(self, shell: ThreadedShell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation that reads from it, for who uses it."""
        return shell.run(make())

    def close_when_unused(self) -> None:
        """Let go of its files, now or when whoever reads has done. Idempotent, never waits."""
        self._is_over = True
        if self._lock.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._lock.release()
