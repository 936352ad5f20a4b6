"""Batch reads of a real engine without a JVM: readers and partitions are pickled as in Spark."""

from __future__ import annotations

import itertools
import json
import time
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

import ringlog
import ringlog.spark.arrow
from ringlog.client.write.fields import NewRecord
from ringlog.errors import TopicNotFound
from ringlog.frame.layout import Column
from ringlog.spark.batch import BatchReader
from ringlog.spark.bounds import gaps_of, resolve_bounds
from ringlog.spark.catalog import Catalog
from ringlog.spark.errors import DataLoss, EngineNotRunning, OptionError, SchemaError
from ringlog.spark.options import source_options
from ringlog.spark.plan import HOT, WAL
from ringlog.spark.schema import arrow_schema, check_schema, record_schema
from ringlog.spark.slice_reader import read_slices
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import batches_by_partition, copied, reader_of, records, seqs, table, write

pytestmark = pytest.mark.slow
N, TAIL = 12_000, 2_500


def at(place, topic="filled"):
    """Return the offsets option of one topic."""
    return json.dumps({topic: place})


@pytest.fixture(scope="module")
def filled(sealing_engine):
    """A topic with N records in segments and TAIL records after them in the log."""
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        write(client, "filled", 1, N, size=50)
        checkpoint(sealing_engine)
        write(client, "filled", N + 1, N + TAIL, frame=7)
    return "filled"


# -- complete reads ----------------------------------------------------------------------------------


def test_every_record_is_read_once_from_segments_and_the_log(sealing_engine, sealing_client, filled):
    """The test compares payloads, keys, tags, epochs and stamps."""
    parts = batches_by_partition(sealing_engine, filled, maxPartitionBytes="256k")
    assert len(parts) > 4
    reader, _ = reader_of(sealing_engine, filled, maxPartitionBytes="256k")
    planned = [each for part in reader.partitions() for each in part.slices]
    assert {each.tier for each in planned} == {HOT, WAL}
    found = pa.Table.from_batches([batch for part in parts for batch in part])
    assert found["seq"].to_pylist() == list(range(1, N + TAIL + 1))
    expected = list(itertools.chain(records(1, N, 50), records(N + 1, N + TAIL)))
    assert found["payload"].to_pylist() == [each.data for each in expected]
    assert found["tag"].to_pylist() == [each.tag for each in expected]
    assert found["key"].to_pylist() == [each.key for each in expected]
    assert set(found["topic"].to_pylist()) == {filled}
    assert set(found["epoch"].to_pylist()) == {sealing_client.topics.state(filled).epoch}
    stamps = found["ts"].cast(pa.int64()).to_numpy()
    assert (stamps[1:] >= stamps[:-1]).all()
    assert abs(stamps[-1] / 1e6 - time.time()) < 3600


def test_partitions_begin_and_end_at_frames(sealing_engine, filled):
    """Together they cover the bounds of the plan without a gap."""
    reader, _ = reader_of(sealing_engine, filled, maxPartitionBytes="100k")
    parts = reader.partitions()
    with Catalog.open(sealing_engine.data_dir) as catalog:
        edges = {each.last_seq for each in catalog.stored_ranges(filled, 0, N)}
    slices = [each for part in parts for each in part.slices]
    sealed = [each for each in slices if each.tier == HOT]
    assert len(sealed) > 5
    assert {each.bounds.until for each in sealed} <= edges
    assert all(each.bytes <= 100 << 10 or len(each.bounds) <= 1_024 for each in sealed)
    (bounds,) = parts[0].bounds
    assert (bounds.after, bounds.until) == (0, N + TAIL)
    assert [each.bounds.after for each in slices[1:]] == [each.bounds.until for each in slices[:-1]]


def test_min_partitions_applies_to_small_topics(sealing_engine, filled):
    for wanted in (2, 5, 8):
        reader, _ = reader_of(sealing_engine, filled, minPartitions=str(wanted))
        assert wanted <= len(reader.partitions()) <= 2 * wanted
    assert len(reader_of(sealing_engine, filled)[0].partitions()) == 1


def test_small_frames_are_merged_into_batches_and_large_ones_are_not(
    sealing_engine, sealing_client, filled, ringlog_topic
):
    """`rowsPerBatch` limits the merged batches."""
    (tiny,) = batches_by_partition(sealing_engine, filled, startingOffsets=at(N + 1))
    assert [batch.num_rows for batch in tiny] == [TAIL]
    topic = ringlog_topic()
    write(sealing_client, topic, 1, 1_950, frame=100)
    (small,) = batches_by_partition(sealing_engine, topic)
    assert [batch.num_rows for batch in small] == [1_950]
    (small,) = batches_by_partition(sealing_engine, topic, rowsPerBatch="500")
    assert [batch.num_rows for batch in small] == [500, 500, 500, 450]
    (large,) = batches_by_partition(sealing_engine, filled, endingOffsets=at(N + 1))
    assert {batch.num_rows for batch in large[:-1]} == {1_024}


