"""Encode slices of blocks as one sealed frame. Pure.

Each value is copied once, from its source buffer into the pieces of the body. Values that are adjacent, or
that have equal length and equal distance, are copied with one operation; others are sliced.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.frame import layout
from ringlog.frame.compress import compress
from ringlog.frame.header import FrameHeader, pack_header
from ringlog.frame.layout import Column, FrameType
from ringlog.frame.view import FrameView
from ringlog.segment.records import Block, BytesColumnValues, absent_value
from ringlog.types import Codec

I64 = NDArray[np.int64]
_ZEROS = bytes(8)
_RUN_VALUES_MIN = 16
"""Values are copied run by run if the runs have at least this number of values on average."""
_SPREAD_MAX = 8
"""If a source range is larger than its values by more than this factor, values are copied one by one."""


class BlockSlice(NamedTuple):
    """Records [start, stop) of a block."""

    block: Block
    start: int
    stop: int

    @property
    def first_seq(self) -> int:
        """Seq of the first record."""
        return int(self.block.seqs[self.start])

    @property
    def last_seq(self) -> int:
        """Seq of the last record."""
        return int(self.block.seqs[self.stop - 1])


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """When to compress a body: it has at least `min_bytes`, and compression saves at least share `saving`."""

    codec: Codec = Codec.NONE
    min_bytes: int = 1_024
    saving: float = 0.05


@dataclass(slots=True)
class SealedFrame:
    """One encoded frame, and the facts of its records that the index stores."""

    pieces: list[Any]
    length: int
    base_seq: int
    sizes: I64
    """(n,) accounted bytes of each record."""
    stamps: I64
    events: I64 | None
    expires: I64 | None
    tags: list[bytes] | None
    """Tag of each record, b"" for none; None if no record has one."""
    not_before: I64 | None = None
    priorities: NDArray[np.uint8] | None = None

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.sizes)


def seal_frame(
    slices: list[BlockSlice], *, topic_id: int, epoch: int, salt: int, compression: CompressionPolicy
) -> SealedFrame:
    """Encode records with consecutive seqs and equal flags as one frame. At least one record is required."""
    body = _Body(slices)
    flags = int(slices[0].block.flags[slices[0].start])
    codec, stored = Codec.NONE, body.pieces
    if compression.codec != Codec.NONE and body.size >= compression.min_bytes:
        codec, stored = _packed(body, compression)
    stored_bytes = sum(len(piece) for piece in stored)
    hasher = xxhash.xxh3_64()
    for piece in stored:
        hasher.update(piece)
    header = FrameHeader(
        layout.FRAME_LEN_MIN + stored_bytes, FrameType.APPEND, layout.VERSION, body.bitmap, topic_id,
        slices[0].first_seq, int(body.stamps[0]), len(body.stamps), epoch, 0, 0, body.size, codec,
        flags & 0xFF, flags >> 8, hasher.intdigest(), 0,
    )  # fmt: skip
    return SealedFrame(
        [_sealed_header(header, salt), *stored], layout.HEADER_BYTES + stored_bytes, header.base_seq,
        body.sizes, body.stamps, body.events, body.expires, body.tags, body.not_before, body.priorities,
    )  # fmt: skip


def reseal_frame(view: FrameView, stored: memoryview, *, epoch: int, salt: int) -> SealedFrame:
    """Return a frame with a new header and an unchanged stored body. Used for a topic's only frame."""
    header = view.header._replace(epoch=epoch, producer_id=0, producer_seq=0)
    frame = describe_frame(view)
    frame.pieces = [_sealed_header(header, salt), stored]
    return frame


def describe_frame(view: FrameView) -> SealedFrame:
    """Return the facts of a frame for the index, without its bytes."""
    sizes = np.diff(view.payloads.offsets).astype(np.int64)
    meta, tag = view.bytes_column(Column.META), view.bytes_column(Column.TAG)
    if meta is not None:
        sizes += np.diff(meta.offsets)
    values = None if tag is None or int(tag.offsets[-1]) == 0 else tag.to_list()
    return SealedFrame(
        [], view.total_bytes, view.base_seq, sizes, view.commit_stamps, view.fixed_column(Column.EVENT_TS),
        view.fixed_column(Column.EXPIRES_AT), values, view.fixed_column(Column.NOT_BEFORE),
        view.fixed_column(Column.PRIORITY),
    )  # fmt: skip


