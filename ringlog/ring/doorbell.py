"""Wake-ups without data.

Protocol between a sleeper S and a ringer R that has work for it:

1. If S has no work, it sets its *asleep* word to 1 (a shard: on the board; a client: `wants` of its ring).
2. S polls all its sources once more. Only if there is still no work, it waits for its bell and other
   descriptors, at most for the back-up poll interval.
3. After the wake-up, S sets the word to 0, drains the bell and polls all sources.
4. R publishes its work first. Then it reads the word, and rings only if S is asleep.

A bell is only a hint. It can be lost: R may die before step 4, or its load of the word may overtake its own
store, which processors permit. It can also be repeated, because a drained bell may ring again. The second
poll in step 2 makes a loss rare, and the back-up poll makes it harmless. A sleeper must not conclude from a
bell that there is work.

Processes that share no ancestor use a named pipe. `BellListener` opens it for reading *and* writing, so that
it never reads an end of file and a ringer always finds a reader. Threads of one process use an eventfd
(`EventBell`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ringlog.errors import RingError

BELL_MODE = 0o600
_DRAIN_BYTES = 256
"""Rings read at a time. Usually there is one, and a larger buffer would be allocated for nothing."""
_RING = b"\0"
_NOBODY = frozenset({errno.ENXIO, errno.ENOENT, errno.EPIPE})
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def make_bell(path: str) -> None:
    """Create a named pipe with mode 0600. Raise RingError if the name exists or there is no space."""
    try:
        os.mkfifo(path, BELL_MODE)
        os.chmod(path, BELL_MODE)
    except OSError as e:
        raise RingError(f"cannot create bell: {e.strerror}", path=path, errno=e.errno) from None


def _open_bell(path: str, access: int) -> int:
    fd = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    facts = os.fstat(fd)
    if not stat.S_ISFIFO(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        os.close(fd)
        raise RingError(
            "bell must be a named pipe of this user with mode 0600",
            path=path,
            mode=oct(facts.st_mode),
            uid=facts.st_uid,
        )
    return fd


class BellListener:
    """The sleeper's end of a named pipe."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = _open_bell(path, os.O_RDWR)
        except OSError as e:
            raise RingError(f"cannot open bell: {e.strerror}", path=path, errno=e.errno) from None

    def fileno(self) -> int:
        """Descriptor that becomes readable when the bell rings."""
        return self._fd

    def drain(self) -> int:
        """Discard all rings so far. Return their number, 0 = none."""
        total = 0
        try:
            while count := len(os.read(self._fd, _DRAIN_BYTES)):
                total += count
                if count < _DRAIN_BYTES:
                    break
        except BlockingIOError:
            return total
        return total

    def close(self) -> None:
        """Close the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BellRinger:
    """The ringer's end of a named pipe. It is opened at the first ring, and again after an error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def ring(self) -> bool:
        """Wake up the sleeper. Return False if no process listens, or if no descriptor is available.

        A full pipe counts as a wake-up. What was published stays published without a bell, because the
        sleeper polls. A lack of descriptors must therefore not become an error of the publisher.
        """
        try:
            if self._fd < 0:
                self._fd = _open_bell(self._path, os.O_WRONLY)
            os.write(self._fd, _RING)
        except BlockingIOError:
            return True
        except OSError as e:
            self.close()
            if e.errno in _NOBODY | _NO_ROOM:
                return False
            raise RingError(f"cannot ring: {e.strerror}", path=self._path, errno=e.errno) from None
        return True

    def close(self) -> None:
        """Close the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EventBell:
    """An eventfd with which one thread wakes up another thread of its process."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the bell rings."""
        return self._fd

    def ring(self) -> None:
        """Wake up the sleeper. Any thread may call this at any time."""
        # A full counter is readable already. A closed bell has no sleeper.
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._fd, 1)

    def drain(self) -> int:
        """Discard all rings so far. Return their number, 0 = none. Poll for work only after this call."""
        try:
            return os.eventfd_read(self._fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
