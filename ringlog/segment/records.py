"""Decode frames of one topic, with any mix of columns and codecs, into columns of records. Pure.

The coalescer works on Blocks. Every array of a Block has one entry per record. Values stay in the source
buffer until they are copied into a new frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.compress import decompress
from ringlog.frame.layout import EVENT_TS_NONE, NULLABLE, Column
from ringlog.frame.spans import ValueSpans, spans_of
from ringlog.limits import MIB

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]
BLOCK_BYTES = 8 * MIB
"""Maximum uncompressed bytes of the frames in a block. A single frame may be larger."""
BLOCK_FRAMES = 8_192


class BytesColumnValues(NamedTuple):
    """Places of the values of a bytes column: (n,) starts in the buffer, (n,) lengths."""

    starts: I64
    lengths: I64

    def at(self, rows: Any) -> BytesColumnValues:
        """Return the values of the given rows."""
        return BytesColumnValues(self.starts[rows], self.lengths[rows])


class HeaderRows(NamedTuple):
    """Headers of records: (n,) first entry and number of entries; (entries,) keys and values."""

    firsts: I64
    counts: I64
    keys: BytesColumnValues
    values: BytesColumnValues


@dataclass(slots=True)
class Block:
    """Records of one topic, ascending by seq."""

    buffer: memoryview
    seqs: I64
    times: I64
    flags: NDArray[np.uint16]
    """Flags of each record's frame. Lower 8 bits: durability class and payload kind; upper 8 bits: hops."""
    spans: dict[Column, BytesColumnValues]
    fixed: dict[Column, NDArray[Any]]
    headers: HeaderRows | None
    valid: dict[Column, Mask] = field(default_factory=dict)
    """Validity masks, as in ValueSpans."""

    def __len__(self) -> int:
        return len(self.seqs)

    def weights(self) -> I64:
        """Return the (n,) bytes of each record in a body, offsets included."""
        total = np.full(len(self), 8 + 4 * len(self.spans) + 8 * len(self.fixed), dtype=np.int64)
        for values in self.spans.values():
            total += values.lengths
        if self.headers is not None:
            sums = np.zeros(len(self.headers.keys.lengths) + 1, dtype=np.int64)
            np.cumsum(self.headers.keys.lengths + self.headers.values.lengths + 8, out=sums[1:])
            total += sums[self.headers.firsts + self.headers.counts] - sums[self.headers.firsts]
        return total

    def blank_records(self, rows: Mask) -> None:
        """Empty these records. Their seqs stay, their contents are removed."""
        for column, (starts, lengths) in self.spans.items():
            self.spans[column] = BytesColumnValues(starts, np.where(rows, 0, lengths))
        for column, values in self.fixed.items():
            self.fixed[column] = np.where(rows, absent_value(column), values).astype(values.dtype)
        if self.headers is not None:
            self.headers = self.headers._replace(counts=np.where(rows, 0, self.headers.counts))


def absent_value(column: Column) -> int:
    """Return the value of a fixed column for a record without a value."""
    return EVENT_TS_NONE if column == Column.EVENT_TS else 0


def blocks_of(buffer: Any, batch: FrameBatch) -> Iterator[Block]:
    """Decode verified append frames of one topic, in ascending order. Raise FrameInvalid."""
    sizes = np.maximum(frames.raw_lens_of(batch.words).astype(np.int64), batch.total_bytes)
    ends = np.cumsum(sizes)
    start = 0
    while start < len(batch):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + BLOCK_FRAMES)
        yield _block(buffer, batch.take(slice(start, stop)) if stop - start < len(batch) else batch)
        start = stop


def _block(buffer: Any, batch: FrameBatch) -> Block:
    if frames.codecs_of(batch.words).any():
        buffer, batch = _plain(buffer, batch)
    shapes = frames.shapes_of(batch.words)
    flags = (frames.flags_of(batch.words) | frames.hops_of(batch.words) << np.uint64(8)).astype(np.uint16)
    if len(shapes) == 1 or (shapes == shapes[0]).all():
        found = spans_of(buffer, batch)
        return Block(
            found.buffer, found.seqs, found.times, flags[found.batch_rows],
            {column: BytesColumnValues(a, b - a) for column, (a, b) in found.spans.items()}, found.fixed,
            None if found.headers is None else _header_rows(found), found.valid,
        )  # fmt: skip
    parts = []
    for shape in np.unique(shapes).tolist():
        rows = np.flatnonzero(shapes == shape)
        parts.append((spans_of(buffer, batch.take(rows)), flags[rows]))
    return _merged(parts)


