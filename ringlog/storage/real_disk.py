"""The only module that changes the disk: it creates, writes, resizes, syncs, renames and deletes files (D1).

Assumptions about the kernel and the device:

- A write that returned is visible to every later read of the same kernel.
- After `fdatasync` returned 0, the file's bytes and length survive a power loss.
- After `fsync` of a directory returned 0, the names in it survive a power loss.
- `rename` replaces a name atomically.
- Writes that no sync covers may reach the device in any order, and only partly.

A sync counts as failed if the file system has stopped by the time it returns.

A failed sync is final. The kernel may drop the pages that it could not write and report success next time,
while reads still return the lost bytes. After a failed sync, a handle therefore refuses every operation that
builds on the file (D4). The incarnation ends, and its successor copies the data that it finds.

RealDisk tracks for every file what no sync covers yet. Renaming a file with unsynced bytes is a programming
error, because the name could survive a power loss without the bytes (D2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringlog.errors import DiskError, InvariantViolation
from ringlog.limits import FILL_CHUNK_BYTES
from ringlog.storage.disk import disk_error
from ringlog.storage.vectored_write import Buffer, write_fully

if sys.platform != "win32":  # Windows clients connect by TCP only, but import this module too.
    import fcntl

_NO_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_DIR_SYNC = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
_HOLDER_BYTES_MAX = 256
_ZEROS = memoryview(bytes(FILL_CHUNK_BYTES))
_SAFE_OPEN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_WAIT_BEFORE, _WRITE = 1, 2  # flags of sync_file_range
_NO_SYNC_RANGE = frozenset({errno.ENOSYS, errno.ESPIPE, errno.EINVAL, errno.EOPNOTSUPP})


class UnsyncedState(NamedTuple):
    """Changes of one file that no sync covers yet."""

    bytes: int
    length: bool
    name: bool


class _HandleState:
    """State of one open file. The counters only grow, so they stay correct if a sync runs during a write."""

    __slots__ = (
        "changes",
        "in_doubt",
        "is_truncate_only",
        "is_writable",
        "length",
        "length_synced",
        "name_unsynced",
        "path",
        "poisoned",
        "synced",
        "writing_back",
    )

    def __init__(self, path: str, length: int, *, is_new: bool, is_writable: bool = True) -> None:
        self.path = path
        self.changes = 0  # bytes written or zeroed so far
        self.synced = 0  # value of `changes` when the last successful sync began
        self.length = length
        self.length_synced = length
        self.name_unsynced = is_new
        self.in_doubt = False  # the sync of its directory failed; a later success proves nothing
        self.is_truncate_only = False
        self.is_writable = is_writable
        self.poisoned = ""
        self.writing_back: tuple[int, int] | None = None  # (offset, length) of the last write_back

    def has_unsynced_bytes(self) -> bool:
        return self.changes != self.synced or self.length != self.length_synced


class RealDisk:
    """The file system of the host. Handles are file descriptors and can be used with pread and poll."""

    def __init__(self) -> None:
        self._files: dict[int, _HandleState] = {}
        # Files closed with unsynced bytes, which must not be renamed. Bounded by the number of such files.
        self._left_unsynced: set[str] = set()

    def unsynced(self, fd: int) -> UnsyncedState:
        """Return the changes of this file that no sync covers yet."""
        file = self._file(fd)
        return UnsyncedState(
            file.changes - file.synced, file.length != file.length_synced, file.name_unsynced
        )

    # -- handles --------------------------------------------------------------------------------------

    def create(self, path: str) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE_OPEN, 0o600)
        except OSError as e:
            raise _system("create", path, e) from None
        self._files[fd] = _HandleState(path, 0, is_new=True)
        return fd

    def open_read(self, path: str) -> int:
        return self._open_existing("open_read", path, os.O_RDONLY)

    def open_for_truncate(self, path: str) -> int:
        fd = self._open_existing("open_for_truncate", path, os.O_RDWR)
        self._files[fd].is_truncate_only = True
        return fd

    def open_for_overwrite(self, path: str) -> int:
        return self._open_existing("open_for_overwrite", path, os.O_RDWR)

    def _open_existing(self, call: str, path: str, access: int) -> int:
        try:
            # O_NONBLOCK: a FIFO under this name must not block the open before it is refused.
            fd = os.open(path, access | os.O_NONBLOCK | _SAFE_OPEN)
        except OSError as e:
            raise _system(call, path, e) from None
        length = _require_own_file(call, path, fd)
        self._files[fd] = _HandleState(path, length, is_new=False, is_writable=access != os.O_RDONLY)
        return fd

    def close(self, fd: int) -> None:
        file = self._file(fd)
        del self._files[fd]
        if file.has_unsynced_bytes():
            self._left_unsynced.add(file.path)
        try:
            os.close(fd)
        except OSError as e:
            raise _system("close", file.path, e) from None

    def _file(self, fd: int) -> _HandleState:
        try:
            return self._files[fd]
        except KeyError:
            raise InvariantViolation("unknown or closed file handle", fd=fd) from None

    def _changeable(self, fd: int, call: str) -> _HandleState:
        try:
            file = self._files[fd]
        except KeyError:
            raise InvariantViolation("unknown or closed file handle", fd=fd, call=call) from None
        if file.poisoned:
            raise InvariantViolation(
                "an earlier sync of this file failed: its handle must not be used",
                call=call,
                path=file.path,
                reason=file.poisoned,
            )
        return file

    def _growable(self, fd: int, call: str) -> _HandleState:
        file = self._changeable(fd, call)
        if file.is_truncate_only:
            raise _must_not_grow(file.path, call)
        return file

    # -- contents -------------------------------------------------------------------------------------

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file = self._files.get(fd)  # inlined check, because this is the hot path
        if file is None or file.poisoned or file.is_truncate_only:
            file = self._growable(fd, "write_at")
        before = file.length
        try:
            count = write_fully(lambda pending, at: os.pwritev(fd, pending, at), buffers, offset)
        except OSError as e:
            # The write may be partial. `changes` and `length` are only estimates from here on.
            file.changes += 1
            file.length = max(before, _length_or(fd, before))
            raise _system("write_at", file.path, e, offset=offset) from None
        file.changes += count
        if offset + count > before:
            file.length = offset + count
        return count

    def allocate(self, fd: int, offset: int, length: int) -> None:
        file = self._growable(fd, "allocate")
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as e:
            if e.errno not in _NO_ALLOCATE or length <= 0:
                raise _system("allocate", file.path, e, offset=offset, length=length) from None
            start = max(offset, self.size(fd))
            self.zero_fill(fd, start, offset + length - start)
            return
        file.length = max(file.length, offset + length)

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        stop = offset + length
        while offset < stop:
            offset += self.write_at(fd, [_ZEROS[: stop - offset]], offset)

    def write_back(self, fd: int, offset: int, length: int) -> None:
        # Wait only for the previous range: it has had time to reach the device. A failure counts as a failed
        # sync, because the kernel reports it once per descriptor and the next sync would succeed.
        file = self._changeable(fd, "write_back")
        before, file.writing_back = file.writing_back, (offset, length)
        try:
            _sync_range(fd, offset, length, _WRITE)
            if before is not None:
                _sync_range(fd, *before, _WAIT_BEFORE)
        except OSError as e:
            file.poisoned = f"write_back: {e.strerror}"
            raise _system("write_back", file.path, e, offset=offset, length=length) from None

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        file = self._changeable(fd, "begin_sync")
        try:
            _sync_range(fd, offset, length, _WRITE)
        except OSError as e:
            file.poisoned = f"begin_sync: {e.strerror}"
            raise _system("begin_sync", file.path, e, offset=offset, length=length) from None

    def truncate(self, fd: int, length: int) -> None:
        file = self._changeable(fd, "truncate")
        if file.is_truncate_only and length > file.length:
            raise _must_not_grow(file.path, "truncate")
        try:
            os.ftruncate(fd, length)
        except OSError as e:
            raise _system("truncate", file.path, e, length=length) from None
        file.length = length
        file.changes += 1

    def sync_data(self, fd: int) -> None:
        self._sync(fd, "sync_data", os.fdatasync)

    def sync_file(self, fd: int) -> None:
        self._sync(fd, "sync_file", os.fsync)

    def _sync(self, fd: int, call: str, sync: Callable[[int], None]) -> None:
        file = self._changeable(fd, call)
        changes, length = file.changes, file.length
        try:
            sync(fd)
            _require_alive(fd, is_writable=file.is_writable)
        except OSError as e:
            file.poisoned = f"{call}: {e.strerror}"
            raise _system(call, file.path, e) from None
        file.synced, file.length_synced = changes, length
        self._left_unsynced.discard(file.path)

    # -- names ----------------------------------------------------------------------------------------

    def rename(self, source: str, target: str) -> None:
        renamed = [file for file in tuple(self._files.values()) if file.path == source]
        if source in self._left_unsynced or any(file.has_unsynced_bytes() for file in renamed):
            raise InvariantViolation("file must be synced before rename", path=source, target=target)
        try:
            os.rename(source, target)
        except OSError as e:
            raise _system("rename", source, e, target=target) from None
        self._left_unsynced.discard(target)
        for file in renamed:
            file.path, file.name_unsynced, file.in_doubt = target, True, False

    def unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except OSError as e:
            raise _system("unlink", path, e) from None
        self._left_unsynced.discard(path)

    def make_dir(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            _require_own_directory(path)
        except OSError as e:
            raise _system("make_dir", path, e) from None

    def remove_dir(self, path: str) -> None:
        try:
            os.rmdir(path)
        except OSError as e:
            raise _system("remove_dir", path, e) from None

    def sync_dir(self, path: str) -> None:
        inside = [
            file
            for file in tuple(self._files.values())
            if file.name_unsynced and os.path.dirname(file.path) == path.rstrip("/")
        ]
        try:
            _sync_directory(path)
        except OSError as e:
            for file in inside:
                file.in_doubt = True
            raise _system("sync_dir", path, e) from None
        for file in inside:
            file.name_unsynced = file.in_doubt

    # -- reads ----------------------------------------------------------------------------------------

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        try:
            data = os.pread(fd, length, offset)
            while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
                data += more
        except OSError as e:
            raise _system("read_at", self._file(fd).path, e, offset=offset) from None
        return data

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        done = 0
        if memoryview(buffer).nbytes == 0:
            return 0  # an empty view cannot be cast
        view = memoryview(buffer).cast("B")
        try:
            while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
                done += count
        except OSError as e:
            raise _system("read_into", self._file(fd).path, e, offset=offset + done) from None
        return done

    def size(self, fd: int) -> int:
        try:
            return os.fstat(fd).st_size
        except OSError as e:
            raise _system("size", self._file(fd).path, e) from None

    def list_dir(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError as e:
            raise _system("list_dir", path, e) from None

    def exists(self, path: str) -> bool:
        try:
            os.lstat(path)
        except FileNotFoundError:
            return False
        except OSError as e:
            raise _system("exists", path, e) from None
        return True

    # -- locks ----------------------------------------------------------------------------------------

    def lock(self, path: str) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _SAFE_OPEN, 0o600)
        except OSError as e:
            raise _system("lock", path, e) from None
        length = _require_own_file("lock", path, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = _read_holder(fd)
            os.close(fd)
            raise _system("lock", path, e, holder=holder) from None
        _write_holder(fd)
        self._files[fd] = _HandleState(path, length, is_new=False)
        return fd

    def unlock(self, fd: int) -> None:
        self.close(fd)


def _must_not_grow(path: str, call: str) -> InvariantViolation:
    return InvariantViolation(
        "file was opened with open_for_truncate and must not grow", call=call, path=path
    )


def _sync_range(fd: int, offset: int, length: int, flags: int) -> None:
    """Call sync_file_range(2). A no-op if the file system does not support it. Raise OSError on failure."""
    if _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), flags) != 0:
        number = ctypes.get_errno()
        if number not in _NO_SYNC_RANGE:
            raise OSError(number, os.strerror(number))


def _require_alive(fd: int, *, is_writable: bool) -> None:
    """Raise OSError if the file system of this file was stopped, by an error or by its administrator."""
    # On Linux 6.18, ext4 and xfs return 0 from an fdatasync that runs while they stop, although the data is
    # lost: the change of unwritten extents into written ones is dropped silently. Calls of 0 bytes change
    # nothing. Both refuse the read after the stop. If an error has made ext4 read-only, it refuses the write.
    # Both calls take 1.4 us; a second open for writing takes 14 us.
    os.pread(fd, 0, 0)
    if is_writable:
        os.pwrite(fd, b"", 0)


def _system(call: str, path: str, cause: OSError, **detail: Any) -> DiskError:
    return disk_error(call, path, cause.errno or 0, cause.strerror or str(cause), **detail)


def _read_holder(fd: int) -> str:
    try:
        return os.pread(fd, _HOLDER_BYTES_MAX, 0).decode("utf-8", "replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _write_holder(fd: int) -> None:
    """Write this process's pid into the lock file. It is information for operators; no code depends on it."""
    # Writing fails on a full disk. The engine must start anyway: the lock does not depend on the contents.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)


