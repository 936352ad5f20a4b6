"""Words that the demo's processes share: how far each is, and when to begin and to end."""

from __future__ import annotations

import mmap
from pathlib import Path

FILE = "words"
GO, WRITTEN = 0, 1
"""Set by the conductor: producers may begin; everything was written, so readers end at the heads."""
FIRST_PRODUCER = 8
FIRST_READER = 64
READY_OFFSET = 128
"""The word of producer or reader i, plus this, is 1 when it is ready to begin."""
WORDS = 256


class Words:
    """256 numbers of 64 bits in a mapped file; each has one writer."""

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
        """Sum of `count` words from `first` on."""
        return sum(self._words[first : first + count])
