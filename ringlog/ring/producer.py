"""The producer's end of a ring: publish whole frames and receive their settlements.

The producer writes the body first and the head word last, so a frame is published completely or not at all
(R2). After a crash, the next producer of the ring continues at the words of the first. Bytes beyond the head
are ignored. Not thread-safe.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.clock import Clock, SystemClock
from ringlog.errors import RingError
from ringlog.limits import RING_FRAME_FRACTION
from ringlog.ring.layout import (
    PAD_BYTES,
    PAD_WORD,
    SETTLE_WORDS,
    RingConsumerState,
    RingIdentity,
    RingProducerState,
    RingWord,
)
from ringlog.ring.memory import RingMemory
from ringlog.ring.region import ProducerLock, lock_for_producer, open_ring, require_engine

_NO_ENTRIES: NDArray[np.uint64] = np.empty((0, SETTLE_WORDS), dtype=np.uint64)
# In Python 3.11 access to a member of an Enum takes 70 ns.
_HEAD: Final[int] = RingWord.HEAD.value
_TAIL: Final[int] = RingWord.TAIL.value
_SETTLE_HEAD: Final[int] = RingWord.SETTLE_HEAD.value
_SETTLE_TAIL: Final[int] = RingWord.SETTLE_TAIL.value
_WANTS: Final[int] = RingWord.WANTS.value
_CONSUMER_STATE: Final[int] = RingWord.CONSUMER_STATE.value
_OPEN: Final[int] = RingConsumerState.OPEN.value


class RingProducer:
    """The producer's end. `capacity` and `frame_bytes_max` are in bytes, `settle_entries` in frames."""

    def __init__(self, memory: RingMemory, lock: ProducerLock | None = None, path: str = "") -> None:
        self.identity: RingIdentity = memory.identity
        self.path: str = path
        self.capacity: int = self.identity.capacity
        self.settle_entries: int = self.identity.settle_entries
        self.frame_bytes_max: int = self.capacity // RING_FRAME_FRACTION
        self._memory = memory
        self._lock = lock or ProducerLock()
        self._is_closed = False
        self._head = memory.load(_HEAD)
        self._settle_tail = memory.load(_SETTLE_TAIL)
        # Load the tail before settle_head: every frame below this tail is then among the entries read later.
        self._tail_seen = memory.load(_TAIL)
        self._require_tail(self._tail_seen)
        self._settled_below = self._position_after_last_taken()
        self._in_flight = self._count_in_flight()

    @classmethod
    def attach(cls, path: str, *, engine_id: str | None = None, clock: Clock | None = None) -> RingProducer:
        """Attach to a ring as its producer and continue at its words.

        Raises RingError if the ring has a producer (R5) or one of its sides was closed. Also raises it for a
        ring of another engine, a file that is not a ring, and invalid words.
        """
        fd, memory = open_ring(path)
        lock = ProducerLock(fd)
        try:
            require_engine(memory.identity, engine_id, path)
            lock_for_producer(fd, path, clock or SystemClock())
            if memory.load(RingWord.PRODUCER_STATE) == RingProducerState.CLOSED:
                raise RingError("the ring was closed by its producer", path=path)
            if memory.load(_CONSUMER_STATE) == RingConsumerState.CLOSED:
                raise RingError("the ring was closed by its consumer", path=path)
            producer = cls(memory, lock, path)
        except BaseException:
            memory.close()
            lock.release()
            raise
        memory.store(RingWord.PRODUCER_STATE, RingProducerState.ATTACHED)
        return producer

    # -- publishing -----------------------------------------------------------------------------------

    def push_one(self, frame: Any) -> int | None:
        """Publish one whole frame (a byte buffer, a multiple of 8). Return its position.

        None means that there is no space now. Raises RingError for a frame that can never fit or has an
        invalid size.
        """
        self._require_usable()
        size = len(frame)
        if size & 7 or not 0 < size <= self.frame_bytes_max:
            self._require_sizes([size])
        start, capacity = self._head, self.capacity
        lap_left = capacity - start % capacity
        if size > lap_left:
            start += lap_left
        stop = start + size
        taken = stop - self._head
        if self._in_flight >= self.settle_entries or taken > self._room(taken):
            return None
        if size > lap_left:
            self._write_pad(self._head, start)
        self._memory.write(start % capacity, frame)
        self._publish(stop, 1)
        return start

    def push_run(self, buffer: Any, frame_bytes: int) -> tuple[int, range | NDArray[np.int64]]:
        """Publish as many as fit of n adjacent frames of `frame_bytes` each in `buffer`.

        Returns how many were published, from the first on, and their positions as a range or (count,) int64.
        """
        self._require_usable()
        source = memoryview(buffer).cast("B")
        self._require_sizes([frame_bytes])
        if len(source) % frame_bytes:
            raise RingError(
                f"buffer length must be a multiple of {frame_bytes}, got {len(source)}",
                bytes=len(source),
                frame_bytes=frame_bytes,
            )
        wanted = min(len(source) // frame_bytes, self.free_frames)
        room = self._room(wanted * frame_bytes + self.frame_bytes_max)
        lap_left = self.capacity - self._head % self.capacity
        first = min(wanted, lap_left // frame_bytes, room // frame_bytes)
        pad = lap_left - first * frame_bytes
        second = 0
        if pad < frame_bytes:
            second = max(0, min(wanted - first, (room - first * frame_bytes - pad) // frame_bytes))
        split = first * frame_bytes
        head = self._head
        stop = self._write_laps(source, split, split + second * frame_bytes, lap_left)
        if first and not second:
            self._publish(stop, first)
            return first, range(head, head + split, frame_bytes)
        positions = head + np.arange(first + second, dtype=np.int64) * frame_bytes
        positions[first:] += pad
        if first + second:
            self._publish(stop, first + second)
        return first + second, positions

    def push_buffer(self, buffer: Any, offsets: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Publish as many as fit of the adjacent frames in `buffer` that begin at `offsets` (n,).

        The first frame begins at 0, and the last ends at the end of the buffer. Returns as push_run does.
        """
        self._require_usable()
        source = memoryview(buffer).cast("B")
        stops = _stops_of(offsets, len(source))
        sizes = stops - offsets
        if len(sizes):
            self._require_sizes([int(sizes.max()), int(sizes.min())])
            if int(np.bitwise_or.reduce(sizes)) & 7:
                raise RingError("frame size must be a multiple of 8")
        stops = stops[: self.free_frames]
        room = self._room(len(source) + self.frame_bytes_max)
        lap_left = self.capacity - self._head % self.capacity
        first = int(np.searchsorted(stops, min(lap_left, room), side="right"))
        split = int(stops[first - 1]) if first else 0
        pad, count = lap_left - split, first
        if first < len(stops) and int(stops[first]) > lap_left:
            count = max(first, int(np.searchsorted(stops, split + room - lap_left, side="right")))
        total = int(stops[count - 1]) if count else 0
        stop = self._write_laps(source, split, total, lap_left)
        positions = self._head + offsets[:count]
        positions[first:] += pad
        if count:
            self._publish(stop, count)
        return count, positions

    # -- settlements ----------------------------------------------------------------------------------

    def take_settlements(self) -> NDArray[np.uint64]:
        """Take new settle entries in ring order: a private (n, 8) uint64 copy, see frame/settle_entry.py.

        Each frame is returned once. Entries that a restarted shard repeats are recognised by position and
        dropped.
        """
        self._require_usable()
        if self._memory.load(_SETTLE_HEAD) == self._settle_tail:
            return _NO_ENTRIES
        entries, head = self._unread_entries()
        fresh = _first_times(entries, self._settled_below)
        if len(fresh):
            last = int(fresh[-1, 0])
            if last >= self._head or len(fresh) > self._in_flight:
                raise self._corrupt_header(settle_head=head, settled_position=last)
            self._settled_below = last + 1
            self._in_flight -= len(fresh)
        self._settle_tail = head
        self._memory.store(_SETTLE_TAIL, head)
        return fresh

    def spin_word(self) -> tuple[memoryview, int]:
        """Return (word, value) for polling: the word has this value while there are no new settlements."""
        return self._memory.word(_SETTLE_HEAD), self._settle_tail

    @property
    def in_flight(self) -> int:
        """Number of frames pushed whose settlement was not taken yet."""
        return self._in_flight

    @property
    def free_frames(self) -> int:
        """Number of frames that can be pushed before settlements are taken."""
        return self.settle_entries - self._in_flight

    @property
    def head(self) -> int:
        """Position after the last published frame."""
        return self._head

    @property
    def is_consumer_closed(self) -> bool:
        """True if the consumer found the ring corrupt and reads nothing more."""
        return self._memory.load(_CONSUMER_STATE) != _OPEN

    @property
    def is_removed(self) -> bool:
        """True if the ring's file is deleted, so that no consumer can attach to it."""
        return self._lock.fd >= 0 and os.fstat(self._lock.fd).st_nlink == 0

    def set_wakeup_flags(self, bits: int) -> None:
        """Set the events for which the client wants to be woken up (layout.WakeupFlags)."""
        self._require_usable()
        self._memory.store(_WANTS, bits)

    def close(self) -> None:
        """Mark the ring as closed by its producer, release the lock and unmap. Idempotent.

        In a forked child, only the child's descriptor and mapping are released. The parent's ring is
        unchanged.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self._lock.is_forked:
            self._memory.store(RingWord.PRODUCER_STATE, RingProducerState.CLOSED)
        self._lock.release()
        self._memory.close()

    # -- internals ------------------------------------------------------------------------------------

    def _position_after_last_taken(self) -> int:
        """Return the position after the last settlement that an earlier producer of this ring took."""
        if self._settle_tail == 0:
            return 0
        slot = (self._settle_tail - 1) % self.identity.settle_slots
        return int(_entries_of(self._memory.read_entries(slot, 1))[0, 0]) + 1

    def _count_in_flight(self) -> int:
        """Count frames whose settlement was not taken: those in unread entries and those in the ring."""
        entries, _ = self._unread_entries()
        unsettled = {position for position in entries[:, 0].tolist() if position >= self._settled_below}
        position = self._tail_seen
        while position < self._head:
            index = position % self.capacity
            length = int.from_bytes(self._memory.read(index, 4), "little")
            if length == PAD_WORD:
                position += self.capacity - index
                continue
            if position >= self._settled_below:
                unsettled.add(position)
            position += max(length + 4, 8) + 7 & ~7
        return len(unsettled)

    def _unread_entries(self) -> tuple[NDArray[np.uint64], int]:
        head = self._memory.load(_SETTLE_HEAD)
        count = head - self._settle_tail
        if not 0 <= count <= self.settle_entries:
            raise self._corrupt_header(settle_head=head)
        slots = self.identity.settle_slots
        slot = self._settle_tail % slots
        raw = self._memory.read_entries(slot, min(count, slots - slot))
        if slot + count > slots:
            raw += self._memory.read_entries(0, slot + count - slots)
        return _entries_of(raw), head

    def _room(self, wanted: int) -> int:
        """Return the free bytes. The consumer's tail is loaded only if fewer than `wanted` are known free."""
        room = self.capacity - (self._head - self._tail_seen)
        if room >= wanted:
            return room
        tail = self._memory.load(_TAIL)
        self._require_tail(tail)
        self._tail_seen = tail
        return self.capacity - (self._head - tail)

    def _require_tail(self, tail: int) -> None:
        is_ordered = self._tail_seen <= tail <= self._head <= tail + self.capacity
        if not is_ordered or tail & 7 or self._head & 7:
            raise self._corrupt_header(tail=tail)

    def _corrupt_header(self, **words: Any) -> RingError:
        return RingError("corrupt ring header", path=self.path, head=self._head, **words)

    def _require_sizes(self, sizes: list[int]) -> None:
        for size in sizes:
            if size & 7 or size <= 0:
                raise RingError(f"frame size must be a positive multiple of 8, got {size}", bytes=size)
            if size > self.frame_bytes_max:
                raise RingError(
                    f"frame must be <= {self.frame_bytes_max} bytes for this ring, got {size}; use a socket",
                    bytes=size,
                    max=self.frame_bytes_max,
                )

    def _write_pad(self, start: int, stop: int) -> None:
        """Mark the rest of a lap, [start, stop), as padding."""
        if start < stop:
            self._memory.write(start % self.capacity, PAD_BYTES)

    def _write_laps(self, source: memoryview, split: int, total: int, lap_left: int) -> int:
        """Write source[:split] at the head, padding, source[split:total] on the next lap. Return the end."""
        if split:
            self._memory.write(self._head % self.capacity, source[:split])
        if total == split:
            return self._head + split
        lap_end = self._head + lap_left
        self._write_pad(self._head + split, lap_end)
        self._memory.write(0, source[split:total])
        return lap_end + total - split

    def _publish(self, head: int, frames: int) -> None:
        # This single store publishes everything that was written before it.
        self._head = head
        self._in_flight += frames
        self._memory.store(_HEAD, head)
        stop_points.hit("ring_after_publish")

    def _require_usable(self) -> None:
        if self._is_closed:
            raise RingError("the ring's producer is closed", path=self.path)
        if self._lock.is_forked:
            raise RingError("a ring's producer must not be used after a fork", path=self.path)


def _entries_of(raw: bytearray) -> NDArray[np.uint64]:
    return np.frombuffer(raw, dtype=np.uint64).reshape(-1, SETTLE_WORDS)


def _first_times(entries: NDArray[np.uint64], least: int) -> NDArray[np.uint64]:
    """Return the entries with a position of at least `least` and above all earlier ones. n must be >= 1."""
    positions = entries[:, 0]
    is_rising = len(positions) == 1 or bool((positions[1:] > positions[:-1]).all())
    if is_rising and int(positions[0]) >= least:
        return entries
    bounds = np.empty(len(positions), dtype=np.uint64)
    bounds[0] = least
    np.maximum(positions[:-1] + np.uint64(1), np.uint64(least), out=bounds[1:])
    return entries[positions >= np.maximum.accumulate(bounds)]


def _stops_of(offsets: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the (n,) ends of the frames. Raise RingError unless the frames fill [0, length) in order."""
    if len(offsets) == 0 == length:
        return offsets
    stops = np.append(offsets[1:], length)
    if len(offsets) == 0 or offsets[0] != 0 or (stops <= offsets).any():
        raise RingError(
            "offsets must start at 0, ascend, and end within the buffer", frames=len(offsets), bytes=length
        )
    return stops
