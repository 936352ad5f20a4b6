"""Shell of the WAL shard: performs the I/O on rings, socket, files and board.

One short handler for each effect. One pass of the loop gathers a bounded number of events, passes them to the
core, performs its effects in order, and passes the completions back. The shell contains no rules about frames
or topics.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

from ringlog import stop_points
from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.commit.scheduler_notifier import SchedulerNotifier
from ringlog.actors.wal_shard.core import Settings, ShardCore
from ringlog.actors.wal_shard.io.idle_wait import IdleWait
from ringlog.actors.wal_shard.io.log_io import LogIO
from ringlog.actors.wal_shard.io.read_only_probe import ReadOnlyProbe
from ringlog.actors.wal_shard.io.reader_board import EngineTotal, ReaderBoard
from ringlog.actors.wal_shard.io.rings import Rings
from ringlog.actors.wal_shard.io.volatile_log import VolatileLog
from ringlog.actors.wal_shard.leases.job_prefetcher import JobPrefetcher
from ringlog.actors.wal_shard.leases.worker_liveness import WorkerLiveness
from ringlog.actors.wal_shard.metrics.group_board import GroupBoard
from ringlog.actors.wal_shard.metrics.load_monitor import ShardLoadMonitor
from ringlog.actors.wal_shard.metrics.queue_board import QueueBoard
from ringlog.actors.wal_shard.recovery.log_files import stream_directory
from ringlog.actors.wal_shard.recovery.shard_start import ShardStart
from ringlog.actors.wal_shard.requests.call_rings import CallRings
from ringlog.actors.wal_shard.requests.request_transport import REQUESTS_PER_PASS, RequestTransport
from ringlog.actors.wal_shard.retention.storage_query import answer_question
from ringlog.actors.wal_shard.shard_state import ShardIdentity
from ringlog.board.board import Board
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import HistogramKind, ProcessField
from ringlog.board.processes import RECLAIMER, bell_of, slot_of, socket_of
from ringlog.clock import Clock, SystemClock, read_both
from ringlog.compilation import is_compiled
from ringlog.config import from_plain
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import CorruptData, DiskError, ExitCode, InvariantViolation
from ringlog.limits import DISK_POLL_S, INTAKE_END_S
from ringlog.logs import log_event
from ringlog.ring.doorbell import BellListener
from ringlog.runtime.router_socket import RouterSocket
from ringlog.signals import StopFlag
from ringlog.storage.disk import Disk
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.storage.wal import FIRST_FILE_BYTES, ShardLogIdentity, WalWriter

log: logging.Logger = logging.getLogger("ringlog.shard")

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
        self._disk_poll_ns = 0
        self._queue_board, self._group_board = QueueBoard(), GroupBoard()
        self._board = Board.open(boot.shm_dir, writable=True)
        self._slot = self._board.process(boot.slot)
        topic_counts = EngineTotal(self._board, self._slot, ProcessField.TOPICS)
        live_bytes = EngineTotal(self._board, self._slot, ProcessField.LIVE_BYTES)
        identity = ShardIdentity(
            boot.engine_id, boot.shard, boot.shards, boot.incarnation, topics_max, boot.time_base_us
        )
        self.core: ShardCore = ShardCore(
            identity,
            settings,
            publish_topic_count=topic_counts.publish,
            publish_live_bytes=live_bytes.publish,
            on_request=_hit_delete_stop_point,
        )
        leases = self.core.requests.leases
        leases.registry.has_dead_letter_mover = schedulers > 0
        self._load_monitor = ShardLoadMonitor(self._slot, self._clock.monotonic_ns(), is_reacting=is_governed)
        self._scheduler_notifier = SchedulerNotifier(boot, self._board, schedulers)
        self._reader_board = ReaderBoard(boot, self._slot, self.core, self._scheduler_notifier)
        self._socket = RouterSocket(socket_of(boot.shm_dir, boot.name))
        self._bell = BellListener(bell_of(boot.shm_dir, boot.name))
        self._rings = Rings(boot.shm_dir, boot.shard, boot.engine_id)
        self._calls = CallRings(boot.shm_dir, boot.shard, boot.incarnation, self._clock)
        self._directory = stream_directory(boot.data_dir, boot.shard)
        stream = ShardLogIdentity(
            boot.data_dir, self._directory, boot.shard, boot.shards, boot.incarnation,
            bytes.fromhex(boot.boot_id.replace("-", "")), bytes.fromhex(boot.engine_id),
        )  # fmt: skip
        volatile_log = VolatileLog(boot, volatile_bytes)
        writer = WalWriter(self._disk, stream, file_bytes)
        self._log = LogIO(boot, writer, volatile_log, self.core.log_files, self._slot, self._clock)
        self._worker_liveness = WorkerLiveness()
        published_mark = self._reader_board.published_mark
        self._record_index = StoredRecordIndex(self._disk, boot.data_dir, boot.shm_dir, published_mark)
        self._job_prefetcher = JobPrefetcher(
            self._disk, boot.data_dir, boot.shm_dir, published_mark,
            self.core.requests.locations.locate_records, leases.recent_records, leases.sizes,
        )  # fmt: skip
        self._read_only_probe = ReadOnlyProbe(
            self._disk, self._clock, self._directory, boot.read_only_ms, min(FIRST_FILE_BYTES, file_bytes)
        )
        self.exit_code: ExitCode | None = None
        self._heartbeat = Heartbeat(self._slot)
        self._stop_asked_ns = 0
        """Monotonic time of the stop request; 0 if there was none."""
        self._must_drain = False
        self._commit_from_ns = 0
        self._is_idle = True
        self._socket_fd = self._socket.fileno()
        self._transport = RequestTransport(
            boot, self._disk, self._slot, self._heartbeat, self.core, self._socket, self._calls, self._rings,
            self._worker_liveness, self._job_prefetcher,
        )  # fmt: skip
        self._idle_wait = IdleWait(
            self.core, self._slot, self._clock, self._heartbeat, self._load_monitor, self._rings, self._calls,
            self._socket, self._bell, self._log.bells,
        )  # fmt: skip
        self._perform: dict[type, Callable[[Any], Any]] = {
            **self._log.effect_handlers,
            ev.QueryStorage: self._query_storage,
            ev.PublishTopics: self._reader_board.publish_topics,
            ev.PublishMarks: self._reader_board.publish_marks,
            ev.RetireTopic: self._retire_topic,
            ev.Settle: self._settle,
            ev.BatchCommitted: self._committed,
            Reply: self._transport.reply,
            Stop: self._note_stop,
        }
        self._start = ShardStart(
            boot, self._disk, self._clock, self.core, self._slot, self._heartbeat, self._log, volatile_log,
            self._reader_board, topic_counts, live_bytes, self._scheduler_notifier, self._worker_liveness,
            self._perform, is_lenient=is_lenient, has_cold=has_cold,
        )  # fmt: skip

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Recover, and register the descriptors to poll.

        Sets `exit_code` if the directory is not writable.
        """
        # Recovery creates millions of objects that stay. Garbage collection would take half of the start.
        gc.disable()
        try:
            if self._boot.read_only_ms:
                self._start.recover_read_only()
                self._read_only_probe.begin()
            else:
                self._start.recover()
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
        self._idle_wait.register(
            (self._socket_fd, stop.fileno(), self._bell.fileno(), self._worker_liveness.fileno(),
             *self._log.bells)
        )  # fmt: skip
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
        self._transport.detach_rings()
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
        self._idle_wait.wait(work)

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
        self._idle_wait.close()
        self._start.release_lock()

    def _tick(self) -> Tick:
        return Tick(*read_both(self._clock))

    def _gather(self) -> list[Any]:
        """Collect a bounded number of events. The first one is always a Tick."""
        events: list[Any] = [self._tick()]
        load_monitor, now_ns = self._load_monitor, events[0].monotonic_ns
        if now_ns >= load_monitor.due_ns:
            load_monitor.sample(now_ns, self._rings, self.core.requests.appends.refused_for_pressure)
        is_readable = self._idle_wait.should_poll(self._socket_fd)
        if self._is_idle or is_readable:
            self._transport.receive(is_readable=is_readable)
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
            is_full = len(self._transport.pending) >= REQUESTS_PER_PASS
            self.core.requests.is_overloaded = is_full and load_monitor.is_refusing
            self._transport.take_calls()
            if self._transport.pending:
                events.extend(self._transport.pending)
                self._transport.pending.clear()
        # Polled after the frames and handled before them: a record that was sent after the death of a process
        # must not go to a waiting claim of it.
        is_claim_waiting = bool(self.core.requests.leases.waiting_claims)
        if self._worker_liveness and (
            is_claim_waiting or self._idle_wait.should_poll(self._worker_liveness.fileno())
        ):
            dead = self._worker_liveness.take_dead()
            for process_id in dead:
                self._calls.remove_of(process_id)
            events[1:1] = [ev.WorkerDied(*process_id) for process_id in dead]
        if ended := self._calls.take_ended():
            events.insert(1, ev.ConnectionsEnded(ended))
        self._idle_wait.forget_wakeup()
        if len(events) == 1 and self._is_due(now_ns):
            events.append(events[0])
        return events

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
        if self._reader_board.has_published:
            self._reader_board.has_published = False
            self._rings.wake_publication_waiters()
        if calls.has_unrung:
            calls.ring_bells()  # For requests that were refused before they reached the core.

    def _decide(self, events: list[Any]) -> list[Any]:
        """Pass events to the core and return its effects. If it crashes, record the current request."""
        try:
            return self.core.handle(events)
        except Exception:
            self._transport.record_crash()
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
        self.core.requests.appends.disk_missing_bytes = missing

    # -- effects --------------------------------------------------------------------------------------

    def _query_storage(self, effect: ev.QueryStorage) -> ev.StorageQueried:
        answers = [answer_question(question, self._record_index.for_topic) for question in effect.questions]
        for question, found in zip(effect.questions, answers, strict=True):
            if isinstance(found, CorruptData):
                name = question.topic.name
                log_event(log, logging.ERROR, "stored records are damaged", topic=name, **found.detail)
        return ev.StorageQueried(answers)

    def _retire_topic(self, effect: ev.RetireTopic) -> None:
        self._reader_board.retire_topic(effect.topic)
        self._job_prefetcher.forget(effect.topic.topic_id)
        if effect.unused_ms:
            gone, ms = effect.topic, effect.unused_ms
            log_event(
                log, logging.INFO, "idle topic deleted", topic=gone.name, unused_ms=ms, records=gone.count
            )

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

    def _note_stop(self, effect: Stop) -> None:
        self.exit_code = ExitCode(effect.code)
