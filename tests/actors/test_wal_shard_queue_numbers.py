"""Metrics of a shard's queues: sums by samples, counters by replies, and both in the engine's status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import ringlog
from ringlog.actors.wal_shard.metrics import queue_metrics
from ringlog.actors.wal_shard.metrics.queue_metrics import ACKED, CLAIMED, NACKED, REJECTED, QueueMetrics
from ringlog.envelope import messages as m
from ringlog.leases.types import QueueCounts
from ringlog.testing.real_engine import engine, wait_until


class Standing:
    """A queue with counts that the test sets."""

    def __init__(self, in_flight: int = 0, delayed: int = 0) -> None:
        self.in_flight, self.delayed = in_flight, delayed

    def counts(self, live: int) -> QueueCounts:
        return QueueCounts(live - self.in_flight - self.delayed, self.in_flight, self.delayed)


def topic(number: int, live: int) -> Any:
    return SimpleNamespace(topic_id=number, staged_count=live, next_seq=live + 1, head_seq=live)


def sums(numbers: QueueMetrics) -> tuple[int, int, int, int]:
    return len(numbers), numbers.ready, numbers.in_flight, numbers.delayed


@pytest.mark.interpreted
def test_sums_follow_their_queues() -> None:
    numbers = QueueMetrics()
    first, second = Standing(1, 2), Standing()
    numbers.add_queue(topic(1, 10), first)
    numbers.add_queue(topic(2, 5), second)
    assert sums(numbers) == (2, 0, 0, 0)
    numbers.sample()
    assert sums(numbers) == (2, 12, 1, 2)
    first.in_flight, second.delayed = 0, 5
    numbers.sample()
    assert sums(numbers) == (2, 8, 0, 7)
    numbers.forget(1)
    numbers.forget(1)
    assert sums(numbers) == (1, 0, 0, 5)
    numbers.sample()
    assert sums(numbers) == (1, 0, 0, 5)


@pytest.mark.interpreted
def test_a_sample_is_bounded_and_a_round_covers_all_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_metrics, "QUEUES_SAMPLED_MAX", 3)
    numbers = QueueMetrics()
    for number in range(7):
        numbers.add_queue(topic(number, 1), Standing())
    seen = []
    for _ in range(3):
        numbers.sample()
        seen.append(numbers.ready)
    assert seen == [3, 6, 7]


@pytest.mark.interpreted
def test_staged_records_are_not_counted_as_jobs() -> None:
    numbers = QueueMetrics()
    numbers.add_queue(SimpleNamespace(topic_id=1, staged_count=5, next_seq=6, head_seq=3), Standing())
    numbers.sample()
    assert numbers.ready == 3


def test_replies_are_counted_by_their_jobs() -> None:
    numbers = QueueMetrics()
    for answer in (
        m.ClaimReply("q", 1, 1, 0, 0, [(1, 3, 1, 7), (9, 2, 1, 10)]), m.AckReply("q", 4, b"", 0, 0),
        m.NackReply("q", 2, b"", 0, 0), m.RejectReply("q", 1, b""), m.ExtendReply("q", 5, b"", 0),
    ):  # fmt: skip
        numbers.count_reply(answer)
    assert dict(numbers.outcomes) == {CLAIMED: 5, ACKED: 4, NACKED: 2, REJECTED: 1}


@pytest.mark.slow
def test_the_status_contains_the_metrics_of_queues() -> None:
    with (
        engine(wal={"shards": 2}, delivery={"schedulers": 1}) as running,
        ringlog.connect(running.url, wait=10) as client,
    ):
        for name in ("a", "b"):
            client.topics.create(name, type="queue", dead_letter="dead")
            client.queue(name).put_many([b"job"] * 10)
            jobs = client.queue(name).claim(6, lease_ms=60_000)
            client.queue(name).ack(jobs[:2])
            client.queue(name).nack(jobs[2:3])
            client.queue(name).nack(jobs[3:4], delay_ms=60_000)
            client.queue(name).reject(jobs[4], "bad")

        def shown() -> dict[str, int]:
            found = running.status().queues
            return {} if found is None else {word: getattr(found, word) for word in found.__struct_fields__}

        wanted = {
            "queues": 2, "in_flight": 2, "delayed": 2, "waiting": 0, "claimed": 12, "acked": 4,
            "nacked": 4, "rejected": 2, "dead_lettered": 2, "ready": 10,
        }  # fmt: skip
        wait_until(lambda: shown() == wanted, 20, "the status to contain the metrics", lambda: str(shown()))
        for shard in (0, 1):
            running.kill("wal_shard", shard=shard)
        client.queue("a").claim()

        def counters_stay() -> bool:
            found = shown()
            return (found["acked"], found["dead_lettered"], found["queues"]) == (4, 2, 1)

        wait_until(counters_stay, 20, "counters to survive their shards", lambda: str(shown()))
