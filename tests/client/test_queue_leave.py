"""Workers that die on the engine's host: their jobs are ready for other workers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ringlog.actors.wal_shard.leases.worker_liveness import WorkerLiveness
from ringlog.process_id import own_process_id, process_started_ticks
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import wait_until

WORKER = """
import sys, time, ringlog
with ringlog.connect(sys.argv[1], wait=20, transport=sys.argv[3]) as client:
    queue = client.queue(sys.argv[2], node="shared")
    for _ in range(int(sys.argv[4])):
        queue.stats()
    jobs = queue.claim(2, wait_ms=20_000)
    print(len(jobs), flush=True)
    time.sleep(600)
"""


def worker(url: str, topic: str, transport: str, calls_before: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WORKER, url, topic, transport, str(calls_before)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=debug_environ())


def killed(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n"
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()


@pytest.mark.parametrize("calls_before", [0, 3])
def test_the_jobs_of_a_killed_worker_are_ready_immediately(
    ringlog_engine, client, ringlog_topic, calls_before
):
    """This also holds if its claim went through a call ring, since earlier calls had created one."""
    client.topics.create(ringlog_topic(), type="queue", lease_ms=3_600_000)
    queue = client.queue(ringlog_topic(), node="shared")
    queue.put_many([b"1", b"2", b"3"])
    killed(worker(ringlog_engine.url, ringlog_topic(), "ring", calls_before))
    jobs = []
    while len(jobs) < 3:
        jobs += queue.claim(9, wait_ms=20_000)
    assert sorted((job.data, job.deliveries) for job in jobs) == [(b"1", 2), (b"2", 2), (b"3", 1)]
    assert queue.ack(jobs).count == 3


def test_leases_of_a_killed_gateway_client_last_until_their_deadline(ringlog_engine, client, ringlog_topic):
    client.topics.create(ringlog_topic(), type="queue", lease_ms=3_600_000)
    queue = client.queue(ringlog_topic())
    queue.put_many([b"1", b"2"])
    killed(worker(ringlog_engine.url, ringlog_topic(), "ipc"))
    assert queue.claim(9, wait_ms=300) == []
    assert queue.stats().in_flight == 2


# -- lives ------------------------------------------------------------------------------------------------


def test_a_process_id_consists_of_pid_and_start_time():
    assert own_process_id() == (os.getpid(), process_started_ticks(os.getpid()))
    assert own_process_id()[1] > 0
    assert process_started_ticks(2**22 + 1) == 0


@pytest.fixture
def presence():
    made = WorkerLiveness()
    yield made
    made.close()


@pytest.mark.slow
def test_a_death_is_reported_once_and_unknown_processes_are_not_watched(presence):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        life = sleeper.pid, process_started_ticks(sleeper.pid)
        presence.watch((sleeper.pid, life[1] + 1))
        assert not presence, "it is not who it says"
        presence.watch((2**22 + 1, 5))
        presence.watch((0, 0))
        assert not presence
        presence.watch(life)
        presence.watch(life)
        assert presence.take_dead() == []
    finally:
        sleeper.kill()
        sleeper.wait(20)
    found = []
    wait_until(lambda: bool(found.extend(presence.take_dead()) or found), 20, "the death to be seen")
    assert found == [life]
    assert presence.take_dead() == []
    assert not presence
