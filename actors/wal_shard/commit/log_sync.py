"""Durability of the current log file: syncs, background syncs, and marks of an idle log. Pure."""

from __future__ import annotations

from ringlog.actors.wal_shard.commit.commit_batch import LogPosition
from ringlog.actors.wal_shard.events import Flush, Flushed, PublishMarks, Sync
from ringlog.actors.wal_shard.phases import AwaitedCompletion
from ringlog.actors.wal_shard.retention.volatile_files import VolatileFileTable
from ringlog.actors.wal_shard.shard_state import ShardState
from ringlog.limits import UNSYNCED_BYTES_MAX


class LogSync:
    """Decides when the log is synced, and knows up to where it is durable."""

    def __init__(
        self, state: ShardState, log: LogPosition, volatile_files: VolatileFileTable, flush_interval_ms: int
    ) -> None:
        self._state, self._log, self._volatile_files = state, log, volatile_files
        self._interval_ns = flush_interval_ms * 1_000_000
        self.unsynced: int = 0
        """Bytes that were written after the durable position."""
        self.flush_at_ns: int | None = None
        """Monotonic time of the next background sync."""
        self.mark_at_ns: int | None = None
        """Monotonic time at which an idle log gets a mark with its durable position."""
        self._flush_in_flight: Flush | None = None

    @property
    def is_flushing(self) -> bool:
        """True while a background sync runs."""
        return self._flush_in_flight is not None

    def sync(self, waiting: AwaitedCompletion) -> None:
        """Sync the log, and wait for it."""
        self._state.effects.append(Sync())
        self._state.awaited = waiting

    def note_written(self) -> None:
        """Count the bytes that a write added."""
        self.unsynced = self._log.offset - self._log.durable

    def set_durable(self) -> None:
        """Treat everything written as durable: it is synced, or will be before the effects that follow."""
        self._log.durable = self._log.offset
        self.unsynced = 0
        self.flush_at_ns = None
        self.mark_at_ns = self._state.now_ns + self._interval_ns

    def plan_flush(self) -> None:
        """Start a background sync of what was written, or schedule one."""
        if self.unsynced > UNSYNCED_BYTES_MAX // 2 or self._state.is_due(self.flush_at_ns):
            self.flush()
        elif self.flush_at_ns is None:
            self.flush_at_ns = self._state.now_ns + self._interval_ns

    def flush(self) -> None:
        """Start a background sync, one at a time. No ack waits for it."""
        self.flush_at_ns = None
        if self._flush_in_flight is None:
            self._flush_in_flight = Flush(self._log.file_id, self._log.offset)
            self._state.effects.append(self._flush_in_flight)

    def on_flushed(self, event: Flushed) -> None:
        """Handle the end of a background sync."""
        self._flush_in_flight = None
        if self._state.awaited is AwaitedCompletion.FLUSH:
            self._state.awaited = AwaitedCompletion.NOTHING
        if event.file_id != self._log.file_id or event.stop <= self._log.durable:
            return
        self._log.durable = event.stop
        self.unsynced = self._log.offset - event.stop
        if self.unsynced:
            self.flush_at_ns = self._state.now_ns + self._interval_ns
        else:
            self.mark_at_ns = self._state.now_ns + self._interval_ns
        self.publish_marks()

    def take_mark(self) -> bool:
        """Return True if the idle log needs a mark and has room for it. The mark is then no longer due."""
        self.mark_at_ns = None
        log = self._log
        return log.is_open and log.marked_durable < min(log.durable, log.frames_stop) and log.fits(0)

    def publish_marks(self) -> None:
        """Publish the ends of the log and of the volatile log."""
        log, volatile = self._log, self._volatile_files.log
        self._state.effects.append(
            PublishMarks(log.file_id, log.offset, log.durable, volatile.file_id, volatile.offset)
        )
