"""Reading one page at a time, written as Steps for both clients."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import FetchResult, Source
from ringlog.client.read.pages import (
    EARLIEST,
    LATEST,
    Cursor,
    Filters,
    Page,
    Position,
    Start,
    TagFilter,
    Tombstone,
    node_filter,
    tag_filter,
)
from ringlog.client.read.record_batches import RecordBatch
from ringlog.client.read.source import open_source
from ringlog.client.requests.validation import (
    check_bool,
    check_cursor,
    check_int_range,
    check_nodes,
    check_start,
    check_start_time,
    check_str,
    check_tag_filter,
    cursor_before,
)
from ringlog.errors import UsageError
from ringlog.limits import READ_BYTES_DEFAULT, READ_BYTES_MAX, READ_LIMIT_DEFAULT, READ_LIMIT_MAX, WAIT_MS_MAX
from ringlog.link.futures import Steps

SCAN_RECORDS_MAX = 100_000
"""Most records that one page examines if a filter omits them."""
_EPOCH_TIME = datetime(1970, 1, 1, tzinfo=UTC)


class _PageBuilder:
    """Page under construction, with its limits and its position."""

    def __init__(self, after: int, limit: int, max_bytes: int, filters: Filters) -> None:
        self.batches: list[RecordBatch] = []
        self.seq = after
        self.is_full = False
        self._records_left = limit
        self._bytes_left = max_bytes
        self._filters = filters

    def add_fitting(self, result: FetchResult, topic: str) -> None:
        """Add the records that fit, and advance `seq` to the last examined position."""
        for batch in result.batches(topic):
            rows = self._filters.rows(batch) if self._filters else None
            if rows is not None:
                batch = batch.select_rows(rows)
            fits = self._fitting(batch)
            self._records_left -= fits
            if fits < len(batch):
                self.is_full = True
                self.seq = batch.seq_at(fits) - 1
                if fits:
                    self.batches.append(batch.slice_rows(0, fits))
                return
            if len(batch):
                self.batches.append(batch)
            self.seq = batch.last_seq
            if self._records_left <= 0:
                self.is_full = True
                return
        self.seq = max(self.seq, result.examined)

    def _fitting(self, batch: RecordBatch) -> int:
        """Return how many of the batch's first records fit. The first record of a page always fits."""
        count = min(len(batch), max(self._records_left, 0))
        if not count:
            return 0
        sizes = batch.sizes()[:count]
        total = int(sizes.sum())
        if total <= self._bytes_left:
            self._bytes_left -= total
            return count
        ends = np.cumsum(sizes)
        fits = int(np.searchsorted(ends, self._bytes_left, side="right"))
        if not fits and not self.batches:
            fits = 1
        if fits:
            self._bytes_left -= int(ends[fits - 1])
        return fits


def read_page(
    source: Source, topic: str, cursor: Cursor, *, limit: int, max_bytes: int = READ_BYTES_MAX,
    wait_s: float = 0.0, filters: Filters = Filters(),  # noqa: B008  an immutable default
    until: int | None = None,
) -> Steps[Page]:  # fmt: skip
    """Read one page after `cursor`: up to `limit` records that pass the filters, or `max_bytes` of them.

    `until` replaces the topic's head if it is lower.
    """
    # A filter may omit every existing record, so the wait starts only after the first fetch.
    result = yield from source.fetch(
        cursor, limit=limit, bytes_max=max_bytes, wait_s=0.0 if filters else wait_s
    )
    result = _up_to(result, until)
    builder = _PageBuilder(result.after, limit, max_bytes, filters)
    first = result
    has_waited = not filters or wait_s <= 0
    while True:
        builder.add_fitting(result, topic)
        is_left_out = bool(filters) or len(result.hidden) > 0 or not result.runs
        if not is_left_out or builder.is_full or builder.seq - first.after >= SCAN_RECORDS_MAX:
            break
        seq = builder.seq
        is_at_end = seq >= result.head_seq
        if is_at_end and (has_waited or builder.batches or first.gap is not None):
            break
        result = yield from source.fetch(
            Cursor(result.epoch, seq), limit=limit, bytes_max=max_bytes,
            wait_s=wait_s if is_at_end else 0.0,
        )  # fmt: skip
        result = _up_to(result, until)
        has_waited = has_waited or is_at_end
        if result.gap is not None or (result.epoch, result.version) != (first.epoch, first.version):
            break  # The next page starts with it. Records of this page may have been removed meanwhile.
        if result.examined <= seq:
            break  # No further records at present.
        if is_at_end:
            first = replace(result, after=first.after, gap=first.gap)
    tombstone = None
    if first.gap is not None:
        gap = first.gap
        tombstone = Tombstone(topic, gap.gap_from, gap.gap_to, gap.reason, first.earliest_seq, first.head_seq)
    return Page(
        topic, builder.batches, Cursor(first.epoch, builder.seq), tombstone=tombstone,
        head_seq=first.head_seq, earliest_seq=first.earliest_seq, version=first.version,
    )  # fmt: skip


