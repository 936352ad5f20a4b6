"""The only module that loads and stores the live words of a ring (R1).

Both sides rely on two properties. A word is never read half written. A reader that sees a word also sees
everything that the other side wrote before it. On x86-64, an 8-byte store through `memoryview.cast("Q")`
provides both, because the processor keeps stores in order. `struct.pack_into` provides neither, because it
clears the destination first. On other machines the package `atomicshm` provides acquire loads and release
stores. Without that package there are no rings, and clients use sockets.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from typing import Any

from ringlog.errors import RingError
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


def _refuse(*_: int) -> int:
    raise RingError("ring is closed")


class AtomicWords:
    """The words of a header page by index: `load(i)` acquires, `store(i, value)` releases.

    `page` is a writable buffer whose length is a multiple of 8. Close this object before its mapping.
    """

    load: Callable[[int], int]
    store: Callable[[int, int], object]

    def __init__(self, page: memoryview) -> None:
        if stores_are_ordered():
            self._words = page.cast("B").cast("Q")
            self.load = self._words.__getitem__
            self.store = self._words.__setitem__
        else:
            self._use_atomics(page)

    def _use_atomics(self, page: memoryview) -> None:
        module = _atomics()
        self._words = page.cast("B")
        view = module.AtomicView(self._words)
        self._atomic_view = view

        def load(index: int) -> int:
            return int(view.load_u64(index * 8))

        def store(index: int, value: int) -> None:
            view.store_u64(index * 8, value)

        self.load, self.store = load, store

    def word(self, index: int) -> memoryview:
        """Return a view of one word for polling. It may outlive close() (ringlog/spin_wait.py)."""
        if self._words.itemsize == 8:
            return self._words[index : index + 1]
        return self._words[8 * index : 8 * index + 8]

    def close(self) -> None:
        """Release the buffer. Further loads and stores raise RingError."""
        self.load = self.store = _refuse
        atomic_view = self.__dict__.pop("_atomic_view", None)
        if atomic_view is not None:
            atomic_view.close()
        self._words.release()
