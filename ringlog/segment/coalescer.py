"""Merge many small frames of one topic into few large ones for a segment. Pure.

A frame ends at limits.SEALED_FRAME_RECORDS, at about SEALED_FRAME_BYTES, at a gap in the seqs, and where the
durability class or the payload kind changes. It also ends at a hole: HOLE_MIN or more consecutive dead
records, which are omitted. In a smaller hole the dead records stay as empty records, so that many single
deletes do not produce many small frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import InvariantViolation
from ringlog.frame.batch import FrameBatch
from ringlog.limits import SEALED_FRAME_BYTES, SEALED_FRAME_RECORDS
from ringlog.segment.deletion_marks import seqs_within
from ringlog.segment.frame_encoder import BlockSlice
from ringlog.segment.records import Block, blocks_of

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]
HOLE_MIN = 64
"""Minimum number of consecutive dead records that are omitted."""


class Coalescer:
    """Receives the records of one topic in order. `placeholders` collects the seqs kept as empty records."""

    def __init__(self, *, earliest_seq: int = 1, dead: BitMap64 | None = None) -> None:
        self._earliest_seq = earliest_seq
        self._dead = BitMap64() if dead is None else dead
        self._last_seq = 0
        self._pending: list[BlockSlice] = []
        self._count = 0
        self._bytes = 0
        self._deferred: list[BlockSlice] = []  # dead records that may turn out to be a small hole
        self.placeholders: list[I64] = []

    def frames(self, runs: Iterable[tuple[Any, FrameBatch]]) -> Iterator[list[BlockSlice]]:
        """Yield the records of each new frame. Raise FrameInvalid, or InvariantViolation if seqs decrease."""
        for buffer, batch in runs:
            for block in blocks_of(buffer, batch):
                self._check_order(block)
                yield from self._add_block(block)
        if self._pending:
            yield self._taken()

    def _check_order(self, block: Block) -> None:
        seqs = block.seqs
        if not (int(seqs[0]) > self._last_seq and bool((seqs[1:] > seqs[:-1]).all())):
            raise InvariantViolation(
                "seqs of a segment must ascend", first_seq=int(seqs[0]), after=self._last_seq
            )
        self._last_seq = int(seqs[-1])

    def _add_block(self, block: Block) -> Iterator[list[BlockSlice]]:
        """Cut a block where records must not share a frame. Dead records at an edge are deferred."""
        alive = self._alive(block.seqs)
        cuts = (block.seqs[1:] != block.seqs[:-1] + 1) | (block.flags[1:] != block.flags[:-1])
        if not alive.all():
            alive = self._fill_holes(block, alive, cuts)
            cuts |= alive[1:] != alive[:-1]
        ends = np.cumsum(block.weights())
        bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(block)]
        for start, stop in pairwise(bounds):
            block_slice = BlockSlice(block, start, stop)
            if alive[start]:
                yield from self._release_deferred(block_slice)
                yield from self._fill(block_slice, ends)
            else:
                self._defer(block_slice)

    def _alive(self, seqs: I64) -> Mask:
        alive: Mask = seqs >= self._earliest_seq
        dead = seqs_within(self._dead, int(seqs[0]), int(seqs[-1]))
        at = np.searchsorted(seqs, dead)
        alive[at[seqs[at] == dead]] = False
        return alive

    def _fill_holes(self, block: Block, alive: Mask, cuts: Mask) -> Mask:
        """Empty the dead records. Return `alive` with the dead records of small holes added."""
        block.blank_records(~alive)
        edges = np.flatnonzero((alive[1:] != alive[:-1]) | cuts) + 1
        starts, stops = np.concatenate(([0], edges)), np.concatenate((edges, [len(alive)]))
        inner = (starts > 0) & (stops < len(alive)) & ~alive[starts] & (stops - starts < HOLE_MIN)
        # A frame contains consecutive seqs, so no seq may be missing at either edge of the hole.
        inner[inner] = ~cuts[starts[inner] - 1] & ~cuts[stops[inner] - 1]
        rows = np.zeros(len(alive) + 1, dtype=np.int64)
        np.add.at(rows, starts[inner], 1)
        np.add.at(rows, stops[inner], -1)
        kept = np.cumsum(rows[:-1]) > 0
        if kept.any():
            self.placeholders.append(block.seqs[kept])
        return alive | kept

    def _defer(self, block_slice: BlockSlice) -> None:
        count = sum(each.stop - each.start for each in self._deferred) + block_slice.stop - block_slice.start
        follows = (
            self._deferred[-1].last_seq + 1 == block_slice.first_seq if self._deferred else self._pending
        )
        if count >= HOLE_MIN or not follows:
            self._deferred = []
            # These records are omitted, so the next live record begins a new frame.
            return
        self._deferred.append(block_slice)

    def _release_deferred(self, following: BlockSlice) -> Iterator[list[BlockSlice]]:
        """Add the deferred records to the frame if they fill the gap before `following`."""
        deferred, self._deferred = self._deferred, []
        if not deferred or not self._pending:
            return
        seqs = [self._pending[-1].last_seq, *(each.last_seq for each in deferred)]
        firsts = [*(each.first_seq for each in deferred), following.first_seq]
        flags = self._flags(self._pending[-1])
        has_equal_flags = all(self._flags(each) == flags for each in (*deferred, following))
        if has_equal_flags and all(a + 1 == b for a, b in zip(seqs, firsts, strict=True)):
            for each in deferred:
                self.placeholders.append(each.block.seqs[each.start : each.stop])
                yield from self._fill(each, np.cumsum(each.block.weights()))

    @staticmethod
    def _flags(block_slice: BlockSlice) -> int:
        return int(block_slice.block.flags[block_slice.start])

    def _fill(self, block_slice: BlockSlice, ends: I64) -> Iterator[list[BlockSlice]]:
        """Add records to the pending frame. Yield the frame whenever it is full."""
        block, start, stop = block_slice
        if self._pending:
            last = self._pending[-1]
            if last.last_seq + 1 != block_slice.first_seq or self._flags(last) != self._flags(block_slice):
                yield self._taken()
        while start < stop:
            before = int(ends[start - 1]) if start else 0
            room = SEALED_FRAME_BYTES - self._bytes
            fits = int(np.searchsorted(ends, before + room, side="right")) - start
            take = min(fits, SEALED_FRAME_RECORDS - self._count, stop - start)
            if take <= 0 and self._pending:
                yield self._taken()
                continue
            take = max(take, 1)
            self._pending.append(BlockSlice(block, start, start + take))
            self._count += take
            self._bytes += int(ends[start + take - 1]) - before
            start += take

    def _taken(self) -> list[BlockSlice]:
        taken, self._pending = self._pending, []
        self._count = self._bytes = 0
        return taken
