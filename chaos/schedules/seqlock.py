"""Explores all schedules of a seqlock's writers and readers with the real board classes, and crashes.

A step is the load or store of one word. Writers live in sequence (incarnations); the first may die between
any two of its stores. Readers change nothing, so one reader that may start at any time represents any number
of them. For small numbers of words, three concurrent readers are explored as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chaos.schedules.stepping import Stepped, Suspended, count_states
from ringlog.board.layout import BoardUnstable

UNSTABLE = "unstable"
Write = Callable[[Any], object]
"""Function that performs one write on the words."""


class Torn(AssertionError):
    """A reader accepted values that were never published, or values older than it must see."""


class Stretch(list[int]):
    """A slice of words, with the `tolist` of a memoryview."""

    def tolist(self) -> list[int]:
        return list(self)


class StepWords(Stepped):
    """Replaces memoryview.cast("Q"). It performs one real access, then suspends the operation."""

    def __init__(self, words: Sequence[int], done: Sequence[Any]) -> None:
        super().__init__(done)
        self.words = list(words)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Stretch(self[i] for i in range(index.start, index.stop))
        return self.access(lambda: self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.access(lambda: self.words.__setitem__(index, value))


class World(NamedTuple):
    """State of the memory, the writer (life, write, accesses) and the readers (accesses)."""

    words: tuple[int, ...]
    life: int
    write: int
    writer_done: tuple[Any, ...]
    version: int
    """Ghost: number of the last completed write. A write in progress may be visible already."""
    readers: tuple[tuple[tuple[Any, ...], int], ...]
    """For each reader its accesses and (ghost) the `version` at its start.

    Sorted, because readers are equal.
    """


@dataclass
class SeqlockExplorer:
    """Visits every state.

    `lives` has the writes of each incarnation. `published[i]` is the result of write number i; 0 = no write
    yet. `read(words)` returns the values that a reader sees, or raises BoardUnstable.
    """

    size: int
    lives: list[list[Write]]
    published: list[Any]
    read: Callable[[Any], Any]
    readers: int = 1
    states: int = 0
    steps: int = 0
    """Accesses made by the code under test. A reader's access is made once for each distinct memory state."""
    seen: set[Any] = field(default_factory=set)
    _reads: dict[Any, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def run(self) -> SeqlockExplorer:
        """Visit every state. Raises Torn for the first schedule with a wrong read."""
        first = World((0,) * self.size, 0, 0, (), 0, (((), 0),) * self.readers)
        self.states = count_states(first, self._next)
        return self

    def _next(self, world: World) -> Iterator[World]:
        for reader in sorted(set(world.readers)):
            yield self._read_step(world, reader)
        if world.write < len(self.lives[world.life]):
            yield self._write_step(world)
        if world.life + 1 < len(self.lives):
            # The writer may die at any step, including before the first and after the last.
            yield world._replace(life=world.life + 1, write=0, writer_done=())

    def _write_step(self, world: World) -> World:
        memory = StepWords(world.words, world.writer_done)
        self.steps += 1
        try:
            self.lives[world.life][world.write](memory)
        except Suspended:
            return world._replace(words=tuple(memory.words), writer_done=tuple(memory.done))
        version = sum(len(life) for life in self.lives[: world.life]) + world.write + 1
        return world._replace(
            words=tuple(memory.words), write=world.write + 1, writer_done=(), version=version
        )

    def _read_step(self, world: World, reader: tuple[tuple[Any, ...], int]) -> World:
        done, must_see = reader
        must_see = must_see if done else world.version
        key = (world.words, done)
        if key not in self._reads:
            self._reads[key] = self._read(world.words, done)
        done, found = self._reads[key]
        if not done:
            must_see = self._judge(found, must_see)
        others = list(world.readers)
        others.remove(reader)
        return world._replace(readers=tuple(sorted([*others, (done, must_see)])))

    def _read(self, words: Sequence[int], done: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """Make one more access; return (accesses so far, None), or ((), result) when the read is complete."""
        memory = StepWords(words, done)
        self.steps += 1
        try:
            return (), self.read(memory)
        except Suspended:
            return tuple(memory.done), None
        except BoardUnstable:
            return (), UNSTABLE

    def _judge(self, found: Any, must_see: int) -> int:
        self.seen.add(found)
        if found != UNSTABLE and found not in self.published[must_see:]:
            raise Torn(f"read {found}, which is none of {self.published[must_see:]}")
        return 0
