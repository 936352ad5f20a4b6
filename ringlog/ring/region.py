"""The file of a ring: create, open, map and remove it.

The supervisor creates and removes ring files. A producer and a consumer map them. The producer has an
advisory lock on the file while it lives. The lock excludes a second producer (R5), and its release tells the
supervisor that the producer exited.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref

from ringlog import shm
from ringlog.clock import Clock, SystemClock
from ringlog.entropy import random_u64
from ringlog.errors import RingError
from ringlog.limits import RING_BYTES_MAX, RING_BYTES_MIN, SETTLE_ENTRIES_DEFAULT
from ringlog.ring import layout
from ringlog.ring.memory import RingMemory, require_atomic_words

if sys.platform != "win32":  # Windows clients connect by TCP only, but import this module too.
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
    """Create a ring file with all its memory allocated (R6).

    `ring_bytes` is rounded up to a multiple of 4096. Raises RingError, and leaves no file, if a size is out
    of bounds, the name exists or memory is full.
    """
    require_atomic_words()
    if not RING_BYTES_MIN <= ring_bytes <= RING_BYTES_MAX:
        raise RingError(
            f"ring_bytes must be in {RING_BYTES_MIN}..{RING_BYTES_MAX}, got {ring_bytes}",
            bytes=ring_bytes,
            min=RING_BYTES_MIN,
            max=RING_BYTES_MAX,
        )
    if not 1 <= settle_entries <= SETTLE_ENTRIES_DEFAULT:
        raise RingError(
            f"settle_entries must be in 1..{SETTLE_ENTRIES_DEFAULT}, got {settle_entries}",
            entries=settle_entries,
            min=1,
            max=SETTLE_ENTRIES_DEFAULT,
        )
    identity = layout.RingIdentity(
        shard=shard,
        capacity=-(-ring_bytes // layout.CAPACITY_UNIT) * layout.CAPACITY_UNIT,
        settle_entries=settle_entries,
        engine=layout.hash_id(engine_id),
        client=layout.hash_id(client),
        created_us=(clock or SystemClock()).now_us(),
        random=random_u64(),
    )
    shm.make_file(path, identity.file_bytes, identity.encode(), RingError)


def remove_ring(path: str) -> None:
    """Delete a ring file, if it exists. Mappings stay usable until they are closed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as e:
        raise RingError(f"cannot remove ring: {e.strerror}", path=path, errno=e.errno) from None


def producer_alive(path: str) -> bool:
    """Return whether a live process is attached to the ring as its producer."""
    fd, _ = shm.open_file(path, RingError)
    try:
        # A shared lock, so that two concurrent callers do not take each other for a producer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def producer_closed(path: str) -> bool:
    """Return whether the producer closed the ring. Raise RingError for a file that cannot be opened."""
    fd, _ = shm.open_file(path, RingError)
    try:
        word = os.pread(fd, 8, layout.RingWord.PRODUCER_STATE * 8)
    finally:
        os.close(fd)
    return int.from_bytes(word, "little") == layout.RingProducerState.CLOSED


def mark_consumer_closed(path: str) -> None:
    """Mark a ring as closed by its consumer. Used before removing a ring that its shard cannot use.

    No effect if the file does not exist or is shorter than a header.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if os.fstat(fd).st_size < layout.HEADER_BYTES:
            return  # The file was cut. A write would make it grow.
        # Only one byte of the word changes, so it is never read half written.
        os.pwrite(
            fd, layout.RingConsumerState.CLOSED.to_bytes(8, "little"), layout.RingWord.CONSUMER_STATE * 8
        )
    finally:
        os.close(fd)


def open_ring(path: str) -> tuple[int, RingMemory]:
    """Open, validate and map a ring file. Return (descriptor, memory). The caller must close both.

    Raises RingError for a file that create_ring would not make.
    """
    require_atomic_words()
    fd, size = shm.open_file(path, RingError)
    try:
        identity = layout.decode_identity(os.pread(fd, layout.IDENTITY_BYTES, 0), path)
        if identity.capacity < RING_BYTES_MIN or identity.capacity % layout.CAPACITY_UNIT:
            raise RingError(
                f"ring capacity must be >= {RING_BYTES_MIN} and a multiple of {layout.CAPACITY_UNIT}",
                path=path,
                bytes=identity.capacity,
                min=RING_BYTES_MIN,
            )
        if not 1 <= identity.settle_entries <= SETTLE_ENTRIES_DEFAULT:
            raise RingError(
                f"settle_entries must be in 1..{SETTLE_ENTRIES_DEFAULT}, got {identity.settle_entries}",
                path=path,
                entries=identity.settle_entries,
            )
        if identity.file_bytes != size:
            raise RingError(
                "ring file has the wrong size", path=path, bytes=size, expected=identity.file_bytes
            )
        # No MAP_POPULATE: it blocks a shard for 10 ms per new client, without commits. Page faults on the
        # first lap cost each side a few microseconds per frame.
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError as e:
        # mmap duplicates the descriptor, so it can fail at the descriptor limit, or for lack of memory.
        os.close(fd)
        raise RingError(f"cannot map ring: {e.strerror}", path=path, errno=e.errno) from None
    except BaseException:
        os.close(fd)
        raise
    return fd, RingMemory(mapping, identity)


def require_engine(identity: layout.RingIdentity, engine_id: str | None, path: str) -> None:
    """Raise RingError if the ring belongs to another engine. None accepts any engine."""
    if engine_id is not None and identity.engine != layout.hash_id(engine_id):
        raise RingError("ring belongs to another engine", path=path, engine_id=engine_id)


class ProducerLock:
    """The advisory lock of a ring's producer. A forked child gives up its copy.

    Only one process may write into a ring. A child's copy of the descriptor would also keep the lock after
    the death of the parent.
    """

    __slots__ = ("__weakref__", "fd", "is_forked")

    def __init__(self, fd: int = -1) -> None:
        """`fd` is the locked descriptor, which this object closes; -1 = a ring without a file."""
        self.fd: int = fd
        self.is_forked: bool = False
        """This process is a forked child of the producer."""
        _live.add(self)

    def release(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_live: weakref.WeakSet[ProducerLock] = weakref.WeakSet()


def _disable_after_fork() -> None:
    for lock in list(_live):
        lock.is_forked = True
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_after_fork)


def lock_for_producer(fd: int, path: str, clock: Clock) -> None:
    """Take the producer's lock. Raise RingError if a live producer has it (R5)."""
    for attempt in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # producer_alive has the lock only for a moment. A producer keeps it until it exits.
            if attempt + 1 < LOCK_TRIES:
                clock.sleep(LOCK_WAIT_S)
        else:
            return
    raise RingError("ring already has a producer", path=path)
