"""The "/data" of a World on a directory of the host, with a hook before each call that changes the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringlog.errors import RinglogError
from ringlog.storage.disk import Disk
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.wrapped_disk import WrappedDisk
from tests.support.shard_world import DATA


class HostDisk(WrappedDisk):
    """RealDisk below `root`, one for each life of a process.

    `abandon` does what the kernel does at its end.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(RealDisk())
        self._root = str(root)

    def abandon(self) -> None:
        """Close every handle. Later calls with one of them fail."""
        for fd in list(self.paths):
            with contextlib.suppress(RinglogError):
                self.inner.close(fd)
        self.paths.clear()

    def on_host(self, path: str) -> str:
        """Return the host path of a path of the World."""
        assert path == DATA or path.startswith(DATA + "/"), path
        return self._root + path[len(DATA) :]


def _on_host(name: str) -> Callable[..., Any]:
    call = getattr(WrappedDisk, name)
    return lambda disk, *paths: call(disk, *map(disk.on_host, paths))


for _name in (
    "create", "open_read", "open_for_truncate", "open_for_overwrite", "rename", "unlink",
    "make_dir", "remove_dir", "sync_dir", "list_dir", "exists", "lock",
):  # fmt: skip
    setattr(HostDisk, _name, _on_host(_name))


class WatchedDisk(WrappedDisk):
    """Counts the calls that change the disk, and calls `before` with number and name of each."""

    def __init__(self, inner: Disk, before: Callable[[int, str], None]) -> None:
        super().__init__(inner)
        self.before = before
        self.calls = 0


def _watched(name: str) -> Callable[..., Any]:
    call = getattr(WrappedDisk, name)

    def watched(disk: WatchedDisk, *args: Any) -> Any:
        disk.calls += 1
        disk.before(disk.calls, name)
        return call(disk, *args)

    return watched


for _name in (
    "create", "write_at", "allocate", "truncate", "sync_data", "sync_file", "rename", "unlink", "sync_dir",
):  # fmt: skip
    setattr(WatchedDisk, _name, _watched(_name))
