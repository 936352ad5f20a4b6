"""Disk: the interface for all access to files whose contents must survive a crash or a power loss.

Any thread may use a Disk, but only one thread at a time may use a handle. Exception: a sync may run while
another thread writes. Such a sync covers only the bytes that were written before it began.

real_disk.py implements it for the file system of the host.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ringlog.descriptors import descriptor_limit_message
from ringlog.errors import DiskError
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.storage.vectored_write import Buffer


class Disk(Protocol):
    """Interface for all access to the disk.

    A handle is an int that is valid only for the Disk that returned it. Every failure of the system
    raises DiskError with call, path, errno and strerror. Use of a handle that is closed, or whose sync
    failed, raises InvariantViolation.
    """

    def create(self, path: str) -> int:
        """Create a file with mode 0600 for reading and writing. Raise DiskError if the name exists."""
        ...

    def open_read(self, path: str) -> int:
        """Open an existing regular file for reading.

        A file that is not regular, belongs to another user, or has several hard links raises DiskError
        (EPERM).
        """
        ...

    def open_for_truncate(self, path: str) -> int:
        """Open an existing file, with the checks of open_read, to cut its unused end.

        The file can be read, shortened and synced. An operation that would add to it raises
        InvariantViolation, because only the incarnation that created a file may write it (D3).
        """
        ...

    def open_for_overwrite(self, path: str) -> int:
        """Open an existing file, with the checks of open_read, to overwrite bytes in place.

        Only two kinds of file change after their creation: the deletion marks of a segment, and the register
        of a log.
        """
        ...

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all bytes of all buffers consecutively at `offset`. Return the number of bytes."""
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space and extend the length if needed. Existing bytes stay, new bytes read as zero."""
        ...

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        """Overwrite a range with zeros."""
        ...

    def write_back(self, fd: int, offset: int, length: int) -> None:
        """Start writing a range to the device, and wait for the range of the previous call.

        The call makes no bytes durable. It spreads the work of a later sync over time, so that this sync does
        not delay the syncs of other processes. After a failure the handle behaves as after a failed sync.
        """
        ...

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        """Start writing a range to the device, so that a sync that follows takes less time.

        The call does not wait and makes no bytes durable. The sync reports later failures of the device. If
        this call fails, the handle behaves as after a failed sync.
        """
        ...

    def sync_data(self, fd: int) -> None:
        """Make bytes and length durable."""
        ...

    def sync_file(self, fd: int) -> None:
        """Make bytes, length and the file's metadata durable."""
        ...

    def truncate(self, fd: int, length: int) -> None:
        """Set the file's length to `length` bytes."""
        ...

    def close(self, fd: int) -> None:
        """Close the handle without a sync."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file and replace an existing target. The name is durable after sync_dir."""
        ...

    def unlink(self, path: str) -> None:
        """Delete a name. The deletion is durable after sync_dir."""
        ...

    def make_dir(self, path: str) -> None:
        """Create one directory with mode 0700. Accept an existing one of this user that is no link."""
        ...

    def remove_dir(self, path: str) -> None:
        """Delete an empty directory; durable after sync_dir of its parent."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read `length` bytes. The result is shorter only at the end of the file."""
        ...

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        """Fill a writable buffer. Return the bytes read, fewer than its size only at the end of the file."""
        ...

    def size(self, fd: int) -> int:
        """Length of the file in bytes."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether the name exists. If that cannot be determined, raise DiskError."""
        ...

    def lock(self, path: str) -> int:
        """Take the exclusive lock of a file and create the file if needed; return a handle.

        If another process has the lock, raise DiskError with `holder`.
        """
        ...

    def unlock(self, fd: int) -> None:
        """Release a lock. The file stays."""
        ...


def disk_error(call: str, path: str, code: int, reason: str = "", **detail: Any) -> DiskError:
    """Build the DiskError that every implementation raises. `reason` defaults to the text of the errno."""
    text = reason or os.strerror(code)
    said = descriptor_limit_message() if code in {errno.EMFILE, errno.ENFILE} else text
    return DiskError(f"{call} failed: {said}", call=call, path=path, errno=code, strerror=text, **detail)


def unlink_if_present(disk: Disk, path: str) -> bool:
    """Delete a file that another process may delete at the same time. Return False if it was gone."""
    try:
        disk.unlink(path)
    except DiskError as e:
        if e.errno != errno.ENOENT:
            raise
        return False
    return True


def replace_file(disk: Disk, directory: str, name: str, data: Buffer) -> None:
    """Replace the contents of `directory/name` by `data`, durably and atomically (D2)."""
    target = os.path.join(directory, name)
    temporary = target + TMP_SUFFIX
    if disk.exists(temporary):
        disk.unlink(temporary)
    fd = disk.create(temporary)
    try:
        disk.write_at(fd, [data], 0)
        disk.sync_file(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, target)
    disk.sync_dir(directory)
