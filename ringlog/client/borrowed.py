"""A source that its reader uses and that its client ends, each perhaps in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ringlog.client.connection import Connection
from ringlog.errors import CalledInside
from ringlog.limits import MIB
from ringlog.link.pending import Steps

if TYPE_CHECKING:
    from ringlog.client.shell import Shell

WINDOW_BYTES = 4 * MIB
"""Log scanned for one batch of a tailer."""
T = TypeVar("T")


class Closes(Protocol):
    """What lets go of its files when it is told to."""

    def close(self) -> None:
        """Let go of files."""


class Runs(Protocol):
    """What a Reader needs of its client."""

    @property
    def connection(self) -> Connection:
        """The client's connection."""
        ...

    def run(self, steps: Steps[Any]) -> Any:
        """Run to the end, waiting as needed."""
        ...


S = TypeVar("S", bound=Closes)


def borrow(open: Callable[[], S]) -> Borrowed[S]:
    """Open a source, to use it."""
    return Borrowed(open())


class Borrowed(Generic[S]):
    """Nobody closes the files under a thread that reads them: the last of user and ender does."""

    def __init__(self, source: S) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._is_over = False
        self._user = 0
        """The thread that reads now; 0 = none does."""
        self.is_left = False
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
                self.end()

    def read(self, client: Runs, make: Callable[[S], Steps[T]]) -> T:
        """Run an operation that reads from it."""
        with self.use() as source:
            found: T = client.run(make(source))
            return found

    def read_now(self, client: Runs, make: Callable[[S], Steps[Any]]) -> None:
        """The same where a property asks, which can wait for it in a thread alone."""
        self.read(client, make)

    def run(self, shell: Shell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation that reads from it, for who uses it."""
        return shell.run(make())

    def end(self) -> None:
        """Let go of its files, now or when whoever reads has done. Idempotent, never waits."""
        self._is_over = True
        if self._lock.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._lock.release()
