"""Commit of a batch: reserves seqs, writes, and publishes and settles when the batch is durable. Pure."""

from __future__ import annotations

from ringlog.actors.wal_shard.commit.admission import Admission, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, CopiedFiles, LogPosition, lay_out
from ringlog.actors.wal_shard.commit.control_records import HeadReserved, frame_of
from ringlog.actors.wal_shard.commit.log_roll import LogRoll
from ringlog.actors.wal_shard.commit.log_sync import LogSync
from ringlog.actors.wal_shard.events import (
    BatchCommitted,
    PublishTopics,
    RetireTopic,
    Settle,
    Sync,
    WriteBatch,
)
from ringlog.actors.wal_shard.phases import AwaitedCompletion, ShardPhase
from ringlog.actors.wal_shard.requests.socket_requests import Requests
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint
from ringlog.actors.wal_shard.retention.volatile_files import VolatileFileTable
from ringlog.actors.wal_shard.shard_state import ShardState
from ringlog.errors import InvariantViolation
from ringlog.limits import UNSYNCED_BYTES_MAX
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY


class BatchCommitter:
    """Commits the staged batch of one shard, one batch after the other."""

    def __init__(
        self, state: ShardState, log: LogPosition, log_sync: LogSync, log_roll: LogRoll, requests: Requests,
        admission: Admission, checkpoint: ShardCheckpoint, volatile_files: VolatileFileTable,
    ) -> None:  # fmt: skip
        self._state, self._log, self._log_sync, self._log_roll = state, log, log_sync, log_roll
        self._requests, self._admission = requests, admission
        self._checkpoint, self._volatile_files = checkpoint, volatile_files
        self.copied_files: CopiedFiles = ([], [])
        """Content of the MARK_COPIED mark about earlier files."""
        self.has_final_mark: bool = False
        """True if the last write was the mark of an orderly stop."""

    def begin(self) -> None:
        """Commit the staged batch, or take the next step towards it."""
        state, batch = self._state, self._state.batch
        if state.phase is not ShardPhase.RECOVERING and state.query_storage(
            self._requests.removals.questions(batch, self._admission, state.now_us)
        ):
            return
        self._reserve_heads(batch)
        if batch.bytes and not (self._log.is_open and self._log.fits(batch.bytes)):
            self._log_roll.roll(batch.bytes)
            return
        # Lay out the volatile part only now, because the batch may have grown while the core waited for a
        # file.
        if batch.volatile_bytes:
            state.effects.append(self._volatile_files.write(batch))
        if batch.bytes:
            self._write(batch)
        else:
            self.finish()

    def _write(self, batch: CommitBatch, flags: int = 0) -> None:
        log, start = self._log, self._log.offset
        self.has_final_mark = bool(flags & MARK_ORDERLY)
        buffers = lay_out(batch, log, flags, self.copied_files if flags & MARK_COPIED else ([], []))
        is_synced = batch.needs_sync or log.offset - log.durable > UNSYNCED_BYTES_MAX
        self._state.effects.append(WriteBatch(buffers, start, log.offset - start, is_synced))
        self._state.awaited = AwaitedCompletion.WRITE

    def write_mark(self, flags: int = 0) -> None:
        """Write a mark without further frames.

        It records the durable position of an idle log, or what `flags` say.
        """
        self._state.batch.needs_sync = True
        self._write(self._state.batch, flags)

    def _reserve_heads(self, batch: CommitBatch) -> None:
        """Reserve seqs before records that a crash may lose are acknowledged under these seqs."""
        interval = self._admission.limits.flush_interval_us
        if self._state.phase is ShardPhase.RECOVERING:
            return  # copied records were reserved before, and this batch settles open reservations
        for topic in list(batch.dirty_topics.values()):
            last = topic.next_seq - 1
            if topic.is_reserving and topic.reservation.needed(last):
                reserved = topic.reservation.extend(last, self._state.now_us, interval)
                frame = frame_of(HeadReserved(reserved, False), topic.topic_id, topic.epoch)
                batch.add_control(frame, topic)

    def on_written(self) -> None:
        """Sync the written batch if it must be durable, and finish it."""
        log_sync = self._log_sync
        log_sync.note_written()
        if self._state.batch.needs_sync or log_sync.unsynced > UNSYNCED_BYTES_MAX:
            # Emit the effects after the sync at once, so that the shell can prepare them while the device
            # works. If the sync fails, the shell performs none of them and the incarnation ends.
            self._state.effects.append(Sync())
            log_sync.set_durable()
            self.finish()
            self._state.awaited = AwaitedCompletion.SYNC
            return
        log_sync.plan_flush()
        self.finish()

    def finish(self) -> None:
        """Publish the commit batch, then settle its frames and send its replies (W2, W3).

        The batch is as durable as its frames require, or the Sync effect precedes the effects of this method.
        """
        state, requests = self._state, self._requests
        batch, state.batch = state.batch, CommitBatch()
        retired, requests.topics.retired = requests.topics.retired, []
        state.awaited = AwaitedCompletion.NOTHING
        is_recovering, effects = state.phase is ShardPhase.RECOVERING, state.effects
        topics = list(batch.dirty_topics.values())
        for topic in topics:
            requests.leases.on_publish(topic)
            topic.publish()
        for part in batch.parts if not is_recovering else ():
            if isinstance(part, FrameIntake):
                requests.leases.recent_records.add(part)
        self._checkpoint.track_changes(batch.dirty_topics, retired)
        self._log_roll.has_records |= bool(batch.records or (batch.parts and is_recovering))
        # Marks precede heads: a reader that sees a head must find every record up to it.
        if batch.parts:
            self._log_sync.publish_marks()
        if topics:
            news = () if is_recovering else batch.news
            effects.append(PublishTopics(topics, news))
        effects.extend(
            RetireTopic(topic, requests.idle_topic_expiry.take_expired_period(topic)) for topic in retired
        )
        effects.extend(Settle(o.source, o.intake.entries, o.new_tail) for o in batch.settlements)
        effects.extend(batch.replies)
        if requests.leases.waiting_claims:
            effects.extend(requests.leases.claims.serve(state.lease_clock_us))
        if batch.frames or batch.refused or batch.duplicates:
            size = batch.bytes + batch.volatile_bytes
            effects.append(BatchCommitted(batch.frames, batch.records, size, batch.refused, batch.duplicates))
        self._log_roll.prepare_ahead()

    def answer_without_log(self) -> None:
        """Settle refused and duplicate frames of a read-only shard.

        The marks on the board are not changed, because the next writable incarnation needs them for its
        recovery.
        """
        batch, self._state.batch = self._state.batch, CommitBatch()
        if batch.bytes or batch.volatile_bytes or batch.dirty_topics:
            raise InvariantViolation("read-only shard has staged changes", bytes=batch.bytes)
        effects = self._state.effects
        effects.extend(Settle(o.source, o.intake.entries, o.new_tail) for o in batch.settlements)
        effects.extend(batch.replies)
        if batch.refused or batch.duplicates:
            effects.append(BatchCommitted(0, 0, 0, batch.refused, batch.duplicates))
