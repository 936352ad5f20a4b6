"""Acks that a loop does not wait for: `jobs(pipelined_acks=True)` and `batches()`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import ringlog
from ringlog.client import Client
from ringlog.client.job import Job
from ringlog.client.leases.ack_pipeline import AckPipeline
from ringlog.client.leases.job_facts import InFlightLimit
from ringlog.client.leases.lease_extender import Lease
from ringlog.client.requests.results import Settled
from ringlog.errors import LeaseLost, NotReady, UsageError
from ringlog.link.futures import Pending, Steps
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import client_fixture
from tests.support.queue_jobs import LONG_MS, counts, fill

SHORT_MS = 1_200
"""On a busy host a client may extend a lease some hundred milliseconds late."""
JOBS = 400

client = client_fixture("ring", "ipc")


# -- the order of acks, without an engine --------------------------------------------------------------------


class Line:
    """A fake queue. The test resolves its acks."""

    topic = "jobs"

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.asked: list[Pending[tuple[int, ...]]] = []

    def ack(self, connection: Any, leases: Sequence[Lease]) -> Steps[Settled]:
        self.sent.append([lease.seq for lease in leases])
        asked: Pending[tuple[int, ...]] = Pending()
        self.asked.append(asked)
        skipped = yield asked
        for lease in leases:
            if lease.seq in skipped:
                lease.mark_lost()
            lease.is_over = True
        return Settled(len(leases) - len(skipped), skipped)


class Held:
    """A job of an iteration, with the parts that AckPipeline uses."""

    def __init__(self, seq: int) -> None:
        self.lease = Lease(seq, seq, 0, LONG_MS, 0)
        self.has_left = False

    def release_slot(self) -> None:
        self.has_left = True


def test_one_ack_request_is_in_flight_and_later_acks_join_the_next_one():
    line = Line()
    behind = AckPipeline(line, None)
    jobs = [Held(n) for n in range(1, 6)]
    for job in jobs[:4]:
        behind.add_job(job)  # type: ignore[arg-type]
    assert line.sent == [[1]]
    assert all(job.has_left for job in jobs[:4]), "there is room for others at once"
    assert not any(job.lease.is_over for job in jobs), "leases are kept until the answer"
    line.asked[0].resolve(())
    assert line.sent == [[1], [2, 3, 4]]
    line.asked[1].resolve(())
    behind.add_job(jobs[4])  # type: ignore[arg-type]
    assert line.sent[2:] == [[5]]


def test_all_acks_are_sent_before_a_claim():
    line = Line()
    behind = AckPipeline(line, None)
    for n in (1, 2):
        behind.add_job(Held(n))  # type: ignore[arg-type]
    behind.flush()
    assert line.sent == [[1], [2]]
    waits = behind.wait_answered()
    line.asked[1].resolve(())
    assert not waits.is_done
    line.asked[0].resolve(())
    assert waits.is_done


def test_a_failed_ack_is_reported_once_and_its_leases_are_lost():
    line = Line()
    behind = AckPipeline(line, None)
    job = Held(1)
    behind.add_job(job)  # type: ignore[arg-type]
    line.asked[0].fail(NotReady("away"))
    assert job.lease.is_lost, "kept alive it would never come back"
    assert isinstance(behind.take_error(), NotReady)
    assert behind.take_error() is None
    assert behind.wait_answered().is_done


@pytest.mark.interpreted
def test_acks_sent_with_a_failed_claim_are_no_error_if_they_succeeded():
    """For example, the records of the claim may be unreadable although the acks are done."""
    behind = AckPipeline(Line(), None, waits_for_claim=True)
    behind._linger = object()  # type: ignore[assignment]  # No timer is needed here.
    for is_over in (True, False):
        job = Held(1)
        behind.add_job(job)  # type: ignore[arg-type]
        leases = behind.take_unsent()
        job.lease.is_over = is_over
        behind.on_sent(leases, NotReady("away"), is_taken=False)
        assert job.lease.is_lost is not is_over
        assert (behind.take_error() is None) is is_over
        assert behind.take_unsent() == []


# -- with an engine ------------------------------------------------------------------------------------------


def test_a_loop_acks_every_job_and_waits_for_the_acks_at_its_end(queue):
    fill(queue, JOBS)
    found = []
    for job in queue.jobs(max_in_flight=32, pipelined_acks=True):
        with job:
            found.append(job.data)
        if len(found) == JOBS:
            break
    assert found == [b"job %d" % n for n in range(1, JOBS + 1)]
    assert counts(queue) == (0, 0, 0)


def test_at_most_max_in_flight_jobs_are_leased(queue, ringlog_engine):
    """The engine receives the acks before the claim that follows them."""
    fill(queue, 30)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        jobs = queue.jobs(max_in_flight=3, pipelined_acks=True)
        for _ in range(30):
            with next(jobs):
                assert looks.stats().in_flight <= 3
        jobs.close()


def test_pending_acks_are_sent_without_another_call(queue, ringlog_engine):
    """The program may be busy or asleep for a long time."""
    fill(queue, 8)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        jobs = queue.jobs(max_in_flight=8, pipelined_acks=True)
        for _ in range(7):
            with next(jobs):
                pass
        wait_until(lambda: counts(looks) == (0, 1, 0), 10, "seven acks")
        jobs.close()
        assert counts(looks) == (1, 0, 0)


def test_an_exception_in_a_block_returns_the_job(queue):
    fill(queue, 3)
    jobs = queue.jobs(max_in_flight=3, pipelined_acks=True)
    with next(jobs):
        pass
    with pytest.raises(ZeroDivisionError), next(jobs):
        _ = 1 / 0
    jobs.close()
    assert counts(queue) == (1, 0, 1), "the first is done, the second rests, the third was not begun"


def test_a_job_settled_inside_its_block_is_not_acked_again(queue):
    fill(queue, 2)
    jobs = queue.jobs(pipelined_acks=True)
    with next(jobs) as job:
        job.ack()
        assert counts(queue) == (1, 0, 0), "an ack by hand is done when it returns"
    with next(jobs) as job:
        job.nack(delay_ms=LONG_MS)
    jobs.close()
    assert counts(queue) == (0, 0, 1)


def test_an_expired_lease_is_reported(queue, caplog):
    """The job was or will be delivered again, so the ack has no effect."""
    fill(queue, 1)
    jobs = queue.jobs(lease_ms=100, auto_extend=False, pipelined_acks=True)
    with next(jobs) as job:
        wait_until(lambda: counts(queue) == (1, 0, 0), 10, "the lease to expire")
    with caplog.at_level(logging.WARNING):
        jobs.close()
    assert job.lost.is_set()
    assert "ended before their acks" in caplog.text
    assert queue.claim()[0].deliveries == 2


def test_closing_the_client_waits_for_acks(ringlog_engine, queue):
    fill(queue, 20)
    other = ringlog.connect(ringlog_engine.url, wait=10, transport=queue._client.transport)
    jobs = other.queue(queue.topic).jobs(max_in_flight=8, pipelined_acks=True)
    for _ in range(5):
        with next(jobs):
            pass
    other.close()
    assert counts(queue) == (15, 0, 0)
    assert list(jobs) == []


def test_a_slot_is_free_as_soon_as_its_block_ends(queue):
    fill(queue, 1)
    jobs = queue.jobs(pipelined_acks=True)
    with next(jobs) as job:
        slots = job._slots
        assert isinstance(slots, InFlightLimit)
        assert slots.in_flight == 1
    assert slots.in_flight == 0
    jobs.close()


# -- batches -------------------------------------------------------------------------------------------------


def test_a_batch_is_acked_when_the_next_one_is_requested(queue, ringlog_engine):
    fill(queue, 25)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        batches = queue.batches(10)
        first = next(batches)
        assert first.payloads() == [b"job %d" % n for n in range(1, 11)]
        assert counts(looks) == (15, 10, 0)
        second = next(batches)
        wait_until(lambda: counts(looks) == (5, 10, 0), 10, "ten acks")
        assert second.seqs.tolist() == list(range(11, 21))
        assert next(batches).payloads()[0] == b"job 21"
        batches.close()
        assert counts(looks) == (5, 0, 0), "what was not finished is given back"


def test_jobs_of_a_batch_can_be_settled_one_by_one(queue):
    fill(queue, 12)
    batches = queue.batches(10)
    batch = next(batches)
    batch[0].ack()
    batch[1].nack(delay_ms=LONG_MS)
    assert next(batches).seqs.tolist() == [11, 12], "the other eight are acked before it"
    assert counts(queue) == (0, 2, 1)
    batches.close()
    assert counts(queue) == (2, 0, 1)


def test_an_exception_in_a_batch_returns_its_unsettled_jobs(queue):
    fill(queue, 5)

    def work() -> None:
        for batch in queue.batches(5):
            batch[0].ack()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    wait_until(lambda: counts(queue) == (4, 0, 0), 10, "four jobs to come back")


@pytest.mark.parametrize("is_looked_at", [False, True], ids=["together", "one by one"])
def test_the_leases_of_a_batch_are_extended_while_it_is_processed(queue, ringlog_engine, is_looked_at):
    """This also holds if the program never creates job objects."""
    fill(queue, 4)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        batches = queue.batches(3, lease_ms=SHORT_MS)
        batch = next(batches)
        if is_looked_at:
            assert [job.deliveries for job in batch] == [1, 1, 1]
        (left,) = looks.claim(lease_ms=SHORT_MS)
        left_again = looks.claim(wait_ms=10_000)
        assert left_again[0].seq == 4, "a lease that nobody kept has ended meanwhile"
        assert left.deliveries == 1
        assert not batch[0].lost.is_set()
        looks.put(b"the last")
        assert next(batches).payloads() == [b"the last"]
        looks.ack(left_again)
        batches.close()
        assert counts(looks) == (1, 0, 0), "1 to 4 are done"


def test_a_loop_over_batches_delivers_every_job_once(queue):
    fill(queue, JOBS)
    found: list[int] = []
    for batch in queue.batches(64):
        found += batch.seqs.tolist()
        if len(found) == JOBS:
            queue.ack(batch)
            break
    assert found == list(range(1, JOBS + 1))
    assert counts(queue) == (0, 0, 0)


def test_batch_sizes_out_of_range_are_refused(queue):
    for size, most in ((0, None), (1_001, None), (10, 9), (10, 1_001)):
        with pytest.raises(UsageError):
            queue.batches(size, max_in_flight=most)


# -- several batches of one claim --------------------------------------------------------------------------


def test_a_claim_of_several_batches_is_acked_after_its_last_batch(queue, ringlog_engine, monkeypatch):
    """One request acks all batches, unless their processing takes longer than LINGER_MS."""
    monkeypatch.setattr("ringlog.client.leases.ack_pipeline.LINGER_MS", LONG_MS)
    fill(queue, 34)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        batches = queue.batches(10, max_in_flight=25)
        found = [next(batches).payloads() for _ in range(3)]
        assert list(map(len, found)) == [10, 10, 5]
        assert [*found[0], *found[1], *found[2]] == [b"job %d" % n for n in range(1, 26)]
        assert counts(looks) == (9, 25, 0), "nothing is acked yet, and not more than 25 are leased"
        assert next(batches).seqs.tolist() == list(range(26, 35))
        assert counts(looks) == (0, 9, 0)
        batches.close()
        assert counts(looks) == (9, 0, 0)


def test_finished_batches_are_acked_while_the_next_batch_takes_long(queue, ringlog_engine):
    fill(queue, 6)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        batches = queue.batches(2, max_in_flight=6)
        for _ in range(3):
            next(batches)
        wait_until(lambda: counts(looks) == (0, 2, 0), 10, "two batches to be acked")
        batches.close()
        assert counts(looks) == (2, 0, 0)


def test_batches_that_were_not_started_are_returned(queue):
    fill(queue, 12)
    batches = queue.batches(3, max_in_flight=12)
    next(batches)
    second = next(batches)
    second[0].ack()
    batches.close()
    assert counts(queue) == (8, 0, 0), "four are done"
    assert [job.deliveries for job in queue.claim(8)] == [2, 2, *[1] * 6], "those not begun count none"


def test_the_leases_of_batches_that_were_not_started_are_extended(queue, ringlog_engine):
    """They are treated like the leases of the current batch."""
    fill(queue, 5)
    with ringlog.connect(ringlog_engine.url, wait=10) as other:
        looks = other.queue(queue.topic)
        batches = queue.batches(2, max_in_flight=4, lease_ms=SHORT_MS)
        assert next(batches).seqs.tolist() == [1, 2]
        looks.claim(lease_ms=SHORT_MS)
        (left,) = looks.claim(wait_ms=10_000)
        assert left.seq == 5, "a lease that nobody kept has ended meanwhile"
        second = next(batches)
        assert second.seqs.tolist() == [3, 4]
        assert [job.deliveries for job in second] == [1, 1]
        batches.close()
        assert counts(looks) == (2, 1, 0), "the first two are done"


def test_a_batch_whose_leases_expired_before_its_start_is_not_delivered(queue):
    fill(queue, 4)
    batches = queue.batches(2, max_in_flight=4, lease_ms=SHORT_MS, auto_extend=False)
    first = next(batches)
    assert first.seqs.tolist() == [1, 2]
    wait_until(lambda: counts(queue) == (4, 0, 0), 10, "four leases to end")
    # For the client a lease ends later than for the engine, because the client counts from the receipt of the
    # reply.
    wait_until(lambda: time.monotonic_ns() > first.claimed.until_ns, 10, "their end as the client counts")
    (again,) = queue.claim()
    assert again.seq == 1
    assert next(batches).seqs.tolist() == [2, 3], "claimed anew"
    batches.close()


@pytest.mark.parametrize("frame", [1, 7, 400])
def test_batches_do_not_depend_on_the_frames_of_their_jobs(queue, frame):
    for first in range(1, JOBS + 1, frame):
        queue.put_many([b"job %d" % n for n in range(first, min(first + frame, JOBS + 1))])
    found: list[bytes] = []
    for batch in queue.batches(9, max_in_flight=100):
        assert batch.seqs.tolist() == list(range(len(found) + 1, len(found) + 1 + len(batch)))
        if len(found) % 2:
            assert [job.data for job in batch] == batch.payloads()
        found += batch.payloads()
        if len(found) == JOBS:
            break
    assert found == [b"job %d" % n for n in range(1, JOBS + 1)]
    wait_until(lambda: counts(queue)[1] == 0, 10, "the last batch to be given back")
    assert counts(queue)[0] in range(1, 10), "the last batch alone was not acked"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_batched", [False, True], ids=["jobs", "batches"])
def test_every_job_is_done_despite_repeated_kills_of_its_shard(is_batched: bool) -> None:
    """Acks without a reply are retried. Jobs whose lease died with the shard are delivered again."""
    with engine(wal={"shards": 1}) as running, ringlog.connect(running.url, wait=20) as client:
        _drain_under_kills(running, client, is_batched)


def _drain_under_kills(running: TestEngine, client: Client, is_batched: bool) -> None:
    client.topics.create("jobs", type="queue", durability="disk", lease_ms=2_000)
    queue = client.queue("jobs")
    fill(queue, JOBS)
    done: list[int] = []
    ended = threading.Event()

    def work() -> None:
        mine = client.queue("jobs")
        if is_batched:
            for batch in mine.batches(8):
                done.extend(batch.seqs.tolist())
                if ended.is_set():
                    mine.ack(batch)
                    return
        for job in mine.jobs(max_in_flight=8, pipelined_acks=True):
            with job:
                done.append(job.seq)
            if ended.is_set():
                return

    working = threading.Thread(target=work)
    working.start()
    for kill in range(1, 4):
        wait_until(lambda kill=kill: len(done) >= kill * JOBS // 5, 40, "jobs to be done")  # type: ignore[misc]
        running.kill("wal_shard", shard=0)
    wait_until(lambda: counts(queue) == (0, 0, 0), 60, "the queue to be empty")
    ended.set()
    queue.put(b"the last")
    working.join(30)
    assert not working.is_alive()
    assert set(done) >= set(range(1, JOBS + 1))
    # At each kill, the jobs in flight may be delivered twice, but no others.
    assert len(done) <= JOBS + 1 + 3 * 2 * 8


def test_a_forked_child_sends_no_acks_of_its_parent_process():
    behind = AckPipeline(line := Line(), None)
    behind.add_job(Held(1))  # type: ignore[arg-type]
    behind.add_job(Held(2))  # type: ignore[arg-type]
    behind.reset_in_child()
    assert behind.wait_answered().is_done
    assert line.sent == [[1]]


def test_a_job_belongs_to_its_iteration_only_while_its_block_is_open(queue):
    fill(queue, 1)
    jobs = queue.jobs(pipelined_acks=True)
    job: Job = next(jobs)
    with job:
        pass
    jobs.close()
    with pytest.raises(LeaseLost):
        job.ack()
