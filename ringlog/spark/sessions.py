"""Sessions for programs that bring no own, and the two calls that make reading short."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringlog.spark.errors import OptionError
from ringlog.spark.jvm_jar import reader_jar, with_jar
from ringlog.spark.spark_home import light_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    # INT96, Spark's default, has no statistics and comes back without a zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Spark compresses Arrow buffers in pure Java: far slower than not at all.
    "spark.sql.execution.arrow.compression.codec": "none",
    "spark.driver.memory": "1g",
}
"""Settings of our sessions where Spark's own defaults do not fit (SK-5)."""
MASTER = "local[*]"
SERVER = "sc://"
"""What an address of Connect begins with; `remote="local[2]"` starts a server within this process."""


def session(
    app: str = "ringlog",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A session with this source registered, on this host unless `master` says otherwise.

    `remote` makes it a session of Spark Connect: of the server at `sc://host:port`, which runs on the log's
    host and has ringlog installed, or of one that is started here (`local[2]`). `config` adds settings or
    overrides DEFAULTS. Workers run this very interpreter (SK-3), unless a server has its own. Raises
    JavaMissing where there is no Java that Spark can use, OptionError for a master beside a remote.
    """
    if master is not None and remote is not None:
        raise OptionError(f"either master={master!r} or remote={remote!r}: a server brings its own master")
    from pyspark.sql import SparkSession

    from ringlog.spark.jre import provide_java

    settings = {**DEFAULTS, "spark.sql.shuffle.partitions": str(os.cpu_count() or 1)}
    settings |= {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (config or {}).items()
    }
    if remote is not None and remote.startswith(SERVER):
        # The JVM is another's, and runs already: only what belongs to a session is ours to say.
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
    with light_home(os.environ, remote or master or MASTER):
        spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make `format("ringlog")` known to a session.

    Spark finds it by itself, unless another package's data source fails on import: then it finds none.
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
    """Records of topics as a DataFrame: the topics as they are now; read again for what comes later.

    `topics` is a name, or several; `path` the data directory, not needed beside `cold`. `columns` chooses
    columns by name, which is the cheapest way to make a read faster: the others are never made. Further
    options by their names, with underscores or as in the option table: `min_partitions=8`,
    `startingOffsets={"orders": 17}`, `tags=["a", "b*"]`. What Spark's own pushdown would do is done by these.
    Raises OptionError for what is unknown.
    """
    from ringlog.spark.options import as_text, schema_options
    from ringlog.spark.schema import select

    names = [topics] if isinstance(topics, str) else list(topics)
    given = as_text({"subscribe": names, **options, "path": None if path is None else os.fspath(path)})
    # The process that plans has no session and cannot see how much can run at once; here we can.
    given.setdefault("minPartitions", str(_parallelism(spark)))
    reader = spark.read.format("ringlog").options(**given)
    if columns is not None:
        wanted = [columns] if isinstance(columns, str) else list(columns)
        reader = reader.schema(select(schema_options(given), wanted))
    return reader.load()


def _parallelism(spark: SparkSession) -> int:
    """Tasks that run at once; 1 where the session does not say, as with Connect."""
    from pyspark.errors import PySparkException

    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except (PySparkException, NotImplementedError, AttributeError):
        return 1
