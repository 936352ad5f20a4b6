"""All schedules of a seqlock's writers and a reader over the real board classes, with crashes at every step.

A step is the load or store of one word. Writers live one after the other (incarnations); the first may die
between any two of its stores. Readers change nothing, so one reader that may start at any time stands for
any number of them; three at once are explored where the words are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chaos.schedules.stepping import Stepped, Suspended, count_states
from ringlog.board.layout import BoardUnstable

UNSTABLE = "unstable"
Write = Callable[[Any], object]
"""What a writer does with the words."""


class Torn(AssertionError):
    """A reader believed something that was never published, or something older than it must see."""


class Stretch(list[int]):
    """A slice of words."""

    def tolist(self) -> list[int]:
        return list(self)


class StepWords(Stepped):
    """Stands where memoryview.cast("Q") does; one real access, then suspends."""

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
    """Memory, the writer's life, write and accesses, the reader's accesses."""

    words: tuple[int, ...]
    life: int
    write: int
    writer_done: tuple[Any, ...]
    version: int
    """Ghost: number of the last write that was completed; one under way may be seen already."""
    readers: tuple[tuple[tuple[Any, ...], int], ...]
    """Of each reader, its accesses and (ghost) `version` when it began; sorted, since they are alike."""


@dataclass
class SeqlockExplorer:
    """`lives`: the writes of each incarnation; `published[i]`: what write number i made, 0 = nothing yet.

    `read(words)` gives what the reader sees or raises BoardUnstable.
    """

    size: int
    lives: list[list[Write]]
    published: list[Any]
    read: Callable[[Any], Any]
    readers: int = 1
    states: int = 0
    steps: int = 0
    """Accesses made by the code under test; a reader's are made once for each memory it may meet."""
    seen: set[Any] = field(default_factory=set)
    _reads: dict[Any, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def run(self) -> SeqlockExplorer:
        """Visit every state; raises Torn for the first schedule in which the reader is deceived."""
        first = World((0,) * self.size, 0, 0, (), 0, (((), 0),) * self.readers)
        self.states = count_states(first, self._next)
        return self

    def _next(self, world: World) -> Iterator[World]:
        for reader in sorted(set(world.readers)):
            yield self._read_step(world, reader)
        if world.write < len(self.lives[world.life]):
            yield self._write_step(world)
        if world.life + 1 < len(self.lives):
            # Death at any step, also before the first and after the last.
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
        """One access more: (accesses so far, nothing) or (none, what was read)."""
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
