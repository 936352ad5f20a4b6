"""Mask: which records of verified frames a reader passes over silently, because they are gone.

Deleted ones are named one by one by the shard; expired ones show by their stamps, whether or not anything
has removed them yet (X-5). Everything is found in columns: a topic without deletions, without a TTL and
without records that expire by themselves costs one look at the frames' column bitmaps.

The columns of fixed width are the last of a body, so where they lie in an uncompressed frame follows from
the frame's end, its bitmap and its count alone; many frames are looked at together.
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
_EXPIRES_BIT = np.uint64(1 << Column.EXPIRES_AT)


class FrameRunFacts(Protocol):
    """Verified frames in a buffer, as storage.reader.FrameRun."""

    buffer: Any
    batch: FrameBatch
    path: str


class VisibilityFilter(NamedTuple):
    """What is gone of a topic, as of `now_us`."""

    deleted: BitMap64 | None = None
    ttl_us: int = 0
    now_us: int = 0

    def hidden_seqs(self, runs: Iterable[FrameRunFacts]) -> I64:
        """Ascending positions to pass over in these runs (Stretch, ascending); usually none.

        Raises CorruptData for a frame that does not open.
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
        expiring = np.flatnonzero(frames.columns_of(words) & _EXPIRES_BIT)
        if len(expiring):
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
    """Numbers of the chosen records of these frames."""
    if not chosen.any():
        return NO_SEQS
    counts = frames.counts_of(words).astype(np.int64)
    firsts = words[:, layout.W_BASE_SEQ].astype(np.int64) - (np.cumsum(counts) - counts)
    seqs = np.repeat(firsts, counts) + np.arange(int(counts.sum()))
    found: I64 = seqs[chosen]
    return found


def _stamps(run: FrameRunFacts, rows: I64) -> I64:
    """Commit stamp of every record of these frames."""
    words = run.batch.words[rows]
    counts = frames.counts_of(words).astype(np.int64)
    stamps = np.repeat(words[:, layout.W_COMMIT_TS].astype(np.int64), counts)
    own = (frames.columns_of(words) & np.uint64(1 << Column.COMMIT_TS)) != 0
    if own.any():
        stamps[np.repeat(own, counts)] = _values(run, rows[own], Column.COMMIT_TS)
    return stamps


def _values(run: FrameRunFacts, rows: I64, column: Column) -> I64:
    """The values of a column of 8 bytes that all of these frames have, one after another."""
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
