"""Windows of a file for TopicReader: read with pread, mapped, or supplied by the caller."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringlog.errors import RinglogError
from ringlog.storage.disk import Disk, disk_error


class Window(NamedTuple):
    """Bytes of a file: `buffer` from `start` to `stop`. `origin` is the file offset of byte 0."""

    buffer: Any
    start: int
    stop: int
    origin: int


class ColdByteRange(NamedTuple):
    """Bytes [start, stop) of a cold segment's data part that a reader needs next; `path` as in its Extent."""

    path: str
    start: int
    stop: int


class WindowFile(Protocol):
    """Source of a reader's windows."""

    def window(self, start: int, stop: int) -> Window | None:
        """Return bytes [start, stop), fewer at the file's end; None if the caller must fetch them first."""
        ...

    def close(self) -> None:
        """Close the file. Windows that were returned stay valid."""
        ...


class _OwnedDescriptor:
    """An open descriptor, which is closed when this object is dropped.

    A reader that is dropped without a close may hold the only reference to its file.
    """

    def __init__(self) -> None:
        self.disk: Disk | None = None
        self.fd: int = -1

    def __del__(self) -> None:
        if self.disk is not None:
            with suppress(RinglogError):
                self.disk.close(self.fd)


_UNUSED_MAX = 64
_unused: list[_OwnedDescriptor] = []
"""For the next files, at most _UNUSED_MAX; further ones are dropped.
Python loses the exception of a signal (KeyboardInterrupt) in `__del__`, so the objects of files that were
closed are kept."""


class PreadFile:
    """Reads with pread into new private buffers. A disk failure raises an error and causes no SIGBUS."""

    def __init__(self, disk: Disk, path: str) -> None:
        fd = disk.open_read(path)
        try:
            opened = _unused.pop()
        except IndexError:
            opened = _OwnedDescriptor()
        opened.fd, opened.disk = fd, disk
        self._open: _OwnedDescriptor | None = opened

    def window(self, start: int, stop: int) -> Window:
        """See WindowFile."""
        opened = self._open
        assert opened is not None, "the file is open"
        assert opened.disk is not None
        buffer = np.empty(stop - start, dtype=np.uint8)
        count = opened.disk.read_into(opened.fd, buffer, start)
        return Window(buffer, 0, count & ~7, start)

    def close(self) -> None:
        """See WindowFile."""
        opened, self._open = self._open, None
        if opened is not None and opened.disk is not None:
            disk, fd, opened.disk = opened.disk, opened.fd, None
            if len(_unused) < _UNUSED_MAX:
                _unused.append(opened)
            disk.close(fd)


class MappedFile:
    """Maps the file without a copy. An I/O error under the mapping kills the process with SIGBUS.

    Only for processes whose death is acceptable.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        fd = disk.open_read(path)
        try:
            size = disk.size(fd) & ~7
            self._view = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
        except OSError as e:
            # mmap duplicates the descriptor, so it can fail at the descriptor limit, or for lack of memory.
            raise disk_error("map", path, e.errno or 0) from None
        finally:
            disk.close(fd)

    def window(self, start: int, stop: int) -> Window:
        """See WindowFile."""
        return Window(self._view, start, min(stop, len(self._view)), 0)

    def close(self) -> None:
        """See WindowFile."""
        # Windows that were returned keep the mapping alive. It is unmapped with the last of them.
        self._view = np.empty(0, dtype=np.uint8)


class RemoteFile:
    """A file that this process cannot open: `range_needed` names the bytes, and the caller supplies them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffered = Window(np.empty(0, dtype=np.uint8), 0, 0, 0)
        self.range_needed: ColdByteRange | None = None
        """Range that the last call of `window` lacked; None if it lacked nothing."""

    def window(self, start: int, stop: int) -> Window | None:
        """See WindowFile."""
        held = self._buffered
        if held.origin <= start and stop <= held.origin + held.stop:
            return Window(held.buffer, start - held.origin, stop - held.origin, held.origin)
        self.range_needed = ColdByteRange(self._path, start, stop)
        return None

    def supply_bytes(self, data: Any) -> None:
        """Supply the bytes of `range_needed`. Fewer bytes mean that the file ends there."""
        assert self.range_needed is not None, "bytes are supplied after they were wanted"
        buffer = np.zeros(self.range_needed.stop - self.range_needed.start, dtype=np.uint8)
        buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8)[: len(buffer)]
        self._buffered = Window(buffer, 0, len(buffer), self.range_needed.start)
        self.range_needed = None

    def close(self) -> None:
        """See WindowFile."""
        self._buffered = Window(np.empty(0, dtype=np.uint8), 0, 0, 0)
