"""Core of the WAL shard: collects frames of many producers into a commit batch and decides its processing.

For each batch, the core requests a write, and a sync if a frame needs it. It then publishes the new records
and settles the frames of each producer. The core is pure: the shell performs all effects.

Invariants (docs/reference/invariants.md):

- W1: Seqs of a topic are dense. The first record of a frame gets `next_seq`; no seq is skipped or used twice.
- W2: The shard acks no frame before its write returned, and no `fsync` frame before a sync that covers it
  returned.
- W3: The shard publishes `head_seq` before the ack: the receiver of an ack can read the record.
- W4: A (topic, producer_id, producer_seq) is appended at most once, however often it is sent.
- W5: A frame for another epoch of the topic is refused and changes nothing.
- W6: The tail of a ring never passes an unsettled frame.
- W7: After a failed write or sync the shard acks nothing more: the shell ends the incarnation.
- W8: A commit batch never spans files.
- W9: A frame that follows another frame of its producer is appended directly after it, or refused.

A shard whose directory is not writable is active without a log file
(wal_shard/requests/read_only_mode.py). It accepts all events and refuses all changes.

Phases: recovering -> active -> draining -> stopped. At most one commit batch is in flight. Staged changes are
already in the memory of the topics, but not published. If they cannot be made durable, the incarnation ends.
Staged changes therefore never have to be rolled back.

    waiting for   meaning                                 ended by
    NOTHING       free to accept more                     -
    WRITE         the shell writes the batch              BatchWritten
    SYNC          the shell syncs the batch               Synced
    FLUSH         a sync of earlier batches               Synced, or Flushed for a background sync
    ROLL          the sync of the old file before a roll  Synced
    FILE          the next file is not ready yet          FileReady (after FileFailed, the core retries)
    OPEN          the header of the next file             FileOpened
    STORAGE       a storage query                         StorageQueried
    VOLATILE      a new volatile file                     VolatileOpened, VolatileFailed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringlog.actors.wal_shard.commit.admission import Admission, AdmissionLimits
from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter
from ringlog.actors.wal_shard.commit.batch_intake import BatchIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, LogPosition
from ringlog.actors.wal_shard.commit.log_roll import LogRoll
from ringlog.actors.wal_shard.commit.log_sync import LogSync
from ringlog.actors.wal_shard.commit.total_bytes import TotalBytes
from ringlog.actors.wal_shard.events import (
    BatchWritten,
    ConnectionsEnded,
    FileFailed,
    FileOpened,
    FileReady,
    Flushed,
    FramesArrived,
    StorageQueried,
    Synced,
    VolatileFailed,
    VolatileOpened,
    WorkerDied,
)
from ringlog.actors.wal_shard.phases import AwaitedCompletion, ShardPhase
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.actors.wal_shard.requests.socket_requests import Requests
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint
from ringlog.actors.wal_shard.retention.removal import Removals
from ringlog.actors.wal_shard.retention.volatile_files import TopicsInFile, VolatileFileTable
from ringlog.actors.wal_shard.shard_state import ShardIdentity, ShardState
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.errors import ExitCode, InvariantViolation
from ringlog.limits import EVENT_TRACE_MAX
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY
from ringlog.topic.directory import Halt, TopicDirectory

_COPIED_FILE_BYTES = 24
"""Maximum bytes of one earlier file in a MARK_COPIED."""
_RETENTION_PAUSE_NS = 250_000_000
"""Minimum time between two removals of expired records, unless a request needs one earlier."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of a shard's core."""

    flush_interval_ms: int = 100
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)


