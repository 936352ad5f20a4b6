"""Shell of the WAL shard: performs the I/O on rings, socket, files and board.

One short handler for each effect. One pass of the loop gathers a bounded number of events, passes them to the
core, performs its effects in order, and passes the completions back. The shell contains no rules about frames
or topics.
"""

from __future__ import annotations

import gc
import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import structs

from ringlog import stop_points
from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.commit.scheduler_notifier import SchedulerNotifier
from ringlog.actors.wal_shard.core import Settings, ShardCore
from ringlog.actors.wal_shard.io.log_io import LogIO
from ringlog.actors.wal_shard.io.read_only_probe import ReadOnlyProbe
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.actors.wal_shard.io.volatile_log import VolatileLog
from ringlog.actors.wal_shard.leases.job_prefetcher import JobPrefetcher
from ringlog.actors.wal_shard.leases.worker_liveness import WorkerLiveness
from ringlog.actors.wal_shard.metrics.group_board import GroupBoard
from ringlog.actors.wal_shard.metrics.load_monitor import ShardLoadMonitor
from ringlog.actors.wal_shard.metrics.queue_board import QueueBoard
from ringlog.actors.wal_shard.phases import ShardPhase
from ringlog.actors.wal_shard.recovery.baseline import segment_tables
from ringlog.actors.wal_shard.recovery.log_files import ShardStart, make_stream, stream_directory
from ringlog.actors.wal_shard.recovery.recovery import Recovery
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult, clean_up
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.actors.wal_shard.requests.call_rings import CallRings
from ringlog.actors.wal_shard.requests.caller import Caller
from ringlog.actors.wal_shard.requests.poison_requests import PoisonRequests
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.actors.wal_shard.requests.socket_requests import ShardIdentity
from ringlog.actors.wal_shard.retention.storage_query import answer_question
from ringlog.board.board import Board
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import HistogramKind, ProcessField, ProcessState, WatermarkKind
from ringlog.board.processes import RECLAIMER, bell_of, slot_of, socket_of
from ringlog.board.topics import TopicFacts, TopicTable, encode_priority
from ringlog.clock import Clock, SystemClock
from ringlog.compilation import is_compiled
from ringlog.config import from_plain
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.refusal import error_reply
from ringlog.errors import (
    CorruptData,
    DiskError,
    ExitCode,
    InvalidRequest,
    InvariantViolation,
    NotReady,
    Refused,
    RingError,
    StartRefused,
)
from ringlog.limits import (
    BATCH_WINDOW_POLL_US,
    CALL_BYTES_MAX,
    DISK_POLL_S,
    HEARTBEAT_INTERVAL_MS,
    INTAKE_END_S,
)
from ringlog.logs import log_event
from ringlog.ring.doorbell import BellListener
from ringlog.runtime.router_socket import RouterSocket
from ringlog.signals import StopFlag
from ringlog.spin_wait import SPIN_REQUEST_NS, SPIN_WORDS_MAX, SpinPolicy, spin_wait
from ringlog.storage.disk import Disk
from ringlog.storage.extents import LogHighWatermark as ReadMark
from ringlog.storage.layout import LOCK_NAME, META_DIR
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.wal import FIRST_FILE_BYTES, ShardLogIdentity, WalWriter
from ringlog.topic.state import ShardTopic

log = logging.getLogger("ringlog.shard")

SLEEP_MS_MAX = 100
"""Interval of the backup poll. A lost doorbell delays work by at most this time (RF-35)."""
POLL_EVERY_PASSES = 8
"""A shard that does not sleep polls its descriptors in one of this many passes."""
_NOTHING: frozenset[int] = frozenset()
IDLE_SLEEPS = 20
"""After this many sleeps without work, the backup poll is as rare as the heartbeat.
An idle engine then uses almost no CPU."""
REQUESTS_PER_PASS = 256
SLOTS_AHEAD = 4 * REQUESTS_PER_PASS
"""The topic table grows if it has fewer free slots. If shared memory has no room, new topics are refused."""
LOCK_TRIES = 600
LOCK_WAIT_S = 0.05
CHECK_EVERY_PASSES = 4_096
NS_PER_S = 1_000_000_000
DISK_REPORT_NS = 10 * NS_PER_S
"""Time for which the reclaimer's report of low disk space is valid without a heartbeat."""


def _hit_delete_stop_point(request: ControlReceived) -> None:
    if isinstance(request.message, m.RecordsDelete):
        stop_points.hit("delete_in_hand")


