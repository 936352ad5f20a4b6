"""Ready index: undelivered jobs that the cursor does not find, because they are delayed or have a level.

Pure.

A job without a future `not_before` and without a priority is represented by the cursor alone. Other jobs are
bits in bitmaps, and the times of delayed ones are in a DelaySchedule: less than 30 bytes for each job. The
cursor skips `skipped_by_cursor`. A job of level 0 that becomes ready above the cursor is left to the cursor
again.

    delayed ──(its time)──▶ levels[n], n > 0, or 0 if the cursor has passed it ──▶ delivered
                        └─▶ left to the cursor, if the cursor has not passed it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.leases.live_seqs import LiveSeqs, bitmap_of, end_of
from ringlog.leases.schedule import DelaySchedule
from ringlog.leases.spans import Span
from ringlog.limits import QUEUE_READY_INSTANTS_MAX

I64 = NDArray[np.int64]
_STALE_MAX = 1_024
"""Number of obsolete entries of the schedule, in addition to the valid ones, that are tolerated."""
_NO_NUMBER = 1 << 63


class DeliveryAttributes(NamedTuple):
    """Of some jobs, ascending: earliest delivery time (milliseconds, 0 = any time) and level."""

    seqs: I64
    at_ms: I64
    levels: NDArray[np.uint8]


class ReadyIndex:
    """The jobs of one queue that the cursor does not find."""

    def __init__(self) -> None:
        self.delayed: BitMap64 = BitMap64()
        self.levels: dict[int, BitMap64] = {}
        """Ready jobs by level; with level 0 only those that the cursor has passed."""
        self.skipped_by_cursor: BitMap64 = BitMap64()
        """Seqs at or above the cursor that it does not deliver: these jobs, and jobs that were delivered
        ahead of it."""
        self._later: dict[int, BitMap64] = {}
        """Delayed jobs by level, without level 0."""
        self._schedule = DelaySchedule()
        self._recently_due: list[tuple[int, BitMap64]] = []
        """Jobs that were delayed, by the time at which they became ready. They have not waited since they
        were enqueued."""
        self._awaiting_reload: BitMap64 | None = None
        """While all attributes are loaded again: the undelivered jobs below the cursor."""

    def __bool__(self) -> bool:
        return bool(self.delayed or self.levels or self.skipped_by_cursor or self._awaiting_reload)

    def __len__(self) -> int:
        """Number of undelivered jobs, without those that wait for the cursor."""
        return len(self.delayed) + sum(map(len, self.levels.values()))

    @property
    def unclaimed(self) -> BitMap64:
        """Undelivered jobs, without those that wait for the cursor."""
        return BitMap64.union(self.delayed, *self.levels.values(), self._awaiting_reload or BitMap64())

    @property
    def lowest_number(self) -> int:
        """The lowest of these jobs; a number above all seqs if there is none."""
        known = (self.delayed, *self.levels.values(), self._awaiting_reload)
        return min((seqs.min() for seqs in known if seqs), default=_NO_NUMBER)

    @property
    def is_reloading(self) -> bool:
        """All attributes must be loaded again."""
        return self._awaiting_reload is not None

    # -- jobs enter and leave -------------------------------------------------------------------------

    def add_delivery_attributes(
        self, attributes: DeliveryAttributes, live: LiveSeqs, cursor: int, wall_ms: int
    ) -> None:
        """Add the attributes of published jobs. A job is added again only after `invalidate_priorities`."""
        reloading, self._awaiting_reload = self._awaiting_reload, None
        fresh = self._undelivered(attributes.seqs, live, cursor, reloading)
        seqs, at_ms, levels = attributes.seqs[fresh], attributes.at_ms[fresh], attributes.levels[fresh]
        later = at_ms > wall_ms
        waiting = bitmap_of(seqs[later])
        self.delayed |= waiting
        self.skipped_by_cursor |= waiting
        self._schedule.add(at_ms[later], seqs[later])
        for level in np.unique(levels).tolist():
            of_level = levels == level
            if level:
                _join(self._later, level, bitmap_of(seqs[of_level & later]))
                self._ready(level, bitmap_of(seqs[of_level & ~later]), cursor)
        if reloading:
            # A job without attributes, or with attributes that have no effect any more, is ready.
            self._ready(0, reloading - self.delayed - _union(self.levels), cursor)

    def _undelivered(
        self, seqs: I64, live: LiveSeqs, cursor: int, reloading: BitMap64 | None
    ) -> NDArray[np.bool_]:
        """Return which of these jobs are alive and were never delivered."""
        fresh = seqs >= live.front
        for first, last in live.lost:
            fresh &= (seqs < first) | (seqs > last)
        if reloading is None:
            fresh &= seqs >= cursor
        else:
            fresh &= (seqs >= cursor) | np.isin(seqs, _numbers(reloading))
        kept = bitmap_of(seqs[fresh])
        kept -= self.skipped_by_cursor
        if live.dead is not None:
            kept -= live.dead
        return np.isin(seqs, _numbers(kept)) if len(kept) < int(fresh.sum()) else fresh

    def invalidate_priorities(self, cursor: int) -> None:
        """Drop all levels, because their meaning changes. All attributes must be loaded again."""
        known = self.delayed | _union(self.levels)
        self.skipped_by_cursor -= known
        known.remove_range(cursor, 1 << 63)
        self._awaiting_reload = known if self._awaiting_reload is None else self._awaiting_reload | known
        self.delayed, self.levels, self._later = BitMap64(), {}, {}
        self._schedule = DelaySchedule()
        self._recently_due.clear()

    def next_ms(self) -> int | None:
        """Return the wall-clock time at which the next delayed job is ready.

        That job may be deleted already.
        """
        return self._schedule.next_ms() if self.delayed else None

    def release_due(self, cursor: int, now_ms: int, wall_clock_offset_ms: int = 0) -> bool:
        """Make jobs ready whose delay ended by now. Return False if there are none.

        Delays use the wall clock, which is `wall_clock_offset_ms` ahead of `now_ms`."""
        due_ms, wall_ms = self._schedule.next_ms(), now_ms + wall_clock_offset_ms
        if due_ms is None or due_ms > wall_ms:
            return False
        due = bitmap_of(self._schedule.pop_due(wall_ms)) & self.delayed
        self.delayed -= due
        for level, seqs in list(self._later.items()):
            if ours := seqs & due:
                due -= ours
                self._take_out(self._later, level, ours)
                self._record_due(ours, now_ms)
                self._ready(level, ours, cursor)
        self._record_due(due, now_ms)
        self._ready(0, due, cursor)
        return True

    def _ready(self, level: int, seqs: BitMap64, cursor: int) -> None:
        if level:
            self.skipped_by_cursor |= seqs
        else:
            self.skipped_by_cursor -= seqs
            seqs = seqs.copy()
            seqs.remove_range(cursor, 1 << 63)
        _join(self.levels, level, seqs)

    def apply_removal(self, floor: int, seqs: BitMap64 | None) -> None:
        """Remove the jobs below `floor` and those in `seqs`, which are not alive any more."""
        for level in (*self.levels, *self._later):
            for by_level in (self.levels, self._later):
                if level in by_level:
                    self._drop(by_level[level], floor, seqs)
                    self._take_out(by_level, level, BitMap64())
        if self._awaiting_reload:
            self._drop(self._awaiting_reload, floor, seqs)
        self._drop(self.delayed, floor, seqs)
        if len(self._schedule) > 2 * len(self.delayed) + _STALE_MAX:
            self._schedule.keep_only(self.delayed)

    @staticmethod
    def _drop(numbers: BitMap64, floor: int, seqs: BitMap64 | None) -> None:
        if floor:
            numbers.remove_range(0, floor)
        if seqs:
            numbers -= seqs

    @staticmethod
    def _take_out(by_level: dict[int, BitMap64], level: int, seqs: BitMap64) -> None:
        by_level[level] -= seqs
        if not by_level[level]:
            del by_level[level]

    def forget_below(self, cursor: int) -> None:
        """Forget skipped seqs below the cursor."""
        if self.skipped_by_cursor:
            self.skipped_by_cursor.remove_range(0, cursor)

    # -- handing out ----------------------------------------------------------------------------------

    def lowest(self, level: int) -> Span | None:
        """Return the first span of ready jobs of a level; None if there is none."""
        seqs = self.levels.get(level)
        if not seqs:
            return None
        first = seqs.min()
        return first, end_of(seqs, first)

    def lowest_of_each(self) -> Iterator[tuple[int, Span]]:
        """Yield (level, its first span of ready jobs) of each level."""
        for level, seqs in self.levels.items():
            first = seqs.min()
            yield level, (first, end_of(seqs, first))

    def take_range(self, level: int, first: int, stop: int) -> None:
        """Remove jobs of a level that are delivered now. All of them must be ready."""
        self.levels[level].remove_range(first, stop)
        if not self.levels[level]:
            del self.levels[level]

    # -- promotion ------------------------------------------------------------------------------------

    def _record_due(self, seqs: BitMap64, now_ms: int) -> None:
        if not seqs:
            return
        self._recently_due.append((now_ms, seqs.copy()))
        if len(self._recently_due) > QUEUE_READY_INSTANTS_MAX:
            (_, older), (at, newer) = self._recently_due[:2]
            self._recently_due[:2] = [(at, older | newer)]

    def forget_due_before(self, until_ms: int) -> None:
        """Forget jobs that became ready before this time: from now on only their enqueue time decides."""
        while self._recently_due and self._recently_due[0][0] < until_ms:
            del self._recently_due[0]

    def overdue(self, top: int, below: int) -> Iterator[tuple[int, Span]]:
        """Yield (level, its first span of jobs below `below` that waited too long) of each level below `top`.

        Jobs in `_recently_due` are left out; see `forget_due_before`."""
        for level in sorted(self.levels):
            if level >= top:
                continue
            seqs = self.levels[level]
            if self._recently_due:
                seqs = seqs - BitMap64.union(*(each for _, each in self._recently_due))
            if seqs and (first := seqs.min()) < below:
                yield level, (first, min(end_of(seqs, first), below))

    def check(self, cursor: int) -> list[str]:
        """Return the inconsistencies."""
        wrong = []
        if not all(self.levels.values()) or not all(self._later.values()):
            wrong.append("an empty level is kept")
        ready = _union(self.levels)
        if len(ready) != sum(map(len, self.levels.values())) or ready & self.delayed:
            wrong.append("a job is in two places")
        ahead = (ready | self.delayed) - self.skipped_by_cursor
        if ahead and ahead.max() >= cursor:
            wrong.append("the cursor would hand out a job that is not its own")
        if 0 in self.levels and self.levels[0].max() >= cursor:
            wrong.append("the cursor passes over a job that is its own")
        return wrong


def _join(by_level: dict[int, BitMap64], level: int, seqs: BitMap64) -> None:
    if seqs:
        by_level[level] = by_level[level] | seqs if level in by_level else seqs


def _union(by_level: dict[int, BitMap64]) -> BitMap64:
    return BitMap64.union(*by_level.values()) if by_level else BitMap64()


def _numbers(seqs: BitMap64) -> I64:
    return np.array(seqs.to_array(), dtype=np.int64)
