"""Files in shared memory: created as a whole, and checked when they are opened.

A process that writes to a sparse file on a full tmpfs is killed, so all space is allocated before the file is
mapped. An opened file must be a regular file with one name, owned by this user, private, and of the expected
size. Another user can therefore not substitute a symlink, a pipe or a file of his own.
"""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import sys

from ringlog.entropy import random_hex
from ringlog.errors import KernelMissing, RinglogError

FILE_MODE = 0o600
ORDERED_MACHINES = frozenset({"x86_64", "AMD64"})


def stores_are_ordered() -> bool:
    """Return whether other CPUs see aligned 8-byte stores whole and in program order, as on x86-64."""
    return platform.machine() in ORDERED_MACHINES


def unsupported_host_reason() -> str:
    """Return why no engine can run on this host, in one line; empty if one can."""
    if sys.platform == "linux" and stores_are_ordered():
        try:
            from ringlog import native_kernel  # noqa: F401  It is there.
        except KernelMissing as e:
            return str(e)
        return ""
    return (
        f"engines need Linux on x86-64, and this is {platform.system()} on {platform.machine()}; "
        "run one elsewhere and connect to ringlog://HOST:PORT?server_key=..."
    )


def make_file(path: str, size: int, first_bytes: bytes, error: type[RinglogError]) -> None:
    """Create `path` with `size` allocated bytes: `first_bytes`, then zeros. All or nothing.

    Raises `error`, with path and bytes, if the name exists or the space is not available.
    """
    if os.path.lexists(path):
        raise error("cannot create: the file exists", path=path, bytes=size)
    # Use a temporary name first: a creator that dies half-way leaves no file under the final name.
    unfinished = f"{path}.{random_hex(4)}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(unfinished, flags, FILE_MODE)
    except OSError as e:
        raise error(f"cannot create: {e.strerror}", path=path, bytes=size, errno=e.errno) from None
    try:
        os.fchmod(fd, FILE_MODE)
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, first_bytes, 0)
        os.rename(unfinished, path)
    except OSError as e:
        os.unlink(unfinished)
        raise error(f"cannot allocate: {e.strerror}", path=path, bytes=size, errno=e.errno) from None
    finally:
        os.close(fd)


def remove_file(path: str) -> None:
    """Remove a name. Existing mappings of the file stay valid. A missing file is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def open_file(path: str, error: type[RinglogError], *, writable: bool = True) -> tuple[int, int]:
    """Open a file that make_file created. Returns (descriptor, size); raises `error` with the difference."""
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        # O_NONBLOCK: if the path is a pipe, the open must not wait for its other end.
        fd = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise error(f"cannot open: {e.strerror}", path=path, errno=e.errno) from None
    try:
        return fd, _checked_size(fd, path, error)
    except BaseException:
        os.close(fd)
        raise


def _checked_size(fd: int, path: str, error: type[RinglogError]) -> int:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise error("not a regular file", path=path, mode=oct(facts.st_mode))
    if facts.st_uid != os.geteuid():
        raise error("owned by another user", path=path, uid=facts.st_uid, expected=os.geteuid())
    if stat.S_IMODE(facts.st_mode) != FILE_MODE:
        raise error(
            "mode is not private", path=path, mode=oct(stat.S_IMODE(facts.st_mode)), expected=oct(FILE_MODE)
        )
    if facts.st_nlink != 1:
        raise error("must have exactly one link", path=path, links=facts.st_nlink)
    return facts.st_size
