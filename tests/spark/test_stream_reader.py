"""The streaming source without a JVM: the test drives the reader as Spark does, on a real engine."""

from __future__ import annotations

import itertools
import json
import pickle
import random

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxFiles, ReadMaxRows

import ringlog
from ringlog.errors import TopicNotFound, UsageError
from ringlog.spark.catalog import Catalog
from ringlog.spark.errors import OptionError
from ringlog.spark.offsets import CheckpointRefused
from ringlog.testing.real_engine import engine
from tests.support.checkpoints import checkpoint
from tests.support.spark_query import Query
from tests.support.spark_records import write

pytestmark = pytest.mark.slow
_numbers = itertools.count()


@pytest.fixture
def prefix():
    """A prefix for topics that only this test uses."""
    return f"stream{next(_numbers)}-"


def span(first, last):
    return list(range(first, last + 1))


# -- complete reads -----------------------------------------------------------------------------------


def test_a_stream_reads_every_record_once_from_segments_and_the_log(sealing_engine, sealing_client, prefix):
    """The increments together are one full read."""
    topics = [f"{prefix}{name}" for name in "ab"]
    for topic in topics:
        write(sealing_client, topic, 1, 3_000)
    checkpoint(sealing_engine)
    write(sealing_client, topics[0], 3_001, 3_500, frame=7)
    query = Query(sealing_engine, ",".join(topics), maxOffsetsPerTrigger="700")
    batches = query.drain()
    assert [len(rows) for rows in batches] == [0, *[700] * 9, 200]
    assert query.seqs(topics[0]) == span(1, 3_500)
    assert query.seqs(topics[1]) == span(1, 3_000)
    write(sealing_client, topics[1], 3_001, 3_010)
    assert len(query.restart(maxOffsetsPerTrigger="4").step()) == 4
    assert sum(map(len, query.drain())) == 6
    assert query.seqs(topics[1]) == span(1, 3_010)
    assert query.step() is None


def test_offsets_are_sorted_and_idle_offsets_keep_their_text(sealing_engine, sealing_client, prefix):
    """Spark compares the text, and any other text would start another batch."""
    topics = [f"{prefix}{name}" for name in ("zeta", "alpha", "Mid")]
    for topic in topics:
        write(sealing_client, topic, 1, 5)
    query = Query(sealing_engine, ",".join(topics))
    query.drain()
    offset = json.loads(query.ends[-1])
    assert list(offset) == ["log", "topics", "v"]
    assert list(offset["topics"]) == sorted(topics)
    assert offset["log"] == sealing_engine.info.engine_id
    assert offset["v"] == 1
    for _ in range(3):
        assert query.plan() is False
    assert query.restart().plan() is False


# -- start --------------------------------------------------------------------------------------------


def test_a_first_batch_that_dies_is_repeated_from_the_same_offset(sealing_engine, sealing_client, prefix):
    """Spark requests the initial offset again, and `latest` has another value by then."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 10)
    query = Query(sealing_engine, topic, startingOffsets="latest")
    assert query.plan()
    write(sealing_client, topic, 11, 30)  # the query runs, so these records belong to it
    query.restart()
    assert query.run_planned() == []
    query.drain()
    assert query.seqs(topic) == span(11, 30)


def test_control_a_resolved_initial_offset_loses_the_first_batch(sealing_engine, sealing_client, prefix):
    """The control for the test above: an initial offset that is resolved at once moves when it is requested
    again."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 10)

    def initial():
        return sealing_client.topics.state(topic).head_seq

    first = initial()
    write(sealing_client, topic, 11, 30)
    end = sealing_client.topics.state(topic).head_seq
    assert end - first == 20, "the batch that was planned"
    assert end - initial() == 0, "the same batch after a crash: its records are never read"


