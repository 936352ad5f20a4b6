"""Many small frames with the same columns, decoded together.

Opening a frame costs about ten microseconds; finding every value of a thousand one-record frames here
costs a few hundred nanoseconds a record. The result has the methods of pieces.Piece.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringlog.client.pages import NO_HEADERS, Record
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.body import columns_in
from ringlog.frame.layout import EVENT_TS_NONE, Column
from ringlog.storage.reader import FrameRun

if TYPE_CHECKING:
    import pyarrow as pa

I64 = NDArray[np.int64]
Span = tuple[I64, I64]
"""(starts, stops) of values, in bytes of the buffer."""

_SPREAD_MAX = 8
"""Copy the whole stretch to slice values from it, unless it is so many times larger than they are."""


class GatheredPiece:
    """Records of many small frames with the same columns. Every array has one entry a record."""

    def __init__(
        self, buffer: memoryview, last_seq: int, seqs: I64, times: I64, spans: dict[Column, Span],
        fixed: dict[Column, NDArray[Any]], headers: tuple[Span, Span, Span] | None,
    ) -> None:  # fmt: skip
        self._buffer = buffer
        self._last_seq = last_seq
        self._seqs = seqs
        self._times = times
        self._spans = spans
        self._fixed = fixed
        self._headers = headers  # (which entries are a record's, where keys lie, where values lie)

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def last_seq(self) -> int:
        return self._last_seq

    @property
    def commit_ts(self) -> int:
        return int(self._times[0])

    def column(self, column: Column) -> list[bytes] | None:
        span = self._spans.get(column)
        return None if span is None else self._values(span)

    def keep(self, rows: I64 | slice) -> GatheredPiece:
        headers = self._headers
        if headers is not None:
            headers = ((headers[0][0][rows], headers[0][1][rows]), *headers[1:])
        return GatheredPiece(
            self._buffer, self._last_seq, self._seqs[rows], self._times[rows],
            {column: (a[rows], b[rows]) for column, (a, b) in self._spans.items()},
            {column: values[rows] for column, values in self._fixed.items()},
            headers,
        )  # fmt: skip

    def cut(self, count: int) -> GatheredPiece:
        return self.keep(slice(0, count))

    def after(self, seq: int) -> GatheredPiece:
        """Only the records behind `seq`."""
        if not len(self._seqs) or self._seqs[0] > seq:
            return self
        return self.keep(slice(int(np.searchsorted(self._seqs, seq, side="right")), None))

    def sizes(self) -> I64:
        starts, stops = self._spans[Column.PAYLOAD]
        total = stops - starts
        meta = self._spans.get(Column.META)
        return total if meta is None else total + (meta[1] - meta[0])

    def seq_at(self, index: int) -> int:
        return int(self._seqs[index])

    def payloads(self) -> list[bytes]:
        return self._values(self._spans[Column.PAYLOAD])

    def payload_views(self) -> list[memoryview]:
        starts, stops = self._spans[Column.PAYLOAD]
        view = self._buffer
        return [view[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def records(self) -> list[Record]:
        seqs, times, payloads = self._seqs.tolist(), self._times.tolist(), self.payloads()
        if len(self._spans) == 1 and not self._fixed and self._headers is None:
            return list(map(Record, seqs, times, payloads))
        priorities = self._fixed.get(Column.PRIORITY)
        return list(
            map(
                Record, seqs, times, payloads, self._optional(Column.KEY), self._text(Column.TAG),
                self._text(Column.NODE), self._optional(Column.META),
                self.header_maps() or repeat(NO_HEADERS), self._times_of(Column.EVENT_TS, EVENT_TS_NONE),
                self._times_of(Column.EXPIRES_AT, 0), self._times_of(Column.NOT_BEFORE, 0),
                repeat(0) if priorities is None else priorities.tolist(),
            )
        )  # fmt: skip

    def record_batches(self, *, nulls: bool, columns: int | None) -> list[pa.RecordBatch]:
        """One batch, copied: a batch for each frame would make Arrow slow."""
        from ringlog.client.gathered_arrow import gathered_batch

        return [gathered_batch(self, nulls=nulls, columns=columns)]

    @property
    def seqs(self) -> I64:
        """(n,) numbers."""
        return self._seqs

    @property
    def times(self) -> I64:
        """(n,) commit times, microseconds since the epoch."""
        return self._times

    @property
    def bitmap(self) -> int:
        """Columns there are."""
        bits = sum(1 << column for column in (*self._spans, *self._fixed))
        return bits | (0 if self._headers is None else 1 << Column.HEADERS)

    def fixed_column(self, column: Column) -> NDArray[Any] | None:
        """(n,) times or priorities, or None."""
        return self._fixed.get(column)

    def header_maps(self) -> list[dict[str, bytes]] | None:
        """Headers of each record, or None when no record has any."""
        if self._headers is None:
            return None
        (starts, stops), keys, values = self._headers
        names = [key.decode() for key in self._values(keys)]
        pairs = list(zip(names, self._values(values), strict=True))
        return [dict(pairs[a:b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def _values(self, span: Span) -> list[bytes]:
        starts, stops = span
        if not len(starts):
            return []
        first, last = int(starts.min()), int(stops.max())
        if last - first > _SPREAD_MAX * (int((stops - starts).sum()) + layout.HEADER_BYTES * len(starts)):
            view = self._buffer
            return [bytes(view[a:b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        whole = bytes(self._buffer[first:last])
        return [whole[a:b] for a, b in zip((starts - first).tolist(), (stops - first).tolist(), strict=True)]

    def _optional(self, column: Column) -> Any:
        values = self.column(column)
        return repeat(None) if values is None else [value or None for value in values]

    def _text(self, column: Column) -> Any:
        values = self.column(column)
        return repeat(None) if values is None else [value.decode() or None for value in values]

    def _times_of(self, column: Column, absent: int) -> Any:
        values = self._fixed.get(column)
        if values is None:
            return repeat(None)
        return [None if value == absent else value for value in values.tolist()]


class _Columns:
    """Walks over the columns of many uncompressed frames at once. Positions are bytes of the buffer.

    Does for all frames what frame.body.walk_body does for one; refuses what that would refuse for
    reaching outside of a frame. UTF-8 and padding were looked at by the shard.
    """

    def __init__(self, run: FrameRun, rows: slice) -> None:
        self.buffer = memoryview(run.buffer).cast("B").toreadonly()
        usable = len(self.buffer) & ~7
        self._i32 = np.frombuffer(self.buffer[:usable], "<i4")
        self._i64 = np.frombuffer(self.buffer[:usable], "<i8")
        self._u8 = np.frombuffer(self.buffer, np.uint8)
        batch = run.batch
        self._at = batch.offsets[rows] + layout.HEADER_BYTES
        self._end = batch.offsets[rows] + batch.total_bytes[rows]
        self.counts = frames.counts_of(batch.words[rows]).astype(np.int64)
        self.frame_of, self.index_of = _expand(self.counts)

    def bytes_column(self) -> Span:
        """The next column, one of bytes."""
        return self._bytes_part(self.counts, self.frame_of, self.index_of)

    def headers(self) -> tuple[Span, Span, Span]:
        """The next column, the headers."""
        at = self._offsets_at(self.counts)
        base = (at >> 2)[self.frame_of] + self.index_of
        entries = self._i32[(at >> 2) + self.counts].astype(np.int64)
        first = (np.cumsum(entries) - entries)[self.frame_of]
        lists = (self._i32[base] + first, self._i32[base + 1] + first)
        _require(bool((entries >= 0).all() and (lists[0] <= lists[1]).all()))
        # Before anything is allocated by it: a header takes eight bytes of offsets in its frame.
        _require(bool((8 * entries <= self._end - self._at).all()))
        frame_of, index_of = _expand(entries)
        keys = self._bytes_part(entries, frame_of, index_of)
        return lists, keys, self._bytes_part(entries, frame_of, index_of)

    def times(self) -> I64:
        """The next column, one of times."""
        at = self._past(_padded(8 * self.counts))
        values: I64 = self._i64[(at >> 3)[self.frame_of] + self.index_of]
        return values

    def priorities(self) -> NDArray[np.uint8]:
        """The next column, the priorities."""
        at = self._past(_padded(self.counts))
        values: NDArray[np.uint8] = self._u8[at[self.frame_of] + self.index_of]
        return values

    def require_end(self) -> None:
        """The columns must fill every frame."""
        _require(bool((self._at == self._end).all()))

    def _past(self, size: I64) -> I64:
        """Move on by `size`; returns where that was."""
        at = self._at
        self._at = at + size
        _require(bool((self._at <= self._end).all()))
        return at

    def _offsets_at(self, entries: I64) -> I64:
        at = self._past(_padded(4 * (entries + 1)))
        _require(bool((self._i32[at >> 2] == 0).all()))
        return at

    def _bytes_part(self, entries: I64, frame_of: I64, index_of: I64) -> Span:
        at = self._offsets_at(entries)
        base = (at >> 2)[frame_of] + index_of
        low, high = self._i32[base].astype(np.int64), self._i32[base + 1].astype(np.int64)
        size = self._i32[(at >> 2) + entries].astype(np.int64)
        _require(bool((size >= 0).all() and (low <= high).all()))
        data = self._past(_padded(size))[frame_of]
        _require(bool((high <= size[frame_of]).all()))
        return data + low, data + high


def malformed(run: FrameRun, offset: int, topic: str, reason: str) -> CorruptData:
    """The error for a frame of `run` whose checksums are right and whose structure is not."""
    return CorruptData(
        f"stored frame is malformed: {reason}", topic=topic, file=run.path, offset=run.origin + offset
    )


def gather(run: FrameRun, rows: slice, after: int, topic: str) -> GatheredPiece:
    """Decode the records behind `after` of these frames, all uncompressed and with the same columns.

    Raises CorruptData, naming the first of them, when a column does not fit its frame.
    """
    words = run.batch.words[rows]
    bitmap = int(frames.columns_of(words[:1])[0])
    spans: dict[Column, Span] = {}
    fixed: dict[Column, NDArray[Any]] = {}
    headers = None
    try:
        columns = _Columns(run, rows)
        for column in columns_in(bitmap):
            if column == Column.HEADERS:
                headers = columns.headers()
            elif column == Column.PRIORITY:
                fixed[column] = columns.priorities()
            elif column > Column.META:
                fixed[column] = columns.times()
            else:
                spans[column] = columns.bytes_column()
        columns.require_end()
    except (_OutOfBounds, IndexError):
        first = int(run.batch.offsets[rows][0])
        raise malformed(run, first, topic, "a column does not fit its frame") from None
    base = words[:, layout.W_BASE_SEQ].astype(np.int64)
    times = words[:, layout.W_COMMIT_TS].astype(np.int64)
    piece = GatheredPiece(
        columns.buffer, int(base[-1] + columns.counts[-1]) - 1, base[columns.frame_of] + columns.index_of,
        times[columns.frame_of], spans, fixed, headers,
    )  # fmt: skip
    return piece.after(after)


class _OutOfBounds(Exception):
    """A column reaches outside of its frame."""


def _require(is_so: bool) -> None:
    if not is_so:
        raise _OutOfBounds


def _padded(sizes: I64) -> I64:
    return (sizes + 7) & ~7


def _expand(counts: I64) -> tuple[I64, I64]:
    """For every entry of every frame: which frame, and which entry of it."""
    frame_of = np.repeat(np.arange(len(counts)), counts)
    return frame_of, np.arange(len(frame_of)) - (np.cumsum(counts) - counts)[frame_of]
