"""The floor: what the disk alone takes for the same bytes in the same groups with as many syncs.

A bare loop over a preallocated, zero-filled file: no ring, no frame, no checksum, no other process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE_BYTES = 64 << 20
CHUNK = bytes(1 << 20)


class Floor:
    """One preallocated file, written round and round."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "floor"
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        os.posix_fallocate(self._fd, 0, FILE_BYTES)
        for offset in range(0, FILE_BYTES, len(CHUNK)):
            os.pwrite(self._fd, CHUNK, offset)
        os.fsync(self._fd)
        self._offset = 0

    def write(self, group_bytes: int, groups: int, syncs: int, seconds_max: float = 1.5) -> float:
        """Seconds for `groups` groups with `syncs` syncs spread over them; measured on at most `seconds_max`
        worth of them and scaled.
        """
        data = os.urandom(max(group_bytes, 8))
        every = max(groups // syncs, 1) if syncs else groups + 1
        begun = time.perf_counter()
        done = 0
        while done < groups:
            if self._offset + len(data) > FILE_BYTES:
                self._offset = 0
            os.pwrite(self._fd, data, self._offset)
            self._offset += len(data)
            done += 1
            if done % every == 0:
                os.fdatasync(self._fd)
                if time.perf_counter() - begun > seconds_max:
                    break
        return (time.perf_counter() - begun) * groups / done

    def lone(self, size: int, rounds: int) -> list[float]:
        """Seconds of each of `rounds` single writes with a sync."""
        data = os.urandom(size)
        times = []
        for _ in range(rounds):
            if self._offset + size > FILE_BYTES:
                self._offset = 0
            begun = time.perf_counter()
            os.pwrite(self._fd, data, self._offset)
            os.fdatasync(self._fd)
            times.append(time.perf_counter() - begun)
            self._offset += size
        return times

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        self._path.unlink()
