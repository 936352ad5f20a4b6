"""No schedule of a writer, its death between any two stores, its successor and a reader deceives the reader.

The content of a row does not matter here, so a row has two words instead of eight, and the ring has three
rows. A step is the load or store of one word. The test compares each read with the list of counted rows. A
complete read returns exactly the rows since the last read. An incomplete read returns the last part of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from chaos.schedules.seqlock import StepWords, Suspended, Torn
from ringlog.board import row_ring
from ringlog.board.news import NewsReader, NewsWriter
from ringlog.board.row_ring import RowsRead

ROWS = 3
ROW_WORDS = 2
CLAIMED, COUNT, LIFE, BASE = 0, 1, 2, 3
SIZE = BASE + ROWS * ROW_WORDS

# The explorer steps through the Python code of the classes, and the planted bugs are subclasses of them.
pytestmark = [pytest.mark.timeout(300), pytest.mark.interpreted]


@pytest.fixture(autouse=True)
def small_news(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROW_WORDS", ROW_WORDS), ("_CLAIMED", CLAIMED), ("_COUNT", COUNT), ("_LIFE", LIFE)):
        monkeypatch.setattr(row_ring, name, value)
    monkeypatch.setattr(row_ring, "_BASE", BASE)


class Words(StepWords):
    """Memory in which a slice is stored word by word."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(index, slice):
            return super().__setitem__(index, value)
        given = array("Q", value)
        if index.stop > SIZE or len(given) != index.stop - index.start:
            raise Torn(f"stores {len(given)} words at {index}, outside the ring")
        for at, one in zip(range(index.start, index.stop), given, strict=True):
            super().__setitem__(at, one)
        return None


class Table:
    """Rows over such words; a slice is copied word by word."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def __getitem__(self, index: slice) -> Any:
        start, stop = index.start or 0, min(index.stop, ROWS)
        span = range(BASE + start * ROW_WORDS, BASE + max(start, stop) * ROW_WORDS)
        return np.array([self._words[at] for at in span], dtype=np.uint64).reshape(-1, ROW_WORDS)


class World(NamedTuple):
    """Memory, the writer (life, act, accesses), the reader (position, accesses), and the rows counted so
    far."""

    words: tuple[int, ...]
    life: int
    act: int
    writer: tuple[Any, ...]
    writer_facts: tuple[int, int]
    reader: tuple[Any, ...]
    reader_facts: tuple[int, int]
    counted: tuple[tuple[int, ...], ...]


@dataclass
class Explorer:
    """`lives[n]` lists how many rows incarnation n adds in each call. Each incarnation but the last may die
    at any step."""

    lives: list[list[int]]
    writer_kind: type[NewsWriter] = NewsWriter
    reader_kind: type[NewsReader] = NewsReader
    states: int = 0
    complete: int = 0
    """Number of different complete reads with at least one row."""
    incomplete: int = 0
    _seen_takes: set[Any] = field(default_factory=set)

    def run(self) -> Explorer:
        """Visit every state. Raise Torn for the first state in which the reader is deceived."""
        first = World((0,) * SIZE, 0, 0, (), (0, 0), (), (0, -1), ())
        visited, stack = {first}, [first]
        while stack:
            for after in self._next(stack.pop()):
                if after not in visited:
                    visited.add(after)
                    stack.append(after)
        self.states = len(visited)
        return self

    def _next(self, world: World) -> Iterator[World]:
        yield self._read_step(world)
        # Act 0 of a life is its start; act n + 1 is its n-th call of add.
        if world.act <= len(self.lives[world.life]):
            yield self._write_step(world)
        if world.life + 1 < len(self.lives):
            yield world._replace(life=world.life + 1, act=0, writer=(), writer_facts=(0, 0))

    def _write_step(self, world: World) -> World:
        memory = Words(world.words, world.writer)
        writer = self.writer_kind.__new__(self.writer_kind)
        writer._words, writer._rows = memory, ROWS
        writer._count, writer._claimed = world.writer_facts
        rows = self._rows_of(world) if world.act else []
        is_over = True
        try:
            writer.add(rows) if world.act else begin(writer, memory)
        except Suspended:
            is_over = False
        counted = world.counted
        if memory.words[COUNT] != world.words[COUNT]:
            counted += tuple(rows)
        if not is_over:
            return world._replace(words=tuple(memory.words), writer=tuple(memory.done), counted=counted)
        facts = (writer._count, writer._claimed)
        return world._replace(
            words=tuple(memory.words), act=world.act + 1, writer=(), writer_facts=facts, counted=counted
        )

    def _rows_of(self, world: World) -> list[tuple[int, ...]]:
        """Return the rows of the writer's current call. All words of all rows differ."""
        before = sum(sum(life) for life in self.lives[: world.life])
        before += sum(self.lives[world.life][: world.act - 1])
        many = self.lives[world.life][world.act - 1]
        return [(10 * n, 10 * n + 1) for n in range(before + 1, before + many + 1)]

    def _read_step(self, world: World) -> World:
        memory = Words(world.words, world.reader)
        reader = self.reader_kind.__new__(self.reader_kind)
        reader._words, reader._table, reader._rows = memory, Table(memory), ROWS
        reader._next, reader._life = world.reader_facts
        try:
            taken = reader.take_rows()
        except Suspended:
            return world._replace(reader=tuple(memory.done))
        self._judge(taken, world, reader._next)
        return world._replace(reader=(), reader_facts=(reader._next, reader._life))

    def _judge(self, taken: RowsRead, world: World, stop: int) -> None:
        found = tuple(tuple(row) for row in taken.rows.tolist())
        start = world.reader_facts[0]
        expected = world.counted[start:stop]
        if taken.is_complete and found != expected:
            raise Torn(f"took {found} for complete, which is {expected}")
        if found and found != expected[-len(found) :]:
            raise Torn(f"took {found}, which is no end of {expected}")
        key = (found, taken.is_complete, world.reader_facts)
        if key not in self._seen_takes:
            self._seen_takes.add(key)
            self.complete += taken.is_complete and bool(found)
            self.incomplete += not taken.is_complete


