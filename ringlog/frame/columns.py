"""Encode records, given as Python lists or as buffers with offsets, into frames. The kernel does the work.

The kernel checks every limit of a record but does not report which one failed. If it refuses the input, this
module determines the cause, so that the error names the record. The shard checks the same limits again
(measure.py), because it cannot trust the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import BatchTooLarge, InvalidRequest, PayloadTooLarge, RecordTooLarge, UsageError
from ringlog.frame.body import with_nulls
from ringlog.frame.header import FrameHeader, append_header_template, unpack_header
from ringlog.frame.kernel import LIMITS, kernel
from ringlog.frame.layout import EVENT_TS_NONE, HEADER_BYTES, Column
from ringlog.frame.metadata import NOT_JSON, object_decoder
from ringlog.limits import (
    BATCH_RECORDS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
)

I64 = NDArray[np.int64]
Headers = Mapping[str, bytes] | Sequence[tuple[str, bytes]] | None
Integers = Sequence[int | None] | NDArray[Any] | None
Values = tuple[Any, ...]
"""Input of the kernel's `encode`: for each column in bit order None, a list of values, or buffers. Trailing
columns may be omitted."""

COLUMN_NAMES = (
    "payloads", "keys", "tags", "nodes", "headers", "metas", "event_ts", "expires_at", "not_before",
    "priorities",
)  # fmt: skip
"""Arguments of encode_records in bit order of the columns."""
_COLUMN_BYTES_MAX = {
    Column.KEY: KEY_BYTES_MAX,
    Column.TAG: TAG_BYTES_MAX,
    Column.NODE: NODE_BYTES_MAX,
    Column.META: META_BYTES_MAX,
}


class BufferColumn(NamedTuple):
    """Values in one buffer: value i is `data[offsets[i]:offsets[i + 1]]`. Offsets are (n + 1,) int64."""

    data: memoryview
    offsets: I64
    valid: NDArray[np.bool_] | None = None
    """(n,) True where there is a value; None = everywhere. Bytes in a null's place are ignored."""


class BufferHeaders(NamedTuple):
    """Headers in buffers: record i has the entries `lists[i]:lists[i + 1]`. `lists` is (n + 1,) int64."""

    lists: I64
    keys: BufferColumn
    values: BufferColumn


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Encoded records: a frame without topic, producer and class. codec.frame sets them."""

    buffer: bytearray

    @property
    def header(self) -> FrameHeader:
        """The header of the frame."""
        return unpack_header(self.buffer, 0)

    @property
    def bitmap(self) -> int:
        """Column bitmap: bit i = Column i is present."""
        return self.header.columns

    @property
    def count(self) -> int:
        """Number of records, at least 1."""
        return self.header.records

    @property
    def body(self) -> bytes:
        """The columns, uncompressed."""
        return bytes(memoryview(self.buffer)[HEADER_BYTES:])


DEAD_LETTER_FROM = "$dead_letter_from"
DEAD_LETTER_DELIVERIES = "$dead_letter_deliveries"
DEAD_LETTER_SRC_SEQ = "$dead_letter_src_seq"
DEAD_LETTER_REASON = "$dead_letter_reason"
DEAD_LETTER_LAST_FAILURE = "$dead_letter_last_failure"
DEAD_LETTER_NACKS = "$dead_letter_nacks"
DEAD_LETTER_GROUP = "$dead_letter_group"
DEAD_LETTER_SRC_ID = "$dead_letter_src_id"
"""For a dead letter of a consumer group: id of its source topic, which is never reused for another topic."""
DEAD_LETTER_HEADERS_LEFT_OUT = "$dead_letter_headers_left_out"
"""Number of omitted headers of the job. Headers are omitted only if the job's size leaves no room."""
DEAD_LETTER_META = "$dead_letter_meta"
"""The job's metadata as text, if it was not a JSON object or exceeds a limit of records."""
DEAD_LETTER_META_LEFT_OUT = "$dead_letter_meta_left_out"
"""Size in bytes of the job's metadata, if it has no room in a header either."""
DEAD_LETTER_META_KEYS = frozenset({
    DEAD_LETTER_FROM, DEAD_LETTER_DELIVERIES, DEAD_LETTER_SRC_SEQ, DEAD_LETTER_REASON, DEAD_LETTER_GROUP,
    DEAD_LETTER_SRC_ID, DEAD_LETTER_LAST_FAILURE, DEAD_LETTER_NACKS, DEAD_LETTER_HEADERS_LEFT_OUT,
    DEAD_LETTER_META_LEFT_OUT,
})  # fmt: skip
"""Metadata keys of a dead letter: its source, the number of deliveries, the reason."""


