"""Requests of one client on the host to one shard, and their answers, in shared memory instead of a socket.

A file with two rings of bytes, made by the shard: requests one way, answers the other. Each is written by
one process and read by one. A message is a word with its length and the bytes, padded to whole words; it may
run over the end of its ring and go on at the beginning. In words of 64 bits, behind a header page as of all
board files (board/layout):

word              part                written by
64                requests written    client      bytes ever
80                requests taken      shard
96                answers written     shard
112               answers taken       client
128               wants               client      1: ring my bell behind an answer
144               closed              shard       1: it reads no more; use the socket
512               requests, CALL_RING_BYTES
512 + bytes/8     answers, CALL_RING_BYTES

The client holds a lock on the file as long as it lives and uses it: so the shard knows when to remove it.
What either reads is copied before it is looked at, and the other's words are believed only within their
bounds: who breaks them is left to the socket.
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

if sys.platform != "win32":  # Where clients go by TCP, and import this all the same.
    import fcntl

BELL = ".bell"
_ROWS = 2 * CALL_RING_BYTES // layout.CALLS_ROW_BYTES
_REQUESTS, _REQUESTS_TAKEN, _ANSWERS, _ANSWERS_TAKEN, _WANTS, _CLOSED = 64, 80, 96, 112, 128, 144
_RING_WORDS = CALL_RING_BYTES // 8


def calls_prefix(shard: int) -> str:
    """What the names of a shard's call rings begin with."""
    return f"calls-{shard:02d}-"


class _ByteRing:
    """One of the two rings: its words, and its bytes."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        self.path = file.path
        self.words = file.words
        first = layout.PAGE_WORDS + at * _RING_WORDS
        self.lengths = file.words[first : first + _RING_WORDS]
        self.data = self.lengths.cast("B")
        self.written, self.taken = written, taken

    def broken(self, **words: Any) -> RingError:
        """The other's words cannot be."""
        return RingError("words of a call ring make no sense", path=self.path, **words)

    def release(self) -> None:
        """Before the file is unmapped."""
        self.data.release()
        self.lengths.release()


class _ByteRingWriter(_ByteRing):
    """The end that writes messages."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        super().__init__(file, written, taken, at)
        self._head = self._tail = 0

    def put(self, message: bytes) -> bool:
        """Publish a message; False when there is no room for it. Raises RingError."""
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
        # The one store that makes it visible.
        self._head += needed
        self.words[self.written] = self._head
        return True


class _ByteRingReader(_ByteRing):
    """The end that takes them."""

    def __init__(self, file: BoardFile, written: int, taken: int, at: int) -> None:
        super().__init__(file, written, taken, at)
        self._tail = 0

    @property
    def has_messages(self) -> bool:
        """Is there anything to take? One load."""
        return self.words[self.written] != self._tail

    def spin_word(self) -> tuple[memoryview, int]:
        """A word, and its value as long as there is nothing to take."""
        return self.words[self.written : self.written + 1], self._tail

    def take_messages(self, most: int) -> list[bytes]:
        """Up to `most` messages, private copies, in order; raises RingError."""
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
        """Make the ring `name` and its bell; raises BoardError without room, RingError without a bell."""
        self.name = name
        self.path = os.path.join(dir, name)
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
        """Are there requests? Asked of all rings in every turn."""
        requests = self._in
        return requests.words[requests.written] != requests._tail

    def spin_word(self) -> tuple[memoryview, int]:
        """A word, and its value as long as there are none."""
        return self._in.spin_word()

    def take_requests(self, most: int) -> list[bytes]:
        """Requests, in order; raises RingError."""
        return self._in.take_messages(most)

    def send_reply(self, data: bytes) -> bool:
        """Answer, and `ring` soon; False when there is no room. Raises RingError."""
        return self._out.put(data)

    def ring(self) -> None:
        """Wake the client behind answers, if it sleeps."""
        if self._file.words[_WANTS]:
            self._bell.ring()

    def has_client(self) -> bool:
        """Does a client hold its end?"""
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
        """Say that nobody reads it any more, unmap and remove it. Idempotent."""
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
        """Raises BoardError or RingError when it is not there any more, or somebody else uses it."""
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
        """Readable when there are answers, and we wanted to know."""
        return self._bell.fileno()

    @property
    def has_replies(self) -> bool:
        """Are there answers?"""
        return self._in.has_messages

    def spin_word(self) -> tuple[memoryview, int]:
        """A word, and its value as long as there are none."""
        return self._in.spin_word()

    @property
    def is_closed(self) -> bool:
        """Its shard reads it no more."""
        return bool(self._file.words[_CLOSED])

    def set_wakeup(self, *, is_wanted: bool) -> None:
        """Say whether to be woken for answers."""
        self._file.words[_WANTS] = int(is_wanted)

    def drain_bell(self) -> None:
        """Forget that the bell rang; then look."""
        self._bell.drain()

    def send(self, data: bytes) -> bool:
        """Publish a request; False when there is no room. Raises RingError."""
        return self._out.put(data)

    def take_replies(self) -> list[bytes]:
        """Answers, in order; raises RingError."""
        return self._in.take_messages(_ANSWERS_PER_TAKE)

    def close(self) -> None:
        """Unmap, and let go of bell and lock. Idempotent."""
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
    """Remove a call ring and its bell, as far as they are there."""
    shm.remove_file(path)
    shm.remove_file(path + BELL)


def remove_stale_call_rings(dir: str, shard: int) -> None:
    """Remove what an incarnation before left: its clients ask for rings anew."""
    for name in os.listdir(dir):
        if name.startswith(calls_prefix(shard)):
            shm.remove_file(os.path.join(dir, name))
