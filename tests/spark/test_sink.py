"""The sink without a JVM: rows to frames, staging, plan and commit, on a real engine."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

import ringlog
from ringlog import stop_points
from ringlog.cli.app import run as run_command
from ringlog.cli.outcome import CliExit
from ringlog.clock import SystemClock
from ringlog.errors import (
    CorruptData,
    DiskError,
    InvalidRequest,
    InvariantViolation,
    NotReady,
    PayloadTooLarge,
    RecordTooLarge,
    TopicFull,
    TopicNotFound,
)
from ringlog.frame import open_frame
from ringlog.limits import FRAME_BYTES_MAX
from ringlog.placement import home_shard
from ringlog.spark import commit as committing
from ringlog.spark import sink, staging
from ringlog.spark.clients import close_clients
from ringlog.spark.commit import WriterKey, producer_of
from ringlog.spark.errors import OptionError, SchemaError, StagingLost
from ringlog.spark.options import sink_options
from ringlog.spark.rows import FrameMaker, SinkLimits, check_columns, frame_cuts
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.faulty_disk import DiskFault, FaultyDisk
from ringlog.testing.real_engine import engine
from tests.spark.crashes import CHANGES, IDS, NEXT_IDS, crash_at, power_cut_at
from tests.support.engines import fail_shard
from tests.support.sink_world import DEALS, WIDE, World, deal, rows
from tests.support.stops import fails_at

PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
STEP = 8
"""Step between the cases that run here; `python -m tests.spark.crashes` runs all."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def client(ringlog_engine):
    with ringlog.connect(ringlog_engine.url, wait=10) as connected:
        yield connected
    close_clients()


@pytest.fixture
def new_world(client, ringlog_engine, tmp_path, ringlog_topic):
    """Return a function that creates worlds, each with its own query and topics."""

    def make(*, create=True, disk=None, directory=None, width=1, **options) -> World:
        number = next(_numbers)
        topics = tuple(ringlog_topic(f"{name}{number}") for name in ("a", "b"))
        raw = {"path": ringlog_engine.data_dir, "stagingDir": str(tmp_path), "maxFrameRecords": "7"} | options
        if create:
            for topic in topics:
                client.topics.create(topic)
        key = WriterKey(f"query/{number}-{tmp_path}")
        return World(client, sink_options(raw), key, topics, directory or str(tmp_path), disk, width)

    return make


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    stop_points.configure("")


def schema(*names_and_types) -> StructType:
    return StructType([StructField(name, kind) for name, kind in names_and_types])


# -- columns ----------------------------------------------------------------------------------------------


def options(**raw):
    return sink_options({"path": "/d", "topic": "t"} | raw)


@pytest.mark.parametrize("kind", [StringType(), BinaryType()])
@pytest.mark.parametrize("name", ["payload", "value"])
def test_rows_need_exactly_one_payload_column(name, kind):
    """The column is named `payload` or `value`."""
    check_columns(schema((name, kind)), options())
    with pytest.raises(SchemaError):
        check_columns(schema(("payload", kind), ("value", kind)), options())
    with pytest.raises(SchemaError):
        check_columns(schema(("tag", StringType())), options())


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("seq", LongType(), "drop"), ("ts", TimestampType(), "drop"), ("epoch", LongType(), "drop"),
        ("offset", LongType(), "drop"), ("ttl_ms", LongType(), "expires_at"), ("tags", StringType(), "tag"),
        ("partition", IntegerType(), "drop"), ("timestamp", TimestampType(), "event_ts"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_written_is_refused_with_a_remedy(name, kind, hint):
    """The engine assigns seq, ts and epoch, so the hint is to drop these columns."""
    with pytest.raises(SchemaError) as caught:
        check_columns(schema(("value", BinaryType()), (name, kind)), options())
    assert caught.value.detail["column"] == name
    assert hint in str(caught.value.detail["hint"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tag", BinaryType()), ("event_ts", TimestampNTZType()), ("event_ts", LongType()),
        ("priority", DoubleType()), ("headers", ArrayType(StringType())), ("key", LongType()),
        ("headers", MapType(StringType(), StringType())), ("topic", BinaryType()),
    ],
)  # fmt: skip
def test_a_column_of_another_type_is_refused(name, kind):
    with pytest.raises(SchemaError, match="wrong column type"):
        check_columns(schema(("value", BinaryType()), (name, kind)), options())


def test_rows_need_a_topic_column_or_option():
    with pytest.raises(SchemaError, match="topic"):
        check_columns(schema(("value", BinaryType())), sink_options({"path": "/d"}))
    check_columns(schema(("value", BinaryType()), ("topic", StringType())), sink_options({"path": "/d"}))


@pytest.mark.parametrize("kind", [sink.BatchWriter, sink.StreamWriter])
def test_overwriting_a_log_is_refused(kind):
    """The only save mode is append."""
    with pytest.raises(OptionError, match="append"):
        kind(options(createTopics="true"), schema(("value", BinaryType())), overwrite=True)


# -- cutting and encoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "records", "most", "cuts"),
    [
        ([1] * 10, 4, 100, [4, 8, 10]), ([5, 5, 5], 10, 10, [2, 3]), ([50, 1, 50], 10, 10, [1, 2, 3]),
        ([3], 1, 1, [1]), ([4, 4, 4, 4], 2, 8, [2, 4]),
    ],
)  # fmt: skip
def test_frames_are_limited_by_records_and_by_bytes(sizes, records, most, cuts):
    assert frame_cuts(np.array(sizes, dtype=np.int64), records, most) == cuts


