"""Tailing with asyncio: the fast way to read on the engine's own host. See ringlog.client.tailer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import TypeVar

from ringlog.aio.operations import Operations
from ringlog.client.checks import flag, start_at, text
from ringlog.client.local_source import LocalSource
from ringlog.client.pages import EARLIEST, Cursor, Start, Tombstone
from ringlog.client.reader import resolve_start
from ringlog.client.tailer import TailBatch, batches_of
from ringlog.errors import UsageError
from ringlog.link.pending import Steps
from ringlog.storage.reader import WINDOW_BYTES

T = TypeVar("T")


class Tailer:
    """`async for item in client.tailer("t")`: TailBatch and Tombstone items. See ringlog.client.Tailer."""

    def __init__(
        self, client: Operations, topic: str, start: Start = EARLIEST, *, follow: bool = True
    ) -> None:
        self._client, self._shell = client, client._shell
        self._topic = text(topic, "topic")
        self._follow = flag(follow, "follow")
        start = start_at(start)
        self._source: LocalSource | None = None
        self._start: Start | None = start
        self._is_closed = False
        self.cursor = Cursor(0, 0)
        """Behind the last item given."""

    async def __aiter__(self) -> AsyncIterator[TailBatch | Tombstone]:
        is_caught_up = False
        while not self._is_closed and (self._follow or not is_caught_up):
            items, after, is_caught_up = await self._run(self._fetch_steps())
            for place, item in enumerate(items):
                if place and self._source is not None and not self._source.is_current:
                    is_caught_up = False
                    break  # Read ahead, and some of it may have been deleted since (DL-9).
                self.cursor = item.cursor if isinstance(item, TailBatch) else after
                yield item
                if self.is_closed:
                    return
            if not items:
                self.cursor = after

    @property
    def is_closed(self) -> bool:
        """After close."""
        return self._is_closed

    async def _run(self, steps: Steps[T]) -> T:
        try:
            return await self._shell.run_reading(steps)
        finally:
            if self._is_closed:
                self.close()  # Meanwhile, and the step may have opened something since.

    def close(self) -> None:
        """End the iteration and let go of files. What was handed out stays valid."""
        self._is_closed = True
        if self._source is not None:
            self._source.close()

    async def __aenter__(self) -> Tailer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _fetch_steps(self) -> Steps[tuple[list[TailBatch | Tombstone], Cursor, bool]]:
        """(items, cursor behind a tombstone or an empty portion, everything published was seen)."""
        connection = self._shell.session
        if connection.transport != "ring":
            raise UsageError(
                "a tailer reads the engine's files and must run on its host", transport=connection.transport
            )
        if self._source is None:
            self._source = LocalSource(
                connection, self._topic, is_mapped=True, is_settling=True, is_following=self._follow
            )
        while (start := self._start) is not None:
            # Cancelled meanwhile, the next call begins there; sought elsewhere meanwhile, this one does.
            self.cursor = yield from resolve_start(connection, self._source, self._topic, start)
            if self._start is start:
                self._start = None
        portion = yield from self._source.fetch(
            self.cursor, limit=1 << 62, bytes_max=WINDOW_BYTES, wait_s=inf if self._follow else 0.0
        )
        items: list[TailBatch | Tombstone] = []
        if (gap := portion.gap) is not None:
            items.append(
                Tombstone(
                    self._topic, gap.gap_from, gap.gap_to, gap.reason, portion.earliest_seq, portion.head_seq
                )
            )
        items += batches_of(portion, self._topic)
        after = portion.after if items else max(self.cursor.seq, portion.examined)
        return items, Cursor(portion.epoch, after), portion.examined >= portion.head_seq
