"""TopicReader: the verified frames of one topic, in order, once each, as far as they are published.

A reader is told where to look by a Located (extents of WAL files) and how far it may look by two facts
that the shard publishes: the *mark* (every frame of that file below this offset may be read) and the
topic's head. It never delivers a frame that reaches above the head it is given, nor one above the mark.

It does no waiting and sends no message, so that a server can hold thousands. `next_run` answers with
frames or with a Pause saying why there are none: the owner waits for a publication, or asks the shard
for a new Located with the cursor and hands it to `relocate`.

What is checked of every frame of the topic, before anybody sees it: its seal under the salt of the file
it lies in, its body's checksum, and that no record is missing between it and the one before. A frame
copied forward after a restart lies in two files; the second is passed over by its numbers. Damage is a
CorruptData that names topic, seq, file and offset; what lies before it is delivered first (DR-16).
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from ringlog.errors import CorruptData, DiskError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.limits import FRAME_BYTES_MAX, KIB, MIB
from ringlog.storage.disk import Disk

WINDOW_BYTES = 1 * MIB
"""Bytes read at a time; one frame that is larger is read whole."""
FIRST_WINDOW_BYTES = 64 * KIB
"""Where owners begin who may want only a few records; they double it as they go on."""
WINDOWS_PER_CALL_MAX = 64
"""Windows without a frame of the topic after which next_run returns to its caller."""
VOLATILE_PREFIX = "@"


class ExtentFacts(Protocol):
    """A stretch of one WAL file, as in the message Extent. `stop` 0 = open end."""

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


class Mark(NamedTuple):
    """Published mark of a stream: the frames of file `file_id` below `offset`, and all older files."""

    file_id: int
    offset: int


Marks = Callable[[bool], Mark]
"""Reads the shard's published mark; True asks for the one of its volatile log."""


class Pause(Enum):
    """Why there are no frames now."""

    AT_MARK = "at_mark"
    """Everything published has been read: wait for a publication."""
    BEYOND_HEAD = "beyond_head"
    """The next frame is not visible under the given head: read the head again."""
    MOVED = "moved"
    """The extents known are used up, or their files are gone: ask for a new Located."""
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

    @property
    def first_seq(self) -> int:
        """Number of the first record of the first frame."""
        return int(self.batch.words[0, layout.W_BASE_SEQ])

    @property
    def last_seq(self) -> int:
        """Number of the last record of the last frame."""
        return int(_last_seqs(self.batch)[-1])

    def after(self, seq: int) -> FrameRun:
        """The frames that hold records after `seq`; the first may begin before it."""
        if self.first_seq > seq:
            return self
        row = int(np.searchsorted(_last_seqs(self.batch), seq, side="right"))
        return FrameRun(self.buffer, self.batch.take(slice(row, None)), self.salt, self.path, self.origin)


class _Window(NamedTuple):
    """Bytes of a file: scan `buffer` from `start` to `stop`; `origin` is the file offset of byte 0."""

    buffer: Any
    start: int
    stop: int
    origin: int