def test_frames_collect_rows_of_several_batches_in_order():
    maker = FrameMaker(options(topic="t", maxFrameRecords="100"))
    one = pa.RecordBatch.from_arrays([pa.array([b"%d" % i for i in range(30)], pa.binary())], names=["value"])
    found = [encoded for _ in range(10) for encoded in maker.add(one)] + list(maker.flush())
    assert [each.rows for each in found] == [100, 100, 100]
    many = FrameMaker(options(maxFrameRecords="1000", maxFrameBytes="2k"))
    assert all(each.size < 2_500 for each in [*many.add(one), *many.add(one), *many.flush()])


def test_many_rows_are_divided_evenly():
    """Rows that waited before them keep their place."""
    maker = FrameMaker(options(topic="t", maxFrameRecords="1000"))
    few, many = (
        pa.RecordBatch.from_arrays(
            [pa.array([b"%0100d" % i for i in ids], pa.binary()), pa.array([f"tag{i % 7}" for i in ids])],
            names=["value", "tag"],
        )
        for ids in (range(10), range(10, 2_510))
    )
    assert not list(maker.add(few))
    found = [*maker.add(many), *maker.flush()]
    assert [each.rows for each in found] == [10, 834, 834, 832]
    views = [open_frame(b"".join(each.pieces), seed=None) for each in found]
    assert [int(value) for view in views for value in view.to_list()] == list(range(2_510))
    assert [tag for view in views for tag in view.records().tags] == [f"tag{i % 7}" for i in range(2_510)]


def test_a_batch_slightly_above_the_byte_limit_is_halved():
    """A batch just above the limit gives two frames of equal size instead of a very small one."""
    batch = pa.RecordBatch.from_arrays([pa.array([b"x" * 80] * 100, pa.binary())], names=["value"])
    maker = FrameMaker(options(maxFrameBytes="10k"))
    assert [each.rows for each in maker.add(batch)] == [50, 50]
    assert not list(maker.flush())


def test_rows_of_many_topics_keep_their_order_per_topic():
    maker = FrameMaker(sink_options({"path": "/d", "maxFrameRecords": "1000"}))
    found = {each.topic: each for each in [*maker.add(rows(range(100), "abc")), *maker.flush()]}
    assert {topic: each.rows for topic, each in found.items()} == {"a": 34, "b": 33, "c": 33}


def test_a_null_topic_is_refused_and_a_null_payload_is_kept():
    maker = FrameMaker(sink_options({"path": "/d"}))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["t", None]), pa.array([b"x", b"y"], pa.binary())], names=["topic", "value"]
    )
    with pytest.raises(InvalidRequest, match="topic must not be null"):
        list(maker.add(batch))
    empty = pa.RecordBatch.from_arrays([pa.array([b"x", None], pa.binary())], names=["value"])
    maker = FrameMaker(options())
    (frame,) = [*maker.add(empty), *maker.flush()]
    assert open_frame(b"".join(frame.pieces), seed=None).records().payloads == [b"x", None]


def full_batch() -> pa.RecordBatch:
    """Return a batch with every column, with and without a value."""
    at = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    zoned = pa.timestamp("us", tz="Europe/Berlin")
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(["one", "two"]), pa.array([b"k", None], pa.binary()), pa.array(["tag", None]),
            pa.array([None, "node"]), pa.array(['{"a":1}', None]),
            pa.array([[{"key": "h", "value": b"v"}], None], pairs), pa.array([at, None], zoned),
            pa.array([None, datetime(2099, 1, 1, tzinfo=UTC)], zoned), pa.array([None, at], zoned),
            pa.array([7, None], pa.int32()),
        ],
        names=FULL.fieldNames(),
    )  # fmt: skip


FULL = schema(
    ("value", StringType()), ("key", BinaryType()), ("tag", StringType()), ("node", StringType()),
    ("meta", StringType()), ("headers", ArrayType(PAIR)), ("event_ts", TimestampType()),
    ("expires_at", TimestampType()), ("not_before", TimestampType()), ("priority", ShortType()),
)  # fmt: skip


def test_every_column_is_written(client, ringlog_engine, topic):
    """A batch write is pickled on the way to the tasks and back."""
    raw = {"path": ringlog_engine.data_dir, "topic": topic, "createTopics": "true", "durability": "fsync"}
    writer = sink.BatchWriter(sink_options(raw), FULL, place=place)
    in_task = pickle.loads(pickle.dumps(writer))
    message = pickle.loads(pickle.dumps(in_task.write(iter([full_batch()]))))
    pickle.loads(pickle.dumps(writer)).commit([message, None])
    one, two = client.read(topic).records
    assert (one.data, one.key, one.tag, one.meta, dict(one.headers)) == (
        b"one", b"k", "tag", {"a": 1}, {"h": b"v"},
    )  # fmt: skip
    assert one.event_ts == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp() * 1_000_000 + 678
    assert (one.priority, one.node, one.expires_at) == (7, None, None)
    assert (two.data, two.key, two.tag, two.node, dict(two.headers)) == (b"two", None, None, "node", {})
    assert two.not_before == one.event_ts
    assert two.expires_at == datetime(2099, 1, 1, tzinfo=UTC).timestamp() * 1_000_000
    left = os.listdir(os.path.join(ringlog_engine.data_dir, sink.STAGING_NAME))
    assert not [name for name in left if name.startswith(staging.writer_file_id(writer.key.text))]