def encode_records(
    payloads: Sequence[bytes | None],
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
) -> EncodedRecords:
    """Encode records given column by column. A column that is None is omitted from the frame.

    Args:
        payloads: Payload bytes. None = no payload.
        keys, tags, nodes: None = no value. An empty value is a value.
        headers: Mappings or (name, value) pairs.
        metas: JSON objects as compact bytes.
        event_ts, expires_at, not_before: Microseconds since the epoch.
        priorities: 0 to 255.

    Raises:
        RecordTooLarge, InvalidRequest, BatchTooLarge, PayloadTooLarge: A limit is exceeded or a value is
            invalid. The error has the index of the record if there is one, the size and the maximum.
        UsageError: A value has the wrong type.
    """
    values = (
        payloads, keys, tags, nodes, headers, metas, event_ts, expires_at, not_before, priorities,
    )  # fmt: skip
    return EncodedRecords(encode_values(values, append_header_template())[0])


def encode_values(
    values: Values, header: bytes, count: int = -1, records: int = -1
) -> tuple[bytearray, bytes]:
    """Encode adjacent frames of `records` records each; the last may have fewer. -1: a single frame.

    `header` has the common header fields and the first producer_seq. `count` is the number of records; -1: as
    many as payloads. Returns the buffer and (n + 1,) int64 offsets as bytes. Raises as encode_records.
    """
    if count < 0:
        try:
            count = len(values[0])
        except TypeError as e:
            raise UsageError("payloads must be a sequence of bytes", reason=str(e)) from None
    if records < 0:
        check_record_count(count)
        records = count
    found = kernel.encode(values, count, records, header, FRAME_BYTES_MAX, LIMITS)
    if found is None:
        values += (None,) * (len(COLUMN_NAMES) - len(values))
        values = tuple(
            [None if each is None else _to_kernel_input(bit, each, count) for bit, each in enumerate(values)]
        )
        found = kernel.encode(values, count, records, header, FRAME_BYTES_MAX, LIMITS)
    if found is None:
        values, size = _diagnose(values, count)
        found = kernel.encode(values, count, records, header, FRAME_BYTES_MAX, LIMITS)
        if found is None:
            raise PayloadTooLarge(
                f"write must be <= {FRAME_BYTES_MAX} bytes, got {size}; split the write",
                bytes=size,
                max=FRAME_BYTES_MAX,
            )
    if len(values) > Column.META and values[Column.META] is not None:
        _check_metas(values[Column.META])
    return found


def buffer_values(name: str, data: Any, offsets: Any) -> BufferColumn:
    """Return a bytes column of one buffer with n + 1 offsets. Raise UsageError if they do not fit."""
    view = memoryview(data).cast("B")
    bounds = np.ascontiguousarray(offsets, dtype=np.int64)
    start, stop = int(bounds[0]), int(bounds[-1])
    if start < 0 or stop > len(view) or bool((np.diff(bounds) < 0).any()):
        raise UsageError(
            f"{name}: offsets must not decrease and must be in 0..{len(view)}, got {start} to {stop}",
            buffer_bytes=len(view),
            stop=stop,
        )
    return BufferColumn(view, bounds)


