"""Where Spark looks for the data source "ringlog"; imports nothing else, since discovery pays for it."""

from ringlog.spark.source import RinglogDataSource as DefaultSource

__all__ = ["DefaultSource"]