def place() -> sink.SparkTaskIdentity:
    return sink.SparkTaskIdentity("a-query", 0)


# -- identity of the writer --------------------------------------------------------------------------------


def test_a_stream_writer_is_identified_by_its_query_id():
    """Outside of a Spark task there is no identity."""
    kind = schema(("value", BinaryType()))
    here = sink.StreamWriter(options(), kind, place=place)
    assert here._key(place()) == WriterKey("query/a-query")
    assert producer_of("query/a-query", False) < 1 << 63 <= producer_of("query/a-query", True)
    with pytest.raises(OptionError):
        here._key(sink.SparkTaskIdentity(None, 0))
    with pytest.raises(OptionError, match="Spark task"):
        sink.task_identity()


def test_an_unknown_topic_fails_the_query_and_leaves_no_file(new_world):
    """With createTopics the commit creates the topic."""
    world = new_world(create=False)
    with pytest.raises(TopicNotFound, match="createTopics"):
        world.stage(IDS)
    assert os.listdir(world.directory) == []
    with pytest.raises(TopicNotFound, match="createTopics"):
        sink.BatchWriter(replace(world.options, topic=world.topics[0]), schema(("value", BinaryType())))
    made = replace(world.options, create_topics=True)
    world.options = made
    committer = world.committer()
    committer.create_topics = True
    committer.commit(world.key, 0, world.stage(IDS))
    assert world.found() == world.expected(IDS)


def test_a_row_that_the_engine_never_accepts_fails_its_task(new_world):
    """Nothing is planned: the batch can be repeated without the row."""
    world = new_world()
    world.widths = {5: 2 << 20}
    with pytest.raises(RecordTooLarge, match="must have at most 1048576 bytes, got 2097152") as caught:
        world.batch(0, IDS)
    assert caught.value.detail["topic"] == world.topics[5 % 2]
    world.abort()
    assert not [name for name in os.listdir(world.directory) if name.endswith(".plan")]
    ids = [i for i in IDS if i != 5]
    assert world.batch(0, ids).outcome == "written"
    assert world.found() == world.expected(ids)


def test_a_record_counts_with_its_payload_and_meta():
    maker = FrameMaker(options(), limits=SinkLimits(record_bytes=200))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([b"x" * 190, None], pa.binary()),
            pa.array(['{"a": 1}', None]),
            pa.array([b"k" * 99, None]),
        ],
        names=["value", "meta", "key"],
    )
    assert [each.rows for each in [*maker.add(batch), *maker.flush()]] == [2]
    maker = FrameMaker(options(), limits=SinkLimits(record_bytes=197))
    with pytest.raises(RecordTooLarge, match="198"):
        assert not [*maker.add(batch), *maker.flush()]


def test_a_frame_that_is_larger_than_a_request_is_refused():
    batch = pa.RecordBatch.from_arrays([pa.array([b"x" * 100] * 9, pa.binary())], names=["value"])
    maker = FrameMaker(options(), limits=SinkLimits(frame_bytes=500))
    with pytest.raises(PayloadTooLarge, match="maxFrameBytes"):
        assert not [*maker.add(batch), *maker.flush()]


@pytest.mark.slow
def test_the_limits_are_those_of_the_target_engine(tmp_path):
    """Shards and gateways announce them. More rows than one write may have make more frames."""
    given = {"max_record_bytes": 100, "max_batch_records": 6, "max_body_bytes": 5_000}
    with engine(limits=given, gateway={"enabled": True}) as running:
        with ringlog.connect(running.url, wait=10, transport="ipc") as client:
            most = sink.limits_of(client)
            assert (most.record_bytes, most.batch_records) == (100, 6)
            assert most.frame_bytes < FRAME_BYTES_MAX
        with ringlog.connect(running.url, wait=10, transport="ring") as client:
            assert sink.limits_of(client) == replace(most, frame_bytes=FRAME_BYTES_MAX)
            parsed = sink_options({"stagingDir": str(tmp_path), "path": running.data_dir})
            world = World(client, parsed, WriterKey("query/limits"), ("a", "b"), str(tmp_path))
            for topic in world.topics:
                client.topics.create(topic)
            world.widths = {5: 101}
            with pytest.raises(RecordTooLarge):
                world.stage(IDS)
            world.widths = {5: 100}
            done = world.batch(0, IDS)
            assert done.frames >= len(IDS) / 6
            assert world.found() == world.expected(IDS)
    close_clients()


