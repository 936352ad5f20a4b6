# Generated from ringlog/aio/tailer.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Tailer: the fast way to read on the engine's own host.

It maps the log's files and hands out stretches of them, verified but not copied: a gigabyte a second and
more into Arrow. A stretch keeps its mapping alive as long as it, or anything viewed from it, lives.

What that costs: if the disk fails under a mapping, the kernel kills the process with SIGBUS. A tailer
belongs in a process that may die and be started again; elsewhere use `reader().pages()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf

from ringlog.client.connection.ref_count import WINDOW_BYTES, ReaderClient, open_ref_counted
from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import EARLIEST, Cursor, Start, Tombstone
from ringlog.client.read.paging import resolve_start
from ringlog.client.read.tail_batch import TailBatch, tail_batches_of
from ringlog.client.requests.validation import check_bool, check_start, check_str, check_timeout
from ringlog.errors import UsageError
from ringlog.link.futures import Steps

_NO_LIMIT = 1 << 62


class Tailer:
    """Iterates over TailBatch and Tombstone items of one topic; `for item in client.tailer("t")`.

    With `follow` (the default) it waits for more until it is closed; `next(timeout)` waits a bounded time.
    """

    def __init__(
        self, client: ReaderClient, topic: str, start: Start = EARLIEST, *, follow: bool = True
    ) -> None:
        topic, start, follow = check_str(topic, "topic"), check_start(start), check_bool(follow, "follow")
        self._client = client
        self._topic = topic
        self._follow = follow
        self._source: LocalSource | None = None
        self._files = open_ref_counted(partial(_opened, client, topic, follow))
        self._start: Start | None = start
        self._cursor = Cursor(0, 0)
        self._ready: list[TailBatch | Tombstone] = []
        self._resume = 0
        self._is_caught_up = False
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
        self._ready.clear()

    def next(self, timeout: float | None = None) -> TailBatch | Tombstone | None:
        """Return the next item, or None after `timeout` seconds without one; None = wait for ever."""
        timeout = check_timeout(timeout, "timeout")
        if self._start is not None:
            self._files.read(self._client, self._settled)
        if self._ready and (self._source is None or not self._source.is_current):
            self._ready.clear()  # Read ahead, and some of it may have been deleted since (DL-9).
        while not self._ready:
            self._fetch(inf if timeout is None else timeout)
            if timeout is not None or self._is_closed:
                break
        if not self._ready:
            return None
        item = self._ready.pop(0)
        if isinstance(item, TailBatch):
            self._cursor = item.cursor
        else:
            self._cursor = Cursor(self._cursor.epoch, self._resume)
        return item

    def __iter__(self) -> Iterator[TailBatch | Tombstone]:
        while not self._is_closed:
            item = self.next(None if self._follow else 0.0)
            if item is not None:
                yield item
            elif not self._follow and self._is_caught_up:
                return

    @property
    def is_closed(self) -> bool:
        """After close."""
        return self._is_closed

    def close(self) -> None:
        """End the iteration and let go of files. What was handed out stays valid."""
        self._is_closed = True
        self._ready.clear()
        self._files.close_when_unused()

    def __enter__(self) -> Tailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settled(self, source: LocalSource) -> Steps[None]:
        """Look up where to start. Interrupted meanwhile, the next call does; sought elsewhere, this one."""
        while (start := self._start) is not None:
            self._cursor = yield from resolve_start(self._client.connection, source, self._topic, start)
            if self._start is start:
                self._start = None

    def _portion(self, source: LocalSource, wait_s: float) -> Steps[FetchResult]:
        self._source = source
        return source.fetch(self._cursor, limit=_NO_LIMIT, bytes_max=WINDOW_BYTES, wait_s=wait_s)

    def _fetch(self, wait_s: float) -> None:
        portion = self._files.read(self._client, lambda source: self._portion(source, wait_s))
        self._resume = portion.after
        self._is_caught_up = portion.examined >= portion.head_seq
        self._cursor = Cursor(portion.epoch, self._cursor.seq)
        if (gap := portion.gap) is not None:
            self._ready.append(
                Tombstone(
                    self._topic, gap.gap_from, gap.gap_to, gap.reason, portion.earliest_seq, portion.head_seq
                )
            )
        self._ready += tail_batches_of(portion, self._topic)
        if not self._ready:
            self._cursor = Cursor(portion.epoch, max(self._cursor.seq, portion.examined))


def _opened(client: ReaderClient, topic: str, follow: bool) -> LocalSource:
    connection = client.connection
    if connection.transport != "ring":
        raise UsageError(
            "a tailer reads the engine's files and must run on its host",
            transport=connection.transport, instead="reader().pages()",
        )  # fmt: skip
    return LocalSource(connection, topic, is_mapped=True, is_settling=True, is_following=follow)
