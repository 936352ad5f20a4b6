"""A source that its reader uses and that its client ends, perhaps while a step of it goes on."""

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
"""Log scanned for one batch of a tailer, while nothing else goes on in the loop."""
T = TypeVar("T")
S = TypeVar("S", bound=Closable)


class ReaderClient(Protocol):
    """What a reader needs of its client."""

    _shell: LoopShell

    @property
    def connection(self) -> Connection:
        """The client's connection."""
        ...


def open_ref_counted(open: Callable[[], S]) -> RefCounted[S]:
    """A source that is opened when it is first used, in the loop."""
    return RefCounted(open)


class RefCounted(Generic[S]):
    """Nobody closes the files under steps that read them: the last of user and ender does."""

    def __init__(self, open: Callable[[], S]) -> None:
        self._open = open
        self._source: S | None = None
        self._is_over = False
        self._running: Pending[Any] | None = None

    @property
    def has_detached_run(self) -> bool:
        """Who waited for `run` was cancelled. It goes on, and the next call of it takes what it finds."""
        return self._running is not None

    @contextmanager
    def use(self) -> Iterator[S]:
        """Read from it."""
        if self._source is None:
            self._source = self._open()
        try:
            yield self._source
        finally:
            if self._is_over:
                self.close_when_unused()

    async def read(self, client: ReaderClient, make: Callable[[S], Steps[T]]) -> T:
        """Run an operation that reads from it; it ends with who waits for it."""
        with self.use() as source:
            return await client._shell.run_reading(make(source))

    def read_if_blocking(self, client: ReaderClient, make: Callable[[S], Steps[Any]]) -> None:
        """What a property cannot wait for; the next call does it."""

    async def run(self, shell: LoopShell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation that reads from it, or go on with the one that was left."""
        if self._running is None:
            self._running = run_steps(make())
            self._running.when_done(lambda _: self.close_when_unused() if self._is_over else None)
        running: Pending[T] = self._running
        await shell.wait(running)
        self._running = None
        return running.result()

    def close_when_unused(self) -> None:
        """Let go of its files, now or when what runs is over. Idempotent, never waits."""
        self._is_over = True
        if self._source is not None and (self._running is None or self._running.is_done):
            self._source.close()
