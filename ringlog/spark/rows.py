"""Encodes rows of a DataFrame as frames: columns are checked once, rows are cut and encoded in bulk.

No code here loops over rows. Spark's batches have at most 10,000 rows, often of many topics. Rows are grouped
by topic and encoded by the frame codec, which checks every limit. Many rows of a topic are cut directly:
their frames are views of Spark's buffers, and no value is copied before it is written. Only groups too small
for a frame are concatenated with later rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from ringlog.errors import InvalidRequest, PayloadTooLarge, RecordTooLarge
from ringlog.frame import encode_arrow
from ringlog.frame.header import append_header_template
from ringlog.limits import BATCH_RECORDS_MAX, FRAME_BYTES_MAX, RECORD_BYTES_MAX
from ringlog.spark.errors import SchemaError
from ringlog.spark.option_values import near_names
from ringlog.spark.options import SinkOptions
from ringlog.types import Durability

if TYPE_CHECKING:
    import pyarrow as pa

BUFFERED_BYTES_MAX = 64 << 20
"""Maximum size of the rows of all topics that wait for a full frame. Above it, all of them are encoded."""
ROW_BYTES = 24
"""Approximate size of a row in a frame, in addition to its variable-length values."""
_TEXT = (StringType,)
_BYTES = (StringType, BinaryType)
_TIME = (TimestampType,)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
ROW_COLUMN_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "payload": _BYTES, "value": _BYTES, "topic": _TEXT, "key": _BYTES, "tag": _TEXT, "node": _TEXT,
    "meta": _TEXT, "headers": (ArrayType, MapType), "event_ts": _TIME, "expires_at": _TIME,
    "not_before": _TIME, "priority": _WHOLE,
}  # fmt: skip
"""Columns that can be written, and their permitted types."""
ENGINE_COLUMNS = ("seq", "ts", "epoch")
REMEDIES = {
    **dict.fromkeys(ENGINE_COLUMNS, "the engine assigns it: leave it out with df.drop(…)"),
    "offset": "the engine assigns it (seq): leave it out with df.drop(…)",
    "timestamp": "the commit time is the engine's; a time of your own is event_ts",
    "partition": "topics have one partition each: leave it out with df.drop(…)",
    "timestampType": "leave it out with df.drop(…)",
    "ttl_ms": "write expires_at, a timestamp",
}


def check_columns(struct: StructType, options: SinkOptions) -> None:
    """Check that rows of this schema can be written; raise SchemaError with the column and the remedy."""
    names = struct.fieldNames()
    if len(set(names)) != len(names):
        raise SchemaError("column names must be unique", found=names)
    for each in struct.fields:
        _check_column(each.name, each.dataType)
    if ("payload" in names) == ("value" in names):
        raise SchemaError(
            "exactly one column payload or value is required, of type string or binary", found=names
        )
    if options.topic is None and "topic" not in names:
        raise SchemaError("set the option topic, or add a column topic", found=names)


def _check_column(name: str, kind: DataType) -> None:
    allowed = ROW_COLUMN_TYPES.get(name)
    if allowed is None:
        hint = REMEDIES.get(name) or near_names(name, ROW_COLUMN_TYPES)
        raise SchemaError("unknown column", column=name, hint=hint, known=list(ROW_COLUMN_TYPES))
    is_right = isinstance(kind, allowed)
    if is_right and isinstance(kind, MapType):
        is_right = isinstance(kind.keyType, StringType) and isinstance(kind.valueType, BinaryType)
    elif is_right and isinstance(kind, ArrayType):
        pair = kind.elementType
        is_right = isinstance(pair, StructType) and _is_pair(pair)
    if not is_right:
        raise SchemaError("wrong column type", column=name, found=kind.simpleString(), expected=_words(name))


def _is_pair(pair: StructType) -> bool:
    found = {each.name: type(each.dataType) for each in pair.fields}
    return found == {"key": StringType, "value": BinaryType}


def _words(name: str) -> str:
    if name == "headers":
        return "array<struct<key:string,value:binary>> or map<string,binary>"
    return " or ".join(kind.typeName() for kind in ROW_COLUMN_TYPES[name])


@dataclass(frozen=True, slots=True)
class SinkLimits:
    """Limits of the target engine. Frames beyond them are refused for good, so none is staged."""

    record_bytes: int = RECORD_BYTES_MAX
    """Most bytes of payload and meta of a record."""
    batch_records: int = BATCH_RECORDS_MAX
    """Most records of a frame."""
    frame_bytes: int = FRAME_BYTES_MAX
    """Most bytes of a frame."""


class SinkFrame(NamedTuple):
    """One encoded frame: topic, buffers, size in bytes and number of records."""

    topic: str
    pieces: list[Any]
    size: int
    rows: int


@dataclass(slots=True)
class _BufferedRows:
    """Rows of one topic that wait for a full frame."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    size: int = 0


