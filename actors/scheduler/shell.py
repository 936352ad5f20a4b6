"""The scheduler's shell: its socket, the news and topic tables of all shards, and sleep.

The scheduler reads shared memory and sends shards no requests for delivery, so it delays no shard. A link
that accepts no messages is skipped, and retried at the next aging tick.
"""

from __future__ import annotations

import gc
import logging
import select
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from ringlog.actors.scheduler import events as ev
from ringlog.actors.scheduler.core import Scheduler
from ringlog.actors.scheduler.delivery.feeds import ROUTERS
from ringlog.actors.scheduler.delivery.grant_rings import GrantRings
from ringlog.actors.scheduler.delivery.load_monitor import SchedulerLoadMonitor
from ringlog.actors.scheduler.forwarding.forwarder import ROUTER_REQUESTS, Forwarder
from ringlog.board.board import Board, BoardError, BoardUnstable
from ringlog.board.layout import (
    TOPIC_DURABILITY_SHIFT,
    HistogramKind,
    ProcessField,
    ProcessState,
    SchedulerField,
    WatermarkKind,
)
from ringlog.board.news import NewsReader
from ringlog.board.processes import scheduler_bell, scheduler_socket, shard_slot
from ringlog.board.topics import TOPIC_LIVE, TopicTable, decode_priority
from ringlog.clock import Clock, SystemClock
from ringlog.contract import Tick
from ringlog.envelope import messages as m
from ringlog.envelope import wire
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import ExitCode
from ringlog.limits import (
    AGING_TICK_MS,
    DURABLE_POLL_MS,
    GRANTS_PER_MESSAGE_MAX,
    HEARTBEAT_INTERVAL_MS,
    RECORD_BYTES_DEFAULT,
    ROUTERS_MAX_DEFAULT,
)
from ringlog.logs import log_event
from ringlog.ring.doorbell import BellListener
from ringlog.runtime.control import ActorControlSocket
from ringlog.signals import StopFlag
from ringlog.spin_wait import SPIN_REPLY_NS, SPIN_WORDS_MAX, SpinPolicy, spin_wait
from ringlog.types import Durability

log: logging.Logger = logging.getLogger("ringlog.scheduler")

REQUESTS_PER_TURN = 256
SOCKET_POLL_TURNS = 8
"""A scheduler that does not sleep polls its socket in one pass of this many."""
CHECK_EVERY_TURNS = 4_096
CHECK_FEEDS_MAX = 1_000
"""Invariants are checked during operation only up to this many feeds or routers, to limit the time."""
LATENCY_SHARE = 5
"""Each new value counts for one fifth of the moving average."""
_NS_PER_MS = 1_000_000
_ROUTERS_POLL_MS = 250
"""Interval at which the lag of all routers is computed."""
_STATE_MASK = (1 << TOPIC_DURABILITY_SHIFT) - 1
_SERVING = {ProcessState.READY, ProcessState.DRAINING}
_FACTS = [0, 1, 2, 3, 14]
"""Indices of the slot words that are used: topic_id, epoch, state and durability, head, order."""


class _PollSet:
    def __init__(self, poll: select.poll) -> None:
        self._poll = poll

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poll.unregister(fd)


