"""The JVM reader returns the same rows as the Python reader for any topic, and detects damage itself.

Both readers run in one session on one engine. `reader=python` selects the Python reader.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

import ringlog
from ringlog.client.write.fields import NewRecord
from ringlog.spark import read
from ringlog.spark.clients import close_clients
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import damage, write

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
PLAN = "BatchScan ringlog"
WAIT_S = 200
SEED = 20_261_124


@pytest.fixture(autouse=True)
def is_loaded(spark):
    """Skip the test if the session does not have the jar."""
    if "spark-reader-" not in spark.conf.get("spark.jars", ""):
        pytest.skip("no JDK on this machine: the reader in the JVM could not be compiled")


def both(spark, running, topics, **options):
    """Return the rows of both readers in the order of (topic, seq), and the plan of the JVM reader."""
    frames = [
        read(spark, topics, path=running.data_dir, reader=reader, **options) for reader in ("jvm", "python")
    ]
    order = ["topic", "offset"] if options.get("layout") == "kafka" else ["topic", "seq"]
    found = [[tuple(row) for row in frame.orderBy(*order).collect()] for frame in frames]
    return *found, frames[0]._jdf.queryExecution().executedPlan().toString()


def any_record(chance, n):
    """Return a record with some of the fields, and values of many sizes, including null and empty ones."""

    def maybe(value):
        return value if chance.random() < 0.6 else None

    return NewRecord(
        data=maybe(chance.randbytes(chance.choice([0, 1, 7, 8, 90, 1_500]))),
        key=maybe(b"k%d" % n * chance.randrange(3)),
        tag=maybe(chance.choice(["eu", "us", "", "ünï", "x" * 200])),
        node=maybe(f"n{n % 3}"),
        meta=maybe({"n": n}),
        event_ts=maybe(datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=n)),
        expires_at=maybe(datetime.now(UTC) + timedelta(days=1)),
        not_before=maybe(datetime(2021, 1, 1, tzinfo=UTC)),
        priority=maybe(chance.randrange(256)),
    )


def fill(client, topic, chance, count, *, codec=None):
    """Append frames of 1 to 300 records, some with few fields and some with all."""
    with client.producer(topic, codec=codec) as producer:
        done = 0
        while done < count:
            size = min(chance.choice([1, 2, 30, 300]), count - done)
            producer.send_many([any_record(chance, done + i) for i in range(size)])
            producer.flush()
            done += size


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_both_readers_agree_on_any_records_in_segments_and_in_the_log(
    spark, sealing_engine, sealing_client, codec
):
    """The test covers all columns, values of every size, and compressed and plain frames."""
    chance, topic = random.Random(SEED), f"any-{codec}"
    fill(sealing_client, topic, chance, 1_500, codec=codec)
    checkpoint(sealing_engine)
    fill(sealing_client, topic, chance, 500, codec=codec)
    ours, pythons, plan = both(spark, sealing_engine, topic)
    assert len(ours) == 2_000
    assert ours == pythons
    assert PLAN in plan
    kafkas = both(spark, sealing_engine, topic, layout="kafka")
    assert kafkas[0] == kafkas[1]


def test_frames_of_any_size_pass_the_checksum(spark, sealing_engine, sealing_client):
    """Bodies from 8 bytes to 3 MB use different code paths of the hash. A wrong checksum fails the read."""
    with sealing_client.producer("sizes") as producer:
        for size in [*range(0, 1_300, 4), 2_047, 2_048, 4_096, 70_000, 1_000_000]:
            producer.send(b"s" * size)
            producer.flush()
        producer.send_many([b"l" * 1_000_000] * 3)  # one frame larger than a read buffer
    ours, pythons, _ = both(spark, sealing_engine, "sizes")
    assert ours == pythons
    checkpoint(sealing_engine)
    assert both(spark, sealing_engine, "sizes")[0] == pythons


def test_bounds_deletes_and_expiry_hide_the_same_records(spark, sealing_engine, sealing_client):
    """Bounds lie in the middle of frames, one tag is deleted, and one record has expired."""
    client = sealing_client
    write(client, "part", 1, 5_000)
    checkpoint(sealing_engine)
    write(client, "part", 5_001, 5_300, frame=70)
    client.append("part", b"gone soon", ttl_ms=1)
    client.append("part", b"stays")
    client.topics.delete_records("part", match="t5")
    client.topics.delete_records("part", before_seq=700)
    wait_until(lambda: len(list(client.reader("part", start=5_302))) == 1, 10, "the record has expired")
    whole = both(spark, sealing_engine, "part")
    assert whole[0] == whole[1]
    some = both(
        spark, sealing_engine, "part", starting_offsets={"part": 1_500}, ending_offsets={"part": 5_200}
    )
    assert some[0] == some[1]
    assert (some[0][0][2], some[0][-1][2]) == (1_500, 5_199)


def test_both_readers_agree_on_copies_and_volatile_topics(spark):
    """A routed frame contains the records of several topics once. Records of volatile topics are not in the
    data directory."""
    destinations = ["routed.a", "routed.b"]
    with engine(wal={"shards": 1}, delivery={"schedulers": 1}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            for name in destinations:
                client.routers.create(f"to-{name}", "routed.from", name)
            client.topics.create("fleeting", durability="ephemeral")
            for n in range(20):
                client.append_many("routed.from", [b"%d" % n, b"%d'" % n])
                client.append("fleeting", b"%d" % n, durability="ephemeral")
            for name in destinations:
                client.routers.settle(f"to-{name}")
            assert [client.topics.state(name).count for name in destinations] == [40, 40]
        ours, pythons, _ = both(spark, running, [*destinations, "fleeting"])
        assert len(ours) == 100
        assert ours == pythons
    close_clients()


def test_only_columns_that_a_query_uses_are_decoded(spark, sealing_engine, sealing_client):
    """Spark prunes the columns. All scans of one load share its plan, so the load stays a snapshot."""
    write(sealing_client, "narrow", 1, 100)
    frame = read(spark, "narrow", path=sealing_engine.data_dir)
    plan = frame.groupBy("tag").count()._jdf.queryExecution().executedPlan().toString()
    assert "BatchScan ringlog[tag#" in plan
    assert "payload" not in plan
    assert frame.count() == 100
    write(sealing_client, "narrow", 101, 150)
    assert frame.select("seq").count() == 100
    assert frame.agg(f.max("payload"), f.max("seq")).first()[1] == 100
    assert read(spark, "narrow", path=sealing_engine.data_dir).count() == 150


def test_values_stay_valid_after_their_batch_memory_is_reused(spark, sealing_engine, sealing_client):
    """The memory of a batch is reused for the next one, so aggregates, windows, sorts and joins must copy."""
    write(sealing_client, "kept", 1, 20_000, size=40)
    checkpoint(sealing_engine)
    words = [
        "select min(tag), max(tag), max(payload), min(payload), max(key), first(tag), last(payload) from {}",
        "select tag, min(payload), max(key), first(node), count(distinct key) from {} group by tag "
        "order by tag",
        "select seq, tag, lag(payload, 3000) over (order by seq) p, max(tag) over (order by seq) m from {} "
        "order by seq desc limit 50",
        "select collect_set(tag), array_sort(collect_list(key))[9000] from {}",
        "select a.seq, b.tag, b.payload from {0} a join {0} b on a.seq = b.seq + 1500 order by 1 limit 99",
        "select payload, tag from {} order by payload desc, seq limit 20",
        "select max_by(payload, seq), min_by(tag, seq), max(struct(tag, seq, key)) from {}",
    ]
    for name in ("jvm", "python"):
        read(spark, "kept", path=sealing_engine.data_dir, reader=name).createOrReplaceTempView(f"by_{name}")
    for text in words:
        ours, pythons = (spark.sql(text.format(f"by_{name}")).collect() for name in ("jvm", "python"))
        assert [sorted(row[0]) if "collect_set" in text else row for row in ours] == [
            sorted(row[0]) if "collect_set" in text else row for row in pythons
        ], text
    for name in ("jvm", "python"):
        spark.catalog.dropTempView(f"by_{name}")


def test_unsupported_reads_use_the_python_reader(spark, sealing_engine, sealing_client):
    """Headers, tags and views are read in Python, and Python checks the options."""
    client = sealing_client
    client.append("other", b"v", headers={"a": b"1"}, tag="x")
    client.append("other", b"w")
    path = sealing_engine.data_dir
    rows = read(spark, "other", path=path, includeHeaders=True).orderBy("seq").collect()
    assert [None if row.headers is None else row.headers[0].key for row in rows] == ["a", None]
    for text in ("1", "yes", " TRUE "):
        dressed = read(spark, "other", path=path, includeHeaders=text)
        assert dressed.where("headers is not null").count() == 1, text
    assert read(spark, "other", path=path, tags=["x"]).count() == 1
    assert read(spark, "other", path=path, view="topics").count() == 1
    assert read(spark, "other", path=path, view=" Topics ").count() == 1
    with pytest.raises(Exception, match="reader must be one of jvm, python"):
        read(spark, "other", path=path, reader="c").count()
    with pytest.raises(Exception, match="no such column"):
        spark.read.format("ringlog").schema("seqs long").options(path=path, subscribe="other").load().count()
    with pytest.raises(Exception, match="wrong column type"):
        spark.read.format("ringlog").schema("seq int").options(path=path, subscribe="other").load().count()


@pytest.mark.parametrize(
    ("options", "is_in_jvm"),
    [
        ({}, True), ({"includeHeaders": "0"}, True), ({"includeHeaders": " No "}, True),
        ({"view": " Records "}, True), ({"reader": " JVM "}, True), ({"reader": " Python "}, False),
    ],
)  # fmt: skip
def test_an_option_selects_the_same_reader_in_every_spelling(
    spark, sealing_engine, sealing_client, topic, options, is_in_jvm
):
    """Python accepts any case, spaces around a word, and three words for each boolean."""
    write(sealing_client, topic, 1, 3)
    rows, pythons, _ = both(spark, sealing_engine, topic)
    assert rows == pythons
    frame = read(spark, topic, path=sealing_engine.data_dir, **options)
    assert [tuple(row) for row in frame.orderBy("seq").collect()] == pythons
    # Only the reader in the JVM decodes the columns that a query uses, so only its plan names them.
    plan = frame.select("seq")._jdf.queryExecution().executedPlan().toString()
    assert ("BatchScan ringlog[seq#" in plan) == is_in_jvm


def test_a_stream_reads_with_the_jvm_reader_and_keeps_limits_and_offsets(
    spark, sealing_engine, sealing_client, tmp_path
):
    """Python plans the stream; only the tasks read in the JVM."""
    write(sealing_client, "flow", 1, 3_000)
    checkpoint(sealing_engine)
    write(sealing_client, "flow", 3_001, 3_100, frame=9)

    def run():
        frame = (
            spark.readStream.format("ringlog")
            .options(path=sealing_engine.data_dir, subscribe="flow", startingOffsets="earliest")
            .option("maxOffsetsPerTrigger", 1_000)
            .load()
        )
        query = (
            frame.writeStream.format("parquet")
            .options(path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_S)
        return query

    first = run()
    sizes = [each.numInputRows for each in first.recentProgress if each.numInputRows]
    assert (sum(sizes), max(sizes)) == (3_100, 1_000)
    write(sealing_client, "flow", 3_101, 3_150)
    assert sum(each.numInputRows for each in run().recentProgress) == 50
    out = spark.read.parquet(str(tmp_path / "out"))
    whole = read(spark, "flow", path=sealing_engine.data_dir, reader="python")
    assert out.count() == 3_150
    assert whole.exceptAll(out).count() == 0


def test_errors_of_the_python_planner_reach_the_user(spark, sealing_engine, sealing_client, tmp_path):
    """Spark shows the source's own error text."""

    def run():
        frame = spark.readStream.format("ringlog").options(
            path=sealing_engine.data_dir, subscribe="anew", startingOffsets="earliest"
        )
        query = (
            frame.load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_S)

    write(sealing_client, "anew", 1, 10)
    run()
    sealing_client.topics.delete("anew")
    write(sealing_client, "anew", 1, 3)
    with pytest.raises(StreamingQueryException, match="failOnDataLoss"):
        run()


def test_the_jvm_reader_detects_damage(spark):
    """No checksum is verified before the JVM decodes the columns."""
    with engine(wal={"shards": 1}, storage={"enabled": True}) as hurt:
        with ringlog.connect(hurt.url, wait=10) as client:
            write(client, "t", 1, 10_000, size=50)
        checkpoint(hurt)
        first, last = damage(hurt, 5_000, 10_000)
        with pytest.raises(
            Exception, match="CorruptData: stored frames are damaged: body does not match its checksum"
        ) as caught:
            read(spark, "t", path=hurt.data_dir, failOnDataLoss=False).count()
        assert f"topic=t, first_seq={first}, last_seq={last}, file=" in str(caught.value)
        left = read(spark, "t", path=hurt.data_dir, onCorrupt="quarantine")
        assert left.count() == 10_000 - (last - first + 1)
    close_clients()
