"""Shared memory of one ring, one access at a time, for the explorer of ring.py; and stores seen late."""

from __future__ import annotations

from typing import Any, NamedTuple

from chaos.schedules.stepping import Stepped
from ringlog.ring.layout import RingIdentity, RingWord

WORDS = tuple(RingWord)
Frozen = tuple[tuple[str, Any], ...]
Store = tuple[str, int, Any]
"""(which part of the memory, where in it, what)."""


class Side(NamedTuple):
    """One end: `private` is None while it is dead; `done` holds the accesses of the operation under way."""

    private: Frozen | None
    op: str = ""
    start: Frozen = ()
    done: tuple[Any, ...] = ()
    settled: tuple[int, ...] = ()
    """Producer only: positions this life was told about, in order."""
    base: tuple[int, int] = (0, 1)
    """Producer only: (frames in the ring's past, number of the next frame) when this life began."""


class World(NamedTuple):
    """Everything: shared memory, the durable log, both ends, and what the checker knows (ghosts)."""

    words: tuple[int, ...]
    data: bytes
    entries: bytes
    log: tuple[int, ...]
    producer: Side
    consumer: Side
    intended: tuple[int, ...]
    """Ghost: number of the frame last meant to be pushed at each frame-sized place, by position order."""
    told: tuple[tuple[int, int], ...]
    """Ghost: (frame, first_seq) of every settlement any life of the producer took."""
    producer_crashes: int
    consumer_crashes: int
    producer_buffer: tuple[Store, ...] = ()
    """Stores of the producer that the consumer does not see yet, oldest first."""
    consumer_buffer: tuple[Store, ...] = ()


def changed(world: World, **changes: Any) -> World:
    """The world with some fields changed, whatever they are called."""
    return world._replace(**changes)


class StepMemory(Stepped):
    """Stands where RingMemory does, for one side; makes one real access, then suspends."""

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
        for store in self.buffer:  # A side sees its own stores at once.
            self._apply(store)

    def load(self, word: int) -> int:
        """As RingMemory."""
        return int(self.access(lambda: self.words[WORDS.index(RingWord(word))]))

    def store(self, word: int, value: int) -> None:
        """As RingMemory."""
        self._store("words", WORDS.index(RingWord(word)), int(value))

    def read(self, index: int, length: int) -> bytearray:
        """As RingMemory."""
        return bytearray(self.access(lambda: bytes(self.data[index : index + length])))

    def write(self, index: int, data: Any) -> None:
        """As RingMemory, 8 bytes a step."""
        for at in range(0, len(data), 8):
            self._store("data", index + at, bytes(data[at : at + 8]))

    def read_entries(self, slot: int, count: int) -> bytearray:
        """As RingMemory."""
        return bytearray(self.access(lambda: bytes(self.entries[slot * 64 : (slot + count) * 64])))

    def write_entries(self, slot: int, entries: Any) -> None:
        """As RingMemory, half an entry a step."""
        for at in range(0, len(entries), 32):
            self._store("entries", slot * 64 + at, bytes(entries[at : at + 32]))

    def commit(self, number: int) -> int:
        """Append a frame to the durable log unless it is there; returns its first_seq."""
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
        """The world after this step: a store is seen by all, or waits in this side's buffer."""
        world = self.world._replace(log=tuple(self.log))
        if self.late:
            return changed(world, **{f"{self.who}_buffer": tuple(self.buffer)})
        return world._replace(words=tuple(self.words), data=bytes(self.data), entries=bytes(self.entries))


def let_go(world: World, who: str, index: int = 0) -> World:
    """The other side sees one of the stores that wait in this side's buffer."""
    waiting: tuple[Store, ...] = getattr(world, f"{who}_buffer")
    part, at, value = waiting[index]
    left = {f"{who}_buffer": (*waiting[:index], *waiting[index + 1 :])}
    old = getattr(world, part)
    if part == "words":
        return changed(world, **left, words=(*old[:at], value, *old[at + 1 :]))
    return changed(world, **left, **{part: old[:at] + value + old[at + len(value) :]})


def drained(world: World, who: str) -> World:
    """All of them seen: stores of a process that died are not lost, the processor has them."""
    while getattr(world, f"{who}_buffer"):
        world = let_go(world, who)
    return world
