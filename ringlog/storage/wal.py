"""Writer of a shard's WAL files. Only the incarnation that creates a file writes it (D3).

Assumptions about the kernel and the device: a write that returned is visible to every later reader of this
boot. Bytes that a completed fdatasync covers, and names that a directory sync covers, survive a power loss.
Writes without a sync may be cut, zeroed, garbled or reordered.

`prepare` creates a file outside of the hot path, before it is needed. It uses O_EXCL, fills the file with
zeros so that later syncs write no metadata, and syncs the file and its name. The header stays blank, which
tells recovery that the file was never used. `open` writes and syncs the header and records the file as the
newest one in the register. Commit batches may follow only after that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.errors import InvariantViolation
from ringlog.limits import FILL_CHUNK_BYTES, WAL_HEADER_BYTES
from ringlog.storage.disk import Disk
from ringlog.storage.layout import WAL_FLAG_REGISTERED, WalHeader, wal_name
from ringlog.storage.log_register import LogRegister

_FILL_STEP_BYTES = 4 * FILL_CHUNK_BYTES
FIRST_FILE_BYTES = 4 * FILL_CHUNK_BYTES
"""Size of an incarnation's first file. It is small, because producers wait until it is created."""
SYNC_CHUNK_BYTES = 256 << 10
"""Chunk size of a commit batch with a sync: the device writes one chunk while the next one is copied."""


@dataclass(frozen=True, slots=True)
class ShardLogIdentity:
    """Shard, incarnation and engine to which the files belong."""

    data_dir: str
    directory: str
    shard: int
    shards: int
    incarnation: int
    boot_id: bytes
    engine_id: bytes


@dataclass(slots=True)
class PreparedFile:
    """A file that is created and not opened yet."""

    fd: int
    path: str
    n: int
    capacity: int


class WalWriter:
    """The current log file of one shard. All methods except `prepare` and `sync` belong to one thread."""

    def __init__(self, disk: Disk, identity: ShardLogIdentity, file_bytes: int) -> None:
        self._disk = disk
        self._identity = identity
        self._file_bytes = file_bytes
        self._next_n = 0
        self._register = LogRegister(disk, identity.data_dir, identity.shard)
        self._syncing = threading.Lock()
        self._fd = -1
        self.path: str = ""
        self.file_id: int = 0
        self.offset: int = 0
        self.capacity: int = 0

    def prepare(self, at_least: int, *, fill: bool = True) -> PreparedFile:
        """Create the next file. May run in another thread during appends. Raises DiskError.

        With `fill` every block is written with zeros, so that later syncs write no metadata. Without it the
        file is only allocated, which is much faster. A failed attempt uses up its file number, so that a
        leftover file does not block the next attempt.
        """
        n = self._next_n
        self._next_n = n + 1
        path = f"{self._identity.directory}/{wal_name(self._identity.incarnation, n)}"
        capacity = min(FIRST_FILE_BYTES, self._file_bytes) if n == 0 else self._file_bytes
        if at_least > capacity:
            capacity = (at_least + FILL_CHUNK_BYTES - 1) // FILL_CHUNK_BYTES * FILL_CHUNK_BYTES
        fd = self._disk.create(path)
        try:
            self._disk.allocate(fd, 0, capacity)
            # In steps with a sync each, so that no sync of a commit batch waits for 64 MiB of zeros.
            for start in range(0, capacity, _FILL_STEP_BYTES) if fill else ():
                self._disk.zero_fill(fd, start, min(_FILL_STEP_BYTES, capacity - start))
                self._disk.sync_data(fd)
            self._disk.sync_file(fd)
            self._disk.sync_dir(self._identity.directory)
        except BaseException:
            self._disk.close(fd)
            self._disk.unlink(path)
            raise
        return PreparedFile(fd, path, n, capacity)

    def open(
        self, prepared: PreparedFile, *, salt: int, created_us: int, prev: tuple[int, int, int], flags: int,
        last_identity: tuple[int, int],
    ) -> WalHeader:  # fmt: skip
        """Begin a prepared file: write and sync its header, update the register, close the previous file.

        `prev` is (prev_file, prev_stop, prev_seal) of the header. `last_identity` is the last assigned
        (topic_id, epoch). Raises DiskError.
        """
        me = self._identity
        header = WalHeader(
            me.shard, me.shards, prepared.n, me.incarnation, salt, me.boot_id, me.engine_id, created_us,
            prepared.capacity, *prev, flags | WAL_FLAG_REGISTERED,
        )  # fmt: skip
        self._disk.write_at(prepared.fd, [header.encode()], 0)
        self._disk.sync_data(prepared.fd)
        self._register.record_newest_file(
            me.engine_id, me.shards, header.file_id, prepared.capacity, last_identity
        )
        if self._fd >= 0:
            self._disk.close(self._fd)
        self._fd, self.path, self.file_id = prepared.fd, prepared.path, header.file_id
        self.offset, self.capacity = WAL_HEADER_BYTES, prepared.capacity
        return header

    def append(self, buffers: Sequence[Any], offset: int, length: int, *, is_synced: bool = False) -> None:
        """Write one commit batch at the end. Raises DiskError, after which the file must not be used again.

        With `is_synced` a sync follows: the device starts writing each chunk as soon as it is in the cache.
        """
        if offset != self.offset or offset + length > self.capacity:
            raise InvariantViolation(
                f"commit batch must start at {self.offset} and end by {self.capacity}, "
                f"got {offset} to {offset + length}",
                offset=offset, expected=self.offset, length=length, capacity=self.capacity, file=self.path,
            )  # fmt: skip
        if not is_synced:
            self._disk.write_at(self._fd, buffers, offset)
        elif length <= SYNC_CHUNK_BYTES:
            self._disk.write_at(self._fd, buffers, offset)
            self._disk.begin_sync(self._fd, offset, length)
        else:
            at = offset
            for piece in _pieces(buffers):
                count = self._disk.write_at(self._fd, piece, at)
                self._disk.begin_sync(self._fd, at, count)
                at += count
        self.offset = offset + length

    def sync(self) -> None:
        """Make all appended bytes durable. Raises DiskError, after which nothing may be acked (W7).

        May run during `append`, and from two threads; a lock runs the syncs one after the other. The kernel
        reports a failed write-back to only one caller, so that a concurrent sync would report success.
        """
        with self._syncing:
            self._disk.sync_data(self._fd)

    def close(self, *, truncate: bool = False) -> None:
        """Close the file. With `truncate`, first return its unused end to the file system."""
        self._register.close()
        if self._fd < 0:
            return
        if truncate:
            self._disk.truncate(self._fd, self.offset)
            self._disk.sync_file(self._fd)
        self._disk.close(self._fd)
        self._fd = -1

    def discard(self, prepared: PreparedFile) -> None:
        """Delete a prepared file that will not be opened."""
        self._disk.close(prepared.fd)
        self._disk.unlink(prepared.path)


def _pieces(buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the buffers' bytes in order, in chunks of SYNC_CHUNK_BYTES or a little more."""
    piece: list[Any] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), SYNC_CHUNK_BYTES):
            part = view[start : start + SYNC_CHUNK_BYTES]
            piece.append(part)
            size += len(part)
            if size >= SYNC_CHUNK_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece
