# Generated from ringlog/aio/reader.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Read a topic page by page or record by record.

The record iterator creates one Record object per record, at about 1 µs each. `pages()` with `page.bytes()`,
or the tailer, are faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any, Generic, Self

from ringlog.client.connection.ref_count import ReaderClient, open_ref_counted
from ringlog.client.read.fetch_result import Source
from ringlog.client.read.pages import EARLIEST, Cursor, Filters, Page, Record, Start, TagFilter, Tombstone
from ringlog.client.read.paging import read_page, reader_options, resolve_filters, resolve_start
from ringlog.client.read.read_ahead import ReadAhead
from ringlog.client.read.source import open_source
from ringlog.client.requests.validation import check_int_range, check_payload_codec, check_start
from ringlog.limits import READ_LIMIT_MAX
from ringlog.link.futures import Steps
from ringlog.payload import RAW, PayloadCodec, V


class Reader(Generic[V]):
    """Iterator over the records and tombstones of one topic, in order.

    Without `follow` the iteration ends at the head of the topic. With `follow` it waits for new records until
    the reader is closed. Lost records appear as tombstones and are never skipped silently. Store `cursor` to
    resume later.

    The reader does not return records that are deleted or expired when it requests them. Over rings this is
    immediate. Over ipc and TCP the reader may still return a record up to READ_AHEAD_MS (0.1 s) after its
    deletion. If the topic is deleted, the iteration raises TopicNotFound. If the topic is deleted and created
    again, it yields a Tombstone with reason `recreated`.

    Example:
        for item in client.reader("orders"):
            if isinstance(item, Record):
                process(item.data)
    """

    def __init__(
        self, client: ReaderClient, topic: str, start: Start = EARLIEST, *, follow: bool = False,
        tags: TagFilter | None = None, node: str | list[str] | None = None,
        payload: PayloadCodec[Any] = RAW,
    ) -> None:  # fmt: skip
        topic, start, follow, tags, node = reader_options(topic, start, follow, tags, node)
        self._client = client
        self._codec: PayloadCodec[V] = check_payload_codec(payload)
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
        """Position of the last item that the iteration returned. Pass it as `start` to resume after this
        item."""
        if self._start is not None:
            self._files.read_if_blocking(self._client, self._settled)
        return self._cursor

    def seek(self, start: Start) -> None:
        """Continue the iteration at another position."""
        self._start = check_start(start)

    def pages(self, limit: int = READ_LIMIT_MAX) -> Iterator[Page[V]]:
        """Iterate page by page. With `follow` the iteration does not end by itself.

        Args:
            limit: Most records of one page, at least 1.

        Returns:
            Iterator over pages.
        """
        return self._pages(check_int_range(limit, "limit", 1))

    def _pages(self, limit: int) -> Iterator[Page[V]]:
        while not self._is_closed:
            page = self._next_page(limit)
            if page.tombstone is None and not len(page) and page.caught_up and not self._follow:
                return
            self._cursor = page.cursor
            if page.tombstone is not None or len(page):
                yield page

    def __iter__(self) -> Iterator[Record[V] | Tombstone]:
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
        """End the iteration and release the files."""
        self._is_closed = True
        self._files.close_when_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _was_moved(self) -> bool:
        """Return True if the program called `seek` or `close` after it received the last item."""
        return self._start is not None or self._is_closed

    def _next_page(self, limit: int) -> Page[V]:
        page = self._files.read(self._client, lambda source: self._page_steps(source, limit))
        return page.with_payload(self._codec)

    def _settled(self, source: Source) -> Steps[None]:
        """Resolve the start position. If the call is interrupted, the next call resolves it. A `seek`
        meanwhile restarts it."""
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
    def _before(page: Page[Any]) -> int:
        """Return the position just before the first record of the page."""
        return page.batches[0].seq_at(0) - 1 if page.batches else page.cursor.seq


def _opened(client: ReaderClient, topic: str, follow: bool) -> Source:
    return open_source(client.connection, topic, is_settling=True, is_following=follow)
