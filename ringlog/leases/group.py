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
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from msgspec import structs
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.deadlines import Deadlines
from ringlog.leases.entries import I64, Entries
from ringlog.leases.failures import Failures
from ringlog.leases.group_change import CLAIM_ROW, REJECTED_BIT, SPAN_ROW, Change, Made, Mode, Op
from ringlog.leases.live_seqs import Live, alive_from, alive_within
from ringlog.leases.members import NO_LIFE, Life, Members
from ringlog.leases.runs import DELAYED, LEASED, RETURNED
from ringlog.leases.spans import blocks_of, count_of, cut, flat, gaps, spans_of
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import U64, LeaseRun
from ringlog.limits import (
    GROUP_CALL_ROWS_KEPT_MAX,
    GROUP_CALLS_KEPT_MAX,
    GROUP_CALLS_PER_MEMBER_MAX,
    GROUP_PENDING_MAX,
)

_STALE_MAX = 1_024
"""Entries of a heap that hold no longer, beside as many as hold; beyond it the heap is made anew."""
_CLEAR_OF_STATES = (LEASED, DELAYED, RETURNED)
_NONE: I64 = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Held:
    """Which entries of a request hold their lease: ascending; the others in the order of the request."""

    held: I64
    skipped: I64


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


class ConsumerGroup:
    """State of one group."""

    def __init__(self, number: int, made: Made, cursor: int) -> None:
        self.number = number
        self.made = made
        self.changes = 0
        """Number of its last change."""
        self.cursor = cursor
        """No position from here on was given out."""
        self.committed = cursor - 1
        """STREAM: everything up to here is done with."""
        self.leased = self.delayed = self.returned = self.spent = 0
        """Positions in these states: all of them are pending. What is spent was returned, and waits to be
        moved to the dead letters: nobody is given it."""
        self.has_mover = False
        """Is there somebody who moves it? Else it is given out again."""
        self.failures = Failures()
        """Why positions were given back or rejected, until they are pending no more."""
        self.holder_token = 0
        """STREAM: fences who reads now; 0 = nobody."""
        self.holder = ""
        self.members = Members()
        self.entries = Entries()
        self.calls: OrderedDict[int, Change] = OrderedDict()
        """The latest changes by the number of their call, for who asks again; see `answered`."""
        self._call_rows = 0
        self._calls_of: dict[str, OrderedDict[int, None]] = {}
        """The same numbers by member, each the oldest first."""
        self._due = Deadlines(self._instant)
        self._returned: list[int] = []
        """Heap of first positions of returned runs; one counts only while its run is there and returned."""
        self._spent: list[int] = []
        """Of spent ones; the same."""

    # -- what it says ---------------------------------------------------------------------------------

    @property
    def is_queue(self) -> bool:
        """Does it lease records?"""
        return self.made.mode == Mode.QUEUE

    @property
    def pending(self) -> int:
        """Positions that were given out and are not done."""
        return self.leased + self.delayed + self.returned + self.spent

    @property
    def floor(self) -> int:
        """The highest position with everything up to it done (F27)."""
        if not self.is_queue:
            return self.committed
        return (self.entries.lowest or self.cursor) - 1

    def answered(self, call: int) -> Change | None:
        """What a call changed that has been made before."""
        return self.calls.get(call) if call else None

    # -- time -----------------------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """Leases and delays that are over by now have ended."""
        for row in self._due.take(now_ms):
            self._exit(row)
            self.enter(row, RETURNED)

    def next_due_ms(self) -> int | None:
        """When the next lease or delay ends; None = none will."""
        return self._due.next_ms()

    def _instant(self, row: int) -> int:
        """When this run's state ends; -1 = never. A lease is held at its deadline still (QL-8)."""
        if row >= len(self.entries.state):
            return -1
        state, at = self.entries.state[row], self.entries.at[row]
        return at + 1 if state == LEASED else at if state == DELAYED else -1

    # -- giving out -----------------------------------------------------------------------------------

    def claim(
        self, live: Live, node: str, most: int, lease_ms: int, now_ms: int, tokens: Tokens, *,
        fresh_max: int = GROUP_PENDING_MAX, min_idle_ms: int = 0, call: int = 0, life: Life = NO_LIFE,
    ) -> Change | None:  # fmt: skip
        """Lease up to `most` positions to `node`: those that came back, then new ones (`fresh_max` at most),
        each the lowest first; with `min_idle_ms` then those that another member holds and did nothing about
        for so long."""
        self.settle(now_ms)
        self.members.require_room(node, now_ms)
        self.members.asked(node, now_ms, life)
        most = min(most, self._member_max - self.members.held_by(node))
        found = self._take_returned(most)
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
        self.members.require_room(node, now_ms)
        self.members.asked(node, now_ms, life)
        entries, found = self.entries, []
        for first, stop in spans_of(seqs):
            for row in entries.within(first, stop):
                if entries.given[row] <= now_ms - min_idle_ms and not self._is_spent(row):
                    low, high = max(first, entries.first[row]), min(stop, entries.stop[row])
                    found.append((low, high, self._deliveries(row)))
        found = cut(found, self._member_max - self.members.held_by(node))
        if not found:
            return None
        return self._lease(Op.STOLEN, found, self.cursor, node, lease_ms, now_ms, tokens, call)

    @property
    def _pending_max(self) -> int:
        return self.made.pending_max or GROUP_PENDING_MAX

    @property
    def _member_max(self) -> int:
        return self.made.member_max or GROUP_PENDING_MAX

    def _take_returned(self, most: int) -> list[tuple[int, int, int]]:
        entries, heap = self.entries, self._returned
        found: list[tuple[int, int, int]] = []
        stop = 0
        while most > 0 and heap:
            first = heappop(heap)
            if first < stop or not self._is_returned(first):
                continue  # One that was split is there twice.
            row = entries.find(first)
            stop = min(entries.stop[row], first + most)
            found.append((first, stop, self._deliveries(row)))
            most -= stop - first
        return found

    def _idle(self, node: str, given_by: int, most: int) -> list[tuple[int, int, int]]:
        entries, own = self.entries, self.members.find(node)
        rows = entries.select((LEASED,), given_by, 0, -1, own, -1)[:most].tolist()
        found = [(entries.first[row], entries.stop[row], entries.deliveries[row]) for row in rows]
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

    def match(self, seqs: I64, tokens: U64 | None, node: str, now_ms: int) -> Held:
        """Which of these positions does `node` hold (QA-3, QA-4, QA-10)? A token of 0 asks for none. One that
        is named twice counts once."""
        self.settle(now_ms)
        entries, holder = self.entries, self.members.find(node)
        if holder >= 0:
            self.members.note(node, now_ms)
        held = np.zeros(len(seqs), np.bool_)
        if holder < 0 or not len(seqs):
            return Held(_NONE, seqs)
        order = np.argsort(seqs, kind="stable")
        ascending = seqs[order]
        given = None if tokens is None else tokens[order]
        place = 0
        while place < len(ascending):
            row = entries.find(int(ascending[place]))
            if row < 0:
                place += 1
                continue
            end = int(np.searchsorted(ascending, entries.stop[row]))
            if entries.state[row] == LEASED and entries.holder[row] == holder:
                held[place:end] = True
                if given is not None:
                    due = self._tokens(row, ascending[place:end])
                    held[place:end] = (given[place:end] == due) | (given[place:end] == 0)
            place = end
        places = np.flatnonzero(held)
        held[places[np.flatnonzero(ascending[places[1:]] == ascending[places[:-1]]) + 1]] = False
        passed = np.ones(len(seqs), np.bool_)
        passed[order[held]] = False
        return Held(ascending[held], seqs[passed])

    def _tokens(self, row: int, seqs: I64) -> U64:
        """Of the lease under which these positions of a row were given out last."""
        entries = self.entries
        return (seqs - entries.first[row]).astype(np.uint64) + np.uint64(entries.token[row])

    def ack(self, found: Held, node: str, now_ms: int, *, call: int = 0) -> Change | None:
        """These positions are done."""
        return self._settled(Op.ACKED, found, node, now_ms, 0, call)

    def nack(
        self, found: Held, node: str, delay_ms: int, now_ms: int, *, call: int = 0, reason: str = ""
    ) -> Change | None:
        """These positions are given back: ready now, or when the delay is over; with a reason they failed."""
        until_ms = now_ms + delay_ms if delay_ms else 0
        return self._settled(Op.RELEASED, found, node, now_ms, until_ms, call, reason)

    def undo(self, found: Held, node: str, now_ms: int, *, call: int = 0) -> Change | None:
        """Nobody has begun these positions: they are ready at once, and this delivery does not count."""
        return self._settled(Op.UNDONE, found, node, now_ms, 0, call)

    def extend(self, found: Held, node: str, lease_ms: int, now_ms: int, *, call: int = 0) -> Change | None:
        """These positions are held up to another instant, which may be an earlier one."""
        return self._settled(Op.EXTENDED, found, node, now_ms, now_ms + lease_ms, call)

    def reject(self, found: Held, node: str, reason: str, now_ms: int, *, call: int = 0) -> Change | None:
        """These positions are to go to the dead letters, whatever their deliveries."""
        return self._settled(Op.REJECTED, found, node, now_ms, 0, call, reason)

    def again(self, seq: int, now_ms: int, *, call: int = 0) -> Change:
        """Give this position out once more, as if it never had been. One that is pending, or was not given
        out yet, will be anyway; the call is remembered all the same."""
        is_done = seq < self.cursor and self.entries.find(seq) < 0
        return self._change(Op.AGAIN, now_ms, self.cursor, "", 0, [seq, 1] if is_done else [], call)

    def is_set_aside(self, seq: int) -> bool:
        """Is this position waiting to be moved to the dead letters?"""
        row = self.entries.find(seq)
        return row >= 0 and self.entries.state[row] == RETURNED and self._is_spent(row)

    def leave(self, node: str, now_ms: int) -> Change | None:
        """A member leaves: what it holds is ready at once (F63)."""
        self.settle(now_ms)
        change = None
        if self.members.held_by(node):
            change = self._change(Op.RELEASED, now_ms, self.cursor, node, 0, [], 0)
        self.members.forget(node)
        return change

    def _held_by(self, node: str) -> list[int]:
        holder = self.members.find(node)
        if holder < 0 or not self.members.by_number[holder].runs:
            return []
        rows: list[int] = self.entries.select((LEASED,), 1 << 62, 0, holder, -1, -1).tolist()
        return rows

    def _settled(
        self, op: Op, found: Held, node: str, now_ms: int, until_ms: int, call: int, reason: str = ""
    ) -> Change | None:
        if not len(found.held):
            return None
        rows = flat(spans_of(found.held))
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

    def removed(self, front: int, seqs: BitMap64 | None = None) -> None:
        """Positions below `front` and these are in the topic no longer."""
        for row in self.entries.below(front) if len(self.entries) else ():
            if self.entries.stop[row] > front:
                self._split(row, front)
            self._drop(row)
        if seqs and len(self.entries):
            for first, stop in spans_of(self._near(seqs)):
                for row in self._exactly(first, stop):
                    self._drop(row)

    def _near(self, seqs: BitMap64) -> I64:
        """Those of the numbers that may be pending; a delete may name millions."""
        entries = self.entries
        if len(seqs) <= len(entries):
            return np.array(seqs.to_array(), dtype=np.int64)
        spans = [(entries.first[row], entries.stop[row]) for row in entries.rows()]
        found = [seqs & BitMap64(range(*span)) for span in spans if seqs.range_cardinality(*span)]
        return np.array([seq for part in found for seq in part], dtype=np.int64)

    def recovered(self, live: Live) -> None:
        """The log is applied: what left the topic meanwhile is pending no longer."""
        self.cursor = min(self.cursor, live.head + 1) if self.is_queue else self.cursor
        entries = self.entries
        for row in entries.rows():
            first, stop = entries.first[row], entries.stop[row]
            for low, high in gaps(first, stop, alive_within(live, first, stop)):
                for gone in self._exactly(low, high):
                    self._drop(gone)

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
        holder = self.members.note(change.node, change.at_ms)
        rows = change.rows
        for at in range(0, len(rows), CLAIM_ROW):
            first, count, deliveries, token = rows[at : at + CLAIM_ROW]
            begun = self._begun(first) or change.at_ms
            for row in self._exactly(first, first + count):
                self._exit(row)  # Given out again: why it failed is not forgotten.
                self.entries.drop(row)
            for low, high in blocks_of(first, first + count):
                row = self.entries.add(
                    low, high, LEASED, at=change.until_ms, token=token + low - first, holder=holder,
                    deliveries=deliveries,
                )  # fmt: skip
                self.entries.begun[row], self.entries.given[row] = begun, change.at_ms
                self.enter(row, LEASED)

    def _begun(self, seq: int) -> int:
        row = self.entries.find(seq)
        return self.entries.begun[row] if row >= 0 else 0

    def _apply_settled(self, change: Change) -> None:
        entries, rows = self.entries, change.rows
        spans = [(rows[at], rows[at] + rows[at + 1]) for at in range(0, len(rows), SPAN_ROW)]
        if change.op == Op.RELEASED and not rows:
            spans = [(entries.first[row], entries.stop[row]) for row in self._held_by(change.node)]
        for first, stop in spans:
            for row in self._exactly(first, stop):
                if change.op == Op.ACKED:
                    self._drop(row)
                    continue
                self._exit(row)
                entries.at[row] = change.until_ms
                if change.op == Op.REJECTED:
                    entries.deliveries[row] |= REJECTED_BIT
                elif change.op == Op.UNDONE and self._deliveries(row):
                    entries.deliveries[row] -= 1
                if change.reason:
                    self.failures.note(
                        entries.first[row], entries.stop[row], change.reason, change.at_ms,
                        int(change.op == Op.RELEASED),
                    )  # fmt: skip
                if change.op == Op.EXTENDED:
                    entries.given[row] = change.at_ms
                    self.enter(row, LEASED)
                else:
                    self.enter(row, DELAYED if change.until_ms else RETURNED)

    def _apply_again(self, change: Change) -> None:
        rows = change.rows
        for at in range(0, len(rows), SPAN_ROW):
            first, count = rows[at : at + SPAN_ROW]
            for low, high in blocks_of(first, first + count):
                row = self.entries.add(low, high, RETURNED)
                self.entries.begun[row] = self.entries.given[row] = change.at_ms
                self.enter(row, RETURNED)

    def _apply_seek(self, cursor: int) -> None:
        for row in self.entries.rows():
            self._drop(row)
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

    # -- rows -----------------------------------------------------------------------------------------

    def _size(self, row: int) -> int:
        return self.entries.stop[row] - self.entries.first[row]

    def _exactly(self, first: int, stop: int) -> list[int]:
        """Rows that hold exactly what is pending of [first, stop); made by splitting."""
        rows: list[int] = []
        for row in self.entries.within(first, stop):
            if self.entries.stop[row] > stop:
                self._split(row, stop)
            if self.entries.first[row] < first:
                row = self._split(row, first)
            rows.append(row)
        return rows

    def _split(self, row: int, at: int) -> int:
        """Cut a run in two; returns the second."""
        state = self.entries.state[row]
        self._exit(row)
        new = self.entries.cut(row, at)
        self.enter(row, state)
        self.enter(new, state)
        return new

    def _drop(self, row: int) -> None:
        """Its positions are pending no more."""
        self._exit(row)
        if self.failures:
            self.failures.forget(self.entries.first[row], self.entries.stop[row])
        self.entries.drop(row)

    def _exit(self, row: int) -> None:
        """It is no longer in its state; `enter` or the end of it follows."""
        size, state = self._size(row), self.entries.state[row]
        if state == LEASED:
            self.leased -= size
            self.members.drop(self.entries.holder[row], size)
        elif state == DELAYED:
            self.delayed -= size
        elif self._is_spent(row):
            self.spent -= size
        else:
            self.returned -= size

    def enter(self, row: int, state: int) -> None:
        """A run is in this state from here on."""
        size, entries = self._size(row), self.entries
        entries.state[row] = state
        if state == RETURNED and self._is_spent(row):
            self.spent += size
            heappush(self._spent, entries.first[row])
            if len(self._spent) > 2 * len(entries) + _STALE_MAX:
                self._spent = sorted({first for first in self._spent if self._holds(first, is_spent=True)})
            return
        if state == RETURNED:
            self.returned += size
            heappush(self._returned, entries.first[row])
            if len(self._returned) > 2 * len(entries) + _STALE_MAX:
                self._returned = sorted({first for first in self._returned if self._is_returned(first)})
            return
        if state == LEASED:
            self.leased += size
            self.members.add(entries.holder[row], size)
        else:
            self.delayed += size
        self._due.note(row, len(entries))

    def _is_returned(self, first: int) -> bool:
        return self._holds(first, is_spent=False)

    def _holds(self, first: int, *, is_spent: bool) -> bool:
        row = self.entries.find(first)
        if row < 0 or self.entries.state[row] != RETURNED or self.entries.first[row] != first:
            return False
        return self._is_spent(row) == is_spent

    def _deliveries(self, row: int) -> int:
        """How often it was given out."""
        return self.entries.deliveries[row] & ~REJECTED_BIT

    # -- dead letters ---------------------------------------------------------------------------------

    def _is_spent(self, row: int) -> bool:
        """Is it to go to the dead letters, once nobody holds it?"""
        if not self.has_mover or not self.made.dead_letter or self.entries.state[row] != RETURNED:
            return False
        most, deliveries = self.made.deliveries_max, self.entries.deliveries[row]
        return deliveries >= REJECTED_BIT or 0 < most <= deliveries

    def use_mover(self, has_mover: bool) -> None:
        """From here on there is somebody who moves dead letters, or nobody."""
        rows = [row for row in self.entries.rows() if self.entries.state[row] == RETURNED]
        for row in rows:
            self._exit(row)
        self.has_mover = has_mover
        self._returned, self._spent = [], []
        for row in rows:
            self.enter(row, RETURNED)

    def spent_runs(self, most: int) -> list[tuple[int, int, int]]:
        """(first, stop, deliveries) of what is to go to the dead letters, ascending, at most so many
        positions."""
        found: list[tuple[int, int, int]] = []
        for first in sorted({first for first in self._spent if self._holds(first, is_spent=True)}):
            row = self.entries.find(first)
            found.append((first, self.entries.stop[row], self._deliveries(row)))
        return cut(found, most)

    def token_of(self, seq: int) -> int:
        """Of the lease under which this pending position was given out last; 0 = it was not since it came
        back."""
        row = self.entries.find(seq)
        return self.entries.token[row] + seq - self.entries.first[row]

    def moved(self, seqs: I64, tokens: U64, now_ms: int) -> Change | None:
        """Copies of these ascending positions are durable among the dead letters, made of what was given out
        last under these leases: those that are spent since are done. One that came back meanwhile and was
        given up again stays: its second letter is not written yet, and this may be a late repeat."""
        entries, done = self.entries, np.zeros(len(seqs), np.bool_)
        for first, stop in spans_of(seqs):
            for row in entries.within(first, stop):
                if self._is_spent(row):
                    named = slice(*np.searchsorted(seqs, (entries.first[row], entries.stop[row])).tolist())
                    done[named] = tokens[named] == self._tokens(row, seqs[named])
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
        holder = self.members.find(node)
        if node and holder < 0:
            return [], False
        states = (LEASED,) if node else _CLEAR_OF_STATES
        rows = self.entries.select(
            states, now_ms - idle_ms, min_deliveries, holder if node else -1, -1, after
        ).tolist()
        return [self._entry(row, after) for row in rows[:limit]], len(rows) > limit

    def _entry(self, row: int, after: int) -> Entry:
        entries, state = self.entries, self.entries.state[row]
        first = max(entries.first[row], after + 1)
        return Entry(
            first, entries.stop[row], state,
            self.members.by_number[entries.holder[row]].name if state == LEASED else "",
            self._deliveries(row), entries.begun[row], entries.given[row],
            0 if state == RETURNED else entries.at[row], entries.token[row] + first - entries.first[row],
        )  # fmt: skip

    def check(self) -> None:
        """Assert the invariants by counting again."""
        entries, before = self.entries, 0
        totals = dict.fromkeys(_CLEAR_OF_STATES, 0)
        held: dict[int, list[int]] = {}
        for row in entries.rows():
            first, stop, state = entries.first[row], entries.stop[row], entries.state[row]
            if not before <= first < stop <= self.cursor or state not in totals:
                raise InvariantViolation(
                    "a group's runs are out of order", group=self.made.name, first=first, stop=stop,
                    cursor=self.cursor, state=state,
                )  # fmt: skip
            before = stop
            totals[state] += stop - first
            if state == LEASED:
                held.setdefault(entries.holder[row], []).append(stop - first)
        counted = (self.leased, self.delayed, self.returned + self.spent)
        by_member = {n: (sum(sizes), len(sizes)) for n, sizes in held.items()}
        known = {n: (each.held, each.runs) for n, each in self.members.by_number.items() if each.runs}
        if tuple(totals.values()) != counted or by_member != known or self.committed >= self.cursor:
            raise InvariantViolation(
                "a group counts wrongly", group=self.made.name, counted=counted, found=totals,
                committed=self.committed, cursor=self.cursor,
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
