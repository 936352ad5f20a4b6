"""Difference reads: POST /v0/topics/{}/diff. The reply is joined from the bytes of the records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ringlog.actors.http_gateway.api.request import Request, Response, departure
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.records.cloud_events import BATCH, CloudEvent, events_json, wants_events
from ringlog.actors.http_gateway.records.record_json import records_json
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor, Filters, Page, Tombstone
from ringlog.client.read.paging import read_page, resolve_filters
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.limits import (
    HTTP_WAIT_MS_MAX,
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    READ_LIMIT_DEFAULT,
    READ_LIMIT_MAX,
    SEQ_MAX,
)

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session
    from ringlog.link.futures import Steps

_EPOCH_MAX = (1 << 32) - 1
_encode = msgspec.json.Encoder().encode
Count = Annotated[int, Meta(ge=0)]


class DiffBody(msgspec.Struct):
    """Body of a difference read. All fields may be left out."""

    from_seq: Count = 0
    from_epoch: Count = 0
    limit: Count = 0
    max_batch_bytes: Count = 0
    wait_ms: Count = 0
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    filter: str | list[Any] | None = None


async def diff(request: Request) -> Response:
    """Read the records after a position. Waits up to `wait_ms` of the body if there are none."""
    begin_ns = request.gateway.clock.monotonic_ns()
    body = await request.json(DiffBody, may_be_empty=True)
    cursor = cursor_of(body.from_epoch, body.from_seq)
    wait_s = min(body.wait_ms, HTTP_WAIT_MS_MAX) / 1_000
    read = _Read(request.gateway.client.connection, request.topic, cursor, body)
    try:
        page = await _run(request, read, wait_s)
    finally:
        read.source.close()
    if wants_events(request):
        return _events(page)
    records = records_json(page.batches, include_tags=body.include_tags, include_meta=body.include_meta)
    begin = 0 if page.tombstone is not None and page.tombstone.reason == "recreated" else cursor.seq
    return Response(
        200,
        b'{"topic":%b,"records":%b,"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"epoch":%d,"caught_up":%b,'
        b'"lag":%d,"tombstone":%b,"performance":{"server_total_ms":%.3f,"records_scanned":%d,'
        b'"cold_segments_read":%d}}'
        % (
            _encode(page.topic), records, page.cursor.seq, page.head_seq, page.earliest_seq, page.epoch,
            b"true" if page.caught_up else b"false", page.lag, tombstone_json(page.tombstone),
            (request.gateway.clock.monotonic_ns() - begin_ns) / 1e6,
            max(page.cursor.seq - max(begin, page.earliest_seq - 1), 0), read.source.files.cold_reads,
        ),
    )  # fmt: skip


def _events(page: Page) -> Response:
    """Return the records of a page as CloudEvents. Headers have the next position and a tombstone."""
    headers = [
        ("content-type", BATCH), ("ringlog-next-from-seq", str(page.cursor.seq)),
        ("ringlog-epoch", str(page.epoch)), ("ringlog-head-seq", str(page.head_seq)),
    ]  # fmt: skip
    if page.tombstone is not None:
        headers.append(("ringlog-tombstone", tombstone_json(page.tombstone).decode()))
    return Response(200, events_json(page.topic, page.epoch, page.records), tuple(headers))


class _Read:
    """One difference read with its source."""

    def __init__(self, connection: Session, topic: str, cursor: Cursor, body: DiffBody) -> None:
        self._connection, self._topic, self._cursor, self._body = connection, topic, cursor, body
        self.source = LocalSource(connection, topic, is_settling=True)

    def steps(self, wait_s: float) -> Steps[Page]:
        """Read one page."""
        body = self._body
        filters = yield from filters_of(self._connection, self._topic, body.filter, body.node)
        return (
            yield from read_page(
                self.source, self._topic, self._cursor,
                limit=min(body.limit or READ_LIMIT_DEFAULT, READ_LIMIT_MAX),
                max_bytes=min(body.max_batch_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX),
                wait_s=wait_s, filters=filters,
            )
        )  # fmt: skip


async def _run(request: Request, read: _Read, wait_s: float) -> Page:
    """Read a page. A wait ends when the engine stops, and when the client has gone."""
    gateway = request.gateway
    page = await gateway.client._shell.run_reading(read.steps(0))
    has_any = bool(page.batches) or page.tombstone is not None or not page.caught_up
    if has_any or not wait_s or gateway.is_draining:
        return page
    waiting: asyncio.Task[Page] = gateway.loop.create_task(
        gateway.client._shell.run_reading(read.steps(wait_s))
    )
    try:
        with gateway.ended_at_stop(waiting), departure(request.protocol) as gone:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done() and not waiting.cancelled():
            return waiting.result()
        return page
    finally:
        waiting.cancel()


def filters_of(
    connection: Session, topic: str, tags: str | list[Any] | None, node: str | list[str] | None
) -> Steps[Filters]:
    """Return the filters of a read. Raises InvalidRequest."""
    if isinstance(tags, list) and not (len(tags) == 3 and all(isinstance(part, str) for part in tags)):
        raise InvalidRequest('filter must be a tag, a prefix that ends in *, or ["tag", operator, value]')
    return resolve_filters(connection, topic, tags, node)


def cursor_of(epoch: int, seq: int) -> Cursor:
    """Return a cursor. Numbers that no topic reaches are reduced: the topic was created again."""
    return Cursor(min(epoch, _EPOCH_MAX), min(seq, SEQ_MAX))


def tombstone_json(tombstone: Tombstone | None) -> bytes:
    """Return the JSON text of a tombstone, null for None."""
    return b"null" if tombstone is None else _encode(tombstone_fields(tombstone))


def tombstone_fields(tombstone: Tombstone) -> dict[str, Any]:
    """Return the fields of a tombstone."""
    return {
        "gap_from": tombstone.gap_from, "gap_to": tombstone.gap_to, "reason": tombstone.reason,
        "missed_estimate": tombstone.missed_estimate, "earliest_seq": tombstone.earliest_seq,
        "head_seq": tombstone.head_seq,
    }  # fmt: skip


ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/v0/topics/{}/diff", diff, lambda topic: m.Read(topic, 0),
        "Read the records of a topic after a position", body=DiffBody, params=("topic",),
        gives={BATCH: list[CloudEvent]},
    ),
)  # fmt: skip
