"""Kills of processes while workers process jobs.

Every job is done and none is lost. A job is processed twice only if it was in flight during a kill.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

import ringlog
from ringlog.client import Client
from ringlog.client.queue import Queue
from ringlog.errors import LeaseLost, RinglogError
from ringlog.leases.tokens import incarnation_of
from ringlog.testing import engine
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import TestEngine, wait_until

pytestmark = pytest.mark.slow

JOBS = 600
KILLS = 4
BETWEEN = 60
"""Minimum number of jobs that workers ack between two kills."""
DONE_S = 40.0
TIMEOUT_MS = 60_000


@pytest.fixture
def running() -> Iterator[TestEngine]:
    with engine(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 100}) as found:
        yield found


class Worker(threading.Thread):
    """A worker that works until it is stopped. It notes each started job and each completed ack."""

    def __init__(self, url: str, topic: str, *, transport: str, most: int) -> None:
        super().__init__(daemon=True)
        self._url, self._topic, self._transport, self._most = url, topic, transport, most
        self.begun: list[tuple[int, int]] = []
        """Items are `(seq, token)`."""
        self.acked: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self.is_stopped = threading.Event()

    def run(self) -> None:
        try:
            with ringlog.connect(
                self._url, wait=20, timeout_ms=TIMEOUT_MS, transport=self._transport,  # type: ignore[arg-type]
            ) as client:  # fmt: skip
                queue = client.queue(self._topic)
                while not self.is_stopped.is_set():
                    self.work(queue)
        except BaseException as e:  # noqa: BLE001  judged by the test
            self.error = e

    def work(self, queue: Queue) -> None:
        jobs = queue.claim(self._most, wait_ms=200)
        self.begun += [(job.seq, job.lease.token) for job in jobs]
        assert all(job.data == b"job %d" % job.seq for job in jobs)
        skipped = set(queue.ack(jobs).skipped) if jobs else set()
        self.acked += [(job.seq, job.lease.token) for job in jobs if job.seq not in skipped]

    def stop(self) -> None:
        self.is_stopped.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error


def shard_of(client: Client, topic: str) -> int:
    def steps():
        info = yield client.connection.resolve(topic)
        return info.shard

    return client.run(steps())


def judge(workers: list[Worker]) -> int:
    """Check that every job was acked.

    Return the number of additional deliveries.

    Within one life of the shard no job may be acked twice.
    """
    acked = [entry for worker in workers for entry in worker.acked]
    begun = {entry for worker in workers for entry in worker.begun}
    assert {seq for seq, _ in acked} == set(range(1, JOBS + 1))
    by_life = Counter((seq, incarnation_of(token)) for seq, token in acked)
    assert max(by_life.values()) == 1, "two acks of one job in one life of its shard"
    return len(begun) - JOBS


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
        workers = [
            Worker(running.url, "jobs", transport=transport, most=most)
            for transport, most in (("ring", 1), ("ipc", 3), ("ipc", 1))
        ]
        for worker in workers:
            worker.start()
        for _ in range(KILLS):
            done = sum(len(worker.acked) for worker in workers)
            wait_until(lambda done=done: is_over(workers, done + BETWEEN), DONE_S, "jobs to be done")  # type: ignore[misc]
            running.kill(victim, shard=shard if victim == "wal_shard" else 0)
        wait_until(lambda: is_over(workers, JOBS), DONE_S, "all jobs to be done")
        wait_until(lambda: is_empty(queue), DONE_S, "the queue to be empty")
        for worker in workers:
            worker.stop()
        twice = judge(workers)
        assert twice <= 3 * KILLS * len(workers), "only what was out when somebody died"


def is_over(workers: list[Worker], done: int) -> bool:
    failed = [worker.error for worker in workers if worker.error is not None]
    assert not failed, failed
    return sum(len(worker.acked) for worker in workers) >= min(done, JOBS)


def is_empty(queue: Queue) -> bool:
    found = queue.stats()
    return (found.ready, found.in_flight, found.delayed) == (0, 0, 0)


DYING = """
import os, signal, sys
import ringlog

with ringlog.connect(sys.argv[1], wait=20) as client:
    jobs = client.queue("jobs").claim(5, auto_extend=True)
    assert len(jobs) == 5
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_between_claim_and_ack_loses_no_job(running: TestEngine) -> None:
    """The client extends a lease only while its process lives."""
    with ringlog.connect(running.url, wait=20) as client:
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


def test_a_lease_is_reported_as_lost_after_its_shard_died(running: TestEngine) -> None:
    """Without durable leases the new shard knows no leases. The next extension reports this to the client."""
    with ringlog.connect(running.url, wait=20) as client:
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


def test_a_waiting_claim_keeps_waiting_over_a_kill(running: TestEngine) -> None:
    """The client sends the claim again to the new shard."""
    with ringlog.connect(running.url, wait=20) as client:
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
            wait_until(lambda: is_empty(other.queue("jobs")), 20, "its ack")
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
