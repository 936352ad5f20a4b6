"""Jobs in Spark: one local session, a real engine, and the result of running each job twice."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812  Spark's own usage

import ringlog
from ringlog.cli.app import run as run_command
from ringlog.cli.outcome import CliExit
from ringlog.client.write.fields import NewRecord
from ringlog.spark import read, read_all
from ringlog.spark.errors import DataLoss, OptionError
from ringlog.spark.jobs import archive, backfill, compact, mirror, recover, replay, stats, verify
from ringlog.spark.jobs.archive_files import Archive
from ringlog.spark.jobs.job_steps import steps
from ringlog.spark.jobs.report import SilentProgress
from ringlog.spark.views import view_reader
from ringlog.testing.clock import ManualClock
from ringlog.testing.real_engine import engine
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import write

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]
N, TAIL = 3_000, 50
TOPICS = ("jobs.a", "jobs.7")


@pytest.fixture(scope="module")
def data(sealing_engine):
    """The data directory, with N records of each topic in segments and TAIL in the log."""
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        for topic in TOPICS:
            write(client, topic, 1, N)
        checkpoint(sealing_engine)
        for topic in TOPICS:
            write(client, topic, N + 1, N + TAIL, frame=9)
    return sealing_engine.data_dir


def numbers(frame, topic):
    """Return the seqs of a topic, in the order of the rows."""
    return [row["seq"] for row in frame.filter(F.col("topic") == topic).select("seq").collect()]


def test_archive_continues_where_it_ended_and_read_all_joins_it_with_the_log(
    spark, data, sealing_client, tmp_path
):
    """Increments add up. Archive and log together contain each record once."""
    place = str(tmp_path / "arch")
    first = archive.run(spark, data, place, TOPICS)
    assert (first.rows, first.number, first.gaps) == (2 * (N + TAIL), 1, ())
    assert archive.run(spark, data, place, TOPICS).number == 0, "nothing new, nothing written"
    write(sealing_client, TOPICS[0], N + TAIL + 1, N + TAIL + 30)
    both = read_all(spark, data, archive=place, topics=TOPICS)
    expected = list(range(1, N + TAIL + 31))
    assert sorted(numbers(both, TOPICS[0])) == expected
    second = archive.run(spark, data, place, TOPICS)
    assert [(each.topic, each.after, each.until) for each in second.bounds] == [
        (TOPICS[0], N + TAIL, N + TAIL + 30)
    ]
    again = read_all(spark, data, archive=place, topics=TOPICS)
    assert sorted(numbers(again, TOPICS[0])) == expected
    assert sorted(numbers(again, TOPICS[1])) == expected[: N + TAIL]
    log = read(spark, TOPICS, path=data, includeHeaders=True)
    archived = spark.read.parquet(place).select(*[name for name in log.columns if name != "priority"])
    assert log.drop("priority").exceptAll(archived).count() == 0, "the same values"
    for file in [file for each in Archive(place).manifests() for file in each.files]:
        told = pq.read_metadata(f"{place}/{file.file}")
        assert (told.num_rows, file.bytes) == (file.rows, Path(place, file.file).stat().st_size)
    sealing_client.topics.delete_records(TOPICS[1], before_seq=11)
    kept = read_all(spark, data, archive=place, topics=TOPICS[1])
    assert len(numbers(kept, TOPICS[1])) == N + TAIL, "what was archived stays, deleted from the log or not"


def test_archive_handles_recreated_topics_and_losses_between_runs(spark, data, sealing_client, tmp_path):
    """A new epoch starts at its earliest record. Records lost between two runs fail the run or are
    reported."""
    topic, place = "jobs.lives", str(tmp_path / "arch")
    sealing_client.topics.create(topic, cap_records=20, discard="old")
    write(sealing_client, topic, 1, 10, frame=5)
    assert archive.run(spark, data, place, topic).rows == 10
    write(sealing_client, topic, 11, 90, frame=5)
    with pytest.raises(DataLoss):
        archive.run(spark, data, place, topic)
    lossy = archive.run(spark, data, place, topic, fail_on_data_loss=False)
    earliest = sealing_client.topics.state(topic).earliest_seq
    assert [(gap.gap_from, gap.gap_to, gap.reason) for gap in lossy.gaps] == [(11, earliest - 1, "cap")]
    assert lossy.rows == 90 - earliest + 1
    assert Archive(place).manifests()[-1].gaps == lossy.gaps
    sealing_client.topics.delete(topic)
    write(sealing_client, topic, 1, 4)
    both = read_all(spark, data, archive=place, topics=topic)
    lives = [
        row["n"] for row in both.groupBy("epoch").agg(F.count("*").alias("n")).orderBy("epoch").collect()
    ]
    assert lives == [10 + 90 - earliest + 1, 4]
    assert archive.run(spark, data, place, topic).rows == 4


def test_verify_finds_nothing_in_intact_topics(spark, data, capsys):
    """Deleted records are no gaps."""
    report = verify.run(spark, data, TOPICS)
    assert (report.is_whole, report.damaged, report.missing) == (True, 0, ())
    assert report.records >= 2 * (N + TAIL)
    assert run_command(["--output", "json", "spark", "verify", data, "--topic", TOPICS[0]]) == CliExit.DONE
    told = json.loads(capsys.readouterr().out)
    assert told["is_whole"]
    assert told["bounds"][0]["topic"] == TOPICS[0]


def test_verify_finds_damage_and_missing_records(spark, tmp_path):
    """One frame has a flipped bit, and records that were not deleted are in no frame."""
    with (
        engine(directory=tmp_path / "engine", wal={"shards": 1}, storage={"enabled": True}) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        write(client, "hurt", 1, 20_000, size=100)
        checkpoint(running)
        frames = [
            row
            for reader in [view_reader(running.data_dir, "frames", ["hurt"])]
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]
        third = frames[2]
        path = Path(running.data_dir, third["file"])
        whole = bytearray(path.read_bytes())
        whole[third["offset"] + 90] ^= 4
        path.write_bytes(whole)
        report = verify.run(spark, running.data_dir)
        assert [(each.fault, each.first_seq, each.last_seq, each.topic) for each in report.damage] == [
            ("body does not match its checksum", third["first_seq"], third["last_seq"], "hurt")
        ]
        assert (report.damaged, report.is_whole, report.missing) == (1, False, ())
        client.topics.delete_records("hurt", match="t3")
        assert verify.run(spark, running.data_dir).missing == (), "deleted is not missing"
        for part in path.parent.glob(path.stem + ".*"):
            part.unlink()  # as if the segment had never existed
        gone = verify.run(spark, running.data_dir)
        assert not gone.is_whole
        assert any(each.fault == "file is missing" for each in gone.damage)
        left = client.topics.state("hurt").count
        assert gone.missing_positions == left, "what was deleted is not missing"
        assert gone.missing[0].first_seq == frames[0]["first_seq"] == 1


def test_stats_agree_with_the_state_of_the_topics(spark, data, sealing_client, capsys):
    """Sizes from the indexes agree with the shards, and tags with the written records."""
    assert (
        run_command(["--output", "json", "spark", "stats", data, "--topic", TOPICS[0], "--tags", "3"])
        == CliExit.DONE
    )
    (told,) = json.loads(capsys.readouterr().out)["topics"]
    state = sealing_client.topics.state(TOPICS[0])
    assert (told["records"], told["head_seq"], told["record_bytes"]) == (
        state.count,
        state.head_seq,
        state.bytes,
    )
    assert told["stored_bytes"] == told["hot_bytes"] + told["log_bytes"] > state.bytes
    assert told["unsealed"] == state.head_seq - stats_sealed(data)
    assert len(told["tags"]) == 3
    assert told["recent_records_per_s"] > 0
    report = stats.run(spark, data, TOPICS, tags=0)
    assert [each.topic for each in report.topics] == sorted(TOPICS)
    assert report.topics[0].tags == ()


def stats_sealed(data):
    reader = view_reader(data, "topics", [TOPICS[0]])
    return next(row["sealed_seq"] for part in reader.partitions() for batch in reader.read(part)
                for row in batch.to_pylist())  # fmt: skip


def test_compact_proposes_ranges_and_deletes_exactly_those(spark, data, sealing_client, tmp_path):
    """The selection is by tag, by age, or by both. A second run deletes nothing more."""
    topic = "jobs.compact"
    sealing_client.append_many(
        topic, [NewRecord(data=b"x", tag="old" if n < 3 or n == 6 else "b") for n in range(9)]
    )
    proposed = compact.run(spark, data, topic, tags=["ol*"], out=str(tmp_path / "ranges"))
    (proposal,) = proposed.proposals
    assert (proposal.ranges, proposal.records, proposal.before_seq) == (((1, 3), (7, 7)), 4, 10)
    assert proposed.deleted == 0
    assert spark.read.json(str(tmp_path / "ranges")).agg(F.sum("records")).collect()[0][0] == 4
    sealing_client.append_many(topic, [NewRecord(data=b"late", tag="old")])
    applied = compact.run(spark, data, topic, tags=["old"], older_than_us=1, apply=True)
    assert (applied.proposals, applied.deleted) == ((), 0), "nothing is that old"
    done = compact.run(spark, data, topic, tags=["old"], apply=True)
    assert (done.records, done.deleted) == (5, 5)
    assert compact.run(spark, data, topic, tags=["old"], apply=True).deleted == 0
    assert numbers(read(spark, topic, path=data), topic) == [4, 5, 6, 8, 9]
    later = sealing_client.topics.state(topic).last_write_ts + 10_000_000
    aged = compact.run(spark, data, topic, older_than_us=later)
    assert aged.proposals[0].ranges == ((4, 6), (8, 9))
    with pytest.raises(OptionError):
        compact.run(spark, data, topic)


def test_replay_writes_each_record_once_and_in_order(spark, data, sealing_client):
    """A repeated run has no effect. A step that was written is not written again."""
    source = TOPICS[1]
    live = numbers(read(spark, source, path=data, columns=["topic", "seq"]), source)
    kept = {"prefix": "copy.", "name": "n1", "rate": 1_000_000.0}
    report = replay.run(spark, data, source, **kept)
    assert (report.targets, report.skipped) == ({source: f"copy.{source}"}, 0)
    again = replay.run(spark, data, source, **kept)
    assert again.skipped == again.steps == report.steps
    copy = read(spark, f"copy.{source}", path=data).orderBy("seq").collect()
    origin = read(spark, source, path=data).orderBy("seq").collect()
    assert [(row.payload, row.key, row.tag) for row in copy] == [
        (row.payload, row.key, row.tag) for row in origin
    ]
    assert [row.event_ts for row in copy] == [row.ts for row in origin]
    assert len(copy) == len(live)
    state_file = next(Path(data, "spark-jobs").glob("replay-n1.json"))
    forgotten = json.loads(state_file.read_text()) | {"done": 0}
    state_file.write_text(json.dumps(forgotten))  # the job died before it recorded the step
    assert replay.run(spark, data, source, **kept).skipped == 0
    assert read(spark, f"copy.{source}", path=data, columns="seq").count() == len(live)
    with pytest.raises(OptionError, match="copied to itself"):
        replay.run(spark, data, source)
    with pytest.raises(OptionError, match="other options"):
        replay.run(spark, data, source, to="elsewhere", name="n1")


def test_backfill_from_an_archive_and_from_any_parquet(spark, data, sealing_client, tmp_path):
    place = str(tmp_path / "arch")
    archive.run(spark, data, place, TOPICS[0])
    origin = [bytes(row.payload) for row in read(spark, TOPICS[0], path=data).orderBy("seq").collect()]
    report = backfill.run(spark, data, place, topic="filled", name="b1")
    assert (report.rows, report.skipped) == (len(origin), 0)
    assert backfill.run(spark, data, place, topic="filled", name="b1").skipped == report.steps
    filled = [bytes(row.payload) for row in read(spark, "filled", path=data).orderBy("seq").collect()]
    assert filled == origin, "in the order of the archive, each once"
    plain = str(tmp_path / "plain")
    spark.range(0, 2_500, 1, 3).withColumn("name", F.concat(F.lit("n"), "id")).write.parquet(plain)
    with pytest.raises(OptionError, match="payload"):
        backfill.run(spark, data, plain, topic="plain")
    columns = {"payload": "to_json(struct(*))", "key": "name"}
    done = backfill.run(spark, data, plain, topic="plain", columns=columns, rate=200.0 * 5_000)
    assert done.steps == 1
    got = [
        json.loads(bytes(row.payload))["id"]
        for row in read(spark, "plain", path=data).orderBy("seq").collect()
    ]
    assert got == list(range(2_500))


def test_steps_do_not_exceed_the_rate():
    """The rate is in rows per second, whatever the duration of a step."""
    clock = ManualClock()
    slept = []
    clock.sleep = lambda s: (slept.append(s), clock.advance(s))  # type: ignore[method-assign]
    assert list(steps(1, 5, lambda step: 100, 50.0, SilentProgress(), "t", clock)) == [1, 2, 3, 4]
    assert slept == [2.0, 2.0, 2.0], "none behind the last"


def test_mirror_continues_from_its_checkpoint(spark, data, sealing_client, tmp_path):
    """Two runs into Parquet copy each record once, and recover has no work left."""
    topic, target, checkpoint_dir = "jobs.mirror", str(tmp_path / "out"), str(tmp_path / "check")
    write(sealing_client, topic, 1, 500)
    first = mirror.run(spark, data, topic, checkpoint=checkpoint_dir, target=target, maxOffsetsPerTrigger=200)
    assert (first.rows, first.batches) == (500, 3)
    write(sealing_client, topic, 501, 600)
    second = mirror.run(spark, data, topic, checkpoint=checkpoint_dir, target=target)
    assert second.rows == 100
    assert json.loads(second.offset)["topics"][topic][1] == 600
    assert sorted(numbers(spark.read.parquet(target), topic)) == list(range(1, 601))
    assert recover.run(None, data).plans == ()


def test_without_pyspark_the_command_names_the_extra(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_command(["spark", "stats", "/nowhere"]) == CliExit.USAGE
    assert "ringlog[spark]" in capsys.readouterr().err
