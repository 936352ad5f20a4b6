"""Routes of queues: claim, settle and inspect jobs, and dead letters."""

from __future__ import annotations

from typing import Any

import msgspec

from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.leases import claims, jobs
from ringlog.actors.http_gateway.leases.claims import ClaimBody
from ringlog.actors.http_gateway.leases.job_json import record_fields
from ringlog.actors.http_gateway.leases.jobs import (
    NODE,
    ExtendBody,
    NackBody,
    RedriveBody,
    RejectBody,
    SettleBody,
    ask,
)
from ringlog.actors.http_gateway.leases.workers import new_operations
from ringlog.envelope import messages as m
from ringlog.limits import LIST_PAGE_MAX

_PATH = "/v0/topics/{}"


async def stats(request: Request) -> Response:
    """Count the jobs of a queue by their state."""
    found: m.LeaseStatsReply = await ask(request.gateway, m.LeaseStats(request.topic))
    body: dict[str, Any] = {
        "topic": request.topic, "ready": found.ready, "in_flight": found.in_flight, "delayed": found.delayed,
        "dead_lettered": found.dead_lettered, "waiting": found.waiting, "wait_p99_ms": found.wait_p99_ms,
        "promoted": found.promoted,
    }  # fmt: skip
    if found.oldest_ready_ms >= 0:
        body["oldest_ready_ms"] = found.oldest_ready_ms
    return Response(200, body)


async def peek(request: Request) -> Response:
    """Return the first jobs of a queue, leased or not, without a lease."""
    client = request.gateway.client
    queue = client.queue(request.topic, node=NODE)
    limit = min(max(request.query_int("limit", 1), 1), LIST_PAGE_MAX)
    found = await queue.peek(limit)
    rows = [msgspec.Raw(b'{"$seq":%d,%b}' % (record.seq, record_fields(record))) for record in found]
    return Response(200, {"topic": request.topic, "jobs": rows, "count": len(rows)})


async def purge(request: Request) -> Response:
    """Delete all jobs of a queue."""
    await request.body(may_be_empty=True)
    found = await request.gateway.client.queue(request.topic, node=NODE).purge()
    return Response(
        200, {"topic": request.topic, "deleted": found.deleted, "earliest_seq": found.earliest_seq}
    )


async def redrive(request: Request) -> Response:
    """Move dead letters of a queue back to it."""
    body = await request.json(RedriveBody, may_be_empty=True)
    worker = request.gateway.client.queue(request.topic, node=NODE)
    operations = new_operations(request.topic, NODE)
    return await jobs.redrive(request, worker, operations, body.seqs, body.limit)


def _route(
    method: str, name: str, handler: Any, access: Any, summary: str, body: type[Any] | None = None
) -> Route:
    return Route(method, f"{_PATH}/{name}", handler, access, summary, body=body, params=("topic",))


ROUTES: tuple[Route, ...] = (
    _route("POST", "claim", claims.claim, jobs.claim_access, "Lease jobs of a queue to a node", ClaimBody),
    _route("POST", "ack", jobs.ack, jobs.settle_access(m.Ack), "Delete jobs that are done", SettleBody),
    _route("POST", "nack", jobs.nack, jobs.settle_access(m.Nack), "Return jobs to their queue", NackBody),
    _route("POST", "extend", jobs.extend, jobs.settle_access(m.Extend), "Hold jobs longer", ExtendBody),
    _route(
        "POST", "reject", jobs.reject, jobs.settle_access(m.Reject),
        "Move jobs to the dead-letter topic", RejectBody,
    ),
    _route("GET", "pending", jobs.pending, m.ListPending, "List delivered jobs that are not acked"),
    _route("GET", "stats", stats, m.LeaseStats, "Count the jobs of a queue by state"),
    _route("GET", "peek", peek, lambda topic: m.Read(topic, 0), "Show the first jobs of a queue"),
    _route("POST", "purge", purge, m.RecordsDelete, "Delete all jobs of a queue"),
    _route(
        "POST", "redrive", redrive, lambda topic: m.RedriveDeadLetters(topic, b""),
        "Move dead letters back to their queue", RedriveBody,
    ),
)  # fmt: skip
