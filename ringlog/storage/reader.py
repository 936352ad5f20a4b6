"""TopicReader: the verified, published frames of one topic, in order and without repetition.

A Located tells a reader which extents to read: first those of segments, then those of WAL files. Two
published facts of the shard limit how far it reads in the log. Frames of a file below the *published mark*
are readable, and records up to the topic's *head* are visible. From the log, the reader never returns a frame
above the mark, or one that ends above the given head. Segments contain only published frames and need no
mark. A frame of a segment that begins at or below the head is returned whole; the caller cuts it.

A reader never waits and sends no message, so that a server can have thousands of them. `next_run` returns
frames, or a Pause with the reason for their absence. The Pause determines the next step of the owner. It
waits for a publication, passes a new Located from the shard to `relocate`, or passes the bytes of
`cold_range_needed` to `supply_cold_bytes`.

Before a frame is returned, the reader checks its seal under the salt of its file and the checksum of its
body. It also checks that no record is missing before the frame, except removed and lost ones. A frame may be
stored twice: a restart copies it forward, and a checkpoint copies it into a segment. The reader recognises
the second one by its seqs and skips it. Damage raises CorruptData with topic, seq, first_seq, last_seq, file
and offset. The frames before the damage are returned first.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

import numpy as np

from ringlog.errors import ColdUnavailable, CorruptData, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.routed_frame import resolve_copies
from ringlog.frame.view import FrameView, open_frame
from ringlog.limits import FRAME_BYTES_MAX, KIB, MIB
from ringlog.segment.layout import DATA_HEADER_BYTES, SegmentDataHeader
from ringlog.storage.disk import Disk
from ringlog.storage.extent_files import ExtentFiles
from ringlog.storage.extents import (
    TIER_COLD,
    VOLATILE_PREFIX,
    ExtentFacts,
    HighWatermarkReader,
    LocatedFacts,
    LocatedRecords,
)
from ringlog.storage.frame_run import FrameRun, last_seqs
from ringlog.storage.log_map import LogFileKey, LogMap
from ringlog.storage.segment_cache import SegmentCache
from ringlog.storage.windows import ColdByteRange, RemoteFile, Window, WindowFile

WINDOW_BYTES = 1 * MIB
"""Bytes per read. A single frame that is larger is read whole."""
FIRST_WINDOW_BYTES = 64 * KIB
"""First window size for callers that may need only a few records. They double it as they continue."""
WINDOWS_PER_CALL_MAX = 64
"""Number of windows without a frame of the topic after which next_run returns to its caller."""
SCAN_WINDOW_BYTES = 256 * KIB
"""Bytes per read where frames of the topic are sparse and no reader has scanned the range yet."""
DENSE_FRAME_RATIO = 8
"""If at least 1 frame in this number is the topic's in a new window, the reader stops using the log map."""
SEEK_POSITIONS_MIN = 16_384
"""Number of skipped seqs above which `skip_to` looks up the position in the segment's index."""


class Pause(Enum):
    """Reason why next_run returned no frames."""

    AT_MARK = "at_mark"
    """All published bytes are read: wait for a publication."""
    BEYOND_HEAD = "beyond_head"
    """The next frame is above the given head: read the head again."""
    MOVED = "moved"
    """All known extents are read, or their files are deleted: request a new Located."""
    COLD = "cold"
    """This process cannot read the bytes: fetch `cold_range_needed`, pass it to `supply_cold_bytes`."""
    UNFINISHED = "unfinished"
    """Many windows were scanned without a frame of the topic: call again after other work."""


