"""A read-only Disk on files in memory: the part of the Disk interface that readers need."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from ringlog.storage.disk import disk_error


class ImageDisk:
    """The reading methods of Disk on a table of files. It has no methods that change files."""

    def __init__(self, files: Mapping[str, bytes], directories: Iterable[str]) -> None:
        self.files = dict(files)
        """Contents by path. May be changed between two readers, but not while a reader has the file open."""
        self._names: dict[str, set[str]] = {path: set() for path in directories}
        for path in [*self.files, *self._names]:
            parent, name = posixpath.split(path)
            if parent in self._names:
                self._names[parent].add(name)
        self._open: dict[int, str] = {}
        self._next = 1 << 20

    def open_read(self, path: str) -> int:
        """Open a file, as `Disk.open_read` does."""
        if path not in self.files:
            raise disk_error("open_read", path, errno.EISDIR if path in self._names else errno.ENOENT)
        self._next += 1
        self._open[self._next] = path
        return self._next

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read from a file, as `Disk.read_at` does."""
        return self.files[self._open[fd]][offset : offset + length]

    def read_into(self, fd: int, buffer: Any, offset: int) -> int:
        """Read from a file into a buffer, as `Disk.read_into` does."""
        view = memoryview(buffer).cast("B")
        data = self.files[self._open[fd]][offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        """Return the size (bytes) of a file, as `Disk.size` does."""
        return len(self.files[self._open[fd]])

    def close(self, fd: int) -> None:
        """Close a file, as `Disk.close` does."""
        del self._open[fd]

    def list_dir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, as `Disk.list_dir` does."""
        if path not in self._names:
            raise disk_error("list_dir", path, errno.ENOENT)
        return sorted(self._names[path])

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists, as `Disk.exists` does."""
        return path in self.files or path in self._names
