"""Data source with the number of stored records per tag, from the dictionaries of segments. For jobs only."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from ringlog.spark.options import source_options
from ringlog.spark.views import ViewReader, view_schema


class TagSource(DataSource):
    """One row for each tag of each topic of each segment. Options: path and subscription."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ringlog_tags"

    def schema(self) -> StructType:
        """Return the columns topic, tag and records."""
        return view_schema("tags")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; raise OptionError."""
        return ViewReader(
            source_options({**self.options, "view": "segments"}, streaming=False), schema, "tags"
        )