def test_incremental_reads_add_up_to_one_full_read(sealing_engine, filled):
    """The bounds of the increments may be anywhere."""
    cuts = [1, 2, 1_000, 1_024, 1_025, 7_777, N, N + 1, N + 8, N + TAIL + 1]
    found = [
        seqs(
            sealing_engine, filled,
            startingOffsets=at(start), endingOffsets=at(stop),
        )
        for start, stop in itertools.pairwise(cuts)
    ]  # fmt: skip
    assert list(map(len, found)) == [stop - start for start, stop in itertools.pairwise(cuts)]
    assert list(itertools.chain(*found)) == list(range(1, N + TAIL + 1))


def test_a_plan_stays_valid_while_records_move_to_segments(sealing_engine, sealing_client, topic):
    """The plan covers the log, and all its records are in segments before the read."""
    write(sealing_client, topic, 1, 5_000, frame=100)
    reader, struct = reader_of(sealing_engine, topic, minPartitions="3", columns="seq payload")
    parts = reader.partitions()
    checkpoint(sealing_engine)
    found = [batch for part in parts for batch in reader.read(copied(part))]
    payloads = pa.Table.from_batches(found, schema=arrow_schema(struct))["payload"].to_pylist()
    assert payloads == [each.data for each in records(1, 5_000)]


def test_the_bounds_of_a_plan_do_not_change(sealing_engine, sealing_client, topic):
    """A DataFrame is a snapshot."""
    write(sealing_client, topic, 1, 10)
    reader, _ = reader_of(sealing_engine, topic, columns="seq")
    parts = reader.partitions()
    write(sealing_client, topic, 11, 30)
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 10
    assert len(seqs(sealing_engine, topic)) == 30


def test_a_topic_without_records_is_a_plan_without_partitions(sealing_engine, sealing_client, topic):
    sealing_client.topics.create(topic)
    reader, _ = reader_of(sealing_engine, topic)
    assert list(reader.partitions()) == []
    assert list(reader.read(None)) == []


def test_several_topics_and_patterns(sealing_engine, sealing_client, ringlog_topic):
    names = [ringlog_topic(f"many-{n}") for n in range(3)]
    for n, name in enumerate(names):
        write(sealing_client, name, 1, 10 * (n + 1))
    found = table(sealing_engine, ",".join(names), columns="topic seq")
    assert found.num_rows == 60
    counts = {row["values"]: row["counts"] for row in found["topic"].value_counts().to_pylist()}
    assert counts == {names[0]: 10, names[1]: 20, names[2]: 30}
    options = {"path": sealing_engine.data_dir, "subscribePattern": names[0][:-1] + "[02]"}
    reader = BatchReader(
        source_options(options, streaming=False), StructType([StructField("seq", LongType())])
    )
    (part,) = reader.partitions()
    assert sum(batch.num_rows for batch in reader.read(part)) == 40
    other = source_options(options | {"startingOffsets": '{"other": 1}'}, streaming=False)
    stranger = BatchReader(other, record_schema(other))
    with pytest.raises(OptionError, match="subscribed topics only"):
        stranger.partitions()


# -- columns --------------------------------------------------------------------------------------------


DRESSED = NewRecord(
    data=b"full", key=b"k", tag="ä", node="n", meta={"a": 1}, headers={"h": b"1", "i": b""},
    event_ts=1_000_001, expires_at=4_000_000_000_000_000, not_before=3, priority=7,
)  # fmt: skip