def _sealed_header(header: FrameHeader, salt: int) -> bytes:
    head = pack_header(header)[: layout.SEALED_BYTES]
    return head + xxhash.xxh3_64_intdigest(head, salt).to_bytes(8, "little")


def _packed(body: _Body, compression: CompressionPolicy) -> tuple[Codec, list[Any]]:
    used, stored = compress(b"".join(body.pieces), compression.codec)
    if used == Codec.NONE or len(stored) > body.size * (1 - compression.saving):
        return Codec.NONE, body.pieces
    return used, [stored]


class _Body:
    """The columns of a new frame as pieces of bytes."""

    def __init__(self, slices: list[BlockSlice]) -> None:
        self._slices = slices
        self._nulls: dict[Column, NDArray[np.bool_]] = {}
        """Validity of columns with nulls."""
        self.pieces: list[Any] = []
        self.size = 0
        self.bitmap = 0
        self.events: I64 | None = None
        self.expires: I64 | None = None
        self.not_before: I64 | None = None
        self.priorities: NDArray[np.uint8] | None = None
        self.tags: list[bytes] | None = None
        self.stamps: I64 = _concatenated([each.block.times[each.start : each.stop] for each in slices])
        self.sizes: I64 = np.zeros(len(self.stamps), dtype=np.int64)
        blocks = [each.block for each in slices]
        spans = {column for block in blocks for column in block.spans}
        fixed = {column for block in blocks for column in block.fixed}
        for column in Column:
            if column in spans:
                self._add_bytes(column)
            elif column in fixed:
                self._add_fixed(column)
            elif column == Column.HEADERS and any(block.headers is not None for block in blocks):
                self._add_headers()
        if (self.stamps != self.stamps[0]).any():
            self._append_column(Column.COMMIT_TS, [self.stamps.tobytes()], self.stamps.nbytes)
        for column, valid in self._nulls.items():
            bits = np.packbits(valid, bitorder="little")
            self._append_column(layout.VALID_SHIFT + column, [bits.tobytes()], bits.nbytes)

    def _add_bytes(self, column: Column) -> None:
        lengths, data, valid = [], [], []
        tags: list[bytes] = []
        for block, start, stop in self._slices:
            values = block.spans.get(column)
            found_valid = block.valid.get(column)
            valid.append(
                np.full(stop - start, values is not None) if found_valid is None else found_valid[start:stop]
            )
            if values is None:
                lengths.append(np.zeros(stop - start, dtype=np.int64))
                tags += [b""] * (stop - start)
                continue
            part = values.at(slice(start, stop))
            lengths.append(part.lengths)
            if column == Column.TAG:
                found = value_list(block.buffer, part)
                tags += found
                data.append(b"".join(found))
            else:
                data += copy_values(block.buffer, part)
        whole = _concatenated(lengths)
        if column in layout.NULLABLE:
            known = _concatenated(valid)
            if column != Column.PAYLOAD and not known.any():
                return
            if not known.all():
                self._nulls[column] = known
        if column == Column.TAG and whole.any():
            self.tags = tags
        if column in (Column.PAYLOAD, Column.META):
            self.sizes += whole
        self._append_values(column, whole, data)

    def _add_fixed(self, column: Column) -> None:
        dtype = "u1" if column == Column.PRIORITY else "<i8"
        parts = []
        for block, start, stop in self._slices:
            found = block.fixed.get(column)
            parts.append(
                np.full(stop - start, absent_value(column), dtype=dtype)
                if found is None
                else found[start:stop]
            )
        values = _concatenated(parts)
        if column == Column.EVENT_TS:
            self.events = values
        elif column == Column.EXPIRES_AT:
            self.expires = values
        elif column == Column.NOT_BEFORE:
            self.not_before = values
        elif column == Column.PRIORITY:
            self.priorities = values
        self._append_column(column, [values.tobytes()], values.nbytes)

    def _add_headers(self) -> None:
        counts: list[I64] = []
        keys: tuple[list[I64], list[Any]] = ([], [])
        values: tuple[list[I64], list[Any]] = ([], [])
        for block, start, stop in self._slices:
            rows = block.headers
            if rows is None:
                counts.append(np.zeros(stop - start, dtype=np.int64))
                continue
            firsts, own = rows.firsts[start:stop], rows.counts[start:stop]
            counts.append(own)
            entries = np.repeat(firsts - (np.cumsum(own) - own), own) + np.arange(int(own.sum()))
            for part, (lengths, data) in ((rows.keys.at(entries), keys), (rows.values.at(entries), values)):
                lengths.append(part.lengths)
                data += copy_values(block.buffer, part)
        self._append_offsets(_concatenated(counts))
        self._append_values(Column.HEADERS, _concatenated(keys[0]), keys[1])
        self._append_values(Column.HEADERS, _concatenated(values[0]), values[1])

    def _append_values(self, column: Column, lengths: I64, data: list[Any]) -> None:
        size = self._append_offsets(lengths)
        self._append_column(column, data, size)

    def _append_offsets(self, lengths: I64) -> int:
        offsets = np.zeros(len(lengths) + 1, dtype="<i4")
        np.cumsum(lengths, out=offsets[1:])
        self._append_column(Column.PAYLOAD, [offsets.tobytes()], offsets.nbytes)
        return int(offsets[-1])

    def _append_column(self, column: int, parts: list[Any], size: int) -> None:
        self.bitmap |= 1 << column
        self.pieces += parts
        if size & 7:
            self.pieces.append(_ZEROS[: -size & 7])
        self.size += layout.padded(size)