def to_fixed_column(column: Column, values: Any, count: int) -> NDArray[Any]:
    """Convert integers or None to a fixed column. Raise UsageError for types, InvalidRequest for range."""
    name = column.name.lower()
    absent = EVENT_TS_NONE if column == Column.EVENT_TS else 0
    found = (
        values
        if isinstance(values, np.ndarray)
        else np.asarray([absent if value is None else value for value in values])
    )
    if found.ndim != 1 or found.dtype.kind not in "iu":
        kind = str(found.dtype)
        raise UsageError(
            f"{name} must be a sequence of integers, got {found.ndim}-dimensional {kind[:64]}", found=kind
        )
    _check_count(name, len(found), count)
    low = EVENT_TS_NONE if column == Column.EVENT_TS else 0
    high = 255 if column == Column.PRIORITY else (1 << 63) - 1
    for at in (int(found.argmin()), int(found.argmax())):
        if not low <= int(found[at]) <= high:
            raise InvalidRequest(
                f"{name} must be in {low}..{high}, got {int(found[at])}",
                index=at,
                found=int(found[at]),
                min=low,
                max=high,
            )
    return found.astype(np.uint8 if column == Column.PRIORITY else "<i8", copy=False)


def _to_kernel_input(bit: int, values: Any, count: int) -> Any:
    """Convert a column to a form that the kernel accepts. Only the values of fixed columns are validated."""
    if isinstance(values, list | BufferColumn | BufferHeaders):
        return values
    if bit >= Column.EVENT_TS:
        return np.ascontiguousarray(to_fixed_column(Column(bit), values, count)).data
    try:
        return list(values)
    except TypeError as e:
        raise UsageError(f"{COLUMN_NAMES[bit]} must be a sequence", reason=str(e)) from None


# -- diagnosis ----------------------------------------------------------------------------------------


def _diagnose(values: Values, count: int) -> tuple[Values, int]:
    """Return (values, their total bytes). Values become bytes objects. Raise for invalid values."""
    check_record_count(count)
    found = list(values)
    sizes: dict[Column, I64] = {}
    for column in (Column.PAYLOAD, Column.KEY, Column.TAG, Column.NODE, Column.META):
        if values[column] is not None:
            name = COLUMN_NAMES[column]
            found[column], sizes[column] = _sized(name, values[column], column in (Column.TAG, Column.NODE))
            _check_count(name, len(sizes[column]), count)
            if column in _COLUMN_BYTES_MAX:
                most = _COLUMN_BYTES_MAX[column]
                _check_most(InvalidRequest, f"{column.name.lower()} too long", sizes[column], most)
    for column in (Column.EVENT_TS, Column.EXPIRES_AT, Column.NOT_BEFORE, Column.PRIORITY):
        if isinstance(values[column], list):
            found[column] = _to_kernel_input(column, to_fixed_column(column, values[column], count), count)
    accounted = sizes[Column.PAYLOAD]
    _check_most(RecordTooLarge, "record too large", accounted + sizes.get(Column.META, 0), RECORD_BYTES_MAX)
    if values[Column.HEADERS] is not None:
        found[Column.HEADERS] = _checked_headers(values[Column.HEADERS], count)
    return tuple(found), sum(int(each.sum()) for each in sizes.values())


def _sized(name: str, values: Any, is_text: bool) -> tuple[Any, I64]:
    if isinstance(values, BufferColumn):
        sizes = np.diff(values.offsets)
        return values, sizes if values.valid is None else np.where(values.valid, sizes, 0)
    if is_text:
        lengths = [0 if value is None else len(_utf8(name, value)) for value in values]
        return values, np.array(lengths, dtype=np.int64)
    made = [None if value is None else _as_bytes(name, index, value) for index, value in enumerate(values)]
    lengths = [0 if value is None else len(value) for value in made]
    return made, np.array(lengths, dtype=np.int64)


def _utf8(name: str, value: Any) -> bytes:
    try:
        encoded: bytes = str.encode(value)
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{name}: text cannot be encoded as UTF-8", reason=e.reason) from None
    except TypeError:
        raise UsageError(f"{name} must be a sequence of str", found=type(value).__name__) from None
    return encoded


def _as_bytes(name: str, index: int, value: Any) -> bytes:
    try:
        view = memoryview(value)
    except TypeError as e:
        raise UsageError(f"{name} must be a sequence of bytes", reason=str(e)) from None
    if view.nbytes != len(view):
        raise UsageError(
            f"{name}[{index}] must be a one-dimensional buffer with items of 1 byte",
            index=index,
            bytes=view.nbytes,
        )
    return bytes(view)


