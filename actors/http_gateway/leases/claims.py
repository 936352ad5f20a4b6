"""Claims of jobs over HTTP. A claim whose client leaves before the reply is undone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request import Request, Response, Whole, departure
from ringlog.actors.http_gateway.leases.job_json import job_rows
from ringlog.client.leases.claim_result import ClaimResult
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.errors import ShuttingDown
from ringlog.limits import CLAIM_JOBS_MAX, HTTP_WAIT_MS_MAX, LEASE_MS_MAX, LEASE_MS_MIN
from ringlog.link.futures import Steps

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway

T = TypeVar("T")


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


async def claim(request: Request) -> Response:
    """Lease jobs to the node of the body. The rights were checked with the path."""
    topic, group = request.topic, request.group
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
    gateway = request.gateway
    claimed: ClaimResult | None
    with departure(request.protocol) as gone:
        try:
            if wait_s <= 0:
                claimed = await gateway.client.run(steps)
            else:
                claimed = await _waited(gateway, steps, gone)
        except asyncio.CancelledError:
            undo_claim(gateway, operations, handle)
            if gateway.is_draining:
                raise ShuttingDown("the engine is stopping", retry_after_ms=1_000) from None
            raise
        if claimed is None or gone.done():
            undo_claim(gateway, operations, handle)
            raise HttpError(499, "client_closed_request", "the client left before the reply")
        return claimed


async def _waited(gateway: Gateway, steps: Steps[T], gone: asyncio.Future[None]) -> T | None:
    """Wait for a claim that waits itself. None: the client left.

    Raises CancelledError when the gateway stops, ShuttingDown if it stops already.
    """
    own = asyncio.current_task()
    assert own is not None
    with gateway.ended_at_stop(own):
        claiming = asyncio.ensure_future(gateway.client.run(steps))
        try:
            await asyncio.wait((claiming, gone), return_when=asyncio.FIRST_COMPLETED)
            return claiming.result() if claiming.done() else None
        finally:
            claiming.cancel()


def undo_claim(gateway: Gateway, operations: LeaseOperations, handle: ClaimHandle) -> None:
    """Undo a claim, answered or not: its jobs return to the queue, and no delivery is counted."""
    session = gateway.client.connection
    session.track_claim_cancel(operations.cancel_claim(session, handle))


def clamped_lease(lease_ms: int | None) -> int | None:
    """Return the length of a lease within its limits; None = the setting of the topic."""
    return None if lease_ms is None else min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)
