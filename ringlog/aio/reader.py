"""Reading with asyncio: the same pages and batches, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import TypeVar

from ringlog.aio.operations import Operations
from ringlog.client.checks import at_least, start_at
from ringlog.client.pages import EARLIEST, Cursor, Filters, Page, Record, Start, TagFilter, Tombstone
from ringlog.client.portion import Source
from ringlog.client.read_ahead import ReadAhead
from ringlog.client.reader import read_page, reader_options, resolve_filters, resolve_start
from ringlog.client.source import open_source
from ringlog.limits import READ_LIMIT_MAX
from ringlog.link.pending import Steps

T = TypeVar("T")


class Reader:
    """`async for item in client.reader("t")`: records and tombstones, in order. See ringlog.client.Reader."""

    def __init__(
        self, client: Operations, topic: str, start: Start = EARLIEST, *, follow: bool = False,
        tags: TagFilter | None = None, node: str | list[str] | None = None,
    ) -> None:  # fmt: skip
        topic, start, follow, tags, node = reader_options(topic, start, follow, tags, node)
        self._client, self._shell = client, client._shell
        self._topic = topic
        self._follow = follow
        self._tags, self._node = tags, node
        self._filters: Filters | None = None
        self._source: Source | None = None
        self._start: Start | None = start
        self._ahead = ReadAhead()
        self._is_closed = False
        self.cursor = Cursor(0, 0)
        """Behind the last item given."""

    def seek(self, start: Start) -> None:
        """Go on from there."""
        self._start = start_at(start)

    async def pages(self, limit: int = READ_LIMIT_MAX) -> AsyncIterator[Page]:
        """Iterate page by page; with `follow` never ends by itself."""
        limit = at_least(limit, "limit", 1)
        while not self._is_closed:
            page = await self._run(self._page_steps(limit))
            if page.tombstone is None and not len(page) and page.caught_up and not self._follow:
                return
            self.cursor = page.cursor
            if page.tombstone is not None or len(page):
                yield page

    async def __aiter__(self) -> AsyncIterator[Record | Tombstone]:
        while not self._is_closed:
            page = await self._run(self._page_steps(self._ahead.limit))
            if page.tombstone is not None:
                before = page.pieces[0].seq_at(0) - 1 if page.pieces else page.cursor.seq
                self.cursor = Cursor(page.epoch, before)
                yield page.tombstone
            source = self._source
            if self._was_moved() or source is None:
                continue
            for record in self._ahead.records(page, source):
                self.cursor = Cursor(page.epoch, record.seq)
                yield record
                if self._was_moved():
                    break
            else:
                if self._ahead.is_stale:
                    continue
                self.cursor = page.cursor
                if page.caught_up and not self._follow:
                    return

    def _was_moved(self) -> bool:
        """The program that got the last item has called `seek` or `close`."""
        return self._start is not None or self._is_closed

    async def _run(self, steps: Steps[T]) -> T:
        try:
            return await self._shell.run_reading(steps)
        finally:
            if self._is_closed:
                self.close()  # Meanwhile, and the step may have opened something since.

    def close(self) -> None:
        """End the iteration and let go of files."""
        self._is_closed = True
        if self._source is not None:
            self._source.close()

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _page_steps(self, limit: int) -> Steps[Page]:
        connection = self._shell.session
        if self._source is None:
            self._source = open_source(connection, self._topic, is_settling=True, is_following=self._follow)
        while (start := self._start) is not None:
            # Cancelled meanwhile, the next call begins there; sought elsewhere meanwhile, this one does.
            self.cursor = yield from resolve_start(connection, self._source, self._topic, start)
            if self._start is start:
                self._start = None
        if self._filters is None:
            self._filters = yield from resolve_filters(connection, self._topic, self._tags, self._node)
        wait_s = inf if self._follow else 0.0
        return (
            yield from read_page(
                self._source, self._topic, self.cursor, limit=limit, wait_s=wait_s, filters=self._filters
            )
        )
