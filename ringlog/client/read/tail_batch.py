"""TailBatch: a batch of consecutive records from a tailer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.pages import Cursor, Record
from ringlog.client.read.record_batches import (
    FrameRecordBatch,
    RecordBatch,
    open_run_frame,
    visible_record_batches,
)
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.view import FrameView
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.visibility import I64, NO_SEQS

if TYPE_CHECKING:
    import pyarrow as pa


class TailBatch:
    """Consecutive records as they are in the log or in a segment. All views are read-only.

    Deleted and expired records are omitted by all methods. `memoryviews()`, `frames()`, and `arrow()` of
    frames with 64 or more records do not copy, if the frame is uncompressed and no record is omitted.
    `bytes()`, `records()`, Arrow of smaller frames, and `numpy()` of several frames copy.
    """

    def __init__(
        self, topic: str, epoch: int, run: FrameRun, after: int, until: int, hidden: I64 = NO_SEQS
    ) -> None:
        """Create a batch of the records of `run` after `after` up to `until`, without the `hidden` seqs
        (ascending)."""
        self.topic = topic
        self.epoch = epoch
        self.first_seq: int = max(run.first_seq, after + 1)
        self.last_seq: int = min(run.last_seq, until)
        self._run = run.frames_after(after)
        low, high = np.searchsorted(hidden, [self.first_seq, self.last_seq + 1])
        self._hidden = hidden[low:high]

    def __len__(self) -> int:
        if len(self._hidden) or self.last_seq < self._run.last_seq:
            return sum(map(len, self._record_batches))
        return int(frames.counts_of(self._run.batch.words).sum()) - (self.first_seq - self._run.first_seq)

    def __repr__(self) -> str:
        return f"<TailBatch {self.topic} {self.first_seq}..{self.last_seq}>"

    @property
    def ts(self) -> int:
        """Commit time of the last record, in microseconds since the epoch."""
        last = next(record_batch for record_batch in reversed(self._record_batches) if len(record_batch))
        return int(last.commit_stamps[-1])

    @property
    def cursor(self) -> Cursor:
        """Position after the last record."""
        return Cursor(self.epoch, self.last_seq)

    def until(self, seq: int) -> TailBatch:
        """Return the records up to `seq`, without a copy. `seq` must not be below the first."""
        if seq >= self.last_seq:
            return self
        return TailBatch(self.topic, self.epoch, self._run, self.first_seq - 1, seq, self._hidden)

    @property
    def stored_bytes(self) -> int:
        """Stored size of the frames with these records, in bytes."""
        return int(self._run.batch.total_bytes.sum())

    @property
    def stored(self) -> tuple[FrameRun, I64]:
        """Frames with these records, and the ascending seqs among them to omit. The first and last frame may
        contain other records."""
        return self._run.frames_in_range(self.first_seq - 1, self.last_seq), self._hidden

    @property
    def seqs(self) -> I64:
        """(n,) seqs of the records, ascending. Only headers are read."""
        words = self._run.batch.words
        counts = frames.counts_of(words).astype(np.int64)
        ends = np.cumsum(counts)
        base = words[:, layout.W_BASE_SEQ].astype(np.int64) - (ends - counts)
        numbers = np.repeat(base, counts) + np.arange(ends[-1])
        numbers = numbers[slice(*np.searchsorted(numbers, [self.first_seq, self.last_seq + 1]).tolist())]
        if len(self._hidden):
            numbers = numbers[~np.isin(numbers, self._hidden, assume_unique=True)]
        return numbers

    @property
    def batches(self) -> list[RecordBatch]:
        """Record batches: one large frame or many small frames each. The other methods use them."""
        return self._record_batches

    def frames(self) -> Iterator[FrameView]:
        """Iterate over views of the frames. The first view may start inside a frame. Slow for small frames.

        A frame with omitted records in its middle gives several views.
        """
        for row in range(len(self._run.batch)):
            view = open_run_frame(self._run, row, self.topic)
            first, last = max(view.first_seq, self.first_seq), min(view.last_seq, self.last_seq)
            low, high = np.searchsorted(self._hidden, [first, last + 1])
            starts = [first, *(self._hidden[low:high] + 1).tolist()]
            stops = [*self._hidden[low:high].tolist(), last + 1]
            for start, stop in zip(starts, stops, strict=True):
                if start < stop:
                    yield view.slice(start - view.first_seq, stop - view.first_seq)

    def bytes(self) -> list[bytes | None]:
        """Return copies of the payloads; None for a null."""
        return [payload for record_batch in self._record_batches for payload in record_batch.payloads()]

    def memoryviews(self) -> list[memoryview | None]:
        """Return the payloads as views of the log; None for a null."""
        return [view for record_batch in self._record_batches for view in record_batch.payload_views()]

    def numpy(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return (data, offsets): payload i is `data[offsets[i]:offsets[i + 1]]`; offsets is (n + 1,) int64.

        A null looks like an empty payload.
        """
        if len(self._run.batch) == 1 and not len(self._hidden):
            payloads = next(self.frames()).payloads
            return payloads.data, payloads.offsets.astype(np.int64)
        sizes: list[NDArray[np.int64]] = []
        parts: list[Any] = []
        for record_batch in self._record_batches:
            if isinstance(record_batch, FrameRecordBatch) and record_batch.is_whole:
                payloads = record_batch.view.payloads
                sizes.append(np.diff(payloads.offsets).astype(np.int64))
                parts.append(payloads.data[payloads.offsets[0] : payloads.offsets[-1]])
            else:
                values = [value or b"" for value in record_batch.payloads()]
                sizes.append(np.fromiter(map(len, values), np.int64, len(values)))
                parts.append(np.frombuffer(b"".join(values), np.uint8))
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(sizes), out=offsets[1:])
        return np.concatenate(parts), offsets

    def record_batches(self, *, nulls: bool = False, columns: int | None = None) -> list[pa.RecordBatch]:
        """Return Arrow RecordBatches with seq, ts and the columns; one per large frame, without a copy.

        `columns` (a bitmap of layout.Column) and `nulls` are as in FrameView.to_arrow. Needs pyarrow.
        """
        return [
            batch
            for record_batch in self._record_batches
            for batch in record_batch.arrow_batches(nulls=nulls, columns=columns)
        ]

    def arrow(self, *, nulls: bool = False) -> pa.Table:
        """Return all records as one Arrow table. Large frames are its chunks, without a copy. Needs
        pyarrow."""
        import pyarrow

        bitmap = int(np.bitwise_or.reduce(frames.columns_of(self._run.batch.words)))
        return pyarrow.Table.from_batches(self.record_batches(nulls=nulls, columns=bitmap))

    def records(self) -> list[Record]:
        """Return the records as objects. Slow, for convenience."""
        return [record for record_batch in self._record_batches for record in record_batch.records()]

    @cached_property
    def _record_batches(self) -> list[RecordBatch]:
        return list(
            visible_record_batches(self._run, self.first_seq - 1, self.last_seq, self._hidden, self.topic)
        )


def tail_batches_of(result: FetchResult, topic: str) -> list[TailBatch]:
    """Return a batch for each run of frames. Runs without visible records are omitted."""
    after = result.after
    found: list[TailBatch] = []
    for run in result.runs:
        if after < result.examined and run.last_seq > after:
            batch = TailBatch(topic, result.epoch, run, after, result.examined, result.hidden)
            if batch:
                found.append(batch)
            after = batch.last_seq
    return found
