"""The gateway's shell: sockets, connections to the shards, and files. A table maps effects to short methods.

One pass of the loop receives from every socket, lets the core decide, and performs its effects. No effect
blocks: replies of shards and settled frames arrive as completions, and reads are served from the page cache.
A watched topic is compared with the board when its shard publishes.
"""

from __future__ import annotations

import logging
import select
import traceback
from collections.abc import Callable
from typing import Any

from msgspec import structs

from ringlog import __version__
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.actors.gateway.front_end.sockets import GatewaySockets, Listeners
from ringlog.actors.gateway.front_end.zmq_frontend import require_libzmq
from ringlog.actors.gateway.reads.stored_reads import StoredReads
from ringlog.actors.gateway.reads.subscription_relay import SILENCE_NS, SubscriptionRelay
from ringlog.actors.gateway.reads.topic_watches import TopicWatches
from ringlog.actors.gateway.replies import error_reply
from ringlog.actors.gateway.requests.ring_push import RingPush
from ringlog.board import pressure
from ringlog.board.board import Board
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import GovernorField, ProcessField
from ringlog.board.processes import shard_slot
from ringlog.clock import Clock, SystemClock
from ringlog.config import LimitsConfig
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import ExitCode, Internal, InvalidRequest, NotConnected, RequestTimeout, RinglogError
from ringlog.governor import PressureStep
from ringlog.limits import (
    DRAIN_S_DEFAULT,
    GATEWAY_DRAIN_SHARE,
    GOVERNOR_SAMPLE_MS,
    HEARTBEAT_INTERVAL_MS,
    RING_FRAME_FRACTION,
    ROUTER_SETTLE_MS_MAX,
)
from ringlog.link.delivery import Delivery
from ringlog.link.futures import Pending, resolved
from ringlog.link.keys_file import follow_keys
from ringlog.link.local_links import LocalLinks, cold_unavailable
from ringlog.link.peer import Peer
from ringlog.link.timers import Timers
from ringlog.logs import log_event
from ringlog.signals import StopFlag

log: logging.Logger = logging.getLogger("ringlog.gateway")

REQUESTS_PER_TURN = 256
REQUEST_TIMEOUT_NS = 10_000_000_000
APPEND_TIMEOUT_NS = 30_000_000_000
BACKLOG_WAIT_MS = 5
_TRACEBACK_LINES = 4


class _EpollSet:
    def __init__(self) -> None:
        self.epoll = select.epoll()

    def watch(self, fd: int) -> None:
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        self.epoll.unregister(fd)


