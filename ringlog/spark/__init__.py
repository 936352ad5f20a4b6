"""Spark data source for ringlog: read topics as DataFrames and streams, and write DataFrames to topics.

    import ringlog.spark
    spark = ringlog.spark.session()
    df = ringlog.spark.read(spark, "orders", path="/var/lib/ringlog")

Needs the extra `spark`. The functions import pyspark and pyarrow on first use, because Spark imports this
package during data source discovery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlog.spark.jobs.archive import read_all as read_all
    from ringlog.spark.jvm_jar import jvm_reader as jvm_reader
    from ringlog.spark.sessions import read as read
    from ringlog.spark.sessions import register as register
    from ringlog.spark.sessions import session as session

_FUNCTIONS = {
    "read": "sessions", "register": "sessions", "session": "sessions", "read_all": "jobs.archive",
    "jvm_reader": "jvm_jar",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # A submodule must not share one of these names: its import would replace the function as an attribute.
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'ringlog.spark' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ringlog.spark.{_FUNCTIONS[name]}"), name)