def _plain(buffer: Any, batch: FrameBatch) -> tuple[bytes, FrameBatch]:
    """Return the frames uncompressed in a new buffer. Their checksums are no longer valid."""
    view = memoryview(buffer).cast("B")
    words = batch.words.copy()
    raw_lens = frames.raw_lens_of(words)
    codecs = frames.codecs_of(words).tolist()
    words[:, layout.W_HEAD] &= ~np.uint64(layout.LEN_MASK)
    words[:, layout.W_HEAD] |= raw_lens + np.uint64(layout.FRAME_LEN_MIN)
    words[:, layout.W_TAIL] &= ~np.uint64(0xFF << layout.CODEC_SHIFT)
    heads = words.view(f"V{layout.HEADER_BYTES}").ravel().tolist()
    pieces: list[Any] = []
    starts, totals = batch.offsets.tolist(), batch.total_bytes.tolist()
    for head, start, total, codec, raw_len in zip(
        heads, starts, totals, codecs, raw_lens.tolist(), strict=True
    ):
        stored = view[start + layout.HEADER_BYTES : start + total]
        pieces += (head, decompress(stored, codec, raw_len) if codec else stored)
    sizes = raw_lens.astype(np.int64) + layout.HEADER_BYTES
    offsets = np.cumsum(sizes) - sizes
    whole = b"".join(pieces)
    if len(whole) != int(sizes.sum()):
        raise FrameInvalid("raw_len does not match the size of the body", offset=int(batch.offsets[0]))
    return whole, FrameBatch(offsets, words, len(whole), batch.end)


def _header_rows(found: ValueSpans) -> HeaderRows:
    assert found.headers is not None
    (firsts, stops), (a, b), (c, d) = found.headers
    return HeaderRows(firsts, stops - firsts, BytesColumnValues(a, b - a), BytesColumnValues(c, d - c))


def _merged(parts: list[tuple[ValueSpans, NDArray[np.uint16]]]) -> Block:
    """Return one block, ascending by seq, of frames of different shapes."""
    seqs = np.concatenate([found.seqs for found, _ in parts])
    order = np.argsort(seqs, kind="stable")
    counts = [len(found.seqs) for found, _ in parts]
    spans: dict[Column, BytesColumnValues] = {}
    for column in sorted({column for found, _ in parts for column in found.spans}):
        pairs = [found.spans.get(column) for found, _ in parts]
        starts = _joined([None if pair is None else pair[0] for pair in pairs], counts, 0)
        stops = _joined([None if pair is None else pair[1] for pair in pairs], counts, 0)
        spans[column] = BytesColumnValues(starts, stops - starts).at(order)
    valid = {column: _joined_validity(parts, counts, column)[order] for column in NULLABLE if column in spans}
    fixed = {
        column: _joined([found.fixed.get(column) for found, _ in parts], counts, absent_value(column))[order]
        for column in sorted({column for found, _ in parts for column in found.fixed})
    }
    return Block(
        parts[0][0].buffer, seqs[order], np.concatenate([found.times for found, _ in parts])[order],
        np.concatenate([flags[found.batch_rows] for found, flags in parts])[order], spans, fixed,
        _merged_headers([found for found, _ in parts], counts, order), valid,
    )  # fmt: skip


def _joined_validity(
    parts: list[tuple[ValueSpans, NDArray[np.uint16]]], counts: list[int], column: Column
) -> Mask:
    return np.concatenate(
        [
            found.valid.get(column, np.full(count, column in found.spans))
            for (found, _), count in zip(parts, counts, strict=True)
        ]
    )


def _joined(arrays: list[NDArray[Any] | None], counts: list[int], missing: int) -> NDArray[Any]:
    dtype = next(array.dtype for array in arrays if array is not None)
    return np.concatenate(
        [
            np.full(count, missing, dtype=dtype) if array is None else array
            for array, count in zip(arrays, counts, strict=True)
        ]
    )


def _merged_headers(parts: list[ValueSpans], counts: list[int], order: I64) -> HeaderRows | None:
    rows = [None if found.headers is None else _header_rows(found) for found in parts]
    present = [row for row in rows if row is not None]
    if not present:
        return None
    firsts, lengths, entries = [], [], 0
    for row, count in zip(rows, counts, strict=True):
        firsts.append(np.zeros(count, dtype=np.int64) if row is None else row.firsts + entries)
        lengths.append(np.zeros(count, dtype=np.int64) if row is None else row.counts)
        entries += 0 if row is None else len(row.keys.starts)
    return HeaderRows(
        np.concatenate(firsts)[order], np.concatenate(lengths)[order],
        BytesColumnValues(*(np.concatenate([row.keys[i] for row in present]) for i in range(2))),
        BytesColumnValues(*(np.concatenate([row.values[i] for row in present]) for i in range(2))),
    )  # fmt: skip
