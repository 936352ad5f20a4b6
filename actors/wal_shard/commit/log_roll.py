"""Change to the next log file: its preparation ahead of time, and the roll. Pure.

If a file cannot be created, the shard continues in the current one and tries again after a pause.
"""

from __future__ import annotations

import sys

from ringlog.actors.wal_shard.commit.commit_batch import MARK_BYTES_MAX, LogPosition
from ringlog.actors.wal_shard.commit.log_sync import LogSync
from ringlog.actors.wal_shard.events import FileFailed, FileOpened, FileReady, OpenFile, PrepareFile
from ringlog.actors.wal_shard.phases import AwaitedCompletion, ShardPhase
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.shard_state import ShardState
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.topic.directory import TopicDirectory

_FILE_RETRY_NS = 1_000_000_000
_KEPT_BYTES = 256 << 10
"""Bytes kept for requests without records at the end of a file, while no next file can be created."""
_FILL_WHEN_HALF_TAKES_NS = 1_000_000_000
"""If the first half of a file lasted at least this long, the next file is filled in advance.
For faster streams it is only allocated. Filling would take half of the device's bandwidth, and their batches
are large enough that longer syncs do not matter."""


class LogRoll:
    """The next file of one shard's log, and the change to it."""

    def __init__(
        self, state: ShardState, log: LogPosition, log_files: LogFileTable, log_sync: LogSync,
        directory: TopicDirectory,
    ) -> None:  # fmt: skip
        self._state, self._log, self._log_files, self._log_sync = state, log, log_files, log_sync
        self._directory = directory
        self.ready_capacity: int = 0
        """Size of the file that is prepared; 0 if there is none."""
        self._is_preparing = False
        self.failure: str = ""
        """Why the next file could not be created; "" if it could."""
        self.retry_at_ns: int = 0
        self._wanted_bytes = 0
        self._opened_ns = 0
        self._files_opened = 0
        self.prev: tuple[int, int, int, bool] = (0, 0, 0, False)
        """(file, stop, seal, orderly) of the previous file."""
        self.has_records: bool = False
        """True if the current file contains records that a checkpoint could absorb."""

    # -- the next file --------------------------------------------------------------------------------

    def next_retry_ns(self) -> int | None:
        """Return the monotonic time at which the creation of a file is tried again, or None."""
        return self.retry_at_ns if self.failure and not self._is_preparing else None

    def retry(self) -> None:
        """Request the file again if its creation failed and the pause is over."""
        if self.failure and not self._is_preparing and self._state.now_ns >= self.retry_at_ns:
            self.prepare(self._wanted_bytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes at the end of the current file that are kept for requests without records."""
        return min(_KEPT_BYTES, self._log.capacity // 8) if self.failure else 0

    @property
    def bytes_before_kept(self) -> int:
        """Maximum size of a commit batch that leaves what is kept. Unlimited while files can be created."""
        if not self.failure:
            return sys.maxsize
        return self._log.capacity - self._log.offset - MARK_BYTES_MAX - self.kept_bytes

    def has_ready(self, needed: int) -> bool:
        """Return True if the prepared file has room for `needed` bytes."""
        return self.ready_capacity >= needed + WAL_HEADER_BYTES + MARK_BYTES_MAX

    def prepare(self, needed: int) -> None:
        """Request a file with room for `needed` bytes."""
        self._wanted_bytes = needed
        now_ns = self._state.now_ns
        if not self._is_preparing and not (self.failure and now_ns < self.retry_at_ns):
            self._is_preparing = True
            # A prepared file that is too small is discarded for the new one.
            self.ready_capacity = 0
            fill = self._files_opened <= 1 or now_ns - self._opened_ns > _FILL_WHEN_HALF_TAKES_NS
            self._state.effects.append(PrepareFile(needed + WAL_HEADER_BYTES + MARK_BYTES_MAX, fill))

    def prepare_ahead(self) -> None:
        """Request the next file as soon as the current one is half full."""
        if self._log.is_open and not self.ready_capacity and self._log.offset * 2 > self._log.capacity:
            self.prepare(0)

    def on_ready(self, event: FileReady) -> None:
        """Handle the creation of the requested file."""
        self.ready_capacity, self._is_preparing, self.failure = event.capacity, False, ""
        if self._state.awaited is AwaitedCompletion.FILE:
            self._state.awaited = AwaitedCompletion.NOTHING

    def on_failed(self, event: FileFailed) -> None:
        """Handle the failure to create the requested file."""
        self._is_preparing, self.failure = False, event.reason
        self.retry_at_ns = self._state.now_ns + _FILE_RETRY_NS

    # -- the roll -------------------------------------------------------------------------------------

    def roll(self, needed: int) -> None:
        """Take the next step to a file with room for `needed` bytes."""
        if not self.has_ready(needed):
            self.ready_capacity = 0
            self.prepare(needed)
            self._state.awaited = AwaitedCompletion.FILE
        elif self._log_sync.is_flushing:
            # The background sync runs on the file that is about to be closed.
            self._state.awaited = AwaitedCompletion.FLUSH
        elif self._log.is_open and self._log.durable < self._log.offset:
            self._log_sync.sync(AwaitedCompletion.ROLL)
        else:
            self.open()

    @property
    def must_roll(self) -> bool:
        """True if the current file contains records for a checkpoint, and a new file is possible."""
        return self.has_records and not self.failure and self._state.phase is ShardPhase.ACTIVE

    def roll_early(self) -> None:
        """Close the current file as soon as the next one is ready. Commits do not wait for it."""
        if self.ready_capacity:
            self.roll(0)
        else:
            self.prepare(0)

    def open(self) -> None:
        """Open the prepared file, after everything in the current one is durable."""
        if self._log.is_open:
            self.prev = (self._log.file_id, self._log.offset, self._log.last_seal, False)
        self.ready_capacity = 0
        self._state.effects.append(OpenFile(*self.prev, self._directory.last_identity))
        self._state.awaited = AwaitedCompletion.OPEN

    def on_opened(self, event: FileOpened) -> None:
        """Make the opened file the current one."""
        self._state.awaited = AwaitedCompletion.NOTHING
        if self._log.is_open:
            self._log_files.stops[self._log.file_id] = self._log.offset
        self._log.start_file(event.file_id, event.salt, event.start, event.capacity)
        self._opened_ns = self._state.now_ns
        self._files_opened += 1
        self.has_records = False
        self._log_files.starts[event.file_id] = event.start
        self._log_files.salts[event.file_id] = event.salt
