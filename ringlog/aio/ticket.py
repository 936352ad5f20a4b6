"""Ticket of an asyncio producer: await it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from ringlog.aio.shell import LoopShell
from ringlog.client.batch import Batch
from ringlog.client.checks import function, seconds
from ringlog.client.results import Appended
from ringlog.errors import RinglogError


class Ticket:
    """Resolves by itself when the engine settled the records; `await ticket` gives their numbers."""

    __slots__ = ("_batch", "_index", "_shell")

    def __init__(self, shell: LoopShell, batch: Batch, index: int = -1) -> None:
        self._shell = shell
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """True when the fate is known."""
        return self._batch.is_done

    async def result(self, timeout: float | None = None) -> Appended:
        """Await the fate; TimeoutError after `timeout` seconds, and the ticket is still open then."""
        timeout = seconds(timeout, "timeout")
        if not self._batch.is_done:
            try:
                await self._shell.wait(self._batch, timeout)
            except RinglogError:
                if not self._batch.is_done:
                    raise
        return self._batch.own_result(self._index)

    def __await__(self) -> Generator[Any, None, Appended]:
        return self.result().__await__()

    def on_done(self, fn: Callable[[Ticket], None]) -> None:
        """Call `fn(ticket)` from the loop when the fate is known."""
        function(fn, "fn")
        self._batch.when_done(lambda _: self._shell.call_soon(lambda: fn(self)))
