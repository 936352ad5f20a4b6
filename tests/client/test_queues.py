"""Queues through the public client, over rings and over the gateway."""

from __future__ import annotations

import os
import threading
import time

import pytest

import ringlog
from ringlog.client.job import Job
from ringlog.client.leases.job_facts import backoff_ms
from ringlog.errors import InvalidRequest, LeaseLost, NotAQueue, TopicNotFound, UsageError
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from tests.support.checkpoints import checkpoint
from tests.support.engines import client_fixture
from tests.support.queue_jobs import LONG_MS, counts, fill

pytestmark = pytest.mark.slow

SHORT_MS = 1_200
"""On a busy host a client may extend a lease some hundred milliseconds late."""

client = client_fixture("ring", "ipc")


def test_jobs_are_put_claimed_and_acked(queue):
    """A claimed job has all fields of its record. A second ack fails with `LeaseLost`."""
    assert (
        queue.put(b'{"to": "ann"}', key=b"k", tag="mail", meta={"n": 1}, headers={"h": b"v"}).first_seq == 1
    )
    (job,) = queue.claim()
    assert (job.seq, job.json(), job.key, job.tag, job.meta, dict(job.headers), job.deliveries) == (
        1, {"to": "ann"}, b"k", "mail", {"n": 1}, {"h": b"v"}, 1,
    )  # fmt: skip
    assert job.lease_id.startswith("lease_")
    assert 0 < job.deadline - time.time() <= LONG_MS / 1_000
    assert counts(queue) == (0, 1, 0)
    job.ack()
    assert counts(queue) == (0, 0, 0)
    with pytest.raises(LeaseLost) as lost:
        job.ack()
    assert lost.value.detail["seq"] == 1


def test_a_claim_on_an_empty_queue_returns_an_empty_list(queue):
    """This holds with and without a waiting time."""
    began = time.monotonic()
    assert queue.claim(5) == []
    assert queue.claim(5, wait_ms=50) == []
    assert time.monotonic() - began < 5


def test_jobs_are_read_from_frames_of_all_kinds(queue, client):
    """The log contains small, large and compressed frames."""
    expected = []
    for n in range(40):
        expected.append(b"single %d" % n)
        queue.put(expected[-1])
    expected += [b"many %d" % n for n in range(700)]
    queue.put_many(expected[40:])
    with client.producer(queue.topic, codec="zstd", create=False) as producer:
        producer.send_many([b"small %d" % n * 50 for n in range(300)]).result(10)
    expected += [b"small %d" % n * 50 for n in range(300)]
    found: list[Job] = []
    for most in (1, 3, 39, 500, 1_000):
        found += queue.claim(most)
    assert [job.data for job in found] == expected
    assert [job.seq for job in found] == list(range(1, len(expected) + 1))
    assert queue.nack(found[100:110]).count == 10
    assert queue.nack([found[700], found[5]]).count == 2
    again = queue.claim(1_000)
    assert [job.data for job in again] == [expected[at] for at in (5, *range(100, 110), 700)]
    assert {job.deliveries for job in again} == {2}
    left = [job for job in found if job.seq not in {each.seq for each in again}]
    assert queue.ack([*left, *again]).count == len(expected)
    assert counts(queue) == (0, 0, 0)


def test_an_ack_names_the_jobs_whose_leases_are_lost(queue):
    """The other jobs of the same ack are done."""
    fill(queue, 3)
    jobs = queue.claim(3)
    queue.nack([jobs[1]])
    settled = queue.ack(jobs)
    assert (settled.count, settled.skipped, settled.is_complete) == (2, (2,), False)
    assert counts(queue) == (1, 0, 0)


def test_a_waiting_claim_gets_a_job_that_is_put_later(queue, ringlog_engine):
    found: list[Job] = []
    waiting = threading.Thread(target=lambda: found.extend(queue.claim(wait_ms=20_000)))
    waiting.start()
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        theirs = other.queue(queue.topic)
        wait_until(lambda: theirs.stats().waiting == 1, 10, "the claim to wait")
        theirs.put(b"late")
    waiting.join(20)
    assert [job.data for job in found] == [b"late"]


def test_a_job_context_acks_the_job_or_returns_it(queue):
    fill(queue, 2)
    first, second = queue.claim(2)
    with first:
        assert first.text() == "job 1"
    with pytest.raises(ZeroDivisionError), second:
        _ = 1 / 0
    assert counts(queue) == (0, 0, 1), "it rests for a while"
    assert [backoff_ms(n) for n in (1, 2, 3, 100)] == [1_000, 2_000, 4_000, 60_000]


def test_a_job_settled_inside_its_context_is_not_settled_again(queue):
    fill(queue, 2)
    for job in queue.claim(2):
        with job:
            if job.seq == 1:
                job.ack()
            else:
                job.nack(delay_ms=LONG_MS)
    assert counts(queue) == (0, 0, 1)


def test_a_lost_lease_raises_lease_lost_at_the_end_of_the_context(queue):
    """Another worker already has the job."""
    fill(queue, 1)
    (job,) = queue.claim(lease_ms=100)
    wait_until(lambda: counts(queue) == (1, 0, 0), 10, "the lease to expire")
    (other,) = queue.claim()
    with pytest.raises(LeaseLost), job:
        assert job.deliveries == 1
    assert other.deliveries == 2
    other.ack()


