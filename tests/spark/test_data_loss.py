"""failOnDataLoss, case by case, for batches and streams: when a loss is detected, and what follows.

The losses are real: caps, TTLs, shards that died with records in memory, topics deleted and created again,
changed bytes on the disk.
"""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest

import ringlog
from ringlog.errors import CorruptData, DiskError, NotReady, RinglogError
from ringlog.spark.clients import close_clients
from ringlog.spark.errors import DataLoss
from ringlog.spark.jvm_frames import JvmFrameStreamReader
from ringlog.spark.options import source_options
from ringlog.spark.schema import record_schema
from ringlog.spark.stream import StreamReader
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint
from tests.support.spark_query import Query
from tests.support.spark_records import copied, reader_of, seqs, write

pytestmark = pytest.mark.slow
_numbers = itertools.count()


@pytest.fixture
def topic():
    """A topic name that only this test uses."""
    return f"loss{next(_numbers)}"


def span(first, last):
    return list(range(first, last + 1))


def lines(directory):
    """Return the entries of a gapsPath directory."""
    found = sorted(Path(directory).glob("*.jsonl"))
    return [json.loads(line) for file in found for line in file.read_text().splitlines()]


def lose_by_cap(client, topic):
    """Evict positions 1 to 60 of 100."""
    client.topics.configure(topic, cap_records=40)
    wait_until(lambda: client.topics.state(topic).earliest_seq == 61, 10, "the cap to remove")


def lose_by_ttl(client, topic):
    """Expire all records."""
    client.topics.configure(topic, ttl_ms=1)
    wait_until(lambda: client.topics.state(topic).earliest_seq == 101, 10, "the records to expire")


def lose_by_both(client, topic):
    lose_by_cap(client, topic)
    lose_by_ttl(client, topic)


LOSSES = {
    "cap": (lose_by_cap, 60),
    "ttl": (lose_by_ttl, 100),
    "mixed": (lose_by_both, 100),
}


def check_told(error, topic, gap_from, gap_to, reason):
    """Check that the error names the records, the reason and both remedies, also after pickling."""
    text = str(pickle.loads(pickle.dumps(error)))
    for part in (topic, f"{gap_from}..{gap_to}", reason, "failOnDataLoss", "startingOffsets", "checkpoint"):
        assert part in text
    facts = {key: error.detail[key] for key in ("topic", "gap_from", "gap_to", "reason")}
    assert facts == {"topic": topic, "gap_from": gap_from, "gap_to": gap_to, "reason": reason}


# -- row 1: lost before planning ------------------------------------------------------------------------


@pytest.mark.parametrize("reason", LOSSES)
def test_a_stream_fails_on_planning_if_its_next_records_are_lost(
    sealing_engine, sealing_client, topic, tmp_path, reason
):
    """With `true` every restart fails again. With `false` the query continues, and gapsPath lists the gap
    once."""
    lose, last = LOSSES[reason]
    write(sealing_client, topic, 1, 100, frame=10)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="20")
    query.step()
    assert query.step()
    lose(sealing_client, topic)
    for _ in range(2):
        with pytest.raises(DataLoss) as e:
            query.restart().step()
        check_told(e.value, topic, 21, last, reason)
    query.restart(failOnDataLoss="false", gapsPath=str(tmp_path / "deep" / "gaps"), maxOffsetsPerTrigger="20")
    assert query.plan()
    query.run_planned()
    query.run_planned()
    query.drain()
    assert query.seqs(topic) == span(1, 20) + span(last + 1, 100)
    told = lines(tmp_path / "deep" / "gaps")
    assert {row["topic"] for row in told} == {topic}
    assert sorted(n for row in told for n in span(row["gap_from"], row["gap_to"])) == span(21, last)
    assert {row["reason"] for row in told} == {reason}
    write(sealing_client, topic, 101, 105)
    assert query.step() is not None


@pytest.mark.parametrize("reason", LOSSES)
def test_a_batch_fails_on_planning_if_records_within_its_bounds_are_lost(
    sealing_engine, sealing_client, topic, caplog, reason
):
    lose, last = LOSSES[reason]
    write(sealing_client, topic, 1, 100, frame=10)
    given = {"startingOffsets": json.dumps({topic: 21}), "endingOffsets": json.dumps({topic: 91})}
    assert seqs(sealing_engine, topic, **given) == span(21, 90)
    lose(sealing_client, topic)
    with pytest.raises(DataLoss) as e:
        seqs(sealing_engine, topic, **given)
    check_told(e.value, topic, 21, min(last, 90), reason)
    with caplog.at_level(logging.WARNING, "ringlog.spark"):
        assert seqs(sealing_engine, topic, failOnDataLoss="false", **given) == span(last + 1, 90)
    assert f"21..{min(last, 90)}" in caplog.text
    assert seqs(sealing_engine, topic) == span(last + 1, 100), "earliest is no gap"