class FrameMaker:
    """Encodes Spark's batches as frames. One instance per task."""

    def __init__(
        self,
        options: SinkOptions,
        number_of: Callable[[str], int] = lambda _: 0,
        limits: SinkLimits = SinkLimits(),
    ) -> None:
        """`number_of` returns the topic_id for a topic's frames. It is called once per frame."""
        self._number_of = number_of
        self._limits = limits
        self._topic = options.topic
        self._records = min(options.max_frame_records, limits.batch_records)
        self._bytes = options.max_frame_bytes
        # EPHEMERAL (0) requests no durability beyond that of the topic.
        self._durability = options.durability or Durability.EPHEMERAL
        self._held: dict[str, _BufferedRows] = {}
        self._held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[SinkFrame]:
        """Add rows; yield the frames that are full, in the row order of each topic.

        Raises InvalidRequest or RecordTooLarge for a row that the engine accepts in no topic, and
        PayloadTooLarge for a frame that it does not accept.
        """
        for topic, rows in self._by_topic(batch):
            sizes = row_bytes(rows)
            size = int(sizes.sum())
            if rows.num_rows >= self._records or size >= self._bytes:
                yield from self._cut(topic, rows, sizes)
                continue
            buffered = self._held.setdefault(topic, _BufferedRows())
            buffered.batches.append(rows)
            buffered.rows += rows.num_rows
            buffered.size += size
            self._held_bytes += size
            if buffered.rows >= self._records or buffered.size >= self._bytes:
                yield from self._emit(topic, buffered, is_last=False)
        if self._held_bytes > BUFFERED_BYTES_MAX:
            yield from self.flush()

    def _cut(self, topic: str, rows: pa.RecordBatch, sizes: NDArray[np.int64]) -> Iterator[SinkFrame]:
        """Yield frames of similar size from rows that fill at least one.

        No row waits, and no value is copied.
        """
        buffered = self._held.get(topic)
        if buffered is not None:
            yield from self._emit(topic, buffered, is_last=True)
        parts = max(-(-len(sizes) // self._records), -(-int(sizes.sum()) // self._bytes))
        cuts = frame_cuts(sizes, -(-len(sizes) // parts), self._bytes)
        yield from self._frames(topic, rows, cuts)

    def flush(self) -> Iterator[SinkFrame]:
        """Yield frames of all waiting rows."""
        for topic, buffered in list(self._held.items()):
            yield from self._emit(topic, buffered, is_last=True)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the rows of each topic in order, with their columns renamed to those of a frame."""
        import pyarrow as pa

        names = list(batch.schema.names)
        columns = {name: batch.column(at) for at, name in enumerate(names) if name != "topic"}
        if "value" in columns:
            columns = {"payload": columns.pop("value"), **columns}
        rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        if not batch.num_rows:
            return
        if self._topic is not None:
            yield self._topic, rows
            return
        topics = batch.column(names.index("topic"))
        if topics.null_count:
            raise InvalidRequest("topic must not be null", rows=topics.null_count)
        coded = topics.dictionary_encode()
        distinct = coded.dictionary.to_pylist()
        if len(distinct) == 1:
            yield distinct[0], rows
            return
        which = coded.indices.to_numpy()
        order = np.argsort(which, kind="stable")
        grouped = rows.take(pa.array(order))
        stops = np.cumsum(np.bincount(which, minlength=len(distinct))).tolist()
        for topic, start, stop in zip(distinct, [0, *stops[:-1]], stops, strict=True):
            yield topic, grouped.slice(start, stop - start)

    def _emit(self, topic: str, buffered: _BufferedRows, *, is_last: bool) -> Iterator[SinkFrame]:
        import pyarrow as pa

        rows = buffered.batches[0] if len(buffered.batches) == 1 else pa.concat_batches(buffered.batches)
        cuts = frame_cuts(row_bytes(rows), self._records, self._bytes)
        if not is_last and cuts[-1] == rows.num_rows and len(cuts) > 1:
            cuts.pop()  # The last frame may not be full: its rows wait for more.
        yield from self._frames(topic, rows, cuts)
        self._held_bytes -= buffered.size
        left = rows.slice(cuts[-1])
        if not left.num_rows:
            del self._held[topic]
            return
        size = int(row_bytes(left).sum())
        self._held[topic] = _BufferedRows([left], left.num_rows, size)
        self._held_bytes += size

    def _frames(self, topic: str, rows: pa.RecordBatch, cuts: list[int]) -> Iterator[SinkFrame]:
        """Yield a frame for the rows up to each cut. Rows after the last cut are not encoded."""
        for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
            try:
                header = append_header_template(self._number_of(topic), flags=int(self._durability))
                part = rows.slice(start, stop - start)
                whole = encode_arrow(part, header).buffer
                _check_sizes(part, len(whole), self._limits)
            except (InvalidRequest, RecordTooLarge, PayloadTooLarge) as e:
                e.detail.setdefault("topic", topic)
                raise
            yield SinkFrame(topic, [whole], len(whole), stop - start)


def _check_sizes(rows: pa.RecordBatch, frame_bytes: int, limits: SinkLimits) -> None:
    """Raise RecordTooLarge or PayloadTooLarge if the engine does not accept the frame of these rows."""
    import pyarrow.compute as pc

    if frame_bytes > limits.frame_bytes:
        raise PayloadTooLarge(
            f"a frame must have at most {limits.frame_bytes} bytes, got {frame_bytes}: set a smaller "
            "maxFrameBytes",
            bytes=frame_bytes, max=limits.frame_bytes, rows=rows.num_rows,
        )  # fmt: skip
    if frame_bytes <= limits.record_bytes:
        return  # None of its records is larger than the frame.
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for name in ("payload", "meta"):
        if name in rows.schema.names:
            lengths: Any = pc.fill_null(pc.binary_length(rows.column(name)), 0)
            sizes += lengths.to_numpy(zero_copy_only=False)
    largest = int(sizes.max(initial=0))
    if largest > limits.record_bytes:
        raise RecordTooLarge(
            f"payload and meta of a row must have at most {limits.record_bytes} bytes, got {largest}",
            bytes=largest, max=limits.record_bytes, hint="the engine's limit is limits.max_record_bytes",
        )  # fmt: skip


def row_bytes(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the approximate size of each row in a frame: (n,) bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = np.full(rows.num_rows, ROW_BYTES, dtype=np.int64)
    for column in rows.columns:
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_map(kind) or pa.types.is_large_list(kind):
            sizes += column.nbytes // max(rows.num_rows, 1)
        elif not pa.types.is_primitive(kind):
            lengths: Any = pc.fill_null(pc.binary_length(column), 0)
            sizes += lengths.to_numpy(zero_copy_only=False)
    return sizes


def frame_cuts(sizes: NDArray[np.int64], records: int, most: int) -> list[int]:
    """Return the end row of each frame: at most `records` rows and `most` bytes, at least one row."""
    ends = np.cumsum(sizes)
    cuts: list[int] = []
    at, before = 0, 0
    while at < len(sizes):
        stop = int(np.searchsorted(ends, before + most, side="right"))
        at = min(max(stop, at + 1), at + records, len(sizes))
        before = int(ends[at - 1])
        cuts.append(at)
    return cuts
