"""Where a topic's records lie in the log: a sparse index, one entry at most every SPARSE_BYTES.

Entries are (first seq at or after the place, file, offset), ascending in all three. A reader begins at
the entry at or below its cursor and walks; what it walks over needlessly is bounded by the spacing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

SPARSE_BYTES = 256 << 10


class SparseIndex:
    """Places of one topic, in seq order."""

    def __init__(self) -> None:
        self._seqs = array("Q")
        self._files = array("Q")
        self._offsets = array("Q")

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, seq: int, file_id: int, offset: int) -> None:
        """Note that the frame with record `seq` lies at `offset`; kept if it is far enough from the last."""
        if self._seqs and self._files[-1] == file_id and offset - self._offsets[-1] < SPARSE_BYTES:
            return
        self._seqs.append(seq)
        self._files.append(file_id)
        self._offsets.append(offset)

    def add_run(self, seqs: NDArray[np.uint64], file_id: int, offsets: NDArray[np.int64]) -> None:
        """Note frames that lie one behind the other: (n,) their first seqs and file offsets, n >= 1."""
        self.add(int(seqs[0]), file_id, int(offsets[0]))
        if int(offsets[-1]) - self._offsets[-1] < SPARSE_BYTES:
            return
        at = 0
        while at < len(offsets):
            self.add(int(seqs[at]), file_id, int(offsets[at]))
            at = int(np.searchsorted(offsets, self._offsets[-1] + SPARSE_BYTES))

    def cut(self, file_id: int, offset: int) -> None:
        """Forget entries of a file from `offset` on: what they led to lies elsewhere now."""
        while self._seqs and self._files[-1] == file_id and self._offsets[-1] >= offset:
            self._seqs.pop()
            self._files.pop()
            self._offsets.pop()

    def places(self, after: int) -> list[tuple[int, int]]:
        """(file_id, offset) to begin at in each file that may hold records above `after`, in order."""
        if not self._seqs:
            return []
        at = max(bisect_right(self._seqs, after + 1) - 1, 0)
        places: list[tuple[int, int]] = []
        for i in range(at, len(self._seqs)):
            if not places or places[-1][0] != self._files[i]:
                places.append((self._files[i], self._offsets[i]))
        return places

    def drop_file(self, file_id: int) -> None:
        """Forget every entry of a file that no longer exists."""
        keep = [i for i, f in enumerate(self._files) if f != file_id]
        self._seqs = array("Q", [self._seqs[i] for i in keep])
        self._files = array("Q", [self._files[i] for i in keep])
        self._offsets = array("Q", [self._offsets[i] for i in keep])