def test_deleted_records_are_no_data_loss(sealing_engine, sealing_client, topic):
    write(sealing_client, topic, 1, 100)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="20")
    query.step()
    query.step()
    sealing_client.topics.delete_records(topic, before_seq=51)
    sealing_client.topics.delete_records(topic, match="t3")
    query.drain()
    expected = [n for n in span(51, 100) if n % 10 != 3 or n % 7 == 0]
    assert query.seqs(topic) == span(1, 20) + expected
    assert seqs(sealing_engine, topic, startingOffsets=json.dumps({topic: 21})) == expected


# -- row 2: lost between planning and reading -----------------------------------------------------------


def test_a_batch_task_whose_records_are_lost_fails_or_reads_the_rest(
    sealing_engine, sealing_client, topic, caplog
):
    """A task never returns fewer records without a warning."""
    write(sealing_client, topic, 1, 100, frame=10)
    strict, _ = reader_of(sealing_engine, topic, columns="seq")
    lenient, _ = reader_of(sealing_engine, topic, columns="seq", failOnDataLoss="false")
    planned = copied(strict.partitions())
    lose_by_cap(sealing_client, topic)
    with pytest.raises(DataLoss) as e:
        [list(strict.read(each)) for each in planned]
    check_told(e.value, topic, 1, 60, "cap")
    with caplog.at_level(logging.WARNING, "ringlog.spark"):
        rest = [n for each in planned for made in lenient.read(each) for n in made["seq"].to_pylist()]
    assert rest == span(61, 100)
    assert "1..60" in caplog.text
    assert "cap" in caplog.text


def test_a_stream_task_whose_records_are_lost_fails_and_so_does_the_restart(
    sealing_engine, sealing_client, topic, caplog
):
    write(sealing_client, topic, 1, 100, frame=10)
    query = Query(sealing_engine, topic)
    query.step()
    assert query.plan()
    start, end = map(json.loads, query.ends)
    planned = copied(query.reader.partitions(start, end))
    lose_by_cap(sealing_client, topic)
    with pytest.raises(DataLoss) as e:
        [list(query.reader.read(each)) for each in planned]
    check_told(e.value, topic, 1, 60, "cap")
    with pytest.raises(DataLoss):
        query.restart().step()
    query.restart(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "ringlog.spark"):
        rest = [n for each in planned for made in query.reader.read(each) for n in made["seq"].to_pylist()]
    assert rest == span(61, 100)
    assert "1..60" in caplog.text
    query.drain()
    assert query.seqs(topic) == span(61, 100)


@pytest.mark.parametrize("kind", [StreamReader, JvmFrameStreamReader])
def test_what_a_stream_task_misses_is_listed_in_gaps_path(
    sealing_engine, sealing_client, topic, tmp_path, kind
):
    """Each position once: lost before planning or after it, for any attempts of the task, and after a
    repeated plan."""
    gaps = tmp_path / "gaps"
    write(sealing_client, topic, 1, 100, frame=10)
    query = Query(sealing_engine, topic, failOnDataLoss="false", gapsPath=str(gaps))
    query.step()
    sealing_client.topics.configure(topic, cap_records=80)
    wait_until(lambda: sealing_client.topics.state(topic).earliest_seq == 21, 10, "the cap to remove")
    assert query.plan()
    start, end = map(json.loads, query.ends)
    parsed = source_options(query.given, streaming=True)
    reader = copied(kind(parsed, record_schema(parsed)))
    planned = copied(reader.partitions(start, end))
    assert [(row["gap_from"], row["gap_to"]) for row in lines(gaps)] == [(1, 20)]
    lose_by_cap(sealing_client, topic)
    for _ in range(2):
        for each in planned:
            list(copied(reader).read(each))
    assert sorted(n for row in lines(gaps) for n in span(row["gap_from"], row["gap_to"])) == span(1, 60)
    assert {(row["topic"], row["reason"]) for row in lines(gaps)} == {(topic, "cap")}
    query.drain()
    assert query.seqs(topic) == span(61, 100)
    assert [(row["gap_from"], row["gap_to"]) for row in lines(gaps)] == [(1, 60)]