@pytest.mark.parametrize(
    ("starting", "first"),
    [("earliest", 1), ("latest", 41), ('{"%s": 17}', 17), ('{"%s": -1}', 41), ('{"%s": -2}', 1)],
)
def test_starting_offsets_are_the_first_seq_to_read(sealing_engine, sealing_client, prefix, starting, first):
    """A topic that the JSON does not name is new to the query and starts at its earliest record."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 40)
    write(sealing_client, f"{prefix}u", 1, 3)
    text = starting % topic if "%" in starting else starting
    query = Query(sealing_engine, f"{topic},{prefix}u", startingOffsets=text)
    query.drain()
    write(sealing_client, topic, 41, 50)
    query.drain()
    assert query.seqs(topic) == span(first, 50)
    assert query.seqs(f"{prefix}u") == ([] if starting == "latest" else [1, 2, 3])


def test_a_stream_may_start_at_a_time(sealing_engine, sealing_client, prefix):
    """startingTimestamp uses the commit time, for all topics or by topic. A time after all records is an
    error by default."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 20)
    moment = sealing_client.read(topic, 20).cursor.seq
    assert moment == 20
    write(sealing_client, topic, 21, 40)
    first = next(iter(sealing_client.reader(topic, 21))).time.isoformat()
    late = "2999-01-01T00:00:00Z"
    query = Query(sealing_engine, topic, startingTimestamp=first)
    query.drain()
    assert query.seqs(topic) == span(21, 40)
    query = Query(sealing_engine, topic, startingOffsetsByTimestamp=json.dumps({topic: first}))
    query.drain()
    assert query.seqs(topic) == span(21, 40)
    with pytest.raises(OptionError, match="Strategy"):
        Query(sealing_engine, topic, startingTimestamp=late).drain()
    query = Query(sealing_engine, topic, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest")
    query.drain()
    write(sealing_client, topic, 41, 42)
    query.drain()
    assert query.seqs(topic) == [41, 42]


def test_earliest_means_the_first_retained_record(sealing_engine, sealing_client, prefix):
    topic = f"{prefix}t"
    sealing_client.topics.create(topic, cap_records=30)
    write(sealing_client, topic, 1, 100, frame=10)
    query = Query(sealing_engine, topic)
    query.drain()
    assert query.seqs(topic) == span(71, 100)


def test_an_unknown_topic_is_an_error_at_the_start(sealing_engine, prefix):
    with pytest.raises(TopicNotFound):
        Query(sealing_engine, f"{prefix}nobody").step()


# -- limits -------------------------------------------------------------------------------------------


def test_the_limit_is_divided_by_lag_and_a_small_topic_does_not_starve(
    sealing_engine, sealing_client, prefix
):
    """A small topic gets at least one record in two batches."""
    flood, drop = f"{prefix}flood", f"{prefix}drop"
    write(sealing_client, flood, 1, 5_000)
    write(sealing_client, drop, 1, 3)
    query = Query(sealing_engine, f"{flood},{drop}", maxOffsetsPerTrigger="10")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(10)
    query.step()
    for _ in range(8):
        assert len(query.step()) == 10
    assert query.seqs(drop) == [1, 2, 3], "one in each two batches at least"


def frame_ends(running, topic, last):
    """Return the last seqs of the frames in the topic's segments."""
    with Catalog.open(running.data_dir) as catalog:
        ends = [each.last_seq for each in catalog.stored_ranges(topic, 0, last)]
    assert len(ends) > 1
    return ends


def test_the_byte_limit_admits_whole_frames(sealing_engine, sealing_client, prefix):
    """maxBytesPerTrigger uses the frame sizes of segments, and an estimate for the log."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 20_000, frame=1_000, size=100)
    checkpoint(sealing_engine)
    query = Query(sealing_engine, topic, maxBytesPerTrigger="300k")
    assert query.reader.getDefaultReadLimit() == ReadMaxBytes(300 * 1024)
    sizes = [len(rows) for rows in query.drain()]
    assert sum(sizes) == 20_000
    assert query.seqs(topic) == span(1, 20_000)
    assert set(itertools.accumulate(sizes)) <= {0, *frame_ends(sealing_engine, topic, 20_000)}
    assert 8 <= len(sizes) <= 25, "about 2.4 MB in parts of 300 kB"
    write(sealing_client, topic, 20_001, 30_000, frame=1_000, size=100)
    tail = [len(rows) for rows in query.drain()]
    assert sum(tail) == 10_000
    assert len(tail) >= 3, "the log is limited as well"


def test_a_frame_larger_than_the_byte_limit_is_one_batch(sealing_engine, sealing_client, prefix):
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 4_000, frame=1_000, size=100)
    checkpoint(sealing_engine)
    query = Query(sealing_engine, topic, maxBytesPerTrigger="10")
    sizes = [len(rows) for rows in query.drain()]
    assert list(itertools.accumulate(sizes)) == [0, *frame_ends(sealing_engine, topic, 4_000)]
    assert query.seqs(topic) == span(1, 4_000)


def test_the_once_trigger_reads_everything_in_one_batch(sealing_engine, sealing_client, prefix):
    """ReadAllAvailable overrides the limits in the options. A repeated batch is the same."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 500)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="10").once()
    assert query.plan()
    write(sealing_client, topic, 501, 600)
    query.restart()
    assert len(query.step()) == 500
    assert query.seqs(topic) == span(1, 500)


def test_an_unsupported_read_limit_is_refused(sealing_engine, sealing_client, prefix):
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 5)
    query = Query(sealing_engine, topic)
    query.step()
    query.limit = ReadMaxFiles(3)
    with pytest.raises(UsageError, match="unsupported read limit"):
        query.step()


