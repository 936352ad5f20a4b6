"""The data source "ringlog", as Spark calls it: options in, readers and writers out.

Spark makes an instance in a process of its own for each thing it wants to know, so it imports little.
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
"""What the reader in the JVM asks with (Pieces.WISH): for pieces, under the schema that this names."""


class RinglogDataSource(DataSource):
    """`spark.read.format("ringlog")` and its three siblings. Options: see ringlog.spark.options."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Columns of the view that the options choose, when the user gives no schema."""
        shape = schema_options(self.options)
        if shape.view != "records":
            from ringlog.spark.views import view_schema

            return view_schema(shape.view)
        from ringlog.spark.schema import record_schema

        return record_schema(shape)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read; raises OptionError, SchemaError."""
        wish, given = self._wish()
        options = source_options(given, streaming=False)
        if wish is not None:
            from ringlog.spark.jvm_frames import JvmFrameReader

            return JvmFrameReader(options, _asked(wish, options))
        if options.view != "records":
            from ringlog.spark.views import ViewReader

            return ViewReader(options, schema)
        from ringlog.spark.batch import BatchReader

        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark calls it so.
        """A stream of records; raises OptionError, SchemaError."""
        wish, given = self._wish()
        options = source_options(given, streaming=True)
        if wish is not None:
            from ringlog.spark.jvm_frames import JvmFrameStreamReader

            return JvmFrameStreamReader(options, _asked(wish, options))
        from ringlog.spark.stream import StreamReader

        return StreamReader(options, schema)

    def _wish(self) -> tuple[str | None, dict[str, str]]:
        """The schema that pieces are asked under, None where records are asked for; and the options."""
        given = dict(self.options)
        return given.pop(PIECES_OF, None), given

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write; raises OptionError, SchemaError, TopicNotFound."""
        from ringlog.spark.sink import BatchWriter

        return BatchWriter(sink_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A streaming write; raises OptionError, SchemaError."""
        from ringlog.spark.sink import StreamWriter

        return StreamWriter(sink_options(self.options), schema, overwrite)


def _asked(wish: str, options: SourceOptions) -> StructType:
    """The columns that the user named, for which pieces are asked; all of them where none were named."""
    import json

    from pyspark.sql.types import StructType

    from ringlog.spark.schema import record_schema

    return StructType.fromJson(json.loads(wish)) if wish else record_schema(options)
