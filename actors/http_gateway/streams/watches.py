"""Watch sessions: POST /v0/watch, and what they remember."""

from __future__ import annotations

import re
import secrets
import string
from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.api.request import Request, Response
from ringlog.actors.http_gateway.api.route_table import Route
from ringlog.actors.http_gateway.records.diffs import cursor_of, filters_of
from ringlog.actors.http_gateway.streams.fan_out import FanOut, Projection, Subscriber
from ringlog.board.layout import HttpGatewayField
from ringlog.client.requests.topic_requests import list_topic_names
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, Throttled, TopicNotFound
from ringlog.limits import (
    HTTP_PROCESSES_MAX,
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    READ_LIMIT_DEFAULT,
    READ_LIMIT_MAX,
    WATCH_SESSION_TTL_MS,
    WATCH_TOPICS_MAX,
)

if TYPE_CHECKING:
    from ringlog.actors.http_gateway.gateway import Gateway
    from ringlog.actors.http_gateway.streams.event_stream import WatchStream
    from ringlog.client.requests.topic_requests import TopicSummary

Count = Annotated[int, Meta(ge=0)]
_ID_BYTES = 16
_BASE64URL = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_WID = re.compile(r"wid_[A-Za-z0-9_-]{22}", re.ASCII)
"""The second part is _ID_BYTES in base64url. Its last character stands for 2 of their bits; in the other 4 is
the number of the gateway that made the session."""
_HEARTBEAT_MS_MIN, _HEARTBEAT_MS_MAX = 1_000, 60_000


class WatchStart(msgspec.Struct):
    """Where the watch of one topic begins: after `from_seq`, or with `tail` at its head."""

    from_seq: Count = 0
    tail: bool = False
    from_epoch: Count = 0


class WatchBody(msgspec.Struct):
    """Body of a watch. `prefix` adds all topics that exist now and begin with it."""

    topics: dict[str, WatchStart | None] = {}
    prefix: str | None = None
    node: str | list[str] | None = None
    limit: Count = READ_LIMIT_DEFAULT
    max_batch_bytes: Count = 262_144
    heartbeat_ms: Count = 15_000
    include_data: bool = True
    include_meta: bool = True
    include_tags: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"
    filter: str | list[Any] | None = None


def new_wid(maker: int) -> str:
    """Return a name for a session that the gateway with number `maker` makes."""
    secret = secrets.token_urlsafe(_ID_BYTES)
    return f"wid_{secret[:-1]}{_BASE64URL[_BASE64URL.index(secret[-1]) + maker]}"


def maker_of(wid: str, processes: int) -> int:
    """Return the number of the gateway that made a session; -1 if the name can be of none of `processes`."""
    if not _WID.fullmatch(wid):
        return -1
    number = _BASE64URL.index(wid[-1]) % HTTP_PROCESSES_MAX
    return number if number < processes else -1


class WatchSession:
    """One watch: its subscribers, whose positions outlive connections."""

    def __init__(
        self, wid: str, principal: Principal, subs: dict[str, Subscriber], *, heartbeat_s: float,
        is_strong: bool, tags: str | list[Any] | None,
    ) -> None:  # fmt: skip
        self.wid: str = wid
        self.principal = principal
        self.subs = subs
        self.heartbeat_s: float = heartbeat_s
        self.is_strong: bool = is_strong
        self.tags: str | list[Any] | None = tags
        """Tag filter, as its client has sent it."""
        self.sent_cursor: str = ""
        """Cursor of the last frame, if nothing but omitted records lies between it and the positions."""
        self.stream: WatchStream | None = None
        self.used_ms = 0
        self.moves: int = 0
        """How often it has moved to another gateway."""


