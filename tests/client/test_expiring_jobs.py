"""Jobs that expire between lease and read are skipped, and claims and loops continue."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import ringlog
import ringlog.aio
from ringlog.client import NewRecord
from ringlog.client.leases.lease_operations import ClaimHandle, LeaseOperations
from ringlog.client.read.remote_source import decode_received_frames
from ringlog.clock import SystemClock
from ringlog.envelope.messages import ClaimReply
from ringlog.errors import CorruptData, LeaseLost
from ringlog.limits import EXPIRED_CLAIMS_MAX
from ringlog.link.futures import resolved
from ringlog.link.peer_request import PeerReply
from ringlog.testing.clock import ManualClock

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0
JOBS = 1_500
LAST = b"last"


@pytest.fixture(params=["queue", "group"])
def place(request, client, ringlog_topic):
    """A queue or a consumer group whose records expire one by one while they are claimed."""
    topic = ringlog_topic(request.param)
    client.topics.create(topic, type="queue" if request.param == "queue" else "log")
    now_us = SystemClock().now_us()
    some = [NewRecord(data=b"%d" % n, expires_at=now_us + 100_000 + 500 * n) for n in range(JOBS)]
    client.append_many(topic, some)
    return request.param, topic


def opened(client, place):
    kind, topic = place
    return client.queue(topic) if kind == "queue" else client.group(topic, "g", mode="queue")


def test_claims_and_loops_skip_expired_jobs(ringlog_engine, client, transport, place):
    """No job is delivered twice, and the order is kept over the gaps."""
    found = []
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as worker:
        queue = opened(worker, place)
        for n in range(200):
            for job in queue.claim(1 + n % 3, wait_ms=0):
                found.append(job.seq)
                with suppress(LeaseLost):  # The job expired while the worker had its lease.
                    job.ack()
        client.append(place[1], LAST)
        for job in queue.jobs(max_in_flight=3):
            found.append(job.seq)
            with suppress(LeaseLost):
                job.ack()
            if job.data == LAST:
                break
    assert found == sorted(set(found))
    assert found[-1] == JOBS + 1


async def test_asyncio_loops_skip_expired_jobs(ringlog_engine, client, transport, place):
    client.append(place[1], LAST)
    found = []
    async with ringlog.aio.connect(ringlog_engine.url, wait=10, transport=transport) as worker:
        async with asyncio.timeout(WAIT_S):
            async for job in opened(worker, place).jobs(max_in_flight=2):
                found.append(job.seq)
                with suppress(LeaseLost):
                    await job.ack()
                if job.data == LAST:
                    break
    assert found == sorted(set(found))
    assert found[-1] == JOBS + 1


def test_a_reply_without_frames_is_not_corrupt():
    assert decode_received_frames("t", 0, 0, memoryview(b"")) == []
    with pytest.raises(CorruptData):
        decode_received_frames("t", 0, 0, memoryview(b"\1" * 8))


class Answers:
    """A fake connection whose shard grants leases, and whose gateway finds no record for them."""

    transport = "ipc"

    def __init__(self):
        self.asked = []

    def request_jobs(self, message, *, extra_ms=0, is_awaited=False):
        self.asked.append(message)
        return resolved(PeerReply(ClaimReply("q", 1, 1, 0, 0, [(len(self.asked), 1, 1, 7)]), b""))


def claim(connection, clock, wait_s):
    steps = LeaseOperations("q", "me", clock).claim(connection, 1, wait_s, None, ClaimHandle())
    value = None
    try:
        while True:
            value = steps.send(value.result() if value is not None else None)
    except StopIteration as end:
        return end.value


def test_a_claim_of_expired_jobs_is_retried_a_bounded_number_of_times():
    clock = ManualClock()
    connection = Answers()
    assert len(claim(connection, clock, 0.0)) == 0
    assert len(connection.asked) == EXPIRED_CLAIMS_MAX
