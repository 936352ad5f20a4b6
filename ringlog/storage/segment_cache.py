"""SegmentCache: open segment indexes, so that readers can begin inside a segment.

An index only makes reading faster. If it is missing or damaged, the reader starts at the beginning of the
segment. Readers verify all frames in either case.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ringlog.errors import CorruptData, DiskError
from ringlog.segment.layout import DATA
from ringlog.segment.segment import Segment
from ringlog.storage.disk import Disk

OPEN_SEGMENTS_MAX = 16


class SegmentFrameLocation(NamedTuple):
    """Byte range of a frame in a data part, and the seqs that it covers."""

    offset: int
    length: int
    first_seq: int
    last_seq: int


class SegmentCache:
    """Opens indexes on demand and keeps the last OPEN_SEGMENTS_MAX used. For one thread."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._open_segments: OrderedDict[str, Segment | None] = OrderedDict()

    def frame_at(self, path: str, topic_id: int, seq: int) -> SegmentFrameLocation | None:
        """Return the topic's first frame with records at or after `seq`, in the segment of this data part.

        None if there is no such frame, or if the index is not usable.
        """
        segment = self._segment(path.removesuffix(DATA))
        row = None if segment is None else segment.row(topic_id)
        if segment is None or row is None:
            return None
        found = segment.frame_at(row, seq)
        if found is None:
            return None
        offset, entry = found
        facts = segment.entries[entry]
        first = int(facts["base_seq"])
        return SegmentFrameLocation(offset, int(facts["length"]), first, first + int(facts["count"]) - 1)

    def _segment(self, stem: str) -> Segment | None:
        if stem in self._open_segments:
            self._open_segments.move_to_end(stem)
            return self._open_segments[stem]
        segment: Segment | None
        try:
            segment = Segment.open(self._disk, self._data_dir, stem)
        except (CorruptData, DiskError):
            segment = None
        self._open_segments[stem] = segment
        if len(self._open_segments) > OPEN_SEGMENTS_MAX:
            self._drop(self._open_segments.popitem(last=False)[1])
        return segment

    def close(self) -> None:
        """Close all files. The cache may be used again."""
        while self._open_segments:
            self._drop(self._open_segments.popitem()[1])

    @staticmethod
    def _drop(segment: Segment | None) -> None:
        if segment is not None:
            segment.close()
