"""Loops over jobs: how they end, and which errors they survive."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

import ringlog
import ringlog.aio
from ringlog.client.batch_iteration import BatchIteration
from ringlog.client.claims import JobClaims
from ringlog.client.job_iteration import JobIteration
from ringlog.errors import LeaseLost, UsageError
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = [
    Unspeakable(),
    ValueError("\udcff and more"),
    ValueError("x" * 20_000_000),
    ValueError("a\nb"),
    KeyError(),
]


@pytest.fixture(params=["queue-ring", "queue-ipc", "group-ring"])
def work(request, ringlog_engine, ringlog_topic):
    """A queue or a group with as many jobs as there are errors."""
    kind, transport = request.param.split("-")
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        topic = ringlog_topic()
        client.topics.create(topic, type="queue" if kind == "queue" else "log")
        client.append_many(topic, [b"%d" % n for n in range(len(ERRORS))])
        yield client.queue(topic) if kind == "queue" else client.group(topic, "g", mode="queue")


def delayed(work) -> int:
    return int(work.stats().delayed)


@pytest.mark.parametrize("pipelined_acks", [False, True])
def test_a_loop_continues_after_failed_jobs_and_ends_when_idle(work, pipelined_acks):
    """Each failed job is returned with a backoff.

    `on_error` gets the original exception, whatever its text is.
    """
    told = []
    for job in work.jobs(
        on_error=lambda job, e: told.append((job.seq, e)), idle_s=0.3, pipelined_acks=pipelined_acks
    ):
        with job:
            raise ERRORS[job.seq - 1]
    assert told == list(enumerate(ERRORS, 1))
    assert delayed(work) == len(ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_without_on_error_the_error_of_the_block_ends_the_loop(work, error):
    def loop() -> None:
        for job in work.jobs():
            with job:
                raise error

    with pytest.raises(type(error)) as raised:
        loop()
    assert raised.value is error
    assert delayed(work) == 1


def test_failures_of_jobs_and_of_acks_are_logged(work, caplog):
    for job in work.jobs(on_error="log", idle_s=0.3):
        with job:
            if job.seq == 2:
                raise ERRORS[3]
            if job.seq == 3:
                job.lease.token += 1  # The lease looks as if another worker had the job.
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError, LeaseLost]
    for name, wrong in (("on_error", 3), ("idle_s", -1), ("idle_s", "3"), ("idle_s", float("nan"))):
        with pytest.raises(UsageError, match=name):
            next(work.jobs(**{name: wrong}))


@pytest.mark.parametrize("how", ["jobs", "batches", "full"])
def test_close_ends_waiting_loops(work, how):
    """A loop in another thread waits for a job or for a free slot, and ends at once."""
    taken, has_all = [], threading.Event()

    def loop() -> None:
        jobs = work.batches(10) if how == "batches" else work.jobs(max_in_flight=len(ERRORS))
        for job in jobs:
            taken.append(job)
            if how == "jobs":
                job.ack()
            if how == "batches" or len(taken) == len(ERRORS):
                has_all.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert has_all.wait(20)
    if how != "full":
        wait_until(lambda: work.stats().waiting == 1, 20, "the loop to wait")
    work.close()
    thread.join(10)
    assert not thread.is_alive()
    assert work.stats().waiting == 0


@pytest.mark.parametrize(
    ("how", "owner", "between"),
    [
        ("full", JobIteration, "_claim_next"),
        ("jobs", JobIteration, "_claim_next"),
        ("jobs", JobClaims, "claim"),
        ("batches", BatchIteration, "_next_claim"),
    ],
)
def test_a_loop_ends_if_the_queue_is_closed_just_before_it_waits(work, how, owner, between, monkeypatch):
    """`close` runs after the loop found the queue open, and before the loop waits for a job or a slot."""
    taken, original = [], getattr(owner, between)
    is_armed = threading.Event()

    def close_first(*args, **options):
        if is_armed.is_set():
            work.close()
        return original(*args, **options)

    monkeypatch.setattr(owner, between, close_first)

    def loop() -> None:
        jobs = work.batches(len(ERRORS)) if how == "batches" else work.jobs(max_in_flight=len(ERRORS))
        for job in jobs:
            taken.append(job)
            if how == "jobs":
                job.ack()
            if how == "batches" or len(taken) == len(ERRORS):
                is_armed.set()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert is_armed.is_set()


def test_close_returns_the_batches_that_are_not_started(work):
    """The program acks the started batch: it asks for the next one."""
    batches = work.batches(2, max_in_flight=len(ERRORS), lease_ms=600_000)
    assert len(next(batches)) == 2
    assert work.stats().in_flight == len(ERRORS)
    work.close()
    assert work.stats().in_flight == 2
    assert list(batches) == []
    assert (work.stats().in_flight, [job.seq for job in work.claim(9)]) == (0, [3, 4, 5])


def test_a_batch_whose_loop_forks_belongs_to_the_parent(work):
    """The loop ends in the child, which acks nothing."""
    batches = work.batches(2, max_in_flight=len(ERRORS), lease_ms=600_000)
    next(batches)
    child = os.fork()
    if not child:
        status = 2
        try:
            signal.alarm(30)  # Ends a child that waits for further jobs.
            status = len(list(batches))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert work.stats().in_flight == len(ERRORS)
    batches.close()
    assert work.stats().in_flight == 0


def test_a_job_whose_block_forks_belongs_to_the_parent(work):
    """The child settles nothing when it leaves the block, with or without an exception."""
    for job in work.jobs(max_in_flight=2, idle_s=0.3):
        with job:
            child = 0
            try:
                with job:
                    child = os.fork()
                    if not child:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert not job.lost.is_set()
    stats = work.stats()
    assert stats.delayed == 0, "the child gave its job back"


@pytest.mark.parametrize("transport", ["ring", "ipc"])
async def test_asyncio_loops_survive_failed_jobs_and_end_on_close(ringlog_engine, ringlog_topic, transport):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        topic = ringlog_topic()
        await client.topics.create(topic, type="queue")
        queue = client.queue(topic)
        await queue.put_many([b"x"] * len(ERRORS))
        told = []
        async for job in queue.jobs(on_error=lambda job, e: told.append((job.seq, e)), idle_s=0.3):
            async with job:
                raise ERRORS[job.seq - 1]
        assert told == list(enumerate(ERRORS, 1))
        assert (await queue.stats()).delayed == len(ERRORS)
        assert [batch async for batch in queue.batches(idle_s=0)] == []

        async def loop() -> None:
            async for _ in queue.jobs():
                """The loop gets no job."""

        looping = asyncio.ensure_future(loop())
        while not (await queue.stats()).waiting:
            await asyncio.sleep(0)
        await queue.close()
        async with asyncio.timeout(5):
            await looping
