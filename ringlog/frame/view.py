"""Read access to one frame. The frame is verified when it is opened, then read without a copy.

Views of an uncompressed frame share the memory of the buffer, which must not change while they exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid, UsageError
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.body import BodyLayout, BytesColumnSpan, offsets_in, walk_body, with_nulls
from ringlog.frame.compress import decompress
from ringlog.frame.control import check_control, decode_control
from ringlog.frame.header import FrameHeader, header_fault, unpack_header
from ringlog.frame.layout import NULLABLE, Column, FrameType
from ringlog.frame.routed_frame import append_headers
from ringlog.types import Codec, Durability, PayloadKind

if TYPE_CHECKING:
    import pyarrow as pa

I32 = NDArray[np.int32]
_hash = xxhash.xxh3_64_intdigest


class BytesColumn(NamedTuple):
    """Record i is `data[offsets[i]:offsets[i + 1]]`. (n + 1,) int32, in a slice from any value."""

    offsets: I32
    data: NDArray[np.uint8]

    def to_list(self) -> list[bytes]:
        """Copy all values into a list, about 60 ns each. Values of equal length are faster."""
        count = len(self.offsets) - 1
        if count <= 0:
            return []
        start, stop = int(self.offsets[0]), int(self.offsets[-1])
        if count == 1:
            return [self.data[start:stop].tobytes()]
        length = (stop - start) // count
        if bool((np.diff(self.offsets) == length).all()):
            if length == 0:
                return [b""] * count
            payloads: list[bytes] = self.data[start:stop].view(f"V{length}").tolist()
            return payloads
        whole = self.data[start:stop].tobytes()
        bounds = (self.offsets - start).tolist()
        return [whole[a:b] for a, b in pairwise(bounds)]


class HeadersColumn(NamedTuple):
    """Record i has the headers `lists[i]:lists[i + 1]` of `keys` and `values`. `lists` is (n + 1,) int32."""

    lists: I32
    keys: BytesColumn
    values: BytesColumn


@dataclass(frozen=True, slots=True)
class Records:
    """Records as Python lists. None for a column that the frame lacks, and for a value that a record lacks.

    Times are microseconds since the epoch.
    """

    seqs: list[int]
    payloads: list[bytes | None]
    keys: list[bytes | None] | None
    tags: list[str | None] | None
    nodes: list[str | None] | None
    headers: list[list[tuple[str, bytes]]] | None
    metas: list[bytes | None] | None
    event_ts: list[int | None] | None
    expires_at: list[int | None] | None
    not_before: list[int | None] | None
    priorities: list[int] | None


class FrameView:
    """A verified frame, or its records [start, stop). Created by open_frame."""

    __slots__ = ("_body", "_columns", "_layout", "_start", "_stop", "header", "offset")

    def __init__(
        self, header: FrameHeader, body: memoryview, places: BodyLayout, offset: int, start: int, stop: int,
        columns: dict[Column, BytesColumn] | None = None,
    ) -> None:  # fmt: skip
        self.header: FrameHeader = header
        self.offset: int = offset
        self._body = body
        self._layout = places
        self._start = start
        self._stop = stop
        self._columns = {} if columns is None else columns
        """Decoded columns of the whole frame, shared by all views of it."""

    def __len__(self) -> int:
        return self._stop - self._start

    def read_only(self) -> FrameView:
        """Return the same view with payloads that are not writable."""
        body = self._body.toreadonly()
        return FrameView(self.header, body, self._layout, self.offset, self._start, self._stop)

    def __repr__(self) -> str:
        return (
            f"<FrameView {self.frame_type.name} topic_id={self.topic_id} first_seq={self.first_seq} "
            f"records={len(self)} at {self.offset}>"
        )

    # -- header ---------------------------------------------------------------------------------------

    @property
    def frame_type(self) -> FrameType:
        """Type of the frame."""
        return FrameType(self.header.type)

    @property
    def total_bytes(self) -> int:
        """Stored size of the whole frame in bytes."""
        return self.header.total_bytes

    @property
    def topic_id(self) -> int:
        """Id of the frame's topic."""
        return self.header.topic_id

    @property
    def base_seq(self) -> int:
        """Seq of the frame's first record, also in a slice; 0 until the shard sets it."""
        return self.header.base_seq

    @property
    def first_seq(self) -> int:
        """Seq of the first record of this view."""
        return self.header.base_seq + self._start

    @property
    def last_seq(self) -> int:
        """Seq of the last record of this view; first_seq - 1 if the view is empty."""
        return self.header.base_seq + self._stop - 1

    @property
    def commit_ts(self) -> int:
        """Commit stamp of the frame's record 0 in microseconds since the epoch; 0 until the shard sets it."""
        return self.header.commit_ts

    @property
    def commit_stamps(self) -> NDArray[np.int64]:
        """(n,) commit stamp of each record in microseconds since the epoch, never decreasing."""
        found = self.fixed_column(Column.COMMIT_TS)
        return np.full(self.count, self.header.commit_ts, dtype=np.int64) if found is None else found

    @property
    def count(self) -> int:
        """Number of records in this view."""
        return self._stop - self._start

    @property
    def epoch(self) -> int:
        """Epoch of the topic."""
        return self.header.epoch

    @property
    def producer_id(self) -> int:
        """Id of the producer, 0 = none."""
        return self.header.producer_id

    @property
    def producer_seq(self) -> int:
        """Frame number of the producer."""
        return self.header.producer_seq

    @property
    def columns(self) -> int:
        """Bitmap of layout.Column."""
        return self.header.columns

    @property
    def codec(self) -> Codec:
        """Compression of the stored body."""
        return Codec(self.header.codec)

    @property
    def durability(self) -> Durability:
        """Durability class that the producer requested."""
        return Durability(self.header.flags & layout.DURABILITY_MASK)

    @property
    def payload_kind(self) -> PayloadKind:
        """Meaning of the payload bytes."""
        return PayloadKind((self.header.flags & layout.PAYLOAD_KIND_MASK) >> layout.PAYLOAD_KIND_SHIFT)

    # -- records --------------------------------------------------------------------------------------

    def slice(self, start: int, stop: int) -> FrameView:
        """Return a view of records [start, stop) of this view. Bounds are clipped. No copy."""
        first = min(max(start, 0), self.count)
        last = min(max(stop, first), self.count)
        return FrameView(
            self.header, self._body, self._layout, self.offset, self._start + first, self._start + last,
            self._columns,
        )  # fmt: skip

    @property
    def whole_frame_view(self) -> FrameView:
        """View of all records of the frame."""
        return FrameView(
            self.header, self._body, self._layout, self.offset, 0, self.header.records, self._columns
        )

    def slice_after(self, seq: int) -> FrameView:
        """Return a view of the records with a seq greater than `seq`."""
        return self.slice(seq + 1 - self.first_seq, self.count)

    @property
    def payloads(self) -> BytesColumn:
        """The payloads. Raises UsageError for a control frame, which has no records."""
        found = self.bytes_column(Column.PAYLOAD)
        if found is None:
            raise UsageError("frame must be an append, got a control frame", frame_type=self.frame_type.name)
        return found

    def bytes_column(self, column: Column) -> BytesColumn | None:
        """Return a bytes column (payload, key, tag, node, meta), or None if the frame lacks it."""
        found = self._columns.get(column)
        if found is None:
            span = self._layout.spans.get(column)
            if span is None:
                return None
            found = self._columns[column] = self._bytes_column(span, 0, self.header.records)
        if self._start == 0 and self._stop == self.header.records:
            return found
        return BytesColumn(found.offsets[self._start : self._stop + 1], found.data)

    @property
    def headers(self) -> HeadersColumn | None:
        """Headers of the records, or None if the frame lacks them."""
        found = self._layout.headers
        if found is None:
            return None
        lists = offsets_in(self._body, found.lists_at, self.header.records)[self._start : self._stop + 1]
        return HeadersColumn(
            lists,
            self._bytes_column(found.keys, 0, found.keys.entries),
            self._bytes_column(found.values, 0, found.values.entries),
        )

    def fixed_column(self, column: Column) -> NDArray[Any] | None:
        """Return a fixed column: (n,) int64 times or uint8 priorities; None if the frame lacks it."""
        at = self._layout.fixed.get(column)
        if at is None:
            return None
        dtype = "u1" if column == Column.PRIORITY else "<i8"
        return np.frombuffer(self._body, dtype=dtype, count=self.header.records, offset=at)[
            self._start : self._stop
        ]

    def validity(self, column: Column) -> NDArray[np.bool_] | None:
        """Return (n,) True for records with a value in this column of the frame; None = all of them."""
        at = self._layout.valid.get(column)
        if at is not None:
            bits = np.frombuffer(self._body, np.uint8, count=(self.header.records + 7) // 8, offset=at)
            found = np.unpackbits(bits, count=self.header.records, bitorder="little").view(np.bool_)
            return found[self._start : self._stop]
        if self.header.version > layout.VERSION_FIRST or column not in NULLABLE[1:]:
            return None
        span = self.bytes_column(column)
        return None if span is None else np.asarray(np.diff(span.offsets) > 0)

    def to_list(self) -> list[bytes | None]:
        """Copy the payloads into a list; None for a null."""
        return with_nulls(self.payloads.to_list(), self.validity(Column.PAYLOAD))

    def records(self) -> Records:
        """Copy every column into Python lists."""
        return Records(
            seqs=list(range(self.first_seq, self.last_seq + 1)),
            payloads=self.to_list(),
            keys=self._optional_bytes(Column.KEY),
            tags=self._optional_text(Column.TAG),
            nodes=self._optional_text(Column.NODE),
            headers=self._header_lists(),
            metas=self._optional_bytes(Column.META),
            event_ts=self._optional_times(Column.EVENT_TS, layout.EVENT_TS_NONE),
            expires_at=self._optional_times(Column.EXPIRES_AT, 0),
            not_before=self._optional_times(Column.NOT_BEFORE, 0),
            priorities=self._priorities(),
        )

    def to_arrow(self, *, nulls: bool = False, columns: int | None = None) -> pa.RecordBatch:
        """Return the records as an Arrow RecordBatch, see arrow.to_arrow. Needs the extra `arrow`."""
        from ringlog.frame.arrow import to_arrow

        return to_arrow(self, nulls=nulls, columns=columns)

    @property
    def body(self) -> memoryview:
        """The uncompressed body, padding included."""
        return self._body

    @property
    def body_layout(self) -> BodyLayout:
        """Places of the columns in `body`."""
        return self._layout

    @property
    def start(self) -> int:
        """Index of this view's first record in the frame."""
        return self._start

    def control(self) -> Any:
        """Decode a control frame's body. Raise UsageError for a frame of records."""
        if self.frame_type in layout.TYPES_WITH_COLUMNS:
            raise UsageError("frame must be a control frame, got an append", frame_type=self.frame_type.name)
        return decode_control(bytes(self._body[: self.header.raw_len]))

    def _bytes_column(self, span: BytesColumnSpan, start: int, stop: int) -> BytesColumn:
        offsets = offsets_in(self._body, span.offsets_at, span.entries)[start : stop + 1]
        data = np.frombuffer(self._body, dtype=np.uint8)[span.data_at : span.data_at + span.data_bytes]
        return BytesColumn(offsets, data)

    def _optional_bytes(self, column: Column) -> list[bytes | None] | None:
        found = self.bytes_column(column)
        if found is None:
            return None
        if column == Column.META:
            return [value or None for value in found.to_list()]
        return with_nulls(found.to_list(), self.validity(column))

    def _optional_text(self, column: Column) -> list[str | None] | None:
        found = self.bytes_column(column)
        if found is None:
            return None
        return with_nulls([value.decode() for value in found.to_list()], self.validity(column))

    def _optional_times(self, column: Column, absent: int) -> list[int | None] | None:
        found = self.fixed_column(column)
        return None if found is None else [None if value == absent else value for value in found.tolist()]

    def _priorities(self) -> list[int] | None:
        found = self.fixed_column(Column.PRIORITY)
        if found is None:
            return None
        values: list[int] = found.tolist()
        return values

    def _header_lists(self) -> list[list[tuple[str, bytes]]] | None:
        found = self.headers
        if found is None:
            return None
        first, last = int(found.lists[0]), int(found.lists[-1])
        keys = BytesColumn(found.keys.offsets[first : last + 1], found.keys.data).to_list()
        values = BytesColumn(found.values.offsets[first : last + 1], found.values.data).to_list()
        pairs = [(key.decode(), value) for key, value in zip(keys, values, strict=True)]
        bounds = (found.lists - first).tolist()
        return [pairs[a:b] for a, b in pairwise(bounds)]


def open_frame(buffer: Any, offset: int = 0, *, seed: int | None, verify: bool = True) -> FrameView:
    """Open the frame at byte `offset` (a multiple of 8) of a buffer.

    All properties of the format are checked: lengths, header, both checksums, structure, UTF-8, padding.

    Args:
        buffer: Buffer with the frame. It must not change while the view exists.
        offset: Start of the frame.
        seed: Salt under which the seal is verified. None skips the seal.
        verify: False skips both checksums, for a caller that has verified a whole batch. The structure is
            always checked.

    Raises:
        FrameInvalid: The frame is invalid. Its `offset` is that of the frame. No content raises another
        error.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    try:
        header = _checked_header(view, offset)
        stored = view[offset + layout.HEADER_BYTES : offset + header.total_bytes]
        if verify:
            _check_sums(view, offset, header, stored, seed)
        return _opened(header, stored, offset)
    except FrameInvalid as e:
        detail = {name: value for name, value in e.detail.items() if name != "offset"}
        raise FrameInvalid(e.reason, offset=offset, **detail) from None


def open_row(buffer: Any, batch: FrameBatch, row: int) -> FrameView:
    """Open one frame of a verified batch by its header row.

    A copy that was resolved from a routed frame has no other header. The structure is checked. Raises
    FrameInvalid as open_frame.
    """
    offset = int(batch.offsets[row])
    words = batch.words[row].tobytes()
    header = unpack_header(words, 0)
    try:
        fault = header_fault(words)
        if fault is not None:
            raise FrameInvalid(fault)
        view = memoryview(buffer).cast("B").toreadonly()
        return _opened(header, view[offset + layout.HEADER_BYTES : offset + header.total_bytes], offset)
    except FrameInvalid as e:
        detail = {name: value for name, value in e.detail.items() if name != "offset"}
        raise FrameInvalid(e.reason, offset=offset, **detail) from None


def checked_body(header: FrameHeader, stored: memoryview) -> tuple[memoryview, BodyLayout]:
    """Decompress and walk the body of a header that passed header_fault. Raise FrameInvalid."""
    body = unpacked_body(header, stored)
    return body, walk_body(body, header.columns, header.records) if header.records else BodyLayout()


def unpacked_body(header: FrameHeader, stored: memoryview) -> memoryview:
    """Return the uncompressed body of a header that passed header_fault.

    The body of a control frame or a routed frame is checked, that of an append is not. Raises FrameInvalid.
    """
    if header.type == FrameType.ROUTED:
        _check_routed(stored)
    elif header.type not in layout.TYPES_WITH_COLUMNS:
        check_control(bytes(stored[: header.raw_len]))
        if any(stored[header.raw_len :]):
            raise FrameInvalid("padding is not zero")
    elif header.codec != Codec.NONE:
        return memoryview(decompress(stored, header.codec, header.raw_len))
    return stored


def _check_routed(stored: memoryview) -> None:
    """Raise FrameInvalid unless the copies are appends with valid columns."""
    made, columns_at = append_headers(stored)
    columns = stored[columns_at:]
    if _hash(columns) != int(made[0, layout.W_BODY_XXH3]):
        raise FrameInvalid("body does not match its checksum")
    checked_body(unpack_header(made[0].tobytes(), 0), columns)


def _opened(header: FrameHeader, stored: memoryview, offset: int) -> FrameView:
    body, places = checked_body(header, stored)
    return FrameView(header, body, places, offset, 0, header.records)


def _checked_header(view: memoryview, offset: int) -> FrameHeader:
    if offset < 0 or offset & 7:
        raise FrameInvalid("frame offset must be a multiple of 8 and not negative")
    available = len(view) - offset
    if available < layout.HEADER_BYTES:
        raise FrameInvalid("buffer ends within the frame header", available=max(available, 0))
    header = unpack_header(view, offset)
    fault = header_fault(view[offset : offset + layout.HEADER_BYTES])
    if fault is not None:
        raise FrameInvalid(fault)
    if header.total_bytes > available:
        raise FrameInvalid("frame runs past the buffer", total=header.total_bytes, available=available)
    return header


def _check_sums(
    view: memoryview, offset: int, header: FrameHeader, stored: memoryview, seed: int | None
) -> None:
    if _hash(stored) != header.body_xxh3:
        raise FrameInvalid("body does not match its checksum")
    if seed is not None and _hash(view[offset : offset + layout.SEALED_BYTES], seed) != header.seal_xxh3:
        raise FrameInvalid("header does not match its seal")
