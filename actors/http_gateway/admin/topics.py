"""Routes of topics: configure, state, list, delete, delete records."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ringlog.access.engine_facts import covered, visible_prefixes
from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.client.connection.session import Session
from ringlog.client.requests import topic_requests
from ringlog.client.requests.topic_requests import TopicSummary
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.limits import LIST_PAGE_DEFAULT, LIST_PAGE_MAX, SEQ_MAX, TOPIC_NAME_BYTES_MAX
from ringlog.link.futures import Steps
from ringlog.settings import QUEUE, TOPIC_SETTINGS, WHOLE, Setting
from ringlog.topic.priority import TopicPriority
from ringlog.types import Durability

ECHOED = (
    "type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "durability", "priority",
    "auto_priority", "auto_create", "idempotency_window_ms", "dedupe_node", "lease_ms", "claim_jitter_ms",
    "max_deliveries", "dead_letter", "leases_durable",
)  # fmt: skip
"""Settings that `config` of a reply always has. Clients compare it as a whole, so it has no others."""
_SIGNED = ("priority",)
_NULL_IS_ABSENT = ("durability",)
_CURSOR_CHARS_MAX = 4 * TOPIC_NAME_BYTES_MAX


def _field(row: Setting) -> tuple[str, Any, Any]:
    """Return a setting as an optional field of the request body, for the API documents."""
    kind: Any = {"boolean": bool, WHOLE: int}.get(row.kind, str)
    text = f"{row.allowed}; default {'null' if row.default is None else row.default}"
    described = Annotated[kind, Meta(description=text)]
    takes_null = row.is_nullable or row.name in _NULL_IS_ABSENT
    return row.name, (described | None) if takes_null else described, row.default


TopicConfigBody: type[msgspec.Struct] = msgspec.defstruct(
    "TopicConfigBody", [_field(row) for row in TOPIC_SETTINGS.values()]
)
TopicConfigBody.__doc__ = "Settings of a topic. Those that are left out have their defaults."


class RecordsDeleteBody(msgspec.Struct):
    """Body of a deletion of records. It needs `before_seq`, `match`, or both."""

    before_seq: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    """Delete records with a smaller seq."""
    match: Any = None
    """A tag, a prefix of tags that ends in `*`, or ["tag", "Eq" | "Glob", text]."""


# -- settings -------------------------------------------------------------------------------------


def requested_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request's `config` in the form of messages.

    Unknown settings are ignored, and numbers are reduced or raised to their ranges. Raises InvalidRequest,
    which names the setting.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        row = TOPIC_SETTINGS.get(name)
        if row is None or (value is None and name in _NULL_IS_ABSENT):
            continue
        found[name] = (
            row.clamp(value) if name in ECHOED and not _is_negative(row, value) else row.check(value)
        )
    return found


def _is_negative(row: Setting, value: Any) -> bool:
    return row.kind == WHOLE and row.name not in _SIGNED and isinstance(value, int) and value < 0


def config_echo(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, and `config_extra` if one of ringlog's own settings differs from its default."""
    stored = {name: config.get(name, row.default) for name, row in TOPIC_SETTINGS.items()}
    stored["durable"] = stored["durability"] == Durability.FSYNC.label
    found: dict[str, Any] = {"config": {name: stored[name] for name in ECHOED}}
    extra = {
        name: value for name, value in stored.items()
        if name not in ECHOED and value != TOPIC_SETTINGS[name].default
    }  # fmt: skip
    if extra:
        found["config_extra"] = extra
    return found


