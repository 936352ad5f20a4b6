"""The data source "ringlog" as Spark calls it: it maps options to readers and writers.

Spark creates an instance in a new process for each query of it, so this module imports as little as possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from ringlog.spark.options import schema_options, sink_options, source_options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ringlog.spark.options import SourceOptions

FORMAT = "ringlog"
PIECES_OF = "pieces.of"
"""Option that the JVM reader sets (Pieces.WISH): return pieces of frames, for the schema in its value."""


class RinglogDataSource(DataSource):
    """Batch and streaming reads and writes of `format("ringlog")`. Options: see ringlog.spark.options."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the selected view. Spark calls this if the user gives no schema."""
        shape = schema_options(self.options)
        if shape.view != "records":
            from ringlog.spark.views import view_schema

            return view_schema(shape.view)
        from ringlog.spark.schema import record_schema

        return record_schema(shape)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch; raise OptionError or SchemaError."""
        pieces_schema, given = self._requested_pieces()
        options = source_options(given, streaming=False)
        if pieces_schema is not None:
            from ringlog.spark.jvm_frames import JvmFrameReader

            return JvmFrameReader(options, _requested_schema(pieces_schema, options))
        if options.view != "records":
            from ringlog.spark.views import ViewReader

            return ViewReader(options, schema)
        from ringlog.spark.batch import BatchReader

        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark calls it so.
        """Return the reader of a stream; raise OptionError or SchemaError."""
        pieces_schema, given = self._requested_pieces()
        options = source_options(given, streaming=True)
        if pieces_schema is not None:
            from ringlog.spark.jvm_frames import JvmFrameStreamReader

            return JvmFrameStreamReader(options, _requested_schema(pieces_schema, options))
        from ringlog.spark.stream import StreamReader

        return StreamReader(options, schema)

    def _requested_pieces(self) -> tuple[str | None, dict[str, str]]:
        """Return (schema for a read of pieces or None for a read of records, all other options)."""
        given = dict(self.options)
        return given.pop(PIECES_OF, None), given

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch; raise OptionError, SchemaError or TopicNotFound."""
        from ringlog.spark.sink import BatchWriter

        return BatchWriter(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer of a stream; raise OptionError or SchemaError."""
        from ringlog.spark.sink import StreamWriter

        return StreamWriter(sink_options(self.options), schema, overwrite)


def _requested_schema(pieces_schema: str, options: SourceOptions) -> StructType:
    """Return the columns that a read of pieces must cover: `pieces_schema`, or all columns if it is empty."""
    import json

    from pyspark.sql.types import StructType

    from ringlog.spark.schema import record_schema

    return StructType.fromJson(json.loads(pieces_schema)) if pieces_schema else record_schema(options)
