"""Runs: stretches of jobs that are in one state together, found by number. Pure.

    block (1,024 numbers)     rows, in columns
    ┌────────────┬──────┐     first  stop  at  token  holder  deliveries  state  begun  given
    │ 2048, 2060 │ 7, 3 │ ──▶   2048  2060  …
    └────────────┴──────┘

Only numbers that were handed out have a row; the others are known from the topic. A run never crosses a
block, so that finding one costs a look into a dictionary and a search among at most 1,024 numbers. All is
kept in arrays: a million rows are not a million objects.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

BLOCK_SHIFT = 10
BLOCK = 1 << BLOCK_SHIFT
"""Numbers in a block: about as many as one claim takes."""


STATES = ("free", "leased", "delayed", "returned", "gone", "exhausted")
"""What a run's numbers are; each is known by its place here. Plain numbers: enumerations cost too much where
each row is looked at."""
FREE: Final = 0
"""The row is not in use."""
LEASED: Final = 1
DELAYED: Final = 2
"""Came back, and its delay is not over."""
RETURNED: Final = 3
"""Ready, and handed out before."""
GONE: Final = 4
"""Deleted on request while leased: an ack still counts (QA-9)."""
EXHAUSTED: Final = 5
"""Rejected, or had all its deliveries: on its way to the dead letters."""


class LeaseRuns:
    """The table. Columns are read freely; rows are changed through the methods alone."""

    def __init__(self) -> None:
        self.first = array("Q")
        self.stop = array("Q")
        """One past the last job."""
        self.at = array("Q")
        """LEASED, GONE: held up to this millisecond, included. DELAYED: ready from it on."""
        self.token = array("Q")
        """Of the first job; those of the others follow."""
        self.holder = array("I")
        self.link = array("I")
        """Of a leased run: through whom it was claimed; 0 = nobody whose end would be noticed."""
        self.deliveries = array("I")
        self.begun = array("Q")
        self.given = array("Q")
        """When its numbers were handed out for the first and for the last time, milliseconds; an extension
        counts as a hand-out here: its holder is alive."""
        self.state = bytearray()
        self.jobs = 0
        """In all runs together."""
        self._free: list[int] = []
        self._blocks: dict[int, tuple[array[int], array[int]]] = {}
        """Block -> first number and row of each run in it, ascending."""
        self._order: list[int] = []
        """Heap of the blocks there are or were."""

    def __len__(self) -> int:
        return len(self.state) - len(self._free)

    @property
    def blocks(self) -> dict[int, tuple[array[int], array[int]]]:
        """Blocks with a run in them."""
        return self._blocks

    def find(self, seq: int) -> int:
        """Row of the run with this job; -1 = it has none."""
        block = self._blocks.get(seq >> BLOCK_SHIFT)
        if block is None:
            return -1
        place = bisect_right(block[0], seq) - 1
        if place < 0:
            return -1
        row = block[1][place]
        return row if seq < self.stop[row] else -1

    def within(self, first: int, stop: int) -> list[int]:
        """Rows of the runs that have a job in [first, stop), ascending."""
        low, high = first >> BLOCK_SHIFT, (stop - 1) >> BLOCK_SHIFT
        if high - low < len(self._blocks):
            wanted: Iterator[int] = (n for n in range(low, high + 1) if n in self._blocks)
        else:
            wanted = iter(sorted(n for n in self._blocks if low <= n <= high))
        found: list[int] = []
        for number in wanted:
            firsts, rows = self._blocks[number]
            start = max(bisect_right(firsts, first) - 1, 0)
            found += rows[start : bisect_left(firsts, stop)]
        if found and self.stop[found[0]] <= first:
            del found[0]
        return found

    def below(self, floor: int) -> list[int]:
        """Rows of the runs that have a job below `floor`, ascending; blocks wholly above cost nothing."""
        found: list[int] = []
        order = self._order
        passed: list[int] = []
        while order and order[0] << BLOCK_SHIFT < floor:
            number = heappop(order)
            block = self._blocks.get(number)
            if block is None or (passed and passed[-1] == number):
                continue
            passed.append(number)
            found += block[1][: bisect_left(block[0], floor)]
        for number in passed:
            heappush(order, number)
        return found

    def add(
        self, first: int, stop: int, state: int, *, at: int = 0, token: int = 0, holder: int = 0,
        deliveries: int = 0, link: int = 0, begun: int = 0, given: int = 0,
    ) -> int:  # fmt: skip
        """Make a run inside one block, where there is none; returns its row."""
        if self._free:
            row = self._free.pop()
            self.first[row], self.stop[row], self.at[row], self.token[row] = first, stop, at, token
            self.holder[row], self.deliveries[row], self.state[row] = holder, deliveries, state
            self.link[row], self.begun[row], self.given[row] = link, begun, given
        else:
            row = len(self.state)
            self.first.append(first)
            self.stop.append(stop)
            self.at.append(at)
            self.token.append(token)
            self.holder.append(holder)
            self.link.append(link)
            self.deliveries.append(deliveries)
            self.begun.append(begun)
            self.given.append(given)
            self.state.append(state)
        self.jobs += stop - first
        number = first >> BLOCK_SHIFT
        block = self._blocks.get(number)
        if block is None:
            self._blocks[number] = array("Q", (first,)), array("Q", (row,))
            heappush(self._order, number)
        else:
            place = bisect_left(block[0], first)
            block[0].insert(place, first)
            block[1].insert(place, row)
        return row

    def drop(self, row: int) -> None:
        """Its jobs need no state any more."""
        first = self.first[row]
        self.jobs -= self.stop[row] - first
        number = first >> BLOCK_SHIFT
        firsts, rows = self._blocks[number]
        place = bisect_left(firsts, first)
        del firsts[place], rows[place]
        if not firsts:
            del self._blocks[number]
            if len(self._order) > 2 * len(self._blocks) + BLOCK:
                self._order = list(self._blocks)
                heapify(self._order)
        self.state[row] = FREE
        self._free.append(row)

    def split_row(self, row: int, at: int) -> int:
        """Split a run: it ends before `at`, and a new one with the same facts begins there; returns that."""
        first, stop = self.first[row], self.stop[row]
        self.stop[row] = at
        self.jobs -= stop - at
        return self.add(
            at, stop, self.state[row], at=self.at[row], token=self.token[row] + at - first,
            holder=self.holder[row], deliveries=self.deliveries[row], link=self.link[row],
            begun=self.begun[row], given=self.given[row],
        )  # fmt: skip

    def rows_leased_by(self, link: int) -> list[int]:
        """Rows of the runs that were claimed so and are leased."""
        links, states = np.frombuffer(self.link, np.uint32), np.frombuffer(self.state, np.uint8)
        return np.flatnonzero((links == link) & (states == LEASED)).tolist() if len(links) else []

    def rows(self) -> list[int]:
        """Every row in use, by number of its first job."""
        return [row for number in sorted(self._blocks) for row in self._blocks[number][1]]

    @property
    def lowest(self) -> int:
        """The first position of all runs; 0 = there is none."""
        order, blocks = self._order, self._blocks
        while order and order[0] not in blocks:
            heappop(order)
        return blocks[order[0]][0][0] if order else 0

    def select(
        self,
        states: tuple[int, ...],
        given_by: int,
        deliveries: int,
        holder: int,
        not_holder: int,
        after: int,
    ) -> I64:
        """Rows in one of these states, given out at or before `given_by`, at least so often; of one holder,
        or of all but one (-1 = of any); with a position behind `after`. Ascending by position."""
        state = np.frombuffer(bytes(self.state), dtype=np.uint8)
        wanted = np.isin(state, states)
        wanted &= _column(self.given) <= given_by
        wanted &= _column(self.deliveries) >= deliveries
        wanted &= _column(self.stop) > after + 1
        if holder >= 0:
            wanted &= _column(self.holder) == holder
        if not_holder >= 0:
            wanted &= _column(self.holder) != not_holder
        rows = np.flatnonzero(wanted)
        return rows[np.argsort(_column(self.first)[rows], kind="stable")]


def _column(values: array[int]) -> I64:
    """A copy, since an array that is looked at cannot grow."""
    return np.array(values, dtype=np.int64)