@pytest.mark.slow
def test_a_failed_shard_fails_no_write_into_other_shards(tmp_path):
    names = [f"w{number}" for number in range(20)]
    failed = next(name for name in names if home_shard(name, 2) == 0)
    topics = tuple(name for name in names if home_shard(name, 2) == 1)[:2]
    with engine(
        wal={"shards": 2}, supervisor={"restart_max": 0},
    ) as running, ringlog.connect(running.url, wait=10) as client:  # fmt: skip
        for topic in (failed, *topics):
            client.topics.create(topic)
        fail_shard(running, 0)
        parsed = sink_options({"stagingDir": str(tmp_path), "path": running.data_dir})
        world = World(client, parsed, WriterKey("query/failed"), topics, str(tmp_path))
        assert world.batch(0, IDS).outcome == "written"
        assert world.found() == world.expected(IDS)
        with pytest.raises(NotReady) as caught:
            replace(world, topics=(failed,)).stage(IDS)
        assert caught.value.detail["reason"] == "shard_failed"
    close_clients()


def test_a_batch_without_rows_writes_nothing(new_world):
    """No file and no plan are written."""
    world = new_world()
    assert world.task([], 0) is None
    assert world.committer().commit(world.key, 0, []).outcome == "nothing"
    assert os.listdir(world.directory) == []


# -- repeats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DEALS)
def test_a_repeated_batch_is_written_once_for_any_partitions(new_world, how):
    world = new_world()
    assert world.batch(0, IDS).outcome == "written"
    assert world.batch(0, IDS, how, seed=1).outcome == "repeated"
    assert world.batch(1, NEXT_IDS, how).outcome == "written"
    assert world.batch(0, IDS, how, seed=2).outcome == "repeated"
    assert world.found() == world.expected([*IDS, *NEXT_IDS])
    assert not [name for name in os.listdir(world.directory) if name.endswith(".frames")]


def test_a_transaction_is_skipped_unless_its_version_is_new(new_world, ringlog_engine):
    """txnAppId and txnVersion identify a batch write."""
    world = new_world()

    def write(version, ids):
        options = replace(world.options, txn_app_id=f"app-{world.topics[0]}", txn_version=version)
        kind = schema(("value", BinaryType()), ("topic", StringType()))
        writer = sink.BatchWriter(options, kind, place=place)
        writer.commit([writer.write(iter([rows(ids, world.topics)]))])

    write(5, IDS)
    write(5, IDS)
    write(4, NEXT_IDS)
    assert world.found() == world.expected(IDS)
    write(6, NEXT_IDS)
    assert world.found() == world.expected([*IDS, *NEXT_IDS])


def write_to(world: World, topic: str, app: str, version: int, ids) -> None:
    """Write one output of a fan-out: all rows to one topic."""
    options = replace(world.options, topic=topic, txn_app_id=app, txn_version=version)
    writer = sink.BatchWriter(options, schema(("value", BinaryType())), place=place)
    writer.commit([writer.write(iter([rows(ids, [topic]).select(["value"])]))])


def test_one_transaction_may_write_to_two_topics(new_world):
    """A fan-out in foreachBatch, or a job with two outputs. An earlier version silently skipped the second
    topic."""
    world = new_world()
    app = f"fan-{world.topics[0]}"
    for version, ids in ((1, IDS), (1, IDS), (2, NEXT_IDS), (1, IDS), (2, NEXT_IDS)):
        for topic in world.topics:
            write_to(world, topic, app, version, ids)
    everything = sorted([*IDS, *NEXT_IDS])
    for topic in world.topics:
        read = sorted(int(record.data) for record in world.client.reader(topic))
        assert read == everything


def test_a_version_that_an_earlier_release_wrote_is_not_written_again(new_world):
    """An earlier release identified a transaction without its topic. Its writes are skipped, and the writes
    that it dropped are not."""
    world = new_world()
    a, b = world.topics
    app = f"old-{a}"
    key = WriterKey(f"txn/{app}")
    old = replace(world, key=key, topics=(a,))
    assert old.batch(3, IDS).outcome == "written"
    for topic in (a, b):
        write_to(world, topic, app, 3, IDS)
    assert sorted(int(record.data) for record in world.client.reader(a)) == sorted(IDS)
    assert sorted(int(record.data) for record in world.client.reader(b)) == sorted(IDS)
    write_to(world, a, app, 4, NEXT_IDS)
    assert sorted(int(record.data) for record in world.client.reader(a)) == sorted([*IDS, *NEXT_IDS])


def test_a_version_written_to_other_topics_by_a_column_is_an_error(new_world):
    world = new_world()
    a, b = world.topics
    for topic in (a, b):
        options = replace(world.options, txn_app_id=f"column-{a}", txn_version=1)
        kind = schema(("value", BinaryType()), ("topic", StringType()))
        writer = sink.BatchWriter(options, kind, place=place)
        staged = [writer.write(iter([rows(IDS, [topic])]))]
        if topic == a:
            writer.commit(staged)
            continue
        with pytest.raises(OptionError, match="a separate txnAppId"):
            writer.commit(staged)


def test_two_plain_batch_writes_are_two_writes(new_world):
    """Without txnAppId each write has its own identity."""
    world = new_world()
    for _ in range(2):
        kind = schema(("value", BinaryType()), ("topic", StringType()))
        writer = sink.BatchWriter(world.options, kind, place=place)
        writer.commit([writer.write(iter([rows(IDS, world.topics)]))])
    assert set(world.found().values()) == {2}
    assert os.listdir(world.directory) == []


