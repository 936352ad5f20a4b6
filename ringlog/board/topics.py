"""The topic table of a shard: facts about each topic that readers need without a request to the shard.

The shard writes it, and all processes of the engine read it. The shard assigns the slots. After a restart of
the shard a slot may have another topic. A reader therefore compares `topic_id` and `epoch` with the expected
values, and on a difference requests the slot again.
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
    """Contents of a slot. `state` is TOPIC_EMPTY, TOPIC_LIVE or TOPIC_DELETED. Times are in microseconds."""

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
    """Grows with every removal of records and every change of their place (X7)."""
    due_us: int = 0
    """Time at which the next record expires; 0 = never. From then on a reader must query the shard first."""
    ttl_us: int = 0
    """Age at which a record expires; 0 = never."""
    priority_word: int = 0
    """Encoded priority, see encode_priority."""


PRIORITY_AUTO = 0
PRIORITY_NONE = 1
_ORDER_BIAS = 1 << 16


def encode_priority(priority: int | None, *, is_auto: bool) -> int:
    """Encode a manual priority, or else whether the recency of consumption sets the priority."""
    if priority is not None:
        return _ORDER_BIAS + priority
    return PRIORITY_AUTO if is_auto else PRIORITY_NONE


def decode_priority(word: int) -> tuple[int, bool]:
    """Return (manual priority or 0, whether the recency of consumption sets the priority)."""
    if word in {PRIORITY_AUTO, PRIORITY_NONE}:
        return 0, word == PRIORITY_AUTO
    return word - _ORDER_BIAS, False


class TopicTable:
    """The topic table of one shard. It grows in chunks."""

    def __init__(self, dir: str, shard: int, *, writable: bool) -> None:
        self._dir = dir
        self._shard = shard
        self._writable = writable
        self._chunks: list[BoardFile] = []
        self._words: list[memoryview] = []
        self._free: list[int] = []

    @classmethod
    def create(cls, dir: str | os.PathLike[str], shard: int) -> TopicTable:
        """Open the shard's table for writing. Create it if there is none.

        A successor continues with the files of its predecessor. It calls `reset` before it publishes the
        recovered state. Raises BoardError if there is no space.
        """
        table = cls(os.fspath(dir), shard, writable=True)
        if not os.path.lexists(table._chunk_path(0)):
            table._make_chunk()
        table._map_all()
        table._adopt()
        return table

    @classmethod
    def open(cls, dir: str | os.PathLike[str], shard: int, writable: bool = False) -> TopicTable:
        """Map an existing table. Raise BoardError if there is none or it is not valid."""
        table = cls(os.fspath(dir), shard, writable=writable)
        table._map_all()
        if writable:
            table._adopt()
        return table

    # -- the shard ------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take the lowest free slot. Raise BoardError if memory for a new chunk is not available."""
        if not self._free:
            self._grow()
        return heapq.heappop(self._free)

    def ensure_free_slots(self, slots: int) -> int:
        """Grow by one chunk if fewer than `slots` slots are free. Return the number of free slots.

        Without memory for the chunk the table stays as it is.
        """
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
        """Clear a slot and make it free."""
        self._clear(slot)
        heapq.heappush(self._free, slot)

    def publish(self, slot: int, facts: TopicFacts) -> None:
        """Replace the contents of a slot."""
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
        """Clear every slot, including those that a dead writer left half written. Mappings stay valid.

        Returns the previous slot of each topic, by topic id, for `reserve_slots`.
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

    def reserve_slots(self, slots: Collection[int]) -> None:
        """Remove free slots from allocation, because readers know topics by these slots."""
        taken = set(slots)
        self._free = [slot for slot in self._free if slot not in taken]
        heapq.heapify(self._free)

    # -- readers --------------------------------------------------------------------------------------

    def read(self, slot: int) -> TopicFacts:
        """Return the contents of a slot as one consistent state (B1).

        Raises BoardUnstable if its writer does not finish in time, BoardError if there is no such slot.
        """
        words, at = self._slot(slot)
        for _ in range(seqlock.PLAIN_TRIES):
            before, *values = words[at : at + 1 + _FACT_WORDS].tolist()
            if words[at] == before and not before & 1:
                return _facts(values)
        values = seqlock.read(words, at, _FACT_WORDS, lambda: {"slot": slot, "shard": self._shard})
        return _facts(values)

    def sequence(self, slot: int) -> int:
        """Return a number that differs after each change of the slot. It is odd during a change.

        Raises BoardError if there is no such slot.
        """
        words, at = self._slot(slot)
        return words[at]

    def sequence_or_minus_one(self, slot: int) -> int:
        """Return `sequence` from any thread, or -1 for a slot that is not mapped."""
        if slot < 0:
            return -1
        try:
            return self._words[slot >> _CHUNK_SHIFT][_BASE + (slot & _CHUNK_MASK) * TOPIC_SLOT_WORDS]
        except (IndexError, ValueError):
            return -1

    def sequence_word(self, slot: int) -> tuple[memoryview, int]:
        """Return the place of `sequence` as (words, index), for a reader that polls it before each record.

        When the table is closed, the words are released, and reading them raises ValueError. Raises
        BoardError if there is no such slot.
        """
        return self._slot(slot)

    def read_words(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Return words 1 to 15 of many slots, (n, 15), and which of these rows are consistent.

        A slot outside of the table reads as empty.
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
        """Number of slots in the chunks mapped so far."""
        return len(self._chunks) * TOPICS_PER_CHUNK

    def close(self) -> None:
        """Unmap the table. Idempotent."""
        self._words.clear()
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()
        self._free.clear()

    # -- internals ------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> tuple[memoryview, int]:
        """Return (words of the chunk, index of the slot's sequence). Map new chunks if needed."""
        chunk = slot >> _CHUNK_SHIFT
        if slot >= 0 and chunk >= len(self._chunks):
            self._map_all()
        if not 0 <= chunk < len(self._chunks):
            raise BoardError(
                f"topic slot must be in 0..{self.capacity - 1}, got {slot}",
                slot=slot,
                shard=self._shard,
                slots=self.capacity,
            )
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
        """Become the table's writer. A slot that is half written is cleared, never completed (B2)."""
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
            raise BoardError(
                f"topic table is full: at most {CHUNKS_MAX * TOPICS_PER_CHUNK} topics per shard",
                shard=self._shard,
                slots=self.capacity,
            )
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
            raise BoardError(
                "topic table belongs to another shard or chunk, or has the wrong number of slots",
                path=path,
                shard=file.shard,
                chunk=file.chunk,
            )
        self._chunks.append(file)
        self._words.append(file.words)


def _facts(values: list[int]) -> TopicFacts:
    topic_id, epoch, packed, *rest = values
    state, bits = packed & 0xFFFFFFFF, packed >> _DURABILITY_SHIFT
    return TopicFacts._make((topic_id, epoch, state, *rest[:-4], bits, *rest[-4:]))
