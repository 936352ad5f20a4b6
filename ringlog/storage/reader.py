"""TopicReader: the verified frames of one topic, in order, once each, as far as they are published.

A reader is told where to look by a Located: extents of segments first, then of WAL files. How far it may
look into the log is told by two facts that the shard publishes: the *mark* (every frame of that file below
this offset may be read) and the topic's head. Of the log it never delivers a frame that reaches above the
head it is given, nor one above the mark. What lies in a segment is published: no mark is asked for, and a
frame that begins below the head is delivered whole; its owner cuts.

It does no waiting and sends no message, so that a server can hold thousands. `next_run` answers with
frames or with a Pause saying why there are none: the owner waits for a publication, or asks the shard
for a new Located with the cursor and hands it to `relocate`, or fetches `cold_range_needed` and hands it to
`supply`.

What is checked of every frame of the topic, before anybody sees it: its seal under the salt of the file
it lies in, its body's checksum, and that no record is missing between it and the one before that nothing
accounts for. A frame copied forward after a restart, or sealed while it still lies in the log, lies in two
files; the second is passed over by its numbers. Damage is a CorruptData that names topic, seq, first_seq,
last_seq, file and offset; what lies before it is delivered first (DR-16).
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from pyroaring import BitMap64

from ringlog.errors import ColdUnavailable, CorruptData, DiskError, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.routed_frame import resolve_copies
from ringlog.frame.view import FrameView, open_frame
from ringlog.limits import FRAME_BYTES_MAX, KIB, MIB
from ringlog.storage.disk import Disk
from ringlog.storage.log_map import LogFileKey, LogMap
from ringlog.storage.segment_cache import SegmentCache
from ringlog.storage.windows import ColdByteRange, MappedFile, PreadFile, RemoteFile, Window, WindowFile

WINDOW_BYTES = 1 * MIB
"""Bytes read at a time; one frame that is larger is read whole."""
FIRST_WINDOW_BYTES = 64 * KIB
"""Where owners begin who may want only a few records; they double it as they go on."""
WINDOWS_PER_CALL_MAX = 64
"""Windows without a frame of the topic after which next_run returns to its caller."""
SCAN_WINDOW_BYTES = 256 * KIB
"""Bytes read at a time where frames of the topic are far between and nobody has looked yet."""
DENSE_FRAME_RATIO = 8
"""At least every so many-th frame of a window is the topic's: that window is not worth remembering."""
SEEK_POSITIONS_MIN = 16_384
"""A jump forward that is longer is worth a look into the segment's index."""
VOLATILE_PREFIX = "@"
TIER_COLD = 2


class ExtentFacts(Protocol):
    """A stretch of a WAL file or of a segment, as in the message Extent. `stop` 0 = open end."""

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
    """What a reader needs to know of the message Located."""

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
    """Published mark of a stream: the frames of file `file_id` below `offset`, and all older files."""

    file_id: int
    offset: int


HighWatermarkReader = Callable[[bool], LogHighWatermark]
"""Reads the shard's published mark; True asks for the one of its volatile log."""


class Pause(Enum):
    """Why there are no frames now."""

    AT_MARK = "at_mark"
    """Everything published has been read: wait for a publication."""
    BEYOND_HEAD = "beyond_head"
    """The next frame is not visible under the given head: read the head again."""
    MOVED = "moved"
    """The extents known are used up, or their files are gone: ask for a new Located."""
    COLD = "cold"
    """The bytes lie where only somebody else can read: fetch `cold_range_needed`, hand it to `supply`."""
    UNFINISHED = "unfinished"
    """A lot of log was scanned and none of it was the topic's: call again when others had a turn."""