def effective_priority(config: Mapping[str, Any], last_read_us: int | None, now_us: int) -> int:
    """Return the priority of a topic for its readers, without the time that they have waited."""
    base = config.get("priority")
    priority = TopicPriority(base or 0, is_auto=base is None and bool(config.get("auto_priority", True)))
    priority.consumed_ms = None if last_read_us is None else last_read_us // 1_000
    return priority.priority(now_us // 1_000)


# -- handlers -------------------------------------------------------------------------------------


async def put_topic(request: Request) -> Response:
    """Create a topic, or replace the settings of an existing one."""
    topic = request.topic
    config = requested_settings(await request.json(dict[str, Any], may_be_empty=True))
    request.authorise(m.TopicPut(topic, config, allow_inert=True))
    client = request.gateway.client
    put = await client.run(topic_requests.replace(client.connection, topic, config, allow_inert=True))
    body = {"topic": topic, "created": put.created, "epoch": put.epoch, **config_echo(put.config)}
    return Response(201 if put.created else 200, body)


async def topic_state(request: Request) -> Response:
    """Return the state of a topic."""
    client = request.gateway.client
    found, jobs = await client.run(
        _state(client.connection, request.topic, request.query_bool("touch", True))
    )
    body: dict[str, Any] = {
        "topic": found.topic, "type": found.type, "head_seq": found.head_seq,
        "earliest_seq": found.earliest_seq, "next_seq": found.next_seq, "count": found.count,
        "bytes": found.bytes, "epoch": found.epoch, **config_echo(found.config),
        "effective_priority": _priority_of(request, found),
        "last_write_ts": _milliseconds(found.last_write_ts),
        "last_read_ts": _milliseconds(found.last_read_ts),
    }  # fmt: skip
    if jobs is not None:
        body["queue"] = {
            "ready": jobs.ready,
            "in_flight": jobs.in_flight,
            "dead_lettered": jobs.dead_lettered,
        }
    return Response(200, body)


def _state(session: Session, topic: str, touch: bool) -> Steps[tuple[TopicSummary, m.LeaseStatsReply | None]]:
    found = yield from topic_requests.state(session, topic, touch)
    if found.type != QUEUE:
        return found, None
    return found, (yield session.request_jobs(m.LeaseStats(topic))).message


async def list_topics(request: Request) -> Response:
    """Return one page of the topics that the key covers, in byte order of their names."""
    client, size = request.gateway.client, page_size(request)
    prefixes = visible_prefixes(request.principal, request.query.get("prefix", ""))
    after = decode_cursor(request.query.get("cursor", ""))
    found = await client.run(topic_requests.list_topics(client.connection, prefixes, after, size + 1))
    topics = [
        {
            "topic": each.topic, "head_seq": each.head_seq, "earliest_seq": each.earliest_seq,
            "count": each.count, "bytes": each.bytes,
            "durable": each.config.get("durability") == Durability.FSYNC.label,
            "effective_priority": _priority_of(request, each),
        }
        for each in found[:size]
    ]  # fmt: skip
    body: dict[str, Any] = {"topics": topics}
    if len(found) > size:
        body["next_cursor"] = encode_cursor(found[size - 1].topic)
    return Response(200, body)


async def delete_topic(request: Request) -> Response:
    """Delete a topic, its records, and the routers from and to it."""
    removal = await request.gateway.client.topics.delete(
        request.topic, if_empty=request.query_bool("if_empty", False)
    )
    shown = covered(request.principal, removal.routers_removed)
    return Response(200, {"topic": request.topic, "deleted": removal.deleted, "routers_removed": shown})


async def delete_records(request: Request) -> Response:
    """Delete records permanently, by position, by tag, or both."""
    body = await request.json(RecordsDeleteBody)
    before_seq = 0
    if body.before_seq is not UNSET:
        # A message has no bound for 0. No record has a seq below 1.
        before_seq = min(max(body.before_seq, 1), SEQ_MAX)
    if not before_seq and body.match is None:
        raise InvalidRequest("the body must have before_seq, match or both, got neither", field="before_seq")
    done = await request.gateway.client.topics.delete_records(
        request.topic, before_seq=before_seq, match=body.match
    )
    return Response(200, {
        "topic": done.topic, "deleted": done.deleted, "earliest_seq": done.earliest_seq,
        "head_seq": done.head_seq, "count": done.count, "bytes": done.bytes,
    })  # fmt: skip


def _priority_of(request: Request, found: TopicSummary) -> int:
    return effective_priority(found.config, found.last_read_ts, request.gateway.clock.now_us())


def _milliseconds(microseconds: int | None) -> int | None:
    return None if microseconds is None else microseconds // 1_000


# -- pages of lists -------------------------------------------------------------------------------


def page_size(request: Request) -> int:
    """Return `page_size` of the query, within its range."""
    return min(max(request.query_int("page_size", LIST_PAGE_DEFAULT), 1), LIST_PAGE_MAX)


def encode_cursor(name: str) -> str:
    """Return the cursor of the page that begins after this name."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str:
    """Return the name of a cursor; "" for none. Raises InvalidRequest for text that is no cursor."""
    try:
        if len(cursor) > _CURSOR_CHARS_MAX:
            raise ValueError("too long")
        padded = cursor.rstrip("=") + "=" * (-len(cursor.rstrip("=")) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "cursor must be next_cursor of an earlier page", field="cursor", found=cursor[:64]
        ) from None


_TOPIC = ("topic",)
PAGE_QUERY = {
    "prefix": "Only names that begin with this text.",
    "page_size": "Most rows of a page, 1 to 1,000; default 100.",
    "cursor": "`next_cursor` of the page before.",
}
"""Query parameters of lists that are given in pages."""
ROUTES: tuple[Route, ...] = (
    Route("GET", "/v0/topics", list_topics, m.TopicList, "List topics", query=PAGE_QUERY),
    Route(
        "PUT", "/v0/topics/{}", put_topic, m.TopicPut, "Create or configure a topic", body=TopicConfigBody,
        params=_TOPIC, statuses=(201,),
    ),
    Route(
        "GET", "/v0/topics/{}", topic_state, m.TopicState, "Return the state of a topic", params=_TOPIC,
        query={"touch": "false: do not count as a consumption of the topic."},
    ),
    Route(
        "DELETE", "/v0/topics/{}", delete_topic, m.TopicDelete, "Delete a topic", params=_TOPIC,
        query={"if_empty": "true: refuse to delete a topic that has records."},
    ),
    Route(
        "POST", "/v0/topics/{}/delete", delete_records, m.RecordsDelete, "Delete records of a topic",
        body=RecordsDeleteBody, params=_TOPIC,
    ),
)  # fmt: skip
