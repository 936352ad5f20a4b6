# Generated from ringlog/aio/reader.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Reading a topic page by page, or record by record for as long as one likes.

The iterator makes a Record object for every record, which costs about a microsecond each; `pages()` with
`page.bytes()`, or the tailer, are the fast ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf

from ringlog.client.connection.ref_count import ReaderClient, open_ref_counted
from ringlog.client.read.fetch_result import Source
from ringlog.client.read.pages import EARLIEST, Cursor, Filters, Page, Record, Start, TagFilter, Tombstone
from ringlog.client.read.paging import read_page, reader_options, resolve_filters, resolve_start
from ringlog.client.read.read_ahead import ReadAhead
from ringlog.client.read.source import open_source
from ringlog.client.requests.validation import check_int_range, check_start
from ringlog.limits import READ_LIMIT_MAX
from ringlog.link.futures import Steps


class Reader:
    """Iterates over the records and tombstones of a topic, in order: `for item in client.reader("t")`.

    Without `follow` it ends at the head it finds; with it, it waits for more until it is closed. Either
    way nothing is passed over silently. `cursor` is behind the last item given; keep it to go on later.

    A record that was deleted or has expired before it is asked for is not given: never over rings, and over
    ipc and TCP not later than READ_AHEAD_MS (0.1 s) after the deletion. When the topic was deleted the
    iteration raises TopicNotFound; when it was created again, a Tombstone with reason `recreated` comes.
    """

    def __init__(
        self, client: ReaderClient, topic: str, start: Start = EARLIEST, *, follow: bool = False,
        tags: TagFilter | None = None, node: str | list[str] | None = None,
    ) -> None:  # fmt: skip
        topic, start, follow, tags, node = reader_options(topic, start, follow, tags, node)
        self._client = client
        self._topic = topic
        self._follow = follow
        self._tags, self._node = tags, node
        self._filters: Filters | None = None
        self._source: Source | None = None
        self._files = open_ref_counted(partial(_opened, client, topic, follow))
        self._start: Start | None = start
        self._cursor = Cursor(0, 0)
        self._ahead = ReadAhead()
        self._is_closed = False

    @property
    def cursor(self) -> Cursor:
        """Behind the last item given."""
        if self._start is not None:
            self._files.read_if_blocking(self._client, self._settled)
        return self._cursor

    def seek(self, start: Start) -> None:
        """Go on from there."""
        self._start = check_start(start)

    def pages(self, limit: int = READ_LIMIT_MAX) -> Iterator[Page]:
        """Iterate page by page; with `follow` never ends by itself."""
        return self._pages(check_int_range(limit, "limit", 1))

    def _pages(self, limit: int) -> Iterator[Page]:
        while not self._is_closed:
            page = self._next_page(limit)
            if page.tombstone is None and not len(page) and page.caught_up and not self._follow:
                return
            self._cursor = page.cursor
            if page.tombstone is not None or len(page):
                yield page

    def __iter__(self) -> Iterator[Record | Tombstone]:
        while not self._is_closed:
            page = self._next_page(self._ahead.limit)
            epoch = page.epoch
            if page.tombstone is not None:
                self._cursor = Cursor(epoch, self._before(page))
                yield page.tombstone
            if self._was_moved() or self._source is None:
                continue
            for record in self._ahead.records(page, self._source):
                self._cursor = Cursor(epoch, record.seq)
                yield record
                if self._was_moved():
                    break
            else:
                if self._ahead.is_stale:
                    continue
                self._cursor = page.cursor
                if page.caught_up and not self._follow:
                    return

    def close(self) -> None:
        """End the iteration and let go of files."""
        self._is_closed = True
        self._files.close_when_unused()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _was_moved(self) -> bool:
        """The program that got the last item has called `seek` or `close`."""
        return self._start is not None or self._is_closed

    def _next_page(self, limit: int) -> Page:
        return self._files.read(self._client, lambda source: self._page_steps(source, limit))

    def _settled(self, source: Source) -> Steps[None]:
        """Look up where to start. Interrupted meanwhile, the next call does; sought elsewhere, this one."""
        while (start := self._start) is not None:
            self._cursor = yield from resolve_start(self._client.connection, source, self._topic, start)
            if self._start is start:
                self._start = None

    def _page_steps(self, source: Source, limit: int) -> Steps[Page]:
        self._source = source
        yield from self._settled(source)
        if self._filters is None:
            self._filters = yield from resolve_filters(
                self._client.connection, self._topic, self._tags, self._node
            )
        return (
            yield from read_page(
                source, self._topic, self._cursor, limit=limit,
                wait_s=inf if self._follow else 0.0, filters=self._filters,
            )
        )  # fmt: skip

    @staticmethod
    def _before(page: Page) -> int:
        """Position right before the page's first record."""
        return page.batches[0].seq_at(0) - 1 if page.batches else page.cursor.seq


def _opened(client: ReaderClient, topic: str, follow: bool) -> Source:
    return open_source(client.connection, topic, is_settling=True, is_following=follow)