def _length_or(fd: int, otherwise: int) -> int:
    try:
        return os.fstat(fd).st_size
    except OSError:
        return otherwise


def _require_own_file(call: str, path: str, fd: int) -> int:
    """Return the length of a regular file of this user with one hard link; close and refuse all others."""
    try:
        facts = os.fstat(fd)
    except OSError as e:
        os.close(fd)
        raise _system(call, path, e) from None
    reason = ""
    if not stat.S_ISREG(facts.st_mode):
        reason = "not a regular file"
    elif facts.st_uid != os.geteuid():
        reason = f"owner must be uid {os.geteuid()}, got uid {facts.st_uid}"
    elif facts.st_nlink != 1:
        reason = f"number of hard links must be 1, got {facts.st_nlink}"
    if reason:
        os.close(fd)
        raise disk_error(call, path, errno.EPERM, reason)
    return facts.st_size


def _require_own_directory(path: str) -> None:
    try:
        facts = os.lstat(path)
    except OSError as e:
        raise _system("make_dir", path, e) from None
    if not stat.S_ISDIR(facts.st_mode):
        raise disk_error("make_dir", path, errno.EEXIST, "exists and is not a directory")
    if facts.st_uid != os.geteuid():
        reason = f"owner must be uid {os.geteuid()}, got uid {facts.st_uid}"
        raise disk_error("make_dir", path, errno.EPERM, reason)


def _sync_directory(path: str) -> None:
    """Sync a directory. If the file system does not support that, names may roll back after a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE_OPEN)
    try:
        os.fsync(fd)
        os.fstat(fd)  # See _require_alive. A directory cannot be read; xfs refuses this call after a stop.
    except OSError as e:
        if e.errno not in _NO_DIR_SYNC:
            raise
    finally:
        os.close(fd)
