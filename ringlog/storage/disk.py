"""Every call that changes the disk. Nobody else creates, writes, sizes, syncs, renames or unlinks.

What is assumed of the kernel and the device: a write that returned is seen by every later read of the
same kernel; `fdatasync` that returned 0 makes the file's bytes and its length survive power loss;
`fsync` of the directory does that for names; `rename` replaces a name as a whole. Nothing is assumed
about the order or the wholeness of writes that no sync covers.

A failed sync is final. The kernel may drop the pages it could not write and report success next time,
while reads still show the lost bytes, so a handle whose sync failed refuses everything that would
build on it (D-17, RD-2): the incarnation ends and its successor copies what it finds.

For every file it made, RealDisk knows what no sync covers yet (RD-9). Renaming a file whose bytes are
not synced is a programmer error: the name could survive without them (ST-3).

A Disk is used from any thread, but each handle from one thread at a time, except that a sync may run
while another thread writes: what was written before the sync began counts as covered, no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ringlog.descriptors import descriptor_limit_message
from ringlog.errors import DiskError, InvariantViolation
from ringlog.limits import FILL_CHUNK_BYTES
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.storage.vectored_write import Buffer, write_fully

if sys.platform != "win32":  # Where clients go by TCP, and import this all the same.
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
    """What no sync covers yet of one file."""

    bytes: int
    length: bool
    name: bool


class Disk(Protocol):
    """The disk as everything above sees it. A handle is an int that only its own Disk understands.

    Every failure of the system is a DiskError with call, path, errno and strerror. Use of a handle
    that is closed, or whose sync failed, is an InvariantViolation.
    """

    def create(self, path: str) -> int:
        """Make a new file, 0600, for reading and writing; fails when the name exists."""
        ...

    def open_read(self, path: str) -> int:
        """Open an existing regular file of ours that has one name; anything else is refused."""
        ...

    def open_cut(self, path: str) -> int:
        """Open an existing file, as open_read does, to give back its unused end.

        It can be read, shortened and synced; anything that would add to it is an InvariantViolation,
        since a file belongs to the incarnation that made it (RD-3).
        """
        ...

    def open_marks(self, path: str) -> int:
        """Open an existing file, as open_read does, to overwrite bytes of it where they lie.

        For the two kinds of file that are changed after they were made: the deletion marks of a segment, and
        the register of a log.
        """
        ...

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all bytes of all buffers one after another from `offset`; returns how many."""
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space and extend the length; bytes already there are kept, new ones read as zero."""
        ...

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        """Overwrite a range with zeros."""
        ...

    def write_back(self, fd: int, offset: int, length: int) -> None:
        """Begin to write a range to the device, and wait for the range of the call before.

        Promises nothing that survives a crash: it spreads out what a later sync would do at once, in the
        way of everybody else's syncs. After a failure the file is as after a failed sync.
        """
        ...

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        """Begin to write a range to the device, for a sync that follows: the device works while we do.

        Waits for nothing and promises nothing. What fails later is told by the sync; after a failure here the
        file is as after a failed sync.
        """
        ...

    def sync_data(self, fd: int) -> None:
        """Make bytes and length durable."""
        ...

    def sync_file(self, fd: int) -> None:
        """Make bytes, length and the file's other facts durable."""
        ...

    def truncate(self, fd: int, length: int) -> None:
        """Set the length in bytes."""
        ...

    def close(self, fd: int) -> None:
        """Give the handle back. Syncs nothing."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what had it; durable after sync_dir."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name; durable after sync_dir."""
        ...

    def make_dir(self, path: str) -> None:
        """Make one directory, 0700; an existing one is fine if it is ours and not a link."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory (else ENOTEMPTY); durable after sync_dir of the one it is in."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read `length` bytes, fewer only at the end of the file."""
        ...

    def read_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        """Fill a writable buffer; returns the bytes read, fewer only at the end of the file."""
        ...

    def size(self, fd: int) -> int:
        """Length of the file in bytes."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether the name is there; a failure to look is a DiskError, not an absence."""
        ...

    def lock(self, path: str) -> int:
        """Take the exclusive lock of a file, made if absent; DiskError with `holder` when it is held."""
        ...

    def unlock(self, fd: int) -> None:
        """Let go of a lock; the file stays."""
        ...


def disk_error(call: str, path: str, code: int, reason: str = "", **detail: Any) -> DiskError:
    """Build the error every implementation raises; `reason` defaults to the system's words."""
    text = reason or os.strerror(code)
    said = descriptor_limit_message() if code in {errno.EMFILE, errno.ENFILE} else text
    return DiskError(f"{call} failed: {said}", call=call, path=path, errno=code, strerror=text, **detail)


class _HandleState:
    """What RealDisk knows of one open file. Counters only grow, so a sync beside a write stays right."""

    __slots__ = (
        "changes",
        "in_doubt",
        "is_truncate_only",
        "length",
        "length_synced",
        "name_unsynced",
        "path",
        "poisoned",
        "synced",
        "writing_back",
    )

    def __init__(self, path: str, length: int, *, is_new: bool) -> None:
        self.path = path
        self.changes = 0  # bytes written or zeroed so far
        self.synced = 0  # `changes` when the last successful sync began
        self.length = length
        self.length_synced = length
        self.name_unsynced = is_new
        self.in_doubt = False  # its directory's sync failed; a later success proves nothing
        self.is_truncate_only = False
        self.poisoned = ""
        self.writing_back: tuple[int, int] | None = None  # what was last given to the device

    def has_unsynced_bytes(self) -> bool:
        return self.changes != self.synced or self.length != self.length_synced


