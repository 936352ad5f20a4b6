"""Session: the state of one client, without waiting and without locks.

The synchronous and the asyncio client are shells around a session. A shell waits for the session's
descriptors and its next timer, calls `turn`, and returns the results of Pendings. All other behaviour of a
client is here, once. Implements client.connection.read_connection.Connection.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ringlog.board.topics import TopicFacts
from ringlog.client.connection.scheduler_requests import SchedulerRequests
from ringlog.client.connection.topic_cache import (
    RESOLVE_ATTEMPTS_MAX,
    TopicCache,
    no_agreement_error,
)
from ringlog.client.read.pages import Cursor
from ringlog.client.requests.results import ClientEvent, ClientHealth, ClientState
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle, TopicKeepAlive
from ringlog.client.write.batch import Shipment
from ringlog.client.write.stream import Stream
from ringlog.clock import Clock, SystemClock
from ringlog.descriptors import explain_unreachable
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import (
    ColdRead,
    EngineStatus,
    EngineStatusReply,
    Hello,
    Locate,
    Located,
    Message,
    Read,
    ReadReply,
    SeekTime,
    SeekTimeReply,
    TopicInfo,
    TopicState,
    TopicStateReply,
    Welcome,
)  # fmt: skip
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import (
    NotConnected,
    Outcome,
    RequestTimeout,
    RinglogError,
    ShardsChanged,
    TopicNotFound,
)
from ringlog.link.address import Address
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.delivery import Delivery
from ringlog.link.futures import Pending, Steps, first_result, run_steps
from ringlog.link.gateway_links import GatewayLinks, curve_of
from ringlog.link.grant_returns import RETURN_DELAY_BUSY_NS
from ringlog.link.local_links import LocalLinks, cold_unavailable
from ringlog.link.peer import MS, FdSet
from ringlog.link.peer_request import PeerReply
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.link.timers import Timers
from ringlog.logs import log_event
from ringlog.storage.log_map import LogMap

log: logging.Logger = logging.getLogger("ringlog.client")

EVENTS_MAX = 256
BACKUP_S = 0.1
"""Longest sleep in seconds with frames in flight. A lost wake-up costs this delay."""


class Session:
    """Connection and caches of one client. Not thread-safe."""

    def __init__(
        self,
        address: Address,
        *,
        client_id: str,
        timeout_ms: int,
        fds: FdSet,
        transport: Transport | Literal["auto"],
        secret_key: str = "",
        reconnect: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.address = address
        self.client_id = client_id
        self.timeout_ms = timeout_ms
        self.clock: Clock = clock or SystemClock()
        self.timers: Timers = Timers()
        self.streams: set[Stream] = set()
        self.producer_cores: set[Any] = set()
        """Open producers (ProducerCore)."""
        self.cancelling_claims: set[Pending[PeerReply]] = set()
        """Claims whose cancellation is in flight. Closing the client waits until the shards have handled
        them."""
        self.events: deque[ClientEvent] = deque(maxlen=EVENTS_MAX)
        self.retries = 0
        self.log_map: LogMap = LogMap()
        """Cache of the positions of topics in the log, shared by the client's readers."""
        self.delivery: Delivery = Delivery(self, RETURN_DELAY_BUSY_NS)
        self.topics: TopicCache = TopicCache(self)
        self.schedulers: SchedulerRequests = SchedulerRequests(self)
        self.topic_keep_alive: TopicKeepAlive = TopicKeepAlive(self)
        self._state = ClientState.CONNECTING
        self._state_since_us = self.clock.now_us()
        self._is_closed = False
        self._reconnects = reconnect
        self._ended: NotConnected | None = None
        """Error of every later call. Set if the engine went away and the client does not reconnect."""
        self._fds, self._secret_key = fds, secret_key
        self.links: LocalLinks | GatewayLinks
        if transport in {"auto", "ring"}:
            self.links = LocalLinks(
                address.run_dir, client_id=client_id, clock=self.clock, timers=self.timers, fds=fds,
                on_displaced=self._displaced, on_change=self._links_changed, listener=self.delivery,
                on_shm_unreachable=self._fall_back_to_gateway if transport == "auto" else None,
            )  # fmt: skip
        else:
            self.links = self._gateway_links()
        self.is_transport_known: bool = transport != "auto"
        """True once the transport is final: with `auto`, after the first connection to an engine."""

    def _gateway_links(self) -> GatewayLinks:
        address = self.address
        return GatewayLinks(
            address, clock=self.clock, timers=self.timers, fds=self._fds,
            curve=None if address.is_local else curve_of(address.server_key, self._secret_key),
            on_change=self._links_changed, listener=self.delivery,
        )  # fmt: skip

    def _fall_back_to_gateway(self, engine: EngineInfo) -> None:
        """Use the engine's socket from now on: this process does not have the engine's shared memory."""
        log_event(
            log, logging.WARNING, "shared memory of the engine is not available, using its socket",
            shm_dir=engine.shm_dir, socket=engine.gateway_ipc,
        )  # fmt: skip
        before, self.links = self.links, self._gateway_links()
        waiting = before.connect()
        before.close()
        self.links.connect().when_done(
            lambda done: waiting.resolve(None) if done.error is None else waiting.fail(done.error)
        )

    # -- for the shell --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if frames, requests or timers are open."""
        return self.timers.next_ns() is not None

    def turn(self, ready: Iterable[int] = ()) -> bool:
        """Handle readable descriptors, rings and due timers. Returns True if anything happened."""
        for fd in ready:
            self.links.on_readable(fd)
        happened = self.links.pump()
        next_ns = self.timers.next_ns()
        if next_ns is not None and next_ns <= self.clock.monotonic_ns():
            happened |= self.timers.fire(self.clock.monotonic_ns()) > 0
        return happened

    def sleep_s(self) -> float:
        """Return how long the shell may sleep, in seconds, after `links.arm()` reported that no data is
        ready."""
        next_ns = self.timers.next_ns()
        if next_ns is None:
            return BACKUP_S
        return min(BACKUP_S, max(0.0, (next_ns - self.clock.monotonic_ns()) / 1e9))

    # -- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """State of the connection to the engine."""
        return self._state

    def health(self) -> ClientHealth:
        """Return a snapshot of the connection for a liveness check."""
        facts = self.links.stats
        age = (self.clock.monotonic_ns() - facts.last_heard_ns) / 1e9 if facts.last_heard_ns else None
        engine = self.links.engine.engine_id if self.transport == "ring" and self.links.generation else ""  # type: ignore[union-attr]
        return ClientHealth(
            self._state, self._state_since_us, self.transport, engine, self.links.generation, age,
            facts.reconnections, facts.frames_resent, facts.requests_resent, self.retries,
            sum(stream.pending_records for stream in self.streams),
            sum(stream.pending_bytes for stream in self.streams),
        )  # fmt: skip

    def record_event(self, kind: str, **detail: Any) -> None:
        """Add a connection event."""
        self.events.append(ClientEvent(self.clock.now_us(), kind, detail))

    def _links_changed(self) -> None:
        generation, before = self.links.generation, self.topics.generation
        if generation != before:
            if before and self.transport == "ring":
                self.record_event("engine_restarted", starts_seen=generation)
            self.topics.begin_generation(generation)
        self.is_transport_known |= self.links.is_ready
        if self.links.is_ready and self._state is not ClientState.READY:
            self.record_event("reconnected" if self._state is ClientState.RECONNECTING else "connected")
            self._set_state(ClientState.READY)
        elif not self.links.is_ready and self._state is ClientState.READY:
            self.record_event("disconnected")
            self._set_state(ClientState.RECONNECTING)
            if not self._reconnects:
                # Not from here: the caller is in the middle of the links' own work.
                self.timers.call_at(self.clock.monotonic_ns(), self._end_for_good)

    def _set_state(self, state: ClientState) -> None:
        self._state = state
        self._state_since_us = self.clock.now_us()

    # -- requests -------------------------------------------------------------------------------------

    def deadline_ns(self, wait_ms: int = 0) -> int:
        """Return the deadline of a request that starts now, on the monotonic clock.

        `wait_ms`: time for which the engine may wait before it replies. It counts twice: if the process that
        waits ends, the request is sent to its successor, which waits from the start.
        """
        return self.clock.monotonic_ns() + (self.timeout_ms + 2 * wait_ms) * MS

    def wait_connected(self) -> Pending[None]:
        """Wait for the first connection to the engine. Fails with NotConnected after the timeout, with
        AuthFailed, or with VersionMismatch."""
        if self._ended is not None:
            return _failed(self._ended)
        connecting = self.links.connect()
        if connecting.is_done:
            return connecting
        result: Pending[None] = Pending()
        timer = self.timers.call_at(self.deadline_ns(), lambda: result.fail(self.no_engine_error()))

        def is_opened(connected: Pending[None]) -> None:
            timer.cancel()
            if connected.error is not None:
                result.fail(connected.error)
            else:
                result.resolve(None)

        connecting.when_done(is_opened)
        return result

    def no_engine_error(self, text: str = "no engine answers", **detail: Any) -> NotConnected:
        """Return the error of a connection that was not made in time, with the cause as far as it is
        known."""
        return NotConnected(
            explain_unreachable(text, self.links.unreachable_reason), address=str(self.address), **detail
        )

    def ask(self, shard: int, message: Message, *, extra_ms: int = 0, attachment: Any = None) -> Pending[Any]:
        """Send a request to a shard. Resolves with the message of the reply."""
        return run_steps(self.ask_steps(shard, message, extra_ms, attachment))

    def ask_steps(self, shard: int, message: Message, extra_ms: int, attachment: Any) -> Steps[Any]:
        yield self.wait_connected()
        reply = yield self.links.request(shard, message, self.deadline_ns(extra_ms), attachment)
        return reply.message

    # -- jobs -----------------------------------------------------------------------------------------

    def request_jobs(
        self, message: Any, *, extra_ms: int = 0, is_awaited: bool = False
    ) -> Pending[PeerReply]:
        """Send a request about jobs to their topic's shard. Resolves with the reply and its attachment.

        `is_awaited`: see Peer.request.
        """
        if self._ended is not None:
            return _failed(self._ended)
        links, info = self.links, self.topics.cached(message.topic)
        if info is None or not isinstance(links, LocalLinks):
            return run_steps(self._jobs_steps(message, extra_ms))
        deadline_ns = self.deadline_ns(extra_ms)
        pending = links.request(info.shard, message, deadline_ns, by_ring=True, is_awaited=is_awaited)
        if not pending.is_done:
            pending.on_refused = lambda error: self._jobs_refused(pending, error, message, extra_ms)
        return pending

    def track_claim_cancel(self, cancelling: Pending[PeerReply] | None) -> None:
        """Make closing the client wait for the cancellation of a claim."""
        if cancelling is not None and not cancelling.is_done:
            self.cancelling_claims.add(cancelling)
            cancelling.when_done(self.cancelling_claims.discard)

    def _jobs_refused(
        self, pending: Pending[PeerReply], error: RinglogError, message: Any, extra_ms: int
    ) -> bool:
        """Retry if the topic was not found: it may have been created again, or moved to another shard."""
        if not isinstance(error, TopicNotFound | ShardsChanged):
            return False
        self.topics.forget(message.topic)
        retry = run_steps(self._jobs_steps(message, extra_ms))
        retry.when_done(lambda done: done.forward_to(pending))
        return True

    def _jobs_steps(self, message: Any, extra_ms: int) -> Steps[PeerReply]:
        has_retried = False
        for _ in range(RESOLVE_ATTEMPTS_MAX):
            info: TopicInfo = yield self.topics.resolve(message.topic)
            try:
                reply: PeerReply = yield self.links.request(
                    info.shard, message, self.deadline_ns(extra_ms), by_ring=True
                )
            except ShardsChanged:
                continue
            except TopicNotFound:
                # The topic may have been created again, on another shard.
                if has_retried:
                    raise
                has_retried = True
                self.topics.forget(message.topic)
                continue
            return reply
        raise no_agreement_error(message.topic)

    # -- writing --------------------------------------------------------------------------------------

    def open_stream(self, topic: str, **options: Any) -> Stream:
        """Return a new producer identity on a topic."""
        stream = Stream(self, topic, **options)
        self.streams.add(stream)
        if not self.links.connect().is_done and self._state is ClientState.CONNECTING and not self.events:
            self.record_event("connecting", address=str(self.address))
        return stream

    def pause(self, seconds: float) -> Pending[None]:
        """Return a Pending that is done after `seconds`."""
        result: Pending[None] = Pending()
        self.timers.call_at(self.clock.monotonic_ns() + int(seconds * 1e9), lambda: result.resolve(None))
        return result

    def _displaced(self, run: OutboundFrames) -> None:
        if isinstance(run, Shipment):
            run.batch.stream.resend_displaced(run)

    # -- reading: read_connection.Connection ----------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """Transport to the engine."""
        return self.links.transport

    @property
    def data_dir(self) -> str:
        """Data directory of the engine."""
        return self._local().engine.data_dir

    @property
    def shm_dir(self) -> str:
        """Shared-memory directory of the engine."""
        return self._local().engine.shm_dir

    @property
    def cold_dir(self) -> str:
        """Directory of cold segments on this host, or empty."""
        return self._local().engine.cold_dir

    @property
    def generation(self) -> int:
        """Number that grows at every restart of the engine."""
        return self.links.generation

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Return the identity and settings of a topic, from the cache if possible."""
        return self.topics.resolve(topic)

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Query the dead-letter topics of a topic."""
        return self.topics.dead_letter_targets(topic)

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Query the topic's shard for the location of the records after `after`."""
        return run_steps(self.topics.ask_resolved_topic(topic, lambda _: Locate(topic, after, epoch)))

    def latest(self, topic: str) -> Pending[Cursor]:
        """Return the cursor of the topic's last record."""
        return run_steps(self._latest_steps(topic))

    def _latest_steps(self, topic: str) -> Steps[Cursor]:
        reply: TopicStateReply = yield from self.topics.ask_resolved_topic(topic, lambda _: TopicState(topic))
        return Cursor(reply.epoch, reply.head_seq)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Mark a topic as in use until the returned handle ends. See Connection."""
        return self.topic_keep_alive.acquire(topic, epoch)

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board."""
        return self._local().board.topic_facts(info)

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Return the change number of the topic's slot. -1 while the slot changes or cannot be read."""
        return self._local().board.topic_sequence(info)

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Return the location of `topic_sequence` in shared memory."""
        return self._local().board.sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks. (0, 0), that is no published records, while they cannot be
        read."""
        return self._local().board.watermarks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Wait until the marks differ from `seen` (result True), or for `timeout_s` seconds (result
        False)."""
        if self._ended is not None:
            return _failed(self._ended)
        deadline = self.clock.monotonic_ns() + int(timeout_s * 1e9)
        return self._local().published_since(shard, lambda: self.marks(shard), seen, deadline)

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Have the relocator read bytes of a cold segment."""
        return run_steps(self._cold_steps(request))

    def _cold_steps(self, request: ColdRead) -> Steps[memoryview]:
        try:
            reply = yield self._local().ask_relocator(request, self.deadline_ns())
        except (NotConnected, RequestTimeout) as e:
            raise cold_unavailable(e.message) from None
        return memoryview(reply.attachment or b"")

    def engine_status(self, timeout_ms: int) -> Pending[EngineStatusReply]:
        """Query the status of the engine on this host, which the supervisor reads from shared memory.

        Raises NotConnected or RequestTimeout.
        """
        return run_steps(self._engine_status_steps(timeout_ms))

    def _engine_status_steps(self, timeout_ms: int) -> Steps[EngineStatusReply]:
        deadline_ns = self.clock.monotonic_ns() + timeout_ms * MS
        reply: PeerReply = yield self._local().ask_supervisor(EngineStatus(), deadline_ns)
        assert isinstance(reply.message, EngineStatusReply)
        return reply.message

    def engine_limits(self) -> Pending[Mapping[str, int]]:
        """Query the engine's limits by name, such as record_bytes. An older engine names fewer of them.

        They are the same in all shards, so the first reply counts: one shard may have failed, or may recover.
        Fails with NotReady or ConnectionTrouble if no shard replies.
        """
        return run_steps(self._engine_limits_steps())

    def _engine_limits_steps(self) -> Steps[Mapping[str, int]]:
        yield self.wait_connected()  # The number of shards is known only after connecting.
        hello = Hello(PROTOCOL, self.client_id, os.getpid())
        asked = [self.ask(shard, hello) for shard in range(self.links.shards)]
        welcome: Welcome = yield first_result(asked)
        return welcome.limits

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have the routers to a topic forward all records that their sources contain. See Connection."""
        return self.schedulers.catch_up(topic, topic_id)

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Query the gateway for the position of the records of a time."""
        return self.ask(0, request)

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Send a Read to the gateway."""
        return run_steps(self._read_steps(request))

    def _read_steps(self, request: Read) -> Steps[tuple[ReadReply, memoryview]]:
        yield self.wait_connected()
        reply = yield self.links.request(0, request, self.deadline_ns(request.wait_ms))
        return reply.message, memoryview(reply.attachment or b"")

    def _local(self) -> LocalLinks:
        if not isinstance(self.links, LocalLinks):
            raise NotConnected(
                "files can be read only on the engine's host, with transport ring", transport=self.transport
            )
        return self.links

    # -- closing --------------------------------------------------------------------------------------

    def _end_for_good(self) -> None:
        for stream in list(self.streams):
            stream.fail_all(lambda was_sent: _connection_lost("unknown" if was_sent else "not_applied"))
        self._ended = _connection_lost("unknown")
        self.delivery.fail_all(self._ended)
        self.close()

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def close(self) -> None:
        """Close all connections."""
        if not self._is_closed:
            self._is_closed = True
            self.links.close(self._ended)
            self.record_event("closed")
            self._set_state(ClientState.CLOSED)


def _failed(error: RinglogError) -> Pending[Any]:
    pending: Pending[Any] = Pending()
    pending.fail(error)
    return pending


def _connection_lost(outcome: Outcome) -> NotConnected:
    return NotConnected(
        "the connection was lost, and the client has reconnect=False: create a new client", outcome=outcome
    )


def new_client_id() -> str:
    """Return a name for a client without one: process id and a random number."""
    return f"py-{os.getpid()}-{random.getrandbits(48):012x}"
