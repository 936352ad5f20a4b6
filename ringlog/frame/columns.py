"""From records to an encoded body: lists of Python values, or one buffer with offsets.

Every limit of a record is checked here, before anything is sent, so that the error names the record.
The shard checks the same limits again (measure.py), since it cannot know who encoded a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, UsageError
from ringlog.frame.layout import EVENT_TS_NONE, HEADER_BYTES, Column, padded
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
)

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Headers = Mapping[str, bytes] | Sequence[tuple[str, bytes]] | None
Integers = Sequence[int | None] | NDArray[Any] | None

_COLUMN_BYTES_MAX = {
    Column.KEY: KEY_BYTES_MAX,
    Column.TAG: TAG_BYTES_MAX,
    Column.NODE: NODE_BYTES_MAX,
    Column.META: META_BYTES_MAX,
}
_meta_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ZEROS = bytes(8)


@dataclass(frozen=True, slots=True)
class Columns:
    """Encoded records: the body of a frame, not yet compressed.

    The body stays in pieces, the payloads themselves among them, until it is joined behind a header:
    joining twice would cost as much again.
    """

    pieces: Sequence[Any]
    bitmap: int
    """Bit i = Column i is present."""
    count: int
    """Records, at least 1."""
    raw_len: int
    """Bytes of the body before compression, a multiple of 8."""

    def joined(self, header: bytes = b"") -> bytearray:
        """Return header and body in one new buffer; raises UsageError for values that are not bytes."""
        try:
            whole = bytearray().join([header, *self.pieces])
        except TypeError as e:
            raise UsageError("a value is not bytes", reason=str(e)) from None
        if len(whole) != len(header) + self.raw_len:
            raise UsageError("a value is not a buffer of single bytes", bytes=len(whole) - len(header))
        return whole

    @property
    def body(self) -> bytes:
        """The columns, joined."""
        return bytes(self.joined())


@dataclass(slots=True)
class BytesInput:
    """A bytes column on its way into a body: (n,) lengths and the bytes, in any number of pieces."""

    lengths: NDArray[Any]
    pieces: Sequence[Any]
    data_bytes: int


@dataclass(slots=True)
class HeadersInput:
    """The headers column on its way into a body: (n,) headers of each record, then all keys, all values."""

    counts: NDArray[Any]
    keys: BytesInput
    values: BytesInput


@dataclass(slots=True)
class RecordsInput:
    """Everything that goes into one body, by column."""

    count: int
    spans: dict[Column, BytesInput]
    headers: HeadersInput | None
    fixed: dict[Column, NDArray[Any]]


DEAD_LETTER_FROM = "$dead_letter_from"
DEAD_LETTER_DELIVERIES = "$dead_letter_deliveries"
DEAD_LETTER_SRC_SEQ = "$dead_letter_src_seq"
DEAD_LETTER_REASON = "$dead_letter_reason"
DEAD_LETTER_LAST_FAILURE = "$dead_letter_last_failure"
DEAD_LETTER_NACKS = "$dead_letter_nacks"
DEAD_LETTER_GROUP = "$dead_letter_group"
DEAD_LETTER_SRC_ID = "$dead_letter_src_id"
"""Of a group's letter: the number of its topic, which no other topic of that name ever has (ST-15)."""
DEAD_LETTER_HEADERS_LEFT_OUT = "$dead_letter_headers_left_out"
"""How many of the job's headers had no room beside what is noted; only of a job that fills all there is."""
DEAD_LETTER_META = "$dead_letter_meta"
"""The job's metadata as text, where that was no JSON object."""
STAMPED_KEYS = frozenset({
    DEAD_LETTER_FROM, DEAD_LETTER_DELIVERIES, DEAD_LETTER_SRC_SEQ, DEAD_LETTER_REASON, DEAD_LETTER_GROUP,
    DEAD_LETTER_SRC_ID, DEAD_LETTER_LAST_FAILURE, DEAD_LETTER_NACKS, DEAD_LETTER_HEADERS_LEFT_OUT,
})  # fmt: skip
"""Keys in the metadata of a dead letter: where it comes from, how often it was handed out, why (QD-6)."""


