"""Create a SparkSession for programs without one, register the source, and read topics with one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringlog.spark.errors import OptionError
from ringlog.spark.jvm_jar import reader_jar, with_jar
from ringlog.spark.spark_home import bytecode_spark_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's default, INT96, has no statistics, and a read returns it without a time zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Spark compresses Arrow buffers in pure Java, which is far slower than no compression.
    "spark.sql.execution.arrow.compression.codec": "none",
    "spark.driver.memory": "1g",
}
"""Settings of sessions that this module creates, where Spark's defaults do not fit."""
MASTER = "local[*]"
SERVER = "sc://"
"""Prefix of a Spark Connect server address. `remote="local[2]"` instead starts a server in this process."""


def session(
    app: str = "ringlog",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """Create a Spark session with this source registered.

    The session runs on this host unless `master` names a cluster.
    Spark workers run this Python interpreter (`sys.executable`), unless a Connect server has its own.

    Args:
        app: name of the Spark application.
        master: Spark master URL; default `local[*]`.
        remote: Spark Connect instead: `sc://host:port` of a server that runs on the engine's host and has
            ringlog installed, or `local[2]` to start a server in this process.
        config: Spark settings that extend or override DEFAULTS.

    Returns:
        The session.

    Raises:
        JavaMissing: no Java that Spark can use is installed.
        OptionError: both `master` and `remote` are given.
    """
    if master is not None and remote is not None:
        raise OptionError("set only one of master and remote: a Spark Connect server has its own master")
    from pyspark.sql import SparkSession

    from ringlog.spark.jre import provide_java

    settings = {**DEFAULTS, "spark.sql.shuffle.partitions": str(os.cpu_count() or 1)}
    settings |= {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (config or {}).items()
    }
    if remote is not None and remote.startswith(SERVER):
        # The server's JVM is already running: only settings of the session can be changed.
        own = {name: value for name, value in settings.items() if name.startswith("spark.sql.")}
        settings = own | {name: settings[name] for name in config or {}}
    else:
        java_home = provide_java(os.environ)
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        settings = with_jar(settings, reader_jar(java_home, os.environ))
    named = SparkSession.builder.appName(app)
    builder = named.master(master or MASTER) if remote is None else named.remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with bytecode_spark_home(os.environ, remote or master or MASTER):
        spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make `format("ringlog")` available in a session.

    Spark normally discovers the source without this call. If the data source of any other installed package
    fails on import, Spark discovers no data source at all.
    """
    from ringlog.spark.source import RinglogDataSource

    spark.dataSource.register(RinglogDataSource)


def read(
    spark: SparkSession,
    topics: str | Iterable[str],
    *,
    path: str | os.PathLike[str] | None = None,
    columns: Iterable[str] | str | None = None,
    **options: Any,
) -> DataFrame:
    """Return the records of one or more topics as a DataFrame.

    The DataFrame covers the records that exist when Spark plans it. Call `read` again to see later records.
    Spark's filter pushdown is not supported; use `columns` and the options instead.

    Args:
        spark: session with the source registered.
        topics: one topic name, or several.
        path: data directory of the engine; not needed with the option `cold`.
        columns: names of the columns to read. This is the cheapest way to make a read faster: other columns
            are never decoded.
        **options: source options, in snake case or as in the option table: `min_partitions=8`,
            `startingOffsets={"orders": 17}`, `tags=["a", "b*"]`.

    Returns:
        The records.

    Raises:
        OptionError: an option is unknown or invalid.
    """
    from ringlog.spark.options import as_text, schema_options
    from ringlog.spark.schema import select

    names = [topics] if isinstance(topics, str) else list(topics)
    given = as_text({"subscribe": names, **options, "path": None if path is None else os.fspath(path)})
    # Spark plans in a process without a session, which does not know the parallelism. This process does.
    given.setdefault("minPartitions", str(_parallelism(spark)))
    reader = spark.read.format("ringlog").options(**given)
    if columns is not None:
        wanted = [columns] if isinstance(columns, str) else list(columns)
        reader = reader.schema(select(schema_options(given), wanted))
    return reader.load()


def _parallelism(spark: SparkSession) -> int:
    """Return the number of tasks that run at once, or 1 if the session does not report it (Spark Connect)."""
    from pyspark.errors import PySparkException

    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except (PySparkException, NotImplementedError, AttributeError):
        return 1
