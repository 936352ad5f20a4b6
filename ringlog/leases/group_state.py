"""The state of one consumer group: how its changes are applied, replayed and recovered. Pure.

Invariants, which `check` recounts, in addition to those of table and dispatch:
  `committed` is below `cursor`; delivered seqs are known as such.
"""

from __future__ import annotations

from typing import Final

import msgspec
from pyroaring import BitMap64

from ringlog.errors import CorruptData, InvariantViolation
from ringlog.leases.change import (
    CLAIM_ROW,
    DEFAULT_GROUP,
    SPAN_ROW,
    GroupConfig,
    LeaseChange,
    Mode,
    Op,
    require_valid_change,
)
from ringlog.leases.dispatch import Dispatch
from ringlog.leases.holders import NO_PROCESS, Holders, ProcessId
from ringlog.leases.live_seqs import LiveSeqs, alive_within
from ringlog.leases.recent_calls import RecentCalls
from ringlog.leases.run_columns import decode_runs_into
from ringlog.leases.runs import LEASED, RETURNED
from ringlog.leases.spans import blocks_of, gaps
from ringlog.leases.table import REJECTED_BIT
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.transitions import ACK, DELAY, EXHAUST, EXTEND, NACK, REJECT, REMOVE
from ringlog.leases.types import RedeliveryBackoff
from ringlog.limits import DURABLE_LEASES_MAX, GROUP_PENDING_MAX

_CLAIMED: Final = Op.CLAIMED
_STOLEN: Final = Op.STOLEN
_EVENTS = {Op.ACKED: ACK, Op.REJECTED: REJECT, Op.EXTENDED: EXTEND, Op.UNDONE: NACK}
"""Effect of an operation on each of its leases. RELEASED, which is not listed, causes NACK or DELAY."""


