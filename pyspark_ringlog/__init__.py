"""Entry point for Spark's discovery of the data source "ringlog".

Imports nothing else, to keep discovery cheap.
"""

from ringlog.spark.source import RinglogDataSource as DefaultSource

__all__ = ["DefaultSource"]
