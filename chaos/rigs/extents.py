"""Location of a file on its device (FIEMAP), so that errors can target its bytes and nothing else."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import NamedTuple

_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS_MAX = 256
_SYNC_FIRST = 1
_WHOLE_FILE = (1 << 64) - 1


class Range(NamedTuple):
    """Bytes [low, high) of a device."""

    low: int
    high: int


def range_of(path: Path) -> Range:
    """Return the device range from the first to the last byte of a file.

    It includes blocks of other files in between. Raises OSError, and ValueError for a file without blocks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buffer = bytearray(_HEADER.size + _EXTENTS_MAX * _EXTENT.size)
        _HEADER.pack_into(buffer, 0, 0, _WHOLE_FILE, _SYNC_FIRST, 0, _EXTENTS_MAX, 0)
        fcntl.ioctl(fd, _FIEMAP, buffer)
    finally:
        os.close(fd)
    count = _HEADER.unpack_from(buffer)[3]
    found = [_EXTENT.unpack_from(buffer, _HEADER.size + i * _EXTENT.size) for i in range(count)]
    if not found:
        raise ValueError(f"{path} has no blocks on its device")
    return Range(min(each[1] for each in found), max(each[1] + each[2] for each in found))


def forget_pages(path: Path) -> None:
    """Drop the cached pages of a file. Dirty pages stay."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
