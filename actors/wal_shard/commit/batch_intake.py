"""Intake of a shard: takes received frames and requests into the commit batch when there is room. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ringlog.actors.wal_shard.commit.admission import Admission
from ringlog.actors.wal_shard.commit.commit_batch import MARK_BYTES_MAX, LogPosition, PendingSettlement
from ringlog.actors.wal_shard.commit.log_roll import LogRoll
from ringlog.actors.wal_shard.commit.refusal_details import explain_full, explain_halted
from ringlog.actors.wal_shard.events import FramesArrived, OpenVolatile
from ringlog.actors.wal_shard.phases import AwaitedCompletion, Room, ShardPhase
from ringlog.actors.wal_shard.requests.socket_requests import Requests
from ringlog.actors.wal_shard.retention.retention_schedule import LEASE_REQUESTS
from ringlog.actors.wal_shard.retention.volatile_files import VolatileFileTable
from ringlog.actors.wal_shard.routing import added_bytes
from ringlog.actors.wal_shard.shard_state import ShardState
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.errors import Status
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.topic.directory import TopicDirectory

_CONTROL_BYTES = 4 << 10
"""Maximum bytes that one such request adds to the log."""
_SLACK = 64 << 10
"""Bytes reserved for control frames when the core checks whether the intake of a pass fits into the file."""
_FAST_PATH_REQUESTS = frozenset({m.Claim, m.Ack, m.AckAndClaim})
"""Requests with a fast path."""


class BatchIntake:
    """The frames and requests of one shard on their way into the commit batch."""

    def __init__(
        self, state: ShardState, log: LogPosition, log_roll: LogRoll, requests: Requests,
        admission: Admission, directory: TopicDirectory, volatile_files: VolatileFileTable,
        on_request: Callable[[ControlReceived], object],
    ) -> None:  # fmt: skip
        """Set up the intake. `on_request` is as in ShardCore."""
        self._state, self._log, self._log_roll, self._requests = state, log, log_roll, requests
        self._fast_path, self._removals = requests.leases.fast_path, requests.removals
        self._admission, self._directory, self._volatile_files = admission, directory, volatile_files
        self._on_request = on_request
        self.queued_events: deque[FramesArrived | ControlReceived] = deque()
        """Events that wait until they can be processed, oldest first."""
        self.roll_requests: deque[ControlReceived] = deque()
        """Requests CheckpointOpen with `roll` that wait until the current file is closed."""
        self.current_request: ControlReceived | None = None
        """The request that is being handled.
        If the core crashes, the shell records it as a poison request."""

    # -- order ----------------------------------------------------------------------------------------

    def offer(self, event: FramesArrived | ControlReceived) -> None:
        """Process an event if possible, otherwise queue it."""
        if type(event) is ControlReceived and self._try_fast_path(event):
            return
        if (
            self.queued_events
            or self._state.awaited is not AwaitedCompletion.NOTHING
            or self._try_accept(event) is Room.LATER
        ):
            self.queued_events.append(event)

    def take_queued(self) -> None:
        """Process queued events, as long as the core need not wait."""
        while self.queued_events and self._state.awaited is AwaitedCompletion.NOTHING:
            if self._try_accept(self.queued_events[0]) is Room.LATER:
                break
            self.queued_events.popleft()

    def roll_for_checkpoints(self) -> None:
        """Close the current file for the requests that wait for it, or answer them if it is closed."""
        if self._log_roll.must_roll:
            self._log_roll.roll_early()
            return
        while self.roll_requests:
            self._take(self.roll_requests.popleft(), Room.NOW)

    def _try_fast_path(self, event: ControlReceived) -> bool:
        """Handle a common claim or ack. Return False if the request needs the general path."""
        message: Any = event.message
        kind = type(message)
        if kind not in _FAST_PATH_REQUESTS or message.group:
            return False
        state, quick, log = self._state, self._fast_path, self._log
        is_unoccupied = (
            state.awaited is AwaitedCompletion.NOTHING
            and not self.queued_events
            and state.phase is ShardPhase.ACTIVE
        )
        if (
            not is_unoccupied
            or self._removals.schedule.is_requested
            or self._log_roll.failure
            or self._requests.read_only is not None
        ):
            return False
        self.current_request = event
        if kind is m.Claim:
            answer = quick.claim(message, state.lease_clock_us)
            if answer is not None:
                # Leases without a log record exist only in memory, so the reply need not wait for the commit
                # batch.
                state.effects.append(Reply(event.client, event.corr, answer))
            is_done = answer is not None
        else:
            has_room = log.is_open and log.fits(state.batch.bytes + quick.bytes + _SLACK)
            take = quick.ack if kind is m.Ack else quick.ack_and_claim
            is_done = has_room and take(message, event, state.lease_clock_us)
        self.current_request = None
        return is_done

    def stage_acks(self) -> None:
        """Stage the acks of the fast path into the commit batch, before other requests are processed."""
        quick = self._fast_path
        if quick:
            for acked in quick.take_acks():
                self.current_request = acked.answers[-1][0]
                self._state.batch.replies += quick.stage_acks(acked, self._state.batch)
            self.current_request = None

    def _try_accept(self, event: FramesArrived | ControlReceived) -> Room:
        """Process an event if there is room for it now. Return the room."""
        message = event.message if type(event) is ControlReceived else None
        is_gathered = isinstance(message, m.AckAndClaim) and not message.group
        if not is_gathered:
            self.stage_acks()
        if type(event) is ControlReceived:
            self.current_request = event
            self._on_request(event)
        room = self._room_for(event)
        if room is not Room.LATER:
            self._take(event, room)
        self.current_request = None
        return room

    # -- room -----------------------------------------------------------------------------------------

    def _room_for(self, event: FramesArrived | ControlReceived) -> Room:
        """Check whether a file certainly has room for what this event may add. NONE means that it is refused.

        While no new file can be created, the end of the current file is kept for requests without records, so
        that deletes are possible on a full disk.
        """
        if self._requests.read_only is not None:
            return Room.NONE
        if not self._may_process(event):
            return Room.LATER
        if isinstance(event, ControlReceived) and not self._requests.may_log(event.message):
            return Room.NOW
        if (
            self._state.batch.is_staged
            and isinstance(event, ControlReceived)
            and isinstance(event.message, m.CheckpointRows)
        ):
            return Room.LATER  # rows contain only published state, so nothing may be staged (C2)
        data = event.buffer if isinstance(event, FramesArrived) else event.attachment
        if isinstance(event, ControlReceived) and isinstance(event.message, m.ListLiveRecords):
            data = None  # ids are not logged; checkpoints must continue on a full disk and free space
        self._admission.is_volatile_closed = False
        if data and (self._directory.ephemeral or isinstance(event, ControlReceived)):
            room = self._volatile_room(self._volatile_files.bytes_of(event, len(data)))
            if room is Room.LATER:
                return room
            self._admission.is_volatile_closed = room is Room.NONE
        added = 0
        if isinstance(event, ControlReceived):
            added = added_bytes(event.message) + self._requests.leases.registry.bytes_of(event.message)
        needed = self._state.batch.bytes + self._fast_path.bytes + len(data or b"") + added + _SLACK
        kept = self._log_roll.kept_bytes if data else 0
        if self._log_roll.failure and not data:
            needed = self._state.batch.bytes + _CONTROL_BYTES + added + self._removals.delete_bytes
        if self._log.is_open and self._log.fits(needed + kept):
            return Room.NOW
        if self._log_roll.has_ready(needed):
            return Room.NOW
        self._log_roll.prepare(needed)
        return Room.NONE if self._log_roll.failure else Room.LATER

    def _may_process(self, event: FramesArrived | ControlReceived) -> bool:
        """Return True if an event can be processed now.

        It must wait while due retention has to be applied first, or while a storage query for it is pending.
        A delete also waits until everything before it is in a file.
        """
        message = event.message if isinstance(event, ControlReceived) else None
        if self._removals.schedule.must_run_first(message, self._state.batch, self._state.now_us):
            return False
        if isinstance(message, LEASE_REQUESTS) and self._state.query_storage(
            self._requests.leases.delivery_attributes.questions_for(message)
        ):
            return False
        if isinstance(message, m.AckAndClaim) and not message.group:
            return not self._state.query_storage(self._requests.leases.deletes.sizes_for(message))
        if (isinstance(message, m.ConfirmDeadLettered) and not message.number) or (
            isinstance(message, m.Ack) and not message.group
        ):
            return not self._state.query_storage(
                self._requests.leases.deletes.questions_for(message, self._state.lease_clock_us // 1_000)
            )
        if not isinstance(message, m.RecordsDelete):
            return True
        return not self._state.batch.parts and not self._state.query_storage(
            self._removals.questions_for_delete(message, self._state.now_us)
        )

    def _volatile_room(self, length: int) -> Room:
        """Check for room in a volatile file before seqs are assigned.

        Without a file, the frames are refused.
        """
        needed = self._state.batch.volatile_bytes + length
        if not length or self._volatile_files.fits(needed):
            return Room.NOW
        if not self._volatile_files.may_try(self._state.now_ns):
            return Room.NONE
        self._state.effects.append(OpenVolatile(needed + WAL_HEADER_BYTES + MARK_BYTES_MAX))
        self._state.awaited = AwaitedCompletion.VOLATILE
        return Room.LATER

    def _take(self, event: FramesArrived | ControlReceived, room: Room) -> None:
        missing_bytes = self._requests.appends.disk_missing_bytes
        if isinstance(event, FramesArrived):
            read_only = self._requests.read_only
            closed = Status.INTERNAL if room is Room.NONE or missing_bytes else None
            closed = closed if read_only is None else Status.STORAGE_READ_ONLY
            intake = self._admission.open(event.buffer, event.batch)
            self._admission.admit(intake, self._directory.by_id, self._state.now_us, closed)
            if read_only is not None:
                read_only.explain(intake)
            elif missing_bytes:
                explain_full(intake, missing_bytes)
            if self._directory.halted:
                explain_halted(intake, self._directory.halted)
            self._state.batch.add_intake(intake)
            self._state.batch.settlements.append(PendingSettlement(event.source, intake, event.end_position))
            return
        if isinstance(event.message, m.CheckpointOpen) and event.message.roll and self._log_roll.must_roll:
            self.roll_requests.append(event)
            return
        can_log = room is Room.NOW and not (
            missing_bytes > 0 and isinstance(event.message, m.Append | m.Route)
        )
        reply = self._requests.handle(event, self._state.batch, self._state.now_us, can_log=can_log)
        if reply is None:
            return
        if self._state.batch.parts or self._state.batch.has_removals:
            self._state.batch.replies.append(reply)
        else:
            self._state.effects.append(reply)