class RealDisk:
    """The host's file system. Handles are file descriptors, so pread and poll may be used on them."""

    def __init__(self) -> None:
        self._files: dict[int, _HandleState] = {}
        # Files closed with unsynced bytes: nobody may rename them. Bounded by what was written unsynced.
        self._left_unsynced: set[str] = set()

    def unsynced(self, fd: int) -> UnsyncedState:
        """Say what no sync covers yet of this file."""
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

    def open_cut(self, path: str) -> int:
        fd = self._open_existing("open_cut", path, os.O_RDWR)
        self._files[fd].is_truncate_only = True
        return fd

    def open_marks(self, path: str) -> int:
        return self._open_existing("open_marks", path, os.O_RDWR)

    def _open_existing(self, call: str, path: str, access: int) -> int:
        try:
            # O_NONBLOCK: a FIFO put in a file's place must not hang us before it is refused.
            fd = os.open(path, access | os.O_NONBLOCK | _SAFE_OPEN)
        except OSError as e:
            raise _system(call, path, e) from None
        length = _require_own_file(call, path, fd)
        self._files[fd] = _HandleState(path, length, is_new=False)
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
            raise InvariantViolation("not an open handle of this disk", fd=fd) from None

    def _changeable(self, fd: int, call: str) -> _HandleState:
        try:
            file = self._files[fd]
        except KeyError:
            raise InvariantViolation("not an open handle of this disk", fd=fd, call=call) from None
        if file.poisoned:
            raise InvariantViolation(
                "a sync of this file failed; nothing may build on it",
                call=call,
                path=file.path,
                reason=file.poisoned,
            )
        return file

    def _growable(self, fd: int, call: str) -> _HandleState:
        file = self._changeable(fd, call)
        if file.is_truncate_only:
            raise _adds(file.path, call)
        return file

    # -- contents -------------------------------------------------------------------------------------

    def write_at(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        file = self._files.get(fd)  # written out: this is the hot path
        if file is None or file.poisoned or file.is_truncate_only:
            file = self._growable(fd, "write_at")
        before = file.length
        try:
            count = write_fully(lambda pending, at: os.pwritev(fd, pending, at), buffers, offset)
        except OSError as e:
            # Some of it may be there: both facts are unknown until the file is given up.
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
        # Waiting is for the piece before: it had the time in which this one was made, so there is mostly
        # nothing to wait for. A failure is a failed sync: the kernel tells it once for each descriptor, and
        # the sync that follows would succeed.
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
            raise _adds(file.path, "truncate")
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
        except OSError as e:
            file.poisoned = f"{call}: {e.strerror}"
            raise _system(call, file.path, e) from None
        file.synced, file.length_synced = changes, length
        self._left_unsynced.discard(file.path)

    # -- names ----------------------------------------------------------------------------------------

    def rename(self, source: str, target: str) -> None:
        renamed = [file for file in tuple(self._files.values()) if file.path == source]
        if source in self._left_unsynced or any(file.has_unsynced_bytes() for file in renamed):
            raise InvariantViolation(
                "rename of a file whose bytes are not synced", path=source, target=target
            )
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

    # -- looking --------------------------------------------------------------------------------------

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


def _adds(path: str, call: str) -> InvariantViolation:
    return InvariantViolation("a file opened to be cut cannot be added to", call=call, path=path)


def _sync_range(fd: int, offset: int, length: int, flags: int) -> None:
    """sync_file_range(2); nothing where the file system does not know it. Raises OSError."""
    if _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), flags) != 0:
        number = ctypes.get_errno()
        if number not in _NO_SYNC_RANGE:
            raise OSError(number, os.strerror(number))


def _system(call: str, path: str, cause: OSError, **detail: Any) -> DiskError:
    return disk_error(call, path, cause.errno or 0, cause.strerror or str(cause), **detail)


def _read_holder(fd: int) -> str:
    try:
        return os.pread(fd, _HOLDER_BYTES_MAX, 0).decode("utf-8", "replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _write_holder(fd: int) -> None:
    """Name ourselves for whoever is refused; a pid is for people and decides nothing (RD-8)."""
    # A full disk must not keep an engine from starting: the lock is held whether or not this is written.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)


def _length_or(fd: int, otherwise: int) -> int:
    try:
        return os.fstat(fd).st_size
    except OSError:
        return otherwise


def _require_own_file(call: str, path: str, fd: int) -> int:
    """Return the length of a regular file that is ours and has one name; close and refuse others."""
    try:
        facts = os.fstat(fd)
    except OSError as e:
        os.close(fd)
        raise _system(call, path, e) from None
    reason = ""
    if not stat.S_ISREG(facts.st_mode):
        reason = "not a regular file"
    elif facts.st_uid != os.geteuid():
        reason = f"owned by uid {facts.st_uid}, not by us"
    elif facts.st_nlink != 1:
        reason = f"has {facts.st_nlink} names, must have one"
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
        raise disk_error("make_dir", path, errno.EPERM, f"owned by uid {facts.st_uid}, not by us")


def _sync_directory(path: str) -> None:
    """Sync a directory; file systems that cannot are tolerated (ST-9), and names there may roll back."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE_OPEN)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_DIR_SYNC:
            raise
    finally:
        os.close(fd)


def replace_file(disk: Disk, directory: str, name: str, data: Buffer) -> None:
    """Make `directory/name` hold `data`, whole and durable, or leave it as it was (ST-3)."""
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
