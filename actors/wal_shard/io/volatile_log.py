"""The volatile log: ephemeral records in shared memory, in files of the WAL format.

Readers find them like any other extent. The files exist as long as the incarnation that wrote them; a
successor deletes them. The log keeps at most `budget` bytes; above that it deletes the oldest file.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from ringlog.actors.wal_shard.events import VolatileFailed, VolatileOpened
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import DiskError
from ringlog.limits import FILL_CHUNK_BYTES, WAL_HEADER_BYTES
from ringlog.storage.layout import WalHeader, pack_file

FILES_WANTED = 8
"""Number of files that share the budget. One eviction therefore removes an eighth of the records."""


class VolatileLog:
    """Files `volatile-NN-<incarnation>-<n>.log` in the engine's shared-memory directory."""

    def __init__(self, boot: ActorBoot, budget: int) -> None:
        self._boot = boot
        self._budget = budget
        self._stem = f"volatile-{boot.shard:02d}-"
        self._files: deque[tuple[int, str, int]] = deque()
        self._next_n = 0
        self._fd = -1
        self.path: str = ""

    def sweep(self) -> None:
        """Delete the volatile files of earlier incarnations of this shard."""
        for name in os.listdir(self._boot.shm_dir):
            if name.startswith(self._stem):
                os.unlink(f"{self._boot.shm_dir}/{name}")

    def open(self, at_least: int, now_us: int) -> VolatileOpened | VolatileFailed:
        """Create a new file with room for `at_least` bytes.

        If the budget requires it, delete the oldest files first, but never the current one.
        """
        wanted = max(at_least, self._budget // FILES_WANTED)
        capacity = (wanted + FILL_CHUNK_BYTES - 1) // FILL_CHUNK_BYTES * FILL_CHUNK_BYTES
        dropped: list[int] = []
        while len(self._files) > 1 and sum(size for _, _, size in self._files) + capacity > self._budget:
            file_id, path, _ = self._files.popleft()
            os.unlink(path)
            dropped.append(file_id)
        name = f"{self._stem}{self._boot.incarnation}-{self._next_n}.log"
        path = f"{self._boot.shm_dir}/{name}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
        except OSError as e:
            os.close(fd)
            os.unlink(path)
            reason = f"no room for {capacity} bytes in shared memory: {e.strerror}"
            return VolatileFailed(reason, tuple(dropped))
        return self._begin(fd, path, name, capacity, now_us, tuple(dropped))

    def _begin(
        self, fd: int, path: str, name: str, capacity: int, now_us: int, dropped: tuple[int, ...]
    ) -> VolatileOpened:
        boot = self._boot
        salt = int.from_bytes(os.urandom(8), "little") | 1
        header = WalHeader(
            boot.shard, boot.shards, self._next_n, boot.incarnation, salt,
            bytes.fromhex(boot.boot_id.replace("-", "")), bytes.fromhex(boot.engine_id), now_us,
            capacity, 0, 0, 0, 0,
        )  # fmt: skip
        self._write(fd, [header.encode()], 0)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.path = fd, f"@{name}"
        file_id = pack_file(boot.incarnation, VOLATILE_N_FIRST + self._next_n)
        self._files.append((file_id, path, capacity))
        self._next_n += 1
        return VolatileOpened(file_id, salt, WAL_HEADER_BYTES, capacity, dropped)

    def append(self, buffers: list[Any], offset: int) -> None:
        """Write the ephemeral frames of one commit batch.

        The file is preallocated, so it cannot run out of space.
        """
        self._write(self._fd, buffers, offset)

    @staticmethod
    def _write(fd: int, buffers: list[Any], offset: int) -> None:
        data = b"".join(buffers)
        done = 0
        while done < len(data):
            wrote = os.pwrite(fd, memoryview(data)[done:], offset + done)
            if wrote <= 0:
                raise DiskError("write to the volatile log failed", offset=offset + done)
            done += wrote

    def close(self) -> None:
        """Delete all files: an orderly stop also ends ephemeral records."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.sweep()


VOLATILE_N_FIRST = 1 << 23
"""First file number of the volatile log.
It keeps these numbers distinct from WAL files of the incarnation."""