class WalShardShell:
    """One incarnation of one shard."""

    def __init__(
        self, boot: ActorBoot, settings: Settings, *, file_bytes: int, volatile_bytes: int, is_lenient: bool,
        topics_max: int, schedulers: int = 0, has_cold: bool = False, is_governed: bool = True,
        disk: Disk | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._boot = boot
        self._disk = disk or RealDisk()
        self._clock = clock or SystemClock()
        self._is_lenient = is_lenient
        self._has_cold = has_cold
        self._disk_poll_ns = 0
        self._queue_board, self._group_board = QueueBoard(), GroupBoard()
        identity = ShardIdentity(
            boot.engine_id, boot.shard, boot.shards, boot.incarnation, topics_max, boot.time_base_us
        )
        self.core = ShardCore(
            identity, settings, publish_topic_count=self._publish_topic_count,
            on_request=_hit_delete_stop_point,
        )  # fmt: skip
        self.core.requests.leases.registry.has_dead_letter_mover = schedulers > 0
        self._board = Board.open(boot.shm_dir, writable=True)
        self._slot = self._board.process(boot.slot)
        self._load_monitor = ShardLoadMonitor(self._slot, self._clock.monotonic_ns(), is_reacting=is_governed)
        self._table = TopicTable.create(boot.shm_dir, boot.shard)
        self._scheduler_notifier = SchedulerNotifier(boot, self._board, schedulers)
        self._socket = RouterSocket(socket_of(boot.shm_dir, boot.name))
        self._bell = BellListener(bell_of(boot.shm_dir, boot.name))
        self._poison_requests = PoisonRequests(boot.shm_dir, boot.shard)
        self._rings = Rings(boot.shm_dir, boot.shard, boot.engine_id)
        self._calls = CallRings(boot.shm_dir, boot.shard, boot.incarnation, self._clock)
        self._directory = stream_directory(boot.data_dir, boot.shard)
        stream = ShardLogIdentity(
            boot.data_dir, self._directory, boot.shard, boot.shards, boot.incarnation,
            bytes.fromhex(boot.boot_id.replace("-", "")), bytes.fromhex(boot.engine_id),
        )  # fmt: skip
        self._volatile_log = VolatileLog(boot, volatile_bytes)
        writer = WalWriter(self._disk, stream, file_bytes)
        self._log = LogIO(boot, writer, self._volatile_log, self.core.log_files, self._slot, self._clock)
        self._worker_liveness = WorkerLiveness()
        self._own_bells = self._log.bells
        self._record_index = StoredRecordIndex(self._disk, boot.data_dir, boot.shm_dir, self._published_mark)
        self._job_prefetcher = JobPrefetcher(
            self._disk, boot.data_dir, boot.shm_dir, self._published_mark, self.core.requests.locate_records,
            self.core.requests.leases.recent_records, self.core.requests.leases.sizes,
        )  # fmt: skip
        self._read_only_probe = ReadOnlyProbe(
            self._disk, self._clock, self._directory, boot.read_only_ms, min(FIRST_FILE_BYTES, file_bytes)
        )
        self._lock = -1
        self._order = threading.Lock()
        self.exit_code: ExitCode | None = None
        self._heartbeat = Heartbeat(self._slot)
        self._stop_asked_ns = 0
        """Monotonic time of the stop request; 0 if there was none."""
        self._must_drain = False
        self._durable_shown = 0, 0
        """The durable mark (file, offset) that was last written to the board."""
        self._idle_sleeps = 0
        self._commit_from_ns = 0
        self._has_published = False
        self._is_idle = True
        self._socket_fd = self._socket.fileno()
        self._woken_by: frozenset[int] = _NOTHING
        """Descriptors that were readable when the last sleep ended. Cleared after the next pass."""
        self._spin_policy = SpinPolicy()
        self._poll = select.epoll()
        self._control: deque[ControlReceived] = deque()
        requests = self.core.requests
        self._callable = frozenset(requests.leases.handlers)
        """Request types that may arrive through a call ring."""
        self._perform: dict[type, Callable[[Any], Any]] = {
            **self._log.effect_handlers,
            ev.QueryStorage: self._query_storage,
            ev.PublishTopics: self._publish_topics,
            ev.PublishMarks: self._publish_marks,
            ev.RetireTopic: self._retire_topic,
            ev.Settle: self._settle,
            ev.BatchCommitted: self._committed,
            Reply: self._reply,
            Stop: self._note_stop,
        }

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Recover, and register the descriptors to poll.

        Sets `exit_code` if the directory is not writable.
        """
        # Recovery creates millions of objects that stay. Garbage collection would take half of the start.
        gc.disable()
        try:
            if self._boot.read_only_ms:
                self._recover_read_only()
            else:
                self._recover()
        except DiskError as e:
            if self._boot.read_only_ms or not e.is_unwritable:
                raise
            log_event(
                log,
                logging.CRITICAL,
                "data directory is not writable, restarting read-only",
                directory=self._directory,
                reason=str(e),
            )
            self.exit_code = ExitCode.READ_ONLY
            return
        gc.freeze()
        gc.enable()
        for fd in (
            self._socket_fd, stop.fileno(), self._bell.fileno(), self._worker_liveness.fileno(),
            *self._own_bells,
        ):  # fmt: skip
            self._poll.register(fd, select.EPOLLIN)
        log_event(
            log, logging.INFO, "ready", shard=self._boot.shard, topics=len(self.core.directory),
            compiled=is_compiled(),
        )  # fmt: skip

    def do_work(self) -> int:
        """Run one pass of the loop. Return the number of events."""
        events = self._gather()
        if self._must_drain:
            self._must_drain = False
            stop_points.hit("drain_mid")
            events.append(DrainRequested())
        work = len(events) - 1
        self._is_idle = not work
        self._pump(events)
        self._detach_rings()
        self._beat()
        if self.exit_code is None and self._read_only_probe.is_writable_again():
            log_event(
                log, logging.WARNING, "data directory is writable again, restarting",
                directory=self._directory,
            )  # fmt: skip
            self._pump([self._tick(), DrainRequested()])
        return work

    def idle(self, work: int) -> None:
        """Spin briefly after a pass with work, otherwise sleep."""
        if not work:
            self._sleep()
            return
        self._idle_sleeps = 0
        if self.core.wants_intake:
            self._spin_wait()

    def drain(self) -> bool:
        """Request the drain when the rings are empty, or after INTAKE_END_S seconds. Return True then.

        The time limit is necessary because clients that continue to write keep the rings full.
        """
        now_ns = self._clock.monotonic_ns()
        self._stop_asked_ns = self._stop_asked_ns or now_ns
        is_late = now_ns - self._stop_asked_ns >= INTAKE_END_S * NS_PER_S
        if not is_late and self._rings.has_pending():
            return False
        self._must_drain = True
        return True

    def on_close(self) -> None:
        """Close files, rings, sockets and threads, and release the lock of the log."""
        self._log.close_files(is_read_only=bool(self._boot.read_only_ms))
        if not self._boot.read_only_ms:
            self._disk.sync_dir(self._directory)
        self._rings.close()
        self._calls.close()
        self._record_index.close()
        self._socket.close()
        self._bell.close()
        self._scheduler_notifier.close()
        self._worker_liveness.close()
        self._log.close()
        self._poll.close()
        if self._lock >= 0:
            self._disk.unlock(self._lock)

    def _published_mark(self, is_volatile: bool) -> ReadMark:
        return ReadMark(
            *self._slot.watermark(WatermarkKind.VOLATILE if is_volatile else WatermarkKind.PUBLISHED)
        )

    def _tick(self) -> Tick:
        return Tick(self._clock.now_us(), self._clock.monotonic_ns())

    def _gather(self) -> list[Any]:
        """Collect a bounded number of events. The first one is always a Tick."""
        events: list[Any] = [self._tick()]
        load_monitor, now_ns = self._load_monitor, events[0].monotonic_ns
        if now_ns >= load_monitor.due_ns:
            load_monitor.sample(now_ns, self._rings, self.core.requests.refused_for_pressure)
        self._receive()
        events += self._log.take_completions()
        if self.core.wants_intake:
            window = load_monitor.window
            if not window.window_ns or load_monitor.may_drain(now_ns, self._rings):
                arrived = self._rings.drain()
                if arrived:
                    if not window.window_ns and len(arrived) == 1:
                        self._scheduler_notifier.wake_early(len(arrived[0].buffer), now_ns)
                    events.extend(arrived)
                    if window.window_ns:
                        window.record_drain(now_ns, len(arrived))
            # The queue is full if it contains as many requests as one pass processes.
            is_full = len(self._control) >= REQUESTS_PER_PASS
            self.core.requests.is_overloaded = is_full and load_monitor.is_refusing
            self._take_calls()
            if self._control:
                events.extend(self._control)
                self._control.clear()
        # Polled after the frames and handled before them: a record that was sent after the death of a process
        # must not go to a waiting claim of it.
        is_claim_waiting = bool(self.core.requests.leases.waiting_claims)
        if self._worker_liveness and (is_claim_waiting or self._should_poll(self._worker_liveness.fileno())):
            dead = self._worker_liveness.take_dead()
            for process_id in dead:
                self._calls.remove_of(process_id)
            events[1:1] = [ev.WorkerDied(*process_id) for process_id in dead]
        if ended := self._calls.take_ended():
            events.insert(1, ev.ConnectionsEnded(ended))
        self._woken_by = _NOTHING
        if len(events) == 1 and self._is_due(now_ns):
            events.append(events[0])
        return events

    def _should_poll(self, fd: int) -> bool:
        """Return True if this descriptor woke the shard, or in every POLL_EVERY_PASSES-th pass.

        A poll costs as much as the admission of a frame. The regular pass serves shards that never sleep.
        """
        return fd in self._woken_by or not self._heartbeat.passes % POLL_EVERY_PASSES

    def _is_due(self, now_ns: int) -> bool:
        deadline = self.core.next_deadline_ns()
        return deadline is not None and now_ns >= deadline

    def _pump(self, events: list[Any]) -> None:
        """Run the core and perform its effects until there are none.

        Add the recent events to InvariantViolation.
        """
        try:
            self._decide_and_do(events)
        except InvariantViolation as e:
            e.detail.setdefault("story", list(self.core.recent_completions))
            raise

    def _decide_and_do(self, events: list[Any]) -> None:
        self._commit_from_ns = self._clock.monotonic_ns()
        calls = self._calls
        effects = self._decide(events)
        while effects:
            completions: list[Any] = [self._tick()]
            for effect in effects:
                if calls.has_unrung and type(effect) is not Reply:
                    calls.ring_bells()
                completion = self._perform[type(effect)](effect)
                if completion is not None:
                    completions.append(completion)
            if calls.has_unrung:
                calls.ring_bells()
            if self._scheduler_notifier.has_unrung_news:
                self._scheduler_notifier.ring_bells(self._clock.monotonic_ns())
            effects = self._decide(completions) if len(completions) > 1 else []
        if self._has_published:
            self._has_published = False
            self._rings.wake_publication_waiters()
        if calls.has_unrung:
            calls.ring_bells()  # For requests that were refused before they reached the core.

    def _decide(self, events: list[Any]) -> list[Any]:
        """Pass events to the core and return its effects. If it crashes, record the current request."""
        try:
            return self.core.handle(events)
        except Exception:
            request = self.core.current_request
            if request is not None:
                self._poison_requests.record_crash(request.message, request.attachment)
            raise

    def _beat(self) -> None:
        slot = self._slot
        now_ns = self._clock.monotonic_ns()
        self._heartbeat.beat(now_ns)
        leases = self.core.requests.leases
        self._queue_board.publish(slot, leases, now_ns)
        self._group_board.publish(
            slot, leases.registry.group_metrics, now_ns, self.core.requests.lease_clock_us // 1_000
        )
        self._socket.guard(now_ns)
        self._calls.remove_abandoned(now_ns)
        if now_ns >= self._disk_poll_ns:
            self._read_disk_report(now_ns)
        self._log.publish_sync_times()
        if self._heartbeat.passes % CHECK_EVERY_PASSES == 0:
            self.core.check()

    def _read_disk_report(self, now_ns: int) -> None:
        """Read the reclaimer's report of low disk space from the board.

        It is valid while its heartbeat is recent.
        """
        self._disk_poll_ns = now_ns + round(DISK_POLL_S * NS_PER_S)
        page = self._board.process(slot_of(RECLAIMER, self._boot.shards))
        is_fresh = now_ns - page.get(ProcessField.HEARTBEAT_NS) < DISK_REPORT_NS
        is_low = bool(page.get(ProcessField.DISK_LOW)) and is_fresh
        missing = 0
        if is_low:
            missing = max(
                from_plain(self._boot.config).data.min_free_bytes - page.get(ProcessField.DISK_FREE), 1
            )
        self.core.disk_missing_bytes = missing

    def _sleep(self) -> None:
        """Sleep until a bell, a message, a completion or the next deadline.

        The shard sets its ASLEEP word first and then polls once more, so that no wake-up is lost.
        """
        slot, load_monitor = self._slot, self._load_monitor
        if load_monitor.window.is_holding and self.core.wants_intake:
            self._clock.sleep_ns(BATCH_WINDOW_POLL_US * 1_000)
            load_monitor.idle_ns += BATCH_WINDOW_POLL_US * 1_000
            return
        slot.set(ProcessField.ASLEEP, 1)
        if not self._has_pending() and not self._socket.has_input(is_readable=False):
            now = self._clock.monotonic_ns()
            deadline = self.core.next_deadline_ns()
            self._idle_sleeps += 1
            is_quiet = not len(self._rings) or self._idle_sleeps > IDLE_SLEEPS
            wait_ms = load_monitor.wait_ms(HEARTBEAT_INTERVAL_MS if is_quiet else SLEEP_MS_MAX)
            if deadline is not None:
                wait_ms = min(wait_ms, max((deadline - now) // 1_000_000 + 1, 0))
            woken = self._poll.poll(wait_ms / 1000)
            load_monitor.idle_ns += self._clock.monotonic_ns() - now
            self._woken_by = frozenset([fd for fd, _ in woken])
            for fd in self._woken_by:
                if fd in self._own_bells:
                    # A helper thread rings after it stored its result, which may have been taken already.
                    # Without this drain, the bell would wake the shard again and again until the next result.
                    self._own_bells[fd].drain()
        slot.set(ProcessField.ASLEEP, 0)
        self._bell.drain()

    def _has_pending(self) -> bool:
        return self._rings.has_pending() or self._calls.has_pending()

    def _spin_wait(self) -> None:
        """Spin on the shared words of the rings before sleeping.

        A client that sends one request after the other sends the next one within microseconds. Spinning saves
        the client the bell and the shard the wake-up.
        """
        began_ns = self._clock.monotonic_ns()
        is_wanted = self._spin_policy.should_spin(began_ns)
        watched = [*self._rings.watched(), *self._calls.watched()] if is_wanted else []
        if 0 < len(watched) <= SPIN_WORDS_MAX:
            spin_wait([word for word, _ in watched], [seen for _, seen in watched], SPIN_REQUEST_NS)
            self._load_monitor.idle_ns += self._clock.monotonic_ns() - began_ns

    # -- requests -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive requests from the socket. Handle ring messages here, and queue all others for the core."""
        is_readable = self._should_poll(self._socket_fd)
        if not (self._is_idle or is_readable) or not self._socket.has_input(is_readable=is_readable):
            return
        for client, envelope, attachment in self._socket.receive(REQUESTS_PER_PASS - len(self._control)):
            message = envelope.message
            try:
                if isinstance(message, m.RingAttach):
                    self._attach(client, envelope.corr, message)
                elif isinstance(message, m.RingDetach):
                    self._detach(client, envelope.corr, message)
                elif isinstance(message, m.OpenCalls):
                    name = self._open_calls(client, (message.pid, message.born))
                    self._socket.send(client, m.CallsOpened(name), envelope.corr)
                elif isinstance(message, m.Ping):
                    pong = m.Pong(self._boot.incarnation, self._heartbeat.passes)
                    self._socket.send(client, pong, envelope.corr)
                else:
                    opened = None
                    self._poison_requests.require_not_poison(message, attachment)
                    self._watch_claimer(message)
                    if isinstance(message, m.SegmentsChange):
                        opened = segment_tables(self._disk, self._boot.data_dir, message.added)
                    self._control.append(ControlReceived(client, envelope.corr, message, attachment, opened))
            except Refused as e:
                self._socket.send(client, error_reply(e), envelope.corr)

    def _open_calls(self, client: bytes, process_id: tuple[int, int]) -> str:
        """Create a call ring. Watch the process, because its waiting claims end with it."""
        self._worker_liveness.watch(process_id)
        return self._calls.open(client, process_id)

    def _watch_claimer(self, message: m.Message) -> None:
        """Monitor the local process that sent a claim, because its leases end with it (Q10)."""
        if isinstance(message, m.Claim | m.AckAndClaim | m.Steal) and message.pid:
            self._worker_liveness.watch((message.pid, message.born))

    def _take_calls(self) -> None:
        """Receive requests from the call rings. Only lease requests are allowed there."""
        found = list(self._calls.take_requests(REQUESTS_PER_PASS - len(self._control)))
        if not found:
            return
        for caller, envelope in found:
            try:
                if type(envelope.message) not in self._callable:
                    raise InvalidRequest(
                        "this kind of request is not allowed in a call ring: send it by socket",
                        kind=envelope.kind,
                    )
                self._poison_requests.require_not_poison(envelope.message)
                self._watch_claimer(envelope.message)
                self._control.append(ControlReceived(caller, envelope.corr, envelope.message))
            except Refused as e:
                self._answer(caller, error_reply(e), envelope.corr)

    def _answer(self, client: bytes, message: m.Message, corr: int, attachment: Any = None) -> None:
        if isinstance(client, Caller):
            if attachment is None and self._calls.answer(client, message, corr):
                return
            client = bytes(client)
        self._socket.send(client, message, corr, attachment)

    def _attach(self, client: bytes, corr: int, message: m.RingAttach) -> None:
        try:
            self._rings.attach(message.ring, message.bell)
        except RingError as e:
            raise NotReady("ring cannot be attached", ring=message.ring, reason=str(e)) from e
        self._slot.set(ProcessField.RINGS, len(self._rings))
        self._socket.send(client, m.RingAttached(message.ring), corr)

    def _detach(self, client: bytes, corr: int, message: m.RingDetach) -> None:
        if not self._rings.request_detach(message.ring, client, corr):
            self._socket.send(client, m.RingDetached(message.ring, 0), corr)

    def _detach_rings(self) -> None:
        for name, settled, requests in self._rings.detach_empty():
            for client, corr in requests:
                self._socket.send(client, m.RingDetached(name, settled), corr)
            self._slot.set(ProcessField.RINGS, len(self._rings))

    # -- effects --------------------------------------------------------------------------------------

    def _query_storage(self, effect: ev.QueryStorage) -> ev.StorageQueried:
        answers = [answer_question(question, self._record_index.for_topic) for question in effect.questions]
        for question, found in zip(effect.questions, answers, strict=True):
            if isinstance(found, CorruptData):
                name = question.topic.name
                log_event(log, logging.ERROR, "stored records are damaged", topic=name, **found.detail)
        return ev.StorageQueried(answers)

    def _publish_topics(self, effect: ev.PublishTopics) -> None:
        has_new = False
        for topic in effect.topics:
            if topic.slot < 0:
                topic.slot = self._table.allocate()
                has_new = True
            self._table.publish(topic.slot, _facts(topic, 1))
        if has_new:
            self._slot.add(ProcessField.TOPICS_CHANGED, 1)
            self._count_slots()
        if has_new or effect.news:
            self._scheduler_notifier.publish_news(effect.news)
        self._has_published = True

    def _publish_topic_count(self, own: int) -> int:
        """Publish the number of topics of this shard, and return the total of all other shards.

        A shard that has not recovered since the start of the engine counts as 0.
        """
        self._slot.set(ProcessField.TOPICS, own)
        # The lock is a memory barrier between the write and the reads: of two shards, at least one sees the
        # other's count.
        with self._order:
            pages = map(self._board.process, range(self._board.processes))
            return sum(
                page.get(ProcessField.TOPICS)
                for page in pages
                if page is not self._slot and page.get(ProcessField.SHARD)
            )

    def _count_slots(self) -> None:
        """Ensure free slots for new topics of the next passes. A committed topic must be published."""
        self.core.requests.free_slots = self._table.ensure_free_slots(SLOTS_AHEAD)

    def _retire_topic(self, effect: ev.RetireTopic) -> None:
        if effect.topic.slot >= 0:
            self._table.publish(effect.topic.slot, _facts(effect.topic, 2))
            self._table.release(effect.topic.slot)
            self._count_slots()
            self._slot.add(ProcessField.TOPICS_CHANGED, 1)
            self._scheduler_notifier.announce_deletion(effect.topic)
        self._job_prefetcher.forget(effect.topic.topic_id)
        if effect.unused_ms:
            gone, ms = effect.topic, effect.unused_ms
            log_event(
                log, logging.INFO, "idle topic deleted", topic=gone.name, unused_ms=ms, records=gone.count
            )

    def _publish_marks(self, effect: ev.PublishMarks) -> None:
        slot = self._slot
        slot.set_watermark(WatermarkKind.PUBLISHED, effect.file_id, effect.published)
        durable = effect.file_id, effect.durable
        if durable != self._durable_shown:
            self._durable_shown = durable
            slot.set_watermark(WatermarkKind.DURABLE, *durable)
        if effect.volatile_file:
            slot.set_watermark(WatermarkKind.VOLATILE, effect.volatile_file, effect.volatile)
        self._has_published = True
        stop_points.hit("log_after_publish")

    def _settle(self, effect: ev.Settle) -> None:
        stop_points.hit("log_before_settle")
        self._rings.settle(effect.source, effect.entries, effect.new_tail)

    def _committed(self, effect: ev.BatchCommitted) -> None:
        slot = self._slot
        slot.add(ProcessField.GROUPS, 1)
        slot.add(ProcessField.FRAMES, effect.frames)
        slot.add(ProcessField.RECORDS, effect.records)
        slot.add(ProcessField.BYTES, effect.bytes)
        if effect.refused:
            slot.add(ProcessField.REFUSED, effect.refused)
        if effect.duplicates:
            slot.add(ProcessField.DUPLICATES, effect.duplicates)
        slot.histogram(HistogramKind.BATCH_FRAMES).record(effect.frames)
        slot.histogram(HistogramKind.COMMIT).record(self._clock.monotonic_ns() - self._commit_from_ns)

    def _reply(self, effect: Reply) -> None:
        message = effect.message
        if type(message) is m.ClaimReply and message.runs:
            self._reply_claimed(effect.client, message, effect.corr)
            return
        elif isinstance(message, m.TopicInfo) and message.slot < 0 and message.shard == self._boot.shard:
            # A topic gets its slot at its first publication, which is after the reply was staged.
            topic = self.core.directory.by_id.get(message.topic_id)
            if topic is not None:
                message = self.core.requests.topic_info(topic, created=message.created)
        self._answer(effect.client, message, effect.corr, effect.attachment)

    def _reply_claimed(self, client: bytes, message: m.ClaimReply, corr: int) -> None:
        """Reply to a claim, and include the jobs if they are in memory or quickly read."""
        topic = self.core.directory.by_id.get(message.topic_id)
        is_same = topic is not None and topic.epoch == message.epoch
        found = self._job_prefetcher.find(topic, message.runs) if topic is not None and is_same else None
        if found is None:
            self._answer(client, message, corr)
            return
        message = structs.replace(message, payloads=found.payloads, stamps=found.stamps, frames=found.frames)
        if found.frames and isinstance(client, Caller) and len(found.data) <= CALL_BYTES_MAX:
            message, found.data = structs.replace(message, data=found.data), b""
        self._answer(client, message, corr, found.data or None)

    def _note_stop(self, effect: Stop) -> None:
        self.exit_code = ExitCode(effect.code)

    # -- recovery -------------------------------------------------------------------------------------

    def _recover(self) -> None:
        boot, slot = self._boot, self._slot
        started = self._clock.monotonic_ns()
        slot.set(ProcessField.STATE, ProcessState.RECOVERING)
        self._take_lock()
        found, replay = self._replay()
        checkpoint = self.core.checkpoint
        checkpoint.restore(found.number, found.waiting, found.changed, found.listed, has_base=found.has_base)
        stop_points.hit("recovery_before_copy")
        self._begin(found)
        stop_points.hit("recovery_after_copy")
        clean_up(self._disk, boot.data_dir, found)
        self._show_recovered(replay, found, started)

    def _recover_read_only(self) -> None:
        """Recover without writing.

        No lock is needed: frames that another process still writes are not durable.
        """
        started = self._clock.monotonic_ns()
        self._slot.set(ProcessField.STATE, ProcessState.RECOVERING)
        found, replay = self._replay()
        directory = self._directory[len(self._boot.data_dir) + 1 :]
        self.core.begin_read_only(ReadOnlyMode(self._boot.shard, directory, found.in_doubt), found.halts)
        # Readers stop at the published mark. After a start of the engine, the board contains none.
        slot = self._slot
        slot.set_watermark(
            WatermarkKind.PUBLISHED,
            *max(self.core.log_files.last_closed(), slot.watermark(WatermarkKind.PUBLISHED)),
        )
        self._read_only_probe.begin()
        self._show_recovered(replay, found, started)
        log_event(
            log, logging.CRITICAL, "serving read-only: data directory is not writable",
            directory=self._directory, look_after_ms=self._boot.read_only_ms,
        )  # fmt: skip

    def _replay(self) -> tuple[RecoveryResult, Replay]:
        """Fill the topic directory and the file table from the log. Changes no log file."""
        boot, slot = self._boot, self._slot
        slot.repair_watermarks()
        self._volatile_log.sweep()
        had = self._table.reset()
        core = self.core
        replay = Replay(core.identity, core.directory, core.checkpoint.segments, is_lenient=self._is_lenient)
        start = ShardStart(
            shard=boot.shard,
            shards=boot.shards,
            incarnation=boot.incarnation,
            boot_incarnation=boot.boot_incarnation,
            boot_id=bytes.fromhex(boot.boot_id.replace("-", "")),
            engine_id=bytes.fromhex(boot.engine_id),
            durable_mark=slot.watermark(WatermarkKind.DURABLE),
            published_mark=slot.watermark(WatermarkKind.PUBLISHED),
            has_cold=self._has_cold,
            is_read_only=bool(boot.read_only_ms),
        )
        found = Recovery(self._disk, boot.data_dir, replay, start, self._report_progress).run()
        self._keep_slots(had)
        self.core.log_files.update(found.log_files)
        return found, replay

    def _keep_slots(self, had: dict[int, int]) -> None:
        """Keep the slots of the previous incarnation, because readers know topics by their slot."""
        for topic in self.core.directory.by_id.values():
            topic.slot = had.get(topic.topic_id, topic.slot)
        self._table.reserve_slots([topic.slot for topic in self.core.directory.by_id.values()])

    def _show_recovered(self, replay: Replay, found: RecoveryResult, started: int) -> None:
        slot = self._slot
        self._publish_topics(ev.PublishTopics(self.core.directory.all_topics()))
        self._count_slots()
        self._publish_topic_count(len(self.core.directory))
        self._scheduler_notifier.begin()
        # The previous incarnation may have died after it published a topic and before it incremented this
        # counter.
        slot.add(ProcessField.TOPICS_CHANGED, 1)
        slot.set(ProcessField.TRUNCATED, found.truncated_bytes)
        slot.set(ProcessField.RECOVERY_NS, self._clock.monotonic_ns() - started)
        for topic, first, last in found.announced:
            log_event(
                log, logging.WARNING, "records lost at restart", topic=topic, first_seq=first, last_seq=last
            )
        for halt in found.halts:
            log_event(
                log, logging.CRITICAL, "topic halted: a file with its records is missing or unreadable",
                topic=halt.topic.name, part=halt.part, reason=halt.reason, first_seq=halt.first_seq,
                last_seq=halt.last_seq,
            )  # fmt: skip
        ms = (self._clock.monotonic_ns() - started) // 1_000_000
        log_event(
            log, logging.INFO, "recovered", records=replay.records, log_bytes=found.bytes, duration_ms=ms
        )

    def _take_lock(self) -> None:
        """Lock the shard's log.

        An orphaned process of a killed engine may still own the lock for a moment (RF-15).
        """
        self._disk.make_dir(f"{self._boot.data_dir}/{META_DIR}")
        make_stream(self._disk, self._boot.data_dir, self._boot.shard)
        for left in range(LOCK_TRIES, 0, -1):
            try:
                self._lock = self._disk.lock(f"{self._directory}/{LOCK_NAME}")
                return
            except DiskError as e:
                if not e.detail.get("holder"):
                    raise
                if left == 1:
                    raise StartRefused("another process writes this shard's log", lock=str(e)) from e
                if left == LOCK_TRIES:
                    # Log this at the first attempt, so that operators see the reason of the delay.
                    log_event(log, logging.WARNING, "waiting for the lock of this shard's log", lock=str(e))
                self._report_progress(0, 1)
                self._clock.sleep(LOCK_WAIT_S)

    def _report_progress(self, done: int, total: int) -> None:
        self._heartbeat.beat(self._clock.monotonic_ns())
        self._slot.set(ProcessField.PROGRESS, done * 1000 // total)

    def _begin(self, found: RecoveryResult) -> None:
        """Let the core write the frames in doubt. File creation blocks here, since no client waits yet."""
        self._slot.set(ProcessField.PROGRESS, 1000)
        effects = self.core.begin(found.batch, found.prev, found.settled, found.damaged, found.halts)
        while self.core.phase is ShardPhase.RECOVERING:
            completions: list[Any] = [self._tick()]
            for effect in effects:
                completion = self._perform[type(effect)](effect)
                if completion is not None:
                    completions.append(completion)
            if len(completions) == 1:
                ready = self._log.await_file()
                if ready is None:
                    raise DiskError("cannot create the first WAL file", directory=self._directory)
                completions.append(ready)
            effects = self.core.handle(completions)
        for effect in effects:
            self._perform[type(effect)](effect)
        for process_id in self.core.requests.process_ids():
            self._worker_liveness.watch(process_id)


def _facts(topic: ShardTopic, state: int) -> TopicFacts:
    return TopicFacts(
        topic_id=topic.topic_id,
        epoch=topic.epoch,
        state=state,
        head_seq=topic.head_seq,
        earliest_seq=topic.earliest_seq,
        cap_floor=topic.cap_floor,
        ttl_floor=topic.ttl_floor,
        trim_floor=topic.trim_floor,
        count=topic.count,
        bytes=topic.bytes,
        last_write_us=topic.last_ts,
        durability_bits=int(topic.config.durability),
        version=topic.version,
        due_us=topic.due_us,
        ttl_us=topic.config.hidden_after_us,
        priority_word=encode_priority(topic.config.priority, is_auto=topic.config.auto_priority),
    )
