"""Requests about claimed jobs, for queues, consumer groups and work streams: settle, list and redrive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from ringlog.actors.http_gateway.api.request import Request, Response, Whole
from ringlog.actors.http_gateway.api.route_table import Access
from ringlog.actors.http_gateway.leases.claims import clamped_lease
from ringlog.client.leases.job_facts import short_reason
from ringlog.client.leases.lease_extender import new_call_number
from ringlog.client.leases.lease_operations import STATES, LeaseOperations
from ringlog.envelope import messages as m
from ringlog.errors import BatchTooLarge, InvalidRequest
from ringlog.leases.tokens import NUMBER_MAX
from ringlog.limits import (
    HTTP_REDRIVE_MAX,
    JOBS_PER_REQUEST_MAX,
    LIST_PAGE_MAX,
    NACK_DELAY_MS_MAX,
    PENDING_ROWS_MAX,
    SEQ_MAX,
)
from ringlog.link.futures import Steps

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

NODE = "http"
"""Node of the gateway itself, and of the requests by which rights are checked: those do not depend on it."""
Seq = Annotated[int, Meta(ge=0, le=SEQ_MAX)]
_PAGE_DEFAULT = 100
_LEASE_PREFIX = "lease_"
_TOKEN_DIGITS_MAX = 16
_HEX = frozenset("0123456789abcdef")
_UNISSUED = NUMBER_MAX
"""A token that no shard issues: of no incarnation, and with a number that none reaches."""


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
    token = int(digits, 16)
    # Of an incarnation, no lease has the number 0 or the last one. The engine would not compare a token of 0.
    return token if 0 < token & NUMBER_MAX < NUMBER_MAX else _UNISSUED


def seqs_in(skipped: bytes) -> list[int]:
    return np.frombuffer(skipped, "<i8").tolist() if skipped else []


def claim_access(topic: str, group: str = "") -> m.Message:
    """Return the request by which the rights of a claim are checked."""
    return m.Claim(topic, NODE, group=group)


def settle_access(kind: type[m.Message]) -> Access:
    """Return how the rights of a route are checked that settles jobs with messages of this kind."""
    make: Any = kind
    return lambda topic, group="": make(topic, NODE, b"", group=group)


def _head(topic: str, group: str) -> dict[str, Any]:
    return {"topic": topic, "group": group} if group else {"topic": topic}


async def ack(request: Request) -> Response:
    """Settle jobs: a queue deletes them."""
    topic, group = request.topic, request.group
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


async def nack(request: Request) -> Response:
    """Return jobs to the queue, at once or after a delay."""
    topic, group = request.topic, request.group
    body = await request.json(NackBody)
    seqs, tokens = entries(body, topic)
    reply: m.NackReply = await ask(
        request.gateway,
        m.Nack(
            topic, body.node, seqs, tokens, min(body.delay_ms or 0, NACK_DELAY_MS_MAX), new_call_number(),
            short_reason(body.reason or ""), body.delay_ms is None, group=group,
        ),
    )  # fmt: skip
    skipped = _settled(request, topic, group, body, reply.skipped, returned=True)
    return Response(
        200,
        {**_head(topic, group), "nacked": reply.nacked, "skipped": skipped, "ready": reply.ready,
        "in_flight": reply.in_flight},
    )  # fmt: skip


async def extend(request: Request) -> Response:
    """Hold jobs until `lease_ms` from now."""
    topic, group = request.topic, request.group
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


async def reject(request: Request) -> Response:
    """Move jobs to the dead-letter topic."""
    topic, group = request.topic, request.group
    body = await request.json(RejectBody)
    seqs, tokens = entries(body, topic)
    reply: m.RejectReply = await ask(
        request.gateway,
        m.Reject(topic, body.node, seqs, tokens, short_reason(body.reason or ""), new_call_number(), group),
    )
    skipped = _settled(request, topic, group, body, reply.skipped)
    return Response(200, {**_head(topic, group), "rejected": reply.rejected, "skipped": skipped})


def _settled(
    request: Request, topic: str, group: str, body: SettleBody, skipped: bytes, *, returned: bool = False
) -> list[int]:
    """Report settled jobs to the work streams of the node. Returns the skipped seqs."""
    found = seqs_in(skipped)
    if not group:
        lost = set(found)
        settled = [seq for seq in body.seqs if seq not in lost] if lost else body.seqs
        request.gateway.workers.notify(topic, body.node, settled, returned=returned)
    return found


# -- inspecting --------------------------------------------------------------------------------------------


async def pending(request: Request) -> Response:
    """List delivered jobs that are not settled, ascending by seq, one page at a time."""
    topic, group = request.topic, request.group
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