@pytest.fixture(scope="module")
def dressed(sealing_engine):
    """Records with every field and with none, in large frames, small frames and many tiny ones."""
    kinds = [DRESSED, NewRecord(data=b"")]
    with ringlog.connect(sealing_engine.url, wait=10) as client, client.producer("dressed") as producer:
        producer.send_many(kinds * 400)
        for _ in range(100):
            producer.send_many(kinds)
        producer.send_many([NewRecord(data=b"bare")] * 600)
    return [*(kinds * 500), *([NewRecord(data=b"bare")] * 600)]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_all_columns_have_their_values_in_the_log_and_in_segments(sealing_engine, dressed, is_sealed):
    """The test compares values, nulls and types. A frame without a column gives the default of the column."""
    if is_sealed:
        checkpoint(sealing_engine)
    found = table(sealing_engine, "dressed", includeHeaders="true").to_pylist()
    assert len(found) == len(dressed)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for row, record in zip(found, dressed, strict=True):
        is_full = record is DRESSED
        assert row["payload"] == record.data
        assert [row[name] for name in ("key", "tag", "node")] == ([b"k", "ä", "n"] if is_full else [None] * 3)
        assert row["meta"] == ('{"a":1}' if is_full else None)
        times = [1_000_001, 4_000_000_000_000_000, 3]
        assert [row[name] for name in ("event_ts", "expires_at", "not_before")] == (
            [epoch + timedelta(microseconds=each) for each in times] if is_full else [None] * 3
        )
        assert row["priority"] == (7 if is_full else 0)
        pairs = [{"key": "h", "value": b"1"}, {"key": "i", "value": b""}]
        assert row["headers"] == (pairs if is_full else None)


def test_the_kafka_layout_has_the_columns_of_the_kafka_source(sealing_engine, dressed):
    """The offset is the seq, and the partition is 0."""
    found = table(
        sealing_engine, "dressed", layout="kafka", includeHeaders="true", endingOffsets='{"dressed": 3}'
    )
    assert found.schema.names == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers",
    ]  # fmt: skip
    first, second = found.to_pylist()
    assert (first["key"], first["value"], first["topic"]) == (b"k", b"full", "dressed")
    assert (first["partition"], first["offset"], first["timestampType"]) == (0, 1, 0)
    assert first["headers"] == [{"key": "h", "value": b"1"}, {"key": "i", "value": b""}]
    assert (second["key"], second["value"], second["offset"], second["headers"]) == (None, b"", 2, None)
    assert abs(first["timestamp"].timestamp() - time.time()) < 3600


def test_only_requested_columns_are_decoded(sealing_engine, filled, monkeypatch):
    """Columns may be in any order. For seqs alone, frames are not opened."""
    made = []

    def spy(view, columns, **kwargs):
        made.append(columns)
        return arrays(view, columns, **kwargs)

    arrays = ringlog.spark.arrow.column_arrays
    monkeypatch.setattr(ringlog.spark.arrow, "column_arrays", spy)
    found = table(sealing_engine, filled, columns="tag seq")
    assert found.schema.names == ["tag", "seq"]
    assert set(made) == {1 << Column.TAG}
    made.clear()
    found = table(sealing_engine, filled, columns="seq topic epoch")
    assert found["seq"].to_pylist() == list(range(1, N + TAIL + 1))
    assert made == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([StructField("sequence", LongType())], "no such column"),
        ([StructField("seq", IntegerType())], "expected='bigint'"),
        ([StructField("seq", LongType()), StructField("seq", LongType())], "each once"),
        ([], "at least one column"),
        ([StructField("tag", StringType(), False)], "not null"),
        ([StructField("headers", StringType())], "includeHeaders=true"),
    ],
)
def test_an_invalid_schema_is_refused(fields, words):
    """The schema may contain only columns of the source, each once and with its type."""
    options = source_options({"path": "/d", "subscribe": "t"}, streaming=False)
    with pytest.raises(SchemaError, match=words):
        check_schema(StructType(fields), options)


def test_columns_that_are_never_null_may_be_declared_not_null(sealing_engine, filled):
    options = source_options({"path": sealing_engine.data_dir, "subscribe": filled}, streaming=False)
    struct = StructType([StructField("seq", LongType(), False), StructField("tag", StringType())])
    reader = BatchReader(options, struct)
    batch = next(iter(reader.read(reader.partitions()[0])))
    assert [field.nullable for field in batch.schema] == [False, True]


# -- bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "first", "last"),
    [
        ({}, 1, N + TAIL),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, 1, N + TAIL),
        ({"startingOffsets": '{"filled": -2}', "endingOffsets": '{"filled": -1}'}, 1, N + TAIL),
        ({"startingOffsets": '{"filled": 1000}'}, 1_000, N + TAIL),
        ({"endingOffsets": '{"filled": 1000}'}, 1, 999),
        ({"endingOffsets": '{"filled": 99999999}'}, 1, N + TAIL),
        ({"startingOffsets": at(N + TAIL + 1)}, 1, 0),
        ({"startingOffsets": '{"filled": 500}', "endingOffsets": '{"filled": 400}'}, 1, 0),
    ],
)
def test_starting_offsets_are_inclusive_and_ending_offsets_exclusive(
    sealing_engine, filled, given, first, last
):
    """An ending offset beyond the head means the head."""
    assert seqs(sealing_engine, filled, **given) == list(range(first, last + 1))