class SchedulerShell:
    """One incarnation of one scheduler."""

    def __init__(
        self, boot: ActorBoot, *, schedulers: int = 1, routers_max: int = ROUTERS_MAX_DEFAULT,
        is_governed: bool = True, record_bytes: int = RECORD_BYTES_DEFAULT, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._boot = boot
        self._clock = clock or SystemClock()
        number = int(boot.name.rpartition("-")[2])
        self.core: Scheduler = Scheduler(number, boot.incarnation, boot.shards)
        self._board = Board.open(boot.shm_dir, writable=True)
        self._slot = self._board.process(boot.slot)
        self._pages = [self._board.process(shard_slot(shard)) for shard in range(boot.shards)]
        self._router = ActorControlSocket(scheduler_socket(boot.shm_dir, number), boot, self._slot)
        self._router_fd = self._router.fileno()
        self._woken_by: list[int] = []
        """Descriptors that were readable when the last sleep ended. Empty after the next pass."""
        self._bell = BellListener(scheduler_bell(boot.shm_dir, number))
        self._rings = GrantRings(boot.shm_dir, number, boot.incarnation)
        self._sweep_ns = 0
        self._news: dict[int, NewsReader] = {}
        self._tables: dict[int, TopicTable] = {}
        self._news_retry_ns = 0
        self._routers_poll_ns = 0
        self._names_words = [0] * boot.shards
        self._given_up: set[int] = set()
        self._shards_poll_ns = 0
        self._latency = self._slot.histogram(HistogramKind.COMMIT)
        self._latency_ns = 0
        self._encoded_grants: dict[int, bytes] = {}
        """Encoded Grants messages by number of rows: the message depends on nothing else."""
        self.exit_code: ExitCode | None = None
        self._missed = 0
        self._spin_policy = SpinPolicy()
        self._load_monitor = SchedulerLoadMonitor.from_board(
            self._board, number, boot.shards, schedulers, self._clock.monotonic_ns(), is_reacting=is_governed
        )
        self._poll = select.poll()
        self.forwarder: Forwarder = Forwarder(
            boot, number, schedulers=schedulers, routers_max=routers_max, clock=self._clock,
            fds=_PollSet(self._poll), reply=self._router.send, record_bytes=record_bytes,
        )  # fmt: skip
        self._perform: dict[type, Callable[[Any], Any]] = {
            ev.SendToLink: self._send_to_link,
            ev.ReadSlots: self._read_slots,
        }

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Register descriptors, start the forwarder and log that the scheduler is ready."""
        for fd in (stop.fileno(), self._router_fd, self._bell.fileno()):
            self._poll.register(fd, select.POLLIN)
        self.forwarder.begin()
        gc.freeze()
        log_event(log, logging.INFO, "ready", scheduler=self.core.number)

    def drain(self) -> bool:
        """Exit at once. There is nothing to drain: readers without grants still read from the files."""
        self.exit_code = ExitCode.OK
        return True

    def on_close(self) -> None:
        """Close sockets, rings and shared memory."""
        self._slot.set(ProcessField.ASLEEP, 0)
        self.forwarder.close()
        self._router.close()
        self._bell.close()
        self._rings.close()
        for reader in self._news.values():
            reader.close()
        for table in self._tables.values():
            table.close()

    def do_work(self) -> int:
        """One pass of the loop: collect events, process them, and perform the effects."""
        now_ns = self._clock.monotonic_ns()
        events: list[Any] = [Tick(0, now_ns)]
        # News come first: readers wait for them. A link that returns a grant is not waiting.
        self._gather_news(events, now_ns)
        if now_ns >= self._shards_poll_ns:
            self._gather_given_up(events, now_ns)
        is_readable = self._router_fd in self._woken_by or not self._router.passes % SOCKET_POLL_TURNS
        self._woken_by = []
        if self._router.has_input(is_readable=is_readable):
            for link, envelope, attachment in self._router.receive_requests(REQUESTS_PER_TURN):
                self._accept_message(events, link, envelope, attachment)
        events += self.forwarder.run_turn(now_ns)
        if self.core.has_name_watchers:
            self._gather_names(events)
        has_events = len(events) > 1
        pressed = self._load_monitor.observe_turn(now_ns, events, self.core)
        if pressed is not None:
            events.append(pressed)
        granted_before = self.core.grants.granted_count
        has_effects = self._pump(events)
        marks = self._gather_marks()
        if marks:
            has_effects |= self._pump(marks)
        self.forwarder.perform_effects()
        self._beat(now_ns, has_granted=self.core.grants.granted_count != granted_before)
        return int(has_effects or has_events)

    def idle(self, work: int) -> None:
        """Wait for the bell, a message or the next deadline.

        Announce the sleep on the board, then check news once more.
        """
        if work:
            return
        core, slot = self.core, self._slot
        followed = [shard for shard in range(self._boot.shards) if core.is_followed(shard)]
        # While no topic is followed, shards must not spend time on this scheduler's bell.
        slot.set(ProcessField.ASLEEP, int(bool(followed) or core.has_name_watchers))
        now_ns = self._clock.monotonic_ns()
        has_news = any(self._news[shard].has_rows for shard in followed if shard in self._news)
        if not has_news and not self._router.has_input(is_readable=False):
            ready = self._poll.poll(self.forwarder.wait_ms(now_ns, self._wait_ms(now_ns, followed)))
            self._woken_by = [fd for fd, _ in ready]
            self.forwarder.on_wakeup(self._woken_by)
            slot.set(ProcessField.ASLEEP, 0)
            if self._bell.drain():
                self._spin_for_news([self._news[shard] for shard in followed if shard in self._news])
            self._load_monitor.idle_ns += self._clock.monotonic_ns() - now_ns
        slot.set(ProcessField.ASLEEP, 0)

    def _spin_for_news(self, readers: list[NewsReader]) -> None:
        """Spin for news after the bell rang: a shard has news, or has read frames and will publish soon."""
        if 0 < len(readers) <= SPIN_WORDS_MAX and self._spin_policy.should_spin(self._clock.monotonic_ns()):
            watched = [reader.spin_word() for reader in readers]
            spin_wait([word for word, _ in watched], [value for _, value in watched], SPIN_REPLY_NS)

    def _wait_ms(self, now_ns: int, followed: list[int]) -> int:
        wait_ms = self._load_monitor.wait_ms(HEARTBEAT_INTERVAL_MS)
        due_ns = self.core.next_deadline_ns()
        if due_ns is not None:
            wait_ms = min(wait_ms, max(-(-(due_ns - now_ns) // _NS_PER_MS), 0))
        if any(self.core.awaits_durable(shard) for shard in followed):
            wait_ms = min(wait_ms, DURABLE_POLL_MS)
        if any(shard not in self._news for shard in followed):
            wait_ms = min(wait_ms, AGING_TICK_MS)
        return wait_ms

    def _beat(self, now_ns: int, *, has_granted: bool) -> None:
        core, slot = self.core, self._slot
        if has_granted:
            took_ns = max(self._clock.monotonic_ns() - now_ns, 0)
            self._latency.record(took_ns)
            self._latency_ns += (took_ns - self._latency_ns) // LATENCY_SHARE
            slot.set(SchedulerField.LATENCY_NS, max(self._latency_ns, 0))
            slot.set(SchedulerField.GRANTS_SENT, core.grants.granted_count)
        slot.set(SchedulerField.READY, core.grants.ready_count)
        slot.set(SchedulerField.LINKS, len(core.subscriptions.links))
        slot.set(SchedulerField.SUBSCRIPTIONS, core.subscriptions.count)
        slot.set(SchedulerField.FEEDS, core.subscriptions.feed_count)
        slot.set(SchedulerField.UNSENT, self._router.undelivered)
        if now_ns >= self._routers_poll_ns:
            self._routers_poll_ns = now_ns + _ROUTERS_POLL_MS * _NS_PER_MS
            routers = self.forwarder.forwarding
            slot.set(SchedulerField.ROUTERS, routers.routers)
            slot.set(SchedulerField.ROUTER_LAG, routers.lag)
            slot.set(SchedulerField.ROUTER_PASSES, routers.passes)
        self._router.beat(now_ns)
        if now_ns >= self._sweep_ns:
            self._sweep_ns = now_ns + HEARTBEAT_INTERVAL_MS * _NS_PER_MS
            self._rings.sweep(core.subscriptions.links)
        if self._router.passes % CHECK_EVERY_TURNS == 0:
            slot.set(SchedulerField.TOPICS_FOLLOWED, core.topics)
            if core.subscriptions.feed_count <= CHECK_FEEDS_MAX:
                core.check()
            if self.forwarder.forwarding.routers <= CHECK_FEEDS_MAX:
                self.forwarder.forwarding.check()

    # -- events ---------------------------------------------------------------------------------------

    def _accept_message(
        self, events: list[Any], link: bytes, envelope: wire.Envelope, data: bytearray | None
    ) -> None:
        message = envelope.message
        if isinstance(message, m.OpenGrants):
            name = self._rings.open(link) if message.wanted else self._rings.remove(link)
            self._router.send(link, m.GrantsOpened(name), envelope.corr)
        elif isinstance(message, ROUTER_REQUESTS):
            self.forwarder.handle_request(link, envelope.corr, message)
        else:
            events.append(ev.LinkRequestReceived(link, envelope.corr, message, data))

    def _gather_news(self, events: list[Any], now_ns: int) -> None:
        for shard in range(self._boot.shards):
            if not self.core.is_followed(shard):
                continue
            reader = self._news.get(shard)
            if reader is None:
                reader = self._open_news(shard, now_ns)
            if reader is not None and reader.has_rows:
                news = reader.take_rows()
                if not news.is_complete:
                    self._missed += 1
                    self._slot.set(SchedulerField.NEWS_MISSED, self._missed)
                events.append(ev.NewsRows(shard, news.rows, news.is_complete))

    def _open_news(self, shard: int, now_ns: int) -> NewsReader | None:
        """Open the news of a shard. Return None before the shard has created the file, in its first start."""
        if now_ns < self._news_retry_ns:
            return None
        try:
            self._news[shard] = reader = NewsReader(self._boot.shm_dir, shard)
        except BoardError:
            self._news_retry_ns = now_ns + AGING_TICK_MS * _NS_PER_MS
            return None
        return reader

    def _gather_given_up(self, events: list[Any], now_ns: int) -> None:
        self._shards_poll_ns = now_ns + HEARTBEAT_INTERVAL_MS * _NS_PER_MS
        for shard, page in enumerate(self._pages):
            if page.state is ProcessState.GIVEN_UP and shard not in self._given_up:
                self._given_up.add(shard)
                events.append(ev.ShardGivenUp(shard))

    def _gather_names(self, events: list[Any]) -> None:
        for shard, page in enumerate(self._pages):
            word = page.get(ProcessField.TOPICS_CHANGED)
            if word != self._names_words[shard]:
                self._names_words[shard] = word
                events.append(ev.TopicNamesChanged(shard))

    def _gather_marks(self) -> list[Any]:
        """Return events for durable marks that moved and that feeds wait for."""
        moved = []
        for shard, page in enumerate(self._pages):
            if not self.core.awaits_durable(shard):
                continue
            try:
                mark = page.watermark(WatermarkKind.DURABLE)
            except BoardUnstable:
                continue
            # The next incarnation of the shard has other files, so its mark does not apply to these. A new
            # incarnation first writes news. A mark is therefore valid only if no news are unread.
            reader = self._news.get(shard)
            is_current = reader is not None and not reader.has_rows
            if is_current and mark != self.core.shards[shard].durable:
                moved.append(ev.DurableMarkMoved(shard, mark))
        return moved

    # -- effects --------------------------------------------------------------------------------------

    def _pump(self, events: list[Any]) -> bool:
        """Process events and perform their effects until none is left; return True if there were effects."""
        effects = self.core.handle(events)
        has_effects = bool(effects)
        while effects:
            done = [event for effect in effects if (event := self._perform[type(effect)](effect)) is not None]
            effects = self.core.handle(done) if done else []
        return has_effects

    def _send_to_link(self, effect: ev.SendToLink) -> ev.GrantsUnsent | None:
        if effect.link == ROUTERS:
            self.forwarder.handle_core_message(effect)
            return None
        if not effect.feeds:
            self._router.post(effect.link, wire.encode(effect.message, effect.corr), None)
            return None
        if self._rings.write_grants(effect.link, effect.rows):
            return None
        count = len(effect.feeds)
        data = self._encoded_grants.get(count)
        if data is None:
            assert count <= GRANTS_PER_MESSAGE_MAX
            data = self._encoded_grants[count] = wire.encode(effect.message)
        errno = self._router.post(effect.link, data, effect.rows)
        return ev.GrantsUnsent(effect, errno == zmq.EHOSTUNREACH) if errno else None

    def _read_slots(self, effect: ev.ReadSlots) -> ev.SlotFactsRead:
        """Read slots before the published mark, so that the mark covers every head that was read."""
        shard, page = effect.shard, self._pages[effect.shard]
        if page.state not in _SERVING:
            return ev.SlotFactsRead(effect, None)
        try:
            table = self._tables.get(shard)
            if table is None:
                table = self._tables[shard] = TopicTable.open(self._boot.shm_dir, shard)
            words, are_stable = table.read_words(np.array([topic.slot for topic in effect.topics]))
            published = page.watermark(WatermarkKind.PUBLISHED)
        except (BoardError, BoardUnstable):
            return ev.SlotFactsRead(effect, None)
        facts: list[ev.SlotFacts | None] = []
        for (topic_id, epoch, packed, head, order), is_stable in zip(
            words[:, _FACTS].tolist(), are_stable.tolist(), strict=True
        ):
            is_live = packed & _STATE_MASK == TOPIC_LIVE
            is_logged = packed >> TOPIC_DURABILITY_SHIFT != Durability.EPHEMERAL
            slot_facts = ev.SlotFacts(topic_id, epoch, is_live, head, *decode_priority(order), is_logged)
            facts.append(slot_facts if is_stable else None)
        return ev.SlotFactsRead(effect, facts, published)