def test_deleted_records_do_not_count_towards_the_limit(sealing_engine, sealing_client, prefix):
    """Deletes are silent, and no batch is used for them."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 1_000)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="10")
    query.step()
    sealing_client.topics.delete_records(topic, before_seq=981)
    assert query.step() == [(topic, query.place[topic][0], seq) for seq in span(981, 990)]
    sealing_client.topics.delete_records(topic, before_seq=1_001)
    assert query.drain() == [[]], "moves on to the head, so that nothing seems to wait"
    assert query.place[topic][1] == 1_000
    assert query.step() is None


# -- availableNow -------------------------------------------------------------------------------------


def test_available_now_ends_at_the_heads_of_its_start(sealing_engine, sealing_client, prefix):
    """The limits apply. Later records are left to the next run."""
    old, new = f"{prefix}old", f"{prefix}new"
    write(sealing_client, old, 1, 100)
    query = Query(sealing_engine, now=True, subscribePattern=f"{prefix}.*", maxOffsetsPerTrigger="30")
    write(sealing_client, old, 101, 150)
    write(sealing_client, new, 1, 20)
    assert [len(rows) for rows in query.drain()] == [0, 30, 30, 30, 10]
    assert query.seqs(old) == span(1, 100)
    assert query.seqs(new) == []
    assert query.restart(now=True).drain()
    assert query.seqs(old) == span(1, 150)
    assert query.seqs(new) == span(1, 20)


def test_available_now_leaves_a_recreated_topic_to_the_next_run(sealing_engine, sealing_client, prefix):
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 100)
    query = Query(sealing_engine, topic, failOnDataLoss="false", maxOffsetsPerTrigger="30")
    query.step()
    query.restart(now=True)
    query.step()
    sealing_client.topics.delete(topic)
    write(sealing_client, topic, 1, 7)
    assert query.drain() == []
    query.restart(now=True).drain()
    epoch = query.place[topic][0]
    assert [row for row in query.rows if row[1] == epoch] == [(topic, epoch, seq) for seq in span(1, 7)]


# -- new topics ---------------------------------------------------------------------------------------


def test_topics_that_match_later_start_at_earliest(sealing_engine, sealing_client, prefix):
    """startingOffsets applies only to the topics at the start of the query."""
    write(sealing_client, f"{prefix}a", 1, 10)
    query = Query(sealing_engine, subscribePattern=f"{prefix}.*", startingOffsets="latest")
    assert query.drain() == [[]]
    write(sealing_client, f"{prefix}b", 1, 5)
    write(sealing_client, f"{prefix}a", 11, 12)
    write(sealing_client, f"other{prefix}", 1, 5)
    query.drain()
    assert query.seqs(f"{prefix}b") == span(1, 5)
    assert query.seqs(f"{prefix}a") == [11, 12]
    assert set(query.place) == {f"{prefix}a", f"{prefix}b"}


def test_a_pattern_that_matches_nothing_yet_starts_the_first_topic_at_earliest(
    sealing_engine, sealing_client, prefix
):
    """An offset without topics is a valid position: later topics are new to the query."""
    query = Query(sealing_engine, subscribePattern=f"{prefix}.*", startingOffsets="latest")
    assert query.drain() == [[]]
    assert query.restart().drain() == []
    write(sealing_client, f"{prefix}a", 1, 5)
    query.drain()
    assert query.seqs(f"{prefix}a") == span(1, 5)


def test_a_topic_removed_from_the_options_stays_in_a_planned_batch(sealing_engine, sealing_client, prefix):
    a, b = f"{prefix}a", f"{prefix}b"
    write(sealing_client, a, 1, 10)
    write(sealing_client, b, 1, 10)
    query = Query(sealing_engine, f"{a},{b}")
    query.step()
    assert query.plan()
    query.restart(subscribe=a)
    assert sorted(query.step()) == sorted((t, query.place[t][0], s) for t in (a, b) for s in span(1, 10))
    write(sealing_client, a, 11, 12)
    write(sealing_client, b, 11, 12)
    query.drain()
    assert query.seqs(a) == span(1, 12)
    assert query.seqs(b) == span(1, 10)
    assert set(query.place) == {a}


# -- restarts -----------------------------------------------------------------------------------------


def test_a_batch_repeated_with_other_partitions_has_the_same_rows(sealing_engine, sealing_client, prefix):
    """The checkpoint stores the range, not its division into partitions."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 5_000, frame=100)
    checkpoint(sealing_engine)
    write(sealing_client, topic, 5_001, 9_000, frame=100)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="7000")
    query.step()
    assert query.plan()
    expected = sorted(query.run_planned())
    assert len(expected) == 7_000
    assert len(query.run_planned(cut=0)) == 0
    counts = set()
    for wanted in ("1", "2", "5", "16"):
        query.restart(minPartitions=wanted)
        counts.add(len(query.reader.partitions(*map(json.loads, (query.ends[0], query.ends[1])))))
        checkpoint(sealing_engine)
        assert sorted(query.run_planned()) == expected
    assert len(counts) > 2
    query.drain()
    assert query.seqs(topic) == span(1, 9_000)