def test_an_offset_beyond_the_end_is_refused(sealing_engine, filled):
    with pytest.raises(OptionError, match="exceed the end"):
        seqs(sealing_engine, filled, startingOffsets=at(N + TAIL + 2))


def test_timestamps_select_by_commit_time_and_override_offsets(sealing_engine, sealing_client, topic):
    write(sealing_client, topic, 1, 10)
    time.sleep(0.02)
    between = datetime.now(UTC)
    time.sleep(0.02)
    write(sealing_client, topic, 11, 30)
    iso, millis = between.isoformat(), str(int(between.timestamp() * 1000))
    for text in (iso, millis):
        assert seqs(sealing_engine, topic, startingTimestamp=text) == list(range(11, 31))
        assert seqs(sealing_engine, topic, endingTimestamp=text) == list(range(1, 11))
    assert seqs(
        sealing_engine,
        topic,
        startingOffsetsByTimestamp=at(iso, topic),
        startingOffsets="earliest",
    ) == list(range(11, 31))
    assert seqs(
        sealing_engine, topic, endingOffsetsByTimestamp=at(int(millis), topic), endingOffsets="latest"
    ) == list(range(1, 11))
    later = (between + timedelta(days=1)).isoformat()
    assert seqs(sealing_engine, topic, endingTimestamp=later) == list(range(1, 31))
    with pytest.raises(OptionError, match="Strategy=latest"):
        seqs(sealing_engine, topic, startingTimestamp=later)
    assert not seqs(
        sealing_engine, topic, startingTimestamp=later, startingOffsetsByTimestampStrategy="latest"
    )


# -- tags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("t3", {"t3"}),
        ("t3,t5", {"t3", "t5"}),
        ("t*", {f"t{n}" for n in range(10)}),
        ("x*,t1", {"t1"}),
        ("t", set()),
    ],
)
def test_tags_select_exactly_the_matching_records(sealing_engine, filled, tags, wanted):
    """Untagged records never match, whichever columns are requested."""
    everything = [*records(1, N, 50), *records(N + 1, N + TAIL)]
    expected = [n for n, each in enumerate(everything, 1) if each.tag in wanted]
    assert seqs(sealing_engine, filled, tags=tags) == expected
    assert table(sealing_engine, filled, tags=tags).num_rows == len(expected)


def test_frames_without_the_tag_are_not_read(sealing_engine, sealing_client, topic):
    """The tag index selects the frames of the plan."""
    with sealing_client.producer(topic) as producer:
        for start in range(0, 20_000, 1_000):
            tag = "rare" if start == 9_000 else "common"
            producer.send_many([NewRecord(data=b"x" * 600, tag=tag)] * 1_000)
    checkpoint(sealing_engine)
    reader, _ = reader_of(sealing_engine, topic, tags="rare", columns="seq")
    (part,) = reader.partitions()
    assert sum(each.bytes for each in part.slices) < 4 << 20
    assert seqs(sealing_engine, topic, tags="rare") == list(range(9_001, 10_001))
    reader, _ = reader_of(sealing_engine, topic, columns="seq")
    assert sum(each.bytes for part in reader.partitions() for each in part.slices) > 10 << 20
    assert not reader_of(sealing_engine, topic, tags="none")[0].partitions()


# -- removal and loss -----------------------------------------------------------------------------------


def test_deleted_records_are_omitted_also_after_planning(sealing_engine, sealing_client, topic):
    """A delete also affects a read that has already started."""
    write(sealing_client, topic, 1, 3_000)
    reader, _ = reader_of(sealing_engine, topic, columns="seq")
    (part,) = reader.partitions()
    sealing_client.topics.delete_records(topic, before_seq=101)
    sealing_client.topics.delete_records(topic, match="t3")
    expected = [n for n in range(101, 3_001) if records(n, n)[0].tag != "t3"]
    assert [seq for batch in reader.read(part) for seq in batch["seq"].to_pylist()] == expected
    assert seqs(sealing_engine, topic) == expected
    assert seqs(sealing_engine, topic, startingOffsets=at(1, topic)) == expected


def test_expired_records_are_omitted(sealing_engine, sealing_client, topic):
    gone = int(time.time() * 1e6) + 50_000
    with sealing_client.producer(topic) as producer:
        producer.send_many([NewRecord(data=b"x", expires_at=gone), NewRecord(data=b"y")] * 50)
    time.sleep(0.1)
    assert seqs(sealing_engine, topic) == list(range(2, 101, 2))


def capped(client, topic, records_kept=100):
    client.topics.create(topic, cap_records=records_kept)


