"""Which numbers are handed out next: those that came back, then those that were never handed out. Pure.

The topic says which numbers are alive; one that was never handed out has no state here but that it lies
behind `cursor`, unless its record asks for another time or place (ready_index.py).

Invariants, which `check` counts again, beside those of the table:
  runs lie below `cursor`, or are passed over by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.leases.holders import Holders, ProcessId
from ringlog.leases.live_seqs import LiveSeqs, next_alive
from ringlog.leases.ready_index import DeliveryAttributes, ReadyIndex
from ringlog.leases.runs import LEASED
from ringlog.leases.spans import SeqRun, Span, count_of
from ringlog.leases.table import LeaseTable
from ringlog.leases.types import DispatchOrder, QueueCounts
from ringlog.leases.wait_times import EnqueueTimes, WaitHistogram
from ringlog.limits import QUEUE_AGES_MAX

_EMPTY_INDEX = ReadyIndex()
"""Of groups no record of which asks for a time or place: there may be millions of these."""


class Dispatch(LeaseTable):
    """A table of leases, and what is ready beside it."""

    def __init__(self, holders: Holders, cursor: int) -> None:
        super().__init__(holders)
        self.cursor = cursor
        """Numbers from here on were never handed out, but for those it passes over."""
        self.promoted = 0
        """Jobs that were handed out before others of a higher level, for their long wait (L12)."""
        self.attributes_loaded_to = 0
        """Marks of jobs up to this one are known."""
        self.levels = 0
        """Levels of priority that the known marks stand for."""
        self.ready_index = _EMPTY_INDEX
        self.enqueue_times = EnqueueTimes()
        self.wait_histogram: WaitHistogram | None = None
        self.wall_clock_offset_ms = 0
        """Of the wall clock, in which records say until when they are delayed, against the time used here."""
        self.pending_limit = 0
        """Most numbers that may have a row: beyond it none is handed out for the first time. 0 = no bound."""

    @property
    def has_ready_index(self) -> bool:
        """Has it an index of its own?"""
        return self.ready_index is not _EMPTY_INDEX

    @property
    def lowest_undelivered(self) -> int:
        """Numbers below this one were handed out, or are alive no more."""
        return min(self.cursor, self.ready_index.lowest_number) if self.ready_index else self.cursor

    def create_ready_index(self, passed: BitMap64 | None = None) -> None:
        """Records may ask for a time or place from here on; the cursor passes over these numbers."""
        self.ready_index = ReadyIndex()
        if passed:
            self.ready_index.skipped_by_cursor |= passed

    def drop_ready_index(self) -> None:
        """Nothing is known of what records ask for."""
        self.ready_index, self.attributes_loaded_to = _EMPTY_INDEX, 0

    # -- time -----------------------------------------------------------------------------------------

    def apply_expirations(self, now_ms: int) -> None:
        """What has expired by now is ready again."""
        if self.ready_index.delayed and self.ready_index.release_due(
            self.cursor, now_ms, self.wall_clock_offset_ms
        ):
            self.version += 1
        super().apply_expirations(now_ms)

    def next_due_ms(self) -> int | None:
        """When the next lease or delay ends; None = none will."""
        ends_ms, delayed_ms = super().next_due_ms(), self.ready_index.next_ms()
        if delayed_ms is None:
            return ends_ms
        delayed_ms -= self.wall_clock_offset_ms
        return delayed_ms if ends_ms is None else min(ends_ms, delayed_ms)

    # -- handing out ----------------------------------------------------------------------------------

    def collect(
        self, live: LiveSeqs, most: int, now_ms: int, deliveries_max: int, order: DispatchOrder,
        beside: int = 0, *,
        fresh_max: int = 1 << 62,
    ) -> list[SeqRun]:  # fmt: skip
        """Up to `most` ready numbers, ascending, that are to be leased now; `beside` were collected before
        that have no row yet. What is exhausted meanwhile is in `aside`."""
        self.apply_expirations(now_ms)
        if len(self.enqueue_times) > QUEUE_AGES_MAX // 2:
            self.enqueue_times.forget(live.front)
        runs, found = self.runs, list[SeqRun]()
        for row in self.take_returned(most, deliveries_max) if self._returned else ():
            found.append((runs.first[row], runs.stop[row], self.deliveries_of(row)))
        if found:
            most -= count_of(found)
        if self.pending_limit:
            most = min(most, self.pending_limit - runs.jobs - beside)
        fresh = self._take_fresh(live, max(min(most, fresh_max), 0), now_ms, order)
        self._note_waits(fresh, now_ms)
        found += fresh
        found.sort()
        return found

    def _take_fresh(
        self, live: LiveSeqs, most: int, now_ms: int, order: DispatchOrder
    ) -> list[SeqRun]:  # fmt: skip
        if not self.ready_index:
            return self._take_at_cursor(live, most)
        found: list[SeqRun] = []
        self.ready_index.forget_due_before(now_ms - order.starvation_ms)
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
                self.ready_index.take_range(level, first, stop)
                found.append((first, stop, 0))
                most -= stop - first
        found += self._take_at_cursor(live, most)
        self.ready_index.forget_below(self.cursor)
        return found

    def _take_overdue(
        self, live: LiveSeqs, most: int, until_ms: int, top: int
    ) -> list[SeqRun]:  # fmt: skip
        """Jobs below the highest level that were ready before `until_ms`, those put first before others."""
        below = min(self.enqueue_times.first_after(until_ms - 1), live.head + 1)
        found = self._take_lowest(live, most, below, lambda: self.ready_index.overdue(top, below))
        self.promoted += count_of(found)
        return found

    def _take_lowest(
        self, live: LiveSeqs, most: int, below: int, spans_of: Callable[[], Iterable[tuple[int, Span]]]
    ) -> list[SeqRun]:
        """Jobs below a number, the lowest first: the cursor's, and of levels as `spans_of` shows them."""
        found: list[SeqRun] = []
        while most:
            spans = list(spans_of())
            first, stop = next_alive(live, max(self.cursor, live.front), self.ready_index.skipped_by_cursor)
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
                self.ready_index.take_range(level, first, stop)
            found.append((first, stop, 0))
            most -= stop - first
        return found

    def _take_at_cursor(self, live: LiveSeqs, most: int) -> list[SeqRun]:
        found: list[SeqRun] = []
        at, passed = max(self.cursor, live.front), self.ready_index.skipped_by_cursor
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
            for count, put_ms in self.enqueue_times.counts_by_put_time(first, stop):
                if self.wait_histogram is None:
                    self.wait_histogram = WaitHistogram()
                self.wait_histogram.record_waits(count, now_ms - put_ms, now_ms)

    # -- marks ----------------------------------------------------------------------------------------

    def invalidate_priorities(self, levels: int) -> None:
        """Priorities mean something else from now on: nothing is handed out until all marks are fed again."""
        self.levels, self.attributes_loaded_to = levels, 0
        self.version += 1
        if self.has_ready_index:
            self.ready_index.invalidate_priorities(self.cursor)

    def add_delivery_attributes(
        self, marks: DeliveryAttributes, live: LiveSeqs, marked_to: int, now_ms: int
    ) -> None:
        """What the records up to `marked_to` say of when and how urgently they want to be handed out."""
        self.attributes_loaded_to = marked_to
        self.version += 1
        if not self.has_ready_index:
            if not len(marks.seqs):
                return
            self.create_ready_index()
        self.ready_index.add_delivery_attributes(marks, live, self.cursor, now_ms + self.wall_clock_offset_ms)

    def apply_removal(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """As of the table; numbers that were never handed out go as well."""
        if self.ready_index:
            self.ready_index.apply_removal(floor, seqs)
        super().apply_removal(floor, seqs, on_request=on_request)

    def add_run(
        self, first: int, stop: int, state: int, *, at: int, token: int, node: str, deliveries: int,
        life: ProcessId, begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """As of the table; the cursor passes over them."""
        if self.has_ready_index:
            self.ready_index.skipped_by_cursor.add_range(first, stop)
        super().add_run(
            first, stop, state, at=at, token=token, node=node, deliveries=deliveries, life=life, begun=begun,
            given=given,
        )  # fmt: skip

    # -- counting -------------------------------------------------------------------------------------

    def counts(self, live: int) -> QueueCounts:
        """Of `live` jobs (QS-1). What has expired counts as it stood at the last `settle`."""
        leased, delayed = self.counts_by_state[LEASED], self.delayed
        if self.ready_index.delayed:
            delayed += len(self.ready_index.delayed)
        return QueueCounts(live - leased - delayed, leased, delayed)

    def oldest_ready(self, live: LiveSeqs) -> int | None:
        """The lowest number of a job that may be claimed; None = there is none."""
        lowest = self.lowest_returned()
        lowest += [seqs.min() for seqs in self.ready_index.levels.values()]
        fresh, _ = next_alive(live, max(self.cursor, live.front), self.ready_index.skipped_by_cursor)
        if fresh <= live.head:
            lowest.append(fresh)
        return min(lowest, default=None)

    def check(self) -> None:
        """Assert the invariants by counting again."""
        super().check()
        for row in self.runs.rows():
            first, stop = max(self.runs.first[row], self.cursor), self.runs.stop[row]
            if first < stop and not self.ready_index.skipped_by_cursor.contains_range(first, stop):
                raise InvariantViolation(
                    "the cursor would hand out numbers again", first=first, stop=stop, cursor=self.cursor
                )
        if wrong := self.ready_index.check(self.cursor):
            raise InvariantViolation("a queue's marks contradict each other", cursor=self.cursor, wrong=wrong)
