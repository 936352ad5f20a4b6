"""Entries: the runs of a group's pending list, with what only groups know of them. Pure.

A position below the group's cursor without a run is done: acked, or not there any more. So the whole state
of a group is its cursor and its runs, and the ack floor is one below the lowest of them.
"""

from __future__ import annotations

from array import array
from heapq import heappop

import numpy as np
from numpy.typing import NDArray

from ringlog.leases.runs import Runs

I64 = NDArray[np.int64]


class Entries(Runs):
    """Runs with two times: when their positions were given out for the first and for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = array("Q")
        self.given = array("Q")
        """Milliseconds; an extension counts as a hand-out here: its holder is alive."""

    def add(
        self, first: int, stop: int, state: int, *, at: int = 0, token: int = 0, holder: int = 0,
        deliveries: int = 0, link: int = 0,
    ) -> int:  # fmt: skip
        """As in Runs; times are set by the caller."""
        row = super().add(
            first, stop, state, at=at, token=token, holder=holder, deliveries=deliveries, link=link
        )
        if row == len(self.begun):
            self.begun.append(0)
            self.given.append(0)
        else:
            self.begun[row] = self.given[row] = 0
        return row

    def cut(self, row: int, at: int) -> int:
        """As in Runs."""
        new = super().cut(row, at)
        self.begun[new], self.given[new] = self.begun[row], self.given[row]
        return new

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
