"""The work stream of a queue: GET /v0/topics/Q/work pushes jobs to a node as server-sent events.

At most `max` jobs of a stream are unsettled. The node settles them through the ordinary routes, over any
connection. The leases of a stream end with it: the stream gives them back, and if the gateway is killed, the
engine does, because these leases name the process of the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from ringlog.actors.http_gateway.api.error_replies import error_body, status_and_code
from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.leases.claims import clamped_lease, undo_claim
from ringlog.actors.http_gateway.leases.job_json import job_rows
from ringlog.actors.http_gateway.leases.jobs import ask, claim_access
from ringlog.actors.http_gateway.leases.workers import new_operations
from ringlog.actors.http_gateway.streams.connection_ledger import StreamEnded
from ringlog.actors.http_gateway.streams.sse import EventStream, require_event_stream
from ringlog.client.leases.claim_result import ClaimResult
from ringlog.client.leases.lease_extender import encode_u64s, new_call_number
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.leases.queue_options import GIVE_BACK_S, RETRY_S
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    CLAIM_SLICE_MS_MAX,
    JOBS_PER_REQUEST_MAX,
    PENDING_ROWS_MAX,
    WORK_STREAM_CHECK_MS,
    WORK_STREAM_HEARTBEAT_MS,
)

_LEASED = 1
"""State of a leased job in PendingReply."""
_NEVER = float("-inf")
_CHECK_S = WORK_STREAM_CHECK_MS / 1_000


async def work(request: Request) -> Response | None:
    """Push jobs to a node until its client leaves, the queue is deleted, or the engine stops."""
    gateway = request.gateway
    require_event_stream(request.header("accept"))
    operations = new_operations(request.topic, request.query.get("node", ""), release_on_exit=True)
    await ask(gateway, m.LeaseStats(request.topic))  # Raises NotAQueue, TopicNotFound.
    if request.scope.method == "HEAD":
        return Response(200, b"", (("content-type", "text/event-stream"),))
    with gateway.stream(request.principal):
        request.release_slot()
        most = min(max(request.query_int("max", 1), 1), CLAIM_JOBS_MAX)
        lease_ms = clamped_lease(request.query_int("lease_ms", 0) or None)
        with suppress(StreamEnded):
            await _WorkStream(request, operations, most, lease_ms).run()
    return None


class _WorkStream:
    """One open work stream."""

    def __init__(
        self, request: Request, operations: LeaseOperations, most: int, lease_ms: int | None
    ) -> None:
        self._gateway, self._operations = request.gateway, operations
        self._topic, self._node = request.topic, operations.node
        self._most, self._lease_ms = most, lease_ms
        self._begin = b'"topic":%b,' % msgspec.json.encode(self._topic)
        self._held: dict[int, int] = {}
        """Seq and token of each job that was sent and, as far as known, is not settled."""
        self._freed = asyncio.Event()
        self._checked = _NEVER
        self._stream = EventStream(request.scope, request.protocol, WORK_STREAM_HEARTBEAT_MS / 1_000)

    async def run(self) -> None:
        """Serve until the stream ends. All its unsettled jobs are then ready for others."""
        workers = self._gateway.workers
        workers.listen(self._topic, self._node, self._on_settled)
        try:
            with suppress(StreamEnded):
                await self._serve()
        except RinglogError as e:
            self._end_with(e)
        except asyncio.CancelledError:
            error = self._gateway.ending_error()
            if error is None:
                raise
            self._end_with(error)
        finally:
            workers.unlisten(self._topic, self._node, self._on_settled)
            with suppress(RinglogError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._give_back(self._held)
            self._stream.close()

    async def _serve(self) -> None:
        loop, stream = self._gateway.loop, self._stream
        while True:
            self._freed.clear()  # Here: what is settled during the check or the claim ends the wait at once.
            try:
                if self._held and loop.time() - self._checked >= _CHECK_S:
                    await self._check()
                free = self._most - len(self._held)
                if free > 0:
                    await self._push(await self._claim(free))
                else:
                    await self._wait_free()
            except RinglogError as e:
                if not e.retriable:
                    raise
                if await stream.wait_gone(RETRY_S):
                    raise StreamEnded from None

    async def _claim(self, free: int) -> ClaimResult:
        """Claim jobs for the free slots. Waits a while for the first one."""
        gateway, handle = self._gateway, ClaimHandle()
        steps = self._operations.claim(
            gateway.client.connection, free, CLAIM_SLICE_MS_MAX / 1_000, self._lease_ms, handle
        )
        claiming = asyncio.ensure_future(gateway.client.run(steps))
        try:
            await asyncio.wait((claiming, self._stream.gone), return_when=asyncio.FIRST_COMPLETED)
            if self._stream.gone.done():
                raise StreamEnded
            return claiming.result()
        except (StreamEnded, asyncio.CancelledError):
            undo_claim(gateway, self._operations, handle)
            raise
        finally:
            claiming.cancel()

    async def _push(self, claimed: ClaimResult) -> None:
        """Send jobs. If they cannot be sent, they return to the queue and no delivery is counted."""
        if not len(claimed):
            return
        rows = job_rows(claimed, self._begin)
        seqs, tokens, _ = claimed.columns()
        jobs = dict(zip(seqs, tokens, strict=True))
        self._held |= jobs
        frames = [b"id: %d\nevent: job\ndata: %b\n\n" % row for row in zip(seqs, rows, strict=True)]
        try:
            await self._stream.send_frames(b"".join(frames))
        except (StreamEnded, asyncio.CancelledError):
            for seq in jobs:
                self._held.pop(seq, None)
            await self._give_back(jobs, undo=True)
            raise

    async def _wait_free(self) -> None:
        """Wait until a job is settled over HTTP, or it is time to ask the engine."""
        freed = asyncio.ensure_future(self._freed.wait())
        try:
            await asyncio.wait(
                (freed, self._stream.gone), timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            freed.cancel()
        if self._stream.gone.done():
            raise StreamEnded

    def _on_settled(self, seqs: Sequence[int], returned: bool) -> None:
        """Free the slots of jobs that are done. Those that were returned may have come to this stream again
        since: the engine is asked which leases are left."""
        held = [seq for seq in seqs if seq in self._held]
        if not held:
            return
        if returned:
            self._checked = _NEVER
        else:
            for seq in held:
                del self._held[seq]
        self._freed.set()

    async def _check(self) -> None:
        """Forget jobs whose leases ended otherwise: settled by another client, expired, deleted."""
        self._checked = self._gateway.loop.time()
        found: set[tuple[int, int]] = set()
        wanted = dict(self._held)
        after, last, has_more = min(wanted) - 1, max(wanted), True
        while has_more and after < last:
            reply: m.PendingReply = await ask(
                self._gateway, m.ListPending(self._topic, after, PENDING_ROWS_MAX, self._node)
            )
            for first, count, state, _, _, _, _, _, token in reply.rows:
                after = first + count - 1
                if state == _LEASED:
                    found.update(
                        (seq, token + seq - first)
                        for seq in range(max(first, min(wanted)), min(after, last) + 1)
                    )
            has_more = reply.more and bool(reply.rows)
        for job in wanted.items():
            if job not in found and self._held.get(job[0]) == job[1]:
                del self._held[job[0]]

    async def _give_back(self, jobs: dict[int, int], *, undo: bool = False) -> None:
        """Return jobs to the queue at once."""
        rows = list(jobs.items())
        for at in range(0, len(rows), JOBS_PER_REQUEST_MAX):
            seqs, tokens = zip(*rows[at : at + JOBS_PER_REQUEST_MAX], strict=True)
            nack = m.Nack(
                self._topic,
                self._node,
                encode_u64s(seqs),
                encode_u64s(tokens),
                0,
                new_call_number(),
                undo=undo,
            )
            await ask(self._gateway, nack)

    def _end_with(self, error: RinglogError) -> None:
        """Send the final error frame, if the client still reads."""
        status, code = status_and_code(error)
        body = error_body(error)["error"]
        data = {"code": status, "error": code, "message": error.message, **body.get("detail", {})}
        with suppress(StreamEnded):
            self._stream.write(b"event: error\ndata: %b\n\n" % msgspec.json.encode(data))


ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "/v0/topics/{}/work", work, claim_access,
        "Push jobs of a queue to a node as server-sent events", is_stream=True, params=("topic",),
        query={"node": "Name of the worker.", "max": "Most jobs it holds.", "token": "Key, for browsers."},
    ),
)  # fmt: skip
