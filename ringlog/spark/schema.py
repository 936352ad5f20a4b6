"""Columns of view=records, as Spark and Arrow types.

    layout=ringlog  topic epoch seq ts payload key tag node meta event_ts expires_at not_before priority
                    and headers with includeHeaders; key of a row: (topic, epoch, seq)
    layout=kafka    key value topic partition offset timestamp timestampType, and headers; offset is seq

A reader returns any of these columns in any order. The user's schema selects them, because Spark does not
push down projections. A column that a record lacks is null. topic, epoch, seq, ts and priority are never
null.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ringlog.frame.layout import Column
from ringlog.spark.errors import SchemaError
from ringlog.spark.option_values import near_names

if TYPE_CHECKING:
    import pyarrow as pa

    from ringlog.spark.options import SourceOptions

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column of a view: its type, and its source field in the Arrow batch of a frame."""

    name: str
    type: DataType
    source: str
    """Field of TailBatch.record_batches. topic, epoch and constants are created by the reader."""
    column: Column | None = None
    """Frame column that must be decoded; None: none."""
    is_nullable: bool = True


RINGLOG_COLUMNS = (
    ColumnSpec("topic", StringType(), "topic", None, False),
    ColumnSpec("epoch", LongType(), "epoch", None, False),
    ColumnSpec("seq", LongType(), "seq", None, False),
    ColumnSpec("ts", TimestampType(), "ts", None, False),
    ColumnSpec("payload", BinaryType(), "payload", Column.PAYLOAD),
    ColumnSpec("key", BinaryType(), "key", Column.KEY),
    ColumnSpec("tag", StringType(), "tag", Column.TAG),
    ColumnSpec("node", StringType(), "node", Column.NODE),
    ColumnSpec("meta", StringType(), "meta", Column.META),
    ColumnSpec("event_ts", TimestampType(), "event_ts", Column.EVENT_TS),
    ColumnSpec("expires_at", TimestampType(), "expires_at", Column.EXPIRES_AT),
    ColumnSpec("not_before", TimestampType(), "not_before", Column.NOT_BEFORE),
    ColumnSpec("priority", ShortType(), "priority", Column.PRIORITY, False),
    ColumnSpec("headers", HEADERS_TYPE, "headers", Column.HEADERS),
)
KAFKA_COLUMNS = (
    ColumnSpec("key", BinaryType(), "key", Column.KEY),
    ColumnSpec("value", BinaryType(), "payload", Column.PAYLOAD),
    ColumnSpec("topic", StringType(), "topic", None, False),
    ColumnSpec("partition", IntegerType(), "zero", None, False),
    ColumnSpec("offset", LongType(), "seq", None, False),
    ColumnSpec("timestamp", TimestampType(), "ts", None, False),
    ColumnSpec("timestampType", IntegerType(), "zero", None, False),
    ColumnSpec("headers", HEADERS_TYPE, "headers", Column.HEADERS),
)
COLUMNS: dict[str, tuple[ColumnSpec, ...]] = {"ringlog": RINGLOG_COLUMNS, "kafka": KAFKA_COLUMNS}


def columns_of(options: SourceOptions) -> tuple[ColumnSpec, ...]:
    """Return the columns that exist under these options; headers only with includeHeaders."""
    found = COLUMNS[options.layout]
    return found if options.include_headers else tuple(each for each in found if each.name != "headers")


def record_schema(options: SourceOptions) -> StructType:
    """Return Spark's schema of view=records."""
    return StructType([StructField(each.name, each.type) for each in columns_of(options)])


def check_schema(struct: StructType, options: SourceOptions) -> tuple[ColumnSpec, ...]:
    """Return the columns of a user's schema, in its order; raise SchemaError for an invalid one.

    Types must match exactly. `not null` is accepted only for columns that are never null.
    """
    known = {each.name: each for each in columns_of(options)}
    names = struct.fieldNames()
    if not names or len(set(names)) != len(names):
        raise SchemaError("a schema must name at least one column, each once", found=names)
    return tuple(_checked(field, known) for field in struct.fields)


def _checked(field: StructField, known: dict[str, ColumnSpec]) -> ColumnSpec:
    spec = known.get(field.name)
    if spec is None:
        hint = {"headers": "includeHeaders=true"}.get(field.name) or near_names(field.name, known)
        raise SchemaError("no such column", column=field.name, hint=hint, known=list(known))
    if field.dataType != spec.type:
        raise SchemaError(
            "wrong column type",
            column=field.name,
            found=field.dataType.simpleString(),
            expected=spec.type.simpleString(),
        )
    if not field.nullable and spec.is_nullable:
        raise SchemaError(
            "a record may lack this column, so it cannot be declared not null", column=field.name
        )
    return spec


def arrow_schema(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark requires for every batch; the same object for equal schemas."""
    schema: pa.Schema = _arrow_schema(struct.json())
    return schema


@cache
def _arrow_schema(text: str) -> Any:
    import json

    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(StructType.fromJson(json.loads(text)), timezone="UTC")


def bitmap_of(specs: tuple[ColumnSpec, ...]) -> int:
    """Return a bitmap of layout.Column with the frame columns that these specs need."""
    return sum({1 << spec.column for spec in specs if spec.column is not None})


def select(options: SourceOptions, names: list[str]) -> StructType:
    """Return Spark's schema of these columns, in this order; raise SchemaError for unknown names."""
    types = {each.name: each.type for each in columns_of(options)}
    for name in names:
        if name not in types:
            raise SchemaError("no such column", column=name, near=near_names(name, types), known=list(types))
    return StructType([StructField(name, types[name]) for name in names])
