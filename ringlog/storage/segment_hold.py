"""The hold of a backup: while it copies a running engine's files, the engine deletes no part of a segment.

A backup may take hours, and a segment that was merged or moved meanwhile still belongs to its set. The hold
is a shared lock on the directory `meta/`. The kernel releases it when the process ends. The reclaimer and the
relocator check it before they delete parts that shards knew. Log files and snapshots are not covered, because
the log must be able to shrink: a backup opens them before it copies anything.

Writes go before backups: a hold does not count while the disk is low, so that the engine can free space. The
backup then lacks a file of its set and begins again, or fails.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from ringlog.clock import Clock
from ringlog.limits import BACKUP_HOLD_S
from ringlog.storage.layout import META_DIR


@contextmanager
def hold_segments(data_dir: str) -> Iterator[None]:
    """Hold the segments of a data directory. Any number of processes may do so. Raise OSError."""
    fd = _open_meta(data_dir)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


class SegmentHold:
    """Tells a process of the engine whether a backup holds the segments."""

    def __init__(self, data_dir: str, clock: Clock, *, min_free_bytes: int) -> None:
        """Below `min_free_bytes` of free space (data.min_free_bytes), no hold counts."""
        self._data_dir, self._clock, self._min_free_bytes = data_dir, clock, min_free_bytes
        self._since_ns: int | None = None

    def is_held(self) -> bool:
        """Return whether a backup runs and counts: not after BACKUP_HOLD_S without a pause, and not on a low
        disk.

        Call it in every round, also if nothing is to be deleted: a check that finds no backup separates the
        next one from the one before.
        """
        if not self._is_locked():
            self._since_ns = None
            return False
        now_ns = self._clock.monotonic_ns()
        if self._since_ns is None:
            self._since_ns = now_ns
        is_recent = now_ns - self._since_ns < BACKUP_HOLD_S * 1_000_000_000
        return is_recent and not self._is_disk_low()

    def _is_disk_low(self) -> bool:
        try:
            return shutil.disk_usage(self._data_dir).free < self._min_free_bytes
        except OSError:
            return False

    def _is_locked(self) -> bool:
        """Return whether a backup has the lock. A lock that cannot be checked counts as one."""
        try:
            fd = _open_meta(self._data_dir)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            # Two processes that check at the same time may take each other for a backup. They check again.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # BlockingIOError if a backup runs.
            return True
        finally:
            os.close(fd)
        return False


def _open_meta(data_dir: str) -> int:
    return os.open(os.path.join(data_dir, META_DIR), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
