"""The consumer's end of a ring: look, copy, and only when the work is done, settle.

Reading does not move the tail, so a consumer that dies leaves everything unsettled in the ring and its
successor reads it again. The consumer believes nothing in the shared words without a check, and never
reads back a word it writes itself: its producer may be broken or hostile and can then only damage its
own frames. Not for several threads at once.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.errors import RingError
from ringlog.ring.layout import SETTLE_WORDS, RingConsumerState, RingWord
from ringlog.ring.region import RingMemory, open_ring, require_engine

_LEN_BYTES = 4
"""Of a frame's length, which does not count itself."""


class RingConsumer:
    """One end of a ring. `capacity` is bytes, positions are bytes ever written."""

    def __init__(self, memory: RingMemory, path: str = "") -> None:
        self.identity = memory.identity
        self.path = path
        self.capacity = self.identity.capacity
        self._memory = memory
        self._tail = memory.load(RingWord.TAIL)
        self._settle_head = memory.load(RingWord.SETTLE_HEAD)
        self._read = self._head_seen = self._tail
        if self._tail & 7:
            raise self._nonsense(self._tail)
        self._load_head()
        self._require_settle_tail()
        self._pass_settled()

    @classmethod
    def attach(cls, path: str, *, shard: int | None = None, engine_id: str | None = None) -> RingConsumer:
        """Take the consumer's end; reading begins at the tail, with all that is not settled.

        Raises RingError when the file is not this shard's or engine's ring, its words make no sense, or the
        consumer's end was closed. That no two consumers exist is the business of whoever starts shards.
        """
        fd, memory = open_ring(path)
        os.close(fd)
        try:
            require_engine(memory.identity, engine_id, path)
            if shard is not None and memory.identity.shard != shard:
                raise RingError(
                    "ring of another shard", path=path, found=memory.identity.shard, expected=shard
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
        """Bytes, padding included, between the read position and the head.

        Raises RingError when the producer's words make no sense.
        """
        return self._load_head() - self._read

    def spin_word(self) -> tuple[memoryview, int]:
        """A word, and its value as long as nothing is pending: for looking on."""
        return self._memory.word(RingWord.HEAD), self._read

    def copy_pending(self, limit: int) -> tuple[int, bytearray] | None:
        """Private copy of what lies from the read position up to `limit` bytes, the head or the lap's end.

        Returns (position of the first byte, bytes), or None when nothing is pending. Does not advance.
        """
        head = self._load_head()
        index = self._read % self.capacity
        length = min(limit & ~7, head - self._read, self.capacity - index)
        if length <= 0:
            return None
        return self._read, self._memory.read(index, length)

    def advance(self, nbytes: int) -> None:
        """Move the read position over frames that were copied; the tail stays."""
        lap_left = self.capacity - self._read % self.capacity
        if nbytes < 0 or nbytes & 7 or nbytes > min(lap_left, self._head_seen - self._read):
            raise RingError(
                "advance beyond what there is",
                bytes=nbytes,
                read=self._read,
                head=self._head_seen,
                path=self.path,
            )
        self._read += nbytes

    def skip_lap(self) -> None:
        """Move the read position to the next lap: the scanner met padding there."""
        index = self._read % self.capacity
        target = self._read - index + self.capacity
        if index == 0 or target >= self._load_head():
            # A pad never fills a lap, and is published together with the frame that follows it.
            raise RingError(
                "padding where none can be", read=self._read, head=self._head_seen, path=self.path
            )
        self._read = target

    @property
    def tail(self) -> int:
        """Position after the last settled frame."""
        return self._tail

    @property
    def read_position(self) -> int:
        """Position of the next byte that copy gives."""
        return self._read

    # -- settling -------------------------------------------------------------------------------------

    @property
    def settle_free(self) -> int:
        """Entries that may be settled now; the producer makes room by taking settlements."""
        return self.identity.settle_entries - (self._settle_head - self._require_settle_tail())

    def settle(self, entries: NDArray[np.uint64], new_tail: int) -> None:
        """Hand the producer the fate of its oldest frames, (n, 8) uint64, and give their room back.

        `new_tail` is the position after the last of them, padding behind it optional. With no entries only
        the room is given back: for a producer that is dead and takes no settlements any more. Raises
        RingError when the entries do not fit (ask settle_free) or the tail would leave what was read.
        """
        count = len(entries)
        if not self._tail <= new_tail <= self._read or new_tail & 7:
            raise RingError("tail outside what was read", tail=self._tail, new_tail=new_tail, read=self._read)
        if entries.shape[1:] != (SETTLE_WORDS,) or entries.dtype != np.uint64:
            raise RingError("settle entries are (n, 8) uint64", shape=entries.shape, dtype=str(entries.dtype))
        if count > self.settle_free:
            raise RingError("no room for settlements", entries=count, free=self.settle_free, path=self.path)
        if count:
            self._write_entries(entries)
            self._settle_head += count
            self._memory.store(RingWord.SETTLE_HEAD, self._settle_head)
        stop_points.hit("settle_before_tail")
        # Last: whoever dies before this line settles again, which the producer recognises by position.
        self._tail = new_tail
        self._memory.store(RingWord.TAIL, new_tail)

    @property
    def wakeup_flags(self) -> int:
        """What the client wants to be woken for (layout.Wants)."""
        return self._memory.load(RingWord.WANTS)

    def close(self) -> None:
        """Say for good that nothing more will be read: the ring is corrupt.

        What was read may still be settled. Detach afterwards; no consumer attaches to this ring again.
        """
        self._memory.store(RingWord.CONSUMER_STATE, RingConsumerState.CLOSED)

    def detach(self) -> None:
        """Unmap without a word: the ring stays as it is. Idempotent; other calls then raise RingError."""
        self._memory.close()

    # -- inside ---------------------------------------------------------------------------------------

    def _pass_settled(self) -> None:
        """A predecessor died between its settlements and its tail: what they settled is not read again.

        A frame that was refused, and that its producer sends again under another number, could be taken this
        time. Words that make no sense change nothing: only its own frames are in the producer's hands.
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
        self._memory.store(RingWord.TAIL, stop)

    def _load_head(self) -> int:
        """Load the head and check it against everything we know ourselves."""
        head = self._memory.load(RingWord.HEAD)
        if head < self._head_seen or head - self._tail > self.capacity or head & 7:
            raise self._nonsense(head)
        self._head_seen = head
        return head

    def _nonsense(self, head: int) -> RingError:
        return RingError(
            "ring words make no sense", path=self.path, head=head, head_before=self._head_seen,
            tail=self._tail, read=self._read, capacity=self.capacity,
        )  # fmt: skip

    def _require_settle_tail(self) -> int:
        tail = self._memory.load(RingWord.SETTLE_TAIL)
        if not 0 <= self._settle_head - tail <= self.identity.settle_entries:
            raise RingError(
                "ring words make no sense", path=self.path, settle_head=self._settle_head, settle_tail=tail,
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
