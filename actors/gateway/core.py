"""The gateway's decisions: which requests are allowed, and how each one gets its reply. Pure.

Checks are made in this order: credentials, permissions, limits, and then the fields of the request. A request
that passes becomes a *flow*. A flow is a generator: it yields one effect at a time, is resumed with the
result of the effect, and returns the reply. A waiting flow occupies no thread, and a flow that waits for
records blocks no write.

Flows of appends are in appends.py, reads in reads.py, claims in jobs.py, groups in group_requests.py,
routers in router_requests.py. Their common parts are in flows.py. Invariants (docs/reference/invariants.md):

- No request reaches a shard before `authorise` has accepted it (G1).
- A client's appends to one topic reach the shard in the order of sending (G2). Producer numbers must
  arrive in ascending order: a shard takes an older number for a repeat.
- Frames are forwarded unchanged, under the client's own producer numbers, and only appends of the named
  topic (G3). So the shard recognises a retry after any failure.
- Every request gets at most one reply. A request beyond a limit and an internal error also get a reply (G4).
- Held requests never exceed the limits for one connection, for one key, and in total (G5).
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ringlog.access.engine_facts import covered, visible_prefixes
from ringlog.access.key_ring import LOCAL_ID, KeyRing
from ringlog.access.keys import OWNER, Principal, authorise
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.append_admission import AppendAdmission, Flow
from ringlog.actors.gateway.appends import AppendFlows
from ringlog.actors.gateway.flows import AcquireAppendLane, FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.group_requests import GroupFlows
from ringlog.actors.gateway.jobs import JobFlows
from ringlog.actors.gateway.reads import ReadFlows
from ringlog.actors.gateway.replies import error_reply
from ringlog.actors.gateway.router_requests import RouterRequestFlows
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import (
    ExitCode,
    Internal,
    InvalidRequest,
    NotReady,
    Refused,
    RinglogError,
    ShuttingDown,
    StaleEpoch,
    Throttled,
    TopicNotFound,
    is_shard_failed,
)
from ringlog.limits import (
    CREDIT_MAX,
    FEEDS_PER_MESSAGE_MAX,
    FRAME_BYTES_MAX,
    GATEWAY_BYTES_MAX,
    GATEWAY_BYTES_PER_CONNECTION_MAX,
    GATEWAY_REQUESTS_PER_CONNECTION_MAX,
    GATEWAY_REQUESTS_PER_KEY_MAX,
    LIST_PAGE_MAX,
    READ_BYTES_MAX,
    READ_LIMIT_MAX,
    REQUEST_BYTES_MAX,
    SEQ_MAX,
)
from ringlog.placement import home_shard

_RETRY_AFTER_MS = 50

_OF_SCHEDULERS = (
    m.Subscribe, m.RouterCreate, m.RouterGet, m.RouterList, m.RouterDelete, m.RoutesSettle, m.LettersRedrive,
)  # fmt: skip
"""Requests that wait for a reply of a scheduler, not counting the resolution of topic names."""


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """Facts about the engine that the gateway sends in replies."""

    engine_id: str
    version: str
    protocol: int
    shards: int
    incarnation: int
    ring_frame_bytes_max: int
    """Largest frame that goes through a ring. Larger frames are sent to the shard by socket."""
    body_bytes_max: int = REQUEST_BYTES_MAX
    """Largest attachment of a request in bytes, without the overhead of frames."""
    read_limit: int = READ_LIMIT_MAX
    """Largest number of records in one reply."""


def frames_bytes_max(body_bytes: int) -> int:
    """Return the maximum size of frames with `body_bytes` bytes of records."""
    return body_bytes + FRAME_BYTES_MAX - REQUEST_BYTES_MAX


class GatewayCore:
    """State machine of one gateway. `requests_held` and the counters are for the board and for tests."""

    def __init__(self, identity: GatewayIdentity, keys: KeyRing) -> None:
        self._identity = identity
        self._keys = keys
        self._context = FlowContext()
        self._is_stopped = False
        self._effects: list[Any] = []
        self._waiting: dict[int, GatewayRequest] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._resolving: dict[str, list[GatewayRequest]] = {}
        self._resolve_tickets: dict[int, tuple[str, bool]] = {}
        self._held: dict[GatewayRequest, None] = {}
        self._per_client: dict[bytes, list[int]] = {}
        self._per_key: dict[str, int] = {}
        self._bytes = 0
        self._intake = AppendAdmission()
        self._appends = AppendFlows(
            self._context, self._intake, identity.shards, identity.ring_frame_bytes_max, self._advance,
            frames_bytes_max(identity.body_bytes_max),
        )  # fmt: skip
        self._reads = ReadFlows(self._context, self._wait_until, identity.read_limit)
        self._routing = RouterRequestFlows(
            self._context.ask_scheduler,
            self._context.evict_topic,
            self._ask_home_shard,
            self._ask_topic_shard,
        )
        self._groups = GroupFlows(self._ask_home_shard, self._ask_topic_shard)
        self._jobs = JobFlows(
            self._ask_topic_shard,
            lambda read: self._reads.locate(read, read.after, read.epoch),
            lambda read, located, plan: self._reads.read_files(
                read, located, plan, self._context.now_us, min(read.limit, READ_LIMIT_MAX)
            ),
        )
        self._disconnected: set[GatewayRequest] = set()
        self.answered = 0
        self.refused = 0

    @property
    def requests_held(self) -> int:
        """Number of requests without a reply yet."""
        return len(self._held)

    @property
    def throttled_appends(self) -> int:
        """Number of appends that were refused for pressure."""
        return self._intake.refused_appends

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Process events in order and return the resulting effects, in order."""
        for event in events:
            self._handle_event(event)
        if self._context.is_draining and not self._held and not self._is_stopped:
            self._is_stopped = True
            self._effects.append(Stop(ExitCode.OK, "drained"))
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_ns(self) -> int | None:
        """Return the time in ns at which the next request stops waiting for records, or None."""
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check(self) -> None:
        """Check with a recount that held requests do not exceed the limits (G5)."""
        assert self._bytes == sum(request.bytes for request in self._held)
        assert sum(count for count, _ in self._per_client.values()) == len(self._held)
        assert sum(self._per_key.values()) == len(self._held)
        assert self._bytes <= GATEWAY_BYTES_MAX
        loads = [self._intake.in_flight(shard) for shard in range(self._identity.shards)]
        assert sum(appends for appends, _ in loads) <= len(self._held)
        assert sum(size for _, size in loads) <= self._bytes
        self._appends.check()

    # -- events ---------------------------------------------------------------------------------------

    def _handle_event(self, event: Any) -> None:
        match event:
            case Tick():
                self._tick(event)
            case ev.ClientRequestReceived():
                self._request_received(event)
            case ev.ShardAnswered() if event.ticket in self._resolve_tickets:
                self._resolved(event)
            case ev.ShardAnswered():
                self._resume(event.ticket, event.error or event.message)
            case ev.FramesSettled():
                self._resume(event.ticket, event.error or event.entries)
            case ev.FramesRead():
                self._resume(event.ticket, event.error or event)
            case ev.ColdReadCompleted():
                self._resume(event.ticket, event.error or event)
            case ev.TimeFound():
                self._resume(event.ticket, event.error or event.after)
            case ev.SubscribeCompleted():
                self._resume(event.ticket, event.error)
            case ev.TopicHeadChanged():
                self._resume(event.ticket, True)
            case ev.ClientDisconnected():
                self._client_disconnected(event.client)
            case ev.KeysLoaded():
                self._keys = event.keys
            case ev.ShardPressureChanged():
                self._intake.refusing_shards = event.shards
            case DrainRequested():
                self._drain()

    def _tick(self, tick: Tick) -> None:
        self._context.now_ns = tick.monotonic_ns
        self._context.now_us = tick.now_us
        while (due := self.next_deadline_ns()) is not None and due <= self._context.now_ns:
            _, ticket = heapq.heappop(self._deadlines)
            self._effects.append(ev.UnwatchTopic(ticket))
            self._resume(ticket, False)

    def _request_received(self, received: ev.ClientRequestReceived) -> None:
        principal = OWNER if received.user_id == LOCAL_ID else self._keys.find(received.user_id)
        try:
            authorise(principal, received.message)
            assert principal is not None
            if isinstance(received.message, m.Taken):
                self._effects.append(ev.ReturnGrants(received.client, received.attachment))
                return  # It has no reply and waits for nothing.
            if isinstance(received.message, m.Unsubscribe):
                self._effects.append(
                    ev.UnsubscribeFeeds(
                        received.client, received.message.subscription, list(received.message.feeds)
                    )
                )
            answer = self._immediate_reply(received.message)
            if answer is not None:
                self._effects.append(Reply(received.client, received.corr, answer))
                return
            self._admit(received, principal)
        except Refused as e:
            self._refuse(received.client, received.corr, e)
            return
        except Exception as e:  # noqa: BLE001  see _fail_request
            self._fail_request(received.client, received.corr, received.message, e)
            return
        request = GatewayRequest(
            received.client, received.corr, received.message, principal, received.attachment
        )
        self._hold(request)
        request.flow = self._flow(request)
        self._advance(request, None)

    def _admit(self, received: ev.ClientRequestReceived, principal: Principal) -> None:
        """Raise Throttled if the request would exceed a limit (G5), or ShuttingDown while draining."""
        if self._context.is_draining:
            raise ShuttingDown("the engine is stopping")
        count, held_bytes = self._per_client.get(received.client, (0, 0))
        size = len(received.attachment) if received.attachment is not None else 0
        for name, found, most in (
            ("requests_per_connection", count + 1, GATEWAY_REQUESTS_PER_CONNECTION_MAX),
            ("bytes_per_connection", held_bytes + size, GATEWAY_BYTES_PER_CONNECTION_MAX),
            ("requests_per_key", self._per_key.get(principal.name, 0) + 1, GATEWAY_REQUESTS_PER_KEY_MAX),
            ("bytes", self._bytes + size, GATEWAY_BYTES_MAX),
        ):
            if found > most:
                raise Throttled(
                    "too many requests or bytes in flight, retry later", limit=name, max=most,
                    retry_after_ms=_RETRY_AFTER_MS,
                )  # fmt: skip

    def _client_disconnected(self, client: bytes) -> None:
        """Forget a disconnected client. Requests that were sent to a shard continue and may be applied."""
        for ticket, request in list(self._waiting.items()):
            if request.client == client and request.deadline_ns:
                self._effects.append(ev.UnwatchTopic(ticket))
                del self._waiting[ticket]
                self._release(request)
        self._disconnected.update(request for request in self._held if request.client == client)

    def _drain(self) -> None:
        self._context.is_draining = True
        for ticket, request in list(self._waiting.items()):
            if request.deadline_ns:
                self._effects.append(ev.UnwatchTopic(ticket))
                self._resume(ticket, False)
            elif isinstance(request.message, _OF_SCHEDULERS):
                self._resume(ticket, ShuttingDown("the engine is stopping"))

    # -- flows ----------------------------------------------------------------------------------------

    def _resume(self, ticket: int, value: Any) -> None:
        request = self._waiting.pop(ticket, None)
        if request is not None:
            request.deadline_ns = 0
            self._advance(request, value)

    def _advance(self, request: GatewayRequest, value: Any) -> None:
        """Run a flow until it yields an effect for the shell, is parked, or returns its reply."""
        assert request.flow is not None
        try:
            if isinstance(value, RinglogError):
                effect = request.flow.throw(value)
            else:
                effect = request.flow.send(value)
        except StopIteration as end:
            self._release(request)
            self._answer(request, *end.value)
            return
        except RinglogError as e:
            self._release(request)
            if request not in self._disconnected:
                self._refuse(request.client, request.corr, e)
            self._disconnected.discard(request)
            return
        except Exception as e:  # noqa: BLE001  see _fail_request
            self._release(request)
            self._disconnected.discard(request)
            self._fail_request(request.client, request.corr, request.message, e)
            return
        match effect:
            case ResolveTopic():
                self._resolve(request, effect.topic)
            case AcquireAppendLane():
                self._appends.start_or_park(request, by_socket=effect.by_socket)
            case _:
                self._waiting[effect.ticket] = request
                self._effects.append(effect)

    def _flow(self, request: GatewayRequest) -> Flow:
        match request.message:
            case m.Append():
                return self._appends.append(request)
            case m.Read():
                return self._reads.read(request)
            case m.SeekTime():
                return self._reads.seek_time(request.message)
            case m.TopicList():
                return self._list(request)
            case m.TopicPut() | m.TopicResolve():
                return self._ask_home_shard(request.message)
            case m.Subscribe():
                return self._subscribe(request)
            case m.RouterCreate() | m.RouterGet() | m.RouterDelete():
                return self._routing.handle_one(request.message, request.principal)
            case m.RouterList():
                return self._routing.list_page(request.message, request.principal)
            case m.RoutesSettle():
                return self._routing.settle_routes(request.message)
            case m.TopicDelete():
                return self._delete(request)
            case m.LettersRedrive():
                return self._routing.redrive(request.message, request.principal)
            case m.GroupOpen():
                return self._groups.open_group(request.message, request.principal)
            case m.GroupSeek():
                return self._groups.seek_group(request.message, request.principal)
            case m.Claim() | m.Steal():
                return self._jobs.claim(request.message)
            case _:
                return self._ask_topic_shard(request.message)

    def _immediate_reply(self, message: m.Message) -> m.Message | None:
        """Return the reply to a request that needs no shard; None for all other requests."""
        identity = self._identity
        if isinstance(message, m.Ping):
            return m.Pong(identity.incarnation, self.answered)
        if isinstance(message, m.Unsubscribe):
            return m.Unsubscribed(message.subscription)
        if not isinstance(message, m.Hello):
            return None
        if message.protocol != identity.protocol:
            raise InvalidRequest(
                f"protocol version must be {identity.protocol}, got {message.protocol}: install the same"
                " release",
                found=message.protocol, known=identity.protocol,
            )  # fmt: skip
        bounds = {
            "frame_bytes": frames_bytes_max(identity.body_bytes_max),
            "request_bytes": identity.body_bytes_max, "read_limit": identity.read_limit,
            "read_bytes": READ_BYTES_MAX, "in_flight": GATEWAY_REQUESTS_PER_CONNECTION_MAX,
        }  # fmt: skip
        return m.Welcome(
            identity.protocol,
            identity.version,
            identity.engine_id,
            identity.shards,
            -1,
            identity.incarnation,
            bounds,
        )

    def _ask_home_shard(self, message: Any) -> Flow:
        """Send a request to the home shard of the name, or to the shard that the home shard names."""
        shard = home_shard(message.topic, self._identity.shards)
        answer = yield self._context.ask(shard, message)
        if _is_redirect(answer):
            answer = yield self._context.ask(answer.shard, message)
        if _is_redirect(answer):
            raise _disagreeing(message.topic)
        if isinstance(answer, m.TopicInfo):
            self._context.cache_topic(answer)
        return answer, None

    def _delete(self, request: GatewayRequest) -> Flow:
        """Delete a topic. The reply lists only those deleted routers whose names the key's prefixes cover."""
        message: m.TopicDelete = request.message
        try:
            answer, _ = yield from self._ask_topic_shard(message)
            assert isinstance(answer, m.TopicDeleted)
        except TopicNotFound:
            return m.TopicDeleted(message.topic, False), None
        finally:
            self._context.evict_topic(message.topic)
        names = covered(request.principal, answer.routers)
        return m.TopicDeleted(answer.topic, answer.deleted, names), None

    def _ask_topic_shard(self, message: Any) -> Flow:
        """Send a request to the shard that owns the topic."""
        if isinstance(message, m.RecordsDelete) and message.seqs:
            raise InvalidRequest("seqs is not allowed here: use before_seq or match", topic=message.topic)
        info = yield ResolveTopic(message.topic)
        try:
            answer = yield self._context.ask(info.shard, message)
        except (TopicNotFound, StaleEpoch):
            self._context.evict_topic(message.topic)
            raise
        return answer, None

    # -- resolving topics -----------------------------------------------------------------------------

    def _resolve(self, request: GatewayRequest, topic: str) -> None:
        info = self._context.cached_topic(topic)
        if info is not None:
            self._advance(request, info)
            return
        waiters = self._resolving.setdefault(topic, [])
        waiters.append(request)
        if len(waiters) == 1:
            effect = self._context.ask(home_shard(topic, self._identity.shards), m.TopicResolve(topic))
            self._resolve_tickets[effect.ticket] = topic, True
            self._effects.append(effect)

    def _resolved(self, event: ev.ShardAnswered) -> None:
        topic, is_home = self._resolve_tickets.pop(event.ticket)
        if is_home and _is_redirect(event.message):
            effect = self._context.ask(event.message.shard, m.TopicResolve(topic))
            self._resolve_tickets[effect.ticket] = topic, False
            self._effects.append(effect)
            return
        error = _disagreeing(topic) if _is_redirect(event.message) else event.error
        if error is None and isinstance(event.message, m.TopicInfo):
            self._context.cache_topic(event.message)
        for request in self._resolving.pop(topic):
            self._advance(request, error or event.message)

    # -- delivery -------------------------------------------------------------------------------------

    def _subscribe(self, request: GatewayRequest) -> Flow:
        """Subscribe to feeds.

        Topics are resolved here, because ids and places from a client are not trusted.
        """
        message: m.Subscribe = request.message
        if len(message.feeds) > FEEDS_PER_MESSAGE_MAX:
            raise InvalidRequest(
                f"a message must have at most {FEEDS_PER_MESSAGE_MAX} feeds, got {len(message.feeds)}",
                found=len(message.feeds), max=FEEDS_PER_MESSAGE_MAX,
            )  # fmt: skip
        if not 1 <= message.credit <= CREDIT_MAX:
            raise InvalidRequest(
                f"credit must be 1 to {CREDIT_MAX}, got {message.credit}", found=message.credit, min=1,
                max=CREDIT_MAX,
            )  # fmt: skip
        feeds: list[tuple[int, m.TopicInfo, int]] = []
        missing: list[int] = []
        for feed in message.feeds:
            if not (0 <= feed.feed < 1 << 32 and 0 <= feed.after <= SEQ_MAX):
                raise InvalidRequest(
                    "feed or after of a feed is out of range", feed=feed.feed, after=feed.after
                )
            info = yield from self._resolve_feed(feed)
            if info is None:
                missing.append(feed.feed)
            else:
                feeds.append((feed.feed, info, feed.after))
        self._context.require_schedulers()
        yield ev.SubscribeFeeds(self._context.next_ticket(), request.client, message, feeds, missing)
        return m.Subscribed(message.subscription, -1, self._identity.incarnation), None

    def _resolve_feed(self, feed: m.Feed) -> Generator[Any, Any, m.TopicInfo | None]:
        """Return the topic of a feed; None if its name is unknown or has another id, or its shard failed.

        For None the client receives a recheck grant and finds out the reason. Its other feeds are not
        affected.
        """
        try:
            info = yield ResolveTopic(feed.topic)
            if info.topic_id != feed.topic_id:
                # The cached topic may be older than the client's.
                self._context.evict_topic(feed.topic)
                info = yield ResolveTopic(feed.topic)
        except TopicNotFound:
            return None
        except NotReady as e:
            if not is_shard_failed(e):
                raise
            return None
        return info if info.topic_id == feed.topic_id else None

    # -- listing --------------------------------------------------------------------------------------

    def _list(self, request: GatewayRequest) -> Flow:
        """Merge the topics of all shards, for every prefix that the key covers."""
        message: m.TopicList = request.message
        size = max(1, min(message.page_size, LIST_PAGE_MAX))
        found: dict[str, m.TopicStateReply] = {}
        is_more = False
        for prefix in visible_prefixes(request.principal, message.prefix):
            for shard in range(self._identity.shards):
                page: m.TopicListReply = yield self._context.ask(
                    shard, m.TopicList(prefix, message.after, size)
                )
                found.update((topic.topic, topic) for topic in page.topics)
                is_more = is_more or page.more
        names = sorted(found)
        return m.TopicListReply([found[name] for name in names[:size]], is_more or len(names) > size), None

    # -- accounting and replies -----------------------------------------------------------------------

    def _hold(self, request: GatewayRequest) -> None:
        self._held[request] = None
        usage = self._per_client.setdefault(request.client, [0, 0])
        usage[0] += 1
        usage[1] += request.bytes
        self._per_key[request.principal.name] = self._per_key.get(request.principal.name, 0) + 1
        self._bytes += request.bytes

    def _release(self, request: GatewayRequest) -> None:
        del self._held[request]
        usage = self._per_client[request.client]
        usage[0] -= 1
        usage[1] -= request.bytes
        if not usage[0]:
            del self._per_client[request.client]
        self._per_key[request.principal.name] -= 1
        if not self._per_key[request.principal.name]:
            del self._per_key[request.principal.name]
        self._bytes -= request.bytes

    def _answer(self, request: GatewayRequest, message: m.Message, attachment: Any) -> None:
        if request in self._disconnected:
            self._disconnected.discard(request)
            return
        self.answered += 1
        self._effects.append(Reply(request.client, request.corr, message, attachment))

    def _refuse(self, client: bytes, corr: int, error: RinglogError) -> None:
        self.refused += 1
        self._effects.append(Reply(client, corr, error_reply(error)))

    def _fail_request(self, client: bytes, corr: int, message: m.Message, error: BaseException) -> None:
        """Refuse a request with Internal and log the unexpected error. The gateway continues.

        Otherwise one client's request could end one incarnation after another, until the supervisor gives up.
        """
        kind = type(message).__name__
        self._refuse(client, corr, Internal("internal error of the gateway: see the engine log", kind=kind))
        self._effects.append(ev.LogRequestFailure(kind, error))

    def _wait_until(self, request: GatewayRequest, deadline_ns: int, ticket: int) -> None:
        request.deadline_ns = deadline_ns
        heapq.heappush(self._deadlines, (deadline_ns, ticket))

    def _is_current(self, deadline_ns: int, ticket: int) -> bool:
        request = self._waiting.get(ticket)
        return request is not None and request.deadline_ns == deadline_ns


def _is_redirect(answer: Any) -> TypeGuard[m.TopicInfo]:
    """Return whether the home shard only named the topic's shard, as after a change of the shard count."""
    return isinstance(answer, m.TopicInfo) and not answer.topic_id


def _disagreeing(topic: str) -> NotReady:
    """Return the error for a second redirect: each shard is asked once."""
    return NotReady("the shards do not agree on the owner of this topic: retry later", topic=topic)
