"""The shell of the routers: subscribes to sources within the process, reads them, and queries shards.

No call blocks. A slow operation returns a Pending of ringlog.link, whose result is processed in a later pass
of the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from ringlog import stop_points
from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.delivery.feeds import ROUTERS
from ringlog.actors.scheduler.delivery.grants import UNTIL_RECHECK
from ringlog.actors.scheduler.forwarding import forwarding_core
from ringlog.actors.scheduler.forwarding.dead_letters import DeadLetters
from ringlog.actors.scheduler.forwarding.forward_batch import build_forward_batch
from ringlog.actors.scheduler.forwarding.forwarding_core import ForwardingCore, SourceFlowKey
from ringlog.actors.scheduler.forwarding.redrive import DeadLetterRedriver
from ringlog.actors.scheduler.forwarding.router_admin import FoundRouters, RouterAdmin
from ringlog.actors.scheduler.forwarding.router_catch_up import RouterCatchUp
from ringlog.actors.scheduler.forwarding.source_keep_alive import SourceKeepAlive
from ringlog.actors.scheduler.forwarding.sources import REQUEST_TIMEOUT_NS, EngineConnection, SourceReaders
from ringlog.board.processes import scheduler_socket
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages.delivery import GRANT_RETURN_WORDS, GRANT_WORDS
from ringlog.errors import (
    CorruptData,
    DiskError,
    InvalidRequest,
    NotReady,
    RinglogError,
    StaleEpoch,
    TopicNotFound,
    is_shard_failed,
)
from ringlog.limits import (
    CREDIT_DEFAULT,
    LINK_SILENCE_MS,
    LIST_PAGE_MAX,
    RECORD_BYTES_DEFAULT,
    ROUTERS_POLL_S,
)
from ringlog.link.futures import Pending, Steps, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.link.peer import FdSet, Peer
from ringlog.link.timers import Timers
from ringlog.logs import log_event
from ringlog.placement import scheduler_of, shard_of
from ringlog.topic.routers import check_router_facts
from ringlog.topic.tombstone import RECREATED

log: logging.Logger = logging.getLogger("ringlog.scheduler")

ROUTER_REQUESTS = (
    m.RouterCreate, m.RouterGet, m.RouterList, m.RouterDelete, m.NotifyRouterChange, m.RedriveDeadLetters,
    m.RoutesSettle,
)  # fmt: skip
LOAD_RETRY_S = 0.25
_SILENCE_NS = LINK_SILENCE_MS * 1_000_000 // 3
_NS_PER_MS = 1_000_000


class Forwarder:
    """The routers, dead letters and redrives of one scheduler."""

    def __init__(
        self, boot: ActorBoot, number: int, *, schedulers: int, routers_max: int, clock: Clock, fds: FdSet,
        reply: Callable[[bytes, m.Message, int], object], record_bytes: int = RECORD_BYTES_DEFAULT,
    ) -> None:  # fmt: skip
        self._boot, self._number, self._schedulers = boot, number, schedulers
        self.clock: Clock = clock
        self._reply = reply
        self._fds = fds
        self._context: zmq.Context[Any] = zmq.Context()
        self._peers: dict[int, Peer] = {}
        self.timers: Timers = Timers()
        self.links: LocalLinks = LocalLinks(
            boot.shm_dir, client_id=boot.name, clock=clock, timers=self.timers, fds=fds
        )
        self.connection: EngineConnection = EngineConnection(self.links, clock, self.timers)
        self.forwarding: ForwardingCore = ForwardingCore(boot.shards)
        self._sources = SourceReaders(self.connection, clock)
        self._dead_letters = DeadLetters(self.links, self.connection, clock, record_bytes)
        self._redriver = DeadLetterRedriver(self.links, self.connection, clock, record_bytes)
        self.router_admin: RouterAdmin = RouterAdmin(self, boot.incarnation, routers_max)
        self._catch_up = RouterCatchUp(self)
        self._source_locations: dict[SourceFlowKey, m.TopicInfo] = {}
        self._source_keep_alive = SourceKeepAlive(self.connection, self.forwarding.flows.__contains__)
        self._unloaded_shards = set(range(boot.shards))
        """Shards whose routers were not loaded yet. A shard that was given up is not among them."""
        self._events: list[Any] = []
        self._feeds: dict[int, SourceFlowKey] = {}
        self._feed_of: dict[SourceFlowKey, int] = {}
        self._feeds_made = 0
        self._locating: set[SourceFlowKey] = set()
        self._last_sent_ns = 0
        self._perform: dict[type, Callable[[Any], None]] = {
            forwarding_core.FollowSource: self._follow,
            forwarding_core.UnfollowSource: self._unfollow,
            forwarding_core.ReturnSourceGrant: self._return_grant,
            forwarding_core.ReadForwardBatch: self._read,
            forwarding_core.SendRoute: self._send,
        }

    # -- life -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Load the routers of all shards and continue them at their cursors.

        Scheduler 0 also moves dead letters.
        """
        boot = self._boot
        self.links.join_engine(
            EngineInfo(
                boot.engine_id, f"{boot.boot_incarnation}", boot.shm_dir, boot.data_dir, boot.shards,
                schedulers=self._schedulers,
            )
        )  # fmt: skip
        for shard in range(boot.shards):
            run_steps(self._load_shard(shard))
        if not self._number:
            self._dead_letters.begin(boot.shards)

    def close(self) -> None:
        """Close all files and connections."""
        self._sources.close()
        self._dead_letters.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._context.term()
        self.links.close()

    def run_turn(self, now_ns: int) -> list[Any]:
        """Process timers and replies; return events for the scheduler's core."""
        self.timers.fire(now_ns)
        self.links.pump()
        self._pump_peers()
        self.forwarding.tick(now_ns)
        self.perform_effects()
        self._catch_up.resolve_waiters()
        if self._feeds and now_ns - self._last_sent_ns >= _SILENCE_NS:
            self._return_grants([])
        events, self._events = self._events, []
        return events

    def perform_effects(self) -> None:
        """Perform effects of the forwarding core until none is left."""
        while self.forwarding.effects:
            effects, self.forwarding.effects = self.forwarding.effects, []
            for effect in effects:
                self._perform[type(effect)](effect)

    def wait_ms(self, now_ns: int, most_ms: int) -> int:
        """Return how long the process may sleep in ms, at most `most_ms`; 0 = not at all."""
        # A send to another scheduler can consume the wake-up of its reply. Poll its socket before each sleep.
        if not self.links.arm() or self._pump_peers() or self._events or self.forwarding.effects:
            return 0
        for due_ns in (self.timers.next_ns(), self.forwarding.next_deadline_ns()):
            if due_ns is not None:
                most_ms = min(most_ms, max(-(-(due_ns - now_ns) // _NS_PER_MS), 0))
        return most_ms

    def on_wakeup(self, ready: list[int]) -> None:
        """Process descriptors that became readable during the sleep."""
        self.links.disarm()
        for fd in ready:
            self.links.on_readable(fd)
        self._pump_peers()

    def _pump_peers(self) -> bool:
        """Process replies of other schedulers; return True if there was one."""
        has_signals = False
        # A copy of the values: a reply may lead to the first request to another scheduler.
        for peer in list(self._peers.values()):
            has_signals |= peer.pump()
        return has_signals

    # -- requests ---------------------------------------------------------------------------------------

    def handle_request(self, link: bytes, corr: int, message: m.Message) -> None:
        """Process a request about routers or dead letters. Most replies follow in a later pass."""
        if isinstance(message, m.NotifyRouterChange):
            facts = message.facts
            try:
                check_router_facts(facts.name, facts.source, facts.dest, facts.flags, facts.filter)
            except InvalidRequest as e:
                self._reply(link, _refusal(e), corr)
                return
            self.apply_router_change(message)
            self._reply(link, m.RouterChangeNotified(message.facts.router), corr)
            return

        def done(pending: Pending[m.Message]) -> None:
            error = pending.error
            if error is None:
                self._reply(link, pending.result(), corr)
            else:
                self._reply(link, _refusal(error), corr)

        if isinstance(message, m.RoutesSettle):
            self._catch_up.submit(message).when_done(done)
        elif self._number:
            refused = InvalidRequest(
                "only scheduler 0 handles this kind of request", kind=type(message).__name__
            )
            self._reply(link, _refusal(refused), corr)
        elif isinstance(message, m.RedriveDeadLetters):
            run_steps(self._redriver.redrive(message)).when_done(done)
        else:
            self.router_admin.submit(message).when_done(done)

    def apply_router_change(self, announcement: m.NotifyRouterChange) -> None:
        """Apply a created, changed or deleted router if this scheduler runs it."""
        if scheduler_of(announcement.facts.source_id, self._schedulers) != self._number:
            return
        if announcement.is_gone:
            self.forwarding.drop_router(announcement.facts.router)
        else:
            self.forwarding.put_router(announcement.facts)

    def announce_router(self, facts: m.RouterFacts, *, is_gone: bool = False) -> Steps[None]:
        """Announce a router to the scheduler of its source and wait for the confirmation.

        A client that created a router relies on this. A scheduler that starts meanwhile loads its routers
        from the shards. Raises NotReady if the scheduler does not reply.
        """
        number, announcement = (
            scheduler_of(facts.source_id, self._schedulers),
            m.NotifyRouterChange(facts, is_gone),
        )
        if number == self._number:
            self.apply_router_change(announcement)
            return
        try:
            yield self.scheduler_peer(number).request(
                announcement, self.clock.monotonic_ns() + REQUEST_TIMEOUT_NS
            )
        except RinglogError as e:
            raise NotReady(
                "the scheduler of the router does not respond, retry later", scheduler=number, cause=str(e)
            ) from None

    @property
    def other_schedulers(self) -> list[int]:
        """Numbers of the other schedulers."""
        return [number for number in range(self._schedulers) if number != self._number]

    def source_location(self, key: SourceFlowKey) -> m.TopicInfo | None:
        """Return the last known place of a source's slot, or None."""
        return self._source_locations.get(key)

    def scheduler_peer(self, number: int) -> Peer:
        """Return the connection to another scheduler; open it if necessary."""
        peer = self._peers.get(number)
        if peer is None:
            peer = self._peers[number] = Peer(
                f"scheduler {number}", context=self._context, timers=self.timers, clock=self.clock,
                fds=self._fds,
            )  # fmt: skip
            peer.set_endpoint(scheduler_socket(self._boot.shm_dir, number))
        return peer

    @property
    def is_loaded(self) -> bool:
        """Whether the routers of all shards are loaded, except of those that were given up."""
        return not self._unloaded_shards

    def load_routers(self) -> Steps[FoundRouters]:
        """Return the current routers of all shards. Raises the error of a shard that was not given up."""
        found: list[m.RouterFacts] = []
        error: RinglogError | None = None
        for shard in range(self._boot.shards):
            try:
                found += yield from self._routers_of(shard)
            except NotReady as e:
                if not is_shard_failed(e):
                    raise
                error = e
        return FoundRouters(found, error)

    def _routers_of(self, shard: int) -> Steps[list[m.RouterFacts]]:
        found: list[m.RouterFacts] = []
        after, has_more = 0, True
        while has_more:
            page: m.ShardRoutersReply = yield from self.connection.ask(
                shard, m.ListShardRouters(after, LIST_PAGE_MAX)
            )
            found += page.routers
            has_more = page.more and bool(page.routers)
            after = page.routers[-1].router if page.routers else 0
        return found

    def _load_shard(self, shard: int) -> Steps[None]:
        """Load a shard's routers at the start, and then every ROUTERS_POLL_S if an announcement was lost.

        A shard that does not reply delays only routers into its own topics.
        """
        while True:
            try:
                found = yield from self._routers_of(shard)
            except RinglogError as e:
                log_event(
                    log, logging.WARNING, "routers not loaded, will retry", shard=shard, reason=str(e)
                )  # fmt: skip
                if is_shard_failed(e):
                    self._on_shard_loaded(shard)
                yield self._pause_after(e)
                continue
            for facts in found:
                # Skip known routers: a later announcement may be newer than this reply.
                if not self.forwarding.has_router(facts.router):
                    self.apply_router_change(m.NotifyRouterChange(facts))
            self._on_shard_loaded(shard)
            yield self.connection.pause(ROUTERS_POLL_S)

    def _on_shard_loaded(self, shard: int) -> None:
        if shard in self._unloaded_shards:
            self._unloaded_shards.discard(shard)
            if self.is_loaded:
                log_event(
                    log, logging.INFO, "routers", routers=self.forwarding.routers, scheduler=self._number
                )

    def _pause_after(self, error: RinglogError) -> Pending[None]:
        """Return the pause before a request to a shard is repeated.

        It is long if the shard was given up: that lasts until the engine restarts.
        """
        return self.connection.pause(ROUTERS_POLL_S if is_shard_failed(error) else LOAD_RETRY_S)

    # -- subscriptions to sources -----------------------------------------------------------------------

    def handle_core_message(self, effect: ev.SendToLink) -> None:
        """Process a message of the scheduler's core: grants, or the loss of a subscription."""
        if isinstance(effect.message, m.Grants):
            for _, feed, until, *_ in (
                np.frombuffer(effect.rows, dtype=np.uint64).reshape(-1, GRANT_WORDS).tolist()
            ):
                key = self._feeds.get(feed)
                flow = self.forwarding.flows.get(key) if key is not None else None
                if key is None or flow is None:
                    continue
                if until == UNTIL_RECHECK:
                    # Returned at once: all sources share the credit, and to locate this one can take long.
                    self._return_grant(forwarding_core.ReturnSourceGrant(key, flow.until))
                    run_steps(self._locate_source(key))
                else:
                    self.forwarding.grant_received(key, until)
        elif isinstance(effect.message, m.ErrorReply | m.SubscriptionsLost):
            log_event(
                log, logging.WARNING, "cannot subscribe to a router source, will retry",
                answer=repr(effect.message),
            )  # fmt: skip
            self.timers.call_at(self.clock.monotonic_ns() + 1_000 * _NS_PER_MS, self._follow_all)

    def _follow_all(self) -> None:
        for key, flow in list(self.forwarding.flows.items()):
            self._follow(forwarding_core.FollowSource(key, flow.source, flow.until))

    def _follow(self, effect: forwarding_core.FollowSource) -> None:
        self._last_sent_ns = self._last_sent_ns or self.clock.monotonic_ns()
        if effect.key not in self._feed_of:
            self._feeds_made += 1
            self._feeds[self._feeds_made] = effect.key
            self._feed_of[effect.key] = self._feeds_made
        run_steps(self._locate_source(effect.key, effect.after))

    def _unfollow(self, effect: forwarding_core.UnfollowSource) -> None:
        feed = self._feed_of.pop(effect.key, None)
        self._sources.close_reader(effect.key)
        self._source_locations.pop(effect.key, None)
        if feed is not None:
            del self._feeds[feed]
            self._send_to_core(m.Unsubscribe(int(effect.key.is_strong), [feed]))

    def _return_grant(self, effect: forwarding_core.ReturnSourceGrant) -> None:
        feed = self._feed_of.get(effect.key)
        if feed is not None:
            self._return_grants([(int(effect.key.is_strong), feed, effect.after, 0)])

    def _return_grants(self, rows: list[tuple[int, int, int, int]]) -> None:
        data = bytearray(np.array(rows, dtype=np.uint64).reshape(-1, GRANT_RETURN_WORDS).tobytes())
        self._last_sent_ns = self.clock.monotonic_ns()
        self._send_to_core(m.GrantsReturned(len(rows)), data)

    def _send_to_core(self, message: m.Message, data: bytearray | None = None) -> None:
        self._events.append(ev.LinkRequestReceived(ROUTERS, 0, message, data))

    def _locate_source(self, key: SourceFlowKey, after: int | None = None) -> Steps[None]:
        """Find the slot of a source and subscribe to it. If the source was deleted, delete its routers."""
        if key in self._locating:
            return
        self._locating.add(key)
        try:
            while (flow := self.forwarding.flows.get(key)) is not None:
                try:
                    info = yield self.connection.for_topic(key.source_id).resolve(flow.source)
                except TopicNotFound:
                    self._on_source_deleted(key)
                    return
                except RinglogError as e:
                    log_event(
                        log, logging.WARNING, "cannot resolve a router source, will retry",
                        source=flow.source, reason=str(e),
                    )  # fmt: skip
                    yield self._pause_after(e)
                    continue
                feed = self._feed_of.get(key)
                if feed is None:
                    return
                self._source_locations[key] = info
                self._source_keep_alive.keep_alive(key, info)
                at = flow.until if after is None else after
                feed_request = m.Feed(feed, flow.source, info.topic_id, info.shard, info.slot, at)
                self._send_to_core(
                    m.Subscribe(int(key.is_strong), [feed_request], CREDIT_DEFAULT, strong=key.is_strong)
                )
                return
        finally:
            self._locating.discard(key)

    def _on_source_deleted(self, key: SourceFlowKey) -> None:
        flow = self.forwarding.flows.get(key)
        for flow_router in list(flow.routers.values()) if flow is not None else ():
            log_event(log, logging.INFO, "router deleted with its source", router=flow_router.facts.name)
            self.forwarding.drop_router(flow_router.number)
            run_steps(self.drop_router(flow_router.facts))

    def drop_router(self, facts: m.RouterFacts) -> Steps[bool]:
        """Delete a router at its shard; return False if the shard has none.

        Retried while the shard restarts.
        """
        shard = shard_of(facts.dest_id, self._boot.shards)
        reply: m.RouterDropped = yield from self.connection.ask(
            shard, m.RouterDrop(facts.dest_id, facts.router)
        )
        return reply.dropped

    # -- passes -----------------------------------------------------------------------------------------

    def _read(self, request: forwarding_core.ReadForwardBatch) -> None:
        def done(pending: Pending[forwarding_core.ForwardBatch]) -> None:
            error = pending.error
            if isinstance(error, TopicNotFound | StaleEpoch):
                run_steps(self._locate_source(request.key))
            elif error is not None:
                level = logging.ERROR if isinstance(error, CorruptData | DiskError) else logging.WARNING
                log_event(
                    log, level, "cannot read a router source, will retry", source=request.source,
                    reason=str(error),
                )  # fmt: skip
            self.forwarding.batch_read(request, None if error is not None else pending.result())

        run_steps(self._read_batch(request)).when_done(done)

    def _read_batch(self, request: forwarding_core.ReadForwardBatch) -> Steps[forwarding_core.ForwardBatch]:
        fetched = yield from self._sources.read(request)
        stop_points.hit("route_after_read")
        if fetched.gap is not None and fetched.gap.reason == RECREATED:
            raise TopicNotFound("no such topic", topic=request.source)
        return build_forward_batch(request, fetched)

    def _send(self, effect: forwarding_core.SendRoute) -> None:
        attached = bytearray().join(effect.frames) if effect.frames else None
        deadline_ns = self.clock.monotonic_ns() + REQUEST_TIMEOUT_NS

        def done(pending: Pending[Any]) -> None:
            rows = None if pending.error is not None else pending.result().message.rows
            stop_points.hit("route_after_answer")
            if pending.error is not None:
                log_event(
                    log,
                    logging.WARNING,
                    "forward request failed, will retry",
                    shard=effect.shard,
                    reason=str(pending.error),
                )
            self.forwarding.route_answered(effect.message, rows)

        reply = self.links.request(effect.shard, effect.message, deadline_ns, attached)
        stop_points.hit("route_after_send")
        reply.when_done(done)


def _refusal(error: BaseException) -> m.ErrorReply:
    if not isinstance(error, RinglogError):
        return m.ErrorReply(
            13, "unexpected error in a router or dead-letter request", {"reason": repr(error)}
        )
    status = int(getattr(error, "status", 14))
    return m.ErrorReply(status, error.message, error.detail, error.outcome)
