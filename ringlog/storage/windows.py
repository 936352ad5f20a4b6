"""Windows of a file for TopicReader: read with pread, mapped, or handed in by somebody who fetched them."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringlog.errors import RinglogError
from ringlog.storage.disk import Disk, disk_error


class Window(NamedTuple):
    """Bytes of a file: scan `buffer` from `start` to `stop`; `origin` is the file offset of byte 0."""

    buffer: Any
    start: int
    stop: int
    origin: int


class ColdByteRange(NamedTuple):
    """Bytes [start, stop) of a cold segment's data part, named as in its Extent, that a reader needs next."""

    path: str
    start: int
    stop: int


class WindowFile(Protocol):
    """Where a reader gets its windows."""

    def window(self, start: int, stop: int) -> Window | None:
        """Bytes of [start, stop), fewer at the file's end; None when they have to be fetched first."""
        ...

    def close(self) -> None:
        """Let go of the file. Windows handed out stay valid."""
        ...


class PreadFile:
    """Reads with pread into fresh private buffers: a failing disk is an error, not a signal (RD-15)."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._fd = -1
        self._fd = disk.open_read(path)

    def window(self, start: int, stop: int) -> Window:
        """See WindowFile."""
        buffer = np.empty(stop - start, dtype=np.uint8)
        count = self._disk.read_into(self._fd, buffer, start)
        return Window(buffer, 0, count & ~7, start)

    def close(self) -> None:
        """See WindowFile."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)

    def __del__(self) -> None:
        # A reader that was dropped, not closed, is perhaps all that knew of it.
        with suppress(RinglogError):
            self.close()


class MappedFile:
    """Maps the file: no copy, but damage under the mapping kills the process. For expendable readers."""

    def __init__(self, disk: Disk, path: str) -> None:
        fd = disk.open_read(path)
        try:
            size = disk.size(fd) & ~7
            self._view = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
        except OSError as e:
            # A mapping takes a descriptor of its own, which may be the one too many, and memory.
            raise disk_error("map", path, e.errno or 0) from None
        finally:
            disk.close(fd)

    def window(self, start: int, stop: int) -> Window:
        """See WindowFile."""
        return Window(self._view, start, min(stop, len(self._view)), 0)

    def close(self) -> None:
        """See WindowFile."""
        # Views handed out keep the mapping alive; the last one to go unmaps it.
        self._view = np.empty(0, dtype=np.uint8)


class RemoteFile:
    """A file that only its owner can reach: it says what it wants and is handed it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffered = Window(np.empty(0, dtype=np.uint8), 0, 0, 0)
        self.range_needed: ColdByteRange | None = None
        """What the last call of `window` lacked."""

    def window(self, start: int, stop: int) -> Window | None:
        """See WindowFile."""
        held = self._buffered
        if held.origin <= start and stop <= held.origin + held.stop:
            return Window(held.buffer, start - held.origin, stop - held.origin, held.origin)
        self.range_needed = ColdByteRange(self._path, start, stop)
        return None

    def supply_bytes(self, data: Any) -> None:
        """Hand in what `wanted` names; fewer bytes mean that the file ends there."""
        assert self.range_needed is not None, "bytes are supplied after they were wanted"
        buffer = np.zeros(self.range_needed.stop - self.range_needed.start, dtype=np.uint8)
        buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8)[: len(buffer)]
        self._buffered = Window(buffer, 0, len(buffer), self.range_needed.start)
        self.range_needed = None

    def close(self) -> None:
        """See WindowFile."""
        self._buffered = Window(np.empty(0, dtype=np.uint8), 0, 0, 0)
