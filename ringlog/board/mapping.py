"""Board files: made, opened, mapped."""

from __future__ import annotations

import contextlib
import mmap
import os

from ringlog import shm
from ringlog.board import layout
from ringlog.board.layout import BoardError


def require_ordered_stores() -> None:
    """Raise BoardError on a machine whose stores other processors may see out of order."""
    if not shm.stores_are_ordered():
        raise BoardError("the board needs a processor that keeps stores in order")


def make_board_file(path: str, size: int, identity: bytes) -> None:
    """Make a board file with all its room allocated; raises BoardError when it exists or does not fit."""
    require_ordered_stores()
    shm.make_file(path, size, identity, BoardError)


class BoardFile:
    """A mapped board file. `words` is the whole file as 64-bit words, read-only unless `writable`."""

    def __init__(self, path: str, magic: bytes, *, writable: bool) -> None:
        require_ordered_stores()
        fd, size = shm.open_file(path, BoardError, writable=writable)
        try:
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
            # A mapping takes a descriptor of its own, which may be the one too many, and memory.
            raise BoardError(f"cannot map board file: {e.strerror}", path=path, errno=e.errno) from None
        finally:
            os.close(fd)
        self.path = path
        self.words = memoryview(self._mapping).cast("Q")

    def close(self) -> None:
        """Unmap, as soon as no view of `words` is held any more. Idempotent."""
        if not self._mapping.closed:
            self.words.release()
            # A thread may be looking at a word: it is unmapped when that one has looked.
            with contextlib.suppress(BufferError):
                self._mapping.close()
