"""One queue: which jobs are leased, delayed or came back, and what every operation does to them. Pure.

The topic says which jobs are alive; a job that nobody was ever given has no state here but that it lies
behind `cursor`, unless its record asks for another time or place (ready_index.py). Times are milliseconds,
and arguments. What has expired is looked after at the beginning of every operation (QL-9), in the order in
which it expires and at a cost of what expired.

Invariants, which `check` counts again:
  runs are disjoint and lie below `cursor`, or are passed over by it; in_flight and delayed are what the runs
  and the marks say (QS-3);
  a lease's token was never given before (QL-7), and no job is in two leases (QL-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.ages import Ages, Waits
from ringlog.leases.deadlines import Deadlines
from ringlog.leases.failures import Failures
from ringlog.leases.fair_shares import fair_shares, split
from ringlog.leases.holders import Holders
from ringlog.leases.live_seqs import Live, next_alive
from ringlog.leases.ready_index import Marks, ReadyIndex
from ringlog.leases.runs import BLOCK, BLOCK_SHIFT, DELAYED, GONE, LEASED, RETURNED, SPENT, Runs
from ringlog.leases.spans import SeqRun, Span, blocks_of, joined, keep_first, spans_of
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import (
    I64,
    NO_BACKOFF,
    PLAIN,
    U64,
    Claimed,
    ClaimRequest,
    Counts,
    LeaseRun,
    Matched,
    Order,
)
from ringlog.limits import DEAD_LETTERS_PER_CLAIM_MAX, QUEUE_AGES_MAX

_NONE: I64 = np.zeros(0, np.int64)
_STALE_MAX = 1_024
"""Entries of a heap that hold no longer, beside as many as hold; beyond it the heap is made anew."""


class Queue:
    """State of one queue, beside its topic."""

    def __init__(self, tokens: Tokens) -> None:
        self.cursor = 1
        """Jobs from here on were never handed out."""
        self.in_flight = 0
        self.delayed = 0
        self.spent_jobs = 0
        """Jobs that are set aside; they are ready, and not handed out."""
        self.dead_lettered = 0
        """Jobs that were moved to the dead letters (QD-8)."""
        self.aside: list[Span] = []
        """Those that the last claim set aside."""
        self.failures = Failures()
        """Why jobs were given back or rejected, until they are no more."""
        self.changes = 0
        """Grows whenever a run does anything: what was found out before holds while it is the same."""
        self.promoted = 0
        """Jobs that were handed out before others of a higher level, for their long wait (L12)."""
        self.marked_to = 0
        """Marks of jobs up to this one are known."""
        self.levels = 0
        """Levels of priority that the known marks stand for."""
        self.ready_index = ReadyIndex()
        self.ages = Ages()
        self.waits: Waits | None = None
        self.wall_ahead_ms = 0
        """Of the wall clock, in which records say until when they are delayed, against the time used here."""
        self.runs = Runs()
        self.known_max = 0
        """Most jobs that may be known: beyond it none is handed out for the first time. 0 = any number."""
        self.backoff = NO_BACKOFF
        """How long jobs rest whose leases ended."""
        self._tokens = tokens
        self._holders = Holders()
        self._due = Deadlines(self._instant)
        self._timed = 0
        """Runs with an instant."""
        self._returned: list[int] = []
        """Heap of first numbers of returned runs; the same."""
        self._returned_runs = 0
        self._spent: list[int] = []
        """Heap of first numbers of spent runs; the same."""

    # -- time -----------------------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """What has expired by now is ready again."""
        if self.ready_index.delayed and self.ready_index.settle(self.cursor, now_ms, self.wall_ahead_ms):
            self.changes += 1
        if not self._due:
            return
        for row in self._due.take(now_ms):
            if self.runs.state[row] == GONE:
                self._forget(row)
            elif not (self.backoff.base_ms and self._rest_after_lease(row, now_ms)):
                self._return(row)

    def _rest_after_lease(self, row: int, now_ms: int) -> bool:
        """A lease has ended: its jobs rest from then on, unless they were resting, or it is long ago."""
        runs = self.runs
        if runs.state[row] != LEASED:
            return False
        until_ms = runs.at[row] + self.backoff.of(runs.deliveries[row])
        if until_ms <= now_ms:
            return False
        self.changes += 1
        self._rest(row, until_ms)
        return True

    def _rest(self, row: int, until_ms: int) -> None:
        self.in_flight -= self._size(row)
        self.delayed += self._size(row)
        self._holders.drop(self.runs.holder[row])
        self.runs.state[row], self.runs.at[row] = DELAYED, until_ms
        self._wait_for(row)

    def next_due_ms(self) -> int | None:
        """When the next lease or delay ends; None = none will."""
        ends_ms, delayed_ms = self._due.next_ms(), self.ready_index.next_ms()
        if delayed_ms is None:
            return ends_ms
        delayed_ms -= self.wall_ahead_ms
        return delayed_ms if ends_ms is None else min(ends_ms, delayed_ms)

    def _instant(self, row: int) -> int:
        """When this run's state ends; -1 = never. A lease is held at its deadline still (QL-8), a delay is
        over at its end (QN-3)."""
        if row >= len(self.runs.state):
            return -1
        state = self.runs.state[row]
        if state in {LEASED, GONE}:
            return self.runs.at[row] + 1
        return self.runs.at[row] if state == DELAYED else -1

    def _wait_for(self, row: int) -> None:
        self._due.note(row, self._timed)

    # -- operations -----------------------------------------------------------------------------------

    def claim(
        self, live: Live, node: bytes, most: int, lease_ms: int, now_ms: int, *, deliveries_max: int = 0,
        order: Order = PLAIN, link: int = 0,
    ) -> Claimed:  # fmt: skip
        """Lease up to `most` jobs: those that came back, lowest first, then those that nobody had, lowest
        first (QC-5) or by `order` (L11). The answer ascends whatever it was chosen by (QC-3).

        With `deliveries_max` jobs that had so many are passed over and set aside, at most
        DEAD_LETTERS_PER_CLAIM_MAX of them (QD-1, QD-10): see `spent`.
        """
        found, aside = self._collect(live, most, now_ms, deliveries_max, order)
        return self._grant(found, ClaimRequest(node, most, lease_ms, link), now_ms, aside)

    def deal(
        self, live: Live, requests: Sequence[ClaimRequest], most: int, now_ms: int, *,
        deliveries_max: int = 0, order: Order = PLAIN,
    ) -> list[Claimed]:  # fmt: skip
        """The same for claims that came in together: fair shares of up to `most` jobs, one answer each."""
        wants = fair_shares([request.most for request in requests], most)
        parts: list[list[SeqRun]] = [[] for _ in requests]
        rest: list[SeqRun] = []
        aside, set_aside = 0, []
        for by_number in (False, True):
            places = [n for n, request in enumerate(requests) if request.by_number is by_number]
            if places:
                asked = sum(wants[n] for n in places)
                chosen = order._replace(by_number=by_number)
                found, passed = self._collect(live, asked, now_ms, deliveries_max, chosen, _count(rest))
                aside += passed
                set_aside += self.aside
                rest += found
                if _count(found) == asked:
                    for n, part in zip(places, split(found, [wants[n] for n in places]), strict=True):
                        parts[n] = part
        self.aside = set_aside
        if _count(rest) < sum(wants):
            # All there is is handed out, so that only the shares are left to decide.
            shares = fair_shares(wants, _count(rest))
            places = sorted(range(len(requests)), key=lambda n: not requests[n].by_number)
            for n, part in zip(places, split(sorted(rest), [shares[n] for n in places]), strict=True):
                parts[n] = part
        answers = []
        for request, part in zip(requests, parts, strict=True):
            answers.append(self._grant(part, request, now_ms, aside))
            aside = 0
        return answers

    def _collect(
        self, live: Live, most: int, now_ms: int, deliveries_max: int, order: Order, beside: int = 0
    ) -> tuple[list[SeqRun], int]:
        """Ready jobs, ascending, that are anybody's from here on, beside so many others; and how many were
        set aside meanwhile."""
        self.settle(now_ms)
        if len(self.ages) > QUEUE_AGES_MAX // 2:
            self.ages.forget(live.front)
        spent, self.aside = self.spent_jobs, []
        found = self._take_returned(most, deliveries_max)
        taken = _count(found)
        most -= taken
        if self.known_max:
            most = min(most, max(self.known_max - self.runs.jobs - taken - beside, 0))
        fresh = self._take_fresh(live, most, now_ms, order)
        self._note_waits(fresh, now_ms)
        found += fresh
        found.sort()
        return found, self.spent_jobs - spent

    def _grant(self, found: list[SeqRun], request: ClaimRequest, now_ms: int, aside: int) -> Claimed:
        if not found:
            return Claimed([], 0, aside)
        deadline = now_ms + request.lease_ms
        holder = self._holders.take(request.node)
        given: list[LeaseRun] = []
        for first, stop, deliveries in joined(found):
            token = self._tokens.take(stop - first)
            self._lease(first, stop, deadline, token, holder, deliveries + 1, request.link)
            given.append(LeaseRun(first, stop, deliveries + 1, token))
        self._holders.settle(holder)
        return Claimed(given, deadline, aside)

    def _lease(
        self, first: int, stop: int, at: int, token: int, holder: int, deliveries: int, link: int
    ) -> None:
        self.changes += 1
        for low, high in blocks_of(first, stop):
            row = self.runs.add(
                low, high, LEASED, at=at, token=token + low - first, holder=holder, deliveries=deliveries,
                link=link,
            )  # fmt: skip
            self._holders.add(holder)
            self._timed += 1
            self._wait_for(row)
        self.in_flight += stop - first

    def _take_returned(self, most: int, deliveries_max: int) -> list[SeqRun]:
        found: list[SeqRun] = []
        runs, heap, aside = self.runs, self._returned, 0
        while most and heap:
            row = runs.find(heap[0])
            if row < 0 or runs.state[row] != RETURNED or runs.first[row] != heap[0]:
                heappop(heap)
                continue
            first, stop, deliveries = runs.first[row], runs.stop[row], runs.deliveries[row]
            if deliveries_max and deliveries >= deliveries_max:
                if aside >= DEAD_LETTERS_PER_CLAIM_MAX:
                    break
                heappop(heap)
                if stop - first > DEAD_LETTERS_PER_CLAIM_MAX - aside:
                    stop = first + DEAD_LETTERS_PER_CLAIM_MAX - aside
                    self._split(row, stop)
                aside += stop - first
                self.aside.append((first, stop))
                self.changes += 1
                self.spent_jobs += stop - first
                self._returned_runs -= 1
                runs.state[row] = SPENT
                heappush(self._spent, first)
                continue
            heappop(heap)
            if stop - first > most:
                stop = first + most
                self._split(row, stop)
            self._forget(row)
            found.append((first, stop, deliveries))
            most -= stop - first
        return found

    def _take_fresh(
        self, live: Live, most: int, now_ms: int, order: Order
    ) -> list[SeqRun]:  # fmt: skip
        if not self.ready_index:
            return self._take_at_cursor(live, most)
        found: list[SeqRun] = []
        self.ready_index.ripen(now_ms - order.starvation_ms)
        if order.by_number:
            found = self._take_lowest(live, most, live.head + 1, self.ready_index.lowest_of_each)
            self.ready_index.forget_below(self.cursor)
            return found
        if order.levels > 1 and order.starvation_ms:
            found = self._take_overdue(live, most, now_ms - order.starvation_ms, order.levels - 1)
            most -= sum(stop - first for first, stop, _ in found)
        for level in sorted(self.ready_index.levels, reverse=True):
            while most and (span := self.ready_index.lowest(level)) is not None:
                first, stop = span[0], min(span[1], span[0] + most)
                self.ready_index.take(level, first, stop)
                found.append((first, stop, 0))
                most -= stop - first
        found += self._take_at_cursor(live, most)
        self.ready_index.forget_below(self.cursor)
        return found

    def _take_overdue(
        self, live: Live, most: int, until_ms: int, top: int
    ) -> list[SeqRun]:  # fmt: skip
        """Jobs below the highest level that were ready before `until_ms`, those put first before others."""
        below = min(self.ages.first_after(until_ms - 1), live.head + 1)
        found = self._take_lowest(live, most, below, lambda: self.ready_index.overdue(top, below))
        self.promoted += _count(found)
        return found

    def _take_lowest(
        self, live: Live, most: int, below: int, spans_of: Callable[[], Iterable[tuple[int, Span]]]
    ) -> list[SeqRun]:
        """Jobs below a number, the lowest first: the cursor's, and of levels as `spans_of` shows them."""
        found: list[SeqRun] = []
        while most:
            spans = list(spans_of())
            first, stop = next_alive(live, max(self.cursor, live.front), self.ready_index.passed)
            if first < below:
                spans.append((-1, (first, min(stop, below))))
            if not spans:
                break
            level, (first, stop) = min(spans, key=lambda span: span[1])
            # Only up to where another level's next one was put before.
            stop = min(stop, first + most, *(span[0] for _, span in spans if span[0] > first))
            if level < 0:
                self.cursor = stop
            else:
                self.ready_index.take(level, first, stop)
            found.append((first, stop, 0))
            most -= stop - first
        return found

    def _take_at_cursor(self, live: Live, most: int) -> list[SeqRun]:
        found: list[SeqRun] = []
        at, passed = max(self.cursor, live.front), self.ready_index.passed
        while most and at <= live.head:
            at, stop = next_alive(live, at, passed)
            stop = min(stop, at + most)
            if stop > at:
                found.append((at, stop, 0))
                most -= stop - at
                at = stop
        self.cursor = max(self.cursor, min(at, live.head + 1))
        return found

    def _note_waits(self, found: list[SeqRun], now_ms: int) -> None:
        """How long these waited, as far as it is known when they were put."""
        for first, stop, _ in found:
            for count, put_ms in self.ages.stretches(first, stop):
                if self.waits is None:
                    self.waits = Waits()
                self.waits.note(count, now_ms - put_ms, now_ms)

    # -- what outlived a shard -------------------------------------------------------------------------

    def put(
        self, first: int, stop: int, state: int, *, at: int = 0, token: int = 0, node: bytes = b"",
        deliveries: int = 0, link: int = 0,
    ) -> None:  # fmt: skip
        """These jobs are what the log says, whatever is known of them; the cursor passes over them."""
        if self.runs.within(first, stop):
            failures, self.failures = self.failures, Failures()
            self.removed(0, BitMap64(range(first, stop)), on_request=False)
            self.failures = failures
        self.ready_index.passed.add_range(first, stop)
        if state == LEASED:
            holder = self._holders.take(node)
            self._lease(first, stop, at, token, holder, deliveries, link)
            return
        self.changes += 1
        for low, high in blocks_of(first, stop):
            row = self.runs.add(low, high, state, at=at, token=token + low - first, deliveries=deliveries)
            if state == DELAYED:
                self.delayed += high - low
                self._timed += 1
                self._wait_for(row)
            elif state == RETURNED:
                self._returned_runs += 1
                heappush(self._returned, low)
            else:
                self.spent_jobs += high - low
                heappush(self._spent, low)

    def take_tokens(self, tokens: Tokens) -> None:
        """New leases are named by these from here on."""
        self._tokens = tokens

    @property
    def holders(self) -> Holders:
        """Who holds something."""
        return self._holders

    # -- marks ----------------------------------------------------------------------------------------

    def unmark(self, levels: int) -> None:
        """Priorities mean something else from now on: nothing is handed out until all marks are fed again."""
        self.levels, self.marked_to = levels, 0
        self.changes += 1
        self.ready_index.unmark(self.cursor)

    def feed(self, marks: Marks, live: Live, marked_to: int, now_ms: int) -> None:
        """What the records up to `marked_to` say of when and how urgently they want to be handed out."""
        self.marked_to = marked_to
        self.changes += 1
        self.ready_index.feed(marks, live, self.cursor, now_ms + self.wall_ahead_ms)

    def match(self, seqs: I64, tokens: U64 | None, node: bytes, now_ms: int) -> Matched:
        """Which of these jobs does `node` hold (QA-3, QA-4, QA-10)? A token of 0 asks for none. Changes
        nothing but what has expired."""
        self.settle(now_ms)
        holder = self._holders.find(node)
        if len(seqs) == 1:
            return self._match_one(seqs, 0 if tokens is None else int(tokens[0]), holder)
        if self._is_one_lease(seqs, tokens, holder):
            return Matched(seqs, _NONE, _NONE)
        order = np.argsort(seqs, kind="stable")
        ascending = seqs[order]
        given = None if tokens is None else tokens[order]
        leased = np.zeros(len(seqs), np.bool_)
        gone = np.zeros(len(seqs), np.bool_)
        runs, place = self.runs, 0
        while place < len(ascending) and holder >= 0:
            row = runs.find(int(ascending[place]))
            if row < 0:
                place += 1
                continue
            end = int(np.searchsorted(ascending, runs.stop[row]))
            state = runs.state[row]
            if state in {LEASED, GONE} and runs.holder[row] == holder:
                into = leased if state == LEASED else gone
                into[place:end] = self._fits(row, ascending[place:end], given, place, end)
            place = end
        keep_first(leased, ascending)
        keep_first(gone, ascending)
        passed = np.ones(len(seqs), np.bool_)
        passed[order[leased | gone]] = False
        return Matched(ascending[leased], ascending[gone], seqs[passed])

    def _is_one_lease(self, seqs: I64, tokens: U64 | None, holder: int) -> bool:
        """Are these jobs that were claimed together, in order, and are they all held still? Mostly so."""
        count, first = len(seqs), int(seqs[0]) if len(seqs) else 0
        if not count or int(seqs[-1]) - first != count - 1:
            return False
        runs = self.runs
        row = runs.find(first)
        if row < 0 or first + count > runs.stop[row]:
            return False
        if runs.state[row] != LEASED or runs.holder[row] != holder:
            return False
        steps = np.arange(count)
        if not np.array_equal(seqs, first + steps):
            return False
        token = runs.token[row] + first - runs.first[row]
        return tokens is None or np.array_equal(tokens, np.uint64(token) + steps.astype(np.uint64))

    def _match_one(self, seqs: I64, token: int, holder: int) -> Matched:
        """The same for one job, which is all latency."""
        seq, runs = int(seqs[0]), self.runs
        row = runs.find(seq)
        state = runs.state[row] if row >= 0 else 0
        is_held = state in {LEASED, GONE} and runs.holder[row] == holder
        if not is_held or token not in {0, runs.token[row] + seq - runs.first[row]}:
            return Matched(_NONE, _NONE, seqs)
        return Matched(seqs, _NONE, _NONE) if state == LEASED else Matched(_NONE, seqs, _NONE)

    def _fits(
        self, row: int, seqs: I64, tokens: U64 | None, place: int, end: int
    ) -> NDArray[np.bool_] | bool:
        if tokens is None:
            return True
        given = tokens[place:end]
        first = (seqs - self.runs.first[row]).astype(np.uint64) + np.uint64(self.runs.token[row])
        fits: NDArray[np.bool_] = (given == first) | (given == 0)
        return fits

    def ack(self, matched: Matched) -> None:
        """These jobs are done: their deletion is on its way."""
        for row in self._rows_of(matched.leased):
            self.in_flight -= self._size(row)
            self._end(row)
        for row in self._rows_of(matched.gone):
            self._forget(row)

    def ack_lease(self, first: int, count: int, token: int, node: bytes, now_ms: int) -> bool:
        """As `ack` of jobs from `first` on, if all of them are held by `node` under tokens from `token` on
        and were claimed together; else False, and nothing changes but what has expired."""
        self.settle(now_ms)
        runs = self.runs
        row = runs.find(first)
        if row < 0 or runs.state[row] != LEASED or runs.holder[row] != self._holders.find(node):
            return False
        stop = first + count
        if stop > runs.stop[row] or token != runs.token[row] + first - runs.first[row]:
            return False
        if runs.stop[row] > stop:
            self._split(row, stop)
        if runs.first[row] < first:
            row = self._split(row, first)
        self.in_flight -= count
        self._end(row)
        return True

    def nack(self, matched: Matched, delay_ms: int, now_ms: int) -> None:
        """These jobs are given back: ready now, or when the delay is over (QN-3)."""
        for row in self._rows_of(matched.leased):
            self.changes += 1
            if not delay_ms:
                self._return(row)
                continue
            self._rest(row, now_ms + delay_ms)

    def undo(self, matched: Matched) -> None:
        """Nobody has begun these jobs: they are ready at once, and this delivery does not count."""
        for row in self._rows_of(matched.leased):
            self.changes += 1
            self.runs.deliveries[row] = max(self.runs.deliveries[row] - 1, 0)
            self._return(row)

    def by_rest(self, matched: Matched) -> list[tuple[Matched, int]]:
        """These jobs by how long they would rest after their deliveries, ascending."""
        parts: dict[int, list[int]] = {}
        for row in self._rows_of(matched.leased):
            rest = self.backoff.of(self.runs.deliveries[row])
            parts.setdefault(rest, []).extend(range(self.runs.first[row], self.runs.stop[row]))
        return [
            (Matched(np.array(sorted(seqs), dtype=np.int64), _NONE, _NONE), rest)
            for rest, seqs in sorted(parts.items())
        ]

    def extend(self, matched: Matched, lease_ms: int, now_ms: int) -> int:
        """These jobs are held up to another instant, which may be an earlier one (QE-2); returns it."""
        deadline = now_ms + lease_ms
        self.changes += 1
        for row in self._rows_of(matched.leased):
            self.runs.at[row] = deadline
            self._wait_for(row)
        return deadline

    def release(self, link: int, now_ms: int) -> int:
        """Who claimed through this one is gone: what they hold is ready at once; returns how many jobs."""
        self.settle(now_ms)
        before = self.in_flight
        for row in self.runs.leased_through(link):
            self._return(row)
        return before - self.in_flight

    def removed(self, floor: int, seqs: BitMap64 | None, *, on_request: bool) -> None:
        """Jobs below `floor` and those in `seqs` are alive no longer: their leases and delays end (QL-11)."""
        if self.ready_index:
            self.ready_index.removed(floor, seqs)
        if not len(self.runs):
            return
        for row in self.runs.below(floor) if floor else ():
            if self.runs.stop[row] > floor:
                self._split(row, floor)
            self._remove(row, on_request=on_request)
        if seqs:
            for row in self._rows_of(self._known(seqs)):
                self._remove(row, on_request=on_request)

    def _known(self, seqs: BitMap64) -> I64:
        """Those of the numbers whose blocks have runs; a delete may name millions."""
        if len(seqs) <= BLOCK:
            return np.array([seq for seq in seqs if seq >> BLOCK_SHIFT in self.runs.blocks], dtype=np.int64)
        numbers = np.frombuffer(seqs.to_array(), dtype=np.int64)
        blocks = numbers >> BLOCK_SHIFT
        return numbers[np.isin(blocks, np.fromiter(self.runs.blocks, np.int64))]

    def _remove(self, row: int, *, on_request: bool) -> None:
        state = self.runs.state[row]
        self.changes += 1
        if state == GONE:
            return
        if state == LEASED:
            self.in_flight -= self._size(row)
            if on_request:
                self.runs.state[row] = GONE
                self.failures.forget(self.runs.first[row], self.runs.stop[row])
                return
        elif state == DELAYED:
            self.delayed -= self._size(row)
        self._end(row)

    def failed(self, matched: Matched, reason: str, at_ms: int, nacks: int = 1) -> None:
        """Why these jobs are given back, or with `nacks` 0 rejected: said before that is done."""
        for first, stop in spans_of(matched.leased):
            self.failures.note(first, stop, reason, at_ms, nacks)

    # -- dead letters ---------------------------------------------------------------------------------

    def reject(self, matched: Matched, reason: str, now_ms: int = 0) -> None:
        """These jobs are to go to the dead letters at once, as if they had all their deliveries."""
        for row in self._rows_of(matched.leased):
            runs, size = self.runs, self._size(row)
            self.changes += 1
            self.in_flight -= size
            self._timed -= 1
            self._holders.drop(runs.holder[row])
            runs.state[row] = SPENT
            self.spent_jobs += size
            heappush(self._spent, runs.first[row])
        if reason:
            self.failed(matched, reason, now_ms, 0)

    def spent(self, most: int) -> list[SeqRun]:
        """(first, stop, deliveries) of jobs that are set aside, lowest first, at most so many jobs."""
        found: list[SeqRun] = []
        runs, kept = self.runs, []
        while most and self._spent:
            first = heappop(self._spent)
            row = runs.find(first)
            if row < 0 or runs.state[row] != SPENT or runs.first[row] != first:
                continue
            kept.append(first)
            stop = min(runs.stop[row], first + most)
            found.append((first, stop, runs.deliveries[row]))
            most -= stop - first
        for first in kept:
            heappush(self._spent, first)
        return found

    def still_spent(self, seqs: I64) -> I64:
        """Those of these ascending numbers that are set aside."""
        return np.array([seq for seq in seqs.tolist() if self.is_spent(seq)], dtype=np.int64)

    def is_spent(self, seq: int) -> bool:
        """Is this job set aside?"""
        return self._state_of(seq) == SPENT

    def _state_of(self, seq: int) -> int:
        row = self.runs.find(seq)
        return self.runs.state[row] if row >= 0 else 0

    def restore(self) -> None:
        """What was set aside is handed out again: there are no dead letters any more (QD-5)."""
        while self._spent:
            first = heappop(self._spent)
            if self._state_of(first) == SPENT:
                row = self.runs.find(first)
                self.changes += 1
                self.spent_jobs -= self._size(row)
                self.runs.state[row] = RETURNED
                self._returned_runs += 1
                heappush(self._returned, self.runs.first[row])

    # -- counting -------------------------------------------------------------------------------------

    def counts(self, live: int) -> Counts:
        """Of `live` jobs (QS-1). What has expired counts as it stood at the last `settle`."""
        delayed = self.delayed + len(self.ready_index.delayed) if self.ready_index.delayed else self.delayed
        return Counts(live - self.in_flight - delayed, self.in_flight, delayed)

    def oldest_ready(self, live: Live) -> int | None:
        """The lowest number of a job that may be claimed; None = there is none."""
        while self._returned and not self._is_returned(self._returned[0]):
            heappop(self._returned)
        lowest = self._returned[:1]
        lowest += [seqs.min() for seqs in self.ready_index.levels.values()]
        fresh, _ = next_alive(live, max(self.cursor, live.front), self.ready_index.passed)
        if fresh <= live.head:
            lowest.append(fresh)
        return min(lowest, default=None)

    def check(self) -> None:
        """Assert the invariants by counting again."""
        runs, before = self.runs, 0
        totals = dict.fromkeys((LEASED, DELAYED, RETURNED, GONE, SPENT), 0)
        for row in runs.rows():
            is_sound = before <= runs.first[row] < runs.stop[row]
            is_sound = is_sound and self._is_behind(runs.first[row], runs.stop[row])
            is_sound = is_sound and runs.first[row] >> BLOCK_SHIFT == (runs.stop[row] - 1) >> BLOCK_SHIFT
            if not is_sound or runs.state[row] not in totals:
                raise InvariantViolation(
                    "a queue's runs are out of order", first=runs.first[row], stop=runs.stop[row],
                    cursor=self.cursor, state=runs.state[row],
                )  # fmt: skip
            before = runs.stop[row]
            totals[runs.state[row]] += self._size(row)
        counted = (self.in_flight, self.delayed, self.spent_jobs)
        if (totals[LEASED], totals[DELAYED], totals[SPENT]) != counted or runs.jobs != sum(totals.values()):
            raise InvariantViolation("a queue counts wrongly", counted=counted, found=totals)
        if wrong := self.ready_index.check(self.cursor):
            raise InvariantViolation("a queue's marks contradict each other", cursor=self.cursor, wrong=wrong)

    def _is_behind(self, first: int, stop: int) -> bool:
        """Will the cursor never hand out these?"""
        first = max(first, self.cursor)
        return first >= stop or self.ready_index.passed.contains_range(first, stop)

    # -- rows -----------------------------------------------------------------------------------------

    def _size(self, row: int) -> int:
        return self.runs.stop[row] - self.runs.first[row]

    def _rows_of(self, seqs: I64) -> list[int]:
        """Rows that hold exactly these ascending numbers, as far as they have any; made by splitting."""
        rows: list[int] = []
        for first, stop in spans_of(seqs):
            for row in self.runs.within(first, stop):
                if self.runs.stop[row] > stop:
                    self._split(row, stop)
                if self.runs.first[row] < first:
                    row = self._split(row, first)
                rows.append(row)
        return rows

    def _split(self, row: int, at: int) -> int:
        """Cut a run in two; the second half is known wherever the first one is. Returns it."""
        new = self.runs.cut(row, at)
        state = self.runs.state[new]
        if state in {LEASED, GONE}:
            self._holders.add(self.runs.holder[new])
        if state in {LEASED, GONE, DELAYED}:
            self._timed += 1
            self._wait_for(new)
        elif state == RETURNED:
            self._returned_runs += 1
            heappush(self._returned, at)
        elif state == SPENT:
            heappush(self._spent, at)
        return new

    def _return(self, row: int) -> None:
        """A leased or delayed run is ready again."""
        runs = self.runs
        self.changes += 1
        if runs.state[row] == LEASED:
            self.in_flight -= self._size(row)
            self._holders.drop(runs.holder[row])
        else:
            self.delayed -= self._size(row)
        self._timed -= 1
        self._returned_runs += 1
        runs.state[row] = RETURNED
        heappush(self._returned, runs.first[row])
        if len(self._returned) > 2 * self._returned_runs + _STALE_MAX:
            self._returned = sorted({first for first in self._returned if self._is_returned(first)})

    def _is_returned(self, first: int) -> bool:
        row = self.runs.find(first)
        return row >= 0 and self.runs.state[row] == RETURNED and self.runs.first[row] == first

    def _forget(self, row: int) -> None:
        """Its jobs are known no longer, but counted by the caller."""
        self.changes += 1
        state = self.runs.state[row]
        if state in {LEASED, GONE}:
            self._holders.drop(self.runs.holder[row])
        if state in {LEASED, GONE, DELAYED}:
            self._timed -= 1
        elif state == RETURNED:
            self._returned_runs -= 1
        elif state == SPENT:
            self.spent_jobs -= self._size(row)
        self.runs.drop(row)

    def _end(self, row: int) -> None:
        """The same, and the jobs are no more."""
        if self.failures:
            self.failures.forget(self.runs.first[row], self.runs.stop[row])
        self._forget(row)


def _count(found: list[SeqRun]) -> int:
    return sum(stop - first for first, stop, _ in found)
