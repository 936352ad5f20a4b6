"""One queue: a table of leases beside its topic, and the order in which its jobs are handed out. Pure.

The topic says which jobs are alive; a job that was never handed out has no state here but that it lies
behind `cursor`, unless its record asks for another time or place (ready_index.py). Times are milliseconds,
and arguments.

Invariants, which `check` counts again, beside those of the table:
  runs lie below `cursor`, or are passed over by it; a lease's token was never given before (QL-7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.ages import Ages, Waits
from ringlog.leases.fair_shares import fair_shares, split
from ringlog.leases.holders import Holders
from ringlog.leases.live_seqs import Live, next_alive
from ringlog.leases.ready_index import Marks, ReadyIndex
from ringlog.leases.runs import LEASED
from ringlog.leases.spans import SeqRun, Span, blocks_of, count_of, joined, spans_of
from ringlog.leases.table import ACK, DELAY, EXTEND, NACK, REJECT, RESTORE, LeaseTable
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import I64, PLAIN, Claimed, ClaimRequest, Counts, LeaseRun, Matched, Order
from ringlog.limits import QUEUE_AGES_MAX

_NONE: I64 = np.zeros(0, np.int64)


class Queue(LeaseTable):
    """State of one queue, beside its topic."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(Holders())
        self.cursor = 1
        """Jobs from here on were never handed out."""
        self.dead_lettered = 0
        """Jobs that were moved to the dead letters (QD-8)."""
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
        self.known_max = 0
        """Most jobs that may be known: beyond it none is handed out for the first time. 0 = any number."""
        self._tokens = tokens

    # -- time -----------------------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """What has expired by now is ready again."""
        if self.ready_index.delayed and self.ready_index.settle(self.cursor, now_ms, self.wall_ahead_ms):
            self.version += 1
        super().settle(now_ms)

    def next_due_ms(self) -> int | None:
        """When the next lease or delay ends; None = none will."""
        ends_ms, delayed_ms = super().next_due_ms(), self.ready_index.next_ms()
        if delayed_ms is None:
            return ends_ms
        delayed_ms -= self.wall_ahead_ms
        return delayed_ms if ends_ms is None else min(ends_ms, delayed_ms)

    # -- operations -----------------------------------------------------------------------------------

    def claim(
        self, live: Live, node: str, most: int, lease_ms: int, now_ms: int, *, deliveries_max: int = 0,
        order: Order = PLAIN, link: int = 0,
    ) -> Claimed:  # fmt: skip
        """Lease up to `most` jobs: those that came back, lowest first, then those that nobody had, lowest
        first (QC-5) or by `order` (L11). The answer ascends whatever it was chosen by (QC-3).

        With `deliveries_max` jobs that had so many are exhausted instead: see `take_returned`.
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
        aside, set_aside = 0, list[Span]()
        for by_number in (False, True):
            places = [n for n, request in enumerate(requests) if request.by_number is by_number]
            if places:
                asked = sum(wants[n] for n in places)
                chosen = order._replace(by_number=by_number)
                found, passed = self._collect(live, asked, now_ms, deliveries_max, chosen, count_of(rest))
                aside += passed
                set_aside += self.aside
                rest += found
                if count_of(found) == asked:
                    for n, part in zip(places, split(found, [wants[n] for n in places]), strict=True):
                        parts[n] = part
        self.aside = set_aside
        if count_of(rest) < sum(wants):
            # All there is is handed out, so that only the shares are left to decide.
            shares = fair_shares(wants, count_of(rest))
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
        exhausted, self.aside, found = self.exhausted, [], list[SeqRun]()
        for row in self.take_returned(most, deliveries_max) if self.returned else ():
            found.append((self.runs.first[row], self.runs.stop[row], self.deliveries_of(row)))
            self.drop(row)
        taken = count_of(found) if found else 0
        most -= taken
        if self.known_max:
            most = min(most, max(self.known_max - self.runs.jobs - taken - beside, 0))
        fresh = self._take_fresh(live, most, now_ms, order)
        self._note_waits(fresh, now_ms)
        found += fresh
        found.sort()
        return found, self.exhausted - exhausted

    def _grant(self, found: list[SeqRun], request: ClaimRequest, now_ms: int, aside: int) -> Claimed:
        if not found:
            return Claimed([], 0, aside)
        deadline = now_ms + request.lease_ms
        holder = self.holders.take(request.node)
        given: list[LeaseRun] = []
        for first, stop, deliveries in joined(found):
            token = self._tokens.take(stop - first)
            self.lease(first, stop, deadline, token, holder, deliveries + 1, link=request.link)
            given.append(LeaseRun(first, stop, deliveries + 1, token))
        return Claimed(given, deadline, aside)

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
        self.promoted += count_of(found)
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

    # -- what becomes of jobs -------------------------------------------------------------------------

    def ack(self, matched: Matched) -> None:
        """These jobs are done: their deletion is on its way."""
        for row in (*self.rows_of(matched.leased), *self.rows_of(matched.gone)):
            self.move(row, ACK)

    def ack_lease(self, first: int, count: int, token: int, node: str, now_ms: int) -> bool:
        """As `ack` of jobs from `first` on, if all of them are held by `node` under tokens from `token` on
        and were claimed together; else False, and nothing changes but what has expired."""
        self.settle(now_ms)
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
        self.move(row, ACK)
        return True

    def nack(self, matched: Matched, delay_ms: int, now_ms: int) -> None:
        """These jobs are given back: ready now, or when the delay is over (QN-3)."""
        for row in self.rows_of(matched.leased):
            self.move(row, DELAY if delay_ms else NACK, now_ms + delay_ms)

    def undo(self, matched: Matched) -> None:
        """These jobs were not begun: they are ready at once, and this delivery does not count."""
        for row in self.rows_of(matched.leased):
            self.runs.deliveries[row] = max(self.runs.deliveries[row] - 1, 0)
            self.move(row, NACK)

    def by_rest(self, matched: Matched) -> list[tuple[Matched, int]]:
        """These jobs by how long they would rest after their deliveries, ascending."""
        parts: dict[int, list[int]] = {}
        for row in self.rows_of(matched.leased):
            rest = self.backoff.of(self.runs.deliveries[row])
            parts.setdefault(rest, []).extend(range(self.runs.first[row], self.runs.stop[row]))
        return [
            (Matched(np.array(sorted(seqs), dtype=np.int64), _NONE, _NONE), rest)
            for rest, seqs in sorted(parts.items())
        ]

    def extend(self, matched: Matched, lease_ms: int, now_ms: int) -> int:
        """These jobs are held up to another instant, which may be an earlier one (QE-2); returns it."""
        deadline = now_ms + lease_ms
        for row in self.rows_of(matched.leased):
            self.move(row, EXTEND, deadline)
        return deadline

    def release(self, link: int, now_ms: int) -> int:
        """The process that claimed through this link is gone: what it holds is ready at once; returns how
        many jobs."""
        self.settle(now_ms)
        before = self.leased
        for row in self.runs.leased_through(link):
            self.move(row, NACK)
        return before - self.leased

    def removed(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """As of the table; jobs that were never handed out go as well."""
        if self.ready_index:
            self.ready_index.removed(floor, seqs)
        super().removed(floor, seqs, on_request=on_request)

    def failed(self, matched: Matched, reason: str, at_ms: int, nacks: int = 1) -> None:
        """Why these jobs are given back, or with `nacks` 0 rejected: said before that is done."""
        for first, stop in spans_of(matched.leased):
            self.failures.note(first, stop, reason, at_ms, nacks)

    # -- dead letters ---------------------------------------------------------------------------------

    def reject(self, matched: Matched, reason: str, now_ms: int = 0) -> None:
        """These jobs are to go to the dead letters at once, as if they had all their deliveries."""
        for row in self.rows_of(matched.leased):
            self.move(row, REJECT)
        if reason:
            self.failed(matched, reason, now_ms, 0)

    def still_exhausted(self, seqs: I64) -> I64:
        """Those of these ascending numbers that wait for the dead letters."""
        return np.array([seq for seq in seqs.tolist() if self.is_exhausted(seq)], dtype=np.int64)

    def restore(self) -> None:
        """What was exhausted is handed out again: there are no dead letters any more (QD-5)."""
        for first, stop, _ in self.exhausted_runs(self.exhausted):
            for row in self.exactly(first, stop):
                self.move(row, RESTORE)

    # -- what outlived a shard ------------------------------------------------------------------------

    def put(
        self, first: int, stop: int, state: int, *, at: int = 0, token: int = 0, node: str = "",
        deliveries: int = 0, link: int = 0,
    ) -> None:  # fmt: skip
        """These jobs are what the log says, whatever is known of them; the cursor passes over them."""
        for row in self.exactly(first, stop):
            self.drop(row)
        self.ready_index.passed.add_range(first, stop)
        if state == LEASED:
            self.lease(first, stop, at, token, self.holders.take(node), deliveries, link=link)
            return
        for low, high in blocks_of(first, stop):
            row = self.runs.add(low, high, state, at=at, token=token + low - first, deliveries=deliveries)
            self.enter(row, state)

    def take_tokens(self, tokens: Tokens) -> None:
        """New leases are named by these from here on."""
        self._tokens = tokens

    # -- marks ----------------------------------------------------------------------------------------

    def unmark(self, levels: int) -> None:
        """Priorities mean something else from now on: nothing is handed out until all marks are fed again."""
        self.levels, self.marked_to = levels, 0
        self.version += 1
        self.ready_index.unmark(self.cursor)

    def feed(self, marks: Marks, live: Live, marked_to: int, now_ms: int) -> None:
        """What the records up to `marked_to` say of when and how urgently they want to be handed out."""
        self.marked_to = marked_to
        self.version += 1
        self.ready_index.feed(marks, live, self.cursor, now_ms + self.wall_ahead_ms)

    # -- counting -------------------------------------------------------------------------------------

    def counts(self, live: int) -> Counts:
        """Of `live` jobs (QS-1). What has expired counts as it stood at the last `settle`."""
        leased, delayed = self.counts_of[LEASED], self.delayed
        if self.ready_index.delayed:
            delayed += len(self.ready_index.delayed)
        return Counts(live - leased - delayed, leased, delayed)

    def oldest_ready(self, live: Live) -> int | None:
        """The lowest number of a job that may be claimed; None = there is none."""
        lowest = self.lowest_returned()
        lowest += [seqs.min() for seqs in self.ready_index.levels.values()]
        fresh, _ = next_alive(live, max(self.cursor, live.front), self.ready_index.passed)
        if fresh <= live.head:
            lowest.append(fresh)
        return min(lowest, default=None)

    def check(self) -> None:
        """Assert the invariants by counting again."""
        super().check()
        for row in self.runs.rows():
            first, stop = max(self.runs.first[row], self.cursor), self.runs.stop[row]
            if first < stop and not self.ready_index.passed.contains_range(first, stop):
                raise InvariantViolation(
                    "the cursor would hand out jobs again", first=first, stop=stop, cursor=self.cursor
                )
        if wrong := self.ready_index.check(self.cursor):
            raise InvariantViolation("a queue's marks contradict each other", cursor=self.cursor, wrong=wrong)