def test_a_lost_staging_directory_is_detected_before_the_write(new_world):
    """The error names the checkpoint."""
    world = new_world()
    world.batch(0, IDS)
    for name in os.listdir(world.directory):
        os.unlink(os.path.join(world.directory, name))
    with pytest.raises(StagingLost, match="checkpoint"):
        world.batch(1, NEXT_IDS)
    assert world.found() == world.expected(IDS)


@pytest.mark.parametrize("writes_log", [True, False])
def test_a_staging_directory_from_before_a_restore_is_refused_before_the_write(new_world, writes_log):
    """A batch that its plan has as done may be missing in the restored log, and must not be skipped.

    Plans of older versions do not name their log.
    """
    world = new_world()
    replace(world.committer(), log="log" if writes_log else "").commit(world.key, 0, world.stage(IDS))
    restored = replace(world.committer(), log="log-0123456789abcdef")
    for number in (0, 1):
        with pytest.raises(StagingLost, match="restored"):
            restored.commit(world.key, number, world.stage(NEXT_IDS))
    assert world.found() == world.expected(IDS)
    never_restored = replace(world.committer(), log="log")
    assert never_restored.commit(world.key, 0, world.stage(IDS)).outcome == "repeated"
    assert world.batch(1, NEXT_IDS).outcome == "written", "a log that is not known is not compared"


def test_a_changed_staged_file_is_refused_before_the_write(new_world):
    world = new_world()
    files = world.stage(IDS)
    path = os.path.join(world.directory, files[-1].name)
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"!")
    with pytest.raises(CorruptData):
        world.committer().commit(world.key, 0, files)
    assert not world.found()
    assert world.batch(0, NEXT_IDS).outcome == "written", "nothing was planned"
    assert world.found() == world.expected(NEXT_IDS)


def test_a_missing_staged_file_is_noticed_before_the_plan(new_world):
    world = new_world()
    files = world.stage(IDS)
    os.unlink(os.path.join(world.directory, files[0].name))
    with pytest.raises(DiskError):
        world.committer().commit(world.key, 0, files)
    assert world.batch(0, NEXT_IDS).outcome == "written"
    assert world.found() == world.expected(NEXT_IDS)


def test_a_damaged_plan_is_refused(new_world):
    world = new_world()
    world.batch(0, IDS)
    (name,) = [name for name in os.listdir(world.directory) if name.endswith(".plan")]
    with open(os.path.join(world.directory, name), "r+b") as file:
        file.seek(30)
        file.write(b"!")
    with pytest.raises(CorruptData, match="checksum"):
        world.batch(1, NEXT_IDS)


def test_only_one_process_commits_at_a_time(new_world):
    world = new_world()
    held = staging.Staging(world.directory)
    with held.lock_writer(world.key.text), pytest.raises(NotReady, match="another process"):
        staging.Staging(world.directory).lock_writer(world.key.text, wait_s=0.01).__enter__()
    world.batch(0, IDS)


def test_clean_removes_only_abandoned_files(new_world, tmp_path):
    """Files of an open plan, and files of a locked writer, stay."""
    world = new_world()
    orphans = world.stage(IDS)
    planned = [*orphans[:1]]
    with fails_at("sink_after_plan"):
        world.committer().commit(world.key, 0, planned)
    late = staging.Staging(world.directory)
    assert late.clean() == []
    made = int(orphans[0].name.split("-")[1])
    late.clock = _At(made + staging.ORPHAN_AGE_US + 60_000_000)
    with late.lock_writer(world.key.text):
        assert late.clean() == []
    assert sorted(late.clean()) == sorted(file.name for file in orphans[1:])
    assert [name for name in os.listdir(world.directory) if name.endswith(".frames")] == [planned[0].name]


class _At(SystemClock):
    """A clock with a fixed wall time."""

    def __init__(self, now_us):
        self._now_us = now_us

    def now_us(self):
        return self._now_us


# -- crashes ----------------------------------------------------------------------------------------------

POINTS = ("sink_before_plan", "sink_after_plan", "sink_mid_append", "sink_after_append", "sink_after_done")


@pytest.mark.parametrize("how", DEALS)
@pytest.mark.parametrize("point", POINTS)
def test_a_commit_that_fails_at_any_point_is_repeated_exactly(new_world, monkeypatch, point, how):
    """Spark aborts with the same messages and then runs the batch again."""
    world = new_world()
    monkeypatch.setattr(committing, "FRAMES_IN_FLIGHT", 1)
    with fails_at(point):
        world.batch(0, IDS)
    world.abort()
    done = world.batch(0, IDS, how, seed=3)
    resumes = point not in {"sink_before_plan", "sink_after_done"}
    assert done.outcome == (
        "resumed" if resumes else "written" if point == "sink_before_plan" else "repeated"
    )
    world.batch(1, NEXT_IDS, how)
    assert world.found() == world.expected([*IDS, *NEXT_IDS])