class GroupState(Dispatch):
    """The leases and the position of one group, as its changes make them."""

    def __init__(
        self,
        config: GroupConfig = DEFAULT_GROUP,
        *,
        number: int = 0,
        cursor: int = 1,
        tokens: LeaseTokens | None = None,
    ) -> None:
        self.is_default_group: bool = not config.name
        super().__init__(Holders(keeps_idle=not self.is_default_group), cursor)
        self.delivered_ahead: BitMap64 | None = None
        """Named group: positions from `lowest_undelivered` on that were delivered before lower ones. It has
        no deleted positions."""
        self.number = number
        self.config = config
        self.tokens: LeaseTokens = tokens or LeaseTokens(0)
        """Source of the tokens of new leases. A replayed group receives its shard's in `finish_recovery`."""
        self.is_logged: bool = not self.is_default_group
        """Its changes are in the log."""
        self.last_change_number: int = 0
        """Number of its last change."""
        self.at_ms: int = 0
        """Time of the last change; it never decreases."""
        self.recent_calls: RecentCalls = RecentCalls()
        self.committed: int = cursor - 1
        """STREAM: every record up to here is processed."""
        self.reader_token: int = 0
        """STREAM: token of the current reader, which fences earlier ones; 0 = there is no reader."""
        self.reader: str = ""
        self.dead_lettered: int = 0
        """Own group: number of jobs that were moved to the dead-letter topic."""
        if self.is_default_group:
            self.create_ready_index()
        else:
            self.pending_limit: int = config.pending_max or GROUP_PENDING_MAX
            self.deliveries_max: int = config.deliveries_max
            self.backoff: RedeliveryBackoff = RedeliveryBackoff(
                config.backoff_ms, max(config.backoff_max_ms, config.backoff_ms)
            )
            self.has_dead_letters = False

    # -- state ---------------------------------------------------------------------------------------

    @property
    def is_queue_mode(self) -> bool:
        """The group leases records."""
        return self.config.mode == Mode.QUEUE

    @property
    def pending(self) -> int:
        """Number of seqs that were delivered and are not done."""
        return self.runs.jobs

    @property
    def ack_floor(self) -> int:
        """The highest position up to which every record is done."""
        if not self.is_queue_mode:
            return self.committed
        fresh = self.lowest_undelivered
        return min(self.runs.lowest or fresh, fresh) - 1

    @property
    def total_delayed(self) -> int:
        """Number of seqs that wait for their time: delayed after a return, or because of a `not_before`."""
        return self.delayed + len(self.ready_index.delayed)

    @property
    def delivered_ahead_count(self) -> int:
        """Named group: number of positions from `lowest_undelivered` on that were delivered and exist."""
        return (
            self.delivered_ahead.range_cardinality(self.lowest_undelivered, 1 << 63)
            if self.delivered_ahead
            else 0
        )

    def was_delivered(self, seq: int) -> bool:
        """Named group: return True if this position was ever delivered."""
        return seq < self.lowest_undelivered or (
            self.delivered_ahead is not None and seq in self.delivered_ahead
        )

    # -- changes --------------------------------------------------------------------------------------

    def _change(
        self, op: Op, now_ms: int, node: str, until_ms: int, rows: list[int], call: int,
        skipped: list[int] | None = None, reason: str = "", *, process_id: ProcessId = NO_PROCESS,
        exhausted_spans: list[int] | None = None, saved: bytes | None = None,
    ) -> LeaseChange:  # fmt: skip
        change = LeaseChange(
            self.number, self.last_change_number + 1, op, now_ms,
            0 if self.is_default_group else self.lowest_undelivered, node,
            until_ms, rows, call, skipped or [], None, reason, process_id, exhausted_spans or [], saved,
        )  # fmt: skip
        self.apply(change)
        return change

    def apply(self, change: LeaseChange) -> None:
        """Apply a change to the state."""
        self.last_change_number, op = change.number, change.op
        self.at_ms = max(self.at_ms, change.at_ms)
        if op is _CLAIMED or op is _STOLEN:
            self._apply_lease(change)
        elif op in _EVENTS or op == Op.RELEASED:
            self._apply_settled(change)
        elif op == Op.REDELIVERED:
            self._apply_redelivery(change)
        elif op == Op.SEEK:
            self._apply_seek(change.cursor)
        elif op == Op.TAKEN_OVER:
            self.reader, self.reader_token = change.node, change.rows[0]
        elif op == Op.COMMITTED:
            self.committed = max(self.committed, change.rows[0])
            self.cursor: int = max(self.cursor, self.committed + 1)
        elif op == Op.DEAD_LETTERED:
            self.dead_lettered = change.rows[0]
        if self.delivered_ahead is not None:
            self.delivered_ahead.remove_range(0, change.cursor)
            if not self.delivered_ahead:
                self.delivered_ahead = None
        if change.call and self.is_logged:
            self.recent_calls.remember_change(change)

    def _apply_lease(self, change: LeaseChange) -> None:
        runs, rows, at_ms = self.runs, change.rows, change.at_ms
        if change.exhausted:
            for first, count in zip(change.exhausted[::SPAN_ROW], change.exhausted[1::SPAN_ROW], strict=True):
                for row in self.isolate_rows(first, first + count):
                    self.apply_event(row, EXHAUST)
        if not rows:
            return
        process_number = self.processes.get_or_add(change.process_id)
        for at in range(0, len(rows), CLAIM_ROW):
            first, stop = rows[at], rows[at] + rows[at + 1]
            if stop > change.cursor and not self.is_default_group:
                self.delivered_ahead = self.delivered_ahead or BitMap64()
                self.delivered_ahead.add_range(max(first, change.cursor), stop)
            row = runs.find(first)
            begun = (runs.begun[row] if row >= 0 else 0) or at_ms
            if row >= 0 or stop - first > 1:
                for row in self.isolate_rows(first, stop):
                    self.drop(row)  # Delivered again; the reason of its last failure is kept.
            # After the drop: a holder that lost its last run is forgotten, and its number is reused.
            holder = self.holders.touch_member(change.node, at_ms)
            self.lease(
                first, stop, change.until_ms, rows[at + 3], holder, rows[at + 2],
                process_number=process_number, begun=begun, given=at_ms,
            )  # fmt: skip

    def _apply_settled(self, change: LeaseChange) -> None:
        runs, rows, op = self.runs, change.rows, change.op
        event = _EVENTS.get(op, DELAY if change.until_ms else NACK)
        spans = [(rows[at], rows[at] + rows[at + 1]) for at in range(0, len(rows), SPAN_ROW)]
        if op == Op.RELEASED and not rows and self.holders.held_by(change.node):
            holder = self.holders.find(change.node)
            held = runs.select((LEASED,), 1 << 62, 0, holder, -1, -1).tolist()
            spans = [(runs.first[row], runs.stop[row]) for row in held]
        for first, stop in spans:
            for row in self.isolate_rows(first, stop):
                if runs.state[row] != LEASED and op != Op.ACKED:
                    continue  # A replay: the lease had expired.
                if change.reason:
                    self.failures.record_failure(
                        runs.first[row], runs.stop[row], change.reason, change.at_ms, int(op == Op.RELEASED)
                    )
                if op == Op.REJECTED and not self.is_default_group:
                    runs.deliveries[row] |= REJECTED_BIT
                elif op == Op.UNDONE:
                    runs.deliveries[row] = max(self.deliveries_of(row) - 1, 0)
                elif op == Op.EXTENDED:
                    runs.given[row] = change.at_ms
                self.apply_event(row, event, change.until_ms)

    def _apply_redelivery(self, change: LeaseChange) -> None:
        rows = change.rows
        for at in range(0, len(rows), SPAN_ROW):
            first, count = rows[at : at + SPAN_ROW]
            for low, high in blocks_of(first, first + count):
                row = self.runs.add(low, high, RETURNED, begun=change.at_ms, given=change.at_ms)
                self.add_row(row, RETURNED)

    def _apply_seek(self, cursor: int) -> None:
        for row in self.runs.rows():
            self.apply_event(row, REMOVE)
        self._restart_at(cursor)
        self.committed = cursor - 1
        # The reader's position is not valid any more, so it must take over the group again.
        self.reader, self.reader_token = "", 0

    def _restart_at(self, cursor: int) -> None:
        self.cursor, self.delivered_ahead = cursor, None
        self.drop_ready_index()

    # -- replay ---------------------------------------------------------------------------------------

    def replay(self, change: LeaseChange) -> None:
        """Apply a change from the log, unless it is applied already.

        Leases that had expired at the time of the change expire first, even if the clock went back since.
        Raises CorruptData for a change that no version can have written."""
        if change.number <= self.last_change_number:
            return
        require_valid_change(change)
        self.apply_expirations(max(self.at_ms, change.at_ms))
        if not self.is_default_group:
            self.cursor = change.cursor
        elif change.op == Op.CLAIMED:
            # The cursor is not logged. It starts from the beginning and skips every seq that was ever
            # delivered.
            for first, count in zip(change.rows[::CLAIM_ROW], change.rows[1::CLAIM_ROW], strict=True):
                self.ready_index.skipped_by_cursor.add_range(first, first + count)
        self.apply(change)
        if change.op == Op.SNAPSHOT:
            try:
                decode_runs_into(self, change.run_columns or b"", change.at_ms)
            except (msgspec.MsgspecError, ValueError, IndexError, OverflowError) as e:
                raise CorruptData("logged leases of a queue cannot be decoded", reason=str(e)) from None

    def finish_recovery(self, live: LiveSeqs, tokens: LeaseTokens) -> None:
        """Finish the replay: end the leases of records that left the topic. New leases use `tokens`."""
        self.tokens = tokens
        runs = self.runs
        for row in runs.rows():
            first, stop = runs.first[row], runs.stop[row]
            for low, high in gaps(first, stop, alive_within(live, first, stop)):
                for gone in self.isolate_rows(low, high):
                    self.apply_event(gone, REMOVE)
        self.processes.forget_idle()
        if self.is_default_group:
            self.ready_index.skipped_by_cursor.clear()
            for row in runs.rows():
                self.ready_index.skipped_by_cursor.add_range(runs.first[row], runs.stop[row])
        elif self.is_queue_mode:
            self.cursor = min(self.cursor, live.head + 1)
            if self.delivered_ahead:
                self.delivered_ahead.remove_range(live.head + 1, 1 << 63)
                self._forget_delivered(live.front, live.dead)
                self.create_ready_index(self.delivered_ahead)

    def apply_removal(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """As in Dispatch."""
        super().apply_removal(floor, seqs, on_request=on_request)
        self._forget_delivered(floor, seqs)

    def _forget_delivered(self, floor: int, seqs: BitMap64 | None) -> None:
        if self.delivered_ahead is not None:
            self.delivered_ahead.remove_range(0, floor)
            if seqs:
                self.delivered_ahead -= seqs

    def begin_log(self) -> None:
        """Own group: log its changes from now on, starting with number 1."""
        self.is_logged, self.last_change_number, self.at_ms, self.recent_calls = True, 0, 0, RecentCalls()
        self.pending_limit = DURABLE_LEASES_MAX

    def end_log(self) -> None:
        """Own group: stop logging its changes. The leases stay."""
        self.is_logged, self.pending_limit = False, 0

    def check(self) -> None:
        """Verify the invariants by a recount."""
        super().check()
        if self.committed >= self.cursor:
            raise InvariantViolation(
                "cursor of a group must be above its committed position", group=self.config.name,
                cursor=self.cursor, committed=self.committed,
            )  # fmt: skip
        if self.is_default_group:
            return
        for row in self.runs.rows():
            first, stop = max(self.runs.first[row], self.lowest_undelivered), self.runs.stop[row]
            if first < stop and not (
                self.delivered_ahead and self.delivered_ahead.contains_range(first, stop)
            ):
                raise InvariantViolation(
                    "pending positions of a group are not recorded as delivered", group=self.config.name,
                    first=first, stop=stop, cursor=self.lowest_undelivered,
                )  # fmt: skip
        if self.delivered_ahead and (lost := self.delivered_ahead & self.ready_index.unclaimed):
            raise InvariantViolation(
                "group would deliver positions a second time", group=self.config.name, first=lost.min(),
                count=len(lost),
            )  # fmt: skip
