"""Kills of processes while workers process jobs.

Every job is done and none is lost. A job is processed twice only if it was in flight during a kill.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import ringlog
from ringlog.client import Client
from ringlog.errors import LeaseLost, RinglogError
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.client_threads import DONE_S, JOBS, KILLS, TIMEOUT_MS, WAYS, shard_of, work_under_kills
from tests.support.engines import engine_fixture
from tests.support.queue_jobs import counts
from tests.support.queue_worker import QueueWorker, judge

pytestmark = pytest.mark.slow

running = engine_fixture(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 100})


@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("victim", ["wal_shard", "gateway"])
@pytest.mark.timeout(150)
def test_every_job_is_done_despite_kills(running: TestEngine, durability: str, victim: str) -> None:
    """Workers use rings and the gateway, and claim one or several jobs at a time."""
    with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS) as client:
        client.topics.create("jobs", type="queue", durability=durability, lease_ms=1_500)
        queue = client.queue("jobs")
        queue.put_many([b"job %d" % n for n in range(1, JOBS + 1)])
        shard = shard_of(client, "jobs")
        workers = [QueueWorker(running.url, *way) for way in WAYS]
        work_under_kills(running, victim, shard, workers)
        wait_until(lambda: counts(queue) == (0, 0, 0), DONE_S, "the queue to be empty")
        twice = judge(workers)
        assert twice <= 3 * KILLS * len(workers), "only what was out when somebody died"


DYING = """
import os, signal, sys
import ringlog

with ringlog.connect(sys.argv[1], wait=20) as client:
    jobs = client.queue("jobs").claim(5, auto_extend=True)
    assert len(jobs) == 5
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_between_claim_and_ack_loses_no_job(running: TestEngine, client: Client) -> None:
    """The client extends a lease only while its process lives."""
    client.topics.create("jobs", type="queue", lease_ms=3_000)
    queue = client.queue("jobs")
    queue.put_many([b"job %d" % n for n in range(1, 6)])
    died = subprocess.run(
        [sys.executable, "-c", DYING, running.url], timeout=40, check=False, env=debug_environ()
    )
    assert died.returncode == -9
    found = queue.claim(5, wait_ms=20_000)
    assert [(job.seq, job.deliveries) for job in found] == [(n, 2) for n in range(1, 6)]
    assert queue.ack(found).is_complete


def test_a_lease_is_reported_as_lost_after_its_shard_died(running: TestEngine, client: Client) -> None:
    """Without durable leases the new shard knows no leases. The next extension reports this to the client."""
    client.topics.create("jobs", type="queue")
    queue = client.queue("jobs")
    queue.put(b"job 1")
    (job,) = queue.claim(lease_ms=1_000, auto_extend=True)
    running.kill("wal_shard", shard=shard_of(client, "jobs"))
    assert job.lost.wait(20)
    with pytest.raises(LeaseLost):
        job.ack()
    (again,) = queue.claim(wait_ms=10_000)
    assert (again.seq, again.deliveries) == (1, 1), "deliveries count from 0 again"
    again.ack()


def test_a_waiting_claim_keeps_waiting_over_a_kill(running: TestEngine, client: Client) -> None:
    """The client sends the claim again to the new shard."""
    client.topics.create("jobs", type="queue")
    queue = client.queue("jobs")
    found: list[bytes] = []
    waiting = threading.Thread(
        target=lambda: found.extend(job.data for job in queue.claim(wait_ms=40_000)), daemon=True
    )
    waiting.start()
    wait_until(lambda: client.queue("jobs").stats().waiting == 1, 20, "the claim to wait")
    running.kill("wal_shard", shard=shard_of(client, "jobs"))
    wait_until(lambda: client.queue("jobs").stats().waiting == 1, 20, "the claim to wait again")
    client.queue("jobs").put(b"job 1")
    waiting.join(20)
    assert found == [b"job 1"]


def test_an_iteration_goes_on_when_its_engine_is_back(running: TestEngine) -> None:
    """This also holds if the engine is down for longer than the timeout of a request."""
    with ringlog.connect(running.url, wait=20, timeout_ms=300) as client:
        client.topics.create("jobs", type="queue", durability="disk")
        queue = client.queue("jobs")
        found: list[bytes] = []

        def work() -> None:
            for job in client.queue("jobs").jobs():
                with job:
                    found.append(job.data)

        working = threading.Thread(target=work, daemon=True)
        working.start()
        wait_until(lambda: queue.stats().waiting == 1, 20, "the iteration to wait")
        running.stop()
        wait_until(lambda: client.state.value != "ready", 20, "the client to notice")
        with pytest.raises(RinglogError):
            queue.claim()
        running.start()
        running.wait_ready()
        with ringlog.connect(running.url, wait=20) as other:
            other.queue("jobs").put(b"job 1")
            wait_until(lambda: found == [b"job 1"], 20, "the job to be done")
            wait_until(lambda: counts(other.queue("jobs")) == (0, 0, 0), 20, "its ack")
        client.close()
        working.join(20)
        assert not working.is_alive()


def test_a_lease_with_an_unanswered_ack_is_not_extended(running: TestEngine) -> None:
    """The outcome of the ack is unknown, and no program works on the job any more."""
    with ringlog.connect(running.url, wait=20, timeout_ms=300) as client:
        client.topics.create("jobs", type="queue", durability="disk")
        queue = client.queue("jobs")
        queue.put_many([b"job 1", b"job 2"])
        first, second = queue.claim(2, auto_extend=True)
        running.stop()
        with pytest.raises(RinglogError), first:
            assert first.seq == 1
        with pytest.raises(ZeroDivisionError), second:
            _ = 1 / 0
        assert first.lost.is_set()
        assert second.lost.is_set()
        running.start()
        running.wait_ready()
        with ringlog.connect(running.url, wait=20) as other:
            assert [job.seq for job in other.queue("jobs").claim(2, wait_ms=10_000)] == [1, 2]
