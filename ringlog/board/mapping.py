"""Create, open and map board files."""

from __future__ import annotations

import contextlib
import mmap
import os

from ringlog import shm
from ringlog.board import layout
from ringlog.board.layout import BoardError


def require_ordered_stores() -> None:
    """Raise BoardError on a machine that does not keep stores in order."""
    if not shm.stores_are_ordered():
        raise BoardError("the board needs an x86-64 CPU; use an engine on another host, by TCP")


def make_board_file(path: str, size: int, identity: bytes) -> None:
    """Create a board file with all its memory allocated. Raise BoardError if it exists or does not fit."""
    require_ordered_stores()
    shm.make_file(path, size, identity, BoardError)


class BoardFile:
    """A mapped board file. `words` is the whole file as 64-bit words, read-only unless `writable`."""

    def __init__(self, path: str, magic: bytes, *, writable: bool) -> None:
        require_ordered_stores()
        fd, size = shm.open_file(path, BoardError, writable=writable)
        try:
            self.shard: int
            self.slots: int
            self.chunk: int
            self.shard, self.slots, self.chunk = layout.decode_identity(
                os.pread(fd, layout.IDENTITY_BYTES, 0), magic, path
            )
            slot_bytes = layout.SLOT_BYTES[magic]
            expected = layout.PAGE_BYTES + self.slots * slot_bytes
            if size != expected:
                raise BoardError("board file has the wrong size", path=path, bytes=size, expected=expected)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._mapping = mmap.mmap(fd, size, access=access)
        except OSError as e:
            # mmap duplicates the descriptor, so it can fail at the descriptor limit, or for lack of memory.
            raise BoardError(f"cannot map board file: {e.strerror}", path=path, errno=e.errno) from None
        finally:
            os.close(fd)
        self.path = path
        self.words: memoryview[int] = memoryview(self._mapping).cast("Q")

    def close(self) -> None:
        """Unmap when the last view of `words` is released. Idempotent."""
        if not self._mapping.closed:
            self.words.release()
            # A thread may be polling a word. The memory is then unmapped when its view is released.
            with contextlib.suppress(BufferError):
                self._mapping.close()
