"""Checks whether the data directory of a read-only shard is writable again."""

from __future__ import annotations

import contextlib

from ringlog.clock import Clock
from ringlog.errors import DiskError
from ringlog.limits import READ_ONLY_PROBE_MS_MAX
from ringlog.storage.disk import Disk
from ringlog.storage.layout import TMP_SUFFIX

PROBE = f"probe{TMP_SUFFIX}"
_NS_PER_MS = 1_000_000


class ReadOnlyProbe:
    """Probes after `read_only_probe_ms`, then at doubling intervals up to READ_ONLY_PROBE_MS_MAX."""

    def __init__(
        self, disk: Disk, clock: Clock, directory: str, read_only_probe_ms: int, file_bytes: int
    ) -> None:
        """Set up the probe of `directory`.

        Args:
            read_only_probe_ms: first interval in milliseconds; 0 disables the probe of a writable shard.
            file_bytes: size of the test file: the bytes that a writable shard needs at its start.
        """
        self._disk, self._clock, self._directory = disk, clock, directory
        self._interval_ms, self._file_bytes = read_only_probe_ms, file_bytes
        self._probe_at_ns = 0

    def begin(self) -> None:
        """Start the first interval, when the shard begins to serve."""
        self._probe_at_ns = self._clock.monotonic_ns() + self._interval_ms * _NS_PER_MS

    def is_writable_again(self) -> bool:
        """Return True if the directory is writable again. It is probed only when the interval is over."""
        now = self._clock.monotonic_ns()
        if not self._interval_ms or now < self._probe_at_ns:
            return False
        self._interval_ms = min(2 * self._interval_ms, READ_ONLY_PROBE_MS_MAX)
        self._probe_at_ns = now + self._interval_ms * _NS_PER_MS
        return self._probe_write()

    def _probe_write(self) -> bool:
        """Create and sync a test file as large as the first WAL file, and delete it.

        Return True on success.
        """
        path = f"{self._directory}/{PROBE}"
        try:
            if self._disk.exists(path):
                self._disk.unlink(path)
            fd = self._disk.create(path)
        except DiskError:
            return False
        try:
            self._disk.allocate(fd, 0, self._file_bytes)
            self._disk.sync_file(fd)
        except DiskError:
            return False
        finally:
            with contextlib.suppress(DiskError):
                self._disk.close(fd)
                self._disk.unlink(path)
        return True
