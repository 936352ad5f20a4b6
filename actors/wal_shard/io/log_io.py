"""I/O of the shard's log: writes, syncs, and the creation of files. Part of the shell.

Only this module performs the core's effects on WAL files, on volatile files, and on the next WAL file, which
a thread prepares. A failed sync is never retried: the error ends the incarnation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ringlog import stop_points
from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.io.flusher import Flusher
from ringlog.actors.wal_shard.io.preparer import Preparer
from ringlog.actors.wal_shard.io.volatile_log import VolatileLog
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import HistogramKind, ProcessField
from ringlog.clock import Clock
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import DiskError, InvariantViolation
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.logs import log_event
from ringlog.ring.doorbell import EventBell
from ringlog.storage.layout import WAL_FLAG_PREV_ORDERLY
from ringlog.storage.wal import PreparedFile, WalWriter

log: logging.Logger = logging.getLogger("ringlog.shard")


class LogIO:
    """Performs the log effects of one incarnation."""

    def __init__(
        self, boot: ActorBoot, writer: WalWriter, volatile: VolatileLog, log_files: LogFileTable,
        slot: ProcessSlot,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._boot, self._log_files, self._slot, self._clock = boot, log_files, slot, clock
        self._writer, self._volatile_log = writer, volatile
        self._preparer = Preparer(writer)
        self._flusher = Flusher(writer)
        self._prepared: PreparedFile | None = None
        self._syncs_ns: list[int] = []
        self.bells: dict[int, EventBell] = {
            bell.fileno(): bell for bell in (self._preparer.bell, self._flusher.bell)
        }
        """Bells of the helper threads by file descriptor. They wake the shard when a result is ready."""
        self.effect_handlers: dict[type, Callable[[Any], Any]] = {
            ev.WriteBatch: self._write_group,
            ev.WriteVolatile: self._write_volatile,
            ev.Sync: self._sync,
            ev.Flush: self._flush,
            ev.PrepareFile: self._prepare_file,
            ev.OpenFile: self._open_file,
            ev.OpenVolatile: self._open_volatile,
        }

    def take_completions(self) -> list[Any]:
        """Return events for everything that the helper threads completed since the last call."""
        events: list[Any] = []
        result = self._preparer.take()
        if isinstance(result, PreparedFile):
            self._prepared = result
            events.append(ev.FileReady(result.capacity))
        elif isinstance(result, DiskError):
            log_event(log, logging.ERROR, "cannot create the next WAL file", reason=str(result))
            events.append(ev.FileFailed(str(result)))
        flushed = self._flusher.take()
        if flushed is not None:
            self._slot.add(ProcessField.SYNCS, 1)
            events.append(flushed)
        return events

    def await_file(self) -> ev.FileReady | None:
        """Wait for the file that is being prepared. Return None if no file was requested.

        Raise the DiskError if the file could not be created.
        """
        prepared = self._preparer.finish()
        if prepared is None:
            if self._preparer.failure is not None:
                raise self._preparer.failure
            return None
        self._prepared = prepared
        return ev.FileReady(prepared.capacity)

    def publish_sync_times(self) -> None:
        """Publish the durations of syncs on the board. Call it at the end of a pass, after all replies."""
        for took in self._syncs_ns:
            self._slot.add(ProcessField.SYNCS, 1)
            self._slot.add(ProcessField.SYNC_NS, took)
            self._slot.histogram(HistogramKind.SYNC).record(took)
        self._syncs_ns.clear()

    def close_files(self, *, is_read_only: bool) -> None:
        """Truncate the log file at its end, and delete a prepared file that was not used."""
        left = self._preparer.finish()
        for prepared in (self._prepared, left):
            if prepared is not None:
                self._writer.discard(prepared)
        if not is_read_only:
            self._writer.close(truncate=True)

    def close(self) -> None:
        """Stop the threads and remove the volatile log."""
        self._preparer.close()
        self._flusher.close()
        self._volatile_log.close()

    # -- effects --------------------------------------------------------------------------------------

    def _write_group(self, effect: ev.WriteBatch) -> ev.BatchWritten:
        if self._slot.get(ProcessField.INCARNATION) != self._boot.incarnation:
            # This check is not the fence: a successor starts only after the death of this process was
            # observed (P2). It detects a stopped process that continues although a newer incarnation runs.
            raise DiskError(
                "a newer incarnation of this shard is running",
                holder=self._slot.get(ProcessField.INCARNATION),
            )  # fmt: skip
        started_ns = self._clock.monotonic_ns()
        self._writer.append(effect.buffers, effect.offset, effect.length, is_synced=effect.is_synced)
        self._slot.set(ProcessField.LAST_APPEND_NS, self._clock.monotonic_ns() - started_ns)
        stop_points.hit("log_after_write")
        return ev.BatchWritten()

    def _write_volatile(self, effect: ev.WriteVolatile) -> None:
        self._volatile_log.append(effect.buffers, effect.offset)

    def _sync(self, effect: ev.Sync) -> ev.Synced:
        started = self._clock.monotonic_ns()
        self._writer.sync()
        took_ns = self._clock.monotonic_ns() - started
        self._slot.set(ProcessField.LAST_SYNC_NS, took_ns)
        self._syncs_ns.append(took_ns)
        stop_points.hit("log_after_sync")
        return ev.Synced()

    def _flush(self, effect: ev.Flush) -> None:
        self._flusher.request(effect)

    def _prepare_file(self, effect: ev.PrepareFile) -> None:
        if self._prepared is not None:
            self._writer.discard(self._prepared)
            self._prepared = None
        self._preparer.request(effect.at_least, fill=effect.fill)

    def _open_file(self, effect: ev.OpenFile) -> ev.FileOpened:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise InvariantViolation("no file was prepared")
        stop_points.hit("rotate_before_header")
        header = self._writer.open(
            prepared,
            salt=int.from_bytes(os.urandom(8), "little") | 1,
            created_us=self._clock.now_us(),
            prev=(effect.prev_file, effect.prev_stop, effect.prev_seal),
            flags=WAL_FLAG_PREV_ORDERLY if effect.orderly else 0,
            last_identity=effect.last_identity,
        )
        stop_points.hit("rotate_after_sync")
        self._log_files.paths[header.file_id] = self._writer.path[len(self._boot.data_dir) + 1 :]
        self._slot.add(ProcessField.WAL_FILES, 1)
        return ev.FileOpened(header.file_id, header.salt, WAL_HEADER_BYTES, prepared.capacity)

    def _open_volatile(self, effect: ev.OpenVolatile) -> ev.VolatileOpened | ev.VolatileFailed:
        opened = self._volatile_log.open(effect.at_least, self._clock.now_us())
        if isinstance(opened, ev.VolatileFailed):
            return opened
        self._log_files.paths[opened.file_id] = self._volatile_log.path
        return opened
