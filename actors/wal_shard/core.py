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

from ringlog.actors.wal_shard.commit.admission import Admission, AdmissionLimits, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import MARK_BYTES_MAX, CommitBatch, LogPosition, lay_out
from ringlog.actors.wal_shard.commit.control_records import HeadReserved, frame_of
from ringlog.actors.wal_shard.events import (
    BatchCommitted,
    BatchWritten,
    ConnectionsEnded,
    FileFailed,
    FileOpened,
    FileReady,
    Flush,
    Flushed,
    FramesArrived,
    OpenFile,
    OpenVolatile,
    PrepareFile,
    PublishMarks,
    PublishTopics,
    QueryStorage,
    RetireTopic,
    Settle,
    StorageQueried,
    Sync,
    Synced,
    VolatileFailed,
    VolatileOpened,
    WorkerDied,
    WriteBatch,
)
from ringlog.actors.wal_shard.phases import AwaitedCompletion, Room, ShardPhase
from ringlog.actors.wal_shard.recovery.log_file_table import LogFileTable
from ringlog.actors.wal_shard.requests.read_only_mode import ReadOnlyMode
from ringlog.actors.wal_shard.requests.socket_requests import (
    Requests,
    ShardIdentity,
    explain_full,
    explain_halted,
)
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint
from ringlog.actors.wal_shard.retention.retention_schedule import LEASE_REQUESTS
from ringlog.actors.wal_shard.retention.storage_query import StorageQuery
from ringlog.actors.wal_shard.retention.volatile_files import TopicsInFile, VolatileFileTable
from ringlog.actors.wal_shard.routing import added_bytes
from ringlog.contract import ControlReceived, DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import ExitCode, InvariantViolation, Status
from ringlog.limits import EVENT_TRACE_MAX, UNSYNCED_BYTES_MAX, WAL_HEADER_BYTES
from ringlog.storage.layout import MARK_COPIED, MARK_ORDERLY
from ringlog.topic.directory import Halt, TopicDirectory

_FILE_RETRY_NS = 1_000_000_000
_FILL_WHEN_HALF_TAKES_NS = 1_000_000_000
"""If the first half of a file lasted at least this long, the next file is filled in advance.
For faster streams it is only allocated. Filling would take half of the device's bandwidth, and their batches
are large enough that longer syncs do not matter."""
_COPIED_FILE_BYTES = 24
"""Maximum bytes of one earlier file in a MARK_COPIED."""
_KEPT_BYTES = 256 << 10
"""Bytes reserved for requests without records at the end of a file, while no next file can be created."""
_CONTROL_BYTES = 4 << 10
"""Maximum bytes that one such request adds to the log."""
_RETENTION_PAUSE_NS = 250_000_000
"""Minimum time between two removals of expired records, unless a request needs one earlier."""
_SLACK = 64 << 10
"""Bytes reserved for control frames when the core checks whether the intake of a pass fits into the file."""
_FAST_PATH_REQUESTS = frozenset({m.Claim, m.Ack, m.AckAndClaim})
"""Requests with a fast path."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of a shard's core."""

    flush_interval_ms: int = 100
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)


@dataclass(slots=True)
class _PendingSettlement:
    """Settlements that are due to one producer when the commit batch is durable."""

    source: int
    intake: FrameIntake
    new_tail: int