def _up_to(result: FetchResult, until: int | None) -> FetchResult:
    """Return the part of a result up to `until`."""
    if until is None or result.head_seq <= until:
        return result
    head = max(until, result.after)
    return replace(result, head_seq=head, examined=min(result.examined, head))


def read(
    connection: Connection, topic: str, after: Cursor | int = 0, *, limit: int = READ_LIMIT_DEFAULT,
    start: datetime | None = None, max_bytes: int = READ_BYTES_DEFAULT, wait_ms: int = 0,
    tags: TagFilter | None = None, node: str | list[str] | None = None,
) -> Steps[Page]:  # fmt: skip
    """Read one page. See Client.read.

    `limit` is 1 to 1,000, 0 = 256; `wait_ms` is 0 to 30,000. Larger values are reduced. `start`, a time with
    a time zone, replaces `after`: read from the first record committed at or after it.
    """
    topic, cursor = check_str(topic, "topic"), check_cursor(after, "after")
    limit, max_bytes = check_int_range(limit, "limit"), check_int_range(max_bytes, "max_bytes")
    wait_ms, tags, node = check_int_range(wait_ms, "wait_ms"), check_tag_filter(tags), check_nodes(node)
    if start is not None:
        check_start_time(start, "start")
    filters = yield from resolve_filters(connection, topic, tags, node)
    source = open_source(connection, topic, is_settling=True)
    try:
        if start is not None:
            cursor = yield from resolve_start(connection, source, topic, start)
        return (
            yield from read_page(
                source, topic, cursor,
                limit=min(limit or READ_LIMIT_DEFAULT, READ_LIMIT_MAX),
                max_bytes=min(max_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX),
                wait_s=min(wait_ms, WAIT_MS_MAX) / 1000, filters=filters,
            )
        )  # fmt: skip
    finally:
        source.close()


def resolve_filters(
    connection: Connection, topic: str, tags: TagFilter | None, node: str | list[str] | None
) -> Steps[Filters]:
    """Build the filters. A topic with dedupe_node=false ignores node ids."""
    nodes = node_filter(node)
    if nodes:
        info = yield connection.resolve(topic)
        if not info.config.get("dedupe_node", True):
            nodes = frozenset()
    return Filters(nodes, tag_filter(tags))


def resolve_start(connection: Connection, source: Source, topic: str, start: Start) -> Steps[Cursor]:
    """Convert a Start to a cursor. EARLIEST becomes the cursor before the first record."""
    if isinstance(start, Cursor):
        return start
    if start is EARLIEST:
        return Cursor(0, 0)
    if isinstance(start, datetime):
        wanted_us = (start - _EPOCH_TIME) // timedelta(microseconds=1)
        return (yield from source.seek_time(max(wanted_us, 0)))
    if start is LATEST:
        # No record is read: older records may be damaged, or in a cold store that is unavailable.
        latest: Cursor = yield connection.latest(topic)
        return latest
    if isinstance(start, Position):
        raise UsageError(
            f"start must be EARLIEST, LATEST, a seq, a Cursor or a datetime, got {start.name}",
            found=repr(start),
        )
    return cursor_before(start, "start")


def reader_options(
    topic: Any, start: Any, follow: Any, tags: Any, node: Any
) -> tuple[str, Start, bool, TagFilter | None, list[str]]:
    """Check the arguments of a reader before a request is sent."""
    return (
        check_str(topic, "topic"),
        check_start(start),
        check_bool(follow, "follow"),
        check_tag_filter(tags),
        check_nodes(node),
    )
