"""Deletes and retention in a real engine, over the log and over segments, through restarts and kills."""

from __future__ import annotations

import pytest

import ringlog
from ringlog.client import Tombstone
from ringlog.testing.real_engine import wait_until
from tests.support.checkpoints import checkpoint
from tests.support.engines import engine_fixture

CLASSES = ("fsync", "disk", "ephemeral")

host = engine_fixture(wal={"shards": 2, "file_bytes": "1MiB"}, storage={"enabled": True})


def seqs(client, topic):
    return [item.seq for item in client.reader(topic, 0) if not isinstance(item, Tombstone)]


def facts(client, topic):
    found = client.topics.state(topic)
    return found.count, found.bytes, found.earliest_seq


@pytest.mark.timeout(120)
def test_removals_are_exact_in_the_log_in_segments_and_after_a_kill(host):
    """One of the topics is ephemeral."""
    with ringlog.connect(host.url, wait=10) as client:
        for kind in CLASSES:
            client.topics.create(kind, durability=kind, cap_records=50)
            for n in range(60):
                client.append(kind, b"x" * n, tag="even" if n % 2 else "odd")
            assert facts(client, kind) == (50, sum(range(10, 60)), 11)
            assert client.topics.delete_records(kind, before_seq=21, match="even").deleted == 5
            assert facts(client, kind)[0] == 45
        wanted = [seq for seq in range(11, 61) if seq > 20 or seq % 2]
        assert all(seqs(client, kind) == wanted for kind in CLASSES)
        checkpoint(host)
        for kind in CLASSES:
            assert seqs(client, kind) == wanted
            assert client.topics.delete_records(kind, match="odd").deleted == 25
            client.append(kind, b"yyy", tag="odd")
        left = [*range(22, 61, 2), 61]
        expected = (21, sum(seq - 1 for seq in left[:-1]) + 3, 22)
        assert all(seqs(client, kind) == left for kind in CLASSES)
        assert all(facts(client, kind) == expected for kind in CLASSES)
        host.kill("wal_shard")
        host.wait_ready()
        for kind in ("fsync", "disk"):
            assert (seqs(client, kind), facts(client, kind)) == (left, expected)
        checkpoint(host)
    host.restart()
    with ringlog.connect(host.url, wait=10) as client:
        for kind in ("fsync", "disk"):
            assert (seqs(client, kind), facts(client, kind)) == (left, expected)
            client.topics.configure(kind, cap_records=5)
            assert seqs(client, kind) == left[-5:]


def test_records_expire_without_a_request(host):
    """The count of the topic follows."""
    with ringlog.connect(host.url, wait=10) as client:
        client.topics.create("t", durability="fsync", ttl_ms=300)
        client.append("t", b"1")
        assert seqs(client, "t") == [1]
        wait_until(lambda: client.topics.state("t").count == 0, 10, "expiry")
        assert client.read("t").tombstone.reason == "ttl"
