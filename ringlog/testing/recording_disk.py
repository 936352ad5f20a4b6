"""A Disk that records all changes in order, so that a test can build every legal state after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.storage.disk import Disk
from ringlog.storage.vectored_write import Buffer
from ringlog.testing.wrapped_disk import WrappedDisk


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that succeeded."""


@dataclass(frozen=True, slots=True)
class Create(Operation):
    """A new, empty file was created."""

    path: str


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """Bytes were written to the page cache."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SetLength(Operation):
    """The length of the file was set."""

    path: str
    length: int


@dataclass(frozen=True, slots=True)
class Allocate(Operation):
    """Space was reserved. The length is at least `offset + length`."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SyncData(Operation):
    """All earlier changes of bytes and length are durable."""

    path: str


@dataclass(frozen=True, slots=True)
class SyncFile(Operation):
    """All earlier changes of bytes, length and metadata are durable."""

    path: str


@dataclass(frozen=True, slots=True)
class SyncDir(Operation):
    """All earlier changes of names in this directory are durable."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename(Operation):
    """The file was renamed to `target`."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Unlink(Operation):
    """The name was deleted."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeDir(Operation):
    """A directory was created."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveDir(Operation):
    """An empty directory was deleted."""

    path: str


@dataclass(frozen=True, slots=True)
class DiskNote(Operation):
    """Marker of the test between the operations: an ack, a publication."""

    tag: str
    payload: Any


class RecordingDisk(WrappedDisk):
    """Records the operations that succeeded in `operations`. Reads are not recorded."""

    def __init__(self, inner: Disk) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def add_note(self, tag: str, payload: Any = None) -> None:
        """Append a DiskNote at this point of the record."""
        self.operations.append(DiskNote(tag, payload))

    def operations_of(self, kind: type[Operation]) -> list[Operation]:
        """Return the operations of one type, in order."""
        return [each for each in self.operations if isinstance(each, kind)]

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.operations.append(Create(path))
        return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        # Copied before the call, because the caller may change its buffers afterwards.
        data = b"".join([memoryview(buffer).tobytes() for buffer in buffers])
        count = super().write_at(fd, buffers, offset)
        self.operations.append(Write(self.path_of(fd), offset, data))
        return count

    def allocate(self, fd: int, offset: int, length: int) -> None:
        super().allocate(fd, offset, length)
        self.operations.append(Allocate(self.path_of(fd), offset, length))

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        super().zero_fill(fd, offset, length)
        self.operations.append(Write(self.path_of(fd), offset, bytes(length)))

    def sync_data(self, fd: int) -> None:
        super().sync_data(fd)
        self.operations.append(SyncData(self.path_of(fd)))

    def sync_file(self, fd: int) -> None:
        super().sync_file(fd)
        self.operations.append(SyncFile(self.path_of(fd)))

    def truncate(self, fd: int, length: int) -> None:
        super().truncate(fd, length)
        self.operations.append(SetLength(self.path_of(fd), length))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.operations.append(Rename(source, target))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.operations.append(Unlink(path))

    def make_dir(self, path: str) -> None:
        existed = self.inner.exists(path)
        super().make_dir(path)
        if not existed:
            self.operations.append(MakeDir(path))

    def remove_dir(self, path: str) -> None:
        super().remove_dir(path)
        self.operations.append(RemoveDir(path))

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self.operations.append(SyncDir(path))

    def lock(self, path: str) -> int:
        existed = self.inner.exists(path)
        fd = super().lock(path)
        if not existed:
            self.operations.append(Create(path))
        return fd
