"""FrameRun: verified frames of one topic that a reader returns together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch


@dataclass(slots=True)
class FrameRun:
    """Verified frames of one topic, ascending. Offsets in `batch` count from the start of `buffer`.

    The buffer stays valid while a reference to it or to a view of it exists. This holds for mappings too.
    """

    buffer: Any
    batch: FrameBatch
    salt: int
    path: str
    origin: int
    """File offset of the buffer's first byte."""
    file: str = ""
    """Path of the file with these bytes at the same offsets, if it is an immutable segment; else empty."""

    @property
    def first_seq(self) -> int:
        """Seq of the first record of the first frame."""
        return int(self.batch.words[0, layout.W_BASE_SEQ])

    @property
    def last_seq(self) -> int:
        """Seq of the last record of the last frame."""
        last = self.batch.words[-1]
        return (
            int(last[layout.W_BASE_SEQ])
            + (int(last[layout.W_COUNT_EPOCH]) & (1 << layout.EPOCH_SHIFT) - 1)
            - 1
        )

    def spans(self) -> list[tuple[int, int]]:
        """Return (first seq, last seq) of each frame."""
        firsts = self.batch.words[:, layout.W_BASE_SEQ].tolist()
        return list(zip(firsts, last_seqs(self.batch).tolist(), strict=True))

    def frames_after(self, seq: int) -> FrameRun:
        """Return the frames with records after `seq`. The first may begin at or before it."""
        if self.first_seq > seq:
            return self
        row = int(np.searchsorted(last_seqs(self.batch), seq, side="right"))
        return self._with(self.batch.take(slice(row, None)))

    def frames_in_range(self, after: int, until: int) -> FrameRun:
        """Return the frames with records after `after` and up to `until`.

        The first frame may begin before this range, and may even end before it. The last may end after it.
        The cost depends on the number of frames returned, not on the size of the run.
        """
        if self.first_seq > after and self.last_seq <= until:
            return self
        bases = self.batch.words[:, layout.W_BASE_SEQ]
        low, high = np.searchsorted(bases, np.array([after + 1, until], np.uint64), side="right").tolist()
        # The last frame that begins at or before the first wanted record. It may also end before it.
        low = max(low - 1, 0)
        if not low and high == len(bases):
            return self
        return self._with(self.batch.take(slice(low, high)))

    def _with(self, batch: FrameBatch) -> FrameRun:
        return FrameRun(self.buffer, batch, self.salt, self.path, self.origin, self.file)


def last_seqs(batch: FrameBatch) -> frames.I64:
    """Return the (n,) seqs of each frame's last record."""
    bases = batch.words[:, layout.W_BASE_SEQ]
    return (bases + frames.counts_of(batch.words)).astype(np.int64) - 1
