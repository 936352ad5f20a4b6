"""Where the records of a topic are, as its shard says in a Located, and which records are expected there.

A Located names extents: first those of segments, then those of log files. It also names the records that were
removed one by one, and those that are lost, so that a reader does not miss them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from pyroaring import BitMap64

from ringlog.frame import layout
from ringlog.frame.batch import I64, FrameBatch

VOLATILE_PREFIX = "@"
TIER_COLD = 2


class ExtentFacts(Protocol):
    """Byte range of a WAL file or of a segment, as in the message Extent. `stop` 0 = open end."""

    @property
    def path(self) -> str: ...
    @property
    def file_id(self) -> int: ...
    @property
    def salt(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def first_seq(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def tier(self) -> int: ...


class LocatedFacts(Protocol):
    """The fields of the message Located that a reader uses."""

    @property
    def topic(self) -> str: ...
    @property
    def topic_id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def earliest_seq(self) -> int: ...
    @property
    def extents(self) -> Any: ...
    @property
    def lost(self) -> list[int]: ...
    @property
    def deleted(self) -> bytes: ...


class LogHighWatermark(NamedTuple):
    """Published mark of a log: frames of file `file_id` below `offset`, and all older files, are readable."""

    file_id: int
    offset: int


HighWatermarkReader = Callable[[bool], LogHighWatermark]
"""Reads the shard's published mark. True selects the mark of its volatile log."""


class LocatedRecords:
    """A Located, and what a reader derives from it."""

    def __init__(self, located: LocatedFacts) -> None:
        self.located = located
        self.extents: Any = located.extents
        self.deleted: BitMap64 | None = BitMap64.deserialize(located.deleted) if located.deleted else None
        """Seqs that were removed one by one; None if there are none."""
        self._segment_last_seqs = [extent.last_seq for extent in located.extents if extent.segment]
        """Last seqs of the segments, which come first in the extents and in ascending order."""

    def extent_of(self, seq: int) -> int:
        """Return the index of the first extent that may contain the seq or a later one."""
        return bisect_left(self._segment_last_seqs, seq)

    def is_in_segment(self, seq: int) -> bool:
        """Return whether the known segments reach up to this seq."""
        return bool(self._segment_last_seqs) and seq <= self._segment_last_seqs[-1]

    def log_file_id(self, path: str) -> int:
        """Return the number of a log file among the extents, or 0 if the path is none of them."""
        named = (each.file_id for each in self.extents if each.path == path and not each.segment)
        return next(named, 0)

    def first_hole(self, fresh: FrameBatch, last: I64, cursor: int) -> int | None:
        """Return the row of the first frame after a gap that removed and lost records do not explain.

        `last` has the seq of the last record of each frame, and perhaps of frames after them.
        """
        base = fresh.words[:, layout.W_BASE_SEQ].astype(np.int64)
        if not self._is_accounted(cursor + 1, int(base[0])):
            return 0
        if len(base) == 1:
            return None
        for row in np.flatnonzero(base[1:] > last[: len(base) - 1] + 1).tolist():
            if not self._is_accounted(int(last[row]) + 1, int(base[row + 1])):
                return int(row) + 1
        return None

    def accounts_for(self, first: int, last: int) -> bool:
        """Return whether no live record is expected in first..last: all are removed or lost."""
        return self._is_accounted(first, last + 1)

    def _is_accounted(self, first: int, stop: int) -> bool:
        at = max(first, self.located.earliest_seq)
        if at >= stop:
            return True
        deleted = self.deleted
        gone = 0 if deleted is None else deleted.range_cardinality(at, stop)
        lost = self.located.lost
        for range_first, range_last in zip(lost[::2], lost[1::2], strict=True):
            low, high = max(range_first, at), min(range_last + 1, stop)
            if low < high:
                gone += high - low - (0 if deleted is None else deleted.range_cardinality(low, high))
        return gone >= stop - at
