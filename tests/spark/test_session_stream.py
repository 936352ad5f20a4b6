"""Streams in a real session: Spark's own sinks, triggers, checkpoints and progress."""

from __future__ import annotations

import json

import pytest
from pyspark.errors import StreamingQueryException

from ringlog.spark import read
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import write

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
WAIT_S = 200


def stream(spark, running, topics, **options):
    given = {"path": running.data_dir, "subscribe": topics, "startingOffsets": "earliest", **options}
    return spark.readStream.format("ringlog").options(**given)


def finish(writer, directory):
    """Run the available records with this checkpoint. Return the ended query."""
    query = writer.option("checkpointLocation", str(directory)).trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S), "it ends by itself"
    return query


@pytest.fixture(scope="module")
def filled(sealing_engine):
    """An engine with two topics, in segments and in the log."""
    import ringlog

    with ringlog.connect(sealing_engine.url, wait=10) as client:
        write(client, "live-a", 1, 3_000)
        checkpoint(sealing_engine)
        write(client, "live-a", 3_001, 4_000)
        write(client, "live-b", 1, 500)
    return sealing_engine


def test_a_stream_into_parquet_has_every_record_once_over_two_runs(spark, filled, sealing_client, tmp_path):
    """The query uses limits and availableNow, and continues from its checkpoint."""
    frame = stream(spark, filled, "live-a,live-b", maxOffsetsPerTrigger="2000").load()
    writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    first = finish(writer, tmp_path / "checkpoint")
    assert sum(each.numInputRows for each in first.recentProgress) == 4_500
    assert max(each.numInputRows for each in first.recentProgress) <= 2_000
    source = first.lastProgress.sources[0]
    assert json.loads(source.latestOffset)["topics"] == json.loads(source.endOffset)["topics"]
    write(sealing_client, "live-b", 501, 510)
    second = finish(writer, tmp_path / "checkpoint")
    assert sum(each.numInputRows for each in second.recentProgress) == 10
    out = spark.read.parquet(str(tmp_path / "out"))
    whole = read(spark, ["live-a", "live-b"], path=filled.data_dir)
    assert out.count() == 4_510
    assert out.select("topic", "epoch", "seq").distinct().count() == 4_510
    assert whole.exceptAll(out).count() == 0


def test_a_running_stream_shows_new_records_and_new_topics_in_a_memory_sink(
    spark, filled, sealing_client, tmp_path
):
    """The trigger runs continuously."""
    frame = (
        spark.readStream.format("ringlog")
        .options(path=filled.data_dir, subscribePattern="fresh-.*", startingOffsets="latest")
        .schema("topic string, seq long")
        .load()
    )
    query = frame.writeStream.format("memory").queryName("fresh").start()
    try:
        query.processAllAvailable()
        write(sealing_client, "fresh-1", 1, 20)
        query.processAllAvailable()
        write(sealing_client, "fresh-1", 21, 25)
        write(sealing_client, "fresh-2", 1, 3)
        query.processAllAvailable()
        query.processAllAvailable()
        rows = sorted(map(tuple, spark.sql("select topic, seq from fresh").collect()))
    finally:
        query.stop()
    assert rows == [*[("fresh-1", n) for n in range(1, 26)], *[("fresh-2", n) for n in range(1, 4)]]


def test_the_once_trigger_ignores_limits_and_others_keep_the_byte_limit(spark, filled, tmp_path):
    """The once trigger reads everything in one batch."""
    frame = stream(spark, filled, "live-a", maxBytesPerTrigger="20k").schema("seq long").load()
    writer = frame.writeStream.format("noop")
    once = writer.option("checkpointLocation", str(tmp_path / "once")).trigger(once=True).start()
    assert once.awaitTermination(WAIT_S)
    assert [each.numInputRows for each in once.recentProgress] == [4_000]
    limited = finish(writer, tmp_path / "limited")
    sizes = [each.numInputRows for each in limited.recentProgress if each.numInputRows]
    assert sum(sizes) == 4_000
    assert len(sizes) > 1


def test_a_foreign_checkpoint_and_lost_records_stop_the_query_with_the_reason(
    spark, filled, sealing_client, tmp_path
):
    """The user sees the error text in Spark's exception."""
    write(sealing_client, "doomed", 1, 10)
    frame = stream(spark, filled, "doomed").schema("seq long").load()
    finish(frame.writeStream.format("noop"), tmp_path / "c")
    sealing_client.topics.delete("doomed")
    write(sealing_client, "doomed", 1, 3)
    with pytest.raises(StreamingQueryException, match="failOnDataLoss"):
        finish(frame.writeStream.format("noop"), tmp_path / "c")
    last = max((tmp_path / "c" / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    head, meta, offset = last.read_text().splitlines()
    foreign = json.dumps(json.loads(offset) | {"log": "f" * 32})
    last.write_text("\n".join([head, meta, foreign]))
    (last.parent / f".{last.name}.crc").unlink()
    with pytest.raises(StreamingQueryException, match="another data directory"):
        finish(frame.writeStream.format("noop"), tmp_path / "c")