class TopicReader:
    """Reads one epoch of one topic from a cursor. Not thread-safe. Uses one open file."""

    def __init__(
        self,
        located: LocatedFacts,
        cursor: int,
        *,
        data_dir: str,
        shm_dir: str,
        read_watermark: HighWatermarkReader,
        disk: Disk,
        is_mapped: bool = False,
        checks_bodies: bool = True,
        window_bytes: int = WINDOW_BYTES,
        cold_dir: str = "",
        segment_cache: SegmentCache | None = None,
        log_map: LogMap | None = None,
        windows_per_call: int = WINDOWS_PER_CALL_MAX,
    ) -> None:
        """Create a reader that begins after seq `cursor`.

        Args:
            located: Extents of the topic, from the shard.
            cursor: Last seq that was processed.
            data_dir: Root of paths in extents.
            shm_dir: Root of paths in extents of the volatile log.
            read_watermark: Reads the shard's published mark.
            disk: Opens the files.
            is_mapped: Map files instead of reading them with pread.
            checks_bodies: False if a later reader of the frames verifies the body checksums.
            window_bytes: Bytes per read.
            cold_dir: Root of cold segments, if this process can open them. Without it next_run returns
                Pause.COLD for them.
            segment_cache: Indexes of segments, for starting inside a segment. Without it a segment is read
                from its start.
            log_map: Positions of frames that other readers found in the log. Without it the reader scans the
                frames of all topics.
            windows_per_call: Windows without a frame of the topic after which next_run returns.
        """
        self.cursor: int = cursor
        """Last seq that was returned, or skipped because it is below the retained records."""
        self.records: LocatedRecords = LocatedRecords(located)
        """The Located that this reader uses."""
        self._files = ExtentFiles(disk, located.topic, data_dir, shm_dir, cold_dir, is_mapped=is_mapped)
        self._segment_cache = segment_cache
        self._log_map = log_map
        self._is_sparse = False  # Whole windows of the log contain no frame of the topic.
        self._read_watermark = read_watermark
        self._checks_bodies = checks_bodies
        self._window_bytes = window_bytes
        self._windows_per_call = windows_per_call
        self._file: WindowFile | None = None
        self._gap_rechecked = False  # A gap is damage only if it is still there with a new Located.
        self._extent = 0
        self._offset = 0
        self._frame_bytes = 0  # Size of the frame at `_offset` if a segment index gave it, else 0.
        self._is_sought = False
        self._known_bytes = 0
        self._enter_extent(self.records.extent_of(cursor + 1))

    @property
    def cold_range_needed(self) -> ColdByteRange | None:
        """Bytes to fetch after Pause.COLD; None otherwise."""
        return self._file.range_needed if isinstance(self._file, RemoteFile) else None

    def supply_cold_bytes(self, want: ColdByteRange, data: Any) -> None:
        """Supply the bytes of `want`. Ignored if the reader has moved to another range in the meantime."""
        if isinstance(self._file, RemoteFile) and self._file.range_needed == want:
            self._file.supply_bytes(data)

    def relocate(self, located: LocatedFacts, cursor: int | None = None) -> None:
        """Continue after `cursor` (default: the current one) with new extents."""
        self.close()
        if located is not self.records.located:
            self.records = LocatedRecords(located)
        if cursor is not None:
            self.cursor = cursor
        self._enter_extent(self.records.extent_of(self.cursor + 1))

    def seek(self, cursor: int) -> tuple[str, int]:
        """Set the cursor. Return the file of the next read, named as in its extent, and the offset in it.

        In a segment the offset is that of the frame with the next record. ("", 0) if no extent follows.
        """
        self.relocate(self.records.located, cursor)
        if self._extent >= len(self.records.extents):
            return "", 0
        extent = self.records.extents[self._extent]
        if not self._is_sought:
            self._seek(extent)
        return extent.path, self._offset

    def skip_to(self, cursor: int) -> None:
        """Continue after `cursor`, which is not before the current one.

        For a skip of more than SEEK_POSITIONS_MIN seqs, a segment's index gives the new position.
        """
        is_far = cursor - self.cursor > SEEK_POSITIONS_MIN
        self.cursor = cursor
        if is_far and self._extent < len(self.records.extents):
            self._is_sought = not self.records.extents[self._extent].segment

    @property
    def log_position(self) -> tuple[int, int]:
        """(file id, offset) in the log of the next read; (0, 0) if that is not in a log file."""
        extents = self.records.extents
        if self._extent >= len(extents) or extents[self._extent].segment:
            return 0, 0
        return extents[self._extent].file_id, self._offset

    def advance_past(self, last_seq: int, file_id: int, stop: int) -> None:
        """Continue after `last_seq`, because another component has read the records up to it.

        The following frames of the topic lie at or after offset `stop` of the log file `file_id`.
        """
        extents = self.records.extents
        is_here = self._extent < len(extents) and extents[self._extent].file_id == file_id
        if is_here and not extents[self._extent].segment and self._offset <= stop:
            self.cursor, self._offset = last_seq, stop
            self._gap_rechecked = False
        elif last_seq > self.cursor:
            self.skip_to(last_seq)

    def read_at_hint(
        self, first_seq: int, last_seq: int, file_id: int, offset: int, stop: int
    ) -> FrameView | None:
        """Return the frame with `first_seq` .. `last_seq` from the given place in the log, verified.

        This is the fast path for a reader that keeps up and received the place of the frame, [offset, stop)
        of log file `file_id`. It returns None if the records are not the next ones, or the frame is not
        exactly as described; `next_run` then determines the cause. Raises DiskError.

        The caller must have checked that the topic's head is not below `last_seq`. The frame is then
        published, and no mark is needed.
        """
        if first_seq != self.cursor + 1 or self._extent >= len(self.records.extents) or offset & 7:
            return None
        extent = self.records.extents[self._extent]
        is_log = not extent.segment and not extent.path.startswith(VOLATILE_PREFIX)
        if not is_log or extent.file_id != file_id or not self._offset <= offset < stop:
            return None
        if (extent.stop and stop > extent.stop) or stop - offset > FRAME_BYTES_MAX:
            return None
        view = self._open_at_hint(extent, offset, stop)
        if view is None:
            return None
        located = self.records.located
        if (view.topic_id, view.header.epoch) != (located.topic_id, located.epoch) or (
            view.first_seq, view.last_seq, view.total_bytes,
        ) != (first_seq, last_seq, stop - offset):  # fmt: skip
            return None
        self.cursor, self._offset = last_seq, stop
        self._gap_rechecked = False
        return view

    def _open_at_hint(self, extent: ExtentFacts, offset: int, stop: int) -> FrameView | None:
        file = self._file or self._files.open(extent)
        if file is None:
            return None
        self._file = file
        window = file.window(offset, stop)
        if window is None or window.stop - window.start != stop - offset:
            return None
        window.buffer.flags.writeable = False  # SharedReads may pass it to other readers.
        try:
            view = open_frame(window.buffer, window.start, seed=extent.salt)
        except FrameInvalid:
            return None
        return view if view.header.type == layout.FrameType.APPEND else None

    def close(self) -> None:
        """Close the file. The reader may be used again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def next_run(self, head_seq: int, bytes_max: int = 0) -> FrameRun | Pause:
        """Return the next frames up to `head_seq`, or a Pause, from about `bytes_max` bytes (0 = a window).

        Raises CorruptData for damage, DiskError if the disk fails, and ColdUnavailable if the cold tier does
        not answer. Frames before the damage are returned first. A further call raises the same error.
        """
        window_bytes = layout.padded(bytes_max or self._window_bytes)
        windows = 0
        while self._extent < len(self.records.extents):
            extent = self.records.extents[self._extent]
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
                self._raise_corrupt(extent, found.reason or "zeros below the published mark", self._offset)
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
        return Pause.MOVED if self.records.extents else Pause.AT_MARK

    def _look_up(self, extent: ExtentFacts, window_bytes: int) -> bool:
        """Move to the place where the topic's next frame may be. Return True if no reader has scanned it."""
        if self._log_map is None or self._known_bytes:
            return False
        file = LogFileKey(extent.path, extent.salt)
        found = self._log_map.find(file, self.records.located.topic_id, self._offset, window_bytes)
        self._offset = found.offset
        self._known_bytes = found.size if found.is_known else min(found.size, SCAN_WINDOW_BYTES)
        return not found.is_known

    def _share_scan(self, extent: ExtentFacts, window: Window, found: FrameBatch) -> None:
        """Add the result of this scan to the log map."""
        assert self._log_map is not None
        file = LogFileKey(extent.path, extent.salt)
        self._log_map.add_scan(file, window.buffer, found, window.start, window.origin)

    def _enter_extent(self, index: int) -> None:
        self.close()
        self._extent = index
        if index < len(self.records.extents):
            extent = self.records.extents[index]
            self._offset = extent.start
            self._frame_bytes = 0
            self._is_sought = not extent.segment

    def _seek(self, extent: ExtentFacts) -> None:
        """Begin a segment at the frame with the next record, if the segment's index is usable."""
        self._is_sought = True
        if extent.last_seq <= self.cursor:
            self._offset = extent.stop
        elif self._segment_cache is not None and self.cursor >= extent.first_seq:
            place = self._segment_cache.frame_at(extent.path, self.records.located.topic_id, self.cursor + 1)
            if place is not None and self._offset <= place.offset < extent.stop:
                self._offset, self._frame_bytes = place.offset, place.length

    def _visible_stop(self, extent: ExtentFacts) -> int | None:
        """Return the offset up to which the extent is readable, or None if a new Located is needed."""
        if extent.segment:
            return extent.stop
        mark = self._read_watermark(extent.path.startswith(VOLATILE_PREFIX))
        if mark.file_id == extent.file_id:
            return min(extent.stop, mark.offset) if extent.stop else mark.offset
        if mark.file_id < extent.file_id:
            return 0
        return extent.stop or None

    def _read(self, extent: ExtentFacts, stop: int, window_bytes: int) -> Window | Pause:
        """Read from the current offset, at least one whole frame."""
        file = self._file or self._files.open(extent)
        if file is None:
            return Pause.MOVED
        self._file = file
        wanted = min(self._offset + (self._known_bytes or max(window_bytes, self._frame_bytes)), stop)
        self._frame_bytes = self._known_bytes = 0
        window = self._files.window(extent, file, self._offset, wanted)
        if window is None:
            return Pause.COLD
        if window.stop - window.start < 8:
            self._raise_corrupt(extent, "file ends below the published mark", self._offset)
        length = int(window.buffer[window.start : window.start + 4].view("<u4")[0]) + layout.LEN_FIELD_BYTES
        if window.stop - window.start < length <= FRAME_BYTES_MAX and wanted < stop:
            window = self._files.window(extent, file, self._offset, min(self._offset + length, stop))
        return Pause.COLD if window is None else window

    def _resolved(self, extent: ExtentFacts, window: Window, found: FrameBatch) -> FrameBatch:
        """Replace routed frames by this topic's copies in them. Return only the frames before damage."""
        try:
            return resolve_copies(window.buffer, found, extent.salt, topic_id=self.records.located.topic_id)
        except FrameInvalid as e:
            bad = int(np.searchsorted(found.offsets, e.offset))
            if not bad:
                self._raise_corrupt(extent, e.reason, window.origin + e.offset)
        sound = found.take(slice(0, bad))
        sound.stop = int(found.offsets[bad])
        return resolve_copies(window.buffer, sound, extent.salt, topic_id=self.records.located.topic_id)

    def _select_frames(
        self, extent: ExtentFacts, window: Window, found: FrameBatch, head_seq: int
    ) -> FrameRun | Pause | None:
        """Advance past the scanned frames. Return the topic's frames among them, or None without any."""
        self._offset = window.origin + found.stop
        mine = np.flatnonzero(found.words[:, layout.W_TOPIC] == np.uint64(self.records.located.topic_id))
        if extent.segment and len(mine) < len(found):
            stranger = int(np.setdiff1d(np.arange(len(found)), mine)[0])
            if stranger == 0:
                at = window.origin + int(found.offsets[0])
                self._raise_corrupt(extent, "the topic's range has a frame of another topic", at)
            found = self._stop_before(window, found, stranger)
            mine = mine[:stranger]
        if not len(mine):
            return None
        ours = found if len(mine) == len(found) else found.take(mine)
        bad = frames.first_bad_seal(ours, extent.salt)
        if bad is None:
            bad = frames.first_true(frames.malformed(ours.words))
        if bad == 0:
            at = window.origin + int(ours.stored_offsets[0])
            self._raise_corrupt(extent, "header does not match its seal or is malformed", at)
        if bad is not None:
            ours = self._stop_before(window, ours, bad)
        fresh, last = self._undelivered(ours)
        if extent.segment:
            hidden = frames.first_true(fresh.words[:, layout.W_BASE_SEQ].astype(np.int64) > head_seq)
        else:
            hidden = frames.first_true(last > head_seq)
        if hidden == 0:
            self._offset = window.origin + int(fresh.stored_offsets[0])
            return Pause.BEYOND_HEAD
        if hidden is not None:
            fresh = self._stop_before(window, fresh, hidden)
        return self._deliver(extent, window, fresh, last)

    def _stop_before(self, window: Window, batch: FrameBatch, row: int) -> FrameBatch:
        """Return the frames before `row`, and continue at `row` on the next call."""
        self._offset = window.origin + int(batch.stored_offsets[row])
        return batch.take(slice(0, row))

    def _undelivered(self, ours: FrameBatch) -> tuple[FrameBatch, frames.I64]:
        """Return the appends of this epoch with records after the cursor, each only once, and the seq of the
        last record of each of them."""
        wanted = frames.is_of_type(ours.words, layout.FrameType.APPEND) & (
            frames.epochs_of(ours.words) == self.records.located.epoch
        )
        last = last_seqs(ours)
        if len(last) > 1:
            seen = np.maximum.accumulate(np.where(wanted, last, 0))
            wanted[1:] &= last[1:] > seen[:-1]
        wanted &= last > self.cursor
        lost = self.records.located.lost
        for range_first, range_last in zip(lost[::2], lost[1::2], strict=True):
            # A range that is reported as lost has no records. Damaged bytes may be all that is left there.
            bases = ours.words[:, layout.W_BASE_SEQ].astype(np.int64)
            wanted &= (bases < range_first) | (last > range_last)
        if wanted.all():
            return ours, last
        rows = np.flatnonzero(wanted)
        return ours.take(rows), last[rows]

    def _deliver(
        self, extent: ExtentFacts, window: Window, fresh: FrameBatch, last: frames.I64
    ) -> FrameRun | Pause | None:
        """Return these frames as a run, after the last checks. `last` may have more rows than `fresh`."""
        if not len(fresh):
            return None
        hole = self.records.first_hole(fresh, last, self.cursor)
        if hole == 0:
            return self._recheck_hole(extent, window, fresh)
        if hole is not None:
            fresh = self._stop_before(window, fresh, hole)
        bad = frames.first_bad_body(window.buffer, fresh) if self._checks_bodies else None
        if bad == 0:
            at = window.origin + int(fresh.stored_offsets[0])
            first = int(fresh.words[0, layout.W_BASE_SEQ])
            reason = "body does not match its checksum"
            self._raise_corrupt(extent, reason, at, seq=first, first_seq=first, last_seq=int(last[0]))
        if bad is not None:
            fresh = self._stop_before(window, fresh, bad)
        self._gap_rechecked = False
        self.cursor = int(last[len(fresh) - 1])
        is_file = extent.segment and not isinstance(self._file, RemoteFile)
        file = self._files.path_of(extent) if is_file else ""
        return FrameRun(window.buffer, fresh, extent.salt, extent.path, window.origin, file)

    def _recheck_hole(self, extent: ExtentFacts, window: Window, fresh: FrameBatch) -> Pause:
        """Request a new Located for the first gap: retention may have advanced. Raise on the second."""
        at = window.origin + int(fresh.stored_offsets[0])
        if self._gap_rechecked:
            expected, found = self.cursor + 1, int(fresh.words[0, layout.W_BASE_SEQ])
            reason = f"records are missing: expected seq {expected}, found seq {found}"
            self._raise_corrupt(extent, reason, at, seq=expected, found_seq=found)
        self._gap_rechecked = True
        self._offset = at
        return Pause.MOVED

    def _require_own_part(self, extent: ExtentFacts) -> None:
        """Raise ColdUnavailable if the file in the cold directory is a segment of another engine.

        Numbers are unique within an engine, and salts everywhere.
        """
        window = self._files.window(extent, self._file, 0, DATA_HEADER_BYTES) if self._file else None
        if window is None:
            return
        try:
            header = SegmentDataHeader.decode(bytes(window.buffer[window.start : window.stop]), extent.path)
        except CorruptData:
            return
        if header.number == extent.segment and header.salt != extent.salt:
            raise ColdUnavailable(
                "the cold directory is of another engine; check cold.dir and its mount",
                topic=self.records.located.topic, file=extent.path,
            )  # fmt: skip

    def _raise_corrupt(self, extent: ExtentFacts, reason: str, offset: int, **detail: Any) -> NoReturn:
        self._offset = offset
        if extent.tier == TIER_COLD:
            self._require_own_part(extent)
        first, last = self.cursor + 1, max(self.cursor + 1, extent.last_seq)
        place = None
        if extent.segment and self._segment_cache is not None:
            place = self._segment_cache.frame_at(extent.path, self.records.located.topic_id, first)
        if place is not None and place.offset == offset:
            first, last = place.first_seq, place.last_seq
        raise CorruptData(
            f"stored frames are damaged: {reason}",
            topic=self.records.located.topic,
            **({"seq": self.cursor + 1, "first_seq": first, "last_seq": last} | detail),
            file=extent.path,
            offset=offset,
        )