@pytest.mark.parametrize("how", DEALS)
@pytest.mark.parametrize("kind", ["halt", "EIO"])
def test_a_crash_or_failure_at_any_disk_change_loses_and_duplicates_no_row(new_world, kind, how):
    """The changes range from the first one of a task to the last one of the driver. This test runs a slice of
    them."""
    for nth in range(1 + DEALS.index(how) * 2, CHANGES, STEP):
        world = new_world(maxFrameRecords="20", width=WIDE if nth // STEP % 2 else 1)
        if not crash_at(
            world, FaultyDisk(RealDisk(), DiskFault("any", nth, kind)), how, aborts=kind == "EIO"
        ):
            assert nth > 20, "a batch makes more than 20 changes"
            break
    else:
        pytest.fail("the batch makes more changes than were tried")


@pytest.mark.parametrize("kind", ["short", "stuck"])
def test_a_short_write_of_many_buffers_is_continued_or_fails(new_world, kind):
    world = new_world(width=WIDE)
    world.disk = FaultyDisk(RealDisk(), DiskFault("write", 1, kind))
    if kind == "stuck":
        with pytest.raises(DiskError):
            world.stage(IDS)
        assert os.listdir(world.directory) == []
        world.disk = None
    assert world.batch(0, IDS).outcome == "written"
    assert world.found() == world.expected(IDS)


@pytest.mark.parametrize("how", DEALS)
def test_power_loss_at_any_disk_change_loses_and_duplicates_no_row(new_world, how):
    """Unsynced data is lost, in part or as a whole."""
    for nth in range(1 + DEALS.index(how) * 2, CHANGES, STEP):
        width = WIDE if nth // STEP % 2 else 1
        world = new_world(directory="/staging", maxFrameRecords="20", width=width)
        if not power_cut_at(world, nth, how):
            assert nth > 20
            break
    else:
        pytest.fail("the batch makes more changes than were tried")


def test_recover_finishes_an_open_plan(new_world):
    """The driver died during the commit and is not started again."""
    world = new_world()
    with fails_at("sink_mid_append"):
        world.batch(0, IDS)
    ((done,), failed) = world.committer().recover()
    assert (done.outcome, done.rows) == ("resumed", len(IDS))
    assert not failed
    assert world.committer().recover() == ([], [])
    assert world.found() == world.expected(IDS)


def test_recover_finishes_all_plans_that_it_can(new_world, client):
    """The topics of one plan are deleted, another plan is damaged."""
    worlds = [new_world() for _ in range(5)]
    for world in worlds:
        with fails_at("sink_after_plan"):
            world.batch(3, IDS)
    lost, damaged, *whole = sorted(worlds, key=lambda world: staging.writer_file_id(world.key.text))
    for topic in lost.topics:
        client.topics.delete(topic)
    damaged_id = staging.writer_file_id(damaged.key.text)
    with open(os.path.join(damaged.directory, damaged_id + ".plan"), "r+b") as file:
        file.seek(30)
        file.write(b"!")
    done, failed = worlds[0].committer().recover()
    assert [(each.batch, each.rows) for each in done] == [(3, len(IDS))] * len(whole)
    for world in whole:
        assert world.found() == world.expected(IDS)
    lost_id = staging.writer_file_id(lost.key.text)
    assert [(each.writer_id, each.writer, each.batch, each.error.code) for each in failed] == [
        (lost_id, lost.key.text, 3, "topic_not_found"), (damaged_id, None, None, "corrupt_data"),
    ]  # fmt: skip
    assert not damaged.found()


def test_recover_of_a_job_reports_what_failed_and_the_command_exits_with_an_error(new_world, client, capsys):
    world = new_world()
    with fails_at("sink_after_plan"):
        world.batch(3, IDS)
    for topic in world.topics:
        client.topics.delete(topic)
    given = ["spark", "recover", world.options.path, "--staging-dir", world.directory]
    assert run_command(["--output", "json", *given]) == CliExit.FAILED
    (told,) = json.loads(capsys.readouterr().out)["failed"]
    assert (told["writer"], told["batch"], told["code"]) == (world.key.text, 3, "topic_not_found")
    assert "createTopics" in told["error"]
    for topic in world.topics:
        client.topics.create(topic)
    assert run_command(given) == CliExit.DONE
    assert world.found() == world.expected(IDS)


def discard_id(world):
    return staging.writer_file_id(world.key.text)


def test_a_discarded_plan_without_appended_rows_is_forgotten(new_world, client, capsys):
    """Its frames never fit the topic. The batch is then written with other rows."""
    world = new_world()
    world.batch(0, IDS)
    for topic in world.topics:
        client.topics.delete(topic)
        client.topics.create(topic, discard="reject", cap_records=5)
    large = range(1_000, 1_042)  # 7 rows of each topic in each task
    for _ in range(2):
        with pytest.raises(RecordTooLarge) as caught:
            world.batch(1, large)
        assert (caught.value.detail["writer"], caught.value.detail["batch"]) == (discard_id(world), 1)
    given = ["--output", "json", "spark", "discard", world.options.path, discard_id(world), "1", "--yes"]
    assert run_command([*given, "--staging-dir", world.directory]) == CliExit.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["writer"], told["batch"], told["outcome"], told["rows"]) == (
        world.key.text,
        1,
        "forgotten",
        42,
    )
    assert [[each["rows"], each["appended_min"], each["appended_max"]] for each in told["topics"]] == [
        [21, 0, 0]
    ] * 2
    assert not [name for name in os.listdir(world.directory) if name.endswith(".frames")]
    assert world.batch(0, IDS).outcome == "repeated"
    assert world.batch(1, NEXT_IDS[:6]).outcome == "written"
    assert world.found() == world.expected(NEXT_IDS[:6])