def test_a_lease_is_extended_while_its_job_is_processed(queue):
    """With `auto_extend` the client extends the lease without calls of the program."""
    fill(queue, 2)
    (kept,) = queue.claim(lease_ms=SHORT_MS, auto_extend=True)
    (left,) = queue.claim(lease_ms=SHORT_MS)
    first_deadline = kept.deadline
    wait_until(lambda: counts(queue) == (1, 1, 0), 10, "the other lease to expire")
    wait_until(lambda: kept.deadline > first_deadline + 0.3, 10, "the lease to be extended again and again")
    assert not kept.lost.is_set()
    kept.ack()
    assert counts(queue) == (1, 0, 0)
    assert left.seq == 2


def test_the_holder_of_a_deleted_job_is_notified(queue, client):
    """The next extension fails, and the client sets `job.lost`."""
    fill(queue, 1)
    (job,) = queue.claim(lease_ms=200, auto_extend=True)
    client.topics.delete_records(queue.topic, before_seq=2)
    assert job.lost.wait(10)


def test_a_lease_can_be_extended_by_a_call(queue):
    """After the ack an extension fails with `LeaseLost`."""
    fill(queue, 1)
    (job,) = queue.claim(lease_ms=5_000)
    before = job.deadline
    job.extend(LONG_MS)
    assert job.deadline > before + 50
    with pytest.raises(UsageError):
        queue.extend([job], 0)
    job.ack()
    with pytest.raises(LeaseLost):
        job.extend(LONG_MS)


def test_an_iteration_delivers_all_jobs(queue):
    fill(queue, 50)
    found = []
    for job in queue.jobs(max_in_flight=8):
        with job:
            found.append(job.data)
        if len(found) == 50:
            break
    assert found == [b"job %d" % n for n in range(1, 51)]
    assert counts(queue) == (0, 0, 0)


def test_leaving_an_iteration_returns_jobs_that_were_not_started(queue):
    """The client had claimed up to `max_in_flight` jobs in advance."""
    fill(queue, 20)
    for job in queue.jobs(max_in_flight=8):
        with job:
            break
    assert counts(queue) == (19, 0, 0)


def test_closing_the_client_returns_jobs_that_were_not_started(ringlog_engine, queue):
    """The started job stays leased."""
    fill(queue, 20)
    other = ringlog.connect(ringlog_engine.url, wait=10)
    jobs = other.queue(queue.topic).jobs(max_in_flight=8)
    begun = next(jobs)
    wait_until(lambda: counts(queue) == (12, 8, 0), 10, "the jobs to be leased")
    other.close()
    assert counts(queue) == (19, 1, 0)
    assert list(jobs) == [], "it ends with its client"
    assert begun.seq == 1


def test_a_client_can_be_closed_while_a_thread_waits_for_jobs(ringlog_engine, queue):
    """`close` is bounded and ends the iteration."""
    other = ringlog.connect(ringlog_engine.url, wait=10, transport=queue._client.transport)
    found: list[Job] = []
    waiting = threading.Thread(target=lambda: found.extend(other.queue(queue.topic).jobs()), daemon=True)
    waiting.start()
    wait_until(lambda: queue.stats().waiting == 1, 10, "the iteration to wait")
    began = time.monotonic()
    other.close()
    assert time.monotonic() - began < 5
    waiting.join(10)
    assert (waiting.is_alive(), found) == (False, [])


def test_an_iteration_never_exceeds_max_in_flight(queue):
    fill(queue, 10)
    jobs = queue.jobs(max_in_flight=2)
    first, second = next(jobs), next(jobs)
    assert counts(queue) == (8, 2, 0)
    third: list[Job] = []
    waiting = threading.Thread(target=lambda: third.append(next(jobs)))
    waiting.start()
    second.nack(delay_ms=LONG_MS)
    waiting.join(10)
    assert third[0].seq == 3
    assert counts(queue) == (7, 2, 1)
    first.ack()
    third[0].ack()
    jobs.close()
    assert counts(queue) == (7, 0, 1)


def test_a_job_settled_twice_frees_one_slot(queue):
    """The second settlement is skipped and must not free the slot of another job."""
    queue.put_many([b"%d" % n for n in range(6)])
    jobs = queue.jobs(max_in_flight=2)
    first, second = next(jobs), next(jobs)
    assert queue.ack([first, first]).skipped == (first.seq,)
    third = next(jobs)
    assert queue.stats().in_flight == 2
    second.ack()
    third.ack()
    jobs.close()


def test_threads_that_drain_a_queue_do_each_job_once(queue, ringlog_engine):
    """A job is in at most one lease (Q1)."""
    fill(queue, 600)
    done: list[int] = []

    def work() -> None:
        with ringlog.connect(ringlog_engine.url, wait=10, transport=queue._client.transport) as mine:
            own = mine.queue(queue.topic)
            while jobs := own.claim(7):
                assert own.ack(jobs).is_complete
                done.extend(job.seq for job in jobs)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(40)
    assert sorted(done) == list(range(1, 601))
    assert counts(queue) == (0, 0, 0)