def test_a_stream_task_that_spark_ends_early_lists_what_it_missed(
    sealing_engine, sealing_client, topic, tmp_path
):
    write(sealing_client, topic, 1, 100, frame=10)
    query = Query(sealing_engine, topic, failOnDataLoss="false", gapsPath=str(tmp_path))
    query.step()
    assert query.plan()
    (planned,) = query.reader.partitions(*map(json.loads, query.ends))
    lose_by_cap(sealing_client, topic)
    rows = query.reader.read(planned)
    assert next(rows)["seq"][0].as_py() == 61
    rows.close()
    assert [(row["gap_from"], row["gap_to"]) for row in lines(tmp_path)] == [(1, 60)]


# -- row 3: another epoch -------------------------------------------------------------------------------


def make_anew(client, topic, count):
    client.topics.delete(topic)
    write(client, topic, 1, count)


def test_a_stream_over_a_recreated_topic_fails_or_reads_the_new_topic(
    sealing_engine, sealing_client, topic, tmp_path
):
    write(sealing_client, topic, 1, 50)
    query = Query(sealing_engine, topic, maxOffsetsPerTrigger="20")
    query.step()
    query.step()
    old = query.place[topic][0]
    make_anew(sealing_client, topic, 90)
    for _ in range(2):
        with pytest.raises(DataLoss, match="was recreated") as e:
            query.restart().step()
    assert e.value.detail["reason"] == "recreated"
    assert "failOnDataLoss" in str(e.value)
    gaps = tmp_path / "gaps"
    query.restart(failOnDataLoss="false", gapsPath=str(gaps)).drain()
    new = query.place[topic][0]
    assert new != old
    assert [row for row in query.rows if row[1] == old] == [(topic, old, n) for n in span(1, 20)]
    assert [row for row in query.rows if row[1] == new] == [(topic, new, n) for n in span(1, 90)]
    (told,) = lines(gaps)
    assert (told["epoch"], told["gap_from"], told["reason"]) == (old, 21, "recreated")


def test_a_planned_batch_of_a_recreated_topic_fails_or_returns_no_record(
    sealing_engine, sealing_client, topic, tmp_path
):
    """Seqs of one epoch are never filled with records of another epoch."""
    write(sealing_client, topic, 1, 50)
    query = Query(sealing_engine, topic)
    query.step()
    assert query.plan()
    make_anew(sealing_client, topic, 90)
    with pytest.raises(DataLoss, match="recreated"):
        query.run_planned()
    gaps = tmp_path / "gaps"
    query.restart(failOnDataLoss="false", gapsPath=str(gaps))
    assert query.step() == []
    (told,) = lines(gaps)
    assert (told["gap_from"], told["gap_to"], told["reason"]) == (1, 50, "recreated")
    query.drain()
    assert query.seqs(topic) == span(1, 90)


def test_a_stream_over_a_deleted_topic_fails_or_continues_without_it(
    sealing_engine, sealing_client, topic, tmp_path
):
    other = f"{topic}-other"
    write(sealing_client, topic, 1, 50)
    write(sealing_client, other, 1, 10)
    query = Query(sealing_engine, f"{topic},{other}", maxOffsetsPerTrigger="20")
    query.step()
    query.step()
    assert query.plan()
    sealing_client.topics.delete(topic)
    with pytest.raises(DataLoss, match="deleted"):
        query.run_planned()
    gaps = tmp_path / "gaps"
    query.restart(failOnDataLoss="false", gapsPath=str(gaps)).drain()
    assert query.seqs(other) == span(1, 10)
    assert set(query.place) == {other}
    assert {row["reason"] for row in lines(gaps)} == {"deleted"}
    write(sealing_client, topic, 1, 7)
    before = len(query.rows)
    query.drain()
    assert [row[2] for row in query.rows[before:]] == span(1, 7), "made again it is new, from earliest"
    sealing_client.topics.delete(topic)
    with pytest.raises(DataLoss, match="deleted"):
        query.restart(failOnDataLoss="true").step()


