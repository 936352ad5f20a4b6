"""A ring of rows in shared memory: the writer never waits, and readers detect an overrun.

In 64-bit words, after the header page of all board files (layout):

word              part
64                claimed: rows written or being written, since the creation of the ring
72                count: rows that are complete
80                life: grows when a new writer begins
512 + 8*(i%N)     row i, eight words

The writer stores `claimed`, the rows, then `count`. A reader copies rows below `count`, then loads `claimed`,
and discards rows that may have been overwritten in the meantime.

`claimed` and `count` never decrease (N6). A writer that dies between the two stores has damaged only the
places of the rows that it claimed. Its successor continues at `count` with the same places and leaves
`claimed` unchanged. A reader therefore never accepts the old contents of these places as complete.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.board import layout
from ringlog.board.mapping import BoardFile

ROW_WORDS = 8
ROW_BYTES = 8 * ROW_WORDS
_CLAIMED, _COUNT, _LIFE = 64, 72, 80
_BASE = layout.PAGE_BYTES // 8


class RowsRead(NamedTuple):
    """Result of a read. `rows` has shape (n, 8). If not `is_complete`, earlier rows are missing."""

    rows: NDArray[np.uint64]
    is_complete: bool


class RowWriter:
    """The writer's end. Its creation increments `life`."""

    def __init__(self, file: BoardFile) -> None:
        self._file = file
        self._words = file.words
        self._rows = file.slots
        self._begin(self._words)

    def _begin(self, words: memoryview) -> None:
        self._count = words[_COUNT]
        self._claimed = max(words[_CLAIMED], self._count)
        words[_LIFE] += 1

    def add(self, rows: Sequence[Sequence[int]]) -> None:
        """Append rows. If there are more rows than the ring has space for, only the last ones are kept."""
        many = len(rows)
        if many:
            # Convert all words before the first store: a value above 64 bits must not leave a claim.
            self.add_words(array("Q", rows[0] if many == 1 else [word for row in rows for word in row]))

    def add_words(self, flat: array[int]) -> None:
        """Append rows given as a flat array, eight words each."""
        words, first, many = self._words, self._count, len(flat) // ROW_WORDS
        stop = first + many
        if stop > self._claimed:
            self._claimed = words[_CLAIMED] = stop
        at = first % self._rows
        if at + many <= self._rows:
            start = _BASE + at * ROW_WORDS
            words[start : start + many * ROW_WORDS] = flat
        else:
            self._store_round(flat, max(first, stop - self._rows), stop)
        self._count = words[_COUNT] = stop

    def _store_round(self, flat: array[int], index: int, stop: int) -> None:
        """Store the last rows, from index `index` on, around the end of the ring."""
        view = memoryview(flat)
        while index < stop:
            at = index % self._rows
            many = min(self._rows - at, stop - index)
            source = len(flat) - (stop - index) * ROW_WORDS
            start = _BASE + at * ROW_WORDS
            self._words[start : start + many * ROW_WORDS] = view[source : source + many * ROW_WORDS]
            index += many

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._file.close()


class RowReader:
    """A reader's end."""

    def __init__(self, file: BoardFile, *, from_start: bool) -> None:
        """`from_start`: read all rows of the current life. Otherwise read new rows; the first read is
        incomplete."""
        self._file = file
        self._words = file.words
        self._table = np.frombuffer(self._words, dtype=np.uint64)[_BASE:].reshape(-1, ROW_WORDS)
        self._rows = file.slots
        self._next = 0 if from_start else self._words[_COUNT]
        self._life = self._words[_LIFE] if from_start else -1

    @property
    def has_rows(self) -> bool:
        """True if there are rows to take, or a new life."""
        return self._words[_COUNT] != self._next or self._words[_LIFE] != self._life

    def spin_word(self) -> tuple[memoryview, int]:
        """Return (word, value) for polling: the word has this value while there are no new rows."""
        return self._words[_COUNT : _COUNT + 1], self._next

    def take_rows(self) -> RowsRead:
        """Return all rows since the previous call, in order."""
        words = self._words
        # Load count before life: a reader that sees rows of a new life must also see the new life.
        count, life = words[_COUNT], words[_LIFE]
        is_complete = life == self._life
        start, self._next, self._life = self._next, count, life
        if not start <= count <= start + self._rows:
            start, is_complete = count, False
        at, many = start % self._rows, count - start
        first = self._table[at : at + many]
        wrapped = self._table[: many - len(first)]
        rows = np.concatenate((first, wrapped)) if len(wrapped) else first.copy()
        overwritten = max(words[_CLAIMED] - self._rows - start, 0)
        if overwritten:
            return RowsRead(rows[overwritten:], False)
        return RowsRead(rows, is_complete)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._table = self._table[:0].copy()
        self._file.close()