class GatewayShell:
    """One incarnation of the gateway."""

    def __init__(
        self, boot: ActorBoot, listeners: Listeners, bounds: LimitsConfig, *, ring_bytes: int,
        schedulers: int = 0,
        is_governed: bool = True, clock: Clock | None = None, drain_s: float = DRAIN_S_DEFAULT,
    ) -> None:  # fmt: skip
        require_libzmq()
        self._boot = boot
        self._drain_s = drain_s * GATEWAY_DRAIN_SHARE
        self._clock = clock or SystemClock()
        self._timers = Timers()
        self._fds = _EpollSet()
        board = Board.open(boot.shm_dir, writable=True)
        self._slot = board.process(boot.slot)
        self._shards = [
            board.process(shard_slot(shard)) for shard in range(boot.shards if is_governed else 0)
        ]
        """Pages of the shards whose governors are obeyed; empty if governors are disabled."""
        self._refusing: frozenset[int] = frozenset()
        self._pressure_poll_ns = 0
        self._throttled_before = self._slot.get(GovernorField.THROTTLED)
        self._key_source = follow_keys(listeners.keys_file)
        identity = GatewayIdentity(
            boot.engine_id, __version__, PROTOCOL, boot.shards, boot.incarnation,
            ring_bytes // RING_FRAME_FRACTION, bounds.max_body_bytes, bounds.max_limit,
            bounds.max_record_bytes, bounds.max_batch_records,
        )  # fmt: skip
        self.core: GatewayCore = GatewayCore(identity, self._key_source.keys.curve)
        self.sockets: GatewaySockets = GatewaySockets(boot, listeners, lambda: self._key_source.keys.curve)
        delivery = Delivery(self)
        self.links: LocalLinks = LocalLinks(
            boot.shm_dir, client_id=boot.name, clock=self._clock, timers=self._timers, fds=self._fds,
            listener=delivery,
        )  # fmt: skip
        self._schedulers = schedulers
        self._subscription_relay = SubscriptionRelay(delivery, lambda client, message, data: self._reply(
            Reply(client, 0, message, data)
        ))  # fmt: skip
        self._silence_poll_ns = 0
        self._events: list[Any] = []
        self._reads = StoredReads(boot, self.links)
        self._watches = TopicWatches(self.links, self._clock, self._reads.marks, self._emit)
        self.exit_code: ExitCode | None = None
        self._heartbeat = Heartbeat(self._slot)
        self._drain_deadline_ns: int | None = None
        """Latest end of the drain, in ns."""
        self._perform: dict[type, Callable[[Any], None]] = {
            Reply: self._reply,
            ev.AskShard: self._ask,
            ev.PushFrames: self._push,
            ev.ReadFiles: lambda effect: self._emit(self._reads.read(effect)),
            ev.ReadCold: self._read_cold,
            ev.FindTime: lambda effect: self._emit(self._reads.find_time(effect)),
            ev.WatchTopic: self._watches.watch,
            ev.UnwatchTopic: self._watches.unwatch,
            ev.SubscribeFeeds: self._subscribe,
            ev.UnsubscribeFeeds: lambda effect: self._subscription_relay.unsubscribe(
                effect.client, effect.number, effect.feeds
            ),
            ev.ReturnGrants: self._return_grants,
            ev.EndChangedSubscriptions: lambda effect: self._subscription_relay.end_changed(effect.keys),
            ev.LogRequestFailure: self._log_failure,
            Stop: self._set_exit_code,
        }

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Connect to the engine, register descriptors, and log that the gateway is ready."""
        boot = self._boot
        self.links.join_engine(
            EngineInfo(
                boot.engine_id, f"{boot.boot_incarnation}", boot.shm_dir, boot.data_dir, boot.shards,
                schedulers=self._schedulers,
            )
        )  # fmt: skip
        stop.call_on_hangup(self._key_source.reload)
        for fd in (stop.fileno(), *self.sockets.filenos):
            self._fds.watch(fd)
        log_event(
            log,
            logging.INFO,
            "ready",
            endpoints=self.sockets.endpoints,
            keys=len(self._key_source.keys.curve),
        )

    def drain(self) -> bool:
        """Complete held requests and accept no more; end after a share of the drain time at the latest."""
        self._drain_deadline_ns = self._clock.monotonic_ns() + round(self._drain_s * 1e9)
        self._events.append(DrainRequested())
        return True

    def do_work(self) -> int:
        """One pass of the loop: collect events, process them, and perform the effects."""
        now_ns = self._clock.monotonic_ns()
        if self._drain_deadline_ns is not None and now_ns >= self._drain_deadline_ns:
            # Waiting clients retry, as after a crash of the gateway. They receive the reply from its
            # successor.
            log_event(log, logging.WARNING, "drain timed out, requests dropped", held=self.core.requests_held)
            self.exit_code = ExitCode.OK
        fired = self._timers.fire(now_ns)
        self.links.pump()
        self.sockets.zap.serve()
        self._poll_keys(now_ns)
        self._poll_pressure(now_ns)
        self._receive()
        events, self._events = self._events, []
        effects = self.core.handle([Tick(self._clock.now_us(), now_ns), *events])
        for effect in effects:
            try:
                self._perform[type(effect)](effect)
            except Exception as e:  # noqa: BLE001  see _contain
                self._contain(effect, e)
        for frontend in self.sockets.frontends:
            if frontend.has_backlog:
                for client in frontend.flush():
                    self._on_disconnected(client)
        self._beat()
        return len(events) + len(effects) + fired + len(self._events)

    def _contain(self, effect: Any, error: Exception) -> None:
        """End the request of an effect that failed unexpectedly. The gateway continues."""
        internal = self._internal_error(type(effect).__name__, error)
        if isinstance(effect, Reply):
            self._reply(Reply(effect.client, effect.corr, error_reply(internal)))
        elif (ticket := getattr(effect, "ticket", 0)) and not isinstance(effect, ev.UnwatchTopic):
            self._events.append(ev.ShardAnswered(ticket, None, internal))

    def _internal_error(self, kind: str, error: BaseException) -> Internal:
        """Log an unexpected error of a request; return the error for its sender."""
        self._log_failure(ev.LogRequestFailure(kind, error))
        return Internal("internal error of the gateway: see the engine log", kind=kind)

    def _error_of(self, pending: Pending[Any], effect: Any) -> RinglogError | None:
        """Return the error of a result that an effect waited for, as its sender gets it; None = success."""
        error = pending.error
        if error is None or isinstance(error, RinglogError):
            return error
        return self._internal_error(type(effect).__name__, error)

    @staticmethod
    def _log_failure(effect: ev.LogRequestFailure) -> None:
        error = effect.error
        where = "".join(traceback.format_exception(error)[-_TRACEBACK_LINES:])
        log_event(
            log, logging.ERROR, "unexpected error in a request", kind=effect.kind, error=repr(error),
            where=where,
        )  # fmt: skip

    def on_close(self) -> None:
        """Close files, connections and sockets."""
        self._reads.close()
        self.links.close()
        self.sockets.close()
        self._fds.epoll.close()

    def _receive(self) -> None:
        for frontend in self.sockets.frontends:
            for request in frontend.receive(REQUESTS_PER_TURN):
                self._slot.add(ProcessField.REQUESTS, 1)
                self._events.append(
                    ev.ClientRequestReceived(
                        request.client, request.user_id, request.envelope.corr, request.envelope.message,
                        request.attachment,
                    )
                )  # fmt: skip

    def idle(self, work: int) -> None:
        """Wait for a descriptor or the next deadline.

        Wake-ups are requested first, and input is checked again after.
        """
        if work:
            return
        if not self.links.arm() or self._events or self.sockets.has_input:
            self.links.disarm()
            return
        # The descriptors are edge-triggered: only this check finds input that arrived since the last pass.
        wait_ms = BACKLOG_WAIT_MS if self.sockets.has_backlog else HEARTBEAT_INTERVAL_MS
        now_ns = self._clock.monotonic_ns()
        for due_ns in (self._timers.next_ns(), self.core.next_deadline_ns()):
            if due_ns is not None:
                wait_ms = min(wait_ms, max((due_ns - now_ns) // 1_000_000 + 1, 0))
        ready = self._fds.epoll.poll(wait_ms / 1000)
        self.links.disarm()
        for fd, _ in ready:
            self.links.on_readable(fd)

    def _beat(self) -> None:
        now_ns = self._clock.monotonic_ns()
        self._heartbeat.beat(now_ns)
        for frontend in self.sockets.frontends:
            frontend.guard(now_ns)
        if now_ns >= self._silence_poll_ns:
            self._silence_poll_ns = now_ns + SILENCE_NS // 4
            self._subscription_relay.forget_silent_clients(now_ns)

    # -- keys -----------------------------------------------------------------------------------------

    def _poll_keys(self, now_ns: int) -> None:
        """Use the keys of a changed keys file, on open and on new connections."""
        keys = self._key_source.poll(now_ns)
        if keys is not None:
            self._events.append(ev.KeysLoaded(keys.curve))

    def _poll_pressure(self, now_ns: int) -> None:
        if now_ns < self._pressure_poll_ns:
            return
        self._pressure_poll_ns = now_ns + GOVERNOR_SAMPLE_MS * 1_000_000
        self._slot.set(GovernorField.THROTTLED, self._throttled_before + self.core.throttled_appends)
        steps = [pressure.read(page, now_ns).step for page in self._shards]
        refusing = frozenset(shard for shard, step in enumerate(steps) if step is PressureStep.REFUSE)
        if refusing != self._refusing:
            self._refusing = refusing
            self._events.append(ev.ShardPressureChanged(refusing))

    # -- effects --------------------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        for frontend in self.sockets.frontends:
            if frontend.owns(effect.client):
                if not frontend.send(effect.client, effect.message, effect.corr, effect.attachment):
                    self._on_disconnected(effect.client)
                return

    def _ask(self, effect: ev.AskShard) -> None:
        is_append = isinstance(effect.message, m.Append)
        deadline_ns = self._clock.monotonic_ns() + (APPEND_TIMEOUT_NS if is_append else REQUEST_TIMEOUT_NS)

        def answered(pending: Pending[Any]) -> None:
            error = self._error_of(pending, effect)
            message: Any = None
            attached = None
            if error is None:
                message, attached = pending.result()
            if attached is not None:  # Frames with the jobs of a claim. No other reply has an attachment.
                message = structs.replace(message, data=bytes(attached))
            self._events.append(ev.ShardAnswered(effect.ticket, message, error))

        if isinstance(effect.message, m.RouterGet):
            deadline_ns += min(max(effect.message.settle_ms, 0), ROUTER_SETTLE_MS_MAX) * 1_000_000
        try:
            if effect.shard == ev.SCHEDULER:
                self._scheduler().request(effect.message, deadline_ns).when_done(answered)
                return
            pending = self.links.request(
                effect.shard, effect.message, deadline_ns, effect.attachment, is_patient=not is_append
            )
        except RinglogError as e:
            self._events.append(ev.ShardAnswered(effect.ticket, None, e))
            return
        pending.when_done(answered)

    def _scheduler(self) -> Peer:
        if not self.links.schedulers:
            raise InvalidRequest("this engine runs no routers: delivery.schedulers is 0, expected >= 1")
        return self.links.scheduler(0)

    def _push(self, effect: ev.PushFrames) -> None:
        deadline_ns = self._clock.monotonic_ns() + APPEND_TIMEOUT_NS

        def done(entries: bytes, error: RinglogError | None) -> None:
            timer.cancel()
            self._events.append(ev.FramesSettled(effect.ticket, entries, error))

        run = RingPush(effect.topic, effect.data, effect.offsets, deadline_ns, done)
        timer = self._timers.call_at(deadline_ns, run.give_up)
        try:
            self.links.submit(effect.shard, run)
        except RinglogError as e:
            run.is_abandoned = True
            done(b"", e)

    def _read_cold(self, effect: ev.ReadCold) -> None:
        """Request the bytes from the relocator: a hanging cold store must not block the gateway."""

        def answered(pending: Pending[Any]) -> None:
            error = self._error_of(pending, effect)
            if isinstance(error, RequestTimeout | NotConnected):
                error = cold_unavailable(error.message)
            data = None if error is not None else pending.result().attachment or b""
            self._events.append(ev.ColdReadCompleted(effect.ticket, data, error))

        deadline_ns = self._clock.monotonic_ns() + REQUEST_TIMEOUT_NS
        self.links.ask_relocator(effect.wanted, deadline_ns).when_done(answered)

    def _emit(self, event: Any) -> None:
        self._events.append(event)

    def _set_exit_code(self, effect: Stop) -> None:
        self.exit_code = ExitCode(effect.code)

    def _on_disconnected(self, client: bytes) -> None:
        self._events.append(ev.ClientDisconnected(client))
        self._subscription_relay.forget_client(client)

    # -- delivery: link.protocol.DeliveryHost ------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """The clock."""
        return self._clock

    @property
    def timers(self) -> Timers:
        """The timers."""
        return self._timers

    def deadline_ns(self) -> int:
        """Return the time in ns at which a request made now times out."""
        return self._clock.monotonic_ns() + REQUEST_TIMEOUT_NS

    def pause(self, seconds: float) -> Pending[None]:
        """Return a Pending that is done after this time."""
        result: Pending[None] = Pending()
        self._timers.call_at(self._clock.monotonic_ns() + round(seconds * 1e9), lambda: result.resolve(None))
        return result

    def wait_connected(self) -> Pending[None]:
        """Return a completed Pending: the gateway is part of the engine."""
        return resolved(None)

    def _subscribe(self, effect: ev.SubscribeFeeds) -> None:
        def followed(done: Pending[Any]) -> None:
            self._events.append(ev.SubscribeCompleted(effect.ticket, self._error_of(done, effect)))

        now_ns = self._clock.monotonic_ns()
        try:
            following = self._subscription_relay.subscribe(
                effect.client, effect.user_id, effect.principal, effect.request, effect.feeds,
                effect.missing_feeds, now_ns,
            )  # fmt: skip
        except RinglogError as e:
            self._events.append(ev.SubscribeCompleted(effect.ticket, e))
            return
        following.when_done(followed)

    def _return_grants(self, effect: ev.ReturnGrants) -> None:
        self._subscription_relay.return_grants(effect.client, effect.rows, self._clock.monotonic_ns())
