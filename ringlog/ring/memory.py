"""The mapped memory of a ring. The only module that loads and stores the live words (R1).

Both sides rely on two properties. A word is never read half written. A reader that sees a word also sees
everything that the other side wrote before it. On x86-64, an 8-byte store through `memoryview.cast("Q")`
provides both, because the processor keeps stores in order. `struct.pack_into` provides neither, because it
clears the destination first. On other machines the package `atomicshm` provides acquire loads and release
stores. Without that package there are no rings, and clients use sockets.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import platform
from typing import Any

from ringlog.errors import RingError
from ringlog.limits import SETTLE_ENTRY_BYTES
from ringlog.ring import layout
from ringlog.shm import stores_are_ordered


def require_atomic_words() -> None:
    """Raise RingError if this machine cannot use rings safely."""
    if not stores_are_ordered():
        _atomics()


def _atomics() -> Any:
    try:
        return importlib.import_module("atomicshm")
    except ImportError:
        raise RingError(
            "rings need an x86-64 CPU or the package atomicshm; use an engine on another host, by TCP",
            machine=platform.machine(),
        ) from None


class AtomicWords:
    """The words of a header page by index.

    `page` is a writable buffer whose length is a multiple of 8. Close this object before its mapping. After
    that, loads and stores raise RingError.
    """

    def __init__(self, page: memoryview) -> None:
        self._words: Any = page.cast("B")
        self._atomic_view: Any = None
        """View of `atomicshm`, on machines that do not keep stores in order."""
        if stores_are_ordered():
            self._words = self._words.cast("Q")
        else:
            self._atomic_view = _atomics().AtomicView(self._words)

    def load(self, index: int) -> int:
        """Load a word (acquire)."""
        if self._atomic_view is not None:
            return int(self._atomic_view.load_u64(index * 8))
        if self._words is None:
            raise _closed_error()
        word: int = self._words[index]
        return word

    def store(self, index: int, value: int) -> None:
        """Store a word (release)."""
        if self._atomic_view is not None:
            self._atomic_view.store_u64(index * 8, value)
        elif self._words is None:
            raise _closed_error()
        else:
            self._words[index] = value

    def word(self, index: int) -> memoryview:
        """Return a view of one word for polling. It may outlive close() (ringlog/spin_wait.py)."""
        if self._words is None:
            raise _closed_error()
        words: memoryview = self._words
        if words.itemsize == 8:
            return words[index : index + 1]
        return words[8 * index : 8 * index + 8]

    def close(self) -> None:
        """Release the buffer. Idempotent."""
        words, self._words = self._words, None
        atomic_view, self._atomic_view = self._atomic_view, None
        if atomic_view is not None:
            atomic_view.close()
        if words is not None:
            words.release()


def _closed_error() -> RingError:
    return RingError("ring is closed")


class RingMemory(AtomicWords):
    """The bytes of a ring: the live words (`load`, `store`), the data area and the settle area.

    `buffer` is the whole file, writable. Both sides access the ring only through this class.
    """

    def __init__(self, buffer: Any, identity: layout.RingIdentity) -> None:
        whole = memoryview(buffer)
        super().__init__(whole[: layout.HEADER_BYTES])
        self._buffer: Any = buffer
        self._whole = whole
        self._data = whole[layout.HEADER_BYTES : identity.settle_offset]
        self._settle = whole[identity.settle_offset : identity.file_bytes]
        self.identity: layout.RingIdentity = identity

    def write(self, index: int, data: Any) -> None:
        """Write bytes at `index` of the data area."""
        self._data[index : index + len(data)] = data

    def read(self, index: int, length: int) -> bytearray:
        """Return a private copy of `length` bytes at `index` of the data area (R3)."""
        return bytearray(self._data[index : index + length])

    def write_entries(self, slot: int, entries: bytes) -> None:
        """Write settle entries, as bytes, from `slot` on. They must not cross the end of the area."""
        start = slot * SETTLE_ENTRY_BYTES
        self._settle[start : start + len(entries)] = entries

    def read_entries(self, slot: int, count: int) -> bytearray:
        """Return a private copy of `count` settle entries from `slot` on."""
        start = slot * SETTLE_ENTRY_BYTES
        return bytearray(self._settle[start : start + count * SETTLE_ENTRY_BYTES])

    @property
    def closed(self) -> bool:
        """True after close."""
        return self._buffer is None

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._buffer is None:
            return
        super().close()
        self._data.release()
        self._settle.release()
        self._whole.release()
        if isinstance(self._buffer, mmap.mmap):
            # A thread may be polling a word. The memory is then unmapped when its view is released.
            with contextlib.suppress(BufferError):
                self._buffer.close()
        self._buffer = None