def test_evicted_records_fail_the_plan_unless_fail_on_data_loss_is_false(
    sealing_engine, sealing_client, topic
):
    """The driver detects the loss. A start at `earliest` is no gap."""
    capped(sealing_client, topic)
    write(sealing_client, topic, 1, 250, frame=50)
    start = at(20, topic)
    with pytest.raises(DataLoss, match="failOnDataLoss=false") as caught:
        seqs(sealing_engine, topic, startingOffsets=start)
    detail = caught.value.detail
    assert (detail["topic"], detail["gap_from"], detail["gap_to"], detail["reason"]) == (
        topic,
        20,
        150,
        "cap",
    )
    expected = list(range(151, 251))
    assert seqs(sealing_engine, topic, startingOffsets=start, failOnDataLoss="false") == expected
    assert seqs(sealing_engine, topic) == expected
    options = source_options(
        {"path": sealing_engine.data_dir, "subscribe": topic, "startingOffsets": start}, streaming=False
    )
    with Catalog.open(sealing_engine.data_dir) as catalog:
        (bounds,) = resolve_bounds(catalog, options)
        (gap,) = gaps_of(catalog, bounds)
    assert (gap.gap_from, gap.gap_to, gap.reason, gap.missed_estimate) == (20, 150, "cap", 131)


@pytest.mark.parametrize("fails", [True, False])
def test_records_evicted_after_planning_fail_the_task_or_are_reported(
    sealing_engine, sealing_client, topic, fails
):
    """A read never returns fewer records without a report."""
    capped(sealing_client, topic)
    write(sealing_client, topic, 1, 100, frame=50)
    options = source_options(
        {"path": sealing_engine.data_dir, "subscribe": topic, "failOnDataLoss": str(fails)}, streaming=False
    )
    struct = StructType([StructField("seq", LongType())])
    (part,) = BatchReader(options, struct).partitions()
    write(sealing_client, topic, 101, 130, frame=30)
    gaps = []
    reading = read_slices(copied(part).slices, options, struct, gaps.append)
    if fails:
        with pytest.raises(DataLoss, match="cap"):
            list(reading)
        return
    found = [seq for batch in reading for seq in batch["seq"].to_pylist()]
    assert found == list(range(31, 101))
    assert [(each.gap_from, each.gap_to, each.reason) for each in gaps] == [(1, 30, "cap")]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("is_recreated", [True, False])
def test_a_topic_recreated_after_planning_fails_the_task_or_is_reported(
    sealing_engine, sealing_client, topic, fails, is_recreated
):
    """Records of another epoch are never returned for the planned one."""
    write(sealing_client, topic, 1, 20)
    options = source_options(
        {"path": sealing_engine.data_dir, "subscribe": topic, "failOnDataLoss": str(fails)}, streaming=False
    )
    struct = StructType([StructField("seq", LongType())])
    (part,) = BatchReader(options, struct).partitions()
    sealing_client.topics.delete(topic)
    if is_recreated:
        write(sealing_client, topic, 1, 40)
    gaps = []
    reading = read_slices(part.slices, options, struct, gaps.append)
    reason = "recreated" if is_recreated else "deleted"
    if fails:
        with pytest.raises(DataLoss, match=reason):
            list(reading)
        return
    assert list(reading) == []
    assert [(each.gap_from, each.gap_to, each.reason) for each in gaps] == [(1, 20, reason)]
    with Catalog.open(sealing_engine.data_dir) as catalog:
        assert [each.reason for each in gaps_of(catalog, part.bounds[0])] == [reason]


# -- engines ---------------------------------------------------------------------------------------------


def test_an_unknown_topic_is_refused_with_its_name(sealing_engine):
    with pytest.raises(TopicNotFound, match="nowhere"):
        seqs(sealing_engine, "nowhere")


def test_without_an_engine_the_error_contains_the_start_command(tmp_path):
    options = source_options({"path": str(tmp_path), "subscribe": "t"}, streaming=False)
    with pytest.raises(EngineNotRunning, match="ringlog serve --data-dir") as caught:
        BatchReader(options, record_schema(options)).partitions()
    assert caught.value.detail["path"] == str(tmp_path)
    assert caught.value.retriable


def test_the_path_may_be_the_run_directory(sealing_engine, filled):
    options = source_options({"path": sealing_engine.run_dir, "subscribe": filled}, streaming=False)
    reader = BatchReader(options, record_schema(options))
    assert sum(b.num_rows for part in reader.partitions() for b in reader.read(part)) == N + TAIL
    with Catalog.open(sealing_engine.run_dir) as one, Catalog.open(sealing_engine.data_dir) as other:
        assert one.log_id == other.log_id == sealing_engine.info.engine_id
