"""Job requests of one client on the host to one shard, and the replies, in shared memory instead of a socket.

The shard creates a file with two byte rings: one for requests, one for replies. Each ring has one writer and
one reader process. A message is a word with its length and then the bytes, padded to whole words. It may wrap
from the end of its ring to the beginning. The layout in words of 64 bits, after the header page of all board
files (board/layout):

word              part                written by
64                requests written    client      total bytes
80                requests read       shard
96                replies written     shard
112               replies read        client
128               wants               client      1: ring the client's bell after a reply
144               closed              shard       1: the shard does not read any more; use the socket
512               requests, CALL_RING_BYTES
512 + bytes/8     replies, CALL_RING_BYTES

The client holds a lock on the file while it uses it, so the shard can detect when to remove the file. Each
side copies bytes before it validates them, and accepts words of the other side only within their bounds. If
the other side violates them, the two continue through the socket.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ringlog import shm
from ringlog.board import layout
from ringlog.board.layout import BoardError
from ringlog.board.mapping import BoardFile, make_board_file
from ringlog.errors import RingError
from ringlog.limits import CALL_BYTES_MAX, CALL_RING_BYTES
from ringlog.ring.doorbell import BellListener, BellRinger, make_bell

if sys.platform != "win32":  # Windows clients connect by TCP only, but they import this module.
    import fcntl

BELL = ".bell"
_ROWS = 2 * CALL_RING_BYTES // layout.CALLS_ROW_BYTES
_REQUESTS, _REQUESTS_TAKEN, _ANSWERS, _ANSWERS_TAKEN, _WANTS, _CLOSED = 64, 80, 96, 112, 128, 144
_RING_WORDS = CALL_RING_BYTES // 8


def calls_prefix(shard: int) -> str:
    """Return the prefix of the file names of a shard's call rings."""
    return f"calls-{shard:02d}-"


class _ByteRing:
    """One of the two rings: its words and its bytes."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        self.path = file.path
        self.words = file.words
        first = layout.PAGE_WORDS + at * _RING_WORDS
        self.lengths = file.words[first : first + _RING_WORDS]
        self.data = self.lengths.cast("B")
        self.written, self.taken = written, taken

    def broken(self, **words: Any) -> RingError:
        """Return the error for impossible words of the other side."""
        return RingError("header of a call ring is corrupt", path=self.path, **words)

    def release(self) -> None:
        """Release the views; required before the file is unmapped."""
        self.data.release()
        self.lengths.release()


class _ByteRingWriter(_ByteRing):
    """The writer of messages."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        super().__init__(file, written, taken, at)
        self._head = self._tail = 0

    def put(self, message: bytes) -> bool:
        """Publish a message. Return False if there is no space. Raises RingError."""
        size = len(message)
        needed = 8 + (size + 7 & ~7)
        if size > CALL_BYTES_MAX:
            return False
        if needed > CALL_RING_BYTES - (self._head - self._tail):
            tail = self.words[self.taken]
            if not self._tail <= tail <= self._head or tail & 7:
                raise self.broken(taken=tail, written=self._head)
            self._tail = tail
            if needed > CALL_RING_BYTES - (self._head - tail):
                return False
        at = self._head % CALL_RING_BYTES
        self.lengths[at >> 3] = size
        at = (at + 8) % CALL_RING_BYTES
        stop = at + size
        if stop <= CALL_RING_BYTES:
            self.data[at:stop] = message
        else:
            split = CALL_RING_BYTES - at
            self.data[at:] = message[:split]
            self.data[: size - split] = message[split:]
        # This single store publishes the message.
        self._head += needed
        self.words[self.written] = self._head
        return True


