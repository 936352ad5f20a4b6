"""A World's "/data" on a directory of the host, with a hook before each call that changes the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ringlog.errors import RinglogError
from ringlog.storage.disk import Disk, RealDisk
from ringlog.storage.gather import Buffer
from ringlog.testing.shard_world import DATA
from ringlog.testing.wrapped_disk import WrappedDisk


class HostDisk(WrappedDisk):
    """RealDisk below `root`. One for each life of a process: `abandon` is what the kernel does at its end."""

    def __init__(self, root: Path) -> None:
        super().__init__(RealDisk())
        self._root = str(root)

    def abandon(self) -> None:
        """Close every handle. Whoever still has one is refused, as the dead are."""
        for fd in list(self.paths):
            with contextlib.suppress(RinglogError):
                self.inner.close(fd)
        self.paths.clear()

    def on_host(self, path: str) -> str:
        """Where a path of the World lies."""
        assert path == DATA or path.startswith(DATA + "/"), path
        return self._root + path[len(DATA) :]

    def create(self, path: str) -> int:
        return super().create(self.on_host(path))

    def open_read(self, path: str) -> int:
        return super().open_read(self.on_host(path))

    def open_cut(self, path: str) -> int:
        return super().open_cut(self.on_host(path))

    def open_marks(self, path: str) -> int:
        return super().open_marks(self.on_host(path))

    def rename(self, source: str, target: str) -> None:
        super().rename(self.on_host(source), self.on_host(target))

    def unlink(self, path: str) -> None:
        super().unlink(self.on_host(path))

    def make_dir(self, path: str) -> None:
        super().make_dir(self.on_host(path))

    def remove_dir(self, path: str) -> None:
        super().remove_dir(self.on_host(path))

    def sync_dir(self, path: str) -> None:
        super().sync_dir(self.on_host(path))

    def list_dir(self, path: str) -> list[str]:
        return super().list_dir(self.on_host(path))

    def exists(self, path: str) -> bool:
        return super().exists(self.on_host(path))

    def lock(self, path: str) -> int:
        return super().lock(self.on_host(path))


class WatchedDisk(WrappedDisk):
    """Counts the calls that change the disk and tells `before` about each: its number and its name."""

    def __init__(self, inner: Disk, before: Callable[[int, str], None]) -> None:
        super().__init__(inner)
        self._before = before
        self.calls = 0

    def _told(self, call: str) -> None:
        self.calls += 1
        self._before(self.calls, call)

    def create(self, path: str) -> int:
        self._told("create")
        return super().create(path)

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._told("write")
        return super().write_at(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._told("allocate")
        super().allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._told("truncate")
        super().truncate(fd, length)

    def sync_data(self, fd: int) -> None:
        self._told("sync_data")
        super().sync_data(fd)

    def sync_file(self, fd: int) -> None:
        self._told("sync_file")
        super().sync_file(fd)

    def rename(self, source: str, target: str) -> None:
        self._told("rename")
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._told("unlink")
        super().unlink(path)

    def sync_dir(self, path: str) -> None:
        self._told("sync_dir")
        super().sync_dir(path)
