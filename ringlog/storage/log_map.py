"""LogMap: index of the frames of each topic in log files, filled by the readers of one process.

A log file contains the frames of many topics in commit order. A reader that lags must scan all frames of
other topics up to its own next frame. A process that follows 1,000 topics of one log would repeat this scan
1,000 times. Each reader therefore stores the result of its scan in the map, and other readers go directly to
the frames of their topic.

The map is only a hint for where to read; readers verify the bytes as always. A frame with a damaged header
is missing here as in a scan, and the reader detects the gap in the seqs. Memory is bounded in bytes: the
least recently used files are evicted first, then the lowest sections of the last file. Any thread may call.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame.batch import I64, U64, FrameBatch
from ringlog.frame.layout import W_TOPIC, FrameType
from ringlog.frame.routed_frame import topics_of
from ringlog.limits import KIB, LOG_MAP_BYTES_MAX, MIB

ENTRY_BYTES = 24
SECTION_BYTES = 512
"""Approximate bytes of memory of a section, without its entries."""
SECTION_SPAN_MAX = 64 * MIB
"""Adjacent sections are merged up to this size in the file, so that a lookup reads few sections."""
GAP_BYTES_MAX = 16 * KIB
"""Frames of a topic are read together if at most this many bytes of other topics lie between them."""

_UNBOUNDED = 1 << 62
"""Size of a range that no reader has scanned and whose end is unknown."""


class LogFileKey(NamedTuple):
    """Identity of one log file. A path that is reused has another salt."""

    path: str
    salt: int


class LogMapRange(NamedTuple):
    """Where a reader continues: the `size` bytes from byte `offset` of the file."""

    offset: int
    size: int
    is_known: bool
    """True if frames of the topic lie there. False if no reader has scanned the range; it may have none."""


class _MapSection:
    """The appends in the range [start, stop) of a file, sorted by topic and then by offset."""

    __slots__ = ("offsets", "start", "stop", "stops", "topics")

    def __init__(self, start: int, stop: int, topics: U64, offsets: I64, stops: I64) -> None:
        order = np.argsort(topics, kind="stable")  # Offsets ascend, and stay ascending within each topic.
        self.start, self.stop = start, stop
        self.topics, self.offsets, self.stops = topics[order], offsets[order], stops[order]

    def __len__(self) -> int:
        return len(self.topics)

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES * len(self) + SECTION_BYTES

    def find_first(self, topic_id: int, offset: int, size_max: int) -> LogMapRange | None:
        """Return the topic's first frame at or after `offset` and the frames close to it, or None."""
        wanted = np.uint64(topic_id)
        low = int(self.topics.searchsorted(wanted, "left"))
        high = int(self.topics.searchsorted(wanted, "right"))
        low += int(self.offsets[low:high].searchsorted(offset))
        if low == high:
            return None
        first = int(self.offsets[low])
        stops = self.stops[low:high]
        far = (self.offsets[low + 1 : high] - stops[:-1] > GAP_BYTES_MAX) | (stops[1:] - first > size_max)
        last = int(far.argmax()) if far.any() else high - low - 1
        return LogMapRange(first, int(stops[last]) - first, is_known=True)

    def joined(self, later: _MapSection) -> _MapSection:
        """Merge this section with `later`, which begins where this one ends."""
        return _MapSection(
            self.start, later.stop, np.concatenate((self.topics, later.topics)),
            np.concatenate((self.offsets, later.offsets)), np.concatenate((self.stops, later.stops)),
        )  # fmt: skip


class LogMap:
    """Positions of frames in log files, shared by the readers of one process."""

    def __init__(self, bytes_max: int = LOG_MAP_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._files: OrderedDict[LogFileKey, list[_MapSection]] = OrderedDict()
        """Sections of each file, sorted by start, without overlaps."""
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Approximate memory in bytes."""
        return self._bytes

    def find(self, file: LogFileKey, topic_id: int, offset: int, size_max: int) -> LogMapRange:
        """Return the range that a reader of the topic at `offset` reads next. No frame is skipped.

        A known range has at most `size_max` bytes, or is a single frame.
        """
        with self._lock:
            pieces = self._files.get(file)
            if pieces is None:
                return LogMapRange(offset, _UNBOUNDED, is_known=False)
            self._files.move_to_end(file)
            at = max(bisect_right(pieces, offset, key=_start_of) - 1, 0)
            for piece in pieces[at:]:
                if offset < piece.start:
                    return LogMapRange(offset, piece.start - offset, is_known=False)
                if offset < piece.stop:
                    found = piece.find_first(topic_id, offset, size_max)
                    if found is not None:
                        return found
                    offset = piece.stop
            return LogMapRange(offset, _UNBOUNDED, is_known=False)

    def add_scan(self, file: LogFileKey, buffer: Any, found: FrameBatch, start: int, origin: int) -> None:
        """Store the result of a scan that began at byte `start` of the buffer.

        `found` is not resolved: it still contains routed frames. `origin` is the file offset of the buffer's
        first byte.
        """
        low, high = origin + start, origin + found.stop
        if low >= high:
            return
        with self._lock:
            pieces = self._files.setdefault(file, [])
            at = bisect_right(pieces, low, key=_start_of)
            if at and pieces[at - 1].stop > low:
                return  # Another thread has already added this range.
            if at < len(pieces):
                high = min(high, pieces[at].start)
            self._put(pieces, at, _section_of(buffer, found, origin, low, high))
            self._files.move_to_end(file)
            self._shrink()

    def _put(self, pieces: list[_MapSection], at: int, piece: _MapSection) -> None:
        """Insert a section, and merge it with the previous ones while these are not much larger.

        The size rule bounds how often an entry is sorted again if sections are small.
        """
        while at:
            before = pieces[at - 1]
            is_near = before.stop == piece.start and piece.stop - before.start <= SECTION_SPAN_MAX
            if not is_near or len(before) > 2 * len(piece) + 64:
                break
            piece = before.joined(piece)
            at -= 1
            self._bytes -= pieces.pop(at).bytes
        pieces.insert(at, piece)
        self._bytes += piece.bytes

    def _shrink(self) -> None:
        while self._bytes > self._bytes_max and len(self._files) > 1:
            self._bytes -= sum(piece.bytes for piece in self._files.popitem(last=False)[1])
        while self._bytes > self._bytes_max and self._files:
            (pieces,) = self._files.values()
            self._bytes -= pieces.pop(0).bytes
            if not pieces:
                self._files.clear()


def _start_of(piece: _MapSection) -> int:
    return piece.start


def _section_of(buffer: Any, found: FrameBatch, origin: int, low: int, high: int) -> _MapSection:
    """Build the section of the appends, and the copies in routed frames, that begin below `high`."""
    found = found.take(slice(0, int(np.searchsorted(found.offsets, high - origin))))
    rows = np.flatnonzero(frames.is_of_type(found.words, FrameType.APPEND))
    topics = [found.words[rows, W_TOPIC]]
    at = [rows]
    for row in np.flatnonzero(frames.is_of_type(found.words, FrameType.ROUTED)).tolist():
        try:
            copies = topics_of(buffer, found, row)
        except FrameInvalid:
            continue  # Damaged. A reader of these records detects the gap in the seqs.
        topics.append(copies)
        at.append(np.full(len(copies), row))
    places = np.concatenate(at)
    names = np.concatenate(topics)
    if len(at) > 1:
        order = np.argsort(places, kind="stable")
        places, names = places[order], names[order]
    offsets = found.offsets[places] + origin
    return _MapSection(low, high, names, offsets, offsets + found.total_bytes[places])