def copy_values(buffer: memoryview, values: BytesColumnValues) -> list[Any]:
    """Return the concatenated values in as few pieces as possible."""
    starts, lengths = values
    if not len(starts):
        return []
    first, length = int(starts[0]), int(lengths[0])
    if len(starts) == 1:
        return [buffer[first : first + length]] if length else []
    steps = starts[1:] - starts[:-1]
    if (steps == lengths[:-1]).all():
        return [buffer[first : int(starts[-1] + lengths[-1])]]
    if length > 0 and (lengths == length).all():
        runs = _regular_runs(starts, steps, length)
        if runs is not None:
            return [_strided(buffer, int(starts[a]), b - a, length, step) for a, b, step in runs]
    return [b"".join(value_list(buffer, values))]


def _regular_runs(starts: I64, steps: I64, length: int) -> list[tuple[int, int, int]] | None:
    """Cut values of equal length into runs [a, b) with one step each. None if there would be many short runs.

    One-record frames of equal size have this form. A run ends at a chain mark or at another topic's frame.
    """
    edges = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(edges) * _RUN_VALUES_MIN > len(starts) or not (steps >= length).all():
        return None
    runs, a = [], 0
    for k in [*edges.tolist(), len(steps)]:
        if k > a:  # Otherwise the step into this run was the change.
            runs.append((a, k + 1, int(steps[a])))
            a = k + 1
    if a < len(starts):
        runs.append((a, len(starts), length))
    return runs


def _strided(buffer: memoryview, first: int, count: int, length: int, step: int) -> memoryview:
    rows: NDArray[np.uint8] = np.ndarray((count, length), np.uint8, buffer, first, (step, 1))
    return np.ascontiguousarray(rows).data.cast("B")


def value_list(buffer: memoryview, values: BytesColumnValues) -> list[bytes]:
    """Return the values as bytes objects; b"" for an empty value."""
    starts, lengths = values
    filled = lengths > 0
    if not filled.all():
        found = [b""] * len(starts)
        rows = np.flatnonzero(filled)
        if len(rows):
            for row, value in zip(rows.tolist(), value_list(buffer, values.at(rows)), strict=True):
                found[row] = value
        return found
    first, last = int(starts.min()), int((starts + lengths).max())
    if last - first > _SPREAD_MAX * (int(lengths.sum()) + layout.HEADER_BYTES * len(starts)):
        stops = (starts + lengths).tolist()
        return [bytes(buffer[a:b]) for a, b in zip(starts.tolist(), stops, strict=True)]
    whole = bytes(buffer[first:last])
    begins = starts - first
    if (begins[1:] == (begins + lengths)[:-1]).all():
        bounds = [*begins.tolist(), len(whole)]
        return [whole[a:b] for a, b in pairwise(bounds)]
    return [whole[a:b] for a, b in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)]


def _concatenated(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    if not arrays:
        return np.empty(0, dtype=np.int64)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
