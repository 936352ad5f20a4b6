"""VisibilityFilter: the deleted and expired records that a reader skips in verified frames.

The shard lists deleted records one by one. Expired records are recognised by their stamps, even if the shard
has not removed them yet (X6). The filter works on columns. A topic without deletions, TTL and records with
their own expiry costs one check of the frames' column bitmaps.

Columns of fixed width are the last ones of a body. Their place in an uncompressed frame follows from the
frame's end, its column bitmap and its record count, so many frames are processed together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from ringlog.errors import CorruptData, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.layout import NULLABLE, VALID_SHIFT, Column
from ringlog.frame.view import open_row

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
NO_SEQS: I64 = np.empty(0, dtype=np.int64)
_EXPIRES_BIT = np.uint64(1 << Column.EXPIRES_AT + layout.COLUMNS_SHIFT)
"""Bit of the column in the first word of a header."""


class FrameRunFacts(Protocol):
    """Verified frames in a buffer, as in storage.frame_run.FrameRun."""

    buffer: Any
    batch: FrameBatch
    path: str


class VisibilityFilter(NamedTuple):
    """Deleted seqs, TTL and current time of a topic. Times are in microseconds; `ttl_us` 0 = no TTL."""

    deleted: BitMap64 | None = None
    ttl_us: int = 0
    now_us: int = 0

    def hidden_seqs(self, runs: Iterable[FrameRunFacts]) -> I64:
        """Return the ascending seqs of the records to skip in these runs; usually none.

        `runs` are FrameRuns in ascending order. Raises CorruptData for a frame that does not decode.
        """
        found: list[I64] = []
        for run in runs:
            found += self._hidden_in(run)
        found = [positions for positions in found if len(positions)]
        if not found:
            return NO_SEQS
        return np.unique(np.concatenate(found)) if len(found) > 1 else found[0]

    def _hidden_in(self, run: FrameRunFacts) -> list[I64]:
        words = run.batch.words
        if not len(words):
            return []
        found: list[I64] = []
        if self.deleted is not None:
            found.append(_members(self.deleted, words))
        may_expire = words[:, layout.W_HEAD] & _EXPIRES_BIT
        if may_expire.any():
            expiring = np.flatnonzero(may_expire)
            at = _values(run, expiring, Column.EXPIRES_AT)
            found.append(_positions(words[expiring], (at != 0) & (at <= self.now_us)))
        if self.ttl_us:
            old = np.flatnonzero(words[:, layout.W_COMMIT_TS].astype(np.int64) < self.now_us - self.ttl_us)
            if len(old):
                stamps = _stamps(run, old)
                found.append(_positions(words[old], stamps < self.now_us - self.ttl_us))
        return found


def _members(deleted: BitMap64, words: U64) -> I64:
    first = int(words[0, layout.W_BASE_SEQ])
    stop = int(words[-1, layout.W_BASE_SEQ]) + int(frames.counts_of(words[-1:])[0])
    if not deleted.range_cardinality(first, stop):
        return NO_SEQS
    return np.frombuffer((deleted & BitMap64(range(first, stop))).to_array(), dtype=np.int64)


def _positions(words: U64, chosen: NDArray[np.bool_]) -> I64:
    """Return the seqs of the chosen records; `chosen` has one flag for each record of these frames."""
    if not chosen.any():
        return NO_SEQS
    counts = frames.counts_of(words).astype(np.int64)
    firsts = words[:, layout.W_BASE_SEQ].astype(np.int64) - (np.cumsum(counts) - counts)
    seqs = np.repeat(firsts, counts) + np.arange(int(counts.sum()))
    found: I64 = seqs[chosen]
    return found


def _stamps(run: FrameRunFacts, rows: I64) -> I64:
    """Return the commit stamp of every record of these frames."""
    words = run.batch.words[rows]
    counts = frames.counts_of(words).astype(np.int64)
    stamps = np.repeat(words[:, layout.W_COMMIT_TS].astype(np.int64), counts)
    own = (frames.columns_of(words) & np.uint64(1 << Column.COMMIT_TS)) != 0
    if own.any():
        stamps[np.repeat(own, counts)] = _values(run, rows[own], Column.COMMIT_TS)
    return stamps


def _values(run: FrameRunFacts, rows: I64, column: Column) -> I64:
    """Return the values of a column of 8 bytes that all of these frames have, concatenated."""
    words = run.batch.words[rows]
    counts = frames.counts_of(words).astype(np.int64)
    is_plain = frames.codecs_of(words) == 0
    values = np.empty(int(counts.sum()), dtype=np.int64)
    if is_plain.any():
        values[np.repeat(is_plain, counts)] = _plain_values(run, rows[is_plain], column)
    ends = np.cumsum(counts)
    for at in np.flatnonzero(~is_plain).tolist():
        values[ends[at] - counts[at] : ends[at]] = _opened_values(run, int(rows[at]), column)
    return values


def _plain_values(run: FrameRunFacts, rows: I64, column: Column) -> I64:
    words = run.batch.words[rows]
    counts = frames.counts_of(words).astype(np.int64)
    bitmaps = frames.columns_of(words)
    at = run.batch.offsets[rows] + run.batch.total_bytes[rows] - 8 * counts
    for later in Column:
        if later > column:
            width = 1 if later == Column.PRIORITY else 8
            has = (bitmaps >> np.uint64(later)) & np.uint64(1) != 0
            at = at - np.where(has, (width * counts + 7) & ~7, 0)
    for nullable in NULLABLE:
        has = (bitmaps >> np.uint64(VALID_SHIFT + nullable)) & np.uint64(1) != 0
        at = at - np.where(has, ((counts + 7) // 8 + 7) & ~7, 0)
    buffer = np.frombuffer(run.buffer, dtype=np.uint8)
    numbers = buffer[: len(buffer) & ~7].view("<i8")
    index = np.repeat((at >> 3) - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    found: I64 = numbers[index]
    return found


def _opened_values(run: FrameRunFacts, row: int, column: Column) -> I64:
    try:
        found = open_row(run.buffer, run.batch, row).fixed_column(column)
    except FrameInvalid as e:
        offset = int(run.batch.offsets[row])
        raise CorruptData(f"stored frame is malformed: {e.reason}", file=run.path, offset=offset) from None
    assert found is not None, "the frame's bitmap names the column"
    return found
