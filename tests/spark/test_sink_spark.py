"""The sink in a real Spark: batch writes, streams, and commits that die in Spark's own processes."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.errors import PySparkException

from tests.spark.crashing_source import CrashingDataSource

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(240)]
ROWS = 3_000
PER_BATCH = 1_000


def found(client, topic) -> Counter[bytes]:
    """Return how often each payload is in the topic."""
    counts: Counter[bytes] = Counter()
    for record in client.reader(topic, follow=False):
        counts[bytes(record.data)] += 1
    return counts


def test_a_dataframe_is_appended_once_for_each_version(spark, client, ringlog_engine, ringlog_topic):
    """Topics come from a column, and refused options and columns reach the user as Spark errors."""
    topics = [ringlog_topic("a"), ringlog_topic("b")]
    rows = spark.range(ROWS).selectExpr(
        f"if(id % 2 = 0, '{topics[0]}', '{topics[1]}') topic", "cast(id as string) value", "'some' tag",
        "timestamp_micros(id + 1) event_ts", "cast(id % 10 as short) priority",
        "array(named_struct('key', 'h', 'value', cast('v' as binary))) headers",
    )  # fmt: skip
    write = rows.write.format("ringlog").mode("append").option("path", ringlog_engine.data_dir)
    with pytest.raises(PySparkException, match="createTopics"):
        write.save()
    named = write.option("createTopics", "true").option("txnAppId", topics[0]).option("durability", "fsync")
    for version in ("1", "1", "0"):
        named.option("txnVersion", version).save()
    assert sum(client.topics.state(topic).count for topic in topics) == ROWS
    record = next(iter(client.reader(topics[1], follow=False)))
    assert (record.data, record.tag, record.event_ts, record.priority) == (b"1", "some", 2, 1)
    assert dict(record.headers) == {"h": b"v"}
    with pytest.raises(PySparkException, match="append"):
        write.mode("overwrite").save()
    with pytest.raises(PySparkException, match="assigns"):
        rows.selectExpr("*", "1L seq").write.format("ringlog").mode("append").option(
            "path", ringlog_engine.data_dir
        ).save()


@pytest.mark.parametrize(
    ("point", "repartition"),
    [
        ("sink_mid_append:3:kill", 5),
        pytest.param("sink_before_plan:1:kill", 3, marks=pytest.mark.night),
        pytest.param("sink_after_append:1:raise", 2, marks=pytest.mark.night),
    ],
)
def test_a_stream_whose_commit_dies_continues_exactly_once(
    spark, client, ringlog_engine, ringlog_topic, tmp_path, point, repartition
):
    """Spark aborts and the query fails. Its restart has other partitions and a shuffle."""
    source, target = ringlog_topic("source"), ringlog_topic("target")
    client.topics.create(target)
    with client.producer(source) as producer:
        for start in range(0, ROWS, 500):
            producer.send_many([b"%d" % i for i in range(start, start + 500)])
    spark.dataSource.register(CrashingDataSource)
    armed = tmp_path / "armed"
    armed.touch()

    def run(parts):
        stream = (
            spark.readStream.format("ringlog").schema("payload binary")
            .option("path", ringlog_engine.data_dir)
            .option("subscribe", source).option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", PER_BATCH).load()
        )  # fmt: skip
        dealt = stream if parts is None else stream.repartition(parts, "payload")
        query = (
            dealt.writeStream.format("ringlog-crashing").option("path", ringlog_engine.data_dir)
            .option("topic", target).option("maxFrameRecords", "100").option("stopPoints", point)
            .option("armed", str(armed)).option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            query.awaitTermination(200)
        finally:
            query.stop()

    with pytest.raises(PySparkException):
        run(None)
    assert not armed.exists()
    run(repartition)
    counts = found(client, target)
    assert counts == Counter(b"%d" % i for i in range(ROWS))
