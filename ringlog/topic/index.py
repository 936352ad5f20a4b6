"""Sparse index: positions of a topic's records in the log, at most one entry for every SPARSE_BYTES.

Entries are (first seq at or after the position, file, offset), ascending in all three. A reader starts at the
entry at or below its cursor and scans. The spacing bounds the bytes that it scans in vain.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SPARSE_BYTES = 256 << 10


class SparseIndex:
    """Positions of one topic, ascending by seq."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words = array("Q")
        """seq, file, offset, seq, file, offset … A single array, because most topics have one entry."""

    def __len__(self) -> int:
        return len(self._words) // 3

    def add(self, seq: int, file_id: int, offset: int) -> None:
        """Add the position of the frame with record `seq`, if it is far enough from the last entry."""
        words = self._words
        if words and words[-2] == file_id and offset - words[-1] < SPARSE_BYTES:
            return
        words.extend((seq, file_id, offset))

    def add_run(self, seqs: NDArray[np.uint64], file_id: int, offsets: NDArray[np.int64]) -> None:
        """Add consecutive frames: (n,) their first seqs and file offsets, n >= 1."""
        self.add(int(seqs[0]), file_id, int(offsets[0]))
        if int(offsets[-1]) - self._words[-1] < SPARSE_BYTES:
            return
        at = 0
        while at < len(offsets):
            self.add(int(seqs[at]), file_id, int(offsets[at]))
            at = int(np.searchsorted(offsets, self._words[-1] + SPARSE_BYTES))

    def truncate_file(self, file_id: int, offset: int) -> None:
        """Remove the entries of a file from `offset` on, because their frames are elsewhere now."""
        words = self._words
        while words and words[-2] == file_id and words[-1] >= offset:
            del words[-3:]

    def positions_after(self, after: int) -> list[tuple[int, int]]:
        """Return where a reader must start to find records above `after`.

        The result has (file_id, offset) for each file, in order.
        """
        words = self._words
        if not words:
            return []
        at = max(bisect_right(range(len(self)), after + 1, key=lambda i: words[3 * i]) - 1, 0)
        places: list[tuple[int, int]] = []
        for i in range(3 * at, len(words), 3):
            if not places or places[-1][0] != words[i + 1]:
                places.append((words[i + 1], words[i + 2]))
        return places

    @property
    def first_seq(self) -> int:
        """Seq of the first record in the index; 0 = the index is empty."""
        return self._words[0] if self._words else 0

    def drop_file(self, file_id: int) -> None:
        """Remove every entry of a file that does not exist any more."""
        self.retain_files(lambda each: each != file_id)

    def retain_files(self, is_kept: Callable[[int], bool]) -> None:
        """Remove the entries of files that are not kept."""
        words = self._words
        if all(map(is_kept, words[1::3])):
            return
        kept = [words[i : i + 3] for i in range(0, len(words), 3) if is_kept(words[i + 1])]
        self._words = array("Q", [word for entry in kept for word in entry])
