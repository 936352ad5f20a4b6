"""How many stored records have which tag, from the dictionaries of segments. For jobs alone."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from ringlog.spark.options import source_options
from ringlog.spark.views import ViewReader, view_schema


class TagSource(DataSource):
    """A row for each tag of each topic of each segment. Options: path and subscription."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "ringlog_tags"

    def schema(self) -> StructType:
        """topic, tag, records."""
        return view_schema("tags")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Raises OptionError."""
        return ViewReader(
            source_options({**self.options, "view": "segments"}, streaming=False), schema, "tags"
        )
