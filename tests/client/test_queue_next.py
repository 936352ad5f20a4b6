"""An ack and the next claim in one request: `claim(done=…)`, and loops over one job at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import ringlog
from ringlog.client import Client
from ringlog.client.job import Job
from ringlog.client.leases.lease_extender import Lease
from ringlog.client.leases.lease_operations import UNCOMBINED_MAX, ClaimHandle, LeaseOperations
from ringlog.client.queue import Queue
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.errors import LeaseLost, UsageError
from ringlog.link.futures import Pending, run_steps
from ringlog.link.peer_request import PeerReply
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import client_fixture
from tests.support.queue_jobs import LONG_MS, counts, fill

DONE_S = 40.0

client = client_fixture("ring", "ipc")


@pytest.fixture
def queue(client, ringlog_topic) -> Queue:
    return queue_of(client, ringlog_topic("next"))


def queue_of(client: Client, name: str, **config: Any) -> Queue:
    client.topics.create(name, type="queue", lease_ms=LONG_MS, **({"durability": "disk"} | config))
    return client.queue(name, node="worker")


class Asked(list[str]):
    """Records the kinds of requests about jobs that a client sends from now on."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        session = client._shell.session
        request_jobs = session.request_jobs

        def asking(message: Any, **how: Any) -> Any:
            self.append(type(message).__name__)
            return request_jobs(message, **how)

        monkeypatch.setattr(session, "request_jobs", asking)


def test_done_jobs_are_deleted_when_the_next_claim_returns(queue):
    fill(queue, 50)
    jobs = queue.claim(3)
    found = list(jobs.payloads())
    while jobs := queue.claim(3, done=jobs):
        assert counts(queue) == (50 - len(found) - len(jobs), len(jobs), 0)
        found += jobs.payloads()
    assert found == [b"job %d" % n for n in range(1, 51)]
    assert counts(queue) == (0, 0, 0)


@pytest.mark.interpreted
@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_local_client_sends_ack_and_claim_in_one_request(
    ringlog_engine, ringlog_topic, monkeypatch, durability
):
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        queue = queue_of(client, ringlog_topic("one"), durability=durability)
        fill(queue, 40)
        jobs = queue.claim()
        queue.ack(jobs)  # With the first ack the client learns the size of jobs.
        jobs = queue.claim()
        asked = Asked(client, monkeypatch)
        for _ in range(30):
            jobs = queue.claim(done=jobs)
        assert asked == ["AckAndClaim"] * 30
        queue.ack(jobs)
        assert counts(queue) == (40 - 32, 0, 0)


@pytest.mark.interpreted
@pytest.mark.parametrize("config", [{"record_priority": True}, {"leases_durable": True}])
def test_queues_that_cannot_combine_get_two_requests_and_few_attempts(
    ringlog_engine, ringlog_topic, monkeypatch, config
):
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        queue = queue_of(client, ringlog_topic("two"), **config)
        fill(queue, 40)
        jobs = queue.claim()
        asked = Asked(client, monkeypatch)
        for _ in range(30):
            jobs = queue.claim(done=jobs)
        assert asked.count("Ack") == asked.count("Claim") == 30
        assert asked.count("AckAndClaim") == 5, "each time that it does not go it is left longer"
        queue.ack(jobs)
        assert counts(queue) == (40 - 31, 0, 0)


class Apart:
    """A fake local connection whose engine never combines ack and claim."""

    transport = "ring"

    def request_jobs(self, message: Any, *, extra_ms: int = 0) -> Pending[PeerReply]:
        pending: Pending[PeerReply] = Pending()
        pending.resolve(PeerReply(m.NotCombinable(message.topic)))
        return pending


def test_combining_is_tried_again_after_growing_pauses() -> None:
    working = LeaseOperations("q", "worker", SystemClock())
    pauses = [0]
    for _ in range(1_500):
        done = run_steps(working.ack_and_claim(Apart(), [Lease(1, 1, 0, LONG_MS, 0)], 1, None, ClaimHandle()))  # type: ignore[arg-type]
        assert done.result() is None
        if working._uncombined_left >= pauses[-1] and working._uncombined_left:
            pauses.append(working._uncombined_left)
    assert pauses == [0, 1, 3, 7, 15, 31, 63, 127, 255, *[UNCOMBINED_MAX] * 4]


def test_done_jobs_are_acked_even_if_no_job_is_ready(queue):
    fill(queue, 1)
    jobs = queue.claim()
    found = queue.claim(done=jobs)
    assert len(found) == 0
    assert counts(queue) == (0, 0, 0)


def test_a_claim_waits_after_its_done_jobs_were_acked(queue, ringlog_engine):
    fill(queue, 1)
    jobs = queue.claim()
    found: list[bytes] = []
    waiting = threading.Thread(
        target=lambda: found.extend(queue.claim(wait_ms=30_000, done=jobs).payloads()), daemon=True
    )
    waiting.start()
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        wait_until(lambda: looks.stats().waiting == 1 and counts(looks) == (0, 0, 0), 20, "the claim to wait")
        looks.put(b"late")
        waiting.join(20)
    assert found == [b"late"]


