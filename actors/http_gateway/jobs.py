"""Requests about jobs, which queues, consumer groups and work streams share.

A worker over HTTP is a node name. Its requests come over many connections, and the gateway keeps no lease of
it: the engine compares node, seq and the lease id, if there is one. Therefore a gateway may end and start
again between a claim and its ack.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ringlog.actors.http_gateway.error_replies import HttpError
from ringlog.actors.http_gateway.record_json import data_json, data_texts, text_json
from ringlog.actors.http_gateway.request import Request, Response
from ringlog.client.leases.claim_result import ClaimResult
from ringlog.client.leases.group_lease_operations import GroupLeaseOperations
from ringlog.client.leases.job_facts import short_reason
from ringlog.client.leases.lease_extender import new_call_number
from ringlog.client.leases.lease_operations import STATES, ClaimHandle, LeaseOperations
from ringlog.client.read.pages import Record
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.errors import BatchTooLarge, InvalidRequest, ShuttingDown
from ringlog.frame.layout import Column
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    HTTP_REDRIVE_MAX,
    HTTP_WAIT_MS_MAX,
    HTTP_WORKERS_MAX,
    JOBS_PER_REQUEST_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    LIST_PAGE_MAX,
    NACK_DELAY_MS_MAX,
    PENDING_ROWS_MAX,
    SEQ_MAX,
)
from ringlog.link.futures import Steps
from ringlog.tags import request_form

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

T = TypeVar("T")
Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seq = Annotated[int, Meta(ge=0, le=SEQ_MAX)]
_US_PER_MS = 1_000
_PAGE_DEFAULT = 100
_LEASE_PREFIX = "lease_"
_TOKEN_DIGITS_MAX = 16
_HEX = frozenset("0123456789abcdef")


class ClaimBody(msgspec.Struct):
    """Body of a claim."""

    node: str
    """Name of the worker, 1 to 128 bytes."""
    max: Whole | None = 1
    """Most jobs, 1 to 1,000."""
    lease_ms: Whole | None = None
    wait_ms: Whole | None = 0
    """Longest wait for a job. 0 = answer at once."""
    order: Literal["priority", "seq"] | None = "priority"


class SettleBody(msgspec.Struct):
    """Body of an ack."""

    node: str
    seqs: list[Seq]
    lease_ids: list[str] | None = None
    """One for each seq; "" = only the node is compared. None or [] = none."""


class NackBody(SettleBody):
    """Body of a nack."""

    delay_ms: Whole | None = None
    """None = the backoff of the queue or group, by default 0."""
    reason: str | None = None


class ExtendBody(SettleBody):
    """Body of an extension."""

    lease_ms: Whole | None = None


class RejectBody(SettleBody):
    """Body of a reject."""

    reason: str | None = None


class RedriveBody(msgspec.Struct):
    """Body of a redrive."""

    seqs: list[Seq] | None = None
    """Seqs in the dead-letter topic. None = all letters."""
    limit: Whole | None = None
    """Most letters, oldest first."""


# -- workers -----------------------------------------------------------------------------------------------


class Workers:
    """Views of nodes on queues and groups: open files between claims, and no leases.

    At most HTTP_WORKERS_MAX; the least recently used one is dropped.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], LeaseOperations] = OrderedDict()
        self._listeners: dict[tuple[str, str], list[Callable[[Sequence[int]], None]]] = {}

    def find(self, topic: str, node: str, group: str = "") -> LeaseOperations:
        """Return the view of a node. Raises UsageError if the node is invalid."""
        key = (topic, group, node)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = new_operations(topic, node, group)
            if len(self._kept) > HTTP_WORKERS_MAX:
                self._kept.popitem(last=False)[1].close()
        else:
            self._kept.move_to_end(key)
        return found

    def listen(self, topic: str, node: str, call: Callable[[Sequence[int]], None]) -> None:
        """Call `call(seqs)` when jobs of a queue are settled over HTTP by this node, until `unlisten`."""
        self._listeners.setdefault((topic, node), []).append(call)

    def unlisten(self, topic: str, node: str, call: Callable[[Sequence[int]], None]) -> None:
        """End what `listen` began."""
        calls = self._listeners[topic, node]
        calls.remove(call)
        if not calls:
            del self._listeners[topic, node]

    def notify(self, topic: str, node: str, seqs: Sequence[int]) -> None:
        """Report that a node settled jobs of a queue."""
        for call in self._listeners.get((topic, node), ()):
            call(seqs)


