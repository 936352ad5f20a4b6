"""Files in memory that nobody may change: the half of a Disk that readers need."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from ringlog.storage.disk import disk_error


class ImageDisk:
    """The reading half of a Disk over a table of files. A call that would change something does not exist."""

    def __init__(self, files: Mapping[str, bytes], directories: Iterable[str]) -> None:
        self.files = dict(files)
        """Path -> contents. May be changed between two readers, not under one."""
        self._names: dict[str, set[str]] = {path: set() for path in directories}
        for path in [*self.files, *self._names]:
            parent, name = posixpath.split(path)
            if parent in self._names:
                self._names[parent].add(name)
        self._open: dict[int, str] = {}
        self._next = 1 << 20

    def open_read(self, path: str) -> int:
        """See Disk."""
        if path not in self.files:
            raise disk_error("open_read", path, errno.EISDIR if path in self._names else errno.ENOENT)
        self._next += 1
        self._open[self._next] = path
        return self._next

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """See Disk."""
        return self.files[self._open[fd]][offset : offset + length]

    def read_into(self, fd: int, buffer: Any, offset: int) -> int:
        """See Disk."""
        view = memoryview(buffer).cast("B")
        data = self.files[self._open[fd]][offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        """See Disk."""
        return len(self.files[self._open[fd]])

    def close(self, fd: int) -> None:
        """See Disk."""
        del self._open[fd]

    def list_dir(self, path: str) -> list[str]:
        """See Disk."""
        if path not in self._names:
            raise disk_error("list_dir", path, errno.ENOENT)
        return sorted(self._names[path])

    def exists(self, path: str) -> bool:
        """See Disk."""
        return path in self.files or path in self._names
