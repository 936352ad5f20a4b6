"""Shared memory of one ring for the explorer of ring.py: one access at a time, with stores seen late."""

from __future__ import annotations

from typing import Any, NamedTuple

from chaos.schedules.stepping import Stepped
from ringlog.ring.layout import RingIdentity, RingWord

WORDS = tuple(RingWord)
Frozen = tuple[tuple[str, Any], ...]
Store = tuple[str, int, Any]
"""(part of the memory, index, value)."""


class Side(NamedTuple):
    """One side of the ring.

    `private` is its private state, or None while it is dead. `done` has the results of the accesses of the
    current operation.
    """

    private: Frozen | None
    op: str = ""
    start: Frozen = ()
    done: tuple[Any, ...] = ()
    settled: tuple[int, ...] = ()
    """Producer only: positions whose settlements this life received, in order."""
    base: tuple[int, int] = (0, 1)
    """Producer only: (frames published before, number of the next frame) at the start of this life."""


class World(NamedTuple):
    """Complete state: shared memory, durable log, both sides, and the checker's data (ghost fields)."""

    words: tuple[int, ...]
    data: bytes
    entries: bytes
    log: tuple[int, ...]
    producer: Side
    consumer: Side
    intended: tuple[int, ...]
    """Ghost: number of the frame that was last pushed at each frame-sized place, in order of position."""
    told: tuple[tuple[int, int], ...]
    """Ghost: (frame, first_seq) of every settlement that any life of the producer received."""
    producer_crashes: int
    consumer_crashes: int
    producer_buffer: tuple[Store, ...] = ()
    """Stores of the producer that the consumer does not see yet, oldest first."""
    consumer_buffer: tuple[Store, ...] = ()


def changed(world: World, **changes: Any) -> World:
    """Return the world with some fields changed. Unlike `_replace`, field names may be computed."""
    return world._replace(**changes)


class StepMemory(Stepped):
    """Replaces RingMemory for one side. It performs one real access, then suspends the operation."""

    closed = False

    def __init__(
        self, world: World, who: str, identity: RingIdentity, late: int, done: tuple[Any, ...]
    ) -> None:
        super().__init__(done)
        self.identity = identity
        self.world, self.who, self.late = world, who, late
        self.words, self.data, self.entries = (
            list(world.words), bytearray(world.data), bytearray(world.entries),
        )  # fmt: skip
        self.log = list(world.log)
        self.buffer: list[Store] = list(getattr(world, f"{who}_buffer"))
        for store in self.buffer:  # A side sees its own stores immediately.
            self._apply(store)

    def load(self, word: int) -> int:
        """Load a word, as RingMemory does."""
        return int(self.access(lambda: self.words[WORDS.index(RingWord(word))]))

    def store(self, word: int, value: int) -> None:
        """Store a word, as RingMemory does."""
        self._store("words", WORDS.index(RingWord(word)), int(value))

    def read(self, index: int, length: int) -> bytearray:
        """Read bytes, as RingMemory does."""
        return bytearray(self.access(lambda: bytes(self.data[index : index + length])))

    def write(self, index: int, data: Any) -> None:
        """Write bytes, as RingMemory does, 8 bytes for each step."""
        for at in range(0, len(data), 8):
            self._store("data", index + at, bytes(data[at : at + 8]))

    def read_entries(self, slot: int, count: int) -> bytearray:
        """Read settle entries, as RingMemory does."""
        return bytearray(self.access(lambda: bytes(self.entries[slot * 64 : (slot + count) * 64])))

    def write_entries(self, slot: int, entries: Any) -> None:
        """Write settle entries, as RingMemory does, half an entry for each step."""
        for at in range(0, len(entries), 32):
            self._store("entries", slot * 64 + at, bytes(entries[at : at + 32]))

    def commit(self, number: int) -> int:
        """Append a frame to the durable log unless it is in it; return its first_seq."""
        return int(self.access(lambda: self._commit(number)))

    def _commit(self, number: int) -> int:
        if number not in self.log:
            self.log.append(number)
        return self.log.index(number) + 1

    def _store(self, part: str, at: int, value: Any) -> None:
        self.access(lambda: self._put((part, at, value)))

    def _put(self, store: Store) -> None:
        self.buffer.append(store)
        self._apply(store)

    def _apply(self, store: Store) -> None:
        part, at, value = store
        if part == "words":
            self.words[at] = value
        else:
            getattr(self, part)[at : at + len(value)] = value

    def after(self) -> World:
        """Return the world after this step. A new store is visible, or is in this side's buffer."""
        world = self.world._replace(log=tuple(self.log))
        if self.late:
            return changed(world, **{f"{self.who}_buffer": tuple(self.buffer)})
        return world._replace(words=tuple(self.words), data=bytes(self.data), entries=bytes(self.entries))


def let_go(world: World, who: str, index: int = 0) -> World:
    """Make one buffered store of a side visible to the other side."""
    waiting: tuple[Store, ...] = getattr(world, f"{who}_buffer")
    part, at, value = waiting[index]
    left = {f"{who}_buffer": (*waiting[:index], *waiting[index + 1 :])}
    old = getattr(world, part)
    if part == "words":
        return changed(world, **left, words=(*old[:at], value, *old[at + 1 :]))
    return changed(world, **left, **{part: old[:at] + value + old[at + len(value) :]})


def drained(world: World, who: str) -> World:
    """Make all buffered stores of a side visible. If a process dies, the CPU still completes its stores."""
    while getattr(world, f"{who}_buffer"):
        world = let_go(world, who)
    return world