def test_purge_deletes_all_jobs_and_peek_leases_none(queue):
    fill(queue, 5)
    queue.claim(2)
    assert [record.seq for record in queue.peek(3)] == [1, 2, 3]
    assert queue.purge().deleted == 5
    assert counts(queue) == (0, 0, 0)
    assert queue.put(b"new").first_seq == 6


def test_using_a_queue_never_creates_it(client, ringlog_topic):
    """Calls fail with `TopicNotFound`, and with `NotAQueue` for a topic of type `log`."""
    absent = client.queue(ringlog_topic("absent"))
    for call in (lambda: absent.put(b"x"), absent.claim, absent.stats, absent.purge, absent.peek):
        with pytest.raises(TopicNotFound):
            call()
    client.topics.create(ringlog_topic("log"))
    log = client.queue(ringlog_topic("log"))
    for call in (lambda: log.put(b"x"), log.claim, log.stats):
        with pytest.raises(NotAQueue):
            call()


def test_invalid_queue_options_are_refused(queue, client):
    for call in (
        lambda: queue.claim(0),
        lambda: queue.claim(1_001),
        lambda: queue.claim(wait_ms=-1),
        lambda: queue.claim(lease_ms=-1),
        lambda: next(queue.jobs(max_in_flight=0)),
        lambda: queue.nack([], delay_ms=-1),
        lambda: client.queue(queue.topic, node="n" * 129),
    ):
        with pytest.raises((UsageError, InvalidRequest)):
            call()


def test_a_forked_child_leaves_the_jobs_of_its_parent_alone(queue):
    """The child can claim jobs of its own."""
    fill(queue, 20)
    jobs = queue.jobs(max_in_flight=4, lease_ms=LONG_MS)
    first = next(jobs)
    pid = os.fork()
    if not pid:
        found: list[int] = []
        try:
            (job,) = queue.claim(auto_extend=True)
            job.ack()
            jobs.close()
            found = [job.seq]
        finally:
            os._exit(0 if found == [5] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counts(queue) == (15, 4, 0), "what the parent has not begun is not given back by its child"
    assert [next(jobs).seq for _ in range(3)] == [2, 3, 4]
    first.ack()


def test_jobs_are_read_from_segments_and_from_the_log(tmp_path):
    """The compactor runs while jobs are leased, and jobs of the segments are returned."""
    with (
        engine(directory=tmp_path / "e", wal={"shards": 1}, storage={"enabled": True}) as running,
        ringlog.connect(running.url, wait=20) as client,
    ):
        client.topics.create("q", type="queue")
        queue = client.queue("q")
        fill(queue, 100)
        first = queue.claim(10)
        wait_until(lambda: bool(checkpoint(running)), 40, "a checkpoint with files")
        queue.put_many([b"job %d" % n for n in range(101, 151)])
        queue.nack(first)
        found = queue.claim(1_000)
        assert [job.data for job in found] == [b"job %d" % n for n in range(1, 151)]
        assert queue.ack(found[:120]).count == 120
        wait_until(lambda: bool(checkpoint(running)), 40, "a checkpoint with files")
        queue.nack(found[120:])
        assert [job.seq for job in queue.claim(1_000)] == list(range(121, 151))


def test_a_waiting_claim_does_not_block_other_threads(queue):
    found: list[Job] = []
    waiting = threading.Thread(target=lambda: found.extend(queue.claim(wait_ms=60_000)))
    waiting.start()
    wait_until(lambda: queue.stats().waiting == 1, 10, "the other thread's claim")
    assert list(queue.claim(wait_ms=0)) == []
    assert queue.stats().waiting == 1
    queue.put(b"job")
    waiting.join(20)
    assert [job.data for job in found] == [b"job"]


def test_idle_jobs_of_a_worker_can_be_stolen(client, queue):
    """As in consumer groups, a worker steals by seq, or by a claim when no other job is ready."""
    fill(queue, 3)
    lost = queue.claim(3)
    other = client.queue(queue.topic, node="other", min_idle_ms=LONG_MS)
    assert other.claim() == []
    assert queue.steal([1], min_idle_ms=LONG_MS) == []
    assert other.steal([]) == []
    stolen = other.steal([2, 99])
    assert [(job.seq, job.deliveries, job.data) for job in stolen] == [(2, 2, b"job 2")]
    assert queue.ack(lost).skipped == (2,)
    stolen[0].ack()
    fill(queue, 1)
    held = queue.claim()
    eager = client.queue(queue.topic, node="eager", min_idle_ms=1)
    taken: list[Job] = []
    wait_until(lambda: bool(taken.extend(eager.claim()) or taken), 10, "a millisecond")
    assert [job.seq for job in taken] == [job.seq for job in held]
    for wrong in ({"min_idle_ms": -1}, {"lease_ms": 1}):
        with pytest.raises(UsageError):
            queue.steal([1], **wrong)
    with pytest.raises(UsageError):
        client.queue(queue.topic, min_idle_ms=-1)
