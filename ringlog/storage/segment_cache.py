"""SegmentCache: a few open segment indexes, for readers that want to begin inside of a segment.

An index only makes reading faster: where it is missing or damaged the segment is read from its start, and
what is found there is verified as always.
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
    """Where a frame lies in a data part, and the positions it covers."""

    offset: int
    length: int
    first_seq: int
    last_seq: int


class SegmentCache:
    """Opens indexes when they are asked for and keeps the last `OPEN_SEGMENTS_MAX`. For one thread."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._open_segments: OrderedDict[str, Segment | None] = OrderedDict()

    def frame_at(self, path: str, topic_id: int, seq: int) -> SegmentFrameLocation | None:
        """The first frame of the topic that reaches to `seq`, in the segment with this data part.

        None when there is none, or the index cannot say.
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
        """Give the files back. The shelf may be used again."""
        while self._open_segments:
            self._drop(self._open_segments.popitem()[1])

    @staticmethod
    def _drop(segment: Segment | None) -> None:
        if segment is not None:
            segment.close()
