"""Runs: ranges of jobs in one state, found by seq. Pure.

    block (1,024 seqs)        rows, in columns
    ┌────────────┬──────┐     first  stop  at  token  holder  deliveries  state  begun  given
    │ 2048, 2060 │ 7, 3 │ ──▶   2048  2060  …
    └────────────┴──────┘

Only delivered seqs have a row; the topic knows the others. A run never crosses a block. A search costs one
dictionary lookup and a binary search among at most 1,024 seqs. All data is in arrays: a million rows are not
a million objects.
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
"""Seqs in a block: about as many as one claim takes."""


STATES = ("free", "leased", "delayed", "returned", "gone", "exhausted")
"""State names of runs; the index is the state. Plain integers, because an enumeration costs too much in loops
over rows."""
FREE: Final = 0
"""The row is not in use."""
LEASED: Final = 1
DELAYED: Final = 2
"""Returned, and its delay has not ended."""
RETURNED: Final = 3
"""Ready, and delivered before."""
GONE: Final = 4
"""Deleted by a request while leased; an ack of it still counts."""
EXHAUSTED: Final = 5
"""Rejected, or all deliveries used: waits for its move to the dead-letter topic."""


class LeaseRuns:
    """The table of runs. Columns may be read directly; only the methods change rows."""

    def __init__(self) -> None:
        self.first: array[int] = array("Q")
        self.stop: array[int] = array("Q")
        """Exclusive end."""
        self.at: array[int] = array("Q")
        """LEASED, GONE: deadline in milliseconds, inclusive. DELAYED: time at which it is ready."""
        self.token: array[int] = array("Q")
        """Token of the first job; the others follow."""
        self.holder: array[int] = array("I")
        self.process_number: array[int] = array("I")
        """For a leased run: number of the process that claimed it; 0 = no process is observed."""
        self.deliveries: array[int] = array("I")
        self.begun: array[int] = array("Q")
        self.given: array[int] = array("Q")
        """Times of the first and of the last delivery of its seqs, in milliseconds. An extension counts as a
        delivery here, because it shows that the holder is alive."""
        self.state: bytearray = bytearray()
        self.jobs: int = 0
        """Number of seqs in all runs."""
        self._free: list[int] = []
        self._blocks: dict[int, tuple[array[int], array[int]]] = {}
        """Block -> first seq and row of each run in it, ascending."""
        self._order: list[int] = []
        """Heap of the blocks with runs; it may contain blocks that have none any more."""

    def __len__(self) -> int:
        return len(self.state) - len(self._free)

    @property
    def blocks(self) -> dict[int, tuple[array[int], array[int]]]:
        """Blocks with runs."""
        return self._blocks

    def find(self, seq: int) -> int:
        """Return the row of the run with this seq; -1 if there is none."""
        block = self._blocks.get(seq >> BLOCK_SHIFT)
        if block is None:
            return -1
        place = bisect_right(block[0], seq) - 1
        if place < 0:
            return -1
        row = block[1][place]
        return row if seq < self.stop[row] else -1

    def within(self, first: int, stop: int) -> list[int]:
        """Return the rows of the runs with a seq in [first, stop), ascending."""
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
        """Return the rows of the runs with a seq below `floor`, ascending. Blocks above it cost nothing."""
        found: list[int] = []
        order = self._order
        popped: list[int] = []
        while order and order[0] << BLOCK_SHIFT < floor:
            number = heappop(order)
            block = self._blocks.get(number)
            if block is None or (popped and popped[-1] == number):
                continue
            popped.append(number)
            found += block[1][: bisect_left(block[0], floor)]
        for number in popped:
            heappush(order, number)
        return found

    def add(
        self, first: int, stop: int, state: int, *, at: int = 0, token: int = 0, holder: int = 0,
        deliveries: int = 0, process_number: int = 0, begun: int = 0, given: int = 0,
    ) -> int:  # fmt: skip
        """Add a run inside one block, where there is none. Return its row."""
        if self._free:
            row = self._free.pop()
            self.first[row], self.stop[row], self.at[row], self.token[row] = first, stop, at, token
            self.holder[row], self.deliveries[row], self.state[row] = holder, deliveries, state
            self.process_number[row], self.begun[row], self.given[row] = process_number, begun, given
        else:
            row = len(self.state)
            self.first.append(first)
            self.stop.append(stop)
            self.at.append(at)
            self.token.append(token)
            self.holder.append(holder)
            self.process_number.append(process_number)
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
        """Remove a run."""
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
        """Split a run: it ends before `at`, and a new run with the same facts starts there.

        Return the new row.
        """
        first, stop = self.first[row], self.stop[row]
        self.stop[row] = at
        self.jobs -= stop - at
        return self.add(
            at, stop, self.state[row], at=self.at[row], token=self.token[row] + at - first,
            holder=self.holder[row], deliveries=self.deliveries[row], process_number=self.process_number[row],
            begun=self.begun[row], given=self.given[row],
        )  # fmt: skip

    def rows_leased_by(self, process_number: int) -> list[int]:
        """Return the rows of the leased runs that the process with this number claimed."""
        numbers, states = np.frombuffer(self.process_number, np.uint32), np.frombuffer(self.state, np.uint8)
        return (
            np.flatnonzero((numbers == process_number) & (states == LEASED)).tolist() if len(numbers) else []
        )

    def rows(self) -> list[int]:
        """Return all rows in use, ascending by first seq."""
        return [row for number in sorted(self._blocks) for row in self._blocks[number][1]]

    @property
    def lowest(self) -> int:
        """The lowest seq of all runs; 0 = there are no runs."""
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
        """Return rows that satisfy all conditions, ascending by seq.

        The state is one of `states`, the last delivery was at or before `given_by`, and there were at least
        `deliveries` deliveries. The holder is `holder` and not `not_holder` (-1 = no condition). The run has
        a seq above `after`."""
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
    """Return a copy, because an array with an exported buffer cannot grow."""
    return np.array(values, dtype=np.int64)
