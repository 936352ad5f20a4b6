"""Topics whose segment file is missing at a start of the engine, and topics whose cold tier is missing.

Requests fail with a clear error. All records can be read again once the file is back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlog
from ringlog.errors import ColdUnavailable, TopicHalted
from ringlog.testing.real_engine import engine, wait_until
from tests.support.checkpoints import checkpoint

pytestmark = pytest.mark.slow
ENGINE = {
    "wal": {"shards": 1}, "gateway": {"enabled": True}, "delivery": {"schedulers": 1},
    "storage": {"enabled": True, "own_segment_bytes": 1},
}  # fmt: skip


def numbers(client, topic):
    return [int(record.data) for record in client.reader(topic)]


def events_of(watch, kinds):
    """Read events of the watch until `kinds` different ones came.

    Return topic names and messages of halted topics.
    """
    seen = set()
    while len(seen) < kinds:
        try:
            event = watch.next(timeout=10)
        except TopicHalted as e:
            seen.add(f"{e.detail['topic']} is halted")
            continue
        assert event is not None, seen
        seen.add(event.topic)
    return seen


def test_a_topic_is_halted_while_its_file_is_missing_and_complete_afterwards():
    with engine(**ENGINE) as running:
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("log", durability="fsync")
            client.topics.create("other", durability="fsync")
            client.topics.create("jobs", type="queue", durability="fsync")
            client.queue("jobs").put(b"1")
            for start in (0, 100):
                client.append_many("log", [b"%d" % n for n in range(start, start + 50)])
                client.append_many("log", [b"%d" % n for n in range(start + 50, start + 100)])
                client.append_many("other", [b"%d" % start])
                checkpoint(running)
        running.stop()
        data = Path(running.data_dir)
        newest = max(data.glob("topics/0000000000000001/seg-*.data"))
        away = data / "away.data"
        newest.rename(away)
        running.start()
        for transport in ("ring", "ipc"):
            with ringlog.connect(running.url, wait=10, transport=transport) as client:
                for refused in (
                    lambda: numbers(client, "log"),
                    lambda: client.append("log", b"x"),
                    lambda: client.topics.create("log", exist_ok=True),
                    lambda: client.topics.delete("log"),
                    lambda: client.topics.configure("log", ttl_ms=1_000),
                    lambda: next(iter(client.watch("log"))),
                    lambda: client.producer("log").send(b"x").result(10),
                ):
                    with pytest.raises(TopicHalted) as caught:
                        refused()
                    assert newest.stem in caught.value.detail["part"]
                    assert "put the file back" in str(caught.value)
                    assert not caught.value.retriable
                assert newest.stem in client.topics.state("log").missing_part
                assert numbers(client, "other")[:2] == [0, 100]
                client.append("other", b"7")
                with client.watch("*") as watch:
                    assert events_of(watch, 3) == {"other", "jobs", "log is halted"}
        named = checkpoint(running)
        assert any(path.endswith(newest.name) for path in named), "a backup must not pass over it"
        running.stop()
        away.rename(newest)
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            assert numbers(client, "log") == list(range(200))
            assert client.append("log", b"200").first_seq == 201
            assert [job.data for job in client.queue("jobs").claim()] == [b"1"]


def test_without_the_cold_tier_only_reads_of_its_records_fail(tmp_path):
    cold = tmp_path / "cold"
    cold.mkdir(mode=0o700)
    place = tmp_path / "engine"
    with (
        engine(
            directory=place, cold={"dir": str(cold), "hot_segments": 1, "interval_s": 0.1}, **ENGINE
        ) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        client.topics.create("log", durability="fsync")
        for start in (0, 100):
            client.append_many("log", [b"%d" % n for n in range(start, start + 100)])
            checkpoint(running)
        data = Path(running.data_dir)
        wait_until(lambda: len([*data.glob("topics/*/*.data")]) == 1, 30, "the older segment is moved")
        running.power_off()
    with engine(directory=place, **ENGINE) as running:
        for transport in ("ring", "ipc"):
            with ringlog.connect(running.url, wait=10, transport=transport) as client:
                with pytest.raises(ColdUnavailable) as caught:
                    numbers(client, "log")
                assert caught.value.retriable
                assert [int(record.data) for record in client.reader("log", 101)][:100] == list(
                    range(100, 200)
                )
                assert client.append("log", b"200")
                assert client.topics.state("log").missing_part == ""
    with (
        engine(directory=place, cold={"dir": str(cold)}, **ENGINE) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        assert numbers(client, "log") == [*range(200), 200, 200]