def test_the_reader_reports_the_latest_offset_and_its_commits(sealing_engine, sealing_client, prefix):
    """The difference to the end of the batch is the lag."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 50)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="20")
    query.step()
    query.step()
    head = query.reader.reportLatestOffset()
    assert json.loads(json.dumps(head))["topics"][topic] == [query.place[topic][0], 50]
    assert query.reader.committed == json.loads(query.ends[-1])
    assert head["topics"][topic][1] - query.place[topic][1] == 30


def test_equal_offsets_have_no_partitions(sealing_engine, sealing_client, prefix):
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 5)
    query = Query(sealing_engine, topic)
    query.drain()
    end = json.loads(query.ends[-1])
    assert query.reader.partitions(end, end) == []
    assert list(query.reader.read(None)) == []


def test_a_used_reader_pickles_small(sealing_engine, sealing_client, prefix):
    """Neither the client nor files are sent to the tasks."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 5)
    query = Query(sealing_engine, topic, now=True)
    query.drain()
    assert len(pickle.dumps(query.reader)) < 5_000


# -- foreign checkpoints ------------------------------------------------------------------------------


def test_checkpoints_of_other_logs_and_newer_versions_are_refused(sealing_engine, sealing_client, prefix):
    """latestOffset and partitions both check the offsets."""
    topic = f"{prefix}t"
    write(sealing_client, topic, 1, 5)
    query = Query(sealing_engine, topic)
    query.drain()
    good = json.loads(query.ends[-1])
    for bad, words in [({**good, "log": "f" * 32}, "another data directory"), ({**good, "v": 2}, "newer")]:
        with pytest.raises(CheckpointRefused, match=words):
            query.reader.latestOffset(bad, query.limit)
        with pytest.raises(CheckpointRefused, match=words):
            query.reader.partitions(bad, good)
        with pytest.raises(CheckpointRefused, match=words):
            query.reader.partitions(good, bad)


@pytest.mark.timeout(120)
def test_a_checkpoint_is_valid_after_restarts_and_for_its_directory_only(tmp_path):
    """The id belongs to the data directory, not to the process."""
    with engine(directory=tmp_path / "one", wal={"shards": 2}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            write(client, "t", 1, 100)
        query = Query(running, "t", maxOffsetsPerTrigger="30")
        query.step()
        query.step()
        running.restart()
        query.step()
        running.crash()
        running.start()
        query.restart().drain()
        assert query.seqs("t") == span(1, 100)
    with engine(directory=tmp_path / "two", wal={"shards": 1}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            write(client, "t", 1, 100)
        with pytest.raises(CheckpointRefused, match="another data directory"):
            query.restart(path=running.data_dir).step()


# -- crashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_any_point_with_changed_options_give_every_record_once(
    sealing_engine, sealing_client, prefix, seed
):
    """Each seed has about sixty deaths, before, during and after reading. Records are appended and move to
    segments."""
    random_ = random.Random(seed)
    topics = [f"{prefix}{name}" for name in "ab"]
    written = dict.fromkeys(topics, 0)
    query = Query(sealing_engine, subscribePattern=f"{prefix}.*")
    deaths = 0
    for turn in range(80):
        if turn < 2 or random_.random() < 0.3:
            topic = topics[turn] if turn < 2 else random_.choice(topics)
            count = random_.randrange(1, 120)
            write(sealing_client, topic, written[topic] + 1, written[topic] + count, frame=30)
            written[topic] += count
        if turn in {20, 50}:
            checkpoint(sealing_engine)
        dies_at = random_.choice(["planned", "reading", "read", None])
        if query.plan() and dies_at in {"reading", "read"}:
            query.run_planned(cut=1 if dies_at == "reading" else None)
        if dies_at is None:
            query.step()
            continue
        deaths += 1
        limit = random_.choice([{"maxOffsetsPerTrigger": "37"}, {"maxOffsetsPerTrigger": "200"}])
        query.restart(minPartitions=str(random_.choice([1, 3, 8])), **limit)
    query.drain()
    assert deaths > 30
    assert sorted(row[::2] for row in query.rows) == sorted(
        (t, n) for t in topics for n in span(1, written[t])
    )
    for topic in topics:
        assert query.seqs(topic) == sorted(query.seqs(topic)), "and in their order"
