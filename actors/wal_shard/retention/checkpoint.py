"""The shard's part of checkpoints: which files are absorbed, which records are live, which topics changed.

Pure. The compactor sends the requests, and the shard replies. A checkpoint has five steps:

1. CheckpointOpen: list the log files that are closed, durable and not absorbed, in order of replay.
2. ListLiveRecords: report the deleted records in these files, which need no place in a segment.
3. SegmentsChange: register the new segments. Readers are directed to segments first, and to the log for other
records. 4. CheckpointRows, in pages: return the state of every topic that changed since the last finished
checkpoint.
   Pages are taken between commit batches, from published state. The last page waits until all of this state
   is durable, so that no snapshot is ahead of its log (C2).
5. CheckpointDone: the snapshot is durable and verified. Readers are no longer directed to the absorbed files.
The files
   that the previous snapshot absorbed first may be deleted: two snapshots are kept, each with its log (C4).

If a topic changes after its row was captured, the next checkpoint captures it again. The changes in between
are in files that are not absorbed yet, and replay applies them once.

The position of a record may change without a new version of its topic. An earlier position stays valid as
long as the reader can open the file, because a segment and the log contain the same records. If the file is
deleted, the reader queries the shard again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, LogPosition
from ringlog.actors.wal_shard.commit.control_records import CheckpointPassed, frame_of
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.recovery.shard_facts import FACTS_VERSION, ShardFacts, encode_facts, ref_fields
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from ringlog.limits import CHECKPOINT_REPLY_BYTES, CHECKPOINT_ROWS_PER_REPLY, WAL_HEADER_BYTES
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.row import encode_row
from ringlog.topic.segment_catalog import SegmentCatalog, owned_by
from ringlog.topic.state import ShardTopic
from ringlog.types import Codec

LIVE_TOPICS_MAX = 65_536
PRUNED_PER_REQUEST = 4_096
"""Maximum number of topics whose index is cleared of absorbed files in one request."""

HandlerReply = m.Message | tuple[m.Message, Any]
VolatileContents = Mapping[int, Mapping[int, tuple[ShardTopic, int, int, int]]]
"""Volatile file -> topic id -> (topic, one past its last seq in the file, records, bytes)."""


class ShardCheckpoint:
    """State of a shard's snapshots and segments, and the handlers of requests by compactor and reclaimer."""

    def __init__(
        self, shard: int, shards: int, incarnation: int, directory: TopicDirectory, log_files: LogFileTable,
        log: LogPosition, volatile: VolatileContents,
    ) -> None:  # fmt: skip
        self._shard, self._shards, self._incarnation = shard, shards, incarnation
        self._directory = directory
        self._log_files = log_files
        self._log = log
        self._volatile_files = volatile
        self.segments: SegmentCatalog = SegmentCatalog()
        self.changed: set[int] = set()
        """Ids of topics that changed since the rows of the last finished checkpoint were captured."""
        self.number: int = 0
        """Number of the last known snapshot; 0 if there is none."""
        self._has_base = False
        """True if that snapshot is this shard's own. A checkpoint then contains only changed topics."""
        self._listed: set[int] = set()
        """Segments that the last snapshot lists.
        Recovery finds only these if their data part is in the cold tier."""
        self._next_listed: set[int] = set()
        self._waiting: list[tuple[int, str]] = []
        """(file, path) that the last snapshot absorbed first. They are deleted after the next checkpoint."""
        self._planned: list[int] = []
        self._absorbing: list[int] = []
        self._pending: deque[int] = deque()
        self._unsent = memoryview(b"")
        """Rest of the rows of this checkpoint that are encoded: it follows in the next replies."""
        self._checkpoint_topics: set[int] = set()
        self._is_full = False
        self._known = (0, 0)
        self._is_open = False
        """True while a checkpoint has captured rows and is not finished."""
        self._stale: deque[int] = deque()
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, CommitBatch, int], HandlerReply]
        ] = {
            m.CheckpointOpen: self._open,
            m.ListLiveRecords: self._live,
            m.SegmentsChange: self._segments,
            m.SegmentTier: self._tier,
            m.CheckpointRows: self._rows,
            m.CheckpointDone: self._done,
        }

    # -- state ----------------------------------------------------------------------------------------

    def restore(
        self, number: int, waiting: Iterable[tuple[int, str]], changed: Iterable[int], listed: Iterable[int],
        *, has_base: bool,
    ) -> None:  # fmt: skip
        """Restore the state from recovery: the last snapshot, and the topics that changed since.

        Without `has_base`, `number` belongs to a snapshot of another shard count. The next checkpoint then
        contains all topics, and earlier snapshots of this shard with a lower number are no longer valid.
        """
        self.number, self._has_base = number, has_base
        self._waiting = list(waiting)
        self.changed.update(changed)
        self._listed = set(listed)

    def track_changes(self, dirty: Iterable[int], retired: Iterable[ShardTopic]) -> None:
        """Record the topics that a commit batch changed or deleted."""
        self.changed.update(dirty)
        self.changed.update([topic.topic_id for topic in retired])

    # -- files and live records -----------------------------------------------------------------------

    def _open(
        self, message: m.CheckpointOpen, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        self._prune()
        files = [
            m.Extent(self._log_files.paths[each], each, self._log_files.salts[each], *extent_range)
            for each, stop in sorted(self._log_files.closed_files().items())
            for extent_range in self._log_files.whole(each, WAL_HEADER_BYTES, stop) or [(stop, stop)]
        ]
        self._planned = list(dict.fromkeys([each.file_id for each in files]))
        size = sum([each.stop - each.start for each in files]) + self._log.offset
        segments = list(self.segments.refs.values()) if message.segments else []
        return m.CheckpointPlan(
            self._shard, self._shards, self._incarnation, files, size, self.number, segments,
            list(self.segments.missing.values()),
        )  # fmt: skip

    def _live(
        self, message: m.ListLiveRecords, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        data = event.attachment or b""
        if not 0 <= message.topics <= LIVE_TOPICS_MAX or len(data) != 8 * message.topics:
            raise InvalidRequest(
                f"attachment must be 8 bytes for each topic, for at most {LIVE_TOPICS_MAX} topics",
                announced=message.topics, bytes=len(data), max=LIVE_TOPICS_MAX,
            )  # fmt: skip
        rows: list[int] = []
        deleted, codecs = bytearray(), bytearray()
        for topic_id in np.frombuffer(data, dtype="<u8").tolist():
            topic = self._directory.find_by_id(topic_id)
            if topic is None:
                rows += (topic_id, 0, 0, 0, 0)
                codecs.append(0)
                continue
            start = len(deleted)
            if topic.dead:
                deleted += topic.dead.serialize()
            rows += (topic_id, topic.epoch, topic.earliest_seq, start, len(deleted))
            codecs.append(int(Codec[topic.config.compression.upper()]))
        # The compactor leaves these records out forever, so their deletion must be durable before the reply.
        self._await_durable(batch)
        wanted = bytes(codecs) if any(codecs) else b""
        return m.LiveRecordsReply(message.topics, bytes(deleted), wanted), np.array(
            rows, dtype="<u8"
        ).tobytes()

    def _await_durable(self, batch: CommitBatch) -> None:
        """Make the reply wait until everything so far is durable."""
        if batch.parts:
            batch.needs_sync = True
        elif self._log.durable < self._log.offset:
            batch.add_control(frame_of(CheckpointPassed(self.number), 0), sync=True)

    # -- segments -------------------------------------------------------------------------------------

    def _segments(
        self, message: m.SegmentsChange, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        """Add and remove segments, all or none. Idempotent."""
        segments = self.segments
        added = [ref for ref in message.added if ref.number not in segments.refs]
        removed = [number for number in message.removed if number in segments.refs]
        if len(removed) != len(message.removed) and (added or not message.added):
            unknown = sorted(set(message.removed) - set(removed))
            return m.SegmentsChanged(False, f"unknown segments {unknown[:8]}")
        if isinstance(event.opened, str):
            return m.SegmentsChanged(False, event.opened)
        tables = event.opened or {}
        missing = [ref.number for ref in added if ref.number not in tables]
        if missing:
            return m.SegmentsChanged(False, f"segments {missing[:8]} were not opened")
        for number in removed:
            segments.remove(number)
        for ref in added:
            table = segments.split_rows(*tables[ref.number])
            segments.add(ref, table, owned_by(table, self._shard, self._shards))
        return m.SegmentsChanged(True)

    def _tier(
        self, message: m.SegmentTier, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        if message.number not in self.segments.refs:
            return m.SegmentsChanged(False, f"unknown segment {message.number}")
        if message.tier not in (m.TIER_HOT, m.TIER_BOTH, m.TIER_COLD):
            return m.SegmentsChanged(False, f"unknown tier {message.tier}")
        if message.tier == m.TIER_COLD and message.number not in self._listed:
            return m.SegmentsChanged(False, f"no snapshot names segment {message.number} yet")
        self.segments.set_tier(message.number, message.tier)
        return m.SegmentsChanged(True)

    # -- rows -----------------------------------------------------------------------------------------

    def _rows(
        self, message: m.CheckpointRows, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        self._prune()
        if message.begin:
            self._begin(message)
        elif not self._is_open:
            raise InvalidRequest("no checkpoint is open: send CheckpointRows with begin first")
        page: list[tuple[int, int]] = []
        parts: list[bytes] = []
        room = CHECKPOINT_REPLY_BYTES - len(self._unsent)
        while self._pending and room > 0 and len(page) < CHECKPOINT_ROWS_PER_REPLY:
            topic_id = self._pending.popleft()
            topic = self._directory.find_by_id(topic_id)
            row = b"" if topic is None else encode_row(topic, now_us, self._volatile_of(topic_id))
            page.append((topic_id, len(row)))
            parts.append(row)
            room -= len(row)
        if parts:
            self._unsent = memoryview(b"".join((self._unsent, *parts)))
        # A row has no largest size, but a message has. The compactor joins the rows again.
        sent, self._unsent = self._unsent[:CHECKPOINT_REPLY_BYTES], self._unsent[CHECKPOINT_REPLY_BYTES:]
        is_done = not self._pending and not self._unsent
        if is_done:
            self._await_durable(batch)
            self._next_listed = {*self.segments.refs, *self.segments.missing}
        facts = encode_facts(self._facts()) if is_done else b""
        reply = m.CheckpointRowsReply(len(page), is_done, facts, self._is_full)
        words = np.array(page, dtype="<u8").reshape(len(page), 2)
        return reply, b"".join((words.tobytes(), sent))

    def _begin(self, message: m.CheckpointRows) -> None:
        """Fix the topics of this checkpoint. Later changes belong to the next checkpoint."""
        self.changed |= self._checkpoint_topics
        absorbing = self._planned if message.absorbed is None else message.absorbed
        closed = self._log_files.closed_files()
        unknown = [each for each in absorbing if each not in closed]
        if unknown:
            raise InvalidRequest(
                "absorbed has a file that is not a closed log file of this shard", file_id=unknown[0]
            )
        self._absorbing = list(absorbing)
        self._is_full = message.everything or not self._has_base
        self._known = self._directory.last_identity
        self._checkpoint_topics = (
            {each.topic_id for each in self._directory.all_topics()} if self._is_full else self.changed
        )
        self._pending = deque(sorted(self._checkpoint_topics))
        self._unsent = memoryview(b"")
        self.changed = set()
        self._is_open = True

    def _volatile_of(self, topic_id: int) -> list[tuple[int, int, int]]:
        found = [held[topic_id] for held in self._volatile_files.values() if topic_id in held]
        return [(floor, records, size) for _, floor, records, size in found]

    def _facts(self) -> ShardFacts:
        closed = self._log_files.closed_files()
        floor = min((each for each in closed if each not in self._absorbing), default=self._log.file_id)
        directory = self._directory
        return ShardFacts(
            FACTS_VERSION, *self._known, floor, [each for each in self._absorbing if each >= floor],
            self._newly_absorbed(),
            [ref_fields(ref) for ref in (*self.segments.refs.values(), *self.segments.missing.values())],
            directory.remote_names,
            sorted(directory.adopted),
        )  # fmt: skip

    # -- end of a checkpoint --------------------------------------------------------------------------

    def _done(
        self, message: m.CheckpointDone, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> HandlerReply:
        if message.number == self.number and not self._is_open:
            return m.CheckpointClosed([])
        if not self._is_open or self._pending or self._unsent:
            raise InvalidRequest("CheckpointDone came before the last page of rows", number=message.number)
        if sorted(message.absorbed) != sorted(self._absorbing):
            raise InvalidRequest(
                "absorbed differs from the log files of this checkpoint", absorbed=len(message.absorbed),
                expected=len(self._absorbing),
            )  # fmt: skip
        unlink = [path for _, path in self._waiting]
        self._waiting = self._newly_absorbed()
        for each in self._absorbing:
            self._log_files.forget(each)
        self.number, self._has_base = message.number, True
        self._listed = self._next_listed
        self._stale.extend(self._checkpoint_topics)
        self._planned, self._absorbing, self._checkpoint_topics = [], [], set()
        self._is_open = False
        return m.CheckpointClosed(unlink)

    def _newly_absorbed(self) -> list[tuple[int, str]]:
        """Return the files to delete when the next checkpoint is finished.

        Files of another shard count are needed by every shard. They are deleted at a start, when all shards
        have absorbed them.
        """
        log_files = self._log_files
        return [
            (each, log_files.paths[each])
            for each in self._absorbing
            if each not in log_files.other_layout_files
        ]

    def _prune(self) -> None:
        """Remove absorbed files from the indexes of a limited number of topics."""
        for _ in range(min(len(self._stale), PRUNED_PER_REQUEST)):
            topic = self._directory.find_by_id(self._stale.popleft())
            if topic is not None and topic.has_index:
                topic.index.retain_files(self._log_files.paths.__contains__)