@dataclass(slots=True)
class FrameRun:
    """Verified frames of one topic, ascending. Offsets in `batch` count from the start of `buffer`.

    The buffer stays valid as long as somebody refers to it or to a view of it; a mapped one too.
    """

    buffer: Any
    batch: FrameBatch
    salt: int
    path: str
    origin: int
    """File offset of the buffer's first byte."""
    file: str = ""
    """Where the bytes lie, at the same offsets and for good, if that is a sealed file; else empty."""

    @property
    def first_seq(self) -> int:
        """Number of the first record of the first frame."""
        return int(self.batch.words[0, layout.W_BASE_SEQ])

    @property
    def last_seq(self) -> int:
        """Number of the last record of the last frame."""
        last = self.batch.words[-1:]
        return int(last[0, layout.W_BASE_SEQ]) + int(frames.counts_of(last)[0]) - 1

    def spans(self) -> list[tuple[int, int]]:
        """Of each frame the numbers of its first and its last record."""
        firsts = self.batch.words[:, layout.W_BASE_SEQ].tolist()
        return list(zip(firsts, _last_seqs(self.batch).tolist(), strict=True))

    def after(self, seq: int) -> FrameRun:
        """The frames that hold records after `seq`; the first may begin before it."""
        if self.first_seq > seq:
            return self
        row = int(np.searchsorted(_last_seqs(self.batch), seq, side="right"))
        return self._with(self.batch.take(slice(row, None)))

    def within(self, after: int, until: int) -> FrameRun:
        """The frames that hold records after `after` and up to `until`: a look at few does not cost what all
        of them would. The first may begin before that, or even end, and the last may end behind."""
        bases = self.batch.words[:, layout.W_BASE_SEQ]
        low, high = np.searchsorted(bases, np.array([after + 1, until], np.uint64), side="right").tolist()
        # The last frame that begins at or before the first record wanted; it may end before it, too.
        low = max(low - 1, 0)
        if not low and high == len(bases):
            return self
        return self._with(self.batch.take(slice(low, high)))

    def _with(self, batch: FrameBatch) -> FrameRun:
        return FrameRun(self.buffer, batch, self.salt, self.path, self.origin, self.file)


