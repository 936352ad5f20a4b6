"""Topics that are deleted and recreated while clients use them."""

from __future__ import annotations

import threading

import pytest

import ringlog
from ringlog.errors import TopicNotFound
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]


@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("how", ["jobs", "behind", "batches"])
def test_loops_over_a_queue_continue_after_it_was_recreated(ringlog_engine, ringlog_topic, transport, how):
    """The loops raise no error, and each job has its first delivery.

    The jobs are so large that clients read them from files.
    """
    topic, found = ringlog_topic(), []
    with (
        ringlog.connect(ringlog_engine.url, wait=10) as steady,
        ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client,
    ):
        queue = client.queue(topic)

        def work() -> None:
            if how == "batches":
                for batch in queue.batches(2):
                    found.extend((job.data, job.deliveries) for job in batch)
            else:
                for job in queue.jobs(pipelined_acks=how == "behind"):
                    with job:
                        found.append((job.data, job.deliveries))

        steady.topics.create(topic, type="queue")
        thread = threading.Thread(target=work)
        thread.start()
        before: list[tuple[bytes, int]] = []
        for life in range(4):
            payloads = [b"%d" % (life * 10 + n) * 20_000 for n in range(3)]
            for payload in payloads:
                steady.queue(topic).put(payload)
            wait_until(lambda: len(found) % 3 == 0 and found[-3:] != before[-3:], 20, "three jobs")
            assert sorted(found[-3:]) == sorted((payload, 1) for payload in payloads)
            before[:] = found
            # If a topic is deleted, the leases of its unacked jobs end, and the acks would fail.
            wait_until(lambda: steady.queue(topic).stats().in_flight == 0, 20, "the acks")
            steady.topics.delete(topic)
            steady.topics.create(topic, type="queue")
        wait_until(lambda: steady.queue(topic).stats().waiting == 1, 20, "the loop to claim")
        queue.close()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_producers_with_create_false_find_a_recreated_topic(ringlog_engine, topic, transport):
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        client.topics.create(topic)
        producer = client.producer(topic, linger_ms=0, create=False)
        for n in range(3):
            assert producer.send(b"a%d" % n).result(10).epoch == client.topics.state(topic).epoch
            assert client.append(topic, b"b", create=False).count == 1
            client.append_many(topic, [b"c"], idempotency_key="key", create=False)
            client.topics.delete(topic)
            if n:
                with pytest.raises(TopicNotFound):
                    producer.send(b"lost").result(10)
            client.topics.create(topic)
        assert producer.send(b"last").result(10).count == 1
