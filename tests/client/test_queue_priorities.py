"""Delayed and prioritised jobs through the public client, over rings and over the gateway."""

from __future__ import annotations

import time

import pytest

from ringlog.client.queue import Queue
from ringlog.client.write.fields import NewRecord
from ringlog.errors import UsageError
from tests.support.engines import client_fixture
from tests.support.queue_jobs import LONG_MS

client = client_fixture("ring", "ipc")


@pytest.fixture
def queue(client, ringlog_topic) -> Queue:
    name = ringlog_topic("queue")
    client.topics.create(name, type="queue", durability="fsync", lease_ms=LONG_MS, record_priority=True)
    return client.queue(name, node="worker")


def test_a_waiting_claim_gets_a_delayed_job_when_it_becomes_ready(queue):
    at_us = round((time.time() + 0.5) * 1e6)
    queue.put(b"later", not_before=at_us)
    queue.put(b"never here", not_before=at_us + 3_600_000_000)
    queue.put(b"now")
    assert [job.data for job in queue.claim(9)] == [b"now"]
    assert (queue.stats().ready, queue.stats().delayed) == (0, 2)
    (job,) = queue.claim(9, wait_ms=20_000)
    assert (job.data, time.time() * 1e6 >= at_us) == (b"later", True)
    assert job.record.not_before == at_us
    job.ack()
    assert queue.stats().delayed == 1


def test_urgent_jobs_are_delivered_first_and_stats_report_waiting_times(queue):
    queue.put_many([NewRecord(data=b"%d" % n, priority=n % 3) for n in range(9)])
    found = [queue.claim()[0] for _ in range(6)]
    assert [job.record.priority for job in found] == [2, 2, 2, 1, 1, 1]
    assert [int(job.data) for job in found] == [2, 5, 8, 1, 4, 7]
    stats = queue.stats()
    assert stats.ready == 3
    assert stats.oldest_ready_ms is not None
    assert 0 <= stats.oldest_ready_ms < 60_000
    assert 0 <= stats.wait_p99_ms < 60_000
    queue.purge()
    assert queue.stats().oldest_ready_ms is None


def test_a_claim_in_seq_order_ignores_priorities(queue):
    """Jobs that are returned keep their position in seq order."""
    queue.put_many([NewRecord(data=b"%d" % n, priority=n % 3) for n in range(9)])
    assert [int(job.data) for job in queue.claim(2, order="seq")] == [0, 1]
    (urgent,) = queue.claim()
    assert int(urgent.data) == 2
    urgent.nack()
    assert [int(job.data) for job in queue.claim(3, order="seq")] == [2, 3, 4]
    with pytest.raises(UsageError):
        queue.claim(order="number")


def test_a_group_delivers_delayed_and_urgent_records_like_a_queue(client, ringlog_topic):
    name = ringlog_topic("events")
    client.topics.create(name, durability="fsync", lease_ms=LONG_MS, record_priority=True)
    group = client.group(name, "workers", mode="queue", node="worker")
    at_us = round((time.time() + 0.5) * 1e6)
    client.append(name, b"later", not_before=at_us)
    client.append_many(name, [NewRecord(data=b"%d" % n, priority=n % 3) for n in range(4)])
    first = group.claim()
    assert [job.data for job in first] == [b"2"]
    assert [job.data for job in group.claim(order="seq")] == [b"0"]
    assert [job.data for job in group.claim(9)] == [b"1", b"3"]
    assert (group.stats().delayed, group.stats().floor) == (1, 0)
    assert group.ack(first).is_complete
    (later,) = group.claim(9, wait_ms=20_000)
    assert (later.data, time.time() * 1e6 >= at_us) == (b"later", True)
    later.ack()
    assert group.stats().floor == 1
    with client.reader(name) as records:
        assert next(iter(records)).data == b"later", "readers do not wait"
