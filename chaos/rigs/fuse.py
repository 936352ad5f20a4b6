"""The few FUSE messages that are needed to serve one file through /dev/fuse."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

FILE_NAME = b"disk"
ROOT_NODE, FILE_NODE = 1, 2
WRITE_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = WRITE_BYTES_MAX + 4096

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE = 1, 2, 3, 4, 14, 15, 16, 17, 18
FSYNC, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = 20, 25, 26, 36, 38, 42

_IN = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_READ_IN = struct.Struct("=QQIIQII")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")
_DIRECT_IO = 1
"""Flag of OPEN: the kernel caches no pages of the file, so that changes below it become visible."""
_ASYNC_READ, _BIG_WRITES, _MAX_PAGES = 1, 1 << 5, 1 << 22
_MINOR = 31
_FOR_EVER_S = 1 << 30


@dataclass(frozen=True, slots=True)
class Request:
    """One message from the kernel."""

    opcode: int
    unique: int
    node: int
    body: memoryview

    def range(self) -> tuple[int, int]:
        """Return offset and length of a read or write."""
        _, offset, size, *_ = _READ_IN.unpack_from(self.body)
        return offset, size

    def data(self) -> memoryview:
        """Return the bytes of a write."""
        return self.body[_READ_IN.size :]


def receive(fd: int) -> Request | None:
    """Return the next request, or None if the file system was unmounted."""
    try:
        data = os.read(fd, REQUEST_BYTES_MAX)
    except OSError as e:
        if e.errno == errno.ENODEV:
            return None
        if e.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:  # ENOENT: the kernel cancelled the request.
            return Request(INTERRUPT, 0, 0, memoryview(b""))
        raise
    length, opcode, unique, node, *_ = _IN.unpack_from(data)
    return Request(opcode, unique, node, memoryview(data)[_IN.size : length])


def reply(fd: int, unique: int, body: bytes | memoryview = b"", error: int = 0) -> None:
    """Reply to a request, with an errno or with a body."""
    size = _OUT.size + (0 if error else len(body))
    try:
        os.writev(fd, [_OUT.pack(size, -error, unique), b"" if error else body])
    except OSError as e:
        if e.errno not in {errno.ENOENT, errno.ENODEV}:  # The request is no longer pending.
            raise


def init_body() -> bytes:
    """Return the reply to INIT."""
    flags = _ASYNC_READ | _BIG_WRITES | _MAX_PAGES
    return _INIT_OUT.pack(
        7, _MINOR, 0, flags, 16, 12, WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX // 4096, 0, 0, 0, 0
    )


def _attributes(node: int, size: int) -> bytes:
    mode, length = (0o040755, 0) if node == ROOT_NODE else (0o100600, size)
    return _ATTR.pack(node, length, length // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def attributes_body(node: int, size: int) -> bytes:
    """Return the reply to GETATTR."""
    return struct.pack("=QII", _FOR_EVER_S, 0, 0) + _attributes(node, size)


def entry_body(size: int) -> bytes:
    """Return the reply to LOOKUP of the one file."""
    return struct.pack("=QQQQII", FILE_NODE, 1, _FOR_EVER_S, _FOR_EVER_S, 0, 0) + _attributes(FILE_NODE, size)


OPEN_BODY = struct.pack("=QIi", 0, _DIRECT_IO, 0)
STATFS_BODY = bytes(80)


def written_body(size: int) -> bytes:
    """Return the reply to WRITE."""
    return struct.pack("=II", size, 0)
