"""The consumer's end of a ring: read and copy frames, and settle them only when they are processed.

Reading does not move the tail. If a consumer dies, all unsettled frames stay in the ring, and its successor
reads them again. The consumer checks every shared word of the producer before use, and never reads back a
word that it writes itself. A broken or hostile producer can therefore damage only its own frames (R4). Not
thread-safe.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.errors import RingError
from ringlog.ring.layout import SETTLE_WORDS, RingConsumerState, RingIdentity, RingWord
from ringlog.ring.memory import RingMemory
from ringlog.ring.region import open_ring, require_engine

_LEN_BYTES = 4
"""Size of a frame's length field, which the length does not include."""
# In Python 3.11 access to a member of an Enum takes 70 ns.
_HEAD: Final[int] = RingWord.HEAD.value
_TAIL: Final[int] = RingWord.TAIL.value
_SETTLE_HEAD: Final[int] = RingWord.SETTLE_HEAD.value
_SETTLE_TAIL: Final[int] = RingWord.SETTLE_TAIL.value
_WANTS: Final[int] = RingWord.WANTS.value


class RingConsumer:
    """The consumer's end. `capacity` is in bytes. Positions are the number of bytes ever written."""

    def __init__(self, memory: RingMemory, path: str = "") -> None:
        self.identity: RingIdentity = memory.identity
        self.path: str = path
        self.capacity: int = self.identity.capacity
        self._memory = memory
        self._tail = memory.load(_TAIL)
        self._settle_head = memory.load(_SETTLE_HEAD)
        self._read = self._head_seen = self._tail
        if self._tail & 7:
            raise self._corrupt_header(self._tail)
        self._load_head()
        self._require_settle_tail()
        self._skip_settled()

    @classmethod
    def attach(cls, path: str, *, shard: int | None = None, engine_id: str | None = None) -> RingConsumer:
        """Attach to a ring. Reading begins at the tail, with all unsettled frames.

        Raises RingError if the ring belongs to another shard or engine, if its words are invalid, or if it
        was closed by its consumer. The supervisor must ensure that a ring has only one consumer.
        """
        fd, memory = open_ring(path)
        os.close(fd)
        try:
            require_engine(memory.identity, engine_id, path)
            if shard is not None and memory.identity.shard != shard:
                raise RingError(
                    "ring belongs to another shard", path=path, found=memory.identity.shard, expected=shard
                )
            if memory.load(RingWord.CONSUMER_STATE) == RingConsumerState.CLOSED:
                raise RingError("the ring was closed by its consumer", path=path)
            return cls(memory, path)
        except BaseException:
            memory.close()
            raise

    # -- reading --------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of bytes, padding included, between the read position and the head.

        Raises RingError if the producer's words are invalid.
        """
        return self._load_head() - self._read

    def spin_word(self) -> tuple[memoryview, int]:
        """Return (word, value) for polling: the word has this value while no frame is pending."""
        return self._memory.word(_HEAD), self._read

    def copy_pending(self, limit: int) -> tuple[int, bytearray] | None:
        """Copy pending bytes up to `limit` bytes, the head, or the end of the data area.

        Returns (position of the first byte, bytes), or None if no byte is pending. Does not move the read
        position.
        """
        head = self._load_head()
        index = self._read % self.capacity
        length = min(limit & ~7, head - self._read, self.capacity - index)
        if length <= 0:
            return None
        return self._read, self._memory.read(index, length)

    def advance(self, nbytes: int) -> None:
        """Move the read position past copied frames. The tail stays."""
        lap_left = self.capacity - self._read % self.capacity
        most = min(lap_left, self._head_seen - self._read)
        if nbytes < 0 or nbytes & 7 or nbytes > most:
            raise RingError(
                f"nbytes must be a multiple of 8 in 0..{most}, got {nbytes}",
                bytes=nbytes,
                read=self._read,
                head=self._head_seen,
                path=self.path,
            )
        self._read += nbytes

    def skip_padding(self) -> None:
        """Move the read position to the start of the data area, because the scan found padding."""
        index = self._read % self.capacity
        target = self._read - index + self.capacity
        if index == 0 or target >= self._load_head():
            # Padding never fills a whole lap, and is published together with the frame after it.
            raise RingError("unexpected ring padding", read=self._read, head=self._head_seen, path=self.path)
        self._read = target

    @property
    def tail(self) -> int:
        """Position after the last settled frame."""
        return self._tail

    @property
    def read_position(self) -> int:
        """Position of the next byte that copy_pending returns."""
        return self._read

    # -- settling -------------------------------------------------------------------------------------

    @property
    def settle_free(self) -> int:
        """Number of entries that can be settled now. The producer frees space by taking settlements."""
        return self.identity.settle_entries - (self._settle_head - self._require_settle_tail())

    def settle(self, entries: NDArray[np.uint64], new_tail: int) -> None:
        """Send the producer the results of its oldest frames, (n, 8) uint64, and free their space (R6).

        `new_tail` is the position after the last of these frames; padding after it may be included. Without
        entries the call only frees space, for a producer that died and takes no settlements. Raises RingError
        if the entries do not fit (see settle_free), or if the tail would leave the range that was read.
        """
        count = len(entries)
        if not self._tail <= new_tail <= self._read or new_tail & 7:
            raise RingError(
                f"new_tail must be a multiple of 8 in {self._tail}..{self._read}, got {new_tail}",
                tail=self._tail,
                new_tail=new_tail,
                read=self._read,
            )
        if entries.shape[1:] != (SETTLE_WORDS,) or entries.dtype != np.uint64:
            raise RingError(
                f"settle entries must be uint64 of shape (n, {SETTLE_WORDS})",
                shape=entries.shape,
                dtype=str(entries.dtype),
            )
        free = self.settle_free
        if count > free:
            raise RingError(
                f"settle area has {free} free entries, got {count}", entries=count, free=free, path=self.path
            )
        if count:
            self._write_entries(entries)
            self._settle_head += count
            self._memory.store(_SETTLE_HEAD, self._settle_head)
        stop_points.hit("settle_before_tail")
        # The tail is stored last. After a crash before this line the successor settles again, and the
        # producer recognises the repeated entries by position.
        self._tail = new_tail
        self._memory.store(_TAIL, new_tail)

    @property
    def wakeup_flags(self) -> int:
        """Events for which the client wants to be woken up (layout.WakeupFlags)."""
        return self._memory.load(_WANTS)

    def close(self) -> None:
        """Mark the ring permanently as corrupt: the consumer reads nothing more.

        Frames that were read may still be settled. Call detach afterwards. No consumer can attach again.
        """
        self._memory.store(RingWord.CONSUMER_STATE, RingConsumerState.CLOSED)

    def detach(self) -> None:
        """Unmap the ring and leave its words unchanged. Idempotent. Later calls raise RingError."""
        self._memory.close()

    # -- internals ------------------------------------------------------------------------------------

    def _skip_settled(self) -> None:
        """Skip frames whose settlement is written but not in the tail, because the predecessor died (R8).

        The successor must not accept a frame that was refused: the producer may have sent it again under
        another number. Invalid words are ignored, because they can affect only the producer's own frames.
        """
        if not self._settle_head:
            return
        slot = (self._settle_head - 1) % self.identity.settle_slots
        last = int.from_bytes(self._memory.read_entries(slot, 1)[:8], "little")
        if last & 7 or not self._tail <= last < self._head_seen:
            return
        index = last % self.capacity
        stop = last + int.from_bytes(self._memory.read(index, 4), "little") + _LEN_BYTES
        if stop & 7 or not last < stop <= min(self._head_seen, last - index + self.capacity):
            return
        self._tail = self._read = stop
        self._memory.store(_TAIL, stop)

    def _load_head(self) -> int:
        """Load the head and check it against the positions known to this consumer."""
        head = self._memory.load(_HEAD)
        if head < self._head_seen or head - self._tail > self.capacity or head & 7:
            raise self._corrupt_header(head)
        self._head_seen = head
        return head

    def _corrupt_header(self, head: int) -> RingError:
        return RingError(
            "corrupt ring header", path=self.path, head=head, head_before=self._head_seen,
            tail=self._tail, read=self._read, capacity=self.capacity,
        )  # fmt: skip

    def _require_settle_tail(self) -> int:
        tail = self._memory.load(_SETTLE_TAIL)
        if not 0 <= self._settle_head - tail <= self.identity.settle_entries:
            raise RingError(
                "corrupt ring header", path=self.path, settle_head=self._settle_head, settle_tail=tail,
                settle_entries=self.identity.settle_entries,
            )  # fmt: skip
        return tail

    def _write_entries(self, entries: NDArray[np.uint64]) -> None:
        slots = self.identity.settle_slots
        slot = self._settle_head % slots
        first = slots - slot
        self._memory.write_entries(slot, entries[:first].tobytes())
        if first < len(entries):
            self._memory.write_entries(0, entries[first:].tobytes())