def test_an_expired_lease_in_done_is_an_error_and_claims_nothing(queue):
    fill(queue, 5)
    first, second = queue.claim(2)
    queue.nack([first])
    with pytest.raises(LeaseLost) as raised:
        queue.claim(done=[first, second])
    assert raised.value.detail["seqs"] == [first.seq]
    assert counts(queue) == (4, 0, 0), "the other one is done"
    assert [job.seq for job in queue.claim(5)] == [1, 3, 4, 5]


def test_done_accepts_jobs_of_several_claims(queue):
    """Their seqs are not consecutive, so the client needs two requests. The result is the same."""
    fill(queue, 9)
    held = [*queue.claim(2), *queue.claim(2)]
    jobs = queue.claim(2, done=[held[0], held[3]])
    assert [job.seq for job in jobs] == [5, 6]
    assert counts(queue) == (3, 4, 0)
    queue.ack([*held[1:3], *jobs])
    assert counts(queue) == (3, 0, 0)


def test_done_jobs_of_a_loop_free_slots_of_the_loop(queue):
    fill(queue, 5)
    loop = queue.jobs(max_in_flight=1)
    first = next(loop)
    (second,) = queue.claim(done=[first])
    third = next(loop)
    assert [first.seq, second.seq, third.seq] == [1, 2, 3]
    queue.ack([second, third])
    loop.close()
    assert counts(queue) == (2, 0, 0)


def test_an_invalid_claim_acks_nothing(queue):
    fill(queue, 2)
    jobs = queue.claim()
    for wrong in ({"max": 0}, {"max": 1_001}, {"wait_ms": -1}, {"order": "name"}):
        with pytest.raises(UsageError):
            queue.claim(done=jobs, **wrong)
    assert counts(queue) == (1, 1, 0)
    assert queue.ack(jobs).is_complete


def test_a_loop_over_one_job_acks_it_before_the_next_one(queue, ringlog_engine):
    fill(queue, 30)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        found: list[Job] = []
        for job in queue.jobs(pipelined_acks=True):
            if found:
                assert found[-1].lease.is_over
            if job.seq % 7 == 0:
                ready, in_flight, _ = counts(looks)
                assert (ready, in_flight) == (30 - job.seq, 1)
            with job:
                found.append(job)
            if job.seq == 30:
                break
        assert [job.data for job in found] == [b"job %d" % n for n in range(1, 31)]
        assert counts(looks) == (0, 0, 0), "leaving it waits for the last ack"


def test_a_finished_job_is_acked_before_the_next_one_is_requested(queue, ringlog_engine):
    """The program may request the next job much later."""
    fill(queue, 3)
    jobs = queue.jobs(pipelined_acks=True)
    job = next(jobs)
    with job:
        pass
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        wait_until(lambda: counts(looks) == (2, 0, 0), 20, "the ack")
    assert next(jobs).seq == 2
    jobs.close()
    assert counts(queue) == (1, 1, 0), "what was begun is still its holder's"


def test_a_failed_block_returns_its_job_and_the_loop_continues(queue):
    fill(queue, 3)
    found = []
    for job in queue.jobs(pipelined_acks=True):
        found.append(job.seq)
        try:
            with job:
                if job.seq == 2:
                    raise ValueError("no")
        except ValueError:
            continue
        if job.seq == 3:
            break
    assert found == [1, 2, 3]
    assert counts(queue) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_loop_does_every_job_once_despite_kills_between_ack_and_claim(durability: str) -> None:
    """Kills of the shard during a combined ack and claim lose no job.

    A job is delivered again only if it was in flight when the shard died.
    """
    jobs, kills = 3_000, 5
    with (
        engine(wal={"shards": 1}, supervisor={"restart_max": 100}) as running,
        ringlog.connect(running.url, wait=20, timeout_ms=LONG_MS) as client,
    ):
        queue = queue_of(client, "jobs", durability=durability)
        fill(queue, jobs)
        begun: list[int] = []
        killing = threading.Thread(target=_kill, args=(running, begun, jobs, kills), daemon=True)
        killing.start()
        looks = client.queue("jobs", node="looks")
        for job in client.queue("jobs", node="loop").jobs(pipelined_acks=True):
            with job:
                begun.append(job.seq)
            if len(set(begun)) == jobs:
                break
        killing.join(DONE_S)
        wait_until(lambda: counts(looks) == (0, 0, 0) or _rest(looks, begun), DONE_S, "an empty queue")
        assert set(begun) == set(range(1, jobs + 1))
        assert len(begun) - jobs <= 2 * kills, "only what was out when the shard died"


def _rest(queue: Queue, begun: list[int]) -> bool:
    """Process jobs that were returned after the last kill.

    Always return False, as a condition of `wait_until`.
    """
    left = queue.claim(100)
    begun += [job.seq for job in left]
    queue.ack(left)
    return False


def _kill(running: TestEngine, begun: list[int], jobs: int, kills: int) -> None:
    for n in range(1, kills + 1):
        wait_until(lambda n=n: len(begun) >= n * jobs // (kills + 1), DONE_S, "jobs to be done")  # type: ignore[misc]
        running.kill("wal_shard", shard=0)