class _ReadFile:
    """Reads with pread into fresh private buffers: a failing disk is an error, not a signal (RD-15)."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._fd = disk.open_read(path)

    def window(self, start: int, stop: int) -> _Window:
        buffer = np.empty(stop - start, dtype=np.uint8)
        count = self._disk.read_into(self._fd, buffer, start)
        return _Window(buffer, 0, count & ~7, start)

    def close(self) -> None:
        self._disk.close(self._fd)


class _MappedFile:
    """Maps the file: no copy, but damage under the mapping kills the process. For expendable readers."""

    def __init__(self, disk: Disk, path: str) -> None:
        fd = disk.open_read(path)
        try:
            size = disk.size(fd) & ~7
            self._view = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            disk.close(fd)

    def window(self, start: int, stop: int) -> _Window:
        return _Window(self._view, start, min(stop, len(self._view)), 0)

    def close(self) -> None:
        # Views handed out keep the mapping alive; the last one to go unmaps it.
        self._view = np.empty(0, dtype=np.uint8)


class TopicReader:
    """Reads one life of one topic from a cursor on. Not thread-safe; cheap to hold: one open file."""

    def __init__(
        self,
        located: LocatedFacts,
        cursor: int,
        *,
        data_dir: str,
        shm_dir: str,
        marks: Marks,
        disk: Disk,
        is_mapped: bool = False,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.cursor = cursor
        """Last seq delivered, or passed over because it lies below what is retained."""
        self._roots = (data_dir, shm_dir)
        self._marks = marks
        self._disk = disk
        self._open: type[_ReadFile] | type[_MappedFile] = _MappedFile if is_mapped else _ReadFile
        self._window_bytes = window_bytes
        self._file: _ReadFile | _MappedFile | None = None
        self._hole_seen = False  # A hole is believed only after the shard was asked again.
        self._located = located
        self._extent = 0
        self._offset = 0
        self._enter(0)

    @property
    def located(self) -> LocatedFacts:
        """The Located this reader works from."""
        return self._located

    def relocate(self, located: LocatedFacts, cursor: int | None = None) -> None:
        """Go on from `cursor` (default: where we are) with new extents."""
        self.close()
        self._located = located
        if cursor is not None:
            self.cursor = cursor
        self._enter(0)

    def close(self) -> None:
        """Give the open file back. The reader may be used again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def next_run(self, head_seq: int, bytes_max: int = 0) -> FrameRun | Pause:
        """Return the next frames up to `head_seq`, about `bytes_max` bytes of log (0 = a window).

        Raises CorruptData for damage, DiskError when the disk fails. Frames before the damage have
        been returned by then, and calling again repeats the error.
        """
        window_bytes = layout.padded(bytes_max or self._window_bytes)
        windows = 0
        while self._extent < len(self._located.extents):
            extent = self._located.extents[self._extent]
            stop = self._visible_stop(extent)
            if stop is None:
                return Pause.MOVED
            if self._offset >= stop:
                if not extent.stop or self._offset < extent.stop:
                    return Pause.AT_MARK
                self._enter(self._extent + 1)
                continue
            window = self._read(extent, stop, window_bytes)
            if window is None:
                return Pause.MOVED
            found = frames.scan(window.buffer.view("<u8"), window.start, window.stop)
            if not len(found):
                self._damaged(extent, found.reason or "zeros where frames were published", self._offset)
            run = self._take(extent, window, found, head_seq)
            if run is not None:
                return run
            windows += 1
            if windows == WINDOWS_PER_CALL_MAX:
                return Pause.UNFINISHED
        return Pause.MOVED if self._located.extents else Pause.AT_MARK

    def _enter(self, index: int) -> None:
        self.close()
        self._extent = index
        if index < len(self._located.extents):
            self._offset = self._located.extents[index].start

    def _visible_stop(self, extent: ExtentFacts) -> int | None:
        """File offset up to which the extent may be read now, or None when it has to be located anew."""
        mark = self._marks(extent.path.startswith(VOLATILE_PREFIX))
        if mark.file_id == extent.file_id:
            return min(extent.stop, mark.offset) if extent.stop else mark.offset
        if mark.file_id < extent.file_id:
            return 0
        return extent.stop or None

    def _read(self, extent: ExtentFacts, stop: int, window_bytes: int) -> _Window | None:
        """Read from where we are, at least one whole frame; None when the file is no longer there."""
        if self._file is None:
            try:
                self._file = self._open(self._disk, self._path(extent))
            except DiskError as e:
                if e.errno == errno.ENOENT:
                    return None
                raise
        wanted = min(self._offset + window_bytes, stop)
        window = self._file.window(self._offset, wanted)
        if window.stop - window.start < 8:
            self._damaged(extent, "the file ends before what was published", self._offset)
        length = int(window.buffer[window.start : window.start + 4].view("<u4")[0]) + layout.LEN_FIELD_BYTES
        if window.stop - window.start < length <= FRAME_BYTES_MAX and wanted < stop:
            window = self._file.window(self._offset, min(self._offset + length, stop))
        return window

    def _path(self, extent: ExtentFacts) -> str:
        is_volatile = extent.path.startswith(VOLATILE_PREFIX)
        return str(Path(self._roots[is_volatile]) / extent.path.removeprefix(VOLATILE_PREFIX))

    def _take(
        self, extent: ExtentFacts, window: _Window, found: FrameBatch, head_seq: int
    ) -> FrameRun | Pause | None:
        """Move past the frames found; return ours among them, or None when there are none."""
        self._offset = window.origin + found.stop
        mine = np.flatnonzero(found.words[:, layout.W_TOPIC] == np.uint64(self._located.topic_id))
        if not len(mine):
            return None
        ours = found if len(mine) == len(found) else found.take(mine)
        bad = frames.first_bad_seal(ours, extent.salt)
        if bad is None:
            bad = frames.first_true(frames.malformed(ours.words))
        if bad == 0:
            self._damaged(extent, "header does not verify", window.origin + int(ours.offsets[0]))
        if bad is not None:
            ours = self._stop_before(window, ours, bad)
        fresh = self._fresh(ours)
        hidden = frames.first_true(_last_seqs(fresh) > head_seq)
        if hidden == 0:
            self._offset = window.origin + int(fresh.offsets[0])
            return Pause.BEYOND_HEAD
        if hidden is not None:
            fresh = self._stop_before(window, fresh, hidden)
        return self._deliver(extent, window, fresh)

    def _stop_before(self, window: _Window, batch: FrameBatch, row: int) -> FrameBatch:
        """Keep what lies before `row`, and go on at `row` the next time."""
        self._offset = window.origin + int(batch.offsets[row])
        return batch.take(slice(0, row))

    def _fresh(self, ours: FrameBatch) -> FrameBatch:
        """Choose the appends of this life that hold records after the cursor, each once."""
        wanted = (frames.types_of(ours.words) == layout.FrameType.APPEND) & (
            frames.epochs_of(ours.words) == self._located.epoch
        )
        last = _last_seqs(ours)
        seen = np.maximum.accumulate(np.where(wanted, last, 0))
        wanted[1:] &= last[1:] > seen[:-1]
        wanted &= last > self.cursor
        return ours if wanted.all() else ours.take(np.flatnonzero(wanted))

    def _deliver(self, extent: ExtentFacts, window: _Window, fresh: FrameBatch) -> FrameRun | Pause | None:
        if not len(fresh):
            return None
        hole = self._first_hole(fresh)
        if hole == 0:
            return self._doubt(extent, window, fresh)
        if hole is not None:
            fresh = self._stop_before(window, fresh, hole)
        bad = frames.first_bad_body(window.buffer, fresh)
        if bad == 0:
            at = window.origin + int(fresh.offsets[0])
            self._damaged(extent, "body does not verify", at, seq=int(fresh.words[0, layout.W_BASE_SEQ]))
        if bad is not None:
            fresh = self._stop_before(window, fresh, bad)
        self._hole_seen = False
        self.cursor = int(_last_seqs(fresh)[-1])
        return FrameRun(window.buffer, fresh, extent.salt, extent.path, window.origin)

    def _first_hole(self, fresh: FrameBatch) -> int | None:
        """Row of the first frame before which records are missing that nothing accounts for."""
        before = np.concatenate(([self.cursor], _last_seqs(fresh)[:-1]))
        base = fresh.words[:, layout.W_BASE_SEQ].astype(np.int64)
        for row in np.flatnonzero(base > before + 1).tolist():
            if not self._is_accounted(int(before[row]) + 1, int(base[row])):
                return int(row)
        return None

    def _is_accounted(self, first: int, stop: int) -> bool:
        """True when no live record is to be expected at positions first..stop-1: removed or lost."""
        at = max(first, self._located.earliest_seq)
        lost = self._located.lost
        for range_first, range_last in zip(lost[::2], lost[1::2], strict=True):
            if range_first <= at <= range_last:
                at = range_last + 1
        return at >= stop

    def _doubt(self, extent: ExtentFacts, window: _Window, fresh: FrameBatch) -> Pause:
        """Records are missing: retention may have moved while we read, so ask once before crying damage."""
        at = window.origin + int(fresh.offsets[0])
        if self._hole_seen:
            found = int(fresh.words[0, layout.W_BASE_SEQ])
            self._damaged(
                extent, "records are missing from the log", at, seq=self.cursor + 1, found_seq=found
            )
        self._hole_seen = True
        self._offset = at
        return Pause.MOVED

    def _damaged(self, extent: ExtentFacts, reason: str, offset: int, **detail: Any) -> NoReturn:
        self._offset = offset
        raise CorruptData(
            f"stored frames are damaged: {reason}",
            topic=self._located.topic,
            **({"seq": self.cursor + 1} | detail),
            file=extent.path,
            offset=offset,
        )


def _last_seqs(batch: FrameBatch) -> frames.I64:
    """(n,) number of each frame's last record."""
    bases = batch.words[:, layout.W_BASE_SEQ]
    return (bases + frames.counts_of(batch.words)).astype(np.int64) - 1
