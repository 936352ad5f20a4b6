"""When a shard that serves reads alone looks whether its directory takes writes again."""

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
    """Looks after `read_only_probe_ms`, then each time after twice as long, READ_ONLY_PROBE_MS_MAX at
    most."""

    def __init__(
        self, disk: Disk, clock: Clock, directory: str, read_only_probe_ms: int, file_bytes: int
    ) -> None:
        """`read_only_probe_ms` 0 = the shard writes, and there is nothing to look at. `file_bytes`: what a
        life that
        writes needs at once."""
        self._disk, self._clock, self._directory = disk, clock, directory
        self._look_ms, self._file_bytes = read_only_probe_ms, file_bytes
        self._look_at_ns = 0

    def begin(self) -> None:
        """From now on the shard serves."""
        self._look_at_ns = self._clock.monotonic_ns() + self._look_ms * _NS_PER_MS

    def is_writable_again(self) -> bool:
        """Does the directory take writes again? Looked at only when it is time to."""
        now = self._clock.monotonic_ns()
        if not self._look_ms or now < self._look_at_ns:
            return False
        self._look_ms = min(2 * self._look_ms, READ_ONLY_PROBE_MS_MAX)
        self._look_at_ns = now + self._look_ms * _NS_PER_MS
        return self._takes_writes()

    def _takes_writes(self) -> bool:
        """Make a file as large as the first one of a life that writes, and remove it."""
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
