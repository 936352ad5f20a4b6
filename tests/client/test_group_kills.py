"""Kills of shards and gateways while members of a consumer group work.

Members ack every record once, and no lease is lost.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import ringlog
from ringlog.client import Client, Record
from ringlog.client.group import Group
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.client_threads import JOBS, TIMEOUT_MS, WAYS, JobThread, shard_of, work_under_kills
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

LEASE_MS = 120_000
"""Longer than the test, so no lease may expire. A second delivery is an error."""
running = engine_fixture(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 100})


class Member(JobThread):
    """It notes each delivered record and each completed ack."""

    def __init__(self, url: str, transport: str, most: int) -> None:
        super().__init__(url, transport, most)
        self.given: list[int] = []

    def source(self, client: Client) -> Group:
        return client.group("t", "g", mode="queue")

    def turn(self, source: Group) -> None:
        jobs = source.claim(self.most, wait_ms=200, lease_ms=LEASE_MS)
        self.given += [job.seq for job in jobs]
        assert all(job.data == b"record %d" % job.seq and job.deliveries == 1 for job in jobs)
        if jobs:
            assert source.ack(jobs).is_complete, "a lease outlives its shard"
        self.acked += [job.seq for job in jobs]


def fill(client: Client, durability: str) -> None:
    client.topics.create("t", durability=durability)
    client.append_many("t", [b"record %d" % n for n in range(1, JOBS + 1)])


@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("victim", ["wal_shard", "gateway"])
@pytest.mark.timeout(150)
def test_every_record_is_acked_exactly_once_despite_kills(
    running: TestEngine, durability: str, victim: str
) -> None:
    """Leases survive their shard.

    A retried claim or ack whose reply was lost has the result of the first attempt.
    """
    with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS) as client:
        fill(client, durability)
        members = [Member(running.url, *way) for way in WAYS]
        work_under_kills(running, victim, shard_of(client, "t"), members)
        for found in ("given", "acked"):
            assert sorted(seq for each in members for seq in getattr(each, found)) == list(range(1, JOBS + 1))
        stats = client.group("t", "g", mode="queue").stats()
        assert (stats.floor, stats.lag) == (JOBS, 0)


DYING = """
import os, signal, sys
import ringlog

with ringlog.connect(sys.argv[1], wait=20) as client:
    group = client.group("t", "g", mode="queue", release_on_exit=sys.argv[2] == "yes")
    assert len(group.claim(5, lease_ms=120_000)) == 5
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_records_of_a_killed_member_are_delivered_to_others_at_once(
    running: TestEngine, client: Client
) -> None:
    """The leases of a dead process end before their deadlines, unless `release_on_exit` is False."""
    group = client.group("t", "g", mode="queue")
    for wanted, seqs in (("yes", [1, 2, 3, 4, 5]), ("no", [])):
        client.append_many("t", [b"record"] * 5)
        dying = [sys.executable, "-c", DYING, running.url, wanted]
        died = subprocess.run(dying, timeout=40, check=False, env=debug_environ())
        assert died.returncode == -9
        found = group.claim(10, wait_ms=20_000 if seqs else 500)
        assert [(job.seq, job.deliveries) for job in found] == [(seq, 2) for seq in seqs]
        assert group.ack(found).is_complete


def test_a_stream_group_continues_over_kills_and_commits(running: TestEngine) -> None:
    """The iteration skips no record and delivers none twice."""
    with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS) as client:
        fill(client, "fsync")
        shard = shard_of(client, "t")
        group = client.group("t", "s")
        found: list[int] = []
        for record in group.records(auto_commit_ms=0):
            assert isinstance(record, Record)
            found.append(record.seq)
            if record.seq % 200 == 100:
                running.kill(
                    "wal_shard" if record.seq < 400 else "gateway", shard=shard if record.seq < 400 else 0
                )
            if record.seq == JOBS:
                break
        assert found == list(range(1, JOBS + 1))
        group.commit()
        assert group.stats().floor == JOBS


def test_an_iteration_goes_on_when_its_engine_is_back(running: TestEngine) -> None:
    """The client sends the waiting claim of the iteration to the restarted engine."""
    with ringlog.connect(running.url, wait=20, timeout_ms=2_000) as client:
        client.topics.create("t", durability="disk")
        group = client.group("t", "g", mode="queue")
        found: list[bytes] = []

        def work() -> None:
            for job in client.group("t", "g", mode="queue").jobs():
                with job:
                    found.append(job.data)

        working = threading.Thread(target=work, daemon=True)
        working.start()
        wait_until(lambda: group.stats().waiting == 1, 20, "the iteration to wait")
        running.stop()
        wait_until(lambda: client.state.value != "ready", 20, "the client to notice")
        running.start()
        running.wait_ready()
        with ringlog.connect(running.url, wait=20) as other:
            other.append("t", b"record 1")
            wait_until(lambda: found == [b"record 1"], 20, "the record to be done")
            theirs = other.group("t", "g", mode="queue")
            wait_until(lambda: theirs.stats().floor == 1, 20, "its ack")
        client.close()
        working.join(20)
        assert not working.is_alive()