def test_a_batch_task_of_a_deleted_or_recreated_topic_fails_or_returns_nothing(
    sealing_engine, sealing_client, topic, caplog
):
    for change, word in [
        (lambda: make_anew(sealing_client, topic, 90), "recreated"),
        (lambda: sealing_client.topics.delete(topic), "deleted"),
    ]:
        write(sealing_client, topic, 1, 50)
        strict, _ = reader_of(sealing_engine, topic, columns="seq")
        lenient, _ = reader_of(sealing_engine, topic, columns="seq", failOnDataLoss="false")
        (planned,) = copied(strict.partitions())
        change()
        with pytest.raises(DataLoss, match=word):
            list(strict.read(planned))
        with caplog.at_level(logging.WARNING, "ringlog.spark"):
            assert list(lenient.read(planned)) == []
        assert word in caplog.text


@pytest.mark.timeout(120)
def test_records_lost_in_a_restart_are_a_reported_gap(tmp_path):
    """An ephemeral topic after a kill of its engine: the head may be below the position of the stream."""
    with engine(wal={"shards": 1}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("t", durability="ephemeral")
            write(client, "t", 1, 100)
        query = Query(running, "t", maxOffsetsPerTrigger="60")
        query.step()
        query.step()
        place = query.place["t"]
        assert query.plan()
        running.crash()
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            write(client, "t", 1, 20)
            state = client.topics.state("t")
            new = [item.seq for item in client.reader("t", state.earliest_seq)]
        with pytest.raises(DataLoss):
            query.restart().step()
        gaps = tmp_path / "gaps"
        query.restart(failOnDataLoss="false", gapsPath=str(gaps)).drain()
        old = [row for row in query.rows if row[2] <= place[1] and row[1] == place[0]][:60]
        assert [row[2] for row in old] == span(1, 60)
        assert [row[2] for row in query.rows[60:]] == new
        assert lines(gaps)
        close_clients()


# -- rows 4 and 5: damage, and a store that does not answer ----------------------------------------------


def damage(running):
    """Change one byte of a frame in the middle of each segment."""
    files = list(Path(running.data_dir).rglob("*.data"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)


@pytest.mark.timeout(120)
def test_damage_fails_every_task_regardless_of_fail_on_data_loss():
    """Corruption is no retention loss, so failOnDataLoss=false does not skip it."""
    with engine(wal={"shards": 1}, storage={"enabled": True}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            write(client, "t", 1, 20_000, size=50)
        checkpoint(running)
        damage(running)
        for fail in ("true", "false"):
            reader, _ = reader_of(running, "t", failOnDataLoss=fail)
            with pytest.raises(CorruptData):
                [list(reader.read(each)) for each in reader.partitions()]
            query = Query(running, "t", failOnDataLoss=fail)
            query.step()
            assert query.plan()
            for _ in range(2):
                with pytest.raises(CorruptData):
                    query.run_planned()
        close_clients()


@pytest.mark.timeout(120)
def test_a_missing_cold_store_is_a_retryable_error_and_no_gap(tmp_path):
    """When the store is available again, the same plan reads everything."""
    cold, away = tmp_path / "cold", tmp_path / "away"
    cold.mkdir(mode=0o700)
    settings = {"dir": str(cold), "hot_segments": 0, "interval_s": 0.1}
    with engine(wal={"shards": 1}, storage={"enabled": True}, cold=settings) as running:
        with ringlog.connect(running.url, wait=10) as client:
            write(client, "t", 1, 5_000)
        checkpoint(running)

        def is_cold():
            return not list(Path(running.data_dir).rglob("*.data")) and any(cold.rglob("*.data"))

        wait_until(is_cold, 20, "the segment is relocated")
        query = Query(running, "t", failOnDataLoss="false")
        query.step()
        assert query.plan()
        reader, _ = reader_of(running, "t", columns="seq", failOnDataLoss="false")
        planned = copied(reader.partitions())
        shutil.move(cold, away)
        try:
            for attempt in (query.run_planned, lambda: [list(reader.read(each)) for each in planned]):
                with pytest.raises((NotReady, DiskError)) as e:
                    attempt()
                assert not isinstance(e.value, DataLoss)
                assert isinstance(e.value, RinglogError)
        finally:
            shutil.move(away, cold)
        query.drain()
        assert query.seqs("t") == span(1, 5_000)
        again = [n for each in planned for made in reader.read(each) for n in made["seq"].to_pylist()]
        assert again == span(1, 5_000)
        close_clients()