class WatchSessions:
    """All watch sessions of this gateway. They are in memory only."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.fan_out: FanOut = FanOut(gateway)
        self._sessions: dict[str, WatchSession] = {}
        self._idle: OrderedDict[str, WatchSession] = OrderedDict()
        """Sessions without a stream. The one that was not used for longest comes first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, wid: str) -> WatchSession | None:
        """Return a session, None if it is unknown or was not used for longer than WATCH_SESSION_TTL_MS."""
        self._collect()
        return self._sessions.get(wid)

    def made_by(self, maker: int, processes: int) -> list[WatchSession]:
        """Return the sessions here that one of `processes` gateways has made."""
        self._collect()
        return [each for each in self._sessions.values() if maker_of(each.wid, processes) == maker]

    def require_room(self, expected: int = 0) -> None:
        """Raise Throttled beyond `http.max_watch_sessions`. `expected` sessions are on their way to here."""
        self._collect()
        most = self._gateway.settings.http.max_watch_sessions
        if len(self._sessions) + expected >= most:
            raise Throttled(
                "too many watch sessions: retry later, or raise http.max_watch_sessions",
                limit="max_watch_sessions", max=most, retry_after_ms=1_000,
            )  # fmt: skip

    def add(self, session: WatchSession) -> None:
        """Remember a session. The caller has called `require_room`."""
        self._sessions[session.wid] = session
        self.note_use(session)
        self._count()

    def remove(self, session: WatchSession) -> None:
        """End the stream of a session, and forget the session."""
        if session.stream is not None:
            session.stream.supersede()
        self._sessions.pop(session.wid, None)
        self._idle.pop(session.wid, None)
        self._count()

    def _count(self) -> None:
        self._gateway.slot.set(HttpGatewayField.SESSIONS, len(self._sessions))

    def note_use(self, session: WatchSession) -> None:
        """Note that a session is used now, or that its stream has begun or ended."""
        session.used_ms = self._now_ms()
        self._idle.pop(session.wid, None)
        if session.stream is None and session.wid in self._sessions:
            self._idle[session.wid] = session

    def _now_ms(self) -> int:
        return int(self._gateway.clock.monotonic_ns() // 1_000_000)

    def _collect(self) -> None:
        """Forget the sessions that were not used for longer than the TTL. Those with a stream stay."""
        oldest_ms = self._now_ms() - WATCH_SESSION_TTL_MS
        while self._idle:
            session = next(iter(self._idle.values()))
            if session.used_ms >= oldest_ms:
                return
            self.remove(session)


async def make_watch(request: Request) -> Response:
    """Make a watch session."""
    gateway = request.gateway
    body = await request.json(WatchBody)
    request.authorise(*(m.Read(name, 0) for name in body.topics))
    is_lenient = request.query_bool("lenient", False)
    wanted = {name: start or WatchStart() for name, start in body.topics.items()}
    if body.prefix is not None:
        wanted = await _matching(request, body.prefix) | wanted
    elif not wanted:
        raise InvalidRequest(f"topics must have 1 to {WATCH_TOPICS_MAX} names, got 0", max=WATCH_TOPICS_MAX)
    if len(wanted) > WATCH_TOPICS_MAX:
        raise InvalidRequest(
            f"topics must have 1 to {WATCH_TOPICS_MAX} names, got {len(wanted)}", max=WATCH_TOPICS_MAX
        )
    gateway.watches.require_room()
    subs: dict[str, Subscriber] = {}
    told: dict[str, dict[str, Any]] = {}
    for name, start in wanted.items():
        try:
            sub, state = await make_subscriber(
                gateway, name, start, body.filter, body.node, limit=body.limit or READ_LIMIT_DEFAULT,
                max_bytes=body.max_batch_bytes or READ_BYTES_DEFAULT, include_data=body.include_data,
                include_tags=body.include_tags, include_meta=body.include_meta,
            )  # fmt: skip
        except TopicNotFound:
            if is_lenient:
                continue
            raise
        subs[name] = sub
        told[name] = topic_reply(sub, state)
        if body.consistency == "strong" and state.config.get("durability") == "ephemeral":
            told[name]["consistency"] = "eventual"
    gateway.watches.require_room()  # Again: others were made meanwhile.
    session = WatchSession(
        new_wid(gateway.number), request.principal, subs, is_strong=body.consistency == "strong",
        heartbeat_s=min(max(body.heartbeat_ms, _HEARTBEAT_MS_MIN), _HEARTBEAT_MS_MAX) / 1_000,
        tags=body.filter,
    )  # fmt: skip
    gateway.watches.add(session)
    return Response(
        200,
        {
            "wid": session.wid, "stream_url": f"/v0/watch/{session.wid}",
            "session_ttl_ms": WATCH_SESSION_TTL_MS, "topics": told,
        },
    )  # fmt: skip


async def make_subscriber(
    gateway: Gateway, name: str, start: WatchStart, tags: str | list[Any] | None,
    node: str | list[str] | None, *, limit: int, max_bytes: int, include_data: bool, include_tags: bool,
    include_meta: bool,
) -> tuple[Subscriber, TopicSummary]:  # fmt: skip
    """Return a subscriber of a topic, and the state of the topic. Raises TopicNotFound, InvalidRequest."""
    state = await gateway.client.topics.state(name)
    filters = await gateway.client.run(filters_of(gateway.client.connection, name, tags, node))
    if start.tail:
        cursor = cursor_of(state.epoch, state.head_seq)
    else:
        cursor = cursor_of(start.from_epoch, start.from_seq)
    sub = Subscriber(
        name, cursor, Projection(include_data, include_tags, include_meta, filters),
        min(limit, READ_LIMIT_MAX), min(max_bytes, READ_BYTES_MAX),
    )  # fmt: skip
    sub.head_seq = state.head_seq
    return sub, state


def topic_reply(sub: Subscriber, state: TopicSummary) -> dict[str, Any]:
    """Return what the reply to a watch or subscription tells of a topic."""
    return {
        "from_seq": sub.seq, "head_seq": state.head_seq, "earliest_seq": state.earliest_seq,
        "epoch": state.epoch,
    }  # fmt: skip


async def _matching(request: Request, prefix: str) -> dict[str, WatchStart]:
    """Return the existing topics that begin with a prefix and that the key covers."""
    request.principal.require(("read",))
    client = request.gateway.client
    names = await client.run(list_topic_names(client.connection, [prefix]))
    return {name: WatchStart() for name in names if request.principal.covers(name)}


ROUTES: tuple[Route, ...] = (
    Route(
        "POST", "/v0/watch", make_watch, None, "Make a watch session over topics", body=WatchBody,
        statuses=(404,),
    ),
)  # fmt: skip