class TopicReader:
    """Reads one life of one topic from a cursor on. Not thread-safe; cheap to hold: one open file."""

    def __init__(
        self,
        located: LocatedFacts,
        cursor: int,
        *,
        data_dir: str,
        shm_dir: str,
        marks: HighWatermarkReader,
        disk: Disk,
        is_mapped: bool = False,
        checks_bodies: bool = True,
        window_bytes: int = WINDOW_BYTES,
        cold_dir: str = "",
        shelf: SegmentCache | None = None,
        log_map: LogMap | None = None,
        windows_per_call: int = WINDOWS_PER_CALL_MAX,
    ) -> None:
        """`cold_dir`: where cold segments lie, if they can be opened here; else they are asked for.
        `shelf`: indexes of segments, to begin inside of one; without it they are read from their start.
        `log_map`: what other readers saw in the log; without it all that others wrote is looked through.
        `checks_bodies`: off for whoever hands frames on to a reader that compares their checksums itself.
        """
        self.cursor = cursor
        """Last seq delivered, or passed over because it lies below what is retained."""
        self._roots = (data_dir, shm_dir)
        self._cold_dir = cold_dir
        self._segment_cache = shelf
        self._log_map = log_map
        self._is_sparse = False  # Whole windows of the log hold nothing of the topic.
        self._marks = marks
        self._disk = disk
        self._open: type[PreadFile] | type[MappedFile] = MappedFile if is_mapped else PreadFile
        self._checks_bodies = checks_bodies
        self._window_bytes = window_bytes
        self._windows_per_call = windows_per_call
        self._file: WindowFile | None = None
        self._hole_seen = False  # A hole is believed only after the shard was asked again.
        self._cold_missing = ""  # So is the absence of a cold file.
        self._located = located
        self._deleted = _bitmap(located.deleted)
        self._extent = 0
        self._offset = 0
        self._frame_bytes = 0  # Size of the frame at `_offset` where an index told it.
        self._is_sought = False
        self._known_bytes = 0
        self._segment_last_seqs: list[int] = []
        self._index_segments()
        self._enter_extent(self._extent_of(cursor + 1))

    @property
    def located(self) -> LocatedFacts:
        """The Located this reader works from."""
        return self._located

    @property
    def deleted(self) -> BitMap64 | None:
        """Numbers that were removed one by one, as `located` says; None = none."""
        return self._deleted

    @property
    def cold_range_needed(self) -> ColdByteRange | None:
        """After Pause.COLD: what to fetch."""
        return self._file.range_needed if isinstance(self._file, RemoteFile) else None

    def supply_cold_bytes(self, want: ColdByteRange, data: Any) -> None:
        """Hand in what `want` names; ignored when the reader has gone elsewhere meanwhile."""
        if isinstance(self._file, RemoteFile) and self._file.range_needed == want:
            self._file.supply_bytes(data)

    def relocate(self, located: LocatedFacts, cursor: int | None = None) -> None:
        """Go on from `cursor` (default: where we are) with new extents."""
        self.close()
        if located is not self._located:
            self._deleted = _bitmap(located.deleted)
            self._located = located
            self._index_segments()
        if cursor is not None:
            self.cursor = cursor
        self._enter_extent(self._extent_of(self.cursor + 1))

    def seek(self, cursor: int) -> tuple[str, int]:
        """Go to a position; returns the file, named as in its extent, and the offset to read on from.

        Within segments that is the frame which holds the next record.
        """
        self.relocate(self._located, cursor)
        if self._extent >= len(self._located.extents):
            return "", 0
        extent = self._located.extents[self._extent]
        if not self._is_sought:
            self._seek(extent)
        return extent.path, self._offset

    def is_sealed(self, seq: int) -> bool:
        """Is one of the segments known the place of this number, if it has any?"""
        return bool(self._segment_last_seqs) and seq <= self._segment_last_seqs[-1]

    def _index_segments(self) -> None:
        """Segments come first, in the order of their numbers."""
        self._segment_last_seqs = [extent.last_seq for extent in self._located.extents if extent.segment]

    def _extent_of(self, seq: int) -> int:
        """Index of the first extent that may hold the number or one above it."""
        return bisect_left(self._segment_last_seqs, seq)

    def skip_to(self, cursor: int) -> None:
        """Go on behind `cursor`, which is not before where we are; a long way is not walked where an index
        knows a shorter one."""
        is_far = cursor - self.cursor > SEEK_POSITIONS_MIN
        self.cursor = cursor
        if is_far and self._extent < len(self._located.extents):
            self._is_sought = not self._located.extents[self._extent].segment

    @property
    def log_position(self) -> tuple[int, int]:
        """File of the log and offset where this goes on; (0, 0) when that is in no file of the log."""
        extents = self._located.extents
        if self._extent >= len(extents) or extents[self._extent].segment:
            return 0, 0
        return extents[self._extent].file_id, self._offset

    def log_file_id(self, path: str) -> int:
        """Number of a file of the log that is among the extents; 0 = it is none of them."""
        named = (each.file_id for each in self._located.extents if each.path == path and not each.segment)
        return next(named, 0)

    def advance_past(self, last_seq: int, file_id: int, stop: int) -> None:
        """Go on behind `last_seq`, which somebody else has read; what follows lies at `stop` of this file, or
        behind it."""
        extents = self._located.extents
        is_here = self._extent < len(extents) and extents[self._extent].file_id == file_id
        if is_here and not extents[self._extent].segment and self._offset <= stop:
            self.cursor, self._offset = last_seq, stop
            self._hole_seen = False
        elif last_seq > self.cursor:
            self.skip_to(last_seq)

    def read_at_hint(
        self, first_seq: int, last_seq: int, file_id: int, offset: int, stop: int
    ) -> FrameView | None:
        """The records `first_seq` .. `last_seq`, if they come next and are one frame at [offset, stop) of a
        file of the log; verified as always. None when anything is not so, or not as it should be: `next_run`
        finds out what. Raises DiskError.

        The short way for who keeps up and was told where to look. The caller has seen that the topic's
        head is not below `last_seq`, so what has this number is published: no mark is asked for.
        """
        if first_seq != self.cursor + 1 or self._extent >= len(self._located.extents) or offset & 7:
            return None
        extent = self._located.extents[self._extent]
        is_log = not extent.segment and not extent.path.startswith(VOLATILE_PREFIX)
        if not is_log or extent.file_id != file_id or not self._offset <= offset < stop:
            return None
        if (extent.stop and stop > extent.stop) or stop - offset > FRAME_BYTES_MAX:
            return None
        view = self._open_at_hint(extent, offset, stop)
        if view is None:
            return None
        located = self._located
        if (view.topic_id, view.header.epoch) != (located.topic_id, located.epoch) or (
            view.first_seq, view.last_seq, view.total_bytes,
        ) != (first_seq, last_seq, stop - offset):  # fmt: skip
            return None
        self.cursor, self._offset = last_seq, stop
        self._hole_seen = False
        return view

    def _open_at_hint(self, extent: ExtentFacts, offset: int, stop: int) -> FrameView | None:
        file = self._file or self._opened(extent)
        if file is None:
            return None
        self._file = file
        window = file.window(offset, stop)
        if window is None or window.stop - window.start != stop - offset:
            return None
        window.buffer.flags.writeable = False  # Others may see it through SharedReads.
        try:
            view = open_frame(window.buffer, window.start, seed=extent.salt)
        except FrameInvalid:
            return None
        return view if view.header.type == layout.FrameType.APPEND else None

    def close(self) -> None:
        """Give the open file back. The reader may be used again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def next_run(self, head_seq: int, bytes_max: int = 0) -> FrameRun | Pause:
        """Return the next frames up to `head_seq`, about `bytes_max` bytes of log (0 = a window).

        Raises CorruptData for damage, DiskError when the disk fails, NotReady (cold_unavailable) when the
        place of a cold segment does not answer. Frames before the damage have been returned by then, and
        calling again repeats the error.
        """
        window_bytes = layout.padded(bytes_max or self._window_bytes)
        windows = 0
        while self._extent < len(self._located.extents):
            extent = self._located.extents[self._extent]
            if not self._is_sought:
                self._seek(extent)
            stop = self._visible_stop(extent)
            if stop is None:
                return Pause.MOVED
            if self._offset >= stop:
                if not extent.stop or self._offset < extent.stop:
                    return Pause.AT_MARK
                self._enter_extent(self._extent + 1)
                continue
            is_new = self._is_sparse and not extent.segment and self._look_up(extent, window_bytes)
            if self._offset >= stop:
                self._known_bytes = 0
                continue
            window = self._read(extent, stop, window_bytes)
            if isinstance(window, Pause):
                return window
            found = frames.scan(window.buffer.view("<u8"), window.start, window.stop)
            if not len(found):
                self._raise_corrupt(extent, found.reason or "zeros where frames were published", self._offset)
            if is_new:
                self._share_scan(extent, window, found)
            if not extent.segment:
                found = self._resolved(extent, window, found)
            run = self._select_frames(extent, window, found, head_seq)
            if run is not None:
                if is_new and isinstance(run, FrameRun):
                    self._is_sparse = DENSE_FRAME_RATIO * len(run.batch) < len(found)
                return run
            self._is_sparse = self._log_map is not None
            windows += 1
            if windows >= self._windows_per_call:
                return Pause.UNFINISHED
        return Pause.MOVED if self._located.extents else Pause.AT_MARK

    def _look_up(self, extent: ExtentFacts, window_bytes: int) -> bool:
        """Go to where the topic's next frame may be; True when nobody has looked there yet."""
        if self._log_map is None or self._known_bytes:
            return False
        file = LogFileKey(extent.path, extent.salt)
        found = self._log_map.find(file, self._located.topic_id, self._offset, window_bytes)
        self._offset = found.offset
        self._known_bytes = found.size if found.is_known else min(found.size, SCAN_WINDOW_BYTES)
        return not found.is_known

    def _share_scan(self, extent: ExtentFacts, window: Window, found: FrameBatch) -> None:
        """Tell others what lies in this part of the log."""
        assert self._log_map is not None
        file = LogFileKey(extent.path, extent.salt)
        self._log_map.add_scan(file, window.buffer, found, window.start, window.origin)

    def _enter_extent(self, index: int) -> None:
        self.close()
        self._extent = index
        if index < len(self._located.extents):
            extent = self._located.extents[index]
            self._offset = extent.start
            self._frame_bytes = 0
            self._is_sought = not extent.segment

    def _seek(self, extent: ExtentFacts) -> None:
        """Begin a segment at the frame that holds the next record, if its index can say where."""
        self._is_sought = True
        if extent.last_seq <= self.cursor:
            self._offset = extent.stop
        elif self._segment_cache is not None and self.cursor >= extent.first_seq:
            place = self._segment_cache.frame_at(extent.path, self._located.topic_id, self.cursor + 1)
            if place is not None and self._offset <= place.offset < extent.stop:
                self._offset, self._frame_bytes = place.offset, place.length

    def _visible_stop(self, extent: ExtentFacts) -> int | None:
        """File offset up to which the extent may be read now, or None when it has to be located anew."""
        if extent.segment:
            return extent.stop
        mark = self._marks(extent.path.startswith(VOLATILE_PREFIX))
        if mark.file_id == extent.file_id:
            return min(extent.stop, mark.offset) if extent.stop else mark.offset
        if mark.file_id < extent.file_id:
            return 0
        return extent.stop or None

    def _read(self, extent: ExtentFacts, stop: int, window_bytes: int) -> Window | Pause:
        """Read from where we are, at least one whole frame."""
        file = self._file or self._opened(extent)
        if file is None:
            return Pause.MOVED
        self._file = file
        wanted = min(self._offset + (self._known_bytes or max(window_bytes, self._frame_bytes)), stop)
        self._frame_bytes = self._known_bytes = 0
        window = self._window(extent, file, wanted)
        if window is None:
            return Pause.COLD
        if window.stop - window.start < 8:
            self._raise_corrupt(extent, "the file ends before what was published", self._offset)
        length = int(window.buffer[window.start : window.start + 4].view("<u4")[0]) + layout.LEN_FIELD_BYTES
        if window.stop - window.start < length <= FRAME_BYTES_MAX and wanted < stop:
            window = self._window(extent, file, min(self._offset + length, stop))
        return Pause.COLD if window is None else window

    def _window(self, extent: ExtentFacts, file: WindowFile, stop: int) -> Window | None:
        try:
            return file.window(self._offset, stop)
        except DiskError as e:
            if extent.tier == TIER_COLD:
                raise _cold_unavailable(self._located.topic, extent.path, e) from None
            raise

    def _opened(self, extent: ExtentFacts) -> WindowFile | None:
        """Open the extent's file; None when it is no longer there."""
        is_cold = extent.tier == TIER_COLD
        if is_cold and not self._cold_dir:
            return RemoteFile(extent.path)
        try:
            return self._open(self._disk, self._path(extent))
        except DiskError as e:
            if is_cold and (e.errno != errno.ENOENT or self._cold_missing == extent.path):
                raise _cold_unavailable(self._located.topic, extent.path, e) from None
            self._cold_missing = extent.path if is_cold else ""
            if e.errno == errno.ENOENT:
                return None
            raise

    def _path(self, extent: ExtentFacts) -> str:
        if extent.tier == TIER_COLD:
            return os.path.join(self._cold_dir, extent.path)
        is_volatile = extent.path.startswith(VOLATILE_PREFIX)
        return os.path.join(self._roots[is_volatile], extent.path.removeprefix(VOLATILE_PREFIX))

    def _resolved(self, extent: ExtentFacts, window: Window, found: FrameBatch) -> FrameBatch:
        """With the copies of our topic as the appends they stand for; what lies before damage goes first."""
        try:
            return resolve_copies(window.buffer, found, extent.salt, topic_id=self._located.topic_id)
        except FrameInvalid as e:
            bad = int(np.searchsorted(found.offsets, e.offset))
            if not bad:
                self._raise_corrupt(extent, e.reason, window.origin + e.offset)
        sound = found.take(slice(0, bad))
        sound.stop = int(found.offsets[bad])
        return resolve_copies(window.buffer, sound, extent.salt, topic_id=self._located.topic_id)

    def _select_frames(
        self, extent: ExtentFacts, window: Window, found: FrameBatch, head_seq: int
    ) -> FrameRun | Pause | None:
        """Move past the frames found; return ours among them, or None when there are none."""
        self._offset = window.origin + found.stop
        mine = np.flatnonzero(found.words[:, layout.W_TOPIC] == np.uint64(self._located.topic_id))
        if extent.segment and len(mine) < len(found):
            stranger = int(np.setdiff1d(np.arange(len(found)), mine)[0])
            if stranger == 0:
                self._raise_corrupt(extent, "a frame of another topic", window.origin + int(found.offsets[0]))
            found = self._stop_before(window, found, stranger)
            mine = mine[:stranger]
        if not len(mine):
            return None
        ours = found if len(mine) == len(found) else found.take(mine)
        bad = frames.first_bad_seal(ours, extent.salt)
        if bad is None:
            bad = frames.first_true(frames.malformed(ours.words))
        if bad == 0:
            self._raise_corrupt(extent, "header does not verify", window.origin + int(ours.stored_offsets[0]))
        if bad is not None:
            ours = self._stop_before(window, ours, bad)
        fresh = self._undelivered(ours)
        if extent.segment:
            hidden = frames.first_true(fresh.words[:, layout.W_BASE_SEQ].astype(np.int64) > head_seq)
        else:
            hidden = frames.first_true(_last_seqs(fresh) > head_seq)
        if hidden == 0:
            self._offset = window.origin + int(fresh.stored_offsets[0])
            return Pause.BEYOND_HEAD
        if hidden is not None:
            fresh = self._stop_before(window, fresh, hidden)
        return self._deliver(extent, window, fresh)

    def _stop_before(self, window: Window, batch: FrameBatch, row: int) -> FrameBatch:
        """Keep what lies before `row`, and go on at `row` the next time."""
        self._offset = window.origin + int(batch.stored_offsets[row])
        return batch.take(slice(0, row))

    def _undelivered(self, ours: FrameBatch) -> FrameBatch:
        """Choose the appends of this life that hold records after the cursor, each once."""
        wanted = (frames.types_of(ours.words) == layout.FrameType.APPEND) & (
            frames.epochs_of(ours.words) == self._located.epoch
        )
        last = _last_seqs(ours)
        seen = np.maximum.accumulate(np.where(wanted, last, 0))
        wanted[1:] &= last[1:] > seen[:-1]
        wanted &= last > self.cursor
        lost = self._located.lost
        for range_first, range_last in zip(lost[::2], lost[1::2], strict=True):
            # What is announced as lost is not there, if perhaps as damaged bytes.
            bases = ours.words[:, layout.W_BASE_SEQ].astype(np.int64)
            wanted &= (bases < range_first) | (last > range_last)
        return ours if wanted.all() else ours.take(np.flatnonzero(wanted))

    def _deliver(self, extent: ExtentFacts, window: Window, fresh: FrameBatch) -> FrameRun | Pause | None:
        if not len(fresh):
            return None
        hole = self._first_hole(fresh)
        if hole == 0:
            return self._recheck_hole(extent, window, fresh)
        if hole is not None:
            fresh = self._stop_before(window, fresh, hole)
        bad = frames.first_bad_body(window.buffer, fresh) if self._checks_bodies else None
        if bad == 0:
            at = window.origin + int(fresh.stored_offsets[0])
            first, last = int(fresh.words[0, layout.W_BASE_SEQ]), int(_last_seqs(fresh)[0])
            self._raise_corrupt(extent, "body does not verify", at, seq=first, first_seq=first, last_seq=last)
        if bad is not None:
            fresh = self._stop_before(window, fresh, bad)
        self._hole_seen = False
        self.cursor = int(_last_seqs(fresh)[-1])
        is_file = extent.segment and not isinstance(self._file, RemoteFile)
        file = self._path(extent) if is_file else ""
        return FrameRun(window.buffer, fresh, extent.salt, extent.path, window.origin, file)

    def _first_hole(self, fresh: FrameBatch) -> int | None:
        """Row of the first frame before which records are missing that nothing accounts for."""
        before = np.concatenate(([self.cursor], _last_seqs(fresh)[:-1]))
        base = fresh.words[:, layout.W_BASE_SEQ].astype(np.int64)
        for row in np.flatnonzero(base > before + 1).tolist():
            if not self._is_accounted(int(before[row]) + 1, int(base[row])):
                return int(row)
        return None

    def accounts_for(self, first: int, last: int) -> bool:
        """True when no live record is to be expected at positions first..last: removed or lost."""
        return self._is_accounted(first, last + 1)

    def _is_accounted(self, first: int, stop: int) -> bool:
        at = max(first, self._located.earliest_seq)
        if at >= stop:
            return True
        deleted = self._deleted
        gone = 0 if deleted is None else deleted.range_cardinality(at, stop)
        lost = self._located.lost
        for range_first, range_last in zip(lost[::2], lost[1::2], strict=True):
            low, high = max(range_first, at), min(range_last + 1, stop)
            if low < high:
                gone += high - low - (0 if deleted is None else deleted.range_cardinality(low, high))
        return gone >= stop - at

    def _recheck_hole(self, extent: ExtentFacts, window: Window, fresh: FrameBatch) -> Pause:
        """Records are missing: retention may have moved while we read, so ask once before crying damage."""
        at = window.origin + int(fresh.stored_offsets[0])
        if self._hole_seen:
            found = int(fresh.words[0, layout.W_BASE_SEQ])
            self._raise_corrupt(
                extent, "records are missing from the log", at, seq=self.cursor + 1, found_seq=found
            )
        self._hole_seen = True
        self._offset = at
        return Pause.MOVED

    def _raise_corrupt(self, extent: ExtentFacts, reason: str, offset: int, **detail: Any) -> NoReturn:
        self._offset = offset
        first, last = self.cursor + 1, max(self.cursor + 1, extent.last_seq)
        place = None
        if extent.segment and self._segment_cache is not None:
            place = self._segment_cache.frame_at(extent.path, self._located.topic_id, first)
        if place is not None and place.offset == offset:
            first, last = place.first_seq, place.last_seq
        raise CorruptData(
            f"stored frames are damaged: {reason}",
            topic=self._located.topic,
            **({"seq": self.cursor + 1, "first_seq": first, "last_seq": last} | detail),
            file=extent.path,
            offset=offset,
        )


def _bitmap(data: bytes) -> BitMap64 | None:
    return BitMap64.deserialize(data) if data else None


def _cold_unavailable(topic: str, file: str, error: DiskError) -> ColdUnavailable:
    return ColdUnavailable(
        "a data part is not on the host, and the cold tier does not answer or does not have it: see that the"
        " store is there", topic=topic, file=file, errno=error.errno,
    )  # fmt: skip


def _last_seqs(batch: FrameBatch) -> frames.I64:
    """(n,) number of each frame's last record."""
    bases = batch.words[:, layout.W_BASE_SEQ]
    return (bases + frames.counts_of(batch.words)).astype(np.int64) - 1
