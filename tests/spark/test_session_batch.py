"""Batch reads in Spark: one local session on a real engine."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

import ringlog
from ringlog.spark import read
from ringlog.spark.batch import BatchReader
from ringlog.spark.errors import OptionError, SchemaError
from ringlog.spark.option_values import TopicOffsets
from ringlog.spark.options import SourceOptions
from ringlog.spark.schema import record_schema
from tests.spark.leaky import LeakySource
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import write

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
N, TAIL = 4_000, 100
LEAKS = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def topic(sealing_engine):
    """A topic with payloads 1 to N + TAIL, most of them in a segment."""
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        write(client, "session", 1, N)
        checkpoint(sealing_engine)
        write(client, "session", N + 1, N + TAIL, frame=9)
    return "session"


@pytest.fixture
def frame(spark, sealing_engine, topic):
    """A new DataFrame of the whole topic."""
    return read(spark, topic, path=sealing_engine.data_dir)


def test_all_records_arrive_with_their_schema(frame, topic, sealing_client):
    """The test checks the values of every column in the JVM."""
    assertSchemaEqual(frame.schema, record_schema(SourceOptions(path="", starting=TopicOffsets(-2))))
    assert frame.count() == N + TAIL
    row = frame.filter("seq = 17").collect()[0]
    epoch = sealing_client.topics.state(topic).epoch
    assert (row.topic, row.epoch, row.payload, row.key, row.tag, row.node) == (
        topic, epoch, b"17", b"k17", "t7", None,
    )  # fmt: skip
    assert abs(row.ts.timestamp() - datetime.now(UTC).timestamp()) < 3600
    assert (row.priority, row.event_ts, row.expires_at, row.meta) == (0, None, None, None)
    # The sums are computed in the JVM: each seq counts once.
    total = frame.selectExpr(
        "sum(cast(string(payload) as long))", "sum(seq)", "count(distinct seq)"
    ).collect()[0]
    assert tuple(total) == ((N + TAIL) * (N + TAIL + 1) // 2,) * 2 + (N + TAIL,)


def test_a_filter_never_leaks_into_another_scan(spark, frame):
    """The pushdown setting is on. A source that accepts filters gives wrong rows under it, which the control
    shows."""
    wanted = {"low": "seq <= 10", "high": f"seq > {N + TAIL - 20}"}
    spark.dataSource.register(LeakySource)
    try:
        spark.conf.set(LEAKS, "true")
        leaky = spark.read.format("leaky").load()
        leaked = (leaky.filter("i < 10").union(leaky.filter("i >= 80")).count(), leaky.count())
        ours = frame.filter(wanted["low"]).union(frame.filter(wanted["high"])).count()
        assert (ours, frame.count()) == (30, N + TAIL)
    finally:
        spark.conf.unset(LEAKS)
    assert leaked != (30, 100), "Spark keeps a plan for each scan now: SK-6 may be looked at again"
    assert "pushFilters" not in vars(BatchReader)


def test_read_accepts_columns_options_and_keywords(spark, sealing_engine, topic):
    """ringlog.spark.read converts keywords into options."""
    path = sealing_engine.data_dir
    found = read(
        spark, [topic], path=path, columns=["tag", "seq"], startingOffsets={topic: 11},
        ending_offsets={topic: 21}, tags=["t5", "t6"],
    )  # fmt: skip
    expected = spark.createDataFrame([("t5", 15), ("t6", 16)], "tag string, seq long")
    assertDataFrameEqual(found, expected)
    with pytest.raises(SchemaError, match="no such column"):
        read(spark, topic, path=path, columns="seqs")
    with pytest.raises(OptionError, match="both spellings"):
        read(spark, topic, path=path, min_partitions=1, minPartitions=2)


def test_the_kafka_layout_and_headers_work_in_the_jvm(spark, sealing_engine, topic):
    """A record without headers has null in the column."""
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        client.append("headers", b"v", headers={"a": b"1"}, key=b"k")
        client.append("headers", b"w")
    found = read(spark, "headers", path=sealing_engine.data_dir, layout="kafka", includeHeaders=True)
    rows = found.orderBy("offset").collect()
    assert [(row.key, bytes(row.value), row.partition, row.offset) for row in rows] == [
        (b"k", b"v", 0, 1), (None, b"w", 0, 2),
    ]  # fmt: skip
    assert [(pair.key, bytes(pair.value)) for pair in rows[0].headers] == [("a", b"1")]
    assert rows[1].headers is None


def test_sql_statements_and_views_read_a_topic(spark, sealing_engine, topic):
    """Some statements drop the option `path`, so `root` is an alias of it."""
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW ours USING ringlog "
        f"OPTIONS (root '{sealing_engine.data_dir}', subscribe '{topic}')"
    )
    assert spark.sql("SELECT count(*) c, max(seq) m FROM ours").collect() == [(N + TAIL, N + TAIL)]
    spark.catalog.dropTempView("ours")


def test_a_frame_is_a_snapshot(spark, sealing_engine):
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        write(client, "snapshot", 1, 10)
        found = read(spark, "snapshot", path=sealing_engine.data_dir, columns="seq")
        assert found.count() == 10
        write(client, "snapshot", 11, 15)
        assert found.count() == 10
        assert read(spark, "snapshot", path=sealing_engine.data_dir, columns="seq").count() == 15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"subscrbe": "t"}, "did you mean subscribe"),
        ({"startingOffsets": "latest"}, "startingOffsets must be one of earliest"),
        ({"path": "/nowhere"}, "ringlog serve --data-dir"),
        ({"startingOffsets": json.dumps({"session": 10**9})}, "exceed the end"),
    ],
)
def test_invalid_options_appear_in_sparks_error(spark, sealing_engine, topic, change, words):
    options = {"path": sealing_engine.data_dir, "subscribe": topic} | change
    with pytest.raises((AnalysisException, PySparkException)) as caught:
        spark.read.format("ringlog").options(**options).load().count()
    assert words in str(caught.value)
