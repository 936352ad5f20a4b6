"""ringlog as a Spark data source: read topics as DataFrames and streams, write DataFrames into topics.

    import ringlog.spark
    spark = ringlog.spark.session()
    df = ringlog.spark.read(spark, "orders", path="/var/lib/ringlog")

Needs the extra `spark`. Nothing heavy is imported before it is used, so that Spark's discovery stays cheap.
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
    # No submodule may have one of these names: importing it would put it in the function's place.
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'ringlog.spark' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ringlog.spark.{_FUNCTIONS[name]}"), name)
