"""Session: one client's state between its user and its links, without waiting and without locks.

The synchronous and the asyncio client are shells around this: they wait for its descriptors and its next
timer, call `turn`, and make results of Pendings. Everything the client can do is here once. Implements
client.connection.Connection.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from ringlog.board.topics import TopicFacts
from ringlog.client.leases.dead_letters import dead_letter_targets_of
from ringlog.client.read.pages import Cursor
from ringlog.client.requests.results import Appended, ClientEvent, ClientHealth, ClientState
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle, TopicKeepAlive
from ringlog.client.write.batch import Shipment
from ringlog.client.write.stream import RETRY_MS_MAX, Stream, effective_durability
from ringlog.clock import Clock, SystemClock
from ringlog.descriptors import explain_unreachable
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import (
    Append,
    ColdRead,
    GroupList,
    GroupListReply,
    Locate,
    Located,
    Message,
    Read,
    ReadReply,
    RouterList,
    RoutesSettle,
    SeekTime,
    SeekTimeReply,
    TopicInfo,
    TopicPut,
    TopicResolve,
    TopicState,
    TopicStateReply,
)  # fmt: skip
from ringlog.envelope.messages import Appended as AppendedMessage
from ringlog.errors import (
    ConnectionTrouble,
    InvalidRequest,
    NotConnected,
    NotReady,
    Outcome,
    Refused,
    RequestTimeout,
    RinglogError,
    ShardsChanged,
    ShuttingDown,
    StaleEpoch,
    Throttled,
    TopicNotFound,
)
from ringlog.frame.codec import patch_header
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_FIRST_SEQ,
    WORDS,
    entry_error,
)  # fmt: skip
from ringlog.limits import LIST_PAGE_MAX, READ_SETTLE_MS
from ringlog.link.address import Address
from ringlog.link.channel.outbound_frames import OutboundFrames
from ringlog.link.delivery import RETURN_DELAY_BUSY_NS, Delivery
from ringlog.link.futures import Pending, Steps, resolved, run_steps
from ringlog.link.gateway_links import GatewayLinks, curve_of
from ringlog.link.local_links import LocalLinks, cold_unavailable
from ringlog.link.peer import FINAL_REASONS, MS, FdSet, PeerReply
from ringlog.link.protocol import ShardWatermarks, Transport
from ringlog.link.timers import Timers
from ringlog.logs import log_event
from ringlog.storage.log_map import LogMap

log = logging.getLogger("ringlog.client")

KEYED_RETRY_S = 0.05
LAYOUTS_MAX = 16
"""So many times the place of a topic is looked for anew for one request; the engine cannot be started more
often with another number of shards while one waits."""
_SETTLE_ANSWER_MS = 250
"""So much longer than its own bound is waited for the answer of a scheduler."""
EVENTS_MAX = 256
BACKUP_S = 0.1
"""Longest sleep with frames in flight: a lost wake-up costs this much and nothing else."""


class Session:
    """One client's connection and caches. Not thread-safe."""

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
        self.timers = Timers()
        self.streams: set[Stream] = set()
        self.producer_cores: set[Any] = set()
        """Producers that are open (ProducerCore)."""
        self.cancelling_claims: set[Pending[PeerReply]] = set()
        """Claims that are being called off; whoever ends the client waits until their shards know it."""
        self.events: deque[ClientEvent] = deque(maxlen=EVENTS_MAX)
        self.retries = 0
        self.log_map = LogMap()
        """What this client's readers know of where topics lie in the log."""
        self.delivery = Delivery(self, RETURN_DELAY_BUSY_NS)
        self.topic_keep_alive = TopicKeepAlive(self)
        self._topics: dict[str, TopicInfo] = {}
        self._topics_generation = 0
        self._resolving: dict[tuple[str, bool], Pending[TopicInfo]] = {}
        self._state = ClientState.CONNECTING
        self._state_since_us = self.clock.now_us()
        self._is_closed = False
        self._reconnects = reconnect
        self._ended: NotConnected | None = None
        """Why everything fails from now on: the engine went away, and the client does not reconnect."""
        self._fds, self._secret_key = fds, secret_key
        self.links: LocalLinks | GatewayLinks
        if transport in {"auto", "ring"}:
            self.links = LocalLinks(
                address.run_dir, client_id=client_id, clock=self.clock, timers=self.timers, fds=fds,
                on_displaced=self._displaced, on_change=self._links_changed, hears=self.delivery,
                on_beyond=self._fall_back_to_gateway if transport == "auto" else None,
            )  # fmt: skip
        else:
            self.links = self._gateway_links()
        self.is_transport_known = transport != "auto"
        """Which way this client goes is decided; with `auto` once its engine was met."""

    def _gateway_links(self) -> GatewayLinks:
        address = self.address
        return GatewayLinks(
            address, clock=self.clock, timers=self.timers, fds=self._fds,
            curve=None if address.is_local else curve_of(address.server_key, self._secret_key),
            on_change=self._links_changed, hears=self.delivery,
        )  # fmt: skip

    def _fall_back_to_gateway(self, engine: EngineInfo) -> None:
        """The engine's shared memory is not there for this process: go by its socket from now on."""
        log_event(
            log, logging.WARNING, "no shared memory in common with the engine: using its socket",
            shm_dir=engine.shm_dir, socket=engine.gateway_ipc,
        )  # fmt: skip
        before, self.links = self.links, self._gateway_links()
        waiting = before.connect()
        before.close()
        self.links.connect().when_done(
            lambda done: waiting.resolve(None) if done.error is None else waiting.fail(done.error)
        )

    # -- turns: what a shell calls --------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Something will happen by itself: frames or requests are open, or something has a time."""
        return self.timers.next_ns() is not None

    def turn(self, ready: Iterable[int] = ()) -> bool:
        """Serve readable descriptors, rings and timers; True when anything happened."""
        for fd in ready:
            self.links.on_readable(fd)
        happened = self.links.pump()
        next_ns = self.timers.next_ns()
        if next_ns is not None and next_ns <= self.clock.monotonic_ns():
            happened |= self.timers.fire(self.clock.monotonic_ns()) > 0
        return happened

    def sleep_s(self) -> float:
        """How long the owner may sleep after `links.arm()` said that nothing was there."""
        next_ns = self.timers.next_ns()
        if next_ns is None:
            return BACKUP_S
        return min(BACKUP_S, max(0.0, (next_ns - self.clock.monotonic_ns()) / 1e9))

    # -- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """How we and the engine stand."""
        return self._state

    def health(self) -> ClientHealth:
        """The client at a glance."""
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
        """Remember an event."""
        self.events.append(ClientEvent(self.clock.now_us(), kind, detail))

    def _links_changed(self) -> None:
        generation = self.links.generation
        if generation != self._topics_generation:
            if self._topics_generation and self.transport == "ring":
                self.record_event("engine_restarted", starts_seen=generation)
            self._topics_generation = generation
            self._topics.clear()
        self.is_transport_known |= self.links.is_ready
        if self.links.is_ready and self._state is not ClientState.READY:
            self.record_event("reconnected" if self._state is ClientState.RECONNECTING else "connected")
            self._set_state(ClientState.READY)
        elif not self.links.is_ready and self._state is ClientState.READY:
            self.record_event("disconnected")
            self._set_state(ClientState.RECONNECTING)
            if not self._reconnects:
                # Not from here: whoever noticed is in the middle of the links' own work.
                self.timers.call_at(self.clock.monotonic_ns(), self._end_for_good)

    def _set_state(self, state: ClientState) -> None:
        self._state = state
        self._state_since_us = self.clock.now_us()

    # -- asking ---------------------------------------------------------------------------------------

    def deadline_ns(self, extra_ms: int = 0) -> int:
        """When a request made now is given up."""
        return self.clock.monotonic_ns() + (self.timeout_ms + extra_ms) * MS

    def wait_connected(self) -> Pending[None]:
        """Done once the engine was met; fails with NotConnected after the timeout, or with AuthFailed or
        VersionMismatch."""
        if self._ended is not None:
            return _failed(self._ended)
        connecting = self.links.connect()
        if connecting.is_done:
            return connecting
        result: Pending[None] = Pending()
        timer = self.timers.call_at(self.deadline_ns(), lambda: result.fail(self.no_engine()))

        def is_opened(connected: Pending[None]) -> None:
            timer.cancel()
            if connected.error is not None:
                result.fail(connected.error)
            else:
                result.resolve(None)

        connecting.when_done(is_opened)
        return result

    def no_engine(self, text: str = "no engine answers", **detail: Any) -> NotConnected:
        """What to raise where no engine was met in time: why, as far as that is known."""
        return NotConnected(
            explain_unreachable(text, self.links.unreachable_reason), address=str(self.address), **detail
        )

    def ask(self, shard: int, message: Message, *, extra_ms: int = 0, attachment: Any = None) -> Pending[Any]:
        """Send a request to a shard; resolved with the reply's message."""
        return run_steps(self._ask_steps(shard, message, extra_ms, attachment))

    def ask_topic(self, info: TopicInfo, message: Message, *, attachment: Any = None) -> Pending[Any]:
        """Send a request about a topic to its shard, also when that is another one meanwhile."""
        return run_steps(self._ask_topic_steps(info, message, attachment))

    def _ask_topic_steps(self, info: TopicInfo, message: Message, attachment: Any) -> Steps[Any]:
        for _ in range(LAYOUTS_MAX):
            # The caller may have asked others since `info` was true: the engine may be another one by now.
            found: TopicInfo = yield self.resolve(info.topic)
            try:
                return (yield from self._ask_steps(found.shard, message, 0, attachment))
            except ShardsChanged:
                # As it was: whatever makes it harmless when it is sent twice does so over there as well.
                continue
        raise _no_agreement(info.topic)

    def _ask_steps(self, shard: int, message: Message, extra_ms: int, attachment: Any) -> Steps[Any]:
        yield self.wait_connected()
        reply = yield self.links.request(shard, message, self.deadline_ns(extra_ms), attachment)
        return reply.message

    def ask_scheduler(self, message: Message, *, extra_ms: int = 0) -> Pending[Any]:
        """Send a request to the scheduler that looks after routers; resolved with the reply's message."""
        return run_steps(self._routers_steps(message, extra_ms))

    def _routers_steps(self, message: Message, extra_ms: int) -> Steps[Any]:
        yield self.wait_connected()
        links, deadline_ns = self.links, self.deadline_ns(extra_ms)
        if not isinstance(links, LocalLinks):
            reply = yield links.request(0, message, deadline_ns)
        elif links.schedulers:
            reply = yield links.scheduler(0).request(message, deadline_ns)
        else:
            raise InvalidRequest("nobody runs routers here: delivery.schedulers = 0")
        return reply.message

    def routers_from(self, topic: str) -> Pending[list[str]]:
        """Names of the routers that lead from a topic. Never fails: those that nobody tells in time are not
        named."""
        return run_steps(self._routers_from_steps(topic))

    def _routers_from_steps(self, topic: str) -> Steps[list[str]]:
        names: list[str] = []
        order, has_more = RouterList(source=topic, page_size=LIST_PAGE_MAX), True
        while has_more:
            try:
                page = yield from self._ask_scheduler_soon(order)
            except (ConnectionTrouble, Refused) as e:
                self.record_event("routers_not_known", topic=topic, reason=str(e))
                break
            if page is None:
                break
            names += [each.router for each in page.routers]
            has_more = page.more and bool(page.routers)
            order = RouterList(source=topic, after=names[-1] if names else "", page_size=LIST_PAGE_MAX)
        return names

    def _ask_scheduler_soon(self, message: Message) -> Steps[Any]:
        """The answer of the scheduler that looks after routers, which has little time; None when nobody runs
        any. Raises ConnectionTrouble, Refused."""
        links = self.links
        deadline_ns = self.clock.monotonic_ns() + (READ_SETTLE_MS + _SETTLE_ANSWER_MS) * MS
        if not isinstance(links, LocalLinks):
            reply = yield links.request(0, message, deadline_ns)
        elif links.schedulers:
            reply = yield links.scheduler(0).request(message, deadline_ns)
        else:
            return None
        return reply.message

    # -- topics ---------------------------------------------------------------------------------------

    def resolve(self, topic: str, *, create: bool = False) -> Pending[TopicInfo]:
        """Who is this topic? Cached; fails with TopicNotFound, or makes it with defaults if `create`."""
        known = self._topics.get(topic)
        if known is not None and self._topics_generation == self.links.generation:
            return resolved(known)
        asking = self._resolving.get((topic, create))
        if asking is None:
            asking = run_steps(self._resolve_steps(topic, create))
            self._resolving[topic, create] = asking
            asking.when_done(lambda _: self._resolved(topic, create))
        return asking

    def _resolved(self, topic: str, create: bool) -> None:
        self._resolving.pop((topic, create), None)

    def cached_topic(self, topic: str) -> TopicInfo | None:
        """What was said of the topic since the engine was started last, if anything was."""
        return self._topics.get(topic) if self._topics_generation == self.links.generation else None

    def cache_topic(self, info: TopicInfo) -> TopicInfo:
        """Keep what a shard said of a topic."""
        self._topics[info.topic] = info
        return info

    def forget(self, topic: str) -> None:
        """What is known of the topic is not true any more."""
        self._topics.pop(topic, None)

    def forget_all(self, topics: Iterable[str]) -> None:
        """Have each be asked for again: a feed of a topic's earlier life would never be given a turn."""
        for topic in topics:
            self.forget(topic)

    def _resolve_steps(self, topic: str, create: bool) -> Steps[TopicInfo]:
        yield self.wait_connected()
        message: Message = TopicPut(topic, {}, "create") if create else TopicResolve(topic)
        return (yield from self.ask_name_owner(topic, message))

    def ask_name_owner(self, topic: str, message: Message) -> Steps[TopicInfo]:
        """Ask whoever looks after the name: the shard it is at home with, or the one that shard points to,
        since the number of shards has changed after the topic was made. Raises NotReady when that one points
        to another."""
        for _ in range(LAYOUTS_MAX):
            try:
                yield self.wait_connected()  # Who has the name is known from then on.
                info: TopicInfo = yield self.ask(self.links.home_shard(topic), message)
                if not info.topic_id:
                    info = yield self.ask(info.shard, message)
                break
            except ShardsChanged:
                continue
        else:
            raise _no_agreement(topic)
        if not info.topic_id:
            raise _no_agreement(topic)
        return self.cache_topic(info)

    def dead_letter_targets(self, topic: str) -> Pending[tuple[str, ...]]:
        """Ask where the dead letters of a topic go, the queue's and those of its groups. Not from memory."""
        return run_steps(self._letters_steps(topic))

    def _letters_steps(self, topic: str) -> Steps[tuple[str, ...]]:
        yield self.wait_connected()
        info = yield from self.ask_name_owner(topic, TopicResolve(topic))
        listed: GroupListReply = yield self.ask_topic(info, GroupList(topic))
        return dead_letter_targets_of(info.config, listed.groups)

    def ask_resolved_topic(self, topic: str, make: Any) -> Steps[Any]:
        """Ask a topic's shard `make(info)`; once more when the topic turns out to be another than we knew."""
        info = yield self.resolve(topic)
        try:
            return (yield self.ask_topic(info, make(info)))
        except (TopicNotFound, StaleEpoch):
            self.forget(topic)
            info = yield self.resolve(topic)
            return (yield self.ask_topic(info, make(info)))

    # -- jobs -----------------------------------------------------------------------------------------

    def about_jobs(self, message: Any, *, extra_ms: int = 0, is_awaited: bool = False) -> Pending[PeerReply]:
        """Send a request about jobs to who looks after their topic; resolved with what was attached, too.
        `is_awaited`: see Peer.request."""
        if self._ended is not None:
            return _failed(self._ended)
        links, info = self.links, self._topics.get(message.topic)
        is_known = info is not None and self._topics_generation == links.generation
        if info is None or not is_known or not isinstance(links, LocalLinks):
            return run_steps(self._jobs_steps(message, extra_ms))
        deadline_ns = self.deadline_ns(extra_ms)
        asked = links.request(info.shard, message, deadline_ns, by_ring=True, is_awaited=is_awaited)
        if not asked.is_done:
            asked.on_refused = lambda error: self._jobs_refused(asked, error, message, extra_ms)
        return asked

    def track_claim_cancel(self, undoing: Pending[PeerReply] | None) -> None:
        """A claim is being called off: the client's end waits for it, whatever became of who claimed."""
        if undoing is not None and not undoing.is_done:
            self.cancelling_claims.add(undoing)
            undoing.when_done(self.cancelling_claims.discard)

    def _jobs_refused(
        self, asked: Pending[PeerReply], error: RinglogError, message: Any, extra_ms: int
    ) -> bool:
        """Where the topic is not there any more, it is perhaps made anew, or elsewhere."""
        if not isinstance(error, TopicNotFound | ShardsChanged):
            return False
        self.forget(message.topic)
        again = run_steps(self._jobs_steps(message, extra_ms))
        again.when_done(lambda done: done.forward_to(asked))
        return True

    def _jobs_steps(self, message: Any, extra_ms: int) -> Steps[PeerReply]:
        has_looked = False
        for _ in range(LAYOUTS_MAX):
            info: TopicInfo = yield self.resolve(message.topic)
            try:
                reply: PeerReply = yield self.links.request(
                    info.shard, message, self.deadline_ns(extra_ms), by_ring=True
                )
            except ShardsChanged:
                continue
            except TopicNotFound:
                # Perhaps it is made anew, and elsewhere.
                if has_looked:
                    raise
                has_looked = True
                self.forget(message.topic)
                continue
            return reply
        raise _no_agreement(message.topic)

    # -- writing --------------------------------------------------------------------------------------

    def open_stream(self, topic: str, **options: Any) -> Stream:
        """A new producer identity on a topic."""
        stream = Stream(self, topic, **options)
        self.streams.add(stream)
        if not self.links.connect().is_done and self._state is ClientState.CONNECTING and not self.events:
            self.record_event("connecting", address=str(self.address))
        return stream

    def append_keyed(self, stream: Stream, frame: bytearray, key: str, window_ms: int = 0) -> Steps[Appended]:
        """Append one frame under an idempotency key, by message; the key makes repeating it safe (I-4)."""
        done, _ = yield from self.append_keyed_frame(stream, frame, key=key, window_ms=window_ms)
        return done

    def append_keyed_frame(
        self, stream: Stream, frame: bytearray, *, key: str = "", ids: bytes = b"", window_ms: int = 0
    ) -> Steps[tuple[Appended, bytes]]:
        """Append one frame under a key, or its records under ids; with what is known of these, as the message
        Appended says it."""
        deadline, number, looks = self.deadline_ns(), stream.take_seq(), 0
        while True:
            try:
                return (yield from self._append_keyed_once(stream, frame, number, key, ids, window_ms))
            except (TopicNotFound, StaleEpoch) as e:
                number = number if e.outcome == "unknown" else stream.take_seq()
                self.forget(stream.topic)
                looks += 1  # Without `create` once more: perhaps it was deleted and made anew.
                if (not stream.create and looks > 1) or self.clock.monotonic_ns() >= deadline:
                    raise
            except (Throttled, NotReady, ShuttingDown) as e:
                if e.detail.get("reason") in FINAL_REASONS:
                    raise
                # What may be there comes again as it was, to be recognised; a refused number is used up.
                number = number if e.outcome == "unknown" else stream.take_seq()
                asked_s = min(int(e.detail.get("retry_after_ms", 0) or 0), RETRY_MS_MAX) / 1_000
                if self.clock.monotonic_ns() + int(asked_s * 1e9) >= deadline:
                    raise
                yield self.pause(max(asked_s, KEYED_RETRY_S))
                continue
            yield self.pause(KEYED_RETRY_S)

    def _append_keyed_once(
        self, stream: Stream, frame: bytearray, number: int, key: str, ids: bytes, window_ms: int
    ) -> Steps[tuple[Appended, bytes]]:
        topic = stream.topic
        info: TopicInfo = yield self.resolve(topic, create=stream.create)
        private = bytearray(frame)
        patch_header(
            private, topic_id=info.topic_id, epoch=info.epoch, producer_id=stream.producer_id,
            producer_seq=number,
        )  # fmt: skip
        message = Append(
            topic, 1, idempotency_key=key, disable_backpressure=stream.disable_backpressure, ids=ids,
            window_ms=window_ms,
        )  # fmt: skip
        reply: AppendedMessage = yield self.ask_topic(info, message, attachment=private)
        entry = np.frombuffer(reply.entries, dtype=np.uint64).reshape(-1, WORDS)[0].tolist()
        error = entry_error(entry, topic)
        if error is not None:
            raise error
        first, count = entry[S_FIRST_SEQ], entry[S_COUNT_STATUS] & 0xFFFFFFFF
        is_deduped = bool(entry[S_COUNT_STATUS] >> FLAGS_SHIFT & FLAG_DEDUPED)
        met = effective_durability(info, stream.durability)
        done = Appended(
            topic, reply.epoch, first, first + count - 1, count, met, is_deduped, entry[S_COMMIT_TS]
        )
        return done, reply.known

    def pause(self, seconds: float) -> Pending[None]:
        """Done after a while."""
        result: Pending[None] = Pending()
        self.timers.call_at(self.clock.monotonic_ns() + int(seconds * 1e9), lambda: result.resolve(None))
        return result

    def _displaced(self, run: OutboundFrames) -> None:
        if isinstance(run, Shipment):
            run.batch.stream.resend_displaced(run)

    # -- reading: client.connection.Connection --------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """How this client talks to the engine."""
        return self.links.transport

    @property
    def data_dir(self) -> str:
        """The engine's data directory."""
        return self._local().engine.data_dir

    @property
    def shm_dir(self) -> str:
        """The engine's shared-memory directory."""
        return self._local().engine.shm_dir

    @property
    def cold_dir(self) -> str:
        """Where cold segments lie, or nothing."""
        return self._local().engine.cold_dir

    @property
    def generation(self) -> int:
        """Grows when the engine was restarted."""
        return self.links.generation

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Ask the topic's shard where records after `after` lie."""
        return run_steps(self.ask_resolved_topic(topic, lambda _: Locate(topic, after, epoch)))

    def latest(self, topic: str) -> Pending[Cursor]:
        """The cursor behind the topic's last record."""
        return run_steps(self._latest_steps(topic))

    def _latest_steps(self, topic: str) -> Steps[Cursor]:
        reply: TopicStateReply = yield from self.ask_resolved_topic(topic, lambda _: TopicState(topic))
        return Cursor(reply.epoch, reply.head_seq)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Say for who follows a topic that it is in use, where that matters; see Connection."""
        return self.topic_keep_alive.acquire(topic, epoch)

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board now."""
        return self._local().topic_facts(info)

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Another number after each change of the topic's slot; -1 while that changes or cannot be read."""
        return self._local().topic_sequence(info)

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Where `topic_sequence` lies."""
        return self._local().sequence_word(info)

    def marks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks now; (0, 0) while they cannot be read: nothing is published."""
        return self._local().watermarks(shard)

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Done with True once the marks differ from `seen`, with False after the timeout."""
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

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Have the routers that lead to a topic forward what their sources hold; see Connection."""
        return run_steps(self._catch_up_steps(RoutesSettle(topic, topic_id, READ_SETTLE_MS)))

    def _catch_up_steps(self, request: RoutesSettle) -> Steps[None]:
        try:
            yield from self._ask_scheduler_soon(request)
        except (ConnectionTrouble, Refused) as e:
            self.record_event("routers_not_settled", topic=request.topic, reason=str(e))

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Ask the gateway where records of a time begin."""
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
            raise NotConnected("files are read on the engine's host only", transport=self.transport)
        return self.links

    # -- the end --------------------------------------------------------------------------------------

    def _end_for_good(self) -> None:
        for stream in self.streams:
            stream.fail_all(lambda was_sent: _gone("unknown" if was_sent else "not_applied"))
        self._ended = _gone("unknown")
        self.delivery.fail_all(self._ended)
        self.close()

    @property
    def is_closed(self) -> bool:
        """After close."""
        return self._is_closed

    def close(self) -> None:
        """End all connections."""
        if not self._is_closed:
            self._is_closed = True
            self.links.close(self._ended)
            self.record_event("closed")
            self._set_state(ClientState.CLOSED)


def _failed(error: RinglogError) -> Pending[Any]:
    pending: Pending[Any] = Pending()
    pending.fail(error)
    return pending


def _no_agreement(topic: str) -> NotReady:
    return NotReady("the shards do not agree on who looks after this name", topic=topic)


def _gone(outcome: Outcome) -> NotConnected:
    return NotConnected("the engine went away and this client does not reconnect", outcome=outcome)


def new_client_id() -> str:
    """A name for a client that was given none: process and chance."""
    return f"py-{os.getpid()}-{random.getrandbits(48):012x}"
