"""A source that its reader uses and that its client ends, perhaps while a step of it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ringlog.aio.shell import LoopShell
from ringlog.client.borrowed import Closes
from ringlog.link.pending import Pending, Steps, start

T = TypeVar("T")
S = TypeVar("S", bound=Closes)


class Borrowed(Generic[S]):
    """Nobody closes the files under steps that read them: the last of user and ender does."""

    def __init__(self, source: S) -> None:
        self._source = source
        self._is_over = False
        self._running: Pending[Any] | None = None

    @property
    def is_left(self) -> bool:
        """Who waited for `run` was cancelled. It goes on, and the next call of it takes what it finds."""
        return self._running is not None

    @contextmanager
    def use(self) -> Iterator[S]:
        """Read from it."""
        try:
            yield self._source
        finally:
            if self._is_over:
                self.end()

    async def run(self, shell: LoopShell, make: Callable[[], Steps[T]]) -> T:
        """Run an operation that reads from it, or go on with the one that was left."""
        if self._running is None:
            self._running = start(make())
            self._running.when_done(lambda _: self.end() if self._is_over else None)
        running: Pending[T] = self._running
        await shell.wait(running)
        self._running = None
        return running.take()

    def end(self) -> None:
        """Let go of its files, now or when what runs is over. Idempotent, never waits."""
        self._is_over = True
        if self._running is None or self._running.is_done:
            self._source.close()
