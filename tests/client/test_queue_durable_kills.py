"""Queues with durable leases: workers keep their leases when shards or engines are killed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import ringlog
from ringlog.client import Client
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import wait_until
from tests.support.client_threads import DONE_S, JOBS, TIMEOUT_MS, WAYS, shard_of, work_under_kills
from tests.support.engines import client_fixture, engine_fixture
from tests.support.queue_jobs import counts
from tests.support.queue_worker import QueueWorker, judge

pytestmark = pytest.mark.slow

LONG_MS = 600_000
SHORT_MS = 8_000
KEPT_MS = 24_000

running = engine_fixture(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 100})

client = client_fixture(timeout_ms=TIMEOUT_MS)


def make(client: Client, durability: str = "fsync") -> None:
    client.topics.create("jobs", type="queue", durability=durability, lease_ms=LONG_MS, leases_durable=True)


@pytest.mark.parametrize(
    ("how", "transport"), [("shard", "ring"), ("shard", "ipc"), ("engine", "ring"), ("power", "ipc")]
)
def test_a_worker_can_ack_its_job_after_the_kill(running, how, transport):
    """The lease keeps its token and its deadline. No other worker gets the job before the deadline."""
    with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS, transport=transport) as client:
        make(client)
        mine, other = client.queue("jobs", node="mine"), client.queue("jobs", node="other")
        mine.put_many([b"job %d" % n for n in range(1, 6)])
        (first,) = mine.claim()
        ends_ns = time.monotonic_ns() + SHORT_MS * 1_000_000
        (short,) = mine.claim(lease_ms=SHORT_MS)
        (kept,) = mine.claim(lease_ms=KEPT_MS, auto_extend=True)
        until_ms = kept.deadline
        (rests,) = mine.claim()
        rests.nack(delay_ms=LONG_MS)
        if how == "shard":
            running.kill("wal_shard", shard=shard_of(client, "jobs"))
        elif how == "engine":
            running.crash()
            running.start()
        else:
            running.power_off()
            running.start()
        found = other.claim(9)
        if time.monotonic_ns() < ends_ns:
            assert [(job.seq, job.deliveries) for job in found] == [(5, 1)]
        first.ack()
        (again,) = [job for job in (*found, *other.claim(9, wait_ms=20_000)) if job.seq == short.seq]
        assert again.deliveries == 2
        assert time.monotonic_ns() >= ends_ns
        wait_until(lambda: kept.deadline > until_ms, 20, "a lease to be extended over the kill")
        kept.ack()
        stats = other.stats()
        assert (stats.ready, stats.in_flight, stats.delayed) == (0, 2, 1)


@pytest.mark.parametrize("victim", ["wal_shard", "gateway"])
@pytest.mark.timeout(150)
def test_no_job_is_delivered_twice_despite_kills(running, client, victim):
    """This includes the jobs of a claim whose reply was lost with the shard."""
    make(client, "fsync" if victim == "wal_shard" else "disk")
    queue = client.queue("jobs")
    queue.put_many([b"job %d" % n for n in range(1, JOBS + 1)])
    shard = shard_of(client, "jobs")
    workers = [QueueWorker(running.url, *way) for way in WAYS]
    work_under_kills(running, victim, shard, workers)
    wait_until(lambda: counts(queue) == (0, 0, 0), DONE_S, "the queue to be empty")
    assert judge(workers) == 0


HOLDING = """
import sys
import ringlog

with ringlog.connect(sys.argv[1], wait=20) as client:
    jobs = client.queue("jobs", node="dying").claim(2)
    print(len(jobs), flush=True)
    sys.stdin.read()
"""


def test_the_death_of_a_worker_is_noticed_after_a_shard_restart(running, client):
    """The shard's successor watches the process and ends its leases."""
    make(client)
    queue = client.queue("jobs")
    queue.put_many([b"1", b"2"])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, running.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=debug_environ(),
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == b"2"
            running.kill("wal_shard", shard=shard_of(client, "jobs"))
            assert queue.claim() == []
            assert queue.stats().in_flight == 2
        finally:
            holder.kill()
    assert [job.deliveries for job in queue.claim(2, wait_ms=20_000)] == [2, 2]
