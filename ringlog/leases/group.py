"""One consumer group of one topic: what every call does, the changes that say so, and their replay. Pure.

A queue is its topic's own group, which has no name (OWN). Both are the same code; what differs is data:

                       own group                      named group
    ack                deletes: `end`                 settles the position: `ack`; a change
    changes            logged if leases are durable   logged
    handed out         what is not there any more     below the cursor in each change, or in `taken`
    all deliveries     tested by the next claim       tested when it comes back
    members            while they hold something      while they ask as well
    of mode stream     never                          one reader, fenced; `commit` moves the cursor

Each call decides a Change and puts it into force by the same `apply` that replays it from the log; it returns
it to be logged, or None when nothing changed. Times are milliseconds and come as arguments.

Invariants, which `check` counts again, beside those of table and dispatch:
  a token is never given twice (QL-7); `committed` is below `cursor`; what was handed out is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
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
from ringlog.leases.fair_shares import fair_shares, split_runs
from ringlog.leases.holders import NO_PROCESS, Holders, ProcessId
from ringlog.leases.live_seqs import LiveSeqs, alive_within
from ringlog.leases.recent_calls import RecentCalls
from ringlog.leases.run_columns import decode_runs_into, encode_runs
from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.leases.spans import (
    SeqRun,
    Span,
    blocks_of,
    count_of,
    flatten_spans,
    gaps,
    merge_adjacent,
    spans_of,
    truncate_runs,
)
from ringlog.leases.table import (
    ACK,
    DELAY,
    EXHAUST,
    EXTEND,
    NACK,
    REJECT,
    REJECTED_BIT,
    REMOVE,
    RESTORE,
)
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import (
    I64,
    SEQ_ORDER,
    U64,
    ClaimRequest,
    DispatchOrder,
    LeaseMatch,
    RedeliveryBackoff,
)
from ringlog.limits import DURABLE_HOLDERS_MAX, DURABLE_LEASES_MAX, GROUP_PENDING_MAX, RUNS_PER_CHANGE_MAX

_CLAIMED: Final = Op.CLAIMED
_STOLEN: Final = Op.STOLEN
_PENDING = (LEASED, DELAYED, RETURNED, EXHAUSTED)
_EVENTS = {Op.ACKED: ACK, Op.REJECTED: REJECT, Op.EXTENDED: EXTEND, Op.UNDONE: NACK}
"""What an operation that ends or changes leases does to each of them; a nack also delays."""
_WRITTEN_ROWS = 4_096
"""Runs in one part of what is written when leases become durable."""
_NONE: I64 = np.zeros(0, np.int64)


class PendingRange(NamedTuple):
    """Positions first up to stop, exclusive, of the pending list, that share all this."""

    first: int
    stop: int
    state: int
    node: str
    """Who holds them; "" = nobody."""
    deliveries: int
    begun_ms: int
    given_ms: int
    until_ms: int
    """LEASED: held up to it. DELAYED: ready from it on. Else 0."""
    token: int
    """Of the first."""


class ConsumerGroup(Dispatch):
    """State of one group."""

    def __init__(
        self,
        made: GroupConfig = DEFAULT_GROUP,
        *,
        number: int = 0,
        cursor: int = 1,
        tokens: LeaseTokens | None = None,
    ) -> None:
        self.is_default_group = not made.name
        super().__init__(Holders(keeps_idle=not self.is_default_group), cursor)
        self.delivered_ahead: BitMap64 | None = None
        """Named group: what was handed out before others of lower numbers, from `lowest_undelivered` on;
        those that
        are deleted are not in it."""
        self.number = number
        self.config = made
        self.tokens = tokens or LeaseTokens(0)
        """New leases are named by these; a replayed group is given its shard's by `recovered`."""
        self.is_logged = not self.is_default_group
        """Are its changes in the log?"""
        self.last_change_number = 0
        """Number of its last change."""
        self.at_ms = 0
        """When that was; never less than of one before."""
        self.recent_calls = RecentCalls()
        self.committed = cursor - 1
        """STREAM: everything up to here is done with."""
        self.reader_token = 0
        """STREAM: fences who reads now; 0 = nobody."""
        self.reader = ""
        self.dead_lettered = 0
        """Own group: jobs that were moved to the dead letters (QD-8)."""
        if self.is_default_group:
            self.create_ready_index()
        else:
            self.pending_limit = made.pending_max or GROUP_PENDING_MAX
            self.deliveries_max = made.deliveries_max
            self.backoff = RedeliveryBackoff(made.backoff_ms, max(made.backoff_max_ms, made.backoff_ms))
            self.has_dead_letters = False

    # -- what it says ---------------------------------------------------------------------------------

    @property
    def is_queue_mode(self) -> bool:
        """Does it lease records?"""
        return self.config.mode == Mode.QUEUE

    @property
    def pending(self) -> int:
        """Numbers that were handed out and are not done."""
        return self.runs.jobs

    @property
    def ack_floor(self) -> int:
        """The highest position with everything up to it done (F27)."""
        if not self.is_queue_mode:
            return self.committed
        fresh = self.lowest_undelivered
        return min(self.runs.lowest or fresh, fresh) - 1

    @property
    def total_delayed(self) -> int:
        """Numbers that nobody may be given yet: those that came back, and those whose records say so."""
        return self.delayed + len(self.ready_index.delayed)

    @property
    def delivered_ahead_count(self) -> int:
        """Named group: how many positions from `lowest_undelivered` on were handed out and are there."""
        return (
            self.delivered_ahead.range_cardinality(self.lowest_undelivered, 1 << 63)
            if self.delivered_ahead
            else 0
        )

    def was_delivered(self, seq: int) -> bool:
        """Named group: was this position ever handed out?"""
        return seq < self.lowest_undelivered or (
            self.delivered_ahead is not None and seq in self.delivered_ahead
        )

    # -- handing out ----------------------------------------------------------------------------------

    def claim(
        self, live: LiveSeqs, node: str, most: int, lease_ms: int, now_ms: int, *, deliveries_max: int = 0,
        order: DispatchOrder = SEQ_ORDER, fresh_max: int = 1 << 62, min_idle_ms: int = 0, call: int = 0,
        life: ProcessId = NO_PROCESS,
    ) -> LeaseChange | None:  # fmt: skip
        """Lease up to `most` numbers: those that came back, lowest first, then those that were never handed
        out (`fresh_max` at most), lowest first (QC-5) or by `order` (L11); with `min_idle_ms` then those that
        another member holds and did nothing about for so long. The rows of the change ascend (QC-3).

        With `deliveries_max` numbers that had so many are exhausted instead: see `take_returned`.
        """
        if not self.is_default_group:
            most = self._room_of(node, most, now_ms)
        found = self.collect(live, most, now_ms, deliveries_max, order, fresh_max=fresh_max)
        if min_idle_ms and (left := most - count_of(found)) > 0:
            found += self._idle(node, now_ms - min_idle_ms, left)
            found.sort()
        return self._lease(_CLAIMED, found, node, lease_ms, now_ms, call, life)

    def claim_fair_shares(
        self, live: LiveSeqs, requests: Sequence[ClaimRequest], most: int, now_ms: int, *,
        deliveries_max: int = 0, order: DispatchOrder = SEQ_ORDER,
    ) -> list[LeaseChange | None]:  # fmt: skip
        """The same for claims that came in together: fair shares of up to `most` jobs, a change each. What is
        exhausted meanwhile is in the first."""
        wants = fair_shares([request.most for request in requests], most)
        parts: list[list[SeqRun]] = [[] for _ in requests]
        rest: list[SeqRun] = []
        for by_number in (False, True):
            places = [n for n, request in enumerate(requests) if request.by_number is by_number]
            if places:
                asked = sum(wants[n] for n in places)
                chosen = order._replace(by_number=by_number)
                beside = count_of(run for run in rest if not run[2])
                found = self.collect(live, asked, now_ms, deliveries_max, chosen, beside)
                rest += found
                if count_of(found) == asked:
                    for n, part in zip(places, split_runs(found, [wants[n] for n in places]), strict=True):
                        parts[n] = part
        if count_of(rest) < sum(wants):
            # All there is is handed out, so that only the shares are left to decide.
            shares = fair_shares(wants, count_of(rest))
            places = sorted(range(len(requests)), key=lambda n: not requests[n].by_number)
            for n, part in zip(places, split_runs(sorted(rest), [shares[n] for n in places]), strict=True):
                parts[n] = part
        return [
            self._lease(_CLAIMED, part, each.node, each.lease_ms, now_ms, each.call, each.process_id)
            for each, part in zip(requests, parts, strict=True)
        ]

    def steal(
        self, seqs: I64, node: str, lease_ms: int, now_ms: int, *, min_idle_ms: int = 0, call: int = 0,
        life: ProcessId = NO_PROCESS,
    ) -> LeaseChange | None:  # fmt: skip
        """Lease those of these ascending positions that are pending to `node`, whoever has them, if nothing
        was done about them for `min_idle_ms`. Their holder before is told when it acks (F32)."""
        self.apply_expirations(now_ms)
        room = len(seqs) if self.is_default_group else self._room_of(node, len(seqs), now_ms)
        runs, found = self.runs, list[SeqRun]()
        for first, stop in spans_of(seqs):
            for row in runs.within(first, stop):
                if runs.given[row] <= now_ms - min_idle_ms and runs.state[row] != EXHAUSTED:
                    low, high = max(first, runs.first[row]), min(stop, runs.stop[row])
                    found.append((low, high, self.deliveries_of(row)))
        return self._lease(_STOLEN, truncate_runs(found, room), node, lease_ms, now_ms, call, life)

    def _room_of(self, node: str, most: int, now_ms: int) -> int:
        """How much a member that asks may be given; raises Throttled when there are too many members."""
        self.holders.require_room(node, now_ms)
        self.holders.touch_member(node, now_ms)
        return min(most, (self.config.member_max or GROUP_PENDING_MAX) - self.holders.held_by(node))

    def room_for(self, nodes: Iterable[str]) -> list[bool]:
        """Of each of those who claim together: may it be given something? A snapshot names only so many."""
        holders, new = self.holders, set[str]()
        found = []
        for node in nodes:
            if holders.find(node) < 0 and node not in new:
                if len(holders) + len(new) >= DURABLE_HOLDERS_MAX:
                    found.append(False)
                    continue
                new.add(node)
            found.append(True)
        return found

    def _idle(self, node: str, given_by: int, most: int) -> list[SeqRun]:
        runs, own = self.runs, self.holders.find(node)
        rows = runs.select((LEASED,), given_by, 0, -1, own, -1)[:most].tolist()
        return truncate_runs([(runs.first[row], runs.stop[row], runs.deliveries[row]) for row in rows], most)

    def _lease(
        self, op: Op, found: list[SeqRun], node: str, lease_ms: int, now_ms: int, call: int, life: ProcessId
    ) -> LeaseChange | None:
        aside: list[int] = []
        if self.newly_exhausted:
            aside, self.newly_exhausted = flatten_spans(self.newly_exhausted), []
        if not found and not aside:
            return None
        rows: list[int] = []
        for first, stop, deliveries in (
            merge_adjacent(found) if self.is_default_group and len(found) > 1 else found
        ):
            rows += (first, stop - first, deliveries + 1, self.tokens.allocate(stop - first))
        until_ms = now_ms + lease_ms if rows else 0
        return self._change(op, now_ms, node, until_ms, rows, call, life=life, aside=aside)

    # -- what becomes of it ---------------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> LeaseMatch:
        """As of the table; a member that asks is alive."""
        if not self.is_default_group and self.holders.find(node) >= 0:
            self.holders.touch_member(node, now_ms)
        return super().match(seqs, tokens, node, now_ms)

    def finish_jobs(self, found: LeaseMatch) -> None:
        """Own group: these jobs are done; their deletion is on its way, and says so in the log."""
        for row in (*self.rows_of(found.leased), *self.rows_of(found.gone)):
            self.apply_event(row, ACK)

    def ack_lease(self, first: int, count: int, token: int, node: str, now_ms: int) -> bool:
        """As `end` of jobs from `first` on, if all of them are held by `node` under tokens from `token` on
        and were claimed together; else False, and nothing changes but what has expired."""
        self.apply_expirations(now_ms)
        runs = self.runs
        row = runs.find(first)
        if row < 0 or runs.state[row] != LEASED or runs.holder[row] != self.holders.find(node):
            return False
        stop = first + count
        if stop > runs.stop[row] or token != runs.token[row] + first - runs.first[row]:
            return False
        if runs.stop[row] > stop:
            self.split(row, stop)
        if runs.first[row] < first:
            row = self.split(row, first)
        self.apply_event(row, ACK)
        return True

    def ack(self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0) -> LeaseChange | None:
        """These positions are done."""
        return self._settled(Op.ACKED, found, node, now_ms, 0, call)

    def nack(
        self, found: LeaseMatch, node: str, delay_ms: int, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> LeaseChange | None:
        """These numbers are given back: ready now, or when the delay is over (QN-3); with a reason they
        failed."""
        until_ms = now_ms + delay_ms if delay_ms else 0
        return self._settled(Op.RELEASED, found, node, now_ms, until_ms, call, reason)

    def nack_resting(
        self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> list[LeaseChange]:
        """These numbers are given back, each to rest as long as its deliveries make it. The last change is
        what a repeat of the request is answered by."""
        parts: dict[int, list[int]] = {}
        for row in self.rows_of(found.leased):
            rest_ms = self.backoff.delay_after(self.deliveries_of(row))
            parts.setdefault(rest_ms, []).extend(range(self.runs.first[row], self.runs.stop[row]))
        changes = []
        for n, (rest_ms, seqs) in enumerate(sorted(parts.items()), 1):
            is_last = n == len(parts)
            part = found._replace(leased=np.array(sorted(seqs), dtype=np.int64))
            if not is_last:
                part = LeaseMatch(part.leased, _NONE, _NONE)
            change = self.nack(part, node, rest_ms, now_ms, call=call if is_last else 0, reason=reason)
            changes += [change] if change is not None else []
        return changes

    def undo(self, found: LeaseMatch, node: str, now_ms: int, *, call: int = 0) -> LeaseChange | None:
        """These numbers were not begun: they are ready at once, and this delivery does not count."""
        return self._settled(Op.UNDONE, found, node, now_ms, 0, call)

    def extend(
        self, found: LeaseMatch, node: str, lease_ms: int, now_ms: int, *, call: int = 0
    ) -> LeaseChange | None:
        """These numbers are held up to another instant, which may be an earlier one (QE-2)."""
        return self._settled(Op.EXTENDED, found, node, now_ms, now_ms + lease_ms, call)

    def reject(
        self, found: LeaseMatch, node: str, reason: str, now_ms: int, *, call: int = 0
    ) -> LeaseChange | None:
        """These numbers are to go to the dead letters, whatever their deliveries."""
        return self._settled(Op.REJECTED, found, node, now_ms, 0, call, reason)

    def release(self, life: ProcessId, now_ms: int) -> list[LeaseChange]:
        """This process is gone: what it holds is ready at once; deliveries stay counted (CL-10)."""
        link = self.forget_process(life)
        if not link:
            return []
        self.apply_expirations(now_ms)
        runs = self.runs
        spans: list[Span] = sorted((runs.first[row], runs.stop[row]) for row in runs.rows_leased_by(link))
        return [
            self._change(Op.RELEASED, now_ms, "", 0, flatten_spans(spans[at : at + RUNS_PER_CHANGE_MAX]), 0)
            for at in range(0, len(spans), RUNS_PER_CHANGE_MAX)
        ]

    def leave(self, node: str, now_ms: int) -> LeaseChange | None:
        """A member leaves: what it holds is ready at once (F63)."""
        self.apply_expirations(now_ms)
        change = None
        if self.holders.held_by(node):
            change = self._change(Op.RELEASED, now_ms, node, 0, [], 0)
        self.holders.leave(node)
        return change

    def _settled(
        self, op: Op, found: LeaseMatch, node: str, now_ms: int, until_ms: int, call: int, reason: str = ""
    ) -> LeaseChange | None:
        if not len(found.leased):
            return None
        # Of others than acks: jobs that were deleted are not held either.
        skipped = [*found.skipped.tolist(), *found.gone.tolist()]
        return self._change(
            op, now_ms, node, until_ms, flatten_spans(spans_of(found.leased)), call, skipped, reason
        )

    def redeliver(self, seq: int, now_ms: int, *, call: int = 0) -> LeaseChange:
        """Give this position out once more, as if it never had been. One that is pending, or was not given
        out yet, will be anyway; the call is remembered all the same."""
        is_done = self.was_delivered(seq) and self.runs.find(seq) < 0
        return self._change(Op.REDELIVERED, now_ms, "", 0, [seq, 1] if is_done else [], call)

    # -- where it is ----------------------------------------------------------------------------------

    def seek(self, cursor: int, now_ms: int) -> LeaseChange:
        """Go on from `cursor`, as if the group had begun there: nothing is pending, leases have ended,
        everything from there on is given out, again perhaps."""
        self._restart_at(cursor)
        return self._change(Op.SEEK, now_ms, "", 0, [], 0)

    def _restart_at(self, cursor: int) -> None:
        self.cursor, self.delivered_ahead = cursor, None
        self.drop_ready_index()

    def take_over_stream(self, node: str, token: int, now_ms: int, *, call: int = 0) -> LeaseChange:
        """STREAM: `node` reads from here on, behind what is committed."""
        return self._change(Op.TAKEN_OVER, now_ms, node, 0, [token], call)

    def commit(self, committed: int, cursor: int, now_ms: int) -> LeaseChange | None:
        """STREAM: everything up to `committed` is done with, and everything before `cursor` was delivered."""
        committed, cursor = max(committed, self.committed), max(cursor, self.cursor)
        if (committed, cursor) == (self.committed, self.cursor):
            return None
        self.cursor = max(cursor, committed + 1)
        return self._change(Op.COMMITTED, now_ms, self.reader, 0, [committed], 0)

    def remove(self, now_ms: int) -> LeaseChange:
        """The group is no more."""
        return self._change(Op.REMOVED, now_ms, "", 0, [], 0)

    # -- changes --------------------------------------------------------------------------------------

    def _change(
        self, op: Op, now_ms: int, node: str, until_ms: int, rows: list[int], call: int,
        skipped: list[int] | None = None, reason: str = "", *, life: ProcessId = NO_PROCESS,
        aside: list[int] | None = None, saved: bytes | None = None,
    ) -> LeaseChange:  # fmt: skip
        change = LeaseChange(
            self.number, self.last_change_number + 1, op, now_ms,
            0 if self.is_default_group else self.lowest_undelivered, node,
            until_ms, rows, call, skipped or [], None, reason, life, aside or [], saved,
        )  # fmt: skip
        self.apply(change)
        return change

    def apply(self, change: LeaseChange) -> None:
        """Put a change into force."""
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
            self.cursor = max(self.cursor, self.committed + 1)
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
        holder, link = self.holders.touch_member(change.node, at_ms), self.link_of_process(change.process_id)
        for at in range(0, len(rows), CLAIM_ROW):
            first, stop = rows[at], rows[at] + rows[at + 1]
            if stop > change.cursor and not self.is_default_group:
                self.delivered_ahead = self.delivered_ahead or BitMap64()
                self.delivered_ahead.add_range(max(first, change.cursor), stop)
            row = runs.find(first)
            begun = (runs.begun[row] if row >= 0 else 0) or at_ms
            if row >= 0 or stop - first > 1:
                for row in self.isolate_rows(first, stop):
                    self.drop(row)  # Handed out again: why it failed is not forgotten.
            self.lease(
                first, stop, change.until_ms, rows[at + 3], holder, rows[at + 2], link=link, begun=begun,
                given=at_ms,
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
                    continue  # A replay: the lease had run out (QL-17).
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
                self.enter(row, RETURNED)

    def _apply_seek(self, cursor: int) -> None:
        for row in self.runs.rows():
            self.apply_event(row, REMOVE)
        self._restart_at(cursor)
        self.committed = cursor - 1
        # Who reads a stream group goes on from where he is no more: he has to look where that is.
        self.reader, self.reader_token = "", 0

    # -- replay ---------------------------------------------------------------------------------------

    def replay(self, change: LeaseChange) -> None:
        """Put a change from the log into force, unless it is already. What had expired by then is so, also
        when the clock went back (QL-20). Raises CorruptData for a change that no version can have written."""
        if change.number <= self.last_change_number:
            return
        require_valid_change(change)
        self.apply_expirations(max(self.at_ms, change.at_ms))
        if not self.is_default_group:
            self.cursor = change.cursor
        elif change.op == Op.CLAIMED:
            # The cursor is not in the log: it begins again, and passes over what was ever handed out.
            for first, count in zip(change.rows[::CLAIM_ROW], change.rows[1::CLAIM_ROW], strict=True):
                self.ready_index.skipped_by_cursor.add_range(first, first + count)
        self.apply(change)
        if change.op == Op.SNAPSHOT:
            try:
                decode_runs_into(self, change.run_columns or b"")
            except (msgspec.MsgspecError, ValueError, IndexError, OverflowError) as e:
                raise CorruptData("a part of a queue's leases does not decode", reason=str(e)) from None

    def finish_recovery(self, live: LiveSeqs, tokens: LeaseTokens) -> None:
        """The log is applied: what left the topic meanwhile is not leased any more, and new leases are named
        by `tokens`."""
        self.tokens = tokens
        runs = self.runs
        for row in runs.rows():
            first, stop = runs.first[row], runs.stop[row]
            for low, high in gaps(first, stop, alive_within(live, first, stop)):
                for gone in self.isolate_rows(low, high):
                    self.apply_event(gone, REMOVE)
        self.forget_idle_processes()
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
        """As of dispatch."""
        super().apply_removal(floor, seqs, on_request=on_request)
        self._forget_delivered(floor, seqs)

    def _forget_delivered(self, floor: int, seqs: BitMap64 | None) -> None:
        if self.delivered_ahead is not None:
            self.delivered_ahead.remove_range(0, floor)
            if seqs:
                self.delivered_ahead -= seqs

    def begin_log(self) -> None:
        """Own group: its changes are in the log from here on, from number 1."""
        self.is_logged, self.last_change_number, self.at_ms, self.recent_calls = True, 0, 0, RecentCalls()
        self.pending_limit = DURABLE_LEASES_MAX

    def end_log(self) -> None:
        """Own group: its changes are not in the log any more; leases stay as they are."""
        self.is_logged, self.pending_limit = False, 0

    def snapshot_changes(self, now_ms: int) -> list[LeaseChange]:
        """Everything that is known, when leases become durable (QL-21)."""
        changes = [
            self._change(Op.SNAPSHOT, now_ms, "", 0, [], 0, saved=part)
            for part in encode_runs(self, _WRITTEN_ROWS)
        ]
        return [*changes, self.count_dead_lettered(0, now_ms)] if self.dead_lettered else changes

    # -- dead letters ---------------------------------------------------------------------------------

    def set_dead_lettering(self, has_mover: bool) -> None:
        """Named group: from here on dead letters are moved, or they are not."""
        self.has_dead_letters = has_mover and bool(self.config.dead_letter)
        for row in self.runs.rows():
            if self.runs.state[row] == EXHAUSTED or self.becomes_exhausted(row, self.runs.state[row]):
                self.apply_event(row, EXHAUST if self.has_dead_letters else RESTORE)

    def filter_exhausted(self, seqs: I64) -> I64:
        """Those of these ascending numbers that wait for the dead letters."""
        return np.array([seq for seq in seqs.tolist() if self.is_exhausted(seq)], dtype=np.int64)

    def restore_exhausted(self) -> None:
        """Own group: what was exhausted is handed out again: there are no dead letters any more (QD-5)."""
        for first, stop, _ in self.exhausted_runs(self.exhausted):
            for row in self.isolate_rows(first, stop):
                self.apply_event(row, RESTORE)

    def count_dead_lettered(self, jobs: int, now_ms: int) -> LeaseChange:
        """Own group: so many more jobs were moved to the dead letters (QD-8)."""
        return self._change(Op.DEAD_LETTERED, now_ms, "", 0, [self.dead_lettered + jobs], 0)

    def token_of(self, seq: int) -> int:
        """Of the lease under which this pending position was given out last; 0 = it was not since it came
        back."""
        row = self.runs.find(seq)
        return self.runs.token[row] + seq - self.runs.first[row]

    def confirm_dead_lettered(self, seqs: I64, tokens: U64, now_ms: int) -> LeaseChange | None:
        """Copies of these ascending positions are durable among the dead letters, made of what was given out
        last under these leases: those that are spent since are done. One that came back meanwhile and was
        given up again stays: its second letter is not written yet, and this may be a late repeat."""
        runs, done = self.runs, np.zeros(len(seqs), np.bool_)
        for first, stop in spans_of(seqs):
            for row in runs.within(first, stop):
                if runs.state[row] == EXHAUSTED:
                    named = slice(*np.searchsorted(seqs, (runs.first[row], runs.stop[row])).tolist())
                    done[named] = tokens[named] == self.tokens_of(row, seqs[named])
        if not done.any():
            return None
        return self._change(Op.ACKED, now_ms, "", 0, flatten_spans(spans_of(seqs[done])), 0)

    # -- looking --------------------------------------------------------------------------------------

    def list_pending(
        self, now_ms: int, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0, after: int = 0,
        limit: int = 100,
    ) -> tuple[list[PendingRange], bool]:  # fmt: skip
        """Entries of the pending list behind `after`, ascending, at most `limit` runs, and whether there are
        more. It changes nothing."""
        self.apply_expirations(now_ms)
        holder = self.holders.find(node)
        if node and holder < 0:
            return [], False
        states = (LEASED,) if node else _PENDING
        rows = self.runs.select(
            states, now_ms - idle_ms, min_deliveries, holder if node else -1, -1, after
        ).tolist()
        return [self._entry(row, after) for row in rows[:limit]], len(rows) > limit

    def _entry(self, row: int, after: int) -> PendingRange:
        runs, state = self.runs, self.runs.state[row]
        first = max(runs.first[row], after + 1)
        return PendingRange(
            first, runs.stop[row], state,
            self.holders.name_of(runs.holder[row]) if state == LEASED else "",
            self.deliveries_of(row), runs.begun[row], runs.given[row],
            runs.at[row] if state in {LEASED, DELAYED} else 0, runs.token[row] + first - runs.first[row],
        )  # fmt: skip

    def check(self) -> None:
        """Assert the invariants by counting again."""
        super().check()
        if self.committed >= self.cursor:
            raise InvariantViolation(
                "a group's cursor is behind what was committed", group=self.config.name, cursor=self.cursor,
                committed=self.committed,
            )  # fmt: skip
        if self.is_default_group:
            return
        for row in self.runs.rows():
            first, stop = max(self.runs.first[row], self.lowest_undelivered), self.runs.stop[row]
            if first < stop and not (
                self.delivered_ahead and self.delivered_ahead.contains_range(first, stop)
            ):
                raise InvariantViolation(
                    "a group does not know what it handed out", group=self.config.name, first=first,
                    stop=stop,
                    cursor=self.lowest_undelivered,
                )  # fmt: skip
        if self.delivered_ahead and (lost := self.delivered_ahead & self.ready_index.unclaimed):
            raise InvariantViolation(
                "a group would hand out numbers again", group=self.config.name, first=lost.min(),
                count=len(lost),
            )  # fmt: skip


def created(number: int, made: GroupConfig, cursor: int, now_ms: int) -> LeaseChange:
    """The change that makes a group."""
    return LeaseChange(number, 1, Op.CREATED, now_ms, cursor, config=made)


def create_group(change: LeaseChange, tokens: LeaseTokens | None = None) -> ConsumerGroup:
    """The group that such a change makes."""
    assert change.config is not None
    group = ConsumerGroup(change.config, number=change.group, cursor=change.cursor, tokens=tokens)
    group.last_change_number = change.number
    return group