class _ByteRingReader(_ByteRing):
    """The reader of messages."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        super().__init__(file, written, taken, at)
        self._tail = 0

    @property
    def has_messages(self) -> bool:
        """True if there is a message. Costs one load."""
        return self.words[self.written] != self._tail

    def spin_word(self) -> tuple[memoryview, int]:
        """Return the word to spin on, and its value while there is no message."""
        return self.words[self.written : self.written + 1], self._tail

    def take_messages(self, most: int) -> list[bytes]:
        """Return up to `most` messages in order, as private copies. Raises RingError."""
        head, tail = self.words[self.written], self._tail
        if not 0 <= head - tail <= CALL_RING_BYTES or head & 7:
            raise self.broken(written=head, taken=tail)
        found: list[bytes] = []
        while tail < head and len(found) < most:
            at = tail % CALL_RING_BYTES
            size = self.lengths[at >> 3]
            needed = 8 + (size + 7 & ~7)
            if not 0 < size <= CALL_BYTES_MAX or needed > head - tail:
                raise self.broken(written=head, taken=tail, length=size)
            at = (at + 8) % CALL_RING_BYTES
            stop = at + size
            if stop <= CALL_RING_BYTES:
                found.append(bytes(self.data[at:stop]))
            else:
                found.append(bytes(self.data[at:]) + bytes(self.data[: stop - CALL_RING_BYTES]))
            tail += needed
        self._tail = tail
        self.words[self.taken] = tail
        return found


class CallServer:
    """The shard's end."""

    def __init__(self, dir: str, name: str, shard: int) -> None:
        """Create the ring `name` and its bell. Raises BoardError without space, RingError without a bell."""
        self.name = name
        self.path: str = os.path.join(dir, name)
        identity = layout.encode_identity(layout.CALLS_MAGIC, shard, _ROWS, 0)
        make_board_file(self.path, layout.PAGE_BYTES + _ROWS * layout.CALLS_ROW_BYTES, identity)
        try:
            make_bell(self.path + BELL)
            self._file = BoardFile(self.path, layout.CALLS_MAGIC, writable=True)
        except (BoardError, RingError):
            remove_call_ring(self.path)
            raise
        self._bell = BellRinger(self.path + BELL)
        self._in = _ByteRingReader(self._file, _REQUESTS, _REQUESTS_TAKEN, 0)
        self._out = _ByteRingWriter(self._file, _ANSWERS, _ANSWERS_TAKEN, 1)
        self._is_open = True

    @property
    def has_requests(self) -> bool:
        """True if there are requests. Read for every ring in every pass of the shard's loop."""
        requests = self._in
        return requests.words[requests.written] != requests._tail

    def spin_word(self) -> tuple[memoryview, int]:
        """Return the word to spin on, and its value while there are no requests."""
        return self._in.spin_word()

    def take_requests(self, most: int) -> list[bytes]:
        """Return requests in order. Raises RingError."""
        return self._in.take_messages(most)

    def send_reply(self, data: bytes) -> bool:
        """Publish a reply; the caller then calls `ring`. Return False if there is no space.

        Raises RingError.
        """
        return self._out.put(data)

    def ring(self) -> None:
        """Wake the client after replies, if it requested that."""
        if self._file.words[_WANTS]:
            self._bell.ring()

    def has_client(self) -> bool:
        """Return True if a client uses its end."""
        try:
            fd, _ = shm.open_file(self.path, RingError)
        except RingError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def close(self) -> None:
        """Mark the ring as closed, unmap it and remove the file. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._file.words[_CLOSED] = 1
        self._bell.ring()
        for end in (self._in, self._out):
            end.release()
        self._file.close()
        self._bell.close()
        remove_call_ring(self.path)


class CallClient:
    """The client's end."""

    def __init__(self, dir: str, name: str) -> None:
        """Open the ring.

        Raises BoardError or RingError if it does not exist any more or another process uses it.
        """
        path = os.path.join(dir, name)
        self._lock = _lock(path)
        try:
            self._bell = BellListener(path + BELL)
        except RingError:
            os.close(self._lock)
            raise
        try:
            self._file = BoardFile(path, layout.CALLS_MAGIC, writable=True)
        except BoardError:
            self._bell.close()
            os.close(self._lock)
            raise
        self._out = _ByteRingWriter(self._file, _REQUESTS, _REQUESTS_TAKEN, 0)
        self._in = _ByteRingReader(self._file, _ANSWERS, _ANSWERS_TAKEN, 1)

    def fileno(self) -> int:
        """Return a descriptor that is readable when replies arrived after `set_wakeup`."""
        return self._bell.fileno()

    @property
    def has_replies(self) -> bool:
        """True if there are replies."""
        return self._in.has_messages

    def spin_word(self) -> tuple[memoryview, int]:
        """Return the word to spin on, and its value while there are no replies."""
        return self._in.spin_word()

    @property
    def is_closed(self) -> bool:
        """True if the shard does not read the ring any more."""
        return bool(self._file.words[_CLOSED])

    def set_wakeup(self, *, is_wanted: bool) -> None:
        """Request wake-ups for replies, or cancel the request."""
        self._file.words[_WANTS] = int(is_wanted)

    def drain_bell(self) -> None:
        """Clear the bell; the caller then reads the replies."""
        self._bell.drain()

    def send(self, data: bytes) -> bool:
        """Publish a request. Return False if there is no space. Raises RingError."""
        return self._out.put(data)

    def take_replies(self) -> list[bytes]:
        """Return replies in order. Raises RingError."""
        return self._in.take_messages(_ANSWERS_PER_TAKE)

    def close(self) -> None:
        """Unmap the file, and close bell and lock. Idempotent."""
        if self._lock < 0:
            return
        for end in (self._in, self._out):
            end.release()
        self._file.close()
        self._bell.close()
        os.close(self._lock)
        self._lock = -1


_ANSWERS_PER_TAKE = 256


def _lock(path: str) -> int:
    fd, _ = shm.open_file(path, RingError)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        raise RingError(f"cannot lock call ring: {e.strerror}", path=path, errno=e.errno) from None
    return fd


def remove_call_ring(path: str) -> None:
    """Remove a call ring and its bell, if they exist."""
    shm.remove_file(path)
    shm.remove_file(path + BELL)


def remove_stale_call_rings(dir: str, shard: int) -> None:
    """Remove the rings of an earlier incarnation. Its clients request new ones."""
    for name in os.listdir(dir):
        if name.startswith(calls_prefix(shard)):
            shm.remove_file(os.path.join(dir, name))
