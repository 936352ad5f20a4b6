"""BatchReader: reads view=records as a batch. Its bounds are fixed once, when Spark plans the load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ringlog.spark.bounds import check_gaps, resolve_bounds
from ringlog.spark.catalog import Catalog
from ringlog.spark.options import SourceOptions
from ringlog.spark.plan import Bounds, Slices, plan_slices
from ringlog.spark.schema import check_schema
from ringlog.spark.slice_reader import read_slices

if TYPE_CHECKING:
    import pyarrow as pa


class SlicePartition(InputPartition):
    """Slices of one task, and the bounds of the whole read, so that a job can report what it read."""

    def __init__(self, slices: Slices, bounds: tuple[Bounds, ...] = ()) -> None:
        self.slices = slices
        self.bounds = bounds

    def __repr__(self) -> str:
        return f"SlicePartition({self.slices!r})"


class BatchReader(DataSourceReader):
    """Reads records between fixed bounds. It must never define pushFilters.

    Spark reuses the narrowed plan of a reader with pushFilters for other scans of the same DataFrame. Their
    results are then wrong. Options such as `tags` select records instead.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Create a reader of the columns in `schema`; raise SchemaError if a column does not exist."""
        check_schema(schema, options)
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Fix the bounds and split them into partitions.

        Raises EngineNotRunning, TopicNotFound and OptionError. Raises DataLoss if records within the bounds
        are lost and failOnDataLoss is on.
        """
        options = self._options
        with Catalog.open(options.path) as catalog:
            bounds = resolve_bounds(catalog, options)
            check_gaps(catalog, bounds, options)
            return plan_partitions(catalog, bounds, options)

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the records of a partition; see read_slices.

        For a plan without partitions Spark creates one partition itself: None, or an empty InputPartition. It
        has no records.
        """
        slices = partition.slices if isinstance(partition, SlicePartition) else None
        return read_slices(slices, self._options, self._schema)


def plan_partitions(
    catalog: Catalog, bounds: Sequence[Bounds], options: SourceOptions
) -> list[SlicePartition]:
    """Return partitions over these bounds, for batch and stream; empty if there is nothing to read."""
    stored = [
        (each, catalog.stored_ranges(each.topic, each.after, each.until, options.tags))
        for each in bounds
        if each.after < each.until
    ]
    parts = plan_slices(stored, max_bytes=options.max_partition_bytes, min_partitions=options.min_partitions)
    return [SlicePartition(slices, tuple(bounds)) for slices in parts]
