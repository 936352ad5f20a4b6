"""LogMap: where the frames of each topic lie in files of the log, as far as readers of one process looked.

A log file holds the frames of many topics in the order in which they were committed. A reader that is behind
and whose next frame lies far on looks through all that others wrote between; a process that follows a
thousand topics of one log would do so a thousand times. So who looks through a part of a file because it
must leaves here what it found, and the others go straight to what is theirs.

Nothing is believed of it: it says where to look, and what lies there is verified as always. A frame whose
header is damaged is missing here like in a scan, and its records are missed by their numbers. Memory is
bounded by bytes: files that were not asked about for longest go first, then what lies lowest. Any thread may
call.
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
"""What a piece takes beside its entries, about."""
SECTION_SPAN_MAX = 64 * MIB
"""Pieces that adjoin become one up to so many bytes of the file: a lookup looks at few."""
GAP_BYTES_MAX = 16 * KIB
"""Frames of a topic with at most so many bytes of others between them are read at once."""

_UNBOUNDED = 1 << 62
"""Nobody has looked at what follows."""


class LogFileKey(NamedTuple):
    """One life of one file: a file that is used again has another salt."""

    path: str
    salt: int


class LogMapRange(NamedTuple):
    """Where a reader goes on: at byte `offset` of the file, with the `size` bytes from there."""

    offset: int
    size: int
    is_known: bool
    """Frames of the topic lie there. Else nobody has looked there yet, and there may be none."""


class _MapSection:
    """The appends of a part [start, stop) of a file, by topic and then by offset."""

    __slots__ = ("offsets", "start", "stop", "stops", "topics")

    def __init__(self, start: int, stop: int, topics: U64, offsets: I64, stops: I64) -> None:
        order = np.argsort(topics, kind="stable")  # Offsets ascend, and go on doing so within each topic.
        self.start, self.stop = start, stop
        self.topics, self.offsets, self.stops = topics[order], offsets[order], stops[order]

    def __len__(self) -> int:
        return len(self.topics)

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES * len(self) + SECTION_BYTES

    def find_first(self, topic_id: int, offset: int, size_max: int) -> LogMapRange | None:
        """The topic's first frame at or behind `offset`, and those right behind it."""
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
        """This one and the one that begins where it ends."""
        return _MapSection(
            self.start, later.stop, np.concatenate((self.topics, later.topics)),
            np.concatenate((self.offsets, later.offsets)), np.concatenate((self.stops, later.stops)),
        )  # fmt: skip


class LogMap:
    """What the readers of one process know of the log."""

    def __init__(self, bytes_max: int = LOG_MAP_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._files: OrderedDict[LogFileKey, list[_MapSection]] = OrderedDict()
        """Pieces of each file by their starts; they do not overlap."""
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Memory it takes, about."""
        return self._bytes

    def find(self, file: LogFileKey, topic_id: int, offset: int, size_max: int) -> LogMapRange:
        """Where a reader of the topic that is at `offset` has to look next: it misses nothing that way.

        Of a stretch that is known there are `size_max` bytes at most, or one frame.
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
        """Take in what a scan of the file found from byte `start` of the buffer on, not resolved yet; the
        buffer begins at byte `origin` of the file."""
        low, high = origin + start, origin + found.stop
        if low >= high:
            return
        with self._lock:
            pieces = self._files.setdefault(file, [])
            at = bisect_right(pieces, low, key=_start_of)
            if at and pieces[at - 1].stop > low:
                return  # Another thread was faster.
            if at < len(pieces):
                high = min(high, pieces[at].start)
            self._put(pieces, at, _section_of(buffer, found, origin, low, high))
            self._files.move_to_end(file)
            self._shrink()

    def _put(self, pieces: list[_MapSection], at: int, piece: _MapSection) -> None:
        """Insert it, joined with the one before as long as that is not much larger: each entry is sorted a
        few times, however small the pieces come."""
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
    """The appends, and the copies in routed frames, that begin below `high`."""
    found = found.take(slice(0, int(np.searchsorted(found.offsets, high - origin))))
    kinds = frames.types_of(found.words)
    rows = np.flatnonzero(kinds == FrameType.APPEND)
    topics = [found.words[rows, W_TOPIC]]
    at = [rows]
    for row in np.flatnonzero(kinds == FrameType.ROUTED).tolist():
        try:
            copies = topics_of(buffer, found, row)
        except FrameInvalid:
            continue  # Whoever misses records of it looks for them.
        topics.append(copies)
        at.append(np.full(len(copies), row))
    places = np.concatenate(at)
    names = np.concatenate(topics)
    if len(at) > 1:
        order = np.argsort(places, kind="stable")
        places, names = places[order], names[order]
    offsets = found.offsets[places] + origin
    return _MapSection(low, high, names, offsets, offsets + found.total_bytes[places])