def encode_records(
    payloads: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    tags: Sequence[str | None] | None = None,
    nodes: Sequence[str | None] | None = None,
    headers: Sequence[Headers] | None = None,
    metas: Sequence[bytes | None] | None = None,
    event_ts: Integers = None,
    expires_at: Integers = None,
    not_before: Integers = None,
    priorities: Integers = None,
) -> Columns:
    """Encode records given column by column; a column that is None is left out of the frame.

    In a column, None (or an empty value) means that the record has none. `metas` are JSON objects as
    compact bytes. Times are microseconds since the epoch. Raises RecordTooLarge, InvalidRequest,
    BatchTooLarge or PayloadTooLarge naming index, bytes and max, and UsageError for wrong types; that
    a value is of the right length but no bytes at all shows when the frame is made.
    """
    fixed = (event_ts, expires_at, not_before, priorities)
    if keys is tags is nodes is headers is metas is None and all(values is None for values in fixed):
        return _encode_payloads(payloads)
    source = _bytes_input("payloads", payloads)
    return encode_input(
        _records_input(
            source, keys, tags, nodes, headers, metas, fixed,
        )
    )  # fmt: skip


def _encode_payloads(payloads: Sequence[bytes]) -> Columns:
    """encode_records of payloads alone, which is what a busy producer sends: as few steps as there can be."""
    try:
        count = len(payloads)
        if not 0 < count <= BATCH_RECORDS_MAX:
            check_record_count(count)
        lengths = np.fromiter(map(len, payloads), dtype=np.int64, count=count)
    except TypeError as e:
        raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    offsets = np.empty(count + 1, dtype="<i4")
    offsets[0] = 0
    at = int(lengths.argmax())
    if lengths[at] > RECORD_BYTES_MAX:
        raise RecordTooLarge("record too large", index=at, bytes=int(lengths[at]), max=RECORD_BYTES_MAX)
    if int(lengths[at]) * count > FRAME_BYTES_MAX and (total := int(lengths.sum())) > FRAME_BYTES_MAX:
        raise PayloadTooLarge("one write is too large", bytes=total, max=FRAME_BYTES_MAX)
    np.cumsum(lengths, out=offsets[1:])
    size = int(offsets[-1])
    head = offsets.tobytes() if count & 1 else offsets.tobytes() + _ZEROS[:4]
    pieces = [head, *payloads]
    if size & 7:
        pieces.append(_ZEROS[: -size & 7])
    raw_len = len(head) + padded(size)
    if raw_len + HEADER_BYTES > FRAME_BYTES_MAX:
        raise PayloadTooLarge("one write is too large", bytes=raw_len + HEADER_BYTES, max=FRAME_BYTES_MAX)
    return Columns(pieces, 1 << Column.PAYLOAD, count, raw_len)


def encode_buffer(
    data: Any,
    offsets: Any,
    *,
    keys: Sequence[bytes | None] | None = None,
    tags: Sequence[str | None] | None = None,
    nodes: Sequence[str | None] | None = None,
    headers: Sequence[Headers] | None = None,
    metas: Sequence[bytes | None] | None = None,
    event_ts: Integers = None,
    expires_at: Integers = None,
    not_before: Integers = None,
    priorities: Integers = None,
) -> Columns:
    """Encode records whose payloads lie in one buffer: record i is `data[offsets[i]:offsets[i + 1]]`.

    `offsets` are n + 1 rising integers; the first need not be 0. Otherwise as encode_records.
    """
    return encode_input(
        _records_input(
            input_of_buffer("payloads", data, offsets), keys, tags, nodes, headers, metas,
            (event_ts, expires_at, not_before, priorities),
        )
    )  # fmt: skip


def encode_input(records: RecordsInput) -> Columns:
    """Check every limit, then lay the columns out."""
    _check_limits(records)
    pieces: list[Any] = []
    bitmap = size = 0
    for column in Column:
        if column in records.spans:
            size += _lay_bytes(pieces, records.spans[column])
        elif column == Column.HEADERS and records.headers is not None:
            size += _lay_offsets(pieces, records.headers.counts)
            size += _lay_bytes(pieces, records.headers.keys) + _lay_bytes(pieces, records.headers.values)
        elif column in records.fixed:
            size += _lay(pieces, [records.fixed[column].tobytes()], records.fixed[column].nbytes)
        else:
            continue
        bitmap |= 1 << column
    if size + HEADER_BYTES > FRAME_BYTES_MAX:
        raise PayloadTooLarge("one write is too large", bytes=size + HEADER_BYTES, max=FRAME_BYTES_MAX)
    return Columns(pieces, bitmap, records.count, size)