def test_a_discarded_plan_with_appended_rows_counts_as_written(new_world, client):
    """Its other rows are lost, and no row is written twice."""
    world = new_world(maxFrameRecords="100")
    topic = world.topics[0]
    world.topics = (topic,)
    client.topics.configure(topic, discard="reject", cap_records=50)
    files = [world.task(range(40), 0), world.task(range(40, 60), 1), world.task(range(60, 65), 2)]
    with pytest.raises(TopicFull):
        world.committer().commit(world.key, 7, files)
    told = world.committer().discard(discard_id(world), 7)
    assert (told.outcome, told.rows, told.frames) == ("given_up", 65, 3)
    assert told.topics == (committing.DiscardedTopic(topic, 65, 0, 65),)
    assert world.found() == world.expected([*range(40), *range(60, 65)])
    client.topics.configure(topic, cap_records=0)
    assert world.batch(7, range(65)).outcome == "repeated"
    world.batch(8, range(65, 90))
    assert world.found() == world.expected([*range(40), *range(60, 90)])


def test_a_plan_with_a_missing_file_can_be_discarded(new_world):
    world = new_world()
    with fails_at("sink_after_plan"):
        world.batch(0, IDS)
    os.unlink(os.path.join(world.directory, world.staged[0].name))
    ((), (left,)) = world.committer().recover()
    assert isinstance(left.error, DiskError)
    told = world.committer().discard(left.writer_id, left.batch)
    assert told.outcome == "forgotten"
    assert told.topics == tuple(committing.DiscardedTopic(topic, None, 0, 0) for topic in world.topics)
    assert world.batch(0, IDS, "more").outcome == "written"
    assert world.found() == world.expected(IDS)


def test_only_the_named_plan_is_discarded(new_world):
    """A plan that is done, of another batch, or in use, is left alone."""
    world, other = new_world(), new_world()
    with fails_at("sink_after_plan"):
        world.batch(3, IDS)
    other.batch(3, IDS)
    for writer, batch in ((discard_id(world), 2), (discard_id(other), 3), ("0" * 16, 3)):
        with pytest.raises(OptionError, match="no open plan"):
            world.committer().discard(writer, batch)
    held = staging.Staging(world.directory)
    with held.lock_writer(world.key.text), pytest.raises(NotReady, match="another process"):
        world.committer().discard(discard_id(world), 3)
    assert world.batch(3, IDS).outcome == "resumed"
    assert world.found() == world.expected(IDS)


def test_a_discarded_write_without_an_identity_leaves_nothing(new_world):
    world = new_world()
    world.key = WriterKey("write/once", is_one_time=True)
    with fails_at("sink_after_plan"):
        world.batch(0, IDS)
    assert world.committer().discard(discard_id(world), 0).outcome == "given_up"
    assert not [name for name in os.listdir(world.directory) if name.startswith(discard_id(world))]


@pytest.mark.parametrize("how", DEALS)
def test_a_crash_at_any_disk_change_of_a_discard_leaves_the_plan_or_none(new_world, how):
    for nth in range(1, 20):
        world = new_world()
        with fails_at("sink_after_plan"):
            world.batch(0, IDS)
        world.disk = FaultyDisk(RealDisk(), DiskFault("any", nth, "EIO"))
        try:
            world.committer().discard(discard_id(world), 0)
            is_done = True
        except DiskError:
            is_done = False
        world.disk = None
        assert world.batch(0, IDS, how, seed=nth).outcome in {"written", "resumed"}
        assert world.found() == world.expected(IDS)
        if is_done:
            break
    else:
        pytest.fail("a discard makes more changes than were tried")


def test_a_newer_batch_finishes_the_open_one_first(new_world):
    world = new_world()
    with fails_at("sink_after_plan"):
        world.batch(0, IDS)
    world.batch(1, NEXT_IDS)
    assert world.found() == world.expected([*IDS, *NEXT_IDS])


# -- refusals ---------------------------------------------------------------------------------------------


def test_a_refused_frame_gets_a_new_number_and_is_written_once(client, new_world):
    """The shard never appends a number below the highest settled one, so the plan durably assigns a new
    number."""
    world = new_world(maxFrameRecords="100")
    topic = world.topics[0]
    world.topics = (topic,)
    client.topics.configure(topic, discard="reject", cap_records=50)
    files = [world.task(range(40), 0), world.task(range(40, 60), 1), world.task(range(60, 65), 2)]
    with pytest.raises(TopicFull):
        world.committer().commit(world.key, 0, files)
    assert world.found() == world.expected([*range(40), *range(60, 65)])
    client.topics.configure(topic, cap_records=0)
    with fails_at("sink_before_amend"):
        world.batch(0, range(65), "shuffle")
    done = world.batch(0, range(65), "shuffle")
    assert (done.outcome, done.renumbered, done.repeats) == ("resumed", 1, 2)
    world.batch(1, range(65, 90))
    assert world.found() == world.expected(range(90))


