"""Writing WAL files: one incarnation's files, made ahead of need, never appended to by anybody else.

Assumed of the system below: a write that returned is seen by every later reader of this boot; a
completed fdatasync keeps the bytes it covers through a power cut; a directory sync keeps names. Nothing
is assumed of writes that were not synced: they may be cut, zeroed, garbled or reordered.

A file is made (`prepare`) off the hot path: created with O_EXCL, filled with zeros so that later syncs
move no metadata, synced, its name synced. Its header stays blank until it is opened: a blank header is
how recovery knows a file that was never used. `open` writes and syncs the header, then has the register
say that this file is the newest, and only then may groups follow.
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
"""An incarnation's first file is small, since producers wait while it is made."""
SYNC_CHUNK_BYTES = 256 << 10
"""Of a group that is synced next: the device works on one piece while the next is copied to the cache."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Whose files these are."""

    data_dir: str
    directory: str
    shard: int
    shards: int
    incarnation: int
    boot_id: bytes
    engine_id: bytes


@dataclass(slots=True)
class PreparedFile:
    """A file that waits to be opened."""

    fd: int
    path: str
    n: int
    capacity: int


class WalWriter:
    """The current file of one stream. All methods but `prepare` and `sync` belong to one thread."""

    def __init__(self, disk: Disk, identity: StreamIdentity, file_bytes: int) -> None:
        self._disk = disk
        self._identity = identity
        self._file_bytes = file_bytes
        self._next_n = 0
        self._register = LogRegister(disk, identity.data_dir, identity.shard)
        self._syncing = threading.Lock()
        self._fd = -1
        self.path = ""
        self.file_id = 0
        self.offset = 0
        self.capacity = 0

    def prepare(self, at_least: int, *, fill: bool = True) -> PreparedFile:
        """Make the next file; may run in another thread while groups are written. Raises DiskError.

        With `fill` every block is touched, so that later syncs move no metadata; without it the file is
        only allocated, which takes no time. A try that fails has used up its number, so that what it may
        have left behind is in nobody's way.
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
            # In steps with a sync each, so that no group's sync ever waits behind 64 MiB of zeros.
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
        """Begin a prepared file: header written and synced, the register's word too; the file before it is
        closed. `last_identity`: (topic_id, epoch) given out last."""
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
        """Write one group at the end; raises DiskError, after which the file must not be used again.

        If it `is_synced` next, the device begins with each piece as soon as it is written.
        """
        if offset != self.offset or offset + length > self.capacity:
            raise InvariantViolation(
                "a group does not go where the log ends", offset=offset, expected=self.offset, length=length,
                capacity=self.capacity, file=self.path,
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
        """Make everything appended durable; raises DiskError, after which nothing may be acked (D-17).

        May run beside `append`, and from two threads, one after the other: the kernel reports a failed
        write-back to one caller only, so of two syncs side by side the other would claim success.
        """
        with self._syncing:
            self._disk.sync_data(self._fd)

    def close(self, *, truncate: bool = False) -> None:
        """Let go of the file; with `truncate` give its unused end back to the file system first."""
        self._register.close()
        if self._fd < 0:
            return
        if truncate:
            self._disk.truncate(self._fd, self.offset)
            self._disk.sync_file(self._fd)
        self._disk.close(self._fd)
        self._fd = -1

    def discard(self, prepared: PreparedFile) -> None:
        """Remove a prepared file that will not be opened."""
        self._disk.close(prepared.fd)
        self._disk.unlink(prepared.path)


def _pieces(buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """The buffers' bytes in order, SYNC_CHUNK_BYTES at a time or a little more."""
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
