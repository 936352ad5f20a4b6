"""A Disk that forwards every call to another one; base of the recording, faulty and monitoring disks."""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.errors import InvariantViolation
from ringlog.storage.disk import Disk
from ringlog.storage.vectored_write import Buffer


class WrappedDisk:
    """Forwards calls to `inner`, and knows the path of each open handle."""

    def __init__(self, inner: Disk) -> None:
        self.inner = inner
        self.paths: dict[int, str] = {}

    def create(self, path: str) -> int:
        return self._opened(self.inner.create(path), path)

    def open_read(self, path: str) -> int:
        return self._opened(self.inner.open_read(path), path)

    def open_for_truncate(self, path: str) -> int:
        return self._opened(self.inner.open_for_truncate(path), path)

    def open_for_overwrite(self, path: str) -> int:
        return self._opened(self.inner.open_for_overwrite(path), path)

    def close(self, fd: int) -> None:
        self.paths.pop(fd, None)
        self.inner.close(fd)

    def path_of(self, fd: int) -> str:
        """Return the path of an open handle."""
        try:
            return self.paths[fd]
        except KeyError:
            raise InvariantViolation("unknown or closed file handle", fd=fd) from None

    def _opened(self, fd: int, path: str) -> int:
        self.paths[fd] = path
        return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self.inner.write_at(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.inner.allocate(fd, offset, length)

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        self.inner.zero_fill(fd, offset, length)

    def write_back(self, fd: int, offset: int, length: int) -> None:
        self.inner.write_back(fd, offset, length)

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        self.inner.begin_sync(fd, offset, length)

    def sync_data(self, fd: int) -> None:
        self.inner.sync_data(fd)

    def sync_file(self, fd: int) -> None:
        self.inner.sync_file(fd)

    def truncate(self, fd: int, length: int) -> None:
        self.inner.truncate(fd, length)

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)
        for fd, path in self.paths.items():
            if path == source:
                self.paths[fd] = target

    def unlink(self, path: str) -> None:
        self.inner.unlink(path)

    def make_dir(self, path: str) -> None:
        self.inner.make_dir(path)

    def remove_dir(self, path: str) -> None:
        self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self.inner.sync_dir(path)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        return self.inner.read_at(fd, length, offset)

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        return self.inner.read_into(fd, buffer, offset)

    def size(self, fd: int) -> int:
        return self.inner.size(fd)

    def list_dir(self, path: str) -> list[str]:
        return self.inner.list_dir(path)

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def lock(self, path: str) -> int:
        return self._opened(self.inner.lock(path), path)

    def unlock(self, fd: int) -> None:
        self.paths.pop(fd, None)
        self.inner.unlock(fd)

    def fail_sync(self, fd: int) -> None:
        """Notify a simulated disk below that a sync of this handle will be reported as failed."""
        below = getattr(self.inner, "fail_sync", None)
        if below is not None:
            below(fd)
