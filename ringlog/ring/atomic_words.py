"""The only place that loads and stores the live words of a ring.

Both sides rely on two things: a word is never seen half written, and when one side sees a word it
also sees everything the other side wrote before it. On x86-64 an 8-byte store through
`memoryview.cast("Q")` gives both (the processor keeps stores in order). `struct.pack_into` gives
neither: it clears the destination first. On any other machine the package `atomicshm` supplies
acquire loads and release stores; without it there are no rings there, and clients use sockets.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from typing import Any

from ringlog.errors import RingError
from ringlog.shm import stores_are_ordered


def require_atomic_words() -> None:
    """Raise RingError when this machine cannot run a ring safely."""
    if not stores_are_ordered():
        _atomics()


def _atomics() -> Any:
    try:
        return importlib.import_module("atomicshm")
    except ImportError:
        raise RingError(
            "rings need a processor that keeps stores in order, or atomicshm; use sockets",
            machine=platform.machine(),
        ) from None


def _refuse(*_: int) -> int:
    raise RingError("the ring is not mapped any more")


class AtomicWords:
    """The words of a header page, by index. `load(i) -> int` acquires, `store(i, value)` releases.

    `page` is a writable buffer whose length is a multiple of 8. Close before its mapping is closed.
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
        """One of them, to be looked at; it may outlive the mapping's end here (ringlog/spin_wait.py)."""
        if self._words.itemsize == 8:
            return self._words[index : index + 1]
        return self._words[8 * index : 8 * index + 8]

    def close(self) -> None:
        """Let go of the buffer; from now on the words answer with RingError."""
        self.load = self.store = _refuse
        atomic_view = self.__dict__.pop("_atomic_view", None)
        if atomic_view is not None:
            atomic_view.close()
        self._words.release()