def _checked_headers(values: Any, count: int) -> Any:
    if isinstance(values, BufferHeaders):
        counts = np.diff(values.lists)
        names, contents = np.diff(values.keys.offsets), np.diff(values.values.offsets)
    else:
        _check_count("headers", len(values), count)
        values = [_pairs(index, value) for index, value in enumerate(values)]
        counts = np.fromiter(map(len, values), dtype=np.int64, count=count)
        flat = list(chain.from_iterable(values))
        names = np.array([len(_utf8("header keys", key)) for key, _ in flat], dtype=np.int64)
        contents = np.array([len(content) for _, content in flat], dtype=np.int64)
    at = int(counts.argmax())
    if counts[at] > HEADERS_PER_RECORD_MAX:
        raise InvalidRequest(
            f"headers per record must be <= {HEADERS_PER_RECORD_MAX}, got {int(counts[at])}",
            index=at,
            headers=int(counts[at]),
            max=HEADERS_PER_RECORD_MAX,
        )
    for what, sizes in (("header name", names), ("header value", contents)):
        over = np.flatnonzero(sizes > HEADER_BYTES_MAX)
        if len(over):
            at = int(np.searchsorted(np.cumsum(counts), over[0], "right"))
            size = int(sizes[over[0]])
            raise InvalidRequest(
                f"{what} must be <= {HEADER_BYTES_MAX} bytes, got {size}",
                index=at,
                bytes=size,
                max=HEADER_BYTES_MAX,
            )
    ends = np.concatenate(([0], np.cumsum(names + contents)))
    bounds = np.concatenate(([0], np.cumsum(counts)))
    _check_most(InvalidRequest, "headers too large", np.diff(ends[bounds]), HEADERS_BYTES_MAX)
    return values


def _pairs(index: int, value: Any) -> list[tuple[str, bytes]]:
    if not value:
        return []
    try:
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        return [(key, _as_bytes("header values", index, content)) for key, content in pairs]
    except (TypeError, ValueError):
        raise UsageError("headers must be mappings or pairs of (str, bytes)", index=index) from None


def _check_count(name: str, found: int, count: int) -> None:
    if found != count:
        raise UsageError(
            f"{name} must have {count} values, one per payload, got {found}", found=found, records=count
        )


def check_record_count(count: int) -> None:
    """Raise InvalidRequest for 0 records, BatchTooLarge for more than BATCH_RECORDS_MAX."""
    if count == 0:
        raise InvalidRequest("records must be >= 1, got 0", records=0, min=1)
    if count > BATCH_RECORDS_MAX:
        raise BatchTooLarge(
            f"records must be <= {BATCH_RECORDS_MAX}, got {count}; split the write",
            records=count,
            max=BATCH_RECORDS_MAX,
        )


def _check_most(
    kind: type[InvalidRequest] | type[RecordTooLarge], message: str, sizes: NDArray[Any], most: int
) -> None:
    at = int(sizes.argmax())
    if sizes[at] > most:
        raise kind(message, index=at, bytes=int(sizes[at]), max=most)


def _check_metas(metas: Any) -> None:
    """Check that each meta is a JSON object with at most META_KEYS_MAX keys. Raise InvalidRequest."""
    if isinstance(metas, BufferColumn):
        found = [metas.data[start:stop] for start, stop in pairwise(metas.offsets.tolist())]
        metas = with_nulls(found, metas.valid)
    for index, meta in enumerate(metas):
        if not meta:
            continue
        try:
            names = object_decoder.decode(meta)
        except NOT_JSON as e:
            raise InvalidRequest("meta is not a JSON object", index=index, reason=str(e)) from None
        # The keys that the engine adds to a dead letter do not count.
        if len(names) > META_KEYS_MAX and len(names.keys() - DEAD_LETTER_META_KEYS) > META_KEYS_MAX:
            raise InvalidRequest(
                f"meta must have <= {META_KEYS_MAX} keys, got {len(names)}",
                index=index,
                keys=len(names),
                max=META_KEYS_MAX,
            )
