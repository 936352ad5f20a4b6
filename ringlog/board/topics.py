"""The topic table of a shard: what a reader must know about each topic, without asking the shard.

The shard writes, anybody of ours reads. Slots are handed out by the shard and may hold another topic after
it restarted, so a reader compares `topic_id` and `epoch` with what it expects and otherwise asks again.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.board import layout, seqlock
from ringlog.board.layout import TOPIC_SLOT_WORDS, TOPICS_PER_CHUNK, BoardError, BoardUnstable
from ringlog.board.mapping import BoardFile, make_board_file

__all__ = ["TOPIC_DELETED", "TOPIC_EMPTY", "TOPIC_LIVE", "BoardUnstable", "TopicFacts", "TopicTable"]

TOPIC_EMPTY = 0
TOPIC_LIVE = 1
TOPIC_DELETED = 2
CHUNKS_MAX = 256

_BASE = layout.PAGE_BYTES // 8
_FACT_WORDS = 15
_CHUNK_SHIFT = TOPICS_PER_CHUNK.bit_length() - 1
_CHUNK_MASK = TOPICS_PER_CHUNK - 1
_DURABILITY_SHIFT = layout.TOPIC_DURABILITY_SHIFT


class TopicFacts(NamedTuple):
    """What a slot says. `state` is TOPIC_EMPTY, TOPIC_LIVE or TOPIC_DELETED; seqs and floors as in reads."""

    topic_id: int
    epoch: int
    state: int
    head_seq: int
    earliest_seq: int
    cap_floor: int
    ttl_floor: int
    trim_floor: int
    count: int  # type: ignore[assignment]
    bytes: int
    last_write_us: int
    durability_bits: int
    version: int = 0
    """Grows with every removal and every change of where records lie."""
    due_us: int = 0
    """When the next record expires; at or after it a reader asks the shard before it goes on. 0 = never."""
    ttl_us: int = 0
    """A record older than this is expired; 0 = never."""
    priority_word: int = 0
    """What its value follows from; see encode_priority."""


PRIORITY_AUTO = 0
PRIORITY_NONE = 1
_ORDER_BIAS = 1 << 16


def encode_priority(priority: int | None, *, is_auto: bool) -> int:
    """The `order` word: a manual priority, or else whether recency of consumption counts (P-1)."""
    if priority is not None:
        return _ORDER_BIAS + priority
    return PRIORITY_AUTO if is_auto else PRIORITY_NONE


def decode_priority(word: int) -> tuple[int, bool]:
    """(manual priority, 0 when there is none; whether recency counts)."""
    if word in {PRIORITY_AUTO, PRIORITY_NONE}:
        return 0, word == PRIORITY_AUTO
    return word - _ORDER_BIAS, False


class TopicTable:
    """One shard's table, grown chunk by chunk."""

    def __init__(self, dir: str, shard: int, *, writable: bool) -> None:
        self._dir = dir
        self._shard = shard
        self._writable = writable
        self._chunks: list[BoardFile] = []
        self._words: list[memoryview] = []
        self._free: list[int] = []

    @classmethod
    def create(cls, dir: str | os.PathLike[str], shard: int) -> TopicTable:
        """Open the shard's table for writing, made if there is none. A successor goes on with the same files.

        It calls `reset` before it publishes what recovery found. Raises BoardError when there is no room.
        """
        table = cls(os.fspath(dir), shard, writable=True)
        if not os.path.lexists(table._chunk_path(0)):
            table._make_chunk()
        table._map_all()
        table._adopt()
        return table

    @classmethod
    def open(cls, dir: str | os.PathLike[str], shard: int, writable: bool = False) -> TopicTable:
        """Map a table that exists; raises BoardError when there is none or it is not ours."""
        table = cls(os.fspath(dir), shard, writable=writable)
        table._map_all()
        if writable:
            table._adopt()
        return table

    # -- the shard ------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take the lowest free slot; raises BoardError when a new chunk does not fit in memory."""
        if not self._free:
            self._grow()
        return heapq.heappop(self._free)

    def ensure_free_slots(self, slots: int) -> int:
        """Grow the table until so many slots are free, if memory has room; returns how many are."""
        if len(self._free) < slots:
            with contextlib.suppress(BoardError):
                self._grow()
        return len(self._free)

    def _grow(self) -> None:
        self._make_chunk()
        self._map_chunk()
        first = (len(self._chunks) - 1) * TOPICS_PER_CHUNK
        for slot in range(first, first + TOPICS_PER_CHUNK):
            heapq.heappush(self._free, slot)

    def release(self, slot: int) -> None:
        """Empty a slot and give it back."""
        self._clear(slot)
        heapq.heappush(self._free, slot)

    def publish(self, slot: int, facts: TopicFacts) -> None:
        """Replace everything a slot says."""
        (
            topic_id, epoch, state, head_seq, earliest, cap, ttl, trim, count, size, last, bits, version,
            due_us, ttl_us, order,
        ) = facts  # fmt: skip
        words = self._words[slot >> _CHUNK_SHIFT]
        at = _BASE + (slot & _CHUNK_MASK) * TOPIC_SLOT_WORDS
        odd = words[at] | 1
        words[at] = odd
        words[at + 1] = topic_id
        words[at + 2] = epoch
        words[at + 3] = state | bits << _DURABILITY_SHIFT
        words[at + 4] = head_seq
        words[at + 5] = earliest
        words[at + 6] = cap
        words[at + 7] = ttl
        words[at + 8] = trim
        words[at + 9] = count
        words[at + 10] = size
        words[at + 11] = last
        words[at + 12], words[at + 13], words[at + 14], words[at + 15] = version, due_us, ttl_us, order
        words[at] = odd + 1

    def reset(self) -> dict[int, int]:
        """Empty every slot, also those a dead writer left half written. Readers keep their mappings.

        Returns which topic had which slot, by topic id, for `keep`.
        """
        had: dict[int, int] = {}
        for slot in range(len(self._chunks) * TOPICS_PER_CHUNK):
            if self._is_used(slot):
                words, at = self._slot(slot)
                had[words[at + 1]] = slot
                self._clear(slot)
        had.pop(0, None)
        self._find_free()
        return had

    def mark_slots_used(self, slots: Collection[int]) -> None:
        """These are free and are not to be allocated: their topics are known to readers by them."""
        taken = set(slots)
        self._free = [slot for slot in self._free if slot not in taken]
        heapq.heapify(self._free)

    # -- anybody --------------------------------------------------------------------------------------

    def read(self, slot: int) -> TopicFacts:
        """What a slot says, all from one moment.

        Raises BoardUnstable when its writer does not finish in time, BoardError when there is no such slot.
        """
        words, at = self._slot(slot)
        for _ in range(seqlock.PLAIN_TRIES):
            before, *values = words[at : at + 1 + _FACT_WORDS].tolist()
            if words[at] == before and not before & 1:
                return _facts(values)
        values = seqlock.read(words, at, _FACT_WORDS, lambda: {"slot": slot, "shard": self._shard})
        return _facts(values)

    def sequence(self, slot: int) -> int:
        """Another number after each change of what a slot says; odd while it is being changed.

        Raises BoardError when there is no such slot.
        """
        words, at = self._slot(slot)
        return words[at]

    def peek(self, slot: int) -> int:
        """As `sequence`, for any thread: -1 for a slot that is not mapped yet, or not any more."""
        if slot < 0:
            return -1
        try:
            return self._words[slot >> _CHUNK_SHIFT][_BASE + (slot & _CHUNK_MASK) * TOPIC_SLOT_WORDS]
        except (IndexError, ValueError):
            return -1

    def sequence_word(self, slot: int) -> tuple[memoryview, int]:
        """Where `sequence` lies: (words, index), for a reader that looks before each record.

        The words are released when the table is closed: reading them raises ValueError then. Raises
        BoardError when there is no such slot.
        """
        return self._slot(slot)

    def read_words(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Words 1 to 15 of many slots, (n, 15), and which of them are all from one moment.

        A slot that there is no room for reads as an empty one.
        """
        if len(slots) and int(slots.max()) >= self.capacity:
            self._map_all()
        found = np.zeros((len(slots), _FACT_WORDS), dtype=np.uint64)
        is_whole = np.ones(len(slots), dtype=bool)
        chunks = slots >> _CHUNK_SHIFT
        for chunk in np.unique(chunks).tolist():
            if not 0 <= chunk < len(self._chunks):
                continue
            rows = np.flatnonzero(chunks == chunk)
            table = np.frombuffer(self._words[chunk], dtype=np.uint64)[_BASE:].reshape(-1, TOPIC_SLOT_WORDS)
            at = slots[rows] & _CHUNK_MASK
            before = table[at, 0]
            found[rows] = table[at, 1:]
            is_whole[rows] = (table[at, 0] == before) & (before & 1 == 0)
        return found, is_whole

    @property
    def capacity(self) -> int:
        """Slots there is room for in the chunks mapped so far."""
        return len(self._chunks) * TOPICS_PER_CHUNK

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._words.clear()
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()
        self._free.clear()

    # -- inside ---------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> tuple[memoryview, int]:
        """(words of the chunk, index of the slot's sequence); maps chunks made since the last look."""
        chunk = slot >> _CHUNK_SHIFT
        if slot >= 0 and chunk >= len(self._chunks):
            self._map_all()
        if not 0 <= chunk < len(self._chunks):
            raise BoardError("no such topic slot", slot=slot, shard=self._shard, slots=self.capacity)
        return self._words[chunk], _BASE + (slot & _CHUNK_MASK) * TOPIC_SLOT_WORDS

    def _is_used(self, slot: int) -> bool:
        words, at = self._slot(slot)
        return bool(words[at] & 1 or words[at + 1] or words[at + 3])

    def _clear(self, slot: int) -> None:
        words, at = self._slot(slot)
        seqlock.write(words, at, [0] * _FACT_WORDS)

    def _find_free(self) -> None:
        self._free = [slot for slot in range(self.capacity) if not self._is_used(slot)]

    def _adopt(self) -> None:
        """Become the table's writer: a slot left half written is emptied, never completed."""
        for slot in range(self.capacity):
            words, at = self._slot(slot)
            if words[at] & 1:
                self._clear(slot)
        self._find_free()

    def _chunk_path(self, chunk: int) -> str:
        return os.path.join(self._dir, layout.chunk_name(self._shard, chunk))

    def _make_chunk(self) -> None:
        chunk = len(self._chunks)
        if chunk >= CHUNKS_MAX:
            raise BoardError("topic table is full", shard=self._shard, slots=self.capacity)
        identity = layout.encode_identity(layout.TOPICS_MAGIC, self._shard, TOPICS_PER_CHUNK, chunk)
        make_board_file(self._chunk_path(chunk), layout.CHUNK_BYTES, identity)

    def _map_all(self) -> None:
        if not self._chunks:
            self._map_chunk()
        while os.path.lexists(self._chunk_path(len(self._chunks))):
            self._map_chunk()

    def _map_chunk(self) -> None:
        chunk = len(self._chunks)
        path = self._chunk_path(chunk)
        file = BoardFile(path, layout.TOPICS_MAGIC, writable=self._writable)
        if (file.shard, file.chunk, file.slots) != (self._shard, chunk, TOPICS_PER_CHUNK):
            file.close()
            raise BoardError("topic table of another shard", path=path, shard=file.shard, chunk=file.chunk)
        self._chunks.append(file)
        self._words.append(file.words)


def _facts(values: list[int]) -> TopicFacts:
    topic_id, epoch, packed, *rest = values
    state, bits = packed & 0xFFFFFFFF, packed >> _DURABILITY_SHIFT
    return TopicFacts._make((topic_id, epoch, state, *rest[:-4], bits, *rest[-4:]))