def new_operations(
    topic: str, node: str, group: str = "", *, release_on_exit: bool = False
) -> LeaseOperations:
    """Return a view of a node on a queue or an existing group. Its leases outlive the gateway by default."""
    if not node:
        raise InvalidRequest("node must not be empty", field="node")
    if not group:
        return LeaseOperations(topic, node, SystemClock(), release_on_exit=release_on_exit)
    name, tags = split_group(group)
    return GroupLeaseOperations(
        topic, name, "queue", node, SystemClock(), tags=tags, create=False, release_on_exit=release_on_exit
    )


def split_group(group: str) -> tuple[str, list[str] | None]:
    """Return name and tag filter of the key of a group: `name`, or `name@` and the filter."""
    name, _, text = group.partition("@")
    if text and text[0] not in "=^~":
        raise InvalidRequest(
            f"group must be a name, or name@ and a tag filter, got {group[:64]!r}", field="group"
        )
    return name, request_form(text)


# -- claims ------------------------------------------------------------------------------------------------


async def claim(request: Request, topic: str, group: str = "") -> Response:
    """Lease jobs to the node of the body. The rights were checked with the path."""
    begin_ns = request.gateway.clock.monotonic_ns()
    body = await request.json(ClaimBody)
    operations = request.gateway.workers.find(topic, body.node, group)
    handle = ClaimHandle(by_number=body.order == "seq")
    most = min(max(1 if body.max is None else body.max, 1), CLAIM_JOBS_MAX)
    wait_s = min(body.wait_ms or 0, HTTP_WAIT_MS_MAX) / 1_000
    steps = operations.claim(
        request.gateway.client.connection, most, wait_s, clamped_lease(body.lease_ms), handle
    )
    claimed = await _claimed(request, operations, steps, handle, wait_s)
    rows = job_rows(claimed)
    group_json = b',"group":%b' % msgspec.json.encode(group) if group else b""
    return Response(
        200,
        b'{"topic":%b%b,"claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%.3f}}'
        % (
            msgspec.json.encode(topic), group_json, b",".join(rows), len(rows), claimed.ready,
            (request.gateway.clock.monotonic_ns() - begin_ns) / 1e6,
        ),
    )  # fmt: skip


async def _claimed(
    request: Request,
    operations: LeaseOperations,
    steps: Steps[ClaimResult],
    handle: ClaimHandle,
    wait_s: float,
) -> ClaimResult:
    """Wait for a claim. If its client leaves before the reply, the jobs return and no delivery is counted."""
    gateway, client_left = request.gateway, request.protocol.client_disconnect()
    claimed: ClaimResult | None
    try:
        if wait_s <= 0:
            claimed = await gateway.client.run(steps)
        else:
            claimed = await _waited(gateway, steps, client_left)
    except asyncio.CancelledError:
        undo_claim(gateway, operations, handle)
        if gateway.is_draining:
            raise ShuttingDown("the engine is stopping", retry_after_ms=1_000) from None
        raise
    if claimed is None or client_left.done():
        undo_claim(gateway, operations, handle)
        raise HttpError(499, "client_closed_request", "the client left before the reply")
    return claimed


async def _waited(gateway: Gateway, steps: Steps[T], client_left: asyncio.Future[None]) -> T | None:
    """Wait for a claim that waits itself. None: the client left.

    Raises CancelledError when the gateway stops.
    """
    own = asyncio.current_task()
    assert own is not None
    claiming = asyncio.ensure_future(gateway.client.run(steps))
    gateway.streams.add(own)
    try:
        await asyncio.wait(
            (claiming, asyncio.ensure_future(client_left)), return_when=asyncio.FIRST_COMPLETED
        )
        return claiming.result() if claiming.done() else None
    finally:
        gateway.streams.discard(own)
        claiming.cancel()


