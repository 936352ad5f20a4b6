"""The core's table of volatile files: append position, and the records of each topic in each file. Pure.

The shell manages the files themselves (wal_shard/io/volatile_log.py). When a new file needs space, the oldest
file is deleted with its records, and the floors of their topics rise.
"""

from __future__ import annotations

import numpy as np

from ringlog.actors.wal_shard.commit.admission import FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import (
    CommitBatch,
    LogPosition,
    RoutedPart,
    lay_out_volatile,
)
from ringlog.actors.wal_shard.events import FramesArrived, VolatileFailed, VolatileOpened, WriteVolatile
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.routing import added_bytes
from ringlog.contract import ControlReceived
from ringlog.envelope.messages import Append, Route
from ringlog.frame import layout
from ringlog.frame.batch import counts_of
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

RETRY_NS = 1_000_000_000
"""Time between two attempts to create a volatile file.
Until the next attempt, ephemeral records are refused."""

TopicsInFile = dict[int, tuple[ShardTopic, int, int, int]]
"""Topic id -> (topic, one past its last seq in the file, number of its records in the file, their bytes)."""


class VolatileFileTable:
    """State of the volatile files. `topics_of` (file id -> TopicsInFile) is shared with checkpoints."""

    def __init__(
        self, directory: TopicDirectory, log_files: LogFileTable, topics_of: dict[int, TopicsInFile]
    ) -> None:
        self.log: LogPosition = LogPosition()
        self._directory = directory
        self._log_files = log_files
        self._topics_of = topics_of
        self._retry_ns: int | None = None

    # -- room -----------------------------------------------------------------------------------------

    def bytes_of(self, event: FramesArrived | ControlReceived, length: int) -> int:
        """Return the maximum bytes that an event with `length` bytes of data may add to the volatile log."""
        if isinstance(event, FramesArrived):
            ids = np.fromiter(self._directory.ephemeral, dtype=np.uint64)
            is_volatile = np.isin(event.batch.words[:, layout.W_TOPIC], ids)
            return int(event.batch.total_bytes[is_volatile].sum())
        if isinstance(event.message, Route):
            has_volatile = any(row.dest_id in self._directory.ephemeral for row in event.message.rows)
            return length + added_bytes(event.message) if has_volatile else 0
        if not isinstance(event.message, Append):
            return 0
        topic = self._directory.find(event.message.topic)
        if topic is not None:
            return length if topic.config.durability == Durability.EPHEMERAL else 0
        return length if (event.message.config or {}).get("durability") == "ephemeral" else 0

    def fits(self, needed: int) -> bool:
        """Return True if the current file has room for `needed` more bytes."""
        return self.log.is_open and self.log.fits(needed)

    def may_try(self, now_ns: int) -> bool:
        """Return True if a new file may be requested. After a failure, it may not until the retry time."""
        return self._retry_ns is None or now_ns >= self._retry_ns

    # -- files ------------------------------------------------------------------------------------------

    def write(self, batch: CommitBatch) -> WriteVolatile:
        """Lay out the ephemeral part of a commit batch.

        Its space was reserved before its seqs were assigned.
        """
        start = self.log.offset
        buffers = lay_out_volatile(batch, self.log)
        held = self._topics_of.setdefault(self.log.file_id, {})
        for part in batch.parts:
            if isinstance(part, FrameIntake):
                _count(part, held)
            elif isinstance(part, RoutedPart) and part.is_volatile:
                for copy in part.copies:
                    records = copy.last_seq - copy.first_seq + 1
                    _, _, had, had_bytes = held.get(copy.topic.topic_id, (copy.topic, 0, 0, 0))
                    counts = (had + records, had_bytes + copy.bytes)
                    held[copy.topic.topic_id] = (copy.topic, copy.last_seq + 1, *counts)
        batch.volatile_bytes = 0
        return WriteVolatile(buffers, start, self.log.offset - start)

    def start_file(self, event: VolatileOpened) -> None:
        """Make a new file the current one."""
        self._retry_ns = None
        log_files = self._log_files
        if self.log.is_open:
            log_files.stops[self.log.file_id] = self.log.offset
        self.log.start_file(event.file_id, event.salt, event.start, event.capacity)
        log_files.starts[event.file_id] = event.start
        log_files.salts[event.file_id] = event.salt

    def schedule_retry(self, now_ns: int) -> None:
        """Set the retry time after a file could not be created."""
        self._retry_ns = now_ns + RETRY_NS

    def evict_files(
        self, event: VolatileOpened | VolatileFailed, removals: Removals, batch: CommitBatch
    ) -> None:
        """Remove the records of dropped files, and raise the cap floors of their topics."""
        for file_id in event.dropped:
            for topic, floor, records, accounted in self._topics_of.pop(file_id, {}).values():
                if self._directory.by_id.get(topic.topic_id) is topic:
                    removals.evict_file(file_id, topic, floor, records, accounted)
                    topic.index.drop_file(file_id)
                    batch.dirty_topics[topic.topic_id] = topic
                    batch.has_removals = True
            removals.forget_file(file_id)
            log_files = self._log_files
            for table in (log_files.paths, log_files.salts, log_files.stops, log_files.starts):
                table.pop(file_id, None)

    def files_of(self, topic: ShardTopic) -> list[tuple[int, int]]:
        """Return (volatile file, one past the topic's last seq in it) for all files of the topic.

        For an ephemeral topic, the current file is always last, and includes all further seqs.
        """
        current = self.log.file_id
        held = [
            (file_id, topics[topic.topic_id][1])
            for file_id, topics in sorted(self._topics_of.items())
            if topic.topic_id in topics and file_id != current
        ]
        if topic.config.durability == Durability.EPHEMERAL:
            return [*held, (current, topic.next_seq)]
        of_current = self._topics_of.get(current, {}).get(topic.topic_id)
        return held if of_current is None else [*held, (current, of_current[1])]


def _count(intake: FrameIntake, held: TopicsInFile) -> None:
    """Add the volatile frames of an intake to the topic counts of a file."""
    words = intake.batch.words
    counts = counts_of(words)
    for admitted_range in intake.admitted_ranges:
        if not admitted_range.is_volatile:
            continue
        assert intake.checked is not None
        rows = slice(admitted_range.start, admitted_range.stop)
        records, accounted = int(counts[rows].sum()), int(intake.checked.accounted[rows].sum())
        floor = int(words[admitted_range.stop - 1, layout.W_BASE_SEQ] + counts[admitted_range.stop - 1])
        _, _, had, had_bytes = held.get(admitted_range.topic.topic_id, (admitted_range.topic, 0, 0, 0))
        held[admitted_range.topic.topic_id] = (
            admitted_range.topic, floor, had + records, had_bytes + accounted,
        )  # fmt: skip
