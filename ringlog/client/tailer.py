# Generated from ringlog/aio/tailer.py by tools/unasync.py: do not edit; `make fmt` regenerates it.
"""Tailer: the fastest reader on the engine's host.

A tailer maps the log files and returns verified batches of records without copying them. It reaches more than
1 GB/s into Arrow. A batch keeps its mapping alive as long as the batch, or a view into it, exists.

If the disk fails under a mapping, the kernel kills the process with SIGBUS. Use a tailer only in a process
that may be restarted; elsewhere use `reader().pages()`.
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
    """Iterator over TailBatch and Tombstone items of one topic.

    With `follow` (the default) the iteration waits for new records until the tailer is closed.

    Example:
        tailer = client.tailer("orders")
        for item in tailer:
            if isinstance(item, TailBatch):
                process(item)
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
        """Position of the last item that the iteration returned. Pass it as `start` to resume after this
        item."""
        if self._start is not None:
            self._files.read_if_blocking(self._client, self._settled)
        return self._cursor

    def seek(self, start: Start) -> None:
        """Continue the iteration at another position."""
        self._start = check_start(start)
        self._ready.clear()

    def next(self, timeout: float | None = None) -> TailBatch | Tombstone | None:
        """Wait for the next item.

        Args:
            timeout: Longest time to wait, in seconds. None waits until the tailer is closed.

        Returns:
            The next item; None if `timeout` passed, or the tailer was closed.
        """
        timeout = check_timeout(timeout, "timeout")
        if self._start is not None:
            self._files.read(self._client, self._settled)
        if self._ready and (self._source is None or not self._source.is_current):
            self._ready.clear()  # A record that was read ahead may have been deleted since.
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
        """True after `close`."""
        return self._is_closed

    def close(self) -> None:
        """End the iteration and release the files. Returned batches stay valid."""
        self._is_closed = True
        self._ready.clear()
        self._files.close_when_unused()

    def __enter__(self) -> Tailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settled(self, source: LocalSource) -> Steps[None]:
        """Resolve the start position. If the call is interrupted, the next call resolves it. A `seek`
        meanwhile restarts it."""
        while (start := self._start) is not None:
            self._cursor = yield from resolve_start(self._client.connection, source, self._topic, start)
            if self._start is start:
                self._start = None

    def _fetch_result(self, source: LocalSource, wait_s: float) -> Steps[FetchResult]:
        self._source = source
        return source.fetch(self._cursor, limit=_NO_LIMIT, bytes_max=WINDOW_BYTES, wait_s=wait_s)

    def _fetch(self, wait_s: float) -> None:
        result = self._files.read(self._client, lambda source: self._fetch_result(source, wait_s))
        self._resume = result.after
        self._is_caught_up = result.examined >= result.head_seq
        self._cursor = Cursor(result.epoch, self._cursor.seq)
        if (gap := result.gap) is not None:
            self._ready.append(
                Tombstone(
                    self._topic, gap.gap_from, gap.gap_to, gap.reason, result.earliest_seq, result.head_seq
                )
            )
        self._ready += tail_batches_of(result, self._topic)
        if not self._ready:
            self._cursor = Cursor(result.epoch, max(self._cursor.seq, result.examined))


def _opened(client: ReaderClient, topic: str, follow: bool) -> LocalSource:
    connection = client.connection
    if connection.transport != "ring":
        raise UsageError(
            "a tailer needs transport ring, on the engine's host: use reader().pages()",
            transport=connection.transport, instead="reader().pages()",
        )  # fmt: skip
    return LocalSource(connection, topic, is_mapped=True, is_settling=True, is_following=follow)