def undo_claim(gateway: Gateway, operations: LeaseOperations, handle: ClaimHandle) -> None:
    """Undo a claim, answered or not: its jobs return to the queue, and no delivery is counted."""
    session = gateway.client.connection
    session.track_claim_cancel(operations.cancel_claim(session, handle))


def clamped_lease(lease_ms: int | None) -> int | None:
    """Return the length of a lease within its limits; None = the setting of the topic."""
    return None if lease_ms is None else min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def job_rows(claimed: ClaimResult, begin: bytes = b"") -> list[bytes]:
    """Return the JSON object of each job of a claim. `begin` is put before the first field."""
    if claimed.leases is not None:
        return [
            b'{%b"$seq":%d,"lease_id":"lease_%016x","deadline":%d,"deliveries":%d,%b}'
            % (begin, record.seq, lease.token, lease.deadline_ms, deliveries, record_fields(record))
            for record, lease, deliveries in claimed.materialized()
        ]
    if not len(claimed):
        return []
    seqs, tokens, deliveries = claimed.columns()
    if len(claimed.batches) == 1:
        times, texts, before, after = _columns(claimed.batches[0])
    else:
        parts = [_columns(batch) for batch in claimed.batches]
        times, texts, before, after = ([each for part in parts for each in part[n]] for n in range(4))  # type: ignore[assignment]
    template = (
        b'{%b"$seq":%%d,"lease_id":"lease_%%016x","deadline":%d,"$ts":%%d,"deliveries":%%d%%b,"data":%%b%%b}'
        % (begin.replace(b"%", b"%%"), claimed.deadline_ms)
    )
    return list(
        map(template.__mod__, zip(seqs, tokens, times, deliveries, before, texts, after, strict=True))
    )


