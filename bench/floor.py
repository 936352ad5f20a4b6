"""The floor: time of the disk alone for the same bytes, in the same commit batches, with as many syncs.

It is a bare loop without ring, frame, checksum or second process. It writes like a log: every block once,
into preallocated files of the engine's size, with a new file when one is full. A slow stream gets files that
were filled with zeros beforehand, a fast one gets files that were only allocated. The engine does the same.
The creation of files is not counted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ringlog.limits import WAL_FILE_BYTES_DEFAULT as FILE_BYTES

CHUNK = bytes(1 << 20)
FILLED_BELOW_BYTES_PER_S = 32 << 20
"""Bytes per second and shard. The engine fills files of streams that take more than a second for half a
file."""


class Floor:
    """A stream of preallocated files."""

    def __init__(self, directory: Path, *, filled: bool = True) -> None:
        self._directory = directory
        self._filled = filled
        self._n = 0
        self._fd = -1
        self._next()

    def _next(self) -> float:
        """Create the next file. Returns the seconds that this took."""
        begun = time.perf_counter()
        self.close()
        self._n += 1
        path = self._directory / f"floor-{self._n}"
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        path.unlink()
        os.posix_fallocate(self._fd, 0, FILE_BYTES)
        if self._filled:
            for offset in range(0, FILE_BYTES, len(CHUNK)):
                os.pwrite(self._fd, CHUNK, offset)
        os.fsync(self._fd)
        self._offset = 0
        return time.perf_counter() - begun

    def write(self, group_bytes: int, groups: int, syncs: int, seconds_max: float = 1.5) -> float:
        """Return the seconds for `groups` commit batches with `syncs` syncs spread over them.

        It measures at most `seconds_max` and scales the result.
        """
        data = os.urandom(max(group_bytes, 8))
        every = max(groups // syncs, 1) if syncs else groups + 1
        making = 0.0
        begun = time.perf_counter()
        done = 0
        while done < groups:
            if self._offset + len(data) > FILE_BYTES:
                os.fdatasync(self._fd)
                making += self._next()
            os.pwrite(self._fd, data, self._offset)
            self._offset += len(data)
            done += 1
            if done % every == 0:
                os.fdatasync(self._fd)
            if time.perf_counter() - begun - making > seconds_max:
                break
        return (time.perf_counter() - begun - making) * groups / done

    def single_writes(self, size: int, rounds: int) -> list[float]:
        """Return the seconds of each of `rounds` single writes with a sync."""
        data = os.urandom(size)
        times = []
        for _ in range(rounds):
            if self._offset + size > FILE_BYTES:
                self._next()
            begun = time.perf_counter()
            os.pwrite(self._fd, data, self._offset)
            os.fdatasync(self._fd)
            times.append(time.perf_counter() - begun)
            self._offset += size
        return times

    def close(self) -> None:
        """Close the file, which is already unlinked."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
