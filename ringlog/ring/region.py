"""The file behind a ring: made, opened, mapped and removed here.

The supervisor makes and removes ring files; a producer and a consumer map them. The producer holds an
advisory lock on the file as long as it lives, which makes a second producer impossible and tells the
supervisor when the first is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
from typing import Any

from ringlog import shm
from ringlog.clock import Clock, SystemClock
from ringlog.errors import RingError
from ringlog.limits import RING_BYTES_MAX, RING_BYTES_MIN, SETTLE_ENTRIES_DEFAULT, SETTLE_ENTRY_BYTES
from ringlog.ring import layout
from ringlog.ring.atomic_words import AtomicWords, require_atomic_words

if sys.platform != "win32":  # Where clients go by TCP, and import this all the same.
    import fcntl

LOCK_TRIES = 20
LOCK_WAIT_S = 0.001


def create_ring(
    path: str,
    *,
    ring_bytes: int,
    settle_entries: int,
    shard: int,
    engine_id: str,
    client: str,
    clock: Clock | None = None,
) -> None:
    """Make a ring file with all its room allocated; `ring_bytes` is rounded up to a multiple of 4096.

    Raises RingError, leaving no file, when a size is out of bounds, the name is taken or memory is full.
    """
    require_atomic_words()
    if not RING_BYTES_MIN <= ring_bytes <= RING_BYTES_MAX:
        raise RingError("ring size out of bounds", bytes=ring_bytes, min=RING_BYTES_MIN, max=RING_BYTES_MAX)
    if not 1 <= settle_entries <= SETTLE_ENTRIES_DEFAULT:
        raise RingError(
            "settle entries out of bounds", entries=settle_entries, min=1, max=SETTLE_ENTRIES_DEFAULT
        )
    identity = layout.RingIdentity(
        shard=shard,
        capacity=-(-ring_bytes // layout.CAPACITY_UNIT) * layout.CAPACITY_UNIT,
        settle_entries=settle_entries,
        engine=layout.hash_id(engine_id),
        client=layout.hash_id(client),
        created_us=(clock or SystemClock()).now_us(),
        random=secrets.randbits(64),
    )
    shm.make_file(path, identity.file_bytes, identity.encode(), RingError)


def remove_ring(path: str) -> None:
    """Unlink a ring file; no error when it is gone already. Mappings of it stay usable until closed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as e:
        raise RingError(f"cannot remove: {e.strerror}", path=path, errno=e.errno) from None


def producer_alive(path: str) -> bool:
    """True while some process holds the producer's end of the ring open."""
    fd, _ = shm.open_file(path, RingError)
    try:
        # Shared, so that two who ask at the same time do not take each other for a producer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def producer_closed(path: str) -> bool:
    """True when a producer said that nothing more will come. Raises RingError for what is no ring of ours."""
    fd, _ = shm.open_file(path, RingError)
    try:
        word = os.pread(fd, 8, layout.RingWord.PRODUCER_STATE * 8)
    finally:
        os.close(fd)
    return int.from_bytes(word, "little") == layout.RingProducerState.CLOSED


def mark_consumer_closed(path: str) -> None:
    """Tell a ring's producer that nobody reads it any more: for who removes a ring its shard cannot use.

    Nothing happens where there is no such file or it holds no header.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if os.fstat(fd).st_size < layout.HEADER_BYTES:
            return  # Cut by somebody: writing would make it grow.
        # Changes one byte of the word, so it is never seen half written.
        os.pwrite(
            fd, layout.RingConsumerState.CLOSED.to_bytes(8, "little"), layout.RingWord.CONSUMER_STATE * 8
        )
    finally:
        os.close(fd)


class RingMemory(AtomicWords):
    """A ring's bytes: the live words (`load`, `store`), the data area and the settle area.

    `buffer` is the whole file, writable. Everything either side does to the ring goes through here.
    """

    def __init__(self, buffer: Any, identity: layout.RingIdentity) -> None:
        self._buffer = buffer
        self._whole = memoryview(buffer)
        super().__init__(self._whole[: layout.HEADER_BYTES])
        self._data = self._whole[layout.HEADER_BYTES : identity.settle_offset]
        self._settle = self._whole[identity.settle_offset : identity.file_bytes]
        self.identity = identity

    def write(self, index: int, data: Any) -> None:
        """Put bytes at `index` of the data area."""
        self._data[index : index + len(data)] = data

    def read(self, index: int, length: int) -> bytearray:
        """Private copy of `length` bytes at `index` of the data area (RD-13)."""
        return bytearray(self._data[index : index + length])

    def write_entries(self, slot: int, entries: bytes) -> None:
        """Put settle entries, as bytes, from `slot` on; they must not run over the end."""
        start = slot * SETTLE_ENTRY_BYTES
        self._settle[start : start + len(entries)] = entries

    def read_entries(self, slot: int, count: int) -> bytearray:
        """Private copy of `count` settle entries from `slot` on."""
        start = slot * SETTLE_ENTRY_BYTES
        return bytearray(self._settle[start : start + count * SETTLE_ENTRY_BYTES])

    @property
    def closed(self) -> bool:
        """True after close."""
        return self._buffer is None

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._buffer is None:
            return
        super().close()
        self._data.release()
        self._settle.release()
        self._whole.release()
        if isinstance(self._buffer, mmap.mmap):
            # A thread may be looking at a word: it is unmapped when that one has looked.
            with contextlib.suppress(BufferError):
                self._buffer.close()
        self._buffer = None


def open_ring(path: str) -> tuple[int, RingMemory]:
    """Open, validate and map a ring file; returns (descriptor, memory), both for the caller to close.

    Raises RingError naming what differs from what create_ring makes.
    """
    require_atomic_words()
    fd, size = shm.open_file(path, RingError)
    try:
        identity = layout.decode_identity(os.pread(fd, layout.IDENTITY_BYTES, 0), path)
        if identity.capacity < RING_BYTES_MIN or identity.capacity % layout.CAPACITY_UNIT:
            raise RingError(
                "impossible ring capacity", path=path, bytes=identity.capacity, min=RING_BYTES_MIN
            )
        if not 1 <= identity.settle_entries <= SETTLE_ENTRIES_DEFAULT:
            raise RingError("impossible settle entries", path=path, entries=identity.settle_entries)
        if identity.file_bytes != size:
            raise RingError(
                "ring file has the wrong size", path=path, bytes=size, expected=identity.file_bytes
            )
        # Not populated: all at once that takes a shard 10 ms for each client that comes, in which it commits
        # for nobody; page by page the first lap takes each side some microseconds a frame.
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError as e:
        # A mapping takes a descriptor of its own, which may be the one too many, and memory.
        os.close(fd)
        raise RingError(f"cannot map ring: {e.strerror}", path=path, errno=e.errno) from None
    except BaseException:
        os.close(fd)
        raise
    return fd, RingMemory(mapping, identity)


def require_engine(identity: layout.RingIdentity, engine_id: str | None, path: str) -> None:
    """Raise RingError when the ring was made by another engine; None accepts any."""
    if engine_id is not None and identity.engine != layout.hash_id(engine_id):
        raise RingError("ring of another engine", path=path, engine_id=engine_id)


def lock_for_producer(fd: int, path: str, clock: Clock) -> None:
    """Take the producer's lock; raises RingError when a live producer has it (RF-31)."""
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Somebody in producer_alive holds it for a moment only; a producer holds it for good.
            if attempt + 1 < LOCK_TRIES:
                clock.sleep(LOCK_WAIT_S)
        else:
            return
    raise RingError("the ring has a producer already", path=path)