def _columns(batch: Any) -> tuple[Sequence[int], Sequence[bytes], Sequence[bytes], Sequence[bytes]]:
    """Return write times in ms, data, and the text before and after the data, one of each for each job."""
    times = (batch.commit_stamps // _US_PER_MS).tolist()
    before = after = [b""] * len(times)
    nodes, tags, metas = batch.column(Column.NODE), batch.column(Column.TAG), batch.column(Column.META)
    for name, values in ((b',"$node":', nodes), (b',"$tag":', tags)):
        if values is not None:
            before = [
                text + name + text_json(value) if value else text
                for text, value in zip(before, values, strict=True)
            ]
    if metas is not None:
        after = [b',"meta":' + data_json(meta) if meta else b"" for meta in metas]
    return times, data_texts(batch.payloads()), before, after


def record_fields(record: Record) -> bytes:
    """Return the fields of a record after its seq, as the inside of a JSON object."""
    fields = [b'"$ts":%d' % (record.ts // _US_PER_MS)]
    fields += [
        b'"%b":%b' % (name, msgspec.json.encode(text))
        for name, text in ((b"$node", record.node), (b"$tag", record.tag))
        if text
    ]
    fields.append(b'"data":%b' % data_json(record.data))
    if record.meta_json:
        fields.append(b'"meta":%b' % data_json(record.meta_json))
    return b",".join(fields)


# -- settling ----------------------------------------------------------------------------------------------


async def ask(gateway: Gateway, message: m.Message) -> Any:
    """Send a request about jobs to the shard of its topic, and return the reply."""
    return await gateway.client.run(_asking(gateway.client.connection, message))


def _asking(session: Any, message: m.Message) -> Steps[Any]:
    reply = yield session.request_jobs(message)
    return reply.message


def entries(body: SettleBody, topic: str) -> tuple[bytes, bytes]:
    """Return seqs and lease tokens of a body, encoded. Raises BatchTooLarge, InvalidRequest."""
    seqs, lease_ids = body.seqs, body.lease_ids
    if not body.node:
        raise InvalidRequest("node must not be empty", field="node")
    if len(seqs) > JOBS_PER_REQUEST_MAX:
        raise BatchTooLarge(
            f"seqs must have at most {JOBS_PER_REQUEST_MAX} entries, got {len(seqs)}", topic=topic,
            seqs=len(seqs), max=JOBS_PER_REQUEST_MAX,
        )  # fmt: skip
    if not lease_ids:
        return array("Q", seqs).tobytes(), b""
    if len(lease_ids) != len(seqs):
        raise InvalidRequest(
            f"lease_ids must have {len(seqs)} entries like seqs, got {len(lease_ids)}", field="lease_ids"
        )
    return array("Q", seqs).tobytes(), array("Q", map(_token, lease_ids)).tobytes()


def _token(lease_id: str) -> int:
    """Return the number of a lease id; 0 = none. Raises InvalidRequest."""
    if not lease_id:
        return 0
    digits = lease_id.removeprefix(_LEASE_PREFIX)
    if (
        len(digits) == len(lease_id)
        or not 1 <= len(digits) <= _TOKEN_DIGITS_MAX
        or not _HEX.issuperset(digits)
    ):
        raise InvalidRequest(
            f"lease_ids must be lease_ and up to 16 hex digits, got {lease_id[:40]!r}", field="lease_ids"
        )
    # No lease has number 0, and the engine would not compare it.
    return int(digits, 16) or (1 << 64) - 1


def seqs_in(skipped: bytes) -> list[int]:
    return np.frombuffer(skipped, "<i8").tolist() if skipped else []


def _head(topic: str, group: str) -> dict[str, Any]:
    return {"topic": topic, "group": group} if group else {"topic": topic}


async def ack(request: Request, topic: str, group: str = "") -> Response:
    """Settle jobs: a queue deletes them."""
    body = await request.json(SettleBody)
    seqs, tokens = entries(body, topic)
    reply: m.AckReply = await ask(
        request.gateway, m.Ack(topic, body.node, seqs, tokens, call=new_call_number(), group=group)
    )
    skipped = _settled(request, topic, group, body, reply.skipped)
    return Response(
        200,
        {**_head(topic, group), "acked": reply.acked, "skipped": skipped, "ready": reply.ready,
        "in_flight": reply.in_flight},
    )  # fmt: skip


async def nack(request: Request, topic: str, group: str = "") -> Response:
    """Return jobs to the queue, at once or after a delay."""
    body = await request.json(NackBody)
    seqs, tokens = entries(body, topic)
    reply: m.NackReply = await ask(
        request.gateway,
        m.Nack(
            topic, body.node, seqs, tokens, min(body.delay_ms or 0, NACK_DELAY_MS_MAX), new_call_number(),
            short_reason(body.reason or ""), body.delay_ms is None, group=group,
        ),
    )  # fmt: skip
    skipped = _settled(request, topic, group, body, reply.skipped)
    return Response(
        200,
        {**_head(topic, group), "nacked": reply.nacked, "skipped": skipped, "ready": reply.ready,
        "in_flight": reply.in_flight},
    )  # fmt: skip


async def extend(request: Request, topic: str, group: str = "") -> Response:
    """Hold jobs until `lease_ms` from now."""
    body = await request.json(ExtendBody)
    seqs, tokens = entries(body, topic)
    reply: m.ExtendReply = await ask(
        request.gateway,
        m.Extend(topic, body.node, seqs, tokens, clamped_lease(body.lease_ms) or 0, new_call_number(), group),
    )
    skipped = seqs_in(reply.skipped)
    lost = set(skipped)
    deadlines = {str(seq): reply.deadline for seq in body.seqs if seq not in lost}
    return Response(
        200,
        {**_head(topic, group), "extended": reply.extended, "skipped": skipped, "deadlines": deadlines},
    )  # fmt: skip


async def reject(request: Request, topic: str, group: str = "") -> Response:
    """Move jobs to the dead-letter topic."""
    body = await request.json(RejectBody)
    seqs, tokens = entries(body, topic)
    reply: m.RejectReply = await ask(
        request.gateway,
        m.Reject(topic, body.node, seqs, tokens, short_reason(body.reason or ""), new_call_number(), group),
    )
    skipped = _settled(request, topic, group, body, reply.skipped)
    return Response(200, {**_head(topic, group), "rejected": reply.rejected, "skipped": skipped})


def _settled(request: Request, topic: str, group: str, body: SettleBody, skipped: bytes) -> list[int]:
    """Report settled jobs to the work streams of the node. Returns the skipped seqs."""
    lost = seqs_in(skipped)
    if not group:
        request.gateway.workers.notify(
            topic, body.node, [seq for seq in body.seqs if seq not in lost] if lost else body.seqs
        )
    return lost


# -- inspecting --------------------------------------------------------------------------------------------


async def pending(request: Request, topic: str, group: str = "") -> Response:
    """List delivered jobs that are not settled, ascending by seq, one page at a time."""
    size = min(max(request.query_int("page_size", _PAGE_DEFAULT), 1), LIST_PAGE_MAX)
    after = cursor_of(request)
    message = m.ListPending(
        topic, after, min(size + 1, PENDING_ROWS_MAX), request.query.get("node", ""),
        request.query_int("idle_ms", 0), request.query_int("min_deliveries", 0), group,
    )  # fmt: skip
    reply: m.PendingReply = await ask(request.gateway, message)
    rows: list[dict[str, Any]] = []
    for row in reply.rows:
        rows += (
            _pending_row(reply, row, seq) for seq in range(row[0], min(row[0] + row[1], row[0] + size + 1))
        )
        if len(rows) > size:
            break
    has_more = reply.more or len(rows) > size
    found: dict[str, Any] = {**_head(topic, group), "pending": rows[:size]}
    if has_more and rows:
        found["next_cursor"] = str(rows[:size][-1]["$seq"])
    return Response(200, found)


def _pending_row(reply: m.PendingReply, row: tuple[int, ...], seq: int) -> dict[str, Any]:
    first, _, state, deliveries, first_given, last_given, until, node, token = row
    found: dict[str, Any] = {"$seq": seq, "state": STATES.get(state, "").replace(" ", "_")}
    if reply.nodes[node]:
        found["node"] = reply.nodes[node]
        found["lease_id"] = f"lease_{token + seq - first:016x}"
    found |= {"deliveries": deliveries, "first_delivered_ts": first_given, "last_delivered_ts": last_given}
    if until:
        found["until"] = until
    if seq in reply.failures:
        reason, failed_ms, nacks = reply.failures[seq]
        found |= {"reason": reason, "failures": nacks}
        if failed_ms:
            found["failed_ts"] = failed_ms
    return found


def cursor_of(request: Request) -> int:
    """Return the query parameter `cursor` of a list. Raises InvalidRequest."""
    cursor = request.query.get("cursor", "")
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20 and int(cursor) <= SEQ_MAX):
        raise InvalidRequest(
            f"cursor must be the next_cursor of a reply, got {cursor[:40]!r}", field="cursor"
        )
    return int(cursor or 0)


# -- dead letters ------------------------------------------------------------------------------------------


async def redrive(
    request: Request, worker: Any, operations: LeaseOperations, seqs: Sequence[int] | None, limit: int | None
) -> Response:
    """Move dead letters back, at most HTTP_REDRIVE_MAX in one request. `worker` is a Queue or a Group."""
    client = request.gateway.client
    if request.principal.prefixes:
        # The letters are deleted there, and the topic is not in the request.
        request.principal.require_covered(await client.run(operations.dead_letter(client.connection)))
    most = min(HTTP_REDRIVE_MAX if limit is None else limit, HTTP_REDRIVE_MAX)
    found = await worker.redrive(None if seqs is None else frozenset(seqs), limit=most)
    return Response(
        200,
        {**_head(operations.topic, operations.group), "dead_letter": found.dead_letter, "moved": found.moved,
        "repeated": found.repeated, "gone": found.gone},
    )  # fmt: skip
