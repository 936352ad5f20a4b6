"""Reads the log for remote clients: whole frames, verified, copied, and sealed again with seed 0.

The salts of the files are not sent. A client that cannot read the files does not need them, and with a salt
it could build frames that verify in these files.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.gateway.events import FramesRead, ReadFiles
from ringlog.envelope.messages import ColdRead
from ringlog.errors import CorruptData, DiskError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.storage.disk import Disk
from ringlog.storage.extents import TIER_COLD, HighWatermarkReader
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.log_map import LogMap
from ringlog.storage.reader import FIRST_WINDOW_BYTES, WINDOW_BYTES, Pause, TopicReader
from ringlog.storage.segment_cache import SegmentCache
from ringlog.storage.visibility import I64, VisibilityFilter

SCAN_POSITIONS_MAX = 100_000
_ATTEMPTS_MAX = 8
"""Most attempts at a published mark that has not reached the head. After that the client reads again."""


def read_files(
    request: ReadFiles,
    *,
    data_dir: str,
    shm_dir: str,
    read_watermark: HighWatermarkReader,
    disk: Disk,
    segment_cache: SegmentCache | None = None,
    log_map: LogMap | None = None,
) -> FramesRead:
    """Perform a ReadFiles. Damage and disk errors are returned as `error` if no frame precedes them."""
    reader = TopicReader(
        request.located, request.after, data_dir=data_dir, shm_dir=shm_dir, read_watermark=read_watermark,
        disk=disk, segment_cache=segment_cache, log_map=log_map,
    )  # fmt: skip
    try:
        return _read(reader, request)
    except (CorruptData, DiskError) as e:
        return FramesRead(request.ticket, 0, 0, 0, request.after, None, e)
    finally:
        reader.close()


def _read(reader: TopicReader, request: ReadFiles) -> FramesRead:
    builder = _ReadReplyBuilder(
        request, VisibilityFilter(reader.records.deleted, request.located.ttl_us, request.now_us)
    )
    stop = builder.stop
    attempts = 0
    extents = request.located.extents
    window = WINDOW_BYTES if extents and extents[0].tier == TIER_COLD else FIRST_WINDOW_BYTES
    while not builder.is_full and builder.examined < stop:
        try:
            run = reader.next_run(stop, window)
        except (CorruptData, DiskError):
            if builder.runs:
                break
            raise
        if isinstance(run, FrameRun):
            builder.add_run(run)
            window = min(2 * window, WINDOW_BYTES)
            continue
        attempts += 1
        if run is Pause.COLD:
            if builder.runs or not _supply_cold(reader, request):
                break
        elif run is Pause.BEYOND_HEAD or _is_end(reader, run, builder.examined, stop):
            builder.examined = stop
        elif run is Pause.MOVED and attempts < _ATTEMPTS_MAX:
            # The position was located just now. After a second attempt a hole in the log is an error.
            reader.relocate(request.located)
        elif run is not Pause.UNFINISHED and (builder.runs or attempts >= _ATTEMPTS_MAX):
            break
    needed = reader.cold_range_needed
    # If all records so far are hidden, the reply is empty but its position advances. The client reads from
    # there.
    if needed is not None and not builder.runs and builder.examined == request.after < stop:
        return FramesRead(request.ticket, 0, 0, 0, builder.examined, cold=ColdRead(*needed))
    return builder.build()


def _is_end(reader: TopicReader, pause: Pause, examined: int, stop: int) -> bool:
    """Return whether no live record can follow: all missing seqs up to `stop` were removed."""
    return pause in {Pause.MOVED, Pause.AT_MARK} and reader.records.accounts_for(examined + 1, stop)


def _supply_cold(reader: TopicReader, request: ReadFiles) -> bool:
    """Supply the bytes that the relocator read, if they include those that the reader needs."""
    needed, cold = reader.cold_range_needed, request.cold
    if needed is None or cold is None or needed.path != cold.path:
        return False
    if not cold.start <= needed.start < needed.stop <= cold.stop:
        return False
    reader.supply_cold_bytes(
        needed, memoryview(request.cold_data)[needed.start - cold.start : needed.stop - cold.start]
    )
    return True


class _ReadReplyBuilder:
    """Collects the runs of one reply up to its limits. Hidden records do not count towards them."""

    def __init__(self, request: ReadFiles, mask: VisibilityFilter) -> None:
        self.runs: list[FrameRun] = []
        self.examined = request.after
        self.stop = min(request.stop, request.located.deleted_to or request.stop)
        self._request = request
        self._mask = mask
        self._records_left, self._bytes_left = request.limit, request.max_bytes
        self._passed = 0
        self._hidden: list[I64] = []

    @property
    def is_full(self) -> bool:
        """Whether the reply has reached a limit, or the limit of examined positions for one reply."""
        return self._records_left <= 0 or self._bytes_left <= 0 or self._passed >= SCAN_POSITIONS_MAX

    def add_run(self, run: FrameRun) -> None:
        """Add the frames of a run that contain visible records, as far as they fit.

        If not all of them fit, the reply is full: the reader is already past the frames that were left out.
        """
        last = min(run.last_seq, self.stop)
        hidden = self._mask.hidden_seqs([run])
        hidden = hidden[(hidden > self.examined) & (hidden <= last)]
        visible = _visible_counts(run, self.examined, self.stop, hidden)
        if not visible.all():
            kept = np.flatnonzero(visible)
            run, visible = _rows_of(run, kept), visible[kept]
        if len(visible):
            rows = _fitting(run, visible, self._records_left, self._bytes_left)
            if rows < len(visible):
                run = _rows_of(run, slice(0, rows))
                last = min(run.last_seq, self.stop)
            self._records_left -= int(visible[:rows].sum())
            self._bytes_left -= int(run.batch.total_bytes.sum())
            self.runs.append(run)
        # Includes hidden seqs of frames that are left out: a later frame may contain the same seqs, and the
        # client has no other source for them.
        self._hidden.append(hidden[hidden <= last])
        self._passed += last - self.examined
        self.examined = last

    def build(self) -> FramesRead:
        """Join the frames of the reply and seal them for the wire."""
        request = self._request
        if not self.runs:
            return FramesRead(request.ticket, 0, 0, 0, self.examined)
        packed = _packed(request.ticket, self.runs, self.examined)
        hidden = np.concatenate(self._hidden)
        if not len(hidden):
            return packed
        return replace(packed, hidden=BitMap64(array("Q", hidden.tobytes())).serialize())


def _visible_counts(run: FrameRun, after: int, stop: int, hidden: I64) -> I64:
    """Return for each frame the number of visible records after `after` and up to `stop`, shape (n,)."""
    first = run.batch.words[:, layout.W_BASE_SEQ].astype(np.int64)
    last = first + frames.counts_of(run.batch.words).astype(np.int64) - 1
    first, last = np.maximum(first, after + 1), np.minimum(last, stop)
    excluded = np.searchsorted(hidden, last, side="right") - np.searchsorted(hidden, first)
    found: I64 = last + 1 - first - excluded
    return found


def _rows_of(run: FrameRun, rows: slice | I64) -> FrameRun:
    return FrameRun(run.buffer, run.batch.take(rows), run.salt, run.path, run.origin)


def _fitting(run: FrameRun, visible: I64, records: int, size: int) -> int:
    """Return how many of the first frames reach `records` visible records or `size` bytes; at least 1."""
    counts, sizes = np.cumsum(visible), np.cumsum(run.batch.total_bytes)
    rows = 1 + min(int(np.searchsorted(counts, records)), int(np.searchsorted(sizes, size)))
    return min(rows, len(run.batch))


def _packed(ticket: int, runs: list[FrameRun], examined: int) -> FramesRead:
    """Copy the frames into one buffer and seal them for the wire, with seed 0."""
    if not runs:
        return FramesRead(ticket, 0, 0, 0, examined)
    parts: list[Any] = []
    for run in runs:
        view = memoryview(run.buffer)
        stops = run.batch.offsets + run.batch.total_bytes
        parts += [view[a:b] for a, b in zip(run.batch.offsets.tolist(), stops.tolist(), strict=True)]
    data = bytearray().join(parts)
    sizes = np.concatenate([run.batch.total_bytes for run in runs])
    stops = np.cumsum(sizes)
    words = np.concatenate([run.batch.words for run in runs])
    words[:, layout.W_SEAL_XXH3] = frames.seals(words, layout.WIRE_SEED)
    batch = FrameBatch(stops - sizes, words, len(data), frames.ScanEnd.CLEAN)
    frames.write_headers(frames.words_of(data), batch)
    records = int(frames.counts_of(words).sum())
    return FramesRead(ticket, len(batch), records, runs[-1].last_seq, examined, data)
