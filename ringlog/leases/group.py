"""One consumer group of one topic: its cursor, its pending list, its members, and what every call does. Pure.

Each call decides a Change, and puts it into force by the same `apply` that replays it from the log; it
returns it to be logged, or None when nothing changed. Only two things happen without one, because they follow
from what is there: a lease or a delay ends when its time is over, at the next call (QL-9), and what leaves
the topic leaves the pending list. Times are milliseconds and come as arguments.

Invariants, which `check` counts again:
  runs are disjoint and lie below `cursor`; counts are what the runs and the members say;
  a token is never given twice, and no position is in two leases;
  a position is pending until it is acked, or leaves the topic, or the group is told to be elsewhere;
  of a stream group: committed < cursor, and there are no runs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from msgspec import structs

from ringlog.errors import InvariantViolation
from ringlog.leases.group_change import CLAIM_ROW, SPAN_ROW, Change, Made, Mode, Op
from ringlog.leases.holders import NO_LIFE, Holders, Life
from ringlog.leases.live_seqs import Live, alive_from, alive_within
from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED, RETURNED
from ringlog.leases.spans import SeqRun, blocks_of, count_of, cut, flat, gaps, spans_of
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
    LeaseTable,
)
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import I64, U64, LeaseRun, Matched
from ringlog.limits import (
    GROUP_CALL_ROWS_KEPT_MAX,
    GROUP_CALLS_KEPT_MAX,
    GROUP_CALLS_PER_MEMBER_MAX,
    GROUP_PENDING_MAX,
)

_PENDING = (LEASED, DELAYED, RETURNED, EXHAUSTED)
_EVENTS = {Op.ACKED: ACK, Op.REJECTED: REJECT, Op.EXTENDED: EXTEND, Op.UNDONE: NACK}
"""What an operation that ends or changes leases does to each of them; a nack also delays."""
_NONE: I64 = np.zeros(0, np.int64)


class Entry(NamedTuple):
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
    """LEASED: held up to it. DELAYED: ready from it on. RETURNED: 0."""
    token: int
    """Of the first."""


class ConsumerGroup(LeaseTable):
    """State of one group."""

    def __init__(self, number: int, made: Made, cursor: int) -> None:
        super().__init__(Holders(keeps_idle=True))
        self.has_dead_letters = False
        self.number = number
        self.made = made
        self.changes = 0
        """Number of its last change."""
        self.cursor = cursor
        """No position from here on was given out."""
        self.committed = cursor - 1
        """STREAM: everything up to here is done with."""
        self.holder_token = 0
        """STREAM: fences who reads now; 0 = nobody."""
        self.holder = ""
        self.calls: OrderedDict[int, Change] = OrderedDict()
        """The latest changes by the number of their call, for who asks again; see `answered`."""
        self._call_rows = 0
        self._calls_of: dict[str, OrderedDict[int, None]] = {}
        """The same numbers by member, each the oldest first."""

    # -- what it says ---------------------------------------------------------------------------------

    @property
    def is_queue(self) -> bool:
        """Does it lease records?"""
        return self.made.mode == Mode.QUEUE

    @property
    def pending(self) -> int:
        """Positions that were given out and are not done."""
        return self.runs.jobs

    @property
    def floor(self) -> int:
        """The highest position with everything up to it done (F27)."""
        if not self.is_queue:
            return self.committed
        return (self.runs.lowest or self.cursor) - 1

    def answered(self, call: int) -> Change | None:
        """What a call changed that has been made before."""
        return self.calls.get(call) if call else None

    # -- giving out -----------------------------------------------------------------------------------

    def claim(
        self, live: Live, node: str, most: int, lease_ms: int, now_ms: int, tokens: Tokens, *,
        fresh_max: int = GROUP_PENDING_MAX, min_idle_ms: int = 0, call: int = 0, life: Life = NO_LIFE,
    ) -> Change | None:  # fmt: skip
        """Lease up to `most` positions to `node`: those that came back, then new ones (`fresh_max` at most),
        each the lowest first; with `min_idle_ms` then those that another member holds and did nothing about
        for so long."""
        self.settle(now_ms)
        self.holders.require_room(node, now_ms)
        self.holders.note_life(node, now_ms, life)
        most = min(most, self._member_max - self.holders.held_by(node))
        found = [self._handed_out(row) for row in self.take_returned(most)]
        most -= count_of(found)
        room = max(min(most, fresh_max, self._pending_max - self.pending), 0)
        fresh, cursor = alive_from(live, self.cursor, room)
        found += [(first, stop, 0) for first, stop in fresh]
        most -= count_of(found[len(found) - len(fresh) :])
        if min_idle_ms and most > 0:
            found += self._idle(node, now_ms - min_idle_ms, most)
        if not found:
            return None
        return self._lease(Op.CLAIMED, found, max(cursor, self.cursor), node, lease_ms, now_ms, tokens, call)

    def steal(
        self, seqs: I64, node: str, lease_ms: int, now_ms: int, tokens: Tokens, *, min_idle_ms: int = 0,
        call: int = 0, life: Life = NO_LIFE,
    ) -> Change | None:  # fmt: skip
        """Lease those of these ascending positions that are pending to `node`, whoever has them, if nothing
        was done about them for `min_idle_ms`. Who had them is told when he acks (F32)."""
        self.settle(now_ms)
        self.holders.require_room(node, now_ms)
        self.holders.note_life(node, now_ms, life)
        runs, found = self.runs, []
        for first, stop in spans_of(seqs):
            for row in runs.within(first, stop):
                if runs.given[row] <= now_ms - min_idle_ms and runs.state[row] != EXHAUSTED:
                    low, high = max(first, runs.first[row]), min(stop, runs.stop[row])
                    found.append((low, high, self.deliveries_of(row)))
        found = cut(found, self._member_max - self.holders.held_by(node))
        if not found:
            return None
        return self._lease(Op.STOLEN, found, self.cursor, node, lease_ms, now_ms, tokens, call)

    @property
    def _pending_max(self) -> int:
        return self.made.pending_max or GROUP_PENDING_MAX

    @property
    def _member_max(self) -> int:
        return self.made.member_max or GROUP_PENDING_MAX

    def _handed_out(self, row: int) -> SeqRun:
        return self.runs.first[row], self.runs.stop[row], self.deliveries_of(row)

    def _idle(self, node: str, given_by: int, most: int) -> list[tuple[int, int, int]]:
        runs, own = self.runs, self.holders.find(node)
        rows = runs.select((LEASED,), given_by, 0, -1, own, -1)[:most].tolist()
        found = [(runs.first[row], runs.stop[row], runs.deliveries[row]) for row in rows]
        return cut(found, most)

    def _lease(
        self, op: Op, found: list[tuple[int, int, int]], cursor: int, node: str, lease_ms: int, now_ms: int,
        tokens: Tokens, call: int,
    ) -> Change:  # fmt: skip
        rows: list[int] = []
        for first, stop, deliveries in sorted(found):
            rows += (first, stop - first, deliveries + 1, tokens.take(stop - first))
        return self._change(op, now_ms, cursor, node, now_ms + lease_ms, rows, call)

    # -- what becomes of it ---------------------------------------------------------------------------

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> Matched:
        """As of the table; a member that asks is alive."""
        if self.holders.find(node) >= 0:
            self.holders.note(node, now_ms)
        return super().match(seqs, tokens, node, now_ms)

    def ack(self, found: Matched, node: str, now_ms: int, *, call: int = 0) -> Change | None:
        """These positions are done."""
        return self._settled(Op.ACKED, found, node, now_ms, 0, call)

    def nack(
        self, found: Matched, node: str, delay_ms: int, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> Change | None:
        """These positions are given back: ready now, or when the delay is over; with a reason they failed."""
        until_ms = now_ms + delay_ms if delay_ms else 0
        return self._settled(Op.RELEASED, found, node, now_ms, until_ms, call, reason)

    def undo(self, found: Matched, node: str, now_ms: int, *, call: int = 0) -> Change | None:
        """Nobody has begun these positions: they are ready at once, and this delivery does not count."""
        return self._settled(Op.UNDONE, found, node, now_ms, 0, call)

    def extend(
        self, found: Matched, node: str, lease_ms: int, now_ms: int, *, call: int = 0
    ) -> Change | None:
        """These positions are held up to another instant, which may be an earlier one."""
        return self._settled(Op.EXTENDED, found, node, now_ms, now_ms + lease_ms, call)

    def reject(self, found: Matched, node: str, reason: str, now_ms: int, *, call: int = 0) -> Change | None:
        """These positions are to go to the dead letters, whatever their deliveries."""
        return self._settled(Op.REJECTED, found, node, now_ms, 0, call, reason)

    def again(self, seq: int, now_ms: int, *, call: int = 0) -> Change:
        """Give this position out once more, as if it never had been. One that is pending, or was not given
        out yet, will be anyway; the call is remembered all the same."""
        is_done = seq < self.cursor and self.runs.find(seq) < 0
        return self._change(Op.AGAIN, now_ms, self.cursor, "", 0, [seq, 1] if is_done else [], call)

    def leave(self, node: str, now_ms: int) -> Change | None:
        """A member leaves: what it holds is ready at once (F63)."""
        self.settle(now_ms)
        change = None
        if self.holders.held_by(node):
            change = self._change(Op.RELEASED, now_ms, self.cursor, node, 0, [], 0)
        self.holders.leave(node)
        return change

    def _held_by(self, node: str) -> list[int]:
        if not self.holders.held_by(node):
            return []
        holder = self.holders.find(node)
        rows: list[int] = self.runs.select((LEASED,), 1 << 62, 0, holder, -1, -1).tolist()
        return rows

    def _settled(
        self, op: Op, found: Matched, node: str, now_ms: int, until_ms: int, call: int, reason: str = ""
    ) -> Change | None:
        if not len(found.leased):
            return None
        rows = flat(spans_of(found.leased))
        return self._change(
            op, now_ms, self.cursor, node, until_ms, rows, call, found.skipped.tolist(), reason
        )

    # -- where it is ----------------------------------------------------------------------------------

    def seek(self, cursor: int, now_ms: int) -> Change:
        """Go on from `cursor`, as if the group had begun there: nothing is pending, leases have ended,
        everything from there on is given out, again perhaps."""
        return self._change(Op.SEEK, now_ms, cursor, "", 0, [], 0)

    def take(self, node: str, token: int, now_ms: int, *, call: int = 0) -> Change:
        """STREAM: `node` reads from here on, behind what is committed."""
        return self._change(Op.TAKEN, now_ms, self.cursor, node, 0, [token], call)

    def commit(self, committed: int, cursor: int, now_ms: int) -> Change | None:
        """STREAM: everything up to `committed` is done with, and everything before `cursor` was delivered."""
        committed, cursor = max(committed, self.committed), max(cursor, self.cursor)
        if (committed, cursor) == (self.committed, self.cursor):
            return None
        return self._change(Op.COMMITTED, now_ms, cursor, self.holder, 0, [committed], 0)

    def remove(self, now_ms: int) -> Change:
        """The group is no more."""
        return self._change(Op.REMOVED, now_ms, self.cursor, "", 0, [], 0)

    def recovered(self, live: Live) -> None:
        """The log is applied: what left the topic meanwhile is pending no longer."""
        self.cursor = min(self.cursor, live.head + 1) if self.is_queue else self.cursor
        runs = self.runs
        for row in runs.rows():
            first, stop = runs.first[row], runs.stop[row]
            for low, high in gaps(first, stop, alive_within(live, first, stop)):
                for gone in self.exactly(low, high):
                    self.move(gone, REMOVE)

    # -- changes --------------------------------------------------------------------------------------

    def _change(
        self, op: Op, now_ms: int, cursor: int, node: str, until_ms: int, rows: list[int], call: int,
        skipped: list[int] | None = None, reason: str = "",
    ) -> Change:  # fmt: skip
        number = self.changes + 1
        change = Change(
            self.number, number, op, now_ms, cursor, node, until_ms, rows, call, skipped or [], reason=reason
        )
        self.apply(change)
        return change

    def apply(self, change: Change) -> None:
        """Put a change into force, unless it is already."""
        if change.number <= self.changes:
            return
        self.changes = change.number
        self.cursor = change.cursor
        op = change.op
        if op in {Op.CLAIMED, Op.STOLEN}:
            self._apply_lease(change)
        elif op in {Op.ACKED, Op.RELEASED, Op.EXTENDED, Op.REJECTED, Op.UNDONE}:
            self._apply_settled(change)
        elif op == Op.AGAIN:
            self._apply_again(change)
        elif op == Op.SEEK:
            self._apply_seek(change.cursor)
        elif op == Op.TAKEN:
            self.holder, self.holder_token = change.node, change.rows[0]
        elif op == Op.COMMITTED:
            self.committed = max(self.committed, change.rows[0])
            self.cursor = max(self.cursor, self.committed + 1)
        if change.call:
            self.keep(change)

    def _apply_lease(self, change: Change) -> None:
        holder = self.holders.note(change.node, change.at_ms)
        rows = change.rows
        for at in range(0, len(rows), CLAIM_ROW):
            first, count, deliveries, token = rows[at : at + CLAIM_ROW]
            begun = self._begun(first) or change.at_ms
            for row in self.exactly(first, first + count):
                self.drop(row)
            self.lease(
                first,
                first + count,
                change.until_ms,
                token,
                holder,
                deliveries,
                begun=begun,
                given=change.at_ms,
            )

    def _begun(self, seq: int) -> int:
        row = self.runs.find(seq)
        return self.runs.begun[row] if row >= 0 else 0

    def _apply_settled(self, change: Change) -> None:
        runs, rows = self.runs, change.rows
        event = _EVENTS.get(change.op, DELAY if change.until_ms else NACK)
        spans = [(rows[at], rows[at] + rows[at + 1]) for at in range(0, len(rows), SPAN_ROW)]
        if change.op == Op.RELEASED and not rows:
            spans = [(runs.first[row], runs.stop[row]) for row in self._held_by(change.node)]
        for first, stop in spans:
            for row in self.exactly(first, stop):
                if change.reason:
                    self.failures.note(
                        runs.first[row], runs.stop[row], change.reason, change.at_ms,
                        int(change.op == Op.RELEASED),
                    )  # fmt: skip
                if change.op == Op.REJECTED:
                    runs.deliveries[row] |= REJECTED_BIT
                elif change.op == Op.UNDONE:
                    runs.deliveries[row] = max(self.deliveries_of(row) - 1, 0)
                elif change.op == Op.EXTENDED:
                    runs.given[row] = change.at_ms
                self.move(row, event, change.until_ms)

    def _apply_again(self, change: Change) -> None:
        rows = change.rows
        for at in range(0, len(rows), SPAN_ROW):
            first, count = rows[at : at + SPAN_ROW]
            for low, high in blocks_of(first, first + count):
                row = self.runs.add(low, high, RETURNED, begun=change.at_ms, given=change.at_ms)
                self.enter(row, RETURNED)

    def _apply_seek(self, cursor: int) -> None:
        for row in self.runs.rows():
            self.move(row, REMOVE)
        self.cursor, self.committed = cursor, cursor - 1
        # Who reads a stream group goes on from where he is no more: he has to look where that is.
        self.holder, self.holder_token = "", 0

    def keep(self, change: Change) -> None:
        """Remember a change for who makes its call again."""
        if change.call in self.calls:
            self._forget_call(change.call)
        if change.reason:
            change = structs.replace(change, reason="")
        self.calls[change.call] = change
        self._call_rows += len(change.rows) + len(change.skipped)
        of_node = self._calls_of.setdefault(change.node, OrderedDict())
        of_node[change.call] = None
        if len(of_node) > GROUP_CALLS_PER_MEMBER_MAX:
            self._forget_call(next(iter(of_node)))
        while len(self.calls) > GROUP_CALLS_KEPT_MAX or self._call_rows > GROUP_CALL_ROWS_KEPT_MAX:
            self._forget_call(next(iter(self.calls)))

    def _forget_call(self, call: int) -> None:
        old = self.calls.pop(call)
        self._call_rows -= len(old.rows) + len(old.skipped)
        of_node = self._calls_of[old.node]
        of_node.pop(call, None)
        if not of_node:
            del self._calls_of[old.node]

    # -- dead letters ---------------------------------------------------------------------------------

    def use_mover(self, has_mover: bool) -> None:
        """From here on dead letters are moved, or they are not."""
        self.has_dead_letters = has_mover and bool(self.made.dead_letter)
        self.deliveries_max = self.made.deliveries_max
        for row in self.runs.rows():
            if self.runs.state[row] == EXHAUSTED or self.is_spent(row, self.runs.state[row]):
                self.move(row, EXHAUST if self.has_dead_letters else RESTORE)

    def token_of(self, seq: int) -> int:
        """Of the lease under which this pending position was given out last; 0 = it was not since it came
        back."""
        row = self.runs.find(seq)
        return self.runs.token[row] + seq - self.runs.first[row]

    def moved(self, seqs: I64, tokens: U64, now_ms: int) -> Change | None:
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
        return self._change(Op.ACKED, now_ms, self.cursor, "", 0, flat(spans_of(seqs[done])), 0)

    # -- looking --------------------------------------------------------------------------------------

    def list_pending(
        self, now_ms: int, *, node: str = "", idle_ms: int = 0, min_deliveries: int = 0, after: int = 0,
        limit: int = 100,
    ) -> tuple[list[Entry], bool]:  # fmt: skip
        """Entries of the pending list behind `after`, ascending, at most `limit` runs, and whether there are
        more. It changes nothing."""
        self.settle(now_ms)
        holder = self.holders.find(node)
        if node and holder < 0:
            return [], False
        states = (LEASED,) if node else _PENDING
        rows = self.runs.select(
            states, now_ms - idle_ms, min_deliveries, holder if node else -1, -1, after
        ).tolist()
        return [self._entry(row, after) for row in rows[:limit]], len(rows) > limit

    def _entry(self, row: int, after: int) -> Entry:
        runs, state = self.runs, self.runs.state[row]
        state = RETURNED if state == EXHAUSTED else state
        first = max(runs.first[row], after + 1)
        return Entry(
            first, runs.stop[row], state,
            self.holders.name_of(runs.holder[row]) if state == LEASED else "",
            self.deliveries_of(row), runs.begun[row], runs.given[row],
            0 if state == RETURNED else runs.at[row], runs.token[row] + first - runs.first[row],
        )  # fmt: skip

    def check(self) -> None:
        """Assert the invariants by counting again."""
        super().check()
        rows = self.runs.rows()
        if self.committed >= self.cursor or (rows and self.runs.stop[rows[-1]] > self.cursor):
            raise InvariantViolation(
                "a group's cursor is behind what it handed out", group=self.made.name, cursor=self.cursor,
                committed=self.committed,
            )  # fmt: skip


def created(number: int, made: Made, cursor: int, now_ms: int) -> Change:
    """The change that makes a group."""
    return Change(number, 1, Op.CREATED, now_ms, cursor, made=made)


def begin(change: Change) -> ConsumerGroup:
    """The group that such a change makes."""
    assert change.made is not None
    group = ConsumerGroup(change.group, change.made, change.cursor)
    group.changes = change.number
    return group


def lease_runs(change: Change) -> list[LeaseRun]:
    """What a claim was given."""
    rows = change.rows
    return [
        LeaseRun(first, first + count, deliveries, token)
        for first, count, deliveries, token in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
    ]
