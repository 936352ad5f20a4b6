"""Start of a shard: locks the log, recovers the state, and copies the frames in doubt. Part of the shell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ringlog import stop_points
from ringlog.actors.wal_shard.commit.scheduler_notifier import SchedulerNotifier
from ringlog.actors.wal_shard.core import ShardCore
from ringlog.actors.wal_shard.io.log_io import LogIO
from ringlog.actors.wal_shard.io.reader_board import EngineTotal, ReaderBoard
from ringlog.actors.wal_shard.io.volatile_log import VolatileLog
from ringlog.actors.wal_shard.leases.worker_liveness import WorkerLiveness
from ringlog.actors.wal_shard.phases import ShardPhase
from ringlog.actors.wal_shard.recovery.log_files import StartFacts, make_stream, stream_directory
from ringlog.actors.wal_shard.recovery.recovery import Recovery
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult, clean_up
from ringlog.actors.wal_shard.recovery.replay import Replay
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.board.board import ProcessSlot
from ringlog.board.heartbeat import Heartbeat
from ringlog.board.layout import ProcessField, ProcessState, WatermarkKind
from ringlog.clock import Clock, read_both
from ringlog.contract import Tick
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import DiskError, StartRefused
from ringlog.logs import log_event
from ringlog.storage.disk import Disk
from ringlog.storage.layout import LOCK_NAME, META_DIR

log: logging.Logger = logging.getLogger("ringlog.shard")

LOCK_TRIES = 600
LOCK_WAIT_S = 0.05


class ShardStart:
    """The start of one incarnation, and the lock of its log."""

    def __init__(
        self, boot: ActorBoot, disk: Disk, clock: Clock, core: ShardCore, slot: ProcessSlot,
        heartbeat: Heartbeat, log_io: LogIO, volatile_log: VolatileLog, reader_board: ReaderBoard,
        topic_counts: EngineTotal, live_bytes: EngineTotal, scheduler_notifier: SchedulerNotifier,
        worker_liveness: WorkerLiveness, perform: dict[type, Callable[[Any], Any]], *, is_lenient: bool,
        has_cold: bool,
    ) -> None:  # fmt: skip
        """Set up the start. `perform` performs each type of effect; see the shell."""
        self._boot, self._disk, self._clock = boot, disk, clock
        self._core, self._slot, self._heartbeat = core, slot, heartbeat
        self._log_io, self._volatile_log = log_io, volatile_log
        self._reader_board, self._topic_counts, self._live_bytes = reader_board, topic_counts, live_bytes
        self._scheduler_notifier, self._worker_liveness = scheduler_notifier, worker_liveness
        self._perform = perform
        self._is_lenient, self._has_cold = is_lenient, has_cold
        self._directory = stream_directory(boot.data_dir, boot.shard)
        self._lock = -1

    def release_lock(self) -> None:
        """Release the lock of the log, if this incarnation has it."""
        if self._lock >= 0:
            self._disk.unlock(self._lock)

    def recover(self) -> None:
        """Recover, and write the frames in doubt into a new log file."""
        boot, slot = self._boot, self._slot
        started = self._clock.monotonic_ns()
        slot.set(ProcessField.STATE, ProcessState.RECOVERING)
        self._take_lock()
        found, replay = self._replay()
        checkpoint = self._core.checkpoint
        checkpoint.restore(found.number, found.waiting, found.changed, found.listed, has_base=found.has_base)
        stop_points.hit("recovery_before_copy")
        self._begin(found)
        stop_points.hit("recovery_after_copy")
        clean_up(self._disk, boot.data_dir, found)
        self._show_recovered(replay, found, started)

    def recover_read_only(self) -> None:
        """Recover without writing.

        No lock is needed: frames that another process still writes are not durable.
        """
        started = self._clock.monotonic_ns()
        self._slot.set(ProcessField.STATE, ProcessState.RECOVERING)
        found, replay = self._replay()
        directory = self._directory[len(self._boot.data_dir) + 1 :]
        self._core.begin_read_only(ReadOnlyMode(self._boot.shard, directory, found.in_doubt), found.halts)
        # Readers stop at the published mark. After a start of the engine, the board contains none.
        slot = self._slot
        slot.set_watermark(
            WatermarkKind.PUBLISHED,
            *max(self._core.log_files.last_closed(), slot.watermark(WatermarkKind.PUBLISHED)),
        )
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
        had = self._reader_board.reset()
        checkpoint = self._core.checkpoint
        replay = Replay(
            self._core.identity, self._core.directory, checkpoint.segments, is_lenient=self._is_lenient
        )
        start = StartFacts(
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
        self._reader_board.keep_slots(had)
        self._core.log_files.update(found.log_files)
        return found, replay

    def _show_recovered(self, replay: Replay, found: RecoveryResult, started: int) -> None:
        slot = self._slot
        self._reader_board.publish_recovered()
        self._topic_counts.publish(len(self._core.directory))
        self._live_bytes.publish(self._core.directory.live_bytes)
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
        effects = self._core.begin(found.batch, found.prev, found.settled, found.damaged, found.halts)
        while self._core.state.phase is ShardPhase.RECOVERING:
            completions: list[Any] = [Tick(*read_both(self._clock))]
            for effect in effects:
                completion = self._perform[type(effect)](effect)
                if completion is not None:
                    completions.append(completion)
            if len(completions) == 1:
                ready = self._log_io.await_file()
                if ready is None:
                    raise DiskError("cannot create the first WAL file", directory=self._directory)
                completions.append(ready)
            effects = self._core.handle(completions)
        for effect in effects:
            self._perform[type(effect)](effect)
        for process_id in self._core.requests.process_ids():
            self._worker_liveness.watch(process_id)