class ShardCore:
    """Pure decision logic of one shard.

    `handle` accepts events and returns effects in the order to perform them.
    """

    def __init__(
        self, identity: ShardIdentity, settings: Settings | None = None, *,
        publish_topic_count: Callable[[int], int] = lambda own: 0,
        publish_live_bytes: Callable[[int], int] = lambda own: 0,
        on_request: Callable[[ControlReceived], object] = lambda request: None,
    ) -> None:  # fmt: skip
        """Create the core of one incarnation.

        `publish_topic_count` is as in Requests, `publish_live_bytes` as in TotalBytes. `on_request` is called
        with each request before it is handled, so that tests can inject a crash.
        """
        settings = settings or Settings()
        self.identity = identity
        self.state: ShardState = ShardState(identity.time_base_us)
        self.directory: TopicDirectory = TopicDirectory(identity.shard, identity.shards)
        self.log_files: LogFileTable = LogFileTable()
        self.log: LogPosition = LogPosition()
        total = TotalBytes(self.directory, settings.limits.total_bytes, publish_live_bytes)
        admission = Admission(settings.limits, total)
        topics_of_volatile: dict[int, TopicsInFile] = {}
        self.volatile_files: VolatileFileTable = VolatileFileTable(
            self.directory, self.log_files, topics_of_volatile
        )
        self.checkpoint: ShardCheckpoint = ShardCheckpoint(
            identity.shard, identity.shards, identity.incarnation, self.directory, self.log_files, self.log,
            topics_of_volatile,
        )  # fmt: skip
        self.requests: Requests = Requests(
            identity, self.directory, admission, self.log_files, self.checkpoint, self.volatile_files,
            publish_topic_count,
        )  # fmt: skip
        self.removals: Removals = self.requests.removals
        self.log_sync: LogSync = LogSync(
            self.state, self.log, self.volatile_files, settings.flush_interval_ms
        )
        self.log_roll: LogRoll = LogRoll(self.state, self.log, self.log_files, self.log_sync, self.directory)
        self.intake: BatchIntake = BatchIntake(
            self.state, self.log, self.log_roll, self.requests, admission, self.directory,
            self.volatile_files, on_request,
        )  # fmt: skip
        self.committer: BatchCommitter = BatchCommitter(
            self.state, self.log, self.log_sync, self.log_roll, self.requests, admission, self.checkpoint,
            self.volatile_files,
        )  # fmt: skip
        self.recent_completions: deque[tuple[int, AwaitedCompletion, Any]] = deque(maxlen=EVENT_TRACE_MAX)
        """The last completions as (time, state, event). They are logged if an invariant is violated."""
        self._retain_at_ns: int | None = None
        self._retain_due_us = 0
        self._retained_ns = 0
        self._halts: Collection[Halt] = ()
        """Topics that recovery found incomplete and that are not served."""
        self._has_begun = False
        self._has_copied = False

    # -- interface of the shell -----------------------------------------------------------------------

    @property
    def wants_intake(self) -> bool:
        """True if the shell may pass more frames. False while a batch is in flight or events are queued."""
        return self.state.awaited is AwaitedCompletion.NOTHING and not self.intake.queued_events

    def next_deadline_ns(self) -> int | None:
        """Return the monotonic time of the next deadline, or None.

        While the core waits for a completion, most deadlines do not count, because the core could not act on
        them. Otherwise the shell would loop without sleeping until a slow device completes.
        """
        if self.requests.read_only is not None:
            return None
        is_unoccupied = self.state.awaited is AwaitedCompletion.NOTHING
        due = (
            (self.log_sync.flush_at_ns, self.log_sync.mark_at_ns, self._retain_at_ns, self._idle_check_at_ns)
            if is_unoccupied
            else ()
        )
        times = [t for t in (*due, self.log_roll.next_retry_ns()) if t is not None]
        if is_unoccupied and (claims := self.requests.leases.waiting_claims):
            end_ns = claims.next_deadline_ns(self.state.lease_clock_us)
            times += [end_ns] if end_ns is not None else []
        return min(times) if times else None

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Process events in order. Return the effects in the order in which they must be performed."""
        for event in events:
            self._dispatch(event)
        self._advance()
        if self.removals.schedule.next_due_us != self._retain_due_us and self.requests.read_only is None:
            self._plan_retention()
        effects, self.state.effects = self.state.effects, []
        return effects

    def _dispatch(self, event: Any) -> None:
        kind = type(event)
        if kind is Tick:
            self.state.set_time(event.now_us, event.monotonic_ns)
            self.requests.lease_clock_us = self.state.lease_clock_us
            self.requests.leases.tick(self.state.lease_clock_us, event.now_us, event.monotonic_ns)
            self.requests.idle_topic_expiry.now_ns = event.monotonic_ns
            return
        if kind is FramesArrived or kind is ControlReceived:
            self.intake.offer(event)
            return
        self.recent_completions.append((self.state.now_ns, self.state.awaited, event))
        if kind is BatchWritten:
            self.committer.on_written()
        elif kind is Synced:
            self._on_synced()
        elif kind is Flushed:
            self.log_sync.on_flushed(event)
        elif kind is FileReady:
            self.log_roll.on_ready(event)
        elif kind is FileFailed:
            self.log_roll.on_failed(event)
        elif kind is FileOpened:
            self.log_roll.on_opened(event)
        elif kind is StorageQueried:
            self.state.awaited = AwaitedCompletion.NOTHING
            most = self.log_roll.bytes_before_kept
            self.removals.take_answers(event.answers, self.state.batch, self.state.now_us, most)
        elif kind is VolatileOpened or kind is VolatileFailed:
            self.state.awaited = AwaitedCompletion.NOTHING
            if kind is VolatileOpened:
                self.volatile_files.start_file(event)
            else:
                self.volatile_files.schedule_retry(self.state.now_ns)
            self.volatile_files.evict_files(event, self.removals, self.state.batch)
        elif kind is WorkerDied:
            self.requests.leases.claims.release_process((event.pid, event.started))
        elif kind is ConnectionsEnded:
            self.requests.leases.waiting_claims.drop_connections(event.connections)
        elif kind is DrainRequested:
            if self.state.phase is not ShardPhase.STOPPED:
                self.state.phase = ShardPhase.DRAINING
                self.requests.leases.fail_waiting_claims()
        else:
            raise InvariantViolation("unknown event type", event=kind.__name__)

    # -- next step ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the next possible step.

        Each step ends with an effect whose completion leads to the next call.
        """
        state, intake = self.state, self.intake
        intake.stage_acks()
        self.log_roll.retry()
        if intake.roll_requests and state.awaited is AwaitedCompletion.NOTHING and not state.batch.is_staged:
            intake.roll_for_checkpoints()
        intake.take_queued()
        intake.stage_acks()
        if state.awaited is not AwaitedCompletion.NOTHING:
            return
        self._serve_claims()
        if state.is_due(self._idle_check_at_ns):
            self.requests.topics.expire_idle(state.batch, state.now_us)
        if state.query_storage(self.requests.leases.delivery_attributes.pending_questions()):
            return
        if self.requests.read_only is not None:
            self._answer_without_log()
        elif state.phase is ShardPhase.RECOVERING:
            self._advance_recovery()
        elif state.batch.is_staged or self.removals.schedule.is_requested:
            self.committer.begin()
            if state.awaited is AwaitedCompletion.NOTHING and intake.queued_events:
                self._advance()
        elif state.is_due(self.log_sync.flush_at_ns) and self.log_sync.unsynced:
            self.log_sync.flush()
        elif state.is_due(self._retain_at_ns):
            self._retained_ns, self._retain_due_us = state.now_ns, -1
            self.removals.schedule.request_due(state.now_us)
            self.committer.begin()
        elif state.is_due(self.log_sync.mark_at_ns) and self.log_sync.take_mark():
            self.committer.write_mark()
        elif state.phase is ShardPhase.DRAINING and not intake.queued_events:
            self._finish_draining()

    def _serve_claims(self) -> None:
        """Serve waiting claims. Replies of groups whose changes are logged wait for the commit batch."""
        state, leases, is_stuck = self.state, self.requests.leases, bool(self.log_roll.failure)
        if not leases.claims.has_work:
            return
        if state.phase is ShardPhase.RECOVERING or self.requests.read_only is not None or is_stuck:
            state.effects.extend(leases.claims.serve(state.lease_clock_us, is_stuck=is_stuck))
            return
        owed: list[Reply] = []
        state.effects.extend(leases.claims.serve(state.lease_clock_us, state.batch, owed))
        (state.batch.replies if state.batch.parts else state.effects).extend(owed)

    @property
    def _idle_check_at_ns(self) -> int | None:
        """Monotonic time of the next check for idle topics, or None.

        None while a deletion could not be logged, or while queued requests may be uses of a topic."""
        is_able = self.state.phase is ShardPhase.ACTIVE and not self.log_roll.failure
        is_able = is_able and not self.intake.queued_events and self.requests.read_only is None
        return self.requests.idle_topic_expiry.next_deadline_ns() if is_able else None

    def _plan_retention(self) -> None:
        """Schedule the removal of expired records, many at once.

        The delay is safe: readers skip expired records.
        """
        self._retain_due_us = self.removals.schedule.next_due_us
        wait_ns = max(self._retain_due_us - self.state.now_us, 0) * 1_000
        planned = max(self.state.now_ns + wait_ns, self._retained_ns + _RETENTION_PAUSE_NS)
        self._retain_at_ns = planned if self._retain_due_us else None

    def _on_synced(self) -> None:
        waited, self.state.awaited = self.state.awaited, AwaitedCompletion.NOTHING
        if waited is not AwaitedCompletion.SYNC:
            self.log_sync.set_durable()
        if waited is AwaitedCompletion.FLUSH:
            self.log_sync.publish_marks()
        elif waited is AwaitedCompletion.ROLL:
            self.log_roll.open()

    # -- start and stop -------------------------------------------------------------------------------

    def begin(
        self, batch: CommitBatch, prev: tuple[int, int, int, bool], settled: dict[int, int],
        damaged: Collection[int] = (), halts: Collection[Halt] = (),
    ) -> list[Any]:  # fmt: skip
        """Start after recovery: write the frames in doubt into this incarnation's first file.

        The copies are synced before the MARK_COPIED is written, and the mark is synced before the shard
        becomes active. Pass completions to `handle` until `phase` is ACTIVE.

        Args:
            batch: commit batch with the frames in doubt.
            prev: (file, stop, seal, orderly) of the previous file.
            settled: new end offset of each earlier file that had frames in doubt.
            damaged: files that end at damage.
            halts: topics that are not served.
        """
        self.state.batch, self.log_roll.prev = batch, prev
        self.committer.copied_files = (sorted(settled.items()), sorted(damaged))
        self._halts = halts
        batch.needs_sync = True
        self._has_begun = True
        self.directory.count_bytes()
        self.removals.invalidate_lossy_topics()
        return self.handle([])

    def begin_read_only(self, read_only: ReadOnlyMode, halts: Collection[Halt] = ()) -> None:
        """Start read-only after recovery: serve only reads until `DrainRequested`."""
        for topic in self.directory.by_id.values():
            topic.publish()
        self.directory.halt(halts)
        self.directory.count_bytes()
        self.removals.invalidate_lossy_topics()
        self.requests.routing.finish_recovery()
        self.requests.leases.registry.finish_recovery()
        self.requests.begin_read_only(read_only)
        self.state.phase = ShardPhase.ACTIVE

    def _answer_without_log(self) -> None:
        """Answer what a read-only shard received, and stop it when it drains."""
        self.committer.answer_without_log()
        if self.state.phase is ShardPhase.DRAINING and not self.intake.queued_events:
            self.state.phase = ShardPhase.STOPPED
            self.state.effects.append(Stop(int(ExitCode.OK), "drained"))

    def _advance_recovery(self) -> None:
        if not self._has_begun:
            return
        if not self.log.is_open:
            settled, damaged = self.committer.copied_files
            self.log_roll.roll(self.state.batch.bytes + _COPIED_FILE_BYTES * (len(settled) + len(damaged)))
        elif self.state.batch.parts:
            self.committer.begin()
        elif not self._has_copied:
            self._has_copied = True
            self.committer.write_mark(MARK_COPIED)
        else:
            self.state.phase = ShardPhase.ACTIVE
            self.log_sync.publish_marks()
            # Halt topics only now: their frames in doubt and their reservations had to be copied first.
            self.directory.halt(self._halts)
            self.removals.schedule.finish_recovery()
            self.requests.routing.finish_recovery()
            self.requests.leases.registry.finish_recovery()
            self.requests.idle_topic_expiry.finish_recovery()
            self.log_roll.prepare(0)

    def _finish_draining(self) -> None:
        """Stop when everything is settled: write and sync the mark of an orderly stop first."""
        if self.log_sync.is_flushing:
            self.state.awaited = AwaitedCompletion.FLUSH
            return
        if self.log_sync.unsynced:
            self.log_sync.sync(AwaitedCompletion.FLUSH)
        elif self.log.is_open and not self.committer.has_final_mark:
            # Every batch leaves room for a mark of maximum size, so this mark always fits.
            self.committer.write_mark(MARK_ORDERLY)
        else:
            self.state.phase = ShardPhase.STOPPED
            self.state.effects.append(Stop(int(ExitCode.OK), "drained"))

    def check(self) -> None:
        """Check the invariants that hold between passes of the loop. Raise InvariantViolation."""
        for topic in self.directory.by_id.values():
            topic.check()
        size = sum(topic.staged_bytes for topic in self.directory.all_topics())
        if self.state.phase is ShardPhase.ACTIVE and size != self.directory.live_bytes:
            raise InvariantViolation(
                "the bytes of the topics and of the shard differ",
                topics=size,
                shard=self.directory.live_bytes,
            )
        self.requests.leases.registry.check()
        if self.log.durable > self.log.offset:
            raise InvariantViolation(
                "durable position exceeds the written position", durable=self.log.durable,
                offset=self.log.offset,
            )  # fmt: skip
