"""Batches of consecutive records, converted from frames to Python values.

A large frame is a FrameRecordBatch, whose columns are views. Opening a frame costs about 10 us. This is
negligible for 1,000 records, but not for one. Consecutive small frames therefore become one
MultiFrameRecordBatch: a few NumPy operations find the position of every value of every frame. Both classes
have the same records and methods; a property test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringlog.client.read.multi_frame_batch import I64, decode_frames, malformed
from ringlog.client.read.pages import NO_HEADERS, Record, new_record
from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame.body import with_nulls
from ringlog.frame.layout import Column
from ringlog.frame.view import FrameView, open_row
from ringlog.storage.frame_run import FrameRun

if TYPE_CHECKING:
    import pyarrow as pa

SMALL_FRAME_RECORDS = 64
GATHERED_FRAMES_MIN = 4
GATHERED_FRAMES_MAX = 1_024


class RecordBatch(Protocol):
    """Consecutive records, or those of them that a filter kept. Seqs ascend."""

    @property
    def last_seq(self) -> int:
        """Last seq of the range, whether a filter kept it or not."""
        ...

    @property
    def commit_ts(self) -> int:
        """Commit time of the first record, in microseconds since the epoch."""
        ...

    @property
    def commit_stamps(self) -> I64:
        """(n,) commit times, in microseconds since the epoch."""
        ...

    @property
    def seqs(self) -> I64:
        """(n,) seqs of the records."""
        ...

    @property
    def buffer(self) -> memoryview:
        """Buffer that contains the values, and perhaps other frames."""
        ...

    def read_only(self) -> RecordBatch:
        """Return the same batch without writable views."""
        ...

    def until(self, seq: int) -> RecordBatch:
        """Return the batch up to `seq`. Only for a batch that was not filtered."""
        ...

    def __len__(self) -> int: ...

    def column(self, column: Column) -> list[bytes] | None:
        """Return the values of a bytes column, b"" for a null; None if no record has the column."""
        ...

    def select_rows(self, rows: I64) -> RecordBatch:
        """Return only these records."""
        ...

    def slice_rows(self, start: int, stop: int) -> RecordBatch:
        """Return records `start` to `stop`, counted from 0, without `stop`."""
        ...

    def sizes(self) -> I64:
        """(n,) accounted bytes of each record: payload plus metadata."""
        ...

    def seq_at(self, index: int) -> int:
        """Return the seq of record `index`."""
        ...

    def payloads(self) -> list[bytes | None]:
        """Return copies of the payloads; None for a null."""
        ...

    def payload_views(self) -> list[memoryview | None]:
        """Return views of the payloads in the buffer; None for a null."""
        ...

    def records(self) -> list[Record]:
        """Return the records as objects."""
        ...

    def arrow_batches(self, *, nulls: bool, columns: int | None) -> list[pa.RecordBatch]:
        """Return the records as Arrow. See FrameView.to_arrow."""
        ...


def record_batches_of(run: FrameRun, after: int, topic: str) -> Iterator[RecordBatch]:
    """Split the records of `run` after `after` into batches. Raises CorruptData for a malformed frame."""
    run = run.frames_after(after)
    words = run.batch.words
    if len(words) == 1:
        yield _single_frame_batch(run, 0, after, topic)
        return
    counts = frames.counts_of(words).astype(np.int64)
    is_small = (counts < SMALL_FRAME_RECORDS) & (frames.codecs_of(words) == 0)
    kinds = np.where(is_small, frames.shapes_but_nulls_of(words).astype(np.int64), -1 - np.arange(len(words)))
    bounds = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(words)]
    for start, stop in pairwise(bounds):
        if stop - start < GATHERED_FRAMES_MIN:
            for row in range(start, stop):
                yield _single_frame_batch(run, row, after, topic)
            continue
        for first in range(start, stop, GATHERED_FRAMES_MAX):
            rows = slice(first, min(first + GATHERED_FRAMES_MAX, stop))
            yield decode_frames(run, rows, after, topic)


def _single_frame_batch(run: FrameRun, row: int, after: int, topic: str) -> FrameRecordBatch:
    view = open_run_frame(run, row, topic)
    return FrameRecordBatch(view if view.first_seq > after else view.slice_after(after))


def visible_record_batches(
    run: FrameRun, after: int, until: int, hidden: I64, topic: str
) -> Iterator[RecordBatch]:
    """Iterate over the batches of `run` after `after` up to `until`, without the `hidden` seqs
    (ascending)."""
    if after >= until:
        return
    nearby = run.frames_in_range(after, until)
    if not len(nearby.batch.words) or nearby.last_seq <= after:
        return
    for record_batch in record_batches_of(nearby, after, topic):
        first = record_batch.seq_at(0) if len(record_batch) else record_batch.last_seq + 1
        if first > until:
            return
        visible = record_batch if record_batch.last_seq <= until else record_batch.until(until)
        if len(hidden):
            low, high = np.searchsorted(hidden, [first, visible.last_seq + 1])
            if low < high:
                is_hidden = np.isin(visible.seqs, hidden[low:high], assume_unique=True)
                visible = visible.select_rows(np.flatnonzero(~is_hidden))
        yield visible


def open_run_frame(run: FrameRun, row: int, topic: str) -> FrameView:
    """Open one frame of a run, whose checksums were verified when it was read. Raises CorruptData."""
    try:
        return open_row(run.buffer, run.batch, row)
    except FrameInvalid as e:
        raise malformed(run, int(run.batch.offsets[row]), topic, e.reason) from None


class FrameRecordBatch:
    """Records of one frame: all of `view`, or those at `rows`."""

    def __init__(self, view: FrameView, rows: I64 | None = None) -> None:
        self.view = view
        self._rows = rows

    def __len__(self) -> int:
        return len(self.view) if self._rows is None else len(self._rows)

    @property
    def last_seq(self) -> int:
        return self.view.last_seq

    @property
    def seqs(self) -> I64:
        first = self.view.first_seq
        return np.arange(first, first + len(self.view)) if self._rows is None else first + self._rows

    @property
    def is_whole(self) -> bool:
        """True if the batch contains all records of `view`."""
        return self._rows is None

    @property
    def buffer(self) -> memoryview:
        return self.view.body

    def read_only(self) -> FrameRecordBatch:
        return FrameRecordBatch(self.view.read_only(), self._rows)

    def until(self, seq: int) -> FrameRecordBatch:
        return FrameRecordBatch(self.view.slice(0, seq + 1 - self.view.first_seq))

    @property
    def commit_ts(self) -> int:
        return int(self.view.commit_stamps[0]) if len(self.view) else self.view.commit_ts

    @property
    def commit_stamps(self) -> I64:
        stamps = self.view.commit_stamps
        return stamps if self._rows is None else stamps[self._rows]

    def column(self, column: Column) -> list[bytes] | None:
        found = self.view.bytes_column(column)
        return None if found is None else self._chosen(found.to_list())

    def select_rows(self, rows: I64) -> FrameRecordBatch:
        return FrameRecordBatch(self.view, rows if self._rows is None else self._rows[rows])

    def slice_rows(self, start: int, stop: int) -> FrameRecordBatch:
        if self._rows is None:
            return FrameRecordBatch(self.view.slice(start, stop))
        return FrameRecordBatch(self.view, self._rows[start:stop])

    def sizes(self) -> I64:
        total = np.diff(self.view.payloads.offsets).astype(np.int64)
        meta = self.view.bytes_column(Column.META)
        if meta is not None:
            total += np.diff(meta.offsets)
        return total if self._rows is None else total[self._rows]

    def seq_at(self, index: int) -> int:
        return self.view.first_seq + (index if self._rows is None else int(self._rows[index]))

    def payloads(self) -> list[bytes | None]:
        return self._chosen(self.view.to_list())

    def payload_views(self) -> list[memoryview | None]:
        found = self.view.payloads
        data = found.data.data
        views = [data[a:b] for a, b in pairwise(found.offsets.tolist())]
        return self._chosen(with_nulls(views, self.view.validity(Column.PAYLOAD)))

    def records(self) -> list[Record]:
        view = self.view
        if view.columns == 1 << Column.PAYLOAD:
            seqs = range(view.first_seq, view.last_seq + 1)
            return self._chosen(list(map(new_record, seqs, repeat(view.commit_ts), view.to_list())))
        times = view.commit_stamps.tolist()
        found = view.records()
        optional = (found.event_ts, found.expires_at, found.not_before)
        all_records = map(
            new_record,
            found.seqs,
            times,
            found.payloads,
            found.keys or repeat(None),
            found.tags or repeat(None),
            found.nodes or repeat(None),
            found.metas or repeat(None),
            repeat(NO_HEADERS) if found.headers is None else map(dict, found.headers),
            *(values or repeat(None) for values in optional),
            found.priorities or repeat(0),
        )
        return self._chosen(list(all_records))

    def arrow_batches(self, *, nulls: bool, columns: int | None) -> list[pa.RecordBatch]:
        full = self.view.to_arrow(nulls=nulls, columns=columns)
        return [full if self._rows is None else full.take(self._rows)]

    def _chosen(self, values: list[Any]) -> list[Any]:
        return values if self._rows is None else [values[row] for row in self._rows.tolist()]