def input_of_buffer(name: str, data: Any, offsets: Any) -> BytesInput:
    """Take a bytes column from one buffer with n + 1 offsets; raises UsageError if they do not fit it."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as e:
        raise UsageError(f"{name}: a contiguous buffer is wanted", reason=str(e)) from None
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or len(bounds) < 1 or bounds.dtype.kind not in "iu":
        raise UsageError(f"{name}: offsets must be one row of n + 1 integers")
    lengths = np.diff(bounds.astype(np.int64, copy=False))
    start, stop = int(bounds[0]), int(bounds[-1])
    if start < 0 or stop > len(view) or bool((lengths < 0).any()):
        raise UsageError(
            f"{name}: offsets must rise and end inside the buffer", buffer_bytes=len(view), stop=stop
        )
    return BytesInput(lengths, [view[start:stop]], stop - start)


def fixed_input(column: Column, values: Any, count: int) -> NDArray[Any]:
    """Take a fixed column from integers or None; raises UsageError for types, InvalidRequest for range."""
    name = column.name.lower()
    absent = EVENT_TS_NONE if column == Column.EVENT_TS else 0
    found = (
        values
        if isinstance(values, np.ndarray)
        else np.asarray([absent if value is None else value for value in values])
    )
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UsageError(f"{name}: integers are wanted", found=str(found.dtype))
    _check_count(name, len(found), count)
    low = EVENT_TS_NONE if column == Column.EVENT_TS else 0
    high = 255 if column == Column.PRIORITY else (1 << 63) - 1
    for at in (int(found.argmin()), int(found.argmax())):
        if not low <= int(found[at]) <= high:
            raise InvalidRequest(f"{name} out of range", index=at, found=int(found[at]), min=low, max=high)
    return found.astype(np.uint8 if column == Column.PRIORITY else "<i8", copy=False)


# -- taking columns from Python values ----------------------------------------------------------------


def _records_input(
    payloads: BytesInput, keys: Any, tags: Any, nodes: Any, headers: Any, metas: Any, fixed: Sequence[Any]
) -> RecordsInput:
    count = len(payloads.lengths)
    check_record_count(count)
    spans = {Column.PAYLOAD: payloads}
    given: tuple[tuple[Column, Any, Callable[[str, Any], BytesInput]], ...] = (
        (Column.KEY, keys, _optional_bytes_input),
        (Column.TAG, tags, _text_input),
        (Column.NODE, nodes, _text_input),
        (Column.META, metas, _optional_bytes_input),
    )
    for column, values, take in given:
        if values is not None:
            spans[column] = take(f"{column.name.lower()}s", values)
    numbers = {
        column: fixed_input(column, values, count)
        for column, values in zip(
            (Column.EVENT_TS, Column.EXPIRES_AT, Column.NOT_BEFORE, Column.PRIORITY), fixed, strict=True
        )
        if values is not None
    }
    return RecordsInput(count, spans, None if headers is None else _headers_input(headers), numbers)


def _bytes_input(name: str, values: Sequence[Any]) -> BytesInput:
    try:
        lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    except TypeError as e:
        raise UsageError(f"{name} must be a sequence of bytes", reason=str(e)) from None
    return BytesInput(lengths, values, int(lengths.sum()))


def _optional_bytes_input(name: str, values: Sequence[Any]) -> BytesInput:
    return _bytes_input(name, [b"" if value is None else value for value in values])


def _text_input(name: str, values: Sequence[Any]) -> BytesInput:
    try:
        return _bytes_input(name, [b"" if value is None else value.encode() for value in values])
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{name}: text that UTF-8 cannot hold", reason=e.reason) from None
    except AttributeError as e:
        raise UsageError(f"{name} must be a sequence of str", reason=str(e)) from None


def _headers_input(values: Sequence[Any]) -> HeadersInput:
    rows = [_pairs(index, value) for index, value in enumerate(values)]
    flat = list(chain.from_iterable(rows))
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return HeadersInput(
        counts,
        _text_input("header keys", [key for key, _ in flat]),
        _bytes_input("header values", [value for _, value in flat]),
    )


def _pairs(index: int, value: Any) -> list[tuple[str, bytes]]:
    if not value:
        return []
    pairs: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
    try:
        return [(key, content) for key, content in pairs]
    except (TypeError, ValueError):
        raise UsageError("headers must be mappings or pairs of (str, bytes)", index=index) from None


# -- limits -------------------------------------------------------------------------------------------


def _check_count(name: str, found: int, count: int) -> None:
    if found != count:
        raise UsageError(f"{name}: as many values as payloads are wanted", found=found, records=count)


def check_record_count(count: int) -> None:
    """Raise InvalidRequest for no records (N-6i), BatchTooLarge for too many (N-6a)."""
    if count == 0:
        raise InvalidRequest("a write holds at least one record", records=0, min=1)
    if count > BATCH_RECORDS_MAX:
        raise BatchTooLarge("too many records in one write", records=count, max=BATCH_RECORDS_MAX)


def _check_limits(records: RecordsInput) -> None:
    count = records.count
    for column, source in records.spans.items():
        name = column.name.lower()
        _check_count(name, len(source.lengths), count)
        if column in _COLUMN_BYTES_MAX:
            _check_most(InvalidRequest, f"{name} too long", source.lengths, _COLUMN_BYTES_MAX[column])
    accounted = records.spans[Column.PAYLOAD].lengths
    if Column.META in records.spans:
        accounted = accounted + records.spans[Column.META].lengths
        _check_metas(records.spans[Column.META])
    _check_most(RecordTooLarge, "record too large", accounted, RECORD_BYTES_MAX)
    if records.headers is not None:
        _check_headers(records.headers, count)


def _check_most(
    kind: type[InvalidRequest] | type[RecordTooLarge], message: str, sizes: NDArray[Any], most: int
) -> None:
    at = int(sizes.argmax())
    if sizes[at] > most:
        raise kind(message, index=at, bytes=int(sizes[at]), max=most)


def _check_headers(headers: HeadersInput, count: int) -> None:
    _check_count("headers", len(headers.counts), count)
    at = int(headers.counts.argmax())
    if headers.counts[at] > HEADERS_PER_RECORD_MAX:
        raise InvalidRequest(
            "too many headers", index=at, headers=int(headers.counts[at]), max=HEADERS_PER_RECORD_MAX
        )
    entries = np.concatenate(([0], np.cumsum(headers.keys.lengths + headers.values.lengths)))
    bounds = np.concatenate(([0], np.cumsum(headers.counts)))
    _check_most(InvalidRequest, "headers too large", np.diff(entries[bounds]), HEADER_BYTES_MAX)


def _check_metas(metas: BytesInput) -> None:
    """Each meta must be a JSON object (R-12) with a bounded number of keys (N-6f)."""
    try:
        whole = b"".join(metas.pieces)
    except TypeError as e:
        raise UsageError("metas must be a sequence of bytes", reason=str(e)) from None
    stop = 0
    for index, length in enumerate(metas.lengths.tolist()):
        meta = whole[stop : stop + length]
        stop += length
        if not length:
            continue
        try:
            names = _meta_decoder.decode(meta)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise InvalidRequest("meta is not a JSON object", index=index, reason=str(e)) from None
        # What the engine stamps on a copy is not counted.
        if len(names) > META_KEYS_MAX and len(names.keys() - STAMPED_KEYS) > META_KEYS_MAX:
            raise InvalidRequest("meta has too many keys", index=index, keys=len(names), max=META_KEYS_MAX)


# -- laying out ---------------------------------------------------------------------------------------


def _lay(pieces: list[Any], parts: Sequence[Any], size: int) -> int:
    pieces.extend(parts)
    if size & 7:
        pieces.append(_ZEROS[: -size & 7])
    return padded(size)


def _lay_offsets(pieces: list[Any], lengths: NDArray[Any]) -> int:
    offsets = np.zeros(len(lengths) + 1, dtype="<i4")
    np.cumsum(lengths, out=offsets[1:])
    return _lay(pieces, [offsets.tobytes()], offsets.nbytes)


def _lay_bytes(pieces: list[Any], source: BytesInput) -> int:
    if source.data_bytes > FRAME_BYTES_MAX:
        raise PayloadTooLarge("one write is too large", bytes=source.data_bytes, max=FRAME_BYTES_MAX)
    return _lay_offsets(pieces, source.lengths) + _lay(pieces, source.pieces, source.data_bytes)
