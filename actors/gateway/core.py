"""The gateway's decisions: which requests are allowed, and how each one gets its reply. Pure.

Checks are made in this order: credentials, permissions, limits, and then the fields of the request. A request
that passes becomes a *flow*. A flow is a generator: it yields one effect at a time, is resumed with the
result of the effect, and returns the reply. A waiting flow occupies no thread, and a flow that waits for
records blocks no write.

Flows of appends are in appends.py, reads in reads.py, claims in jobs.py, groups in group_requests.py, routers
in router_requests.py, feeds in feed_requests.py, and all others in topic_requests.py. Their common parts are
in flows.py. Held requests and their limits are in held_requests.py.

Invariants (docs/reference/invariants.md):

- No request reaches a shard before `authorise` has accepted it (G1). A change of the keys checks held
  requests for records again.
- A client's appends to one topic reach the shard in the order of sending (G2). Producer numbers must
  arrive in ascending order: a shard takes an older number for a repeat.
- Frames are forwarded unchanged, under the client's own producer numbers, and only appends of the named
  topic (G3). So the shard recognises a retry after any failure.
- Every request gets at most one reply. A request beyond a limit and an internal error also get a reply (G4).
- Held requests never exceed the limits for one connection, for one key, and in total (G5).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.access.key_ring import LOCAL_ID, KeyRing
from ringlog.access.keys import OWNER, Principal, authorise
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import AcquireAppendLane, FlowContext, GatewayRequest, ResolveTopic
from ringlog.actors.gateway.front_end.held_requests import HeldRequests
from ringlog.actors.gateway.reads.feed_requests import FeedFlows
from ringlog.actors.gateway.reads.reads import ReadFlows
from ringlog.actors.gateway.replies import error_reply
from ringlog.actors.gateway.requests.append_admission import AppendAdmission, Flow
from ringlog.actors.gateway.requests.appends import AppendFlows
from ringlog.actors.gateway.requests.group_requests import GroupFlows
from ringlog.actors.gateway.requests.jobs import JobFlows
from ringlog.actors.gateway.requests.router_requests import RouterRequestFlows
from ringlog.actors.gateway.requests.topic_requests import TopicRequestFlows, TopicResolver
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.grant_rows import grant_return_rows
from ringlog.errors import ExitCode, Internal, InvalidRequest, Refused, RinglogError, ShuttingDown
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    FRAME_BYTES_MAX,
    GATEWAY_REQUESTS_PER_CONNECTION_MAX,
    READ_BYTES_MAX,
    READ_LIMIT_MAX,
    RECORD_BYTES_DEFAULT,
    REQUEST_BYTES_MAX,
)

_OF_RECORDS = (m.Read, m.Subscribe, m.Claim, m.Steal)
"""Requests that hand out records, now or later. A change of the keys checks those that are held again.
Writes that were accepted go on: they may be applied already, and a refusal would hide that."""
_OF_SCHEDULERS = (
    m.Subscribe, m.RouterCreate, m.RouterGet, m.RouterList, m.RouterDelete, m.RoutesSettle,
    m.RedriveDeadLetters,
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
    record_bytes_max: int = RECORD_BYTES_DEFAULT
    """Largest payload and metadata of a record in bytes, which the shards check."""
    batch_records_max: int = BATCH_RECORDS_MAX
    """Largest number of records in one write, which the shards check."""


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
        self._held = HeldRequests()
        self._resolver = TopicResolver(self._context, identity.shards)
        self._topics = TopicRequestFlows(self._context, identity.shards)
        self._feeds = FeedFlows(self._context, identity.incarnation)
        self._intake = AppendAdmission()
        self._appends = AppendFlows(
            self._context, self._intake, identity.shards, identity.ring_frame_bytes_max, self._advance,
            frames_bytes_max(identity.body_bytes_max),
        )  # fmt: skip
        self._reads = ReadFlows(self._context, self._wait_until, identity.read_limit)
        self._routing = RouterRequestFlows(
            self._context.ask_scheduler,
            self._context.evict_topic,
            self._topics.ask_home_shard,
            self._topics.ask_topic_shard,
        )
        self._groups = GroupFlows(self._topics.ask_home_shard, self._topics.ask_topic_shard)
        self._jobs = JobFlows(
            self._topics.ask_topic_shard,
            lambda read: self._reads.locate(read, read.after, read.epoch),
            lambda read, located, plan: self._reads.read_files(
                read, located, plan, self._context.now_us, min(read.limit, READ_LIMIT_MAX)
            ),
        )
        self._disconnected: set[GatewayRequest] = set()
        self.answered: int = 0
        self.refused: int = 0

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
        self._held.check()
        loads = [self._intake.in_flight(shard) for shard in range(self._identity.shards)]
        assert sum(appends for appends, _ in loads) <= len(self._held)
        assert sum(size for _, size in loads) <= self._held.bytes
        self._appends.check()

    # -- events ---------------------------------------------------------------------------------------

    def _handle_event(self, event: Any) -> None:
        match event:
            case Tick():
                self._tick(event)
            case ev.ClientRequestReceived():
                self._request_received(event)
            case ev.ShardAnswered() if self._resolver.expects(event.ticket):
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
                self._change_keys(event.keys)
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
        principal = self._principal(received.user_id)
        try:
            authorise(principal, received.message)
            assert principal is not None
            if isinstance(received.message, m.GrantsReturned):
                rows = grant_return_rows(received.attachment)
                self._effects.append(ev.ReturnGrants(received.client, rows))
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
            if self._context.is_draining:
                raise ShuttingDown("the engine is stopping")
            self._held.require_room(received, principal)
        except Refused as e:
            self._refuse(received.client, received.corr, e)
            return
        except Exception as e:  # noqa: BLE001  see _fail_request
            self._fail_request(received.client, received.corr, received.message, e)
            return
        request = GatewayRequest(
            received.client, received.corr, received.message, received.user_id, principal, received.attachment
        )
        self._held.add(request)
        request.flow = self._flow(request)
        self._advance(request, None)

    def _client_disconnected(self, client: bytes) -> None:
        """Forget a disconnected client. Requests that were sent to a shard continue and may be applied."""
        for ticket, request in list(self._waiting.items()):
            if request.client == client and request.deadline_ns:
                self._effects.append(ev.UnwatchTopic(ticket))
                del self._waiting[ticket]
                self._held.release(request)
        self._disconnected.update(self._held.of_client(client))

    def _principal(self, user_id: str) -> Principal | None:
        return OWNER if user_id == LOCAL_ID else self._keys.find(user_id)

    def _change_keys(self, keys: KeyRing) -> None:
        """Use these keys. A request for records that they no longer permit ends with the refusal."""
        self._keys = keys
        for request in self._held:
            if isinstance(request.message, _OF_RECORDS):
                try:
                    authorise(self._principal(request.user_id), request.message)
                    request.refusal = None
                except Refused as e:
                    request.refusal = e
        for ticket, request in list(self._waiting.items()):
            if request.refusal is not None and request.deadline_ns:
                self._effects.append(ev.UnwatchTopic(ticket))
                self._resume(ticket, None)
        self._effects.append(ev.EndChangedSubscriptions(keys))

    def _drain(self) -> None:
        self._context.is_draining = True
        for ticket, request in list(self._waiting.items()):
            if request.deadline_ns:
                self._effects.append(ev.UnwatchTopic(ticket))
                self._resume(ticket, False)
            elif isinstance(request.message, _OF_SCHEDULERS) or request.is_cold_read:
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
        if request.refusal is not None and isinstance(request.message, m.Read | m.Subscribe):
            value = request.refusal  # A claim must first return its leases.
        try:
            if isinstance(value, RinglogError):
                effect = request.flow.throw(value)
            else:
                effect = request.flow.send(value)
        except StopIteration as end:
            self._held.release(request)
            self._answer(request, *end.value)
            return
        except RinglogError as e:
            self._held.release(request)
            if request not in self._disconnected:
                self._refuse(request.client, request.corr, e)
            self._disconnected.discard(request)
            return
        except Exception as e:  # noqa: BLE001  see _fail_request
            self._held.release(request)
            self._disconnected.discard(request)
            self._fail_request(request.client, request.corr, request.message, e)
            return
        match effect:
            case ResolveTopic():
                self._resolve(request, effect.topic)
            case AcquireAppendLane():
                self._appends.start_or_park(request, by_socket=effect.by_socket)
            case _:
                request.is_cold_read = isinstance(effect, ev.ReadCold)
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
                return self._topics.list_topics(request)
            case m.TopicPut() | m.TopicResolve():
                return self._topics.ask_home_shard(request.message)
            case m.Subscribe():
                return self._feeds.subscribe(request)
            case m.RouterCreate() | m.RouterGet() | m.RouterDelete():
                return self._routing.handle_one(request.message, request.principal)
            case m.RouterList():
                return self._routing.list_page(request.message, request.principal)
            case m.RoutesSettle():
                return self._routing.settle_routes(request.message)
            case m.TopicDelete():
                return self._topics.delete(request)
            case m.RedriveDeadLetters():
                return self._routing.redrive(request.message, request.principal)
            case m.GroupOpen():
                return self._groups.open_group(request.message, request.principal)
            case m.GroupSeek():
                return self._groups.seek_group(request.message, request.principal)
            case m.Claim() | m.Steal():
                return self._jobs.claim(request)
            case _:
                return self._topics.ask_topic_shard(request.message)

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
            "record_bytes": identity.record_bytes_max, "batch_records": identity.batch_records_max,
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

    # -- resolving topics -----------------------------------------------------------------------------

    def _resolve(self, request: GatewayRequest, topic: str) -> None:
        info = self._context.cached_topic(topic)
        if info is not None:
            self._advance(request, info)
        elif (effect := self._resolver.wait(request, topic)) is not None:
            self._effects.append(effect)

    def _resolved(self, event: ev.ShardAnswered) -> None:
        effect = self._resolver.redirect(event)
        if effect is not None:
            self._effects.append(effect)
            return
        requests, value = self._resolver.finish(event)
        for request in requests:
            self._advance(request, value)

    # -- replies ----------------------------------------------------------------------------------

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
