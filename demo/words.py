"""Shared memory words of the demo's processes: progress, start and end signals."""

from __future__ import annotations

import mmap
from pathlib import Path

FILE = "words"
GO, WRITTEN = 0, 1
"""Set by the main process. GO: producers start. WRITTEN: all is written, so readers stop at the heads."""
FIRST_PRODUCER = 8
FIRST_READER = 64
READY_OFFSET = 128
"""Offset of the word that producer or reader i sets to 1 when it is ready."""
WORDS = 256


class SharedCounters:
    """256 numbers of 64 bits in a mapped file. Each has one writer."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        if not path.exists():
            path.write_bytes(bytes(WORDS * 8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), WORDS * 8)
        self._words = memoryview(self._map).cast("Q")

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def total(self, first: int, count: int) -> int:
        """Return the sum of `count` words from `first`."""
        return sum(self._words[first : first + count])
