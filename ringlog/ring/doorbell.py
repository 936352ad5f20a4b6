"""Wake-ups without data.

The protocol, for a sleeper S and whoever has work for it, R:

1. S, with nothing to do, sets its *asleep* word to 1 (a shard: on the board; a client: `wants` of its ring).
2. S looks at all its sources once more. Only if there is still nothing it waits, on its bell among others,
   for at most the back-up poll interval.
3. Awake, S sets the word to 0, drains the bell, looks at all sources.
4. R publishes its work first, then looks at the word, and rings only when S is asleep.

A ring is a hint: it may be lost (R died before step 4, or its look at the word overtook its own store,
which processors may do) or doubled (a drained bell rings again). The re-check of step 2 makes losing rare,
the back-up poll makes it harmless. A sleeper never trusts a bell to mean work.

Processes that share no ancestor use a named pipe: `BellListener` opens it for reading *and* writing, so
that it never sees an end of file and a ringer never finds nobody. Between threads it is an
eventfd (`EventBell`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ringlog.errors import RingError

BELL_MODE = 0o600
_DRAIN_BYTES = 65_536
_RING = b"\0"
_NOBODY = frozenset({errno.ENXIO, errno.ENOENT, errno.EPIPE})
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def make_bell(path: str) -> None:
    """Make a named pipe only we can use; raises RingError when the name is taken or there is no room."""
    try:
        os.mkfifo(path, BELL_MODE)
        os.chmod(path, BELL_MODE)
    except OSError as e:
        raise RingError(f"cannot make bell: {e.strerror}", path=path, errno=e.errno) from None


def _open_bell(path: str, access: int) -> int:
    fd = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    facts = os.fstat(fd)
    if not stat.S_ISFIFO(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        os.close(fd)
        raise RingError("not a private bell of ours", path=path, mode=oct(facts.st_mode), uid=facts.st_uid)
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
        """Forget all rings so far; returns how many there were, 0 = none."""
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
        """Let go of the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BellRinger:
    """The other end. Opened at the first ring, again after the sleeper was replaced."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def ring(self) -> bool:
        """Wake the sleeper; False when nobody listens there now, or this process can open nothing at present.

        A full pipe is already a wake-up. What was published stays published whether or not a bell rang, so
        want of descriptors must not become the error of who published: the sleeper looks by itself.
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
        """Let go of the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EventBell:
    """An eventfd: what a thread rings to wake another one of its process."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the bell rings."""
        return self._fd

    def ring(self) -> None:
        """Wake the sleeper. Any thread may, as often as it likes."""
        # A full counter is readable already; a closed bell has no sleeper any more.
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._fd, 1)

    def drain(self) -> int:
        """Forget all rings so far; returns how many there were, 0 = none. Look for work behind this."""
        try:
            return os.eventfd_read(self._fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Let go of the bell. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
