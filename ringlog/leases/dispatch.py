"""Dispatch: the order of deliveries. Returned records come first, then records that were never delivered.

Pure.

The topic provides the live seqs. A record that was never delivered has no state here: its seq is at or above
`cursor`. Exception: records with a `not_before` or a priority (ready_index.py).

Invariants, which `check` recounts, in addition to those of the table:
  runs are below `cursor`, or the cursor skips them.
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
"""Shared by groups without records that have a time or priority; there may be millions of these groups."""


class Dispatch(LeaseTable):
    """A lease table, and the records that are ready to be delivered."""

    def __init__(self, holders: Holders, cursor: int) -> None:
        super().__init__(holders)
        self.cursor: int = cursor
        """Seqs from here on were never delivered, except for those that it skips."""
        self.promoted: int = 0
        """Number of jobs that were delivered before jobs of a higher level because they had waited too
        long."""
        self.attributes_loaded_to: int = 0
        """Attributes of jobs up to this seq are known."""
        self.levels: int = 0
        """Number of priority levels for which the known attributes hold."""
        self.ready_index: ReadyIndex = _EMPTY_INDEX
        self.enqueue_times: EnqueueTimes = EnqueueTimes()
        self.wait_histogram: WaitHistogram | None = None
        self.wall_clock_offset_ms = 0
        """Difference of the wall clock, which `not_before` uses, to the time that this class uses."""
        self.pending_limit = 0
        """Highest number of seqs with a row: at this bound no new record is delivered. 0 = no bound."""

    @property
    def has_ready_index(self) -> bool:
        """The group has a ready index of its own."""
        return self.ready_index is not _EMPTY_INDEX

    @property
    def lowest_undelivered(self) -> int:
        """Every seq below this one was delivered, or is not alive any more."""
        return min(self.cursor, self.ready_index.lowest_number) if self.ready_index else self.cursor

    def create_ready_index(self, skipped: BitMap64 | None = None) -> None:
        """Create the ready index: records may have a time or priority.

        The cursor skips the seqs of `skipped`.
        """
        self.ready_index = ReadyIndex()
        if skipped:
            self.ready_index.skipped_by_cursor |= skipped

    def drop_ready_index(self) -> None:
        """Drop the ready index and all known attributes."""
        self.ready_index, self.attributes_loaded_to = _EMPTY_INDEX, 0

    # -- time -----------------------------------------------------------------------------------------

    def apply_expirations(self, now_ms: int) -> None:
        """Make records ready whose lease or delay ended by now."""
        if self.ready_index.delayed and self.ready_index.release_due(
            self.cursor, now_ms, self.wall_clock_offset_ms
        ):
            self.count_change()
        super().apply_expirations(now_ms)

    def next_due_ms(self) -> int | None:
        """Return the time at which the next lease or delay ends; None if there is none."""
        ends_ms, delayed_ms = super().next_due_ms(), self.ready_index.next_ms()
        if delayed_ms is None:
            return ends_ms
        delayed_ms -= self.wall_clock_offset_ms
        return delayed_ms if ends_ms is None else min(ends_ms, delayed_ms)

    # -- handing out ----------------------------------------------------------------------------------

    def collect(
        self, live: LiveSeqs, most: int, now_ms: int, deliveries_max: int, order: DispatchOrder,
        already_collected: int = 0, *,
        new_max: int = 1 << 62,
    ) -> list[SeqRun]:  # fmt: skip
        """Collect up to `most` ready seqs, ascending, which the caller must lease now.

        `already_collected` is the number of seqs that were collected before and have no row yet. At most
        `new_max` seqs are new. Records that were exhausted instead are in `newly_exhausted`."""
        self.apply_expirations(now_ms)
        if len(self.enqueue_times) > QUEUE_AGES_MAX // 2:
            self.enqueue_times.forget(live.front)
        runs, found = self.runs, list[SeqRun]()
        for row in self.take_returned(most, deliveries_max) if self.run_order.has_returned else ():
            found.append((runs.first[row], runs.stop[row], self.deliveries_of(row)))
        if found:
            most -= count_of(found)
        if self.pending_limit:
            most = min(most, self.pending_limit - runs.jobs - already_collected)
        fresh = self._take_fresh(live, max(min(most, new_max), 0), now_ms, order)
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
        """Take jobs below the highest level that were ready before `until_ms`, the oldest first."""
        below = min(self.enqueue_times.first_after(until_ms - 1), live.head + 1)
        found = self._take_lowest(live, most, below, lambda: self.ready_index.overdue(top, below))
        self.promoted += count_of(found)
        return found

    def _take_lowest(
        self, live: LiveSeqs, most: int, below: int, spans_of: Callable[[], Iterable[tuple[int, Span]]]
    ) -> list[SeqRun]:
        """Take jobs below the seq `below`, the lowest first, from the cursor and from levels (`spans_of`)."""
        found: list[SeqRun] = []
        while most:
            spans = list(spans_of())
            first, stop = next_alive(live, max(self.cursor, live.front), self.ready_index.skipped_by_cursor)
            if first < below:
                spans.append((-1, (first, min(stop, below))))
            if not spans:
                break
            level, (first, stop) = min(spans, key=lambda span: span[1])
            # Stop at the first job of another level, because that one is older.
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
        at, skipped = max(self.cursor, live.front), self.ready_index.skipped_by_cursor
        while most and at <= live.head:
            at, stop = next_alive(live, at, skipped)
            stop = min(stop, at + most)
            if stop > at:
                found.append((at, stop, 0))
                most -= stop - at
                at = stop
        self.cursor = max(self.cursor, min(at, live.head + 1))
        return found

    def _note_waits(self, found: list[SeqRun], now_ms: int) -> None:
        """Record the wait times of these jobs, if their enqueue times are known."""
        for first, stop, _ in found:
            for count, put_ms in self.enqueue_times.counts_by_put_time(first, stop):
                if self.wait_histogram is None:
                    self.wait_histogram = WaitHistogram()
                self.wait_histogram.record_waits(count, now_ms - put_ms, now_ms)

    # -- attributes of records ------------------------------------------------------------------------

    def invalidate_priorities(self, levels: int) -> None:
        """Change the number of priority levels.

        Nothing is delivered until all attributes are loaded again.
        """
        self.levels, self.attributes_loaded_to = levels, 0
        self.count_change()
        if self.has_ready_index:
            self.ready_index.invalidate_priorities(self.cursor)

    def add_delivery_attributes(
        self, attributes: DeliveryAttributes, live: LiveSeqs, attributes_to: int, now_ms: int
    ) -> None:
        """Add the `not_before` times and priorities of the records up to `attributes_to`."""
        self.attributes_loaded_to = attributes_to
        self.count_change()
        if not self.has_ready_index:
            if not len(attributes.seqs):
                return
            self.create_ready_index()
        self.ready_index.add_delivery_attributes(
            attributes, live, self.cursor, now_ms + self.wall_clock_offset_ms
        )

    def apply_removal(self, floor: int, seqs: BitMap64 | None = None, *, on_request: bool = False) -> None:
        """As in the table. Seqs that were never delivered are removed as well."""
        if self.ready_index:
            self.ready_index.apply_removal(floor, seqs)
        super().apply_removal(floor, seqs, on_request=on_request)

    def add_run(
        self, first: int, stop: int, state: int, *, at: int, token: int, node: str, deliveries: int,
        process_id: ProcessId, begun: int = 0, given: int = 0,
    ) -> None:  # fmt: skip
        """As in the table. The cursor skips these seqs."""
        if self.has_ready_index:
            self.ready_index.skipped_by_cursor.add_range(first, stop)
        super().add_run(
            first, stop, state, at=at, token=token, node=node, deliveries=deliveries, process_id=process_id,
            begun=begun, given=given,
        )  # fmt: skip

    # -- counting -------------------------------------------------------------------------------------

    def counts(self, live: int) -> QueueCounts:
        """Count `live` jobs by state. Expired leases count as at the last `apply_expirations`."""
        leased, delayed = self.counts_by_state[LEASED], self.delayed
        if self.ready_index.delayed:
            delayed += len(self.ready_index.delayed)
        return QueueCounts(live - leased - delayed, leased, delayed)

    def oldest_ready(self, live: LiveSeqs) -> int | None:
        """Return the lowest seq of a job that can be claimed; None if there is none."""
        returned = self.run_order.lowest_returned()
        lowest = [self.runs.first[returned]] if returned >= 0 else []
        lowest += [seqs.min() for seqs in self.ready_index.levels.values()]
        fresh, _ = next_alive(live, max(self.cursor, live.front), self.ready_index.skipped_by_cursor)
        if fresh <= live.head:
            lowest.append(fresh)
        return min(lowest, default=None)

    def check(self) -> None:
        """Verify the invariants by a recount."""
        super().check()
        for row in self.runs.rows():
            first, stop = max(self.runs.first[row], self.cursor), self.runs.stop[row]
            if first < stop and not self.ready_index.skipped_by_cursor.contains_range(first, stop):
                raise InvariantViolation(
                    "cursor would deliver seqs a second time", first=first, stop=stop, cursor=self.cursor
                )
        if wrong := self.ready_index.check(self.cursor):
            raise InvariantViolation("ready index of queue is inconsistent", cursor=self.cursor, wrong=wrong)