class ShardCore:
    """Pure decision logic of one shard.

    `handle` accepts events and returns effects in the order to perform them.
    """

    def __init__(
        self, identity: ShardIdentity, settings: Settings | None = None, *,
        publish_topic_count: Callable[[int], int] = lambda own: 0,
        on_request: Callable[[ControlReceived], object] = lambda request: None,
    ) -> None:  # fmt: skip
        """Create the core of one incarnation.

        `publish_topic_count` is as in Requests. `on_request` is called with each request before it is
        handled, so that tests can inject a crash.
        """
        self._on_request = on_request
        self.identity = identity
        self.settings = settings or Settings()
        self.directory = TopicDirectory(identity.shard, identity.shards)
        self.log_files = LogFileTable()
        self.admission = Admission(self.settings.limits)
        self.log = LogPosition()
        topics_of_volatile: dict[int, TopicsInFile] = {}
        self.volatile_files = VolatileFileTable(self.directory, self.log_files, topics_of_volatile)
        self.checkpoint = ShardCheckpoint(
            identity.shard, identity.shards, identity.incarnation, self.directory, self.log_files, self.log,
            topics_of_volatile,
        )  # fmt: skip
        self.requests = Requests(
            identity, self.directory, self.admission, self.log_files, self.checkpoint, self.volatile_files,
            publish_topic_count,
        )  # fmt: skip
        self.removals = self.requests.removals
        self.phase = ShardPhase.RECOVERING
        self.current_request: ControlReceived | None = None
        """The request that is being handled.
        If the core crashes, the shell records it as a poison request."""
        self.awaited = AwaitedCompletion.NOTHING
        self.disk_missing_bytes = 0
        """Bytes that must become free on a full device.
        Until then records are refused, but deletes are accepted."""
        self.recent_completions: deque[tuple[int, AwaitedCompletion, Any]] = deque(maxlen=EVENT_TRACE_MAX)
        """The last completions as (time, state, event). They are logged if an invariant is violated."""
        self._batch = CommitBatch()
        self._pending_settlements: list[_PendingSettlement] = []
        self._replies: list[Reply] = []
        self._queued_events: deque[FramesArrived | ControlReceived] = deque()
        self._effects: list[Any] = []
        self._now_us = 0
        self._now_ns = 0
        self._lease_clock_us = 0
        """Current time on the clock of leases: see Requests.lease_clock_us."""
        self._time_base_us = identity.time_base_us
        self._ready_capacity = 0
        self._preparing = False
        self._file_failed = ""
        self._file_retry_ns = 0
        self._wanted_bytes = 0
        self._unsynced = 0
        self._flush_at_ns: int | None = None
        self._flushing: Flush | None = None
        self._opened_ns = 0
        self._files_opened = 0
        self._mark_at_ns: int | None = None
        self._retain_at_ns: int | None = None
        self._retain_due_us = 0
        self._retained_ns = 0
        self._mark_flags = 0
        self._copied_files: tuple[list[tuple[int, int]], list[int]] = ([], [])
        """Content of the MARK_COPIED mark about earlier files."""
        self._halts: Collection[Halt] = ()
        """Topics that recovery found incomplete and that are not served."""
        self._prev = (0, 0, 0, False)
        self._has_begun = False
        self._has_copied = False
        self._final_mark_written = False
        self._roll_requests: deque[ControlReceived] = deque()
        """Requests CheckpointOpen with `roll` that wait until the current file is closed."""
        self._has_records = False
        """True if the current file contains records that a checkpoint could absorb."""

    # -- interface of the shell -----------------------------------------------------------------------

    @property
    def wants_intake(self) -> bool:
        """True if the shell may pass more frames. False while a batch is in flight or events are queued."""
        return self.awaited is AwaitedCompletion.NOTHING and not self._queued_events

    def next_deadline_ns(self) -> int | None:
        """Return the monotonic time of the next deadline, or None.

        While the core waits for a completion, most deadlines do not count, because the core could not act on
        them. Otherwise the shell would loop without sleeping until a slow device completes.
        """
        if self.requests.read_only is not None:
            return None
        is_unoccupied = self.awaited is AwaitedCompletion.NOTHING
        due = (
            (self._flush_at_ns, self._mark_at_ns, self._retain_at_ns, self._idle_check_at_ns)
            if is_unoccupied
            else ()
        )
        times = [t for t in due if t is not None]
        if self._file_failed and not self._preparing:
            times.append(self._file_retry_ns)
        if is_unoccupied and (claims := self.requests.leases.waiting_claims):
            end_ns = claims.next_deadline_ns(self._lease_clock_us)
            times += [end_ns] if end_ns is not None else []
        return min(times) if times else None

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Process events in order. Return the effects in the order in which they must be performed."""
        for event in events:
            self._dispatch(event)
        self._advance()
        if self.removals.schedule.next_due_us != self._retain_due_us and self.requests.read_only is None:
            self._plan_retention()
        effects, self._effects = self._effects, []
        return effects

    def _dispatch(self, event: Any) -> None:
        kind = type(event)
        if kind is Tick:
            self._now_us, self._now_ns = event.now_us, event.monotonic_ns
            self._time_base_us = self._time_base_us or event.now_us - event.monotonic_ns // 1_000
            self._lease_clock_us = self._time_base_us + event.monotonic_ns // 1_000
            self.requests.lease_clock_us = self._lease_clock_us
            self.requests.leases.tick(self._lease_clock_us, event.now_us, event.monotonic_ns)
            self.requests.idle_topic_expiry.now_ns = event.monotonic_ns
            return
        if kind is FramesArrived or kind is ControlReceived:
            if kind is ControlReceived and self._try_fast_path(event):
                return
            if self._queued_events or self.awaited is not AwaitedCompletion.NOTHING:
                self._queued_events.append(event)
                return
            if self._try_accept(event) is Room.LATER:
                self._queued_events.append(event)
            return
        self.recent_completions.append((self._now_ns, self.awaited, event))
        if kind is BatchWritten:
            self._on_written()
        elif kind is Synced:
            self._on_synced()
        elif kind is Flushed:
            self._on_flushed(event)
        elif kind is FileReady:
            self._ready_capacity, self._preparing, self._file_failed = event.capacity, False, ""
            if self.awaited is AwaitedCompletion.FILE:
                self.awaited = AwaitedCompletion.NOTHING
        elif kind is FileFailed:
            self._preparing, self._file_failed = False, event.reason
            self._file_retry_ns = self._now_ns + _FILE_RETRY_NS
        elif kind is FileOpened:
            self._on_opened(event)
        elif kind is StorageQueried:
            self.awaited = AwaitedCompletion.NOTHING
            self.removals.take_answers(event.answers, self._batch, self._now_us)
        elif kind is VolatileOpened or kind is VolatileFailed:
            self.awaited = AwaitedCompletion.NOTHING
            if kind is VolatileOpened:
                self.volatile_files.start_file(event)
            else:
                self.volatile_files.schedule_retry(self._now_ns)
            self.volatile_files.evict_files(event, self.removals, self._batch)
        elif kind is WorkerDied:
            self.requests.leases.release_process((event.pid, event.started))
        elif kind is ConnectionsEnded:
            self.requests.leases.waiting_claims.drop_connections(event.connections)
        elif kind is DrainRequested:
            if self.phase is not ShardPhase.STOPPED:
                self.phase = ShardPhase.DRAINING
                self.requests.leases.fail_waiting_claims()
        else:
            raise InvariantViolation("unknown event type", event=kind.__name__)

    # -- intake ---------------------------------------------------------------------------------------

    def _try_fast_path(self, event: ControlReceived) -> bool:
        """Handle a common claim or ack. Return False if the request needs the general path."""
        message: Any = event.message
        kind = type(message)
        if kind not in _FAST_PATH_REQUESTS or message.group:
            return False
        quick, log = self.requests.leases.fast_path, self.log
        is_unoccupied = (
            self.awaited is AwaitedCompletion.NOTHING
            and not self._queued_events
            and self.phase is ShardPhase.ACTIVE
        )
        if (
            not is_unoccupied
            or self.removals.schedule.is_requested
            or self._file_failed
            or self.requests.read_only is not None
        ):
            return False
        self.current_request = event
        if kind is m.Claim:
            answer = quick.claim(message, self._lease_clock_us)
            if answer is not None:
                # Leases without a log record exist only in memory, so the reply need not wait for the commit
                # batch.
                self._effects.append(Reply(event.client, event.corr, answer))
            is_done = answer is not None
        else:
            has_room = log.is_open and log.fits(self._batch.bytes + quick.bytes + _SLACK)
            take = quick.ack if kind is m.Ack else quick.ack_and_claim
            is_done = has_room and take(message, event, self._lease_clock_us)
        self.current_request = None
        return is_done

    def _stage_acks(self) -> None:
        """Stage the acks of the fast path into the commit batch, before other requests are processed."""
        quick = self.requests.leases.fast_path
        self.current_request = quick.last_request
        self._replies += quick.stage_acks(self._batch)
        self.current_request = None

    def _try_accept(self, event: FramesArrived | ControlReceived) -> Room:
        """Process an event if there is room for it now. Return the room."""
        message = event.message if type(event) is ControlReceived else None
        is_gathered = isinstance(message, m.AckAndClaim) and not message.group
        if self.requests.leases.fast_path and not is_gathered:
            self._stage_acks()
        if type(event) is ControlReceived:
            self.current_request = event
            self._on_request(event)
        room = self._room_for(event)
        if room is not Room.LATER:
            self._take(event, room)
        self.current_request = None
        return room

    def _room_for(self, event: FramesArrived | ControlReceived) -> Room:
        """Check whether a file certainly has room for what this event may add. NONE means that it is refused.

        While no new file can be created, the end of the current file is reserved for requests without
        records, so that deletes are possible on a full disk.
        """
        if self.requests.read_only is not None:
            return Room.NONE
        if not self._may_process(event):
            return Room.LATER
        if isinstance(event, ControlReceived) and not self.requests.may_log(event.message):
            return Room.NOW
        if (
            self._is_busy
            and isinstance(event, ControlReceived)
            and isinstance(event.message, m.CheckpointRows)
        ):
            return Room.LATER  # rows contain only published state, so nothing may be staged (C2)
        data = event.buffer if isinstance(event, FramesArrived) else event.attachment
        if isinstance(event, ControlReceived) and isinstance(event.message, m.LiveAsk):
            data = None  # ids are not logged; checkpoints must continue on a full disk and free space
        self.admission.is_volatile_closed = False
        if data and (self.directory.ephemeral or isinstance(event, ControlReceived)):
            room = self._volatile_room(self.volatile_files.bytes_of(event, len(data)))
            if room is Room.LATER:
                return room
            self.admission.is_volatile_closed = room is Room.NONE
        added = 0
        if isinstance(event, ControlReceived):
            added = added_bytes(event.message) + self.requests.leases.registry.bytes_of(event.message)
        needed = self._batch.bytes + self.requests.leases.fast_path.bytes + len(data or b"") + added + _SLACK
        kept = 0
        if self._file_failed and data:
            kept = min(_KEPT_BYTES, self.log.capacity // 8)
        elif self._file_failed:
            needed = self._batch.bytes + _CONTROL_BYTES + added + self.removals.delete_bytes
        if self.log.is_open and self.log.fits(needed + kept):
            return Room.NOW
        if self._ready_capacity >= needed + WAL_HEADER_BYTES + MARK_BYTES_MAX:
            return Room.NOW
        self._prepare(needed)
        return Room.NONE if self._file_failed else Room.LATER

    def _may_process(self, event: FramesArrived | ControlReceived) -> bool:
        """Return True if an event can be processed now.

        It must wait while due retention has to be applied first, or while a storage query for it is pending.
        A delete also waits until everything before it is in a file.
        """
        message = event.message if isinstance(event, ControlReceived) else None
        if self.removals.schedule.must_run_first(message, self._batch, self._now_us):
            return False
        if isinstance(message, LEASE_REQUESTS) and self._query_storage(
            self.requests.leases.delivery_attributes.questions_for(message)
        ):
            return False
        if isinstance(message, m.AckAndClaim) and not message.group:
            return not self._query_storage(self.requests.leases.deletes.sizes_for(message))
        if (isinstance(message, m.ConfirmDeadLettered) and not message.number) or (
            isinstance(message, m.Ack) and not message.group
        ):
            return not self._query_storage(
                self.requests.leases.deletes.questions_for(message, self._lease_clock_us // 1_000)
            )
        if not isinstance(message, m.RecordsDelete):
            return True
        return not self._batch.parts and not self._query_storage(
            self.removals.questions_for_delete(message, self._now_us)
        )

    def _query_storage(self, questions: list[StorageQuery]) -> bool:
        """Query storage if there are questions. Return True if there are."""
        if questions:
            self._effects.append(QueryStorage(questions))
            self.awaited = AwaitedCompletion.STORAGE
        return bool(questions)

    def _volatile_room(self, length: int) -> Room:
        """Check for room in a volatile file before seqs are assigned.

        Without a file, the frames are refused.
        """
        needed = self._batch.volatile_bytes + length
        if not length or self.volatile_files.fits(needed):
            return Room.NOW
        if not self.volatile_files.may_try(self._now_ns):
            return Room.NONE
        self._effects.append(OpenVolatile(needed + WAL_HEADER_BYTES + MARK_BYTES_MAX))
        self.awaited = AwaitedCompletion.VOLATILE
        return Room.LATER

    def _prepare(self, needed: int) -> None:
        self._wanted_bytes = needed
        if not self._preparing and not (self._file_failed and self._now_ns < self._file_retry_ns):
            self._preparing = True
            # A prepared file that is too small is discarded for the new one.
            self._ready_capacity = 0
            fill = self._files_opened <= 1 or self._now_ns - self._opened_ns > _FILL_WHEN_HALF_TAKES_NS
            self._effects.append(PrepareFile(needed + WAL_HEADER_BYTES + MARK_BYTES_MAX, fill))

    @property
    def _is_busy(self) -> bool:
        """True if anything is staged and not published."""
        return bool(self._batch.parts or self._pending_settlements or self._batch.has_removals)

    def _take(self, event: FramesArrived | ControlReceived, room: Room) -> None:
        if isinstance(event, FramesArrived):
            read_only = self.requests.read_only
            closed = Status.INTERNAL if room is Room.NONE or self.disk_missing_bytes else None
            closed = closed if read_only is None else Status.STORAGE_READ_ONLY
            intake = self.admission.open(event.buffer, event.batch)
            self.admission.admit(intake, self.directory.by_id, self._now_us, closed)
            if read_only is not None:
                read_only.explain(intake)
            elif self.disk_missing_bytes:
                explain_full(intake, self.disk_missing_bytes)
            if self.directory.halted:
                explain_halted(intake, self.directory.halted)
            self._batch.add_intake(intake)
            self._pending_settlements.append(_PendingSettlement(event.source, intake, event.end_position))
            return
        if isinstance(event.message, m.CheckpointOpen) and event.message.roll and self._must_roll:
            self._roll_requests.append(event)
            return
        can_log = room is Room.NOW and not (
            self.disk_missing_bytes > 0 and isinstance(event.message, m.Append | m.Route)
        )
        self.requests.disk_missing_bytes = self.disk_missing_bytes
        reply = self.requests.handle(event, self._batch, self._now_us, can_log=can_log)
        if reply is None:
            return
        if self._batch.parts or self._batch.has_removals:
            self._replies.append(reply)
        else:
            self._effects.append(reply)

    # -- commit batch ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the next possible step.

        Each step ends with an effect whose completion leads to the next call.
        """
        if self.requests.leases.fast_path:
            self._stage_acks()
        if self._file_failed and not self._preparing and self._now_ns >= self._file_retry_ns:
            self._prepare(self._wanted_bytes)
        if self._roll_requests and self.awaited is AwaitedCompletion.NOTHING and not self._is_busy:
            self._roll_for_checkpoint()
        while self._queued_events and self.awaited is AwaitedCompletion.NOTHING:
            if self._try_accept(self._queued_events[0]) is Room.LATER:
                break
            self._queued_events.popleft()
        if self.requests.leases.fast_path:
            self._stage_acks()
        if self.awaited is not AwaitedCompletion.NOTHING:
            return
        self._serve_claims()
        at_ns = self._idle_check_at_ns
        if at_ns is not None and self._now_ns >= at_ns:
            self.requests.expire_idle_topics(self._batch, self._now_us)
        if self._query_storage(self.requests.leases.delivery_attributes.pending_questions()):
            return
        if self.requests.read_only is not None:
            self._answer_without_log()
        elif self.phase is ShardPhase.RECOVERING:
            self._advance_recovery()
        elif (
            self._batch.parts
            or self._pending_settlements
            or self._batch.has_removals
            or self.removals.schedule.is_requested
        ):
            self._begin_batch()
            if self.awaited is AwaitedCompletion.NOTHING and self._queued_events:
                self._advance()
        elif self._due(self._flush_at_ns) and self._unsynced:
            self._flush()
        elif self._due(self._retain_at_ns):
            self._retained_ns, self._retain_due_us = self._now_ns, -1
            self.removals.schedule.request_due(self._now_us)
            self._begin_batch()
        elif self._due(self._mark_at_ns) and self._can_mark():
            self._write_mark()
        elif self.phase is ShardPhase.DRAINING and not self._queued_events:
            self._finish_draining()

    def _serve_claims(self) -> None:
        """Serve waiting claims. Replies of groups whose changes are logged wait for the commit batch."""
        leases, is_stuck = self.requests.leases, bool(self._file_failed)
        if not leases.has_work:
            return
        if self.phase is ShardPhase.RECOVERING or self.requests.read_only is not None or is_stuck:
            self._effects.extend(leases.serve_claims(self._lease_clock_us, is_stuck=is_stuck))
            return
        owed: list[Reply] = []
        self._effects.extend(leases.serve_claims(self._lease_clock_us, self._batch, owed))
        (self._replies if self._batch.parts else self._effects).extend(owed)

    @property
    def _idle_check_at_ns(self) -> int | None:
        """Monotonic time of the next check for idle topics, or None.

        None while a deletion could not be logged, or while queued requests may be uses of a topic."""
        is_able = self.phase is ShardPhase.ACTIVE and not self._file_failed and not self._queued_events
        is_able = is_able and self.requests.read_only is None
        return self.requests.idle_topic_expiry.next_deadline_ns() if is_able else None

    def _due(self, at_ns: int | None) -> bool:
        return at_ns is not None and self._now_ns >= at_ns

    def _plan_retention(self) -> None:
        """Schedule the removal of expired records, many at once.

        The delay is safe: readers skip expired records.
        """
        self._retain_due_us = self.removals.schedule.next_due_us
        wait_ns = max(self._retain_due_us - self._now_us, 0) * 1_000
        planned = max(self._now_ns + wait_ns, self._retained_ns + _RETENTION_PAUSE_NS)
        self._retain_at_ns = planned if self._retain_due_us else None

    def _can_mark(self) -> bool:
        self._mark_at_ns = None
        log = self.log
        return log.is_open and log.marked_durable < min(log.durable, log.frames_stop) and log.fits(0)

    def _begin_batch(self) -> None:
        batch = self._batch
        if self.phase is not ShardPhase.RECOVERING and self._query_storage(
            self.removals.questions(batch, self.admission, self._now_us)
        ):
            return
        self._reserve_heads(batch)
        if batch.bytes and not (self.log.is_open and self.log.fits(batch.bytes)):
            self._roll(batch.bytes)
            return
        # Lay out the volatile part only now, because the batch may have grown while the core waited for a
        # file.
        if batch.volatile_bytes:
            self._effects.append(self.volatile_files.write(batch))
        if batch.bytes:
            self._write(batch)
        else:
            self._finish_batch()

    def _write(self, batch: CommitBatch) -> None:
        start = self.log.offset
        flags, self._mark_flags = self._mark_flags, 0
        self._final_mark_written = bool(flags & MARK_ORDERLY)
        buffers = lay_out(batch, self.log, flags, self._copied_files if flags & MARK_COPIED else ([], []))
        is_synced = batch.needs_sync or self.log.offset - self.log.durable > UNSYNCED_BYTES_MAX
        self._effects.append(WriteBatch(buffers, start, self.log.offset - start, is_synced))
        self.awaited = AwaitedCompletion.WRITE

    def _reserve_heads(self, batch: CommitBatch) -> None:
        """Reserve seqs before records that a crash may lose are acknowledged under these seqs."""
        interval = self.settings.limits.flush_interval_us
        if self.phase is ShardPhase.RECOVERING:
            return  # copied records were reserved before, and this batch settles open reservations
        for topic in list(batch.dirty_topics.values()):
            last = topic.next_seq - 1
            if topic.is_reserving and topic.reservation.needed(last):
                reserved = topic.reservation.extend(last, self._now_us, interval)
                frame = frame_of(HeadReserved(reserved, False), topic.topic_id, topic.epoch)
                batch.add_control(frame, topic)

    def _on_written(self) -> None:
        batch = self._batch
        self._unsynced = self.log.offset - self.log.durable
        if batch.needs_sync or self._unsynced > UNSYNCED_BYTES_MAX:
            # Emit the effects after the sync at once, so that the shell can prepare them while the device
            # works. If the sync fails, the shell performs none of them and the incarnation ends.
            self._effects.append(Sync())
            self._set_durable()
            self._finish_batch()
            self.awaited = AwaitedCompletion.SYNC
            return
        if self._unsynced > UNSYNCED_BYTES_MAX // 2 or self._due(self._flush_at_ns):
            self._flush()
        elif self._flush_at_ns is None:
            self._flush_at_ns = self._now_ns + self.settings.flush_interval_ms * 1_000_000
        self._finish_batch()

    def _flush(self) -> None:
        """Start a background sync, one at a time. No ack waits for it."""
        self._flush_at_ns = None
        if self._flushing is None:
            self._flushing = Flush(self.log.file_id, self.log.offset)
            self._effects.append(self._flushing)

    def _on_flushed(self, event: Flushed) -> None:
        self._flushing = None
        if self.awaited is AwaitedCompletion.FLUSH:
            self.awaited = AwaitedCompletion.NOTHING
        if event.file_id != self.log.file_id or event.stop <= self.log.durable:
            return
        self.log.durable = event.stop
        self._unsynced = self.log.offset - event.stop
        if self._unsynced:
            self._flush_at_ns = self._now_ns + self.settings.flush_interval_ms * 1_000_000
        else:
            self._mark_at_ns = self._now_ns + self.settings.flush_interval_ms * 1_000_000
        self._effects.append(self._marks())

    def _sync(self, waiting: AwaitedCompletion) -> None:
        self._effects.append(Sync())
        self.awaited = waiting

    def _set_durable(self) -> None:
        """Treat everything written as durable: it is synced, or will be before the effects that follow."""
        self.log.durable = self.log.offset
        self._unsynced = 0
        self._flush_at_ns = None
        self._mark_at_ns = self._now_ns + self.settings.flush_interval_ms * 1_000_000

    def _on_synced(self) -> None:
        waited, self.awaited = self.awaited, AwaitedCompletion.NOTHING
        if waited is not AwaitedCompletion.SYNC:
            self._set_durable()
        if waited is AwaitedCompletion.FLUSH:
            self._effects.append(self._marks())
        elif waited is AwaitedCompletion.ROLL:
            self._open()

    def _finish_batch(self) -> None:
        """Publish the commit batch, then settle its frames and send its replies (W2, W3).

        The batch is as durable as its frames require, or the Sync effect precedes the effects of this method.
        """
        batch, self._batch = self._batch, CommitBatch()
        owed, self._pending_settlements = self._pending_settlements, []
        replies, self._replies = self._replies, []
        retired, self.requests.retired = self.requests.retired, []
        self.awaited = AwaitedCompletion.NOTHING
        topics = list(batch.dirty_topics.values())
        for topic in topics:
            self.requests.leases.on_publish(topic)
            topic.publish()
        for part in batch.parts if self.phase is not ShardPhase.RECOVERING else ():
            if isinstance(part, FrameIntake):
                self.requests.leases.recent_records.add(part)
        self.checkpoint.track_changes(batch.dirty_topics, retired)
        self._has_records |= bool(batch.records or (batch.parts and self.phase is ShardPhase.RECOVERING))
        # Marks precede heads: a reader that sees a head must find every record up to it.
        if batch.parts:
            self._effects.append(self._marks())
        if topics:
            news = () if self.phase is ShardPhase.RECOVERING else batch.news
            self._effects.append(PublishTopics(topics, news))
        self._effects.extend(
            RetireTopic(topic, self.requests.idle_topic_expiry.take_expired_period(topic))
            for topic in retired
        )
        self._effects.extend(Settle(o.source, o.intake.entries, o.new_tail) for o in owed)
        self._effects.extend(replies)
        if self.requests.leases.waiting_claims:
            self._effects.extend(self.requests.leases.serve_claims(self._lease_clock_us))
        if batch.frames or batch.refused or batch.duplicates:
            size = batch.bytes + batch.volatile_bytes
            self._effects.append(
                BatchCommitted(batch.frames, batch.records, size, batch.refused, batch.duplicates)
            )
        self._prepare_ahead()

    def _marks(self) -> PublishMarks:
        log, volatile = self.log, self.volatile_files.log
        return PublishMarks(log.file_id, log.offset, log.durable, volatile.file_id, volatile.offset)

    def _write_mark(self) -> None:
        """Write a mark without further frames, which records the durable position of an idle log."""
        self._batch.needs_sync = True
        self._write(self._batch)

    # -- files ----------------------------------------------------------------------------------------

    def _prepare_ahead(self) -> None:
        """Request the next file as soon as the current one is half full."""
        if self.log.is_open and not self._ready_capacity and self.log.offset * 2 > self.log.capacity:
            self._prepare(0)

    def _roll(self, needed: int) -> None:
        if self._ready_capacity < needed + WAL_HEADER_BYTES + MARK_BYTES_MAX:
            self._ready_capacity = 0
            self._prepare(needed)
            self.awaited = AwaitedCompletion.FILE
        elif self._flushing is not None:
            # The background sync runs on the file that is about to be closed.
            self.awaited = AwaitedCompletion.FLUSH
        elif self.log.is_open and self.log.durable < self.log.offset:
            self._sync(AwaitedCompletion.ROLL)
        else:
            self._open()

    @property
    def _must_roll(self) -> bool:
        """True if the current file contains records for a checkpoint, and a new file is possible."""
        return self._has_records and not self._file_failed and self.phase is ShardPhase.ACTIVE

    def _roll_for_checkpoint(self) -> None:
        """Close the current file as soon as the next one is ready. Commits do not wait for it."""
        if not self._must_roll:
            while self._roll_requests:
                self._take(self._roll_requests.popleft(), Room.NOW)
        elif self._ready_capacity:
            self._roll(0)
        else:
            self._prepare(0)

    def _open(self) -> None:
        if self.log.is_open:
            self._prev = (self.log.file_id, self.log.offset, self.log.last_seal, False)
        self._ready_capacity = 0
        self._effects.append(OpenFile(*self._prev, self.directory.last_identity))
        self.awaited = AwaitedCompletion.OPEN

    def _on_opened(self, event: FileOpened) -> None:
        self.awaited = AwaitedCompletion.NOTHING
        if self.log.is_open:
            self.log_files.stops[self.log.file_id] = self.log.offset
        self.log.start_file(event.file_id, event.salt, event.start, event.capacity)
        self._opened_ns = self._now_ns
        self._files_opened += 1
        self._has_records = False
        self.log_files.starts[event.file_id] = event.start
        self.log_files.salts[event.file_id] = event.salt

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
        self._batch, self._prev = batch, prev
        self._copied_files = (sorted(settled.items()), sorted(damaged))
        self._halts = halts
        batch.needs_sync = True
        self._has_begun = True
        self.removals.invalidate_lossy_topics()
        return self.handle([])

    def begin_read_only(self, read_only: ReadOnlyMode, halts: Collection[Halt] = ()) -> None:
        """Start read-only after recovery: serve only reads until `DrainRequested`."""
        for topic in self.directory.by_id.values():
            topic.publish()
        self.directory.halt(halts)
        self.removals.invalidate_lossy_topics()
        self.requests.routing.finish_recovery()
        self.requests.leases.registry.finish_recovery()
        self.requests.read_only = read_only
        self.phase = ShardPhase.ACTIVE

    def _answer_without_log(self) -> None:
        """Settle refused and duplicate frames of a read-only shard.

        The marks on the board are not changed, because the next writable incarnation needs them for its
        recovery.
        """
        batch, self._batch = self._batch, CommitBatch()
        owed, self._pending_settlements = self._pending_settlements, []
        replies, self._replies = self._replies, []
        if batch.bytes or batch.volatile_bytes or batch.dirty_topics:
            raise InvariantViolation("read-only shard has staged changes", bytes=batch.bytes)
        self._effects.extend(Settle(o.source, o.intake.entries, o.new_tail) for o in owed)
        self._effects.extend(replies)
        if batch.refused or batch.duplicates:
            self._effects.append(BatchCommitted(0, 0, 0, batch.refused, batch.duplicates))
        if self.phase is ShardPhase.DRAINING and not self._queued_events:
            self.phase = ShardPhase.STOPPED
            self._effects.append(Stop(int(ExitCode.OK), "drained"))

    def _advance_recovery(self) -> None:
        if not self._has_begun:
            return
        if not self.log.is_open:
            settled, damaged = self._copied_files
            self._roll(self._batch.bytes + _COPIED_FILE_BYTES * (len(settled) + len(damaged)))
        elif self._batch.parts:
            self._begin_batch()
        elif not self._has_copied:
            self._has_copied = True
            self._batch.needs_sync = True
            self._mark_flags = MARK_COPIED
            self._write(self._batch)
        else:
            self.phase = ShardPhase.ACTIVE
            self._effects.append(self._marks())
            # Halt topics only now: their frames in doubt and their reservations had to be copied first.
            self.directory.halt(self._halts)
            self.removals.schedule.finish_recovery()
            self.requests.routing.finish_recovery()
            self.requests.leases.registry.finish_recovery()
            self.requests.idle_topic_expiry.finish_recovery()
            self._prepare(0)

    def _finish_draining(self) -> None:
        """Stop when everything is settled: write and sync the mark of an orderly stop first."""
        if self._flushing is not None:
            self.awaited = AwaitedCompletion.FLUSH
            return
        if self._unsynced:
            self._sync(AwaitedCompletion.FLUSH)
        elif self.log.is_open and not self._final_mark_written:
            # Every batch leaves room for a mark of maximum size, so this mark always fits.
            self._mark_flags = MARK_ORDERLY
            self._write_mark()
        else:
            self.phase = ShardPhase.STOPPED
            self._effects.append(Stop(int(ExitCode.OK), "drained"))

    def check(self) -> None:
        """Check the invariants that hold between passes of the loop. Raise InvariantViolation."""
        for topic in self.directory.by_id.values():
            topic.check()
        self.requests.leases.registry.check()
        if self.log.durable > self.log.offset:
            raise InvariantViolation(
                "durable position exceeds the written position", durable=self.log.durable,
                offset=self.log.offset,
            )  # fmt: skip