def test_a_numbered_producer_distinguishes_repeats_from_skipped_numbers(client, topic):
    """The sink relies on this behaviour."""
    client.topics.create(topic)
    maker = FrameMaker(options(maxFrameRecords="3"))
    batch = rows(range(9), ["t"]).select(["value"])
    first, second, third = [bytearray().join(each.pieces) for each in [*maker.add(batch), *maker.flush()]]
    producer = client.numbered_producer(topic, 77)
    assert producer.settled().producer_seq == 0
    assert producer.send(bytearray(first), 10).result(10).first_seq == 1
    assert producer.send(bytearray(third), 30).result(10).first_seq == 4
    again = producer.send(bytearray(first), 10).result(10)
    assert (again.deduped, again.first_seq) == (True, 1)
    with pytest.raises(NotReady):
        producer.send(bytearray(second), 20).result(10)
    assert producer.send(bytearray(second), 31).result(10).first_seq == 7
    assert producer.settled().producer_seq == 31
    producer.close()
    assert client.topics.state(topic).head_seq == 9


# -- controls: strategies that lose rows -------------------------------------------------------------------


def append_by_task(world: World, how: str, tasks: int | None = None) -> None:
    """The naive strategy: tasks append directly, as producer (query, partition), with numbered frames."""
    base = staging.writer_file_id(world.key.text)[:12]
    for partition, part in enumerate(deal(IDS, how, seed=3)[:tasks]):
        maker = FrameMaker(world.options)
        numbers = {topic: itertools.count(1) for topic in world.topics}
        for each in [*maker.add(rows(part, world.topics)), *maker.flush()]:
            producer = world.client.numbered_producer(each.topic, int(base, 16) + partition + 1)
            producer.send(bytearray().join(each.pieces), next(numbers[each.topic])).result(10)
            producer.close()


@pytest.mark.parametrize(("how", "loses"), [("same", False), ("more", True), ("shuffle", True)])
def test_control_appending_by_task_loses_or_duplicates_rows(new_world, how, loses):
    """The job dies after its first task and is repeated."""
    world = new_world()
    append_by_task(world, "same", tasks=1)
    append_by_task(world, how)
    found = world.found()
    lost, doubled = world.expected(IDS) - found, found - world.expected(IDS)
    assert bool(lost or doubled) == loses
    if how == "shuffle":
        assert lost
        assert doubled


def test_control_an_abort_that_ignores_the_plan_loses_rows(new_world):
    """The commit fails after the plan, and the clean-up removes the files."""
    world = new_world()
    with fails_at("sink_after_plan"):
        world.batch(0, IDS)
    for file in world.staged:
        os.unlink(os.path.join(world.directory, file.name))
    with pytest.raises(DiskError):
        world.batch(0, IDS)
    assert world.expected(IDS) - world.found() == world.expected(IDS)


@pytest.mark.parametrize("how", ["same", "more", "shuffle"])
def test_control_a_commit_without_a_plan_loses_rows(new_world, monkeypatch, how):
    """Frames are identified by (query, batch, n). The plan is lost, and the producer numbers are kept."""
    world = new_world()
    monkeypatch.setattr(committing, "FRAMES_IN_FLIGHT", 1)
    with fails_at("sink_mid_append", 5):
        world.batch(0, IDS)
    (path,) = [name for name in os.listdir(world.directory) if name.endswith(".plan")]
    os.unlink(os.path.join(world.directory, path))
    monkeypatch.setattr(committing.Committer, "_settled", lambda *_: {})
    world.batch(0, IDS, how, seed=3)
    found = world.found()
    lost, doubled = world.expected(IDS) - found, found - world.expected(IDS)
    if how == "shuffle":
        assert lost
        assert doubled
    elif how == "same":
        assert not lost
        assert not doubled


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_refusals_and_crashes_ends_exactly_once(client, new_world, monkeypatch, seed):
    """The topic fills up, gets space and refuses single frames, while commits die in between."""
    rng = random.Random(seed)
    monkeypatch.setattr(committing, "FRAMES_IN_FLIGHT", rng.choice([1, 3, 8]))
    world = new_world(maxFrameRecords=str(rng.randint(2, 9)))
    client.topics.configure(world.topics[0], discard="reject", cap_records=5)
    ends: list[str] = []
    for cap in (5, 11, 19, 30, 42, 0):
        client.topics.configure(world.topics[0], cap_records=cap)
        stop_points.configure(f"sink_mid_append:{rng.randint(1, 12)}:raise,sink_before_amend:1:raise")
        try:
            ends.append(world.batch(0, IDS, rng.choice(DEALS), seed=rng.random()).outcome)
        except (TopicFull, RecordTooLarge, InvariantViolation) as e:
            ends.append(e.code)
            world.abort()
    stop_points.configure("")
    world.batch(0, IDS, "shuffle", seed=seed)
    world.batch(1, NEXT_IDS)
    assert world.found() == world.expected([*IDS, *NEXT_IDS])
    assert set(ends) - {"written", "resumed", "repeated"}, "something was refused or died"
