"""The setting max_total_bytes: exact over all shards, whatever adds and removes records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import ringlog
from ringlog import Record
from ringlog.client import Client
from ringlog.errors import Throttled, TopicNotFound
from ringlog.placement import home_shard
from ringlog.testing.real_engine import TestEngine, engine, wait_until
from tests.support.http_client import HttpClient
from tests.support.topic_contents import payloads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHARDS = 2
RECORD = b"x" * 100
MOST = 20 * len(RECORD)


@pytest.fixture
def running() -> Iterator[TestEngine]:
    with engine(
        wal={"shards": SHARDS}, limits={"max_total_bytes": MOST}, delivery={"schedulers": 1},
        http={"enabled": True, "port": 0},
    ) as found:  # fmt: skip
        yield found


@pytest.fixture
def client(running: TestEngine) -> Iterator[Client]:
    with ringlog.connect(running.url, wait=20) as connected:
        yield connected


def on_shard(shard: int, prefix: str = "t") -> str:
    return next(name for n in range(100) if home_shard(name := f"{prefix}{n}", SHARDS) == shard)


def fill(client: Client, *topics: str) -> list[bytes]:
    """Append to the topics in turns until the engine refuses. Return the payloads that it accepted."""
    stored: list[bytes] = []
    refusal: Throttled | None = None
    while refusal is None:
        payload = b"%d-" % len(stored)
        payload += RECORD[len(payload) :]
        try:
            client.append(topics[len(stored) % len(topics)], payload)
        except Throttled as e:
            refusal = e
        else:
            stored.append(payload)
    assert (refusal.detail["limit"], refusal.detail["max"]) == ("max_total_bytes", MOST)
    assert "limits.max_total_bytes" in refusal.message
    return stored


def total(client: Client) -> int:
    return sum(each.bytes for each in client.topics.list())


def test_records_of_all_shards_reach_the_limit_exactly(client: Client, running: TestEngine) -> None:
    topics = [on_shard(0), on_shard(1)]
    assert len(fill(client, *topics)) == 20
    assert total(client) == MOST
    assert client.topics.delete_records(topics[0], before_seq=3).deleted == 2
    assert len(fill(client, topics[1])) == 2  # The other shard uses the room at once.
    assert client.topics.delete(topics[1])
    assert len(fill(client, topics[0])) == 12
    running.kill("wal_shard", shard=0)
    running.wait_ready()
    assert fill(client, *topics) == []
    assert client.topics.delete_records(topics[0], before_seq=8).deleted == 5
    running.restart()
    assert len(fill(client, topics[1])) == 5
    assert total(client) == MOST


def test_a_frame_of_many_records_fits_or_not_and_small_ones_fill_the_rest(client: Client) -> None:
    topic = on_shard(0)
    client.append_many(topic, [RECORD] * 15)
    with pytest.raises(Throttled):
        client.append_many(topic, [RECORD] * 6)
    assert total(client) == 15 * len(RECORD)
    producer = client.producer(topic, max_frame_records=1)
    acked = 0
    for ticket in [producer.send(RECORD) for _ in range(30)]:
        with suppress(Throttled):
            ticket.result(10)
            acked += 1
    producer.close()
    assert acked == 5
    assert total(client) == MOST


@pytest.mark.parametrize("count", [1, 3])
def test_records_behind_a_refused_one_are_appended(client: Client, count: int) -> None:
    topic = on_shard(0)
    producer = client.producer(topic, max_frame_records=1)
    tickets = [producer.send(bytes(size)) for _ in range(count) for size in (MOST + 1, 50)]
    for large, small in zip(tickets[::2], tickets[1::2], strict=True):
        with pytest.raises(Throttled):
            large.result(10)
        assert small.result(10).count == 1
    producer.close()
    assert total(client) == 50 * count


def test_a_repeated_write_is_answered_at_the_limit(client: Client) -> None:
    topic = on_shard(1)
    first = client.append_many(topic, [RECORD], idempotency_key="k")
    fill(client, topic)
    again = client.append_many(topic, [RECORD], idempotency_key="k")
    assert (again.first_seq, again.deduped) == (first.first_seq, True)


def test_acked_jobs_make_room(client: Client) -> None:
    topic = on_shard(0, "queue")
    client.topics.create(topic, type="queue")
    fill(client, topic)
    queue = client.queue(topic)
    for _ in range(20):
        (job,) = queue.claim(1)
        job.ack()
        assert len(fill(client, topic)) == 1


def test_dead_letters_and_routers_wait_for_room_and_lose_nothing(client: Client) -> None:
    source, copies, work = on_shard(0, "source"), on_shard(1, "copies"), on_shard(0, "work")
    client.topics.create(work, type="queue", dead_letter="letters")
    client.topics.create(copies)
    client.queue(work).put(RECORD)
    client.routers.create("all", source, copies)
    client.append(source, RECORD)
    wait_until(lambda: payloads(client, copies) == [RECORD], 30, "a copy, whose deletion makes room later")
    stored = [RECORD, *fill(client, source)]
    assert 9 <= len(stored) < 19  # Copies take room too.
    (job,) = client.queue(work).claim(1)
    job.reject("not today")
    assert total(client) <= MOST
    seen: list[bytes] = []

    def has_all_copies() -> bool:
        for record in client.reader(copies):
            if isinstance(record, Record):
                seen.append(record.data)
                client.topics.delete_records(copies, before_seq=record.seq + 1)
        return len(seen) >= len(stored)

    wait_until(has_all_copies, 30, "all copies")
    client.topics.delete_records(source, before_seq=3)  # A dead letter is larger than its job.
    wait_until(lambda: letters(client) == [RECORD], 30, "the dead letter")
    assert seen == stored


def letters(client: Client) -> list[bytes]:
    with suppress(TopicNotFound):
        return payloads(client, "letters")
    return []


def test_http_answers_429_with_the_limit(client: Client, running: TestEngine) -> None:
    topic = on_shard(0)
    fill(client, topic)
    call = HttpClient(running.http_url)
    answer = call("POST", f"/v0/topics/{topic}", {"records": [{"data": "x" * 200}]})
    assert answer.status == 429, answer
    assert answer.headers["retry-after"] == "1"
    detail = answer.body["error"]["detail"]
    assert (detail["limit"], detail["max"]) == ("max_total_bytes", MOST)
    call.close()


def test_racing_clients_never_pass_the_limit(client: Client, running: TestEngine) -> None:
    stored: list[bytes] = []

    def race(shard: int) -> None:
        with ringlog.connect(running.url, wait=20) as own:
            stored.extend(fill(own, on_shard(shard)))

    racers = [threading.Thread(target=race, args=(n % SHARDS,)) for n in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert total(client) == len(stored) * len(RECORD) <= MOST
    assert len(stored) + len(fill(client, on_shard(0))) == 20
