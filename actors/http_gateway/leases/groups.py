"""Routes of consumer groups: `/v0/topics/T/groups/G`.

G is the key of a group: its name, followed by `@` and its tag filter if it has one. Only PUT takes the bare
name, and returns the key.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ringlog.access.engine_facts import group_forbidden, needs_group_admin
from ringlog.actors.http_gateway.api.request import Request, Response, Whole
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.leases import claims, jobs
from ringlog.actors.http_gateway.leases.claims import ClaimBody
from ringlog.actors.http_gateway.leases.jobs import NODE, ExtendBody, NackBody, RejectBody, SettleBody, ask
from ringlog.actors.http_gateway.leases.workers import new_operations, split_group
from ringlog.client.leases.group_lease_operations import MODES, GroupLeaseOperations
from ringlog.client.leases.lease_extender import new_call_number
from ringlog.client.read.pages import EARLIEST, LATEST, Start
from ringlog.client.requests.validation import cursor_before
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.errors import GroupNotFound, InvalidRequest
from ringlog.tags import request_form

_PATH = "/v0/topics/{}/groups"
_NAMES = {number: name for name, number in MODES.items()}
_TS_MAX = 253_402_300_799_000
"""Last millisecond of the year 9999."""


class TimeStart(msgspec.Struct):
    """A start at a time."""

    ts: Whole
    """Milliseconds since the epoch."""


StartValue = Literal["earliest", "latest"] | Whole | TimeStart


class GroupBody(msgspec.Struct):
    """Body of the PUT of a group. A setting that is left out is not compared with an existing group."""

    mode: Literal["queue", "stream"]
    start: StartValue | None = None
    """First record of a new group: earliest, latest, a seq, or {"ts": ms}."""
    tags: str | list[str] | None = None
    max_in_flight: Whole | None = None
    member_max_in_flight: Whole | None = None
    max_deliveries: Whole | None = None
    dead_letter: str | None = None
    backoff_ms: Whole | None = None
    backoff_max_ms: Whole | None = None


class SeekBody(msgspec.Struct):
    """Body of a seek."""

    start: StartValue


class TakeBody(msgspec.Struct):
    """Body of a take: the node becomes the reader of a group in mode stream."""

    node: str


class CommitBody(msgspec.Struct):
    """Body of a commit."""

    token: str
    """Token of the take."""
    seq: Whole
    """Every record up to here is processed."""
    delivered: Whole | None = None
    """Last record that the reader has received. None = `seq`."""


class LeaveBody(msgspec.Struct):
    """Body of a leave."""

    node: str


# -- the group itself --------------------------------------------------------------------------------------


async def put(request: Request) -> Response:
    """Create a group, or return an existing one. Refused if the settings of the body differ from its own."""
    gateway, (topic, name) = request.gateway, request.params
    body = await request.json(GroupBody)
    request.authorise(m.GroupOpen(topic, name, MODES[body.mode], dead_letter=body.dead_letter or ""))
    operations = GroupLeaseOperations(
        topic, name, body.mode, NODE, SystemClock(), start=_start(body.start), tags=body.tags,
        max_in_flight=body.max_in_flight, member_max_in_flight=body.member_max_in_flight,
        max_deliveries=body.max_deliveries, dead_letter=body.dead_letter, backoff_ms=body.backoff_ms,
        backoff_max_ms=body.backoff_max_ms, release_on_exit=False,
    )  # fmt: skip
    connection = gateway.client.connection
    may_create = not needs_group_admin(request.principal, await _config(request, topic), MODES[body.mode])
    try:
        info = await gateway.client.run(operations.open(connection, make=may_create, node=""))
    except GroupNotFound:
        if may_create:
            raise
        raise group_forbidden(topic, "create") from None
    return Response(201 if info.created else 200, {**_info(info), "created": info.created})


async def show(request: Request) -> Response:
    """Return the position and the state of a group."""
    topic, group = request.params
    found: m.LeaseStatsReply = await ask(request.gateway, m.LeaseStats(topic, group=group))
    undelivered, delayed = found.undelivered, found.delayed
    unsettled = found.in_flight + delayed + found.returned + found.exhausted
    body: dict[str, Any] = {
        **_info(found.info), "head_seq": found.head_seq, "lag": undelivered + unsettled,
        "undelivered": undelivered, "ready": found.ready, "in_flight": found.in_flight, "delayed": delayed,
        "returned": found.returned, "exhausted": found.exhausted, "waiting": found.waiting,
        "wait_p99_ms": found.wait_p99_ms, "is_holding": found.is_holding,
        "members": [
            {"node": name, "last_seen_ts": seen, "in_flight": held} for name, seen, held in found.members
        ],
    }  # fmt: skip
    if found.holder:
        body["reader"] = found.holder
    if found.oldest_ready_ms >= 0:
        body["oldest_ready_ms"] = found.oldest_ready_ms
    return Response(200, body)


async def list_groups(request: Request) -> Response:
    """List the groups of a topic, by their keys."""
    found: m.GroupListReply = await ask(request.gateway, m.GroupList(request.topic))
    return Response(200, {"topic": request.topic, "groups": [_info(info) for info in found.groups]})


async def delete(request: Request) -> Response:
    """Delete a group. The topic stays."""
    topic, group = request.params
    found: m.GroupDeleted = await ask(request.gateway, m.GroupDelete(topic, group))
    return Response(200, {"topic": topic, "group": group, "deleted": found.deleted})


async def seek(request: Request) -> Response:
    """Move a group. All leases end, and nothing is pending any more."""
    topic, group = request.params
    body = await request.json(SeekBody)
    if needs_group_admin(request.principal, await _config(request, topic)):
        state: m.LeaseStatsReply = await ask(request.gateway, m.LeaseStats(topic, group=group))
        if state.info.mode == MODES["queue"]:
            raise group_forbidden(topic, "move")
    name, tags = split_group(group)
    operations = GroupLeaseOperations(topic, name, "queue", NODE, SystemClock(), tags=tags, create=False)
    client = request.gateway.client
    cursor = await client.run(operations.seek(client.connection, _start(body.start)))
    return Response(200, {"topic": topic, "group": group, "cursor": cursor})


async def leave(request: Request) -> Response:
    """End the membership of a node: the records that it holds are ready for others at once."""
    topic, group = request.params
    body = await request.json(LeaveBody)
    found: m.GroupLeft = await ask(request.gateway, m.GroupLeave(topic, group, body.node))
    return Response(200, {"topic": topic, "group": group, "released": found.released})


# -- mode queue --------------------------------------------------------------------------------------------


async def redrive(request: Request) -> Response:
    """Deliver the records of dead letters again."""
    topic, group = request.params
    body = await request.json(jobs.RedriveBody, may_be_empty=True)
    name, tags = split_group(group)
    worker = request.gateway.client.group(
        topic, name, mode="queue", node=NODE, tags=tags, create=False, release_on_exit=False
    )
    operations = new_operations(topic, NODE, group)
    return await jobs.redrive(request, worker, operations, body.seqs, body.limit)


# -- mode stream -------------------------------------------------------------------------------------------


async def take(request: Request) -> Response:
    """Make a node the reader of a group. The commits of its previous reader have no effect from now on."""
    topic, group = request.params
    body = await request.json(TakeBody)
    if not body.node:
        raise InvalidRequest("node must not be empty", field="node")
    found: m.GroupTakenOver = await ask(
        request.gateway, m.GroupTakeOver(topic, group, body.node, new_call_number())
    )
    return Response(
        200,
        {"topic": topic, "group": group, "token": f"take_{found.token:016x}", "committed": found.committed,
        "next_from_seq": found.committed},
    )  # fmt: skip


async def commit(request: Request) -> Response:
    """Commit the position of a reader. If `is_reader` is false, another node reads the group now."""
    topic, group = request.params
    body = await request.json(CommitBody)
    delivered = max(body.seq, body.delivered or 0)
    message = m.GroupCommit(topic, group, _take_token(body.token), body.seq, delivered + 1)
    found: m.GroupCommitted = await ask(request.gateway, message)
    return Response(
        200,
        {"topic": topic, "group": group, "committed": found.committed, "is_reader": found.is_holder},
    )  # fmt: skip


# -- helpers -----------------------------------------------------------------------------------------------


async def _config(request: Request, topic: str) -> dict[str, Any]:
    """Return the current configuration of a topic, if the rights of this key depend on it; else {}."""
    if request.principal.is_unrestricted:
        return {}
    session = request.gateway.client.connection
    session.topics.forget(topic)
    info: m.TopicInfo = await request.gateway.client.run(_resolving(session, topic))
    return info.config


def _resolving(session: Any, topic: str) -> Any:
    return (yield session.topics.resolve(topic))


def _start(value: StartValue | None) -> Start:
    if value is None or value == "earliest":
        return EARLIEST
    if value == "latest":
        return LATEST
    if isinstance(value, TimeStart):
        return datetime.fromtimestamp(min(value.ts, _TS_MAX) / 1_000, UTC)
    assert isinstance(value, int)
    return cursor_before(value, "start")


def _take_token(token: str) -> int:
    digits = token.removeprefix("take_")
    try:
        found = int(digits, 16)
    except ValueError:
        found = 0
    if len(digits) == len(token) or not 0 < found < 1 << 64:
        raise InvalidRequest(f"token must be the token of a take, got {token[:40]!r}", field="token")
    return found


def _info(info: m.GroupInfo) -> dict[str, Any]:
    """Return a group as JSON. A setting without effect is left out."""
    found: dict[str, Any] = {
        "topic": info.topic, "group": info.group, "name": info.name, "mode": _NAMES.get(info.mode, ""),
        "cursor": info.cursor, "floor": info.floor, "pending": info.pending,
    }  # fmt: skip
    settings = {
        "tags": request_form(info.tags), "max_in_flight": info.pending_max,
        "member_max_in_flight": info.member_max, "max_deliveries": info.max_deliveries,
        "dead_letter": info.dead_letter, "backoff_ms": info.backoff_ms,
        "backoff_max_ms": info.backoff_max_ms if info.backoff_ms else 0,
    }  # fmt: skip
    return found | {name: value for name, value in settings.items() if value}


def _route(
    method: str, name: str, handler: Any, access: Any, summary: str, body: type[Any] | None = None
) -> Route:
    path = f"{_PATH}/{{}}/{name}" if name else f"{_PATH}/{{}}"
    return Route(method, path, handler, access, summary, body=body, params=("topic", "group"))


ROUTES: tuple[Route, ...] = (
    Route("GET", _PATH, list_groups, m.GroupList, "List the consumer groups of a topic", params=("topic",)),
    Route(
        "PUT", f"{_PATH}/{{}}", put, lambda topic, group: m.GroupOpen(topic, group, 1),
        "Create or open a consumer group", GroupBody, params=("topic", "group"), statuses=(201,),
    ),
    _route("GET", "", show, m.LeaseStats, "Show a consumer group"),
    _route("DELETE", "", delete, m.GroupDelete, "Delete a consumer group"),
    _route("POST", "seek", seek, lambda topic, group: m.GroupSeek(topic, group, 0), "Move a group", SeekBody),
    _route(
        "POST", "leave", leave, lambda topic, group: m.GroupLeave(topic, group, NODE), "Leave a group",
        LeaveBody,
    ),
    _route("POST", "claim", claims.claim, jobs.claim_access, "Lease records of a group to a node", ClaimBody),
    _route("POST", "ack", jobs.ack, jobs.settle_access(m.Ack), "Settle records of a group", SettleBody),
    _route("POST", "nack", jobs.nack, jobs.settle_access(m.Nack), "Return records to a group", NackBody),
    _route(
        "POST", "extend", jobs.extend, jobs.settle_access(m.Extend), "Hold records of a group longer",
        ExtendBody,
    ),
    _route(
        "POST", "reject", jobs.reject, jobs.settle_access(m.Reject),
        "Move records to the dead letters of a group", RejectBody,
    ),
    _route(
        "GET", "pending", jobs.pending, lambda topic, group: m.ListPending(topic, group=group),
        "List delivered records that are not settled",
    ),
    _route(
        "POST", "redrive", redrive, lambda topic, group: m.RedriveDeadLetters(topic, b"", group),
        "Deliver the records of dead letters again", jobs.RedriveBody,
    ),
    _route(
        "POST", "take", take, lambda topic, group: m.GroupTakeOver(topic, group, NODE),
        "Become the reader of a group", TakeBody,
    ),
    _route(
        "POST", "commit", commit, lambda topic, group: m.GroupCommit(topic, group, 0, 0, 0),
        "Commit the position of a reader", CommitBody,
    ),
)  # fmt: skip
