"""Requests about jobs through shared memory, with real processes.

The tests cover kills, hostile ring contents and large replies. If a call ring is unusable (RF-25), requests
go by socket. No job may be lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringlog
from ringlog.board import layout
from ringlog.board.mapping import BoardFile
from ringlog.board.processes import shard_bell
from ringlog.client import Client
from ringlog.limits import CLAIM_JOBS_MAX
from ringlog.ring.doorbell import BellRinger
from ringlog.testing.children import debug_environ
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

running = engine_fixture(wal={"shards": 1}, supervisor={"restart_max": 100})


@pytest.fixture
def client(running: TestEngine) -> Iterator[Client]:
    with ringlog.connect(running.url, wait=20) as opened:
        opened.topics.create("q", type="queue", durability="disk")
        yield opened


def rings(running: TestEngine) -> list[Path]:
    """Return the paths of all call rings."""
    where = Path(running.info.shm_dir)
    return sorted(path for path in where.glob("calls-*") if path.suffix not in {".bell", ".tmp"})


def answered(path: Path) -> int:
    """Return the number of bytes of replies that went through the ring."""
    file = BoardFile(str(path), layout.CALLS_MAGIC, writable=False)
    try:
        return int(file.words[96])
    finally:
        file.close()


def work(client: Client, jobs: int) -> list[bytes]:
    """Put jobs and process them one by one. Return the payloads of the processed jobs."""
    queue = client.queue("q")
    if jobs:
        queue.put_many([b"%d" % n for n in range(jobs)])
    done = []
    while found := queue.claim():
        found[0].ack()
        done.append(found[0].data)
    return done


def test_requests_of_a_local_client_go_through_its_call_ring(running: TestEngine, client: Client) -> None:
    assert work(client, 20) == [b"%d" % n for n in range(20)]
    (ring,) = rings(running)
    before = answered(ring)
    assert work(client, 20) == [b"%d" % n for n in range(20)]
    assert answered(ring) > before
    assert client.queue("q").stats().ready == 0


def test_a_claim_of_a_thousand_runs_goes_through_the_ring(running: TestEngine, client: Client) -> None:
    queue = client.queue("q")
    queue.put_many([b"x"] * (2 * CLAIM_JOBS_MAX))
    # Every second job is returned, so that the next claim consists of a thousand runs.
    first = queue.claim(CLAIM_JOBS_MAX)
    second = queue.claim(CLAIM_JOBS_MAX)
    assert queue.nack([*first[::2], *second[::2]]).is_complete
    mixed = queue.claim(CLAIM_JOBS_MAX)
    assert [job.seq for job in mixed] == [job.seq for job in [*first[::2], *second[::2]]]
    assert queue.ack([*mixed, *first[1::2], *second[1::2]]).is_complete
    stats = queue.stats()
    assert (stats.ready, stats.in_flight, stats.delayed) == (0, 0, 0)


def test_a_waiting_claim_is_answered_through_the_ring(running: TestEngine, client: Client) -> None:
    queue = client.queue("q")
    work(client, 1)
    with ringlog.connect(running.url, wait=20) as other:
        waiting = subprocess.Popen([sys.executable, "-c", _PUTS_LATER, running.url])
        (job,) = queue.claim(wait_ms=30_000)
        assert job.data == b"late"
        job.ack()
        assert waiting.wait(20) == 0
        assert other.queue("q").stats().ready == 0


_PUTS_LATER = """
import sys, ringlog
with ringlog.connect(sys.argv[1], wait=20) as client:
    queue = client.queue("q")
    while not queue.stats().waiting:
        pass
    queue.put(b"late")
"""


def test_a_corrupt_ring_is_replaced_by_the_socket(running: TestEngine, client: Client) -> None:
    """The client loses the ring, and no job is lost (RF-25)."""
    work(client, 3)
    (ring,) = rings(running)
    queue = client.queue("q")
    queue.put_many([b"a", b"b", b"c"])
    (held,) = queue.claim()
    file = BoardFile(str(ring), layout.CALLS_MAGIC, writable=True)
    file.words[64] = 1 << 40
    file.close()
    bell = BellRinger(shard_bell(running.info.shm_dir, 0))
    bell.ring()
    bell.close()
    wait_until(lambda: ring not in rings(running), 20, "the ring to be removed")
    held.ack()
    assert [job.data for job in queue.claim(10)] == [b"b", b"c"]
    assert queue.stats().in_flight == 2


def test_call_rings_are_replaced_after_the_death_of_their_shard(running: TestEngine, client: Client) -> None:
    work(client, 5)
    (before,) = rings(running)
    queue = client.queue("q")
    queue.put_many([b"%d" % n for n in range(50)])
    held = queue.claim(10)
    running.kill("wal_shard")
    settled = queue.ack(held)
    # Without durable leases the new shard knows no lease. It acks none of these jobs and delivers them again.
    assert settled.count == 0
    assert sorted(int(data) for data in work(client, 0)) == list(range(50))
    (after,) = rings(running)
    assert after != before


def test_the_call_ring_of_a_killed_client_is_removed(running: TestEngine, client: Client) -> None:
    work(client, 1)
    (ours,) = rings(running)
    child = subprocess.Popen(
        [sys.executable, "-c", _CLAIMS, running.url],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=debug_environ(),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"claimed\n"
    assert len(rings(running)) == 2
    child.kill()
    child.wait(20)
    child.stdout.close()
    assert child.stdin is not None
    child.stdin.close()
    wait_until(lambda: rings(running) == [ours], 20, "its ring to be removed")
    assert work(client, 2) == [b"0", b"1"]


_CLAIMS = """
import sys, ringlog
client = ringlog.connect(sys.argv[1], wait=20)
queue = client.queue("q")
queue.stats()
while queue.claim():
    pass
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_leaves_the_call_ring_to_its_parent(running: TestEngine, client: Client) -> None:
    """The child uses its own ring."""
    work(client, 2)
    (ours,) = rings(running)
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work(client, 3) == [b"0", b"1", b"2"] else 1
            client.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert work(client, 4) == [b"0", b"1", b"2", b"3"]
    assert ours in rings(running)