def begin(writer: NewsWriter, words: Any) -> None:
    """Do what a writer does to an existing file."""
    writer._begin(words)


ONE_LIFE = [[1, 3, 1, 2, 1]]
TOO_MANY = [[1, 4, 2, 1]]
TWO_LIVES = [[1, 2, 2], [2, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("lives", [ONE_LIFE, TOO_MANY, TWO_LIVES, [[3], [2], [1, 2]]])
def test_no_schedule_shows_rows_that_were_not_written(lives: list[list[int]]) -> None:
    explored = Explorer(lives).run()
    assert explored.states > 1_000
    assert explored.complete > 3
    assert explored.incomplete > 3


class CountsFirst(NewsWriter):
    """Stores the count before the rows."""

    def add(self, rows):
        self._words[COUNT] = self._count + len(rows)
        super().add(rows)


class ClaimsLast(NewsWriter):
    """Overwrites rows before it stores the claim."""

    def add(self, rows):
        first, stop = self._count, self._count + len(rows)
        for index, row in enumerate(rows, first):
            at = BASE + index % ROWS * ROW_WORDS
            self._words[at : at + ROW_WORDS] = row
        self._count = self._claimed = stop
        self._words[CLAIMED] = stop
        self._words[COUNT] = stop


class TakesItsClaimBack(NewsWriter):
    """A successor that declares the rows complete that its predecessor claimed and overwrote."""

    def _begin(self, words):
        words[CLAIMED] = words[COUNT]
        super()._begin(words)


class GoesOnBehindTheClaim(NewsWriter):
    """A successor that counts rows that no writer finished."""

    def _begin(self, words):
        super()._begin(words)
        self._count = words[COUNT] = self._claimed


class Trusts(NewsReader):
    """A reader that does not check the claim."""

    def take_rows(self):
        words = self._words
        count, life = words[COUNT], words[LIFE]
        start, self._next = self._next, count
        is_complete, self._life = life == self._life, life
        if not start <= count <= start + ROWS:
            return RowsRead(np.zeros((0, ROW_WORDS), dtype=np.uint64), False)
        found = [self._table[n % ROWS : n % ROWS + 1] for n in range(start, count)]
        return RowsRead(np.concatenate(found) if found else self._table[0:0], is_complete)


@pytest.mark.parametrize(
    ("writer", "reader", "lives"),
    [
        (CountsFirst, NewsReader, ONE_LIFE),
        (ClaimsLast, NewsReader, ONE_LIFE),
        (TakesItsClaimBack, NewsReader, TWO_LIVES),
        (GoesOnBehindTheClaim, NewsReader, TWO_LIVES),
        (NewsWriter, Trusts, ONE_LIFE),
    ],
)
def test_the_explorer_detects_each_planted_bug(
    writer: type[NewsWriter], reader: type[NewsReader], lives: list[list[int]]
) -> None:
    """Each planted bug omits one step of the class that it replaces."""
    explorer: Callable[[], Explorer] = Explorer(lives, writer, reader).run
    with pytest.raises(Torn):
        explorer()
