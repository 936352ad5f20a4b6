"""The engine restarts with another number of shards, and its clients continue."""

from __future__ import annotations

import threading

import pytest

import ringlog
from ringlog.client import NewRecord, Record
from ringlog.client.read.tail_batch import TailBatch
from ringlog.envelope.messages import TopicDelete
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TOPICS = 6
WAIT_S = 30.0


class Asking(threading.Thread):
    """A thread with one call that begins before or during the downtime of the engine."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.found, self.error = call, None, None
        self.start()

    def run(self):
        try:
            self.found = self.call()
        except Exception as e:  # noqa: BLE001  judged by the test
            self.error = e


def calls(client, n):
    """Return `(name, call, expected result)` for every kind of request to a shard."""
    topic, queue = f"t{n}", client.queue(f"q{n}")
    group = client.group(topic, f"g{n}", mode="queue")
    mixed = [NewRecord(data=b"id", dedup_id=f"id{n}"), b"no id"]
    return [
        ("ids", lambda: client.append_many(topic, mixed, create=False).count, 2),
        ("key", lambda: client.append_many(topic, [b"key"], idempotency_key=f"k{n}", create=False).count, 1),
        ("append", lambda: client.append(topic, b"plain", create=False).count, 1),
        ("put", lambda: queue.put_many([NewRecord(data=b"x", dedup_id="1"), b"y"]).count, 2),
        ("claim", lambda: [job.data for job in queue.claim(1, lease_ms=600_000)], [b"job"]),
        ("group", lambda: [job.data for job in group.claim(1)], [b"first"]),
        ("read", lambda: client.read(topic, limit=1).records[0].data, b"first"),
        ("state", lambda: client.topics.state(topic).topic, topic),
        ("configure", lambda: client.topics.configure(topic, ttl_ms=10**9).config["ttl_ms"], 10**9),
        ("delete", lambda: client.topics.delete(f"gone{n}").deleted, True),
        ("records", lambda: client.topics.delete_records(f"part{n}", before_seq=2).deleted, 1),
    ]


@pytest.mark.parametrize(
    ("transport", "before", "after", "end"),
    [("ring", 2, 3, "crash"), ("ring", 3, 1, "stop"), ("ipc", 3, 2, "crash")],
)
def test_requests_during_a_change_of_the_number_of_shards_are_applied_once(transport, before, after, end):
    """Requests are neither refused as "no such topic" nor sent to shards that no longer exist."""
    with (
        engine(wal={"shards": before}, gateway={"enabled": True}, delivery={"schedulers": 1}) as running,
        ringlog.connect(running.url, wait=10, timeout_ms=30_000, transport=transport) as client,
    ):
        asked, expected = [], []
        for n in range(TOPICS):
            for name in (f"t{n}", f"gone{n}", f"part{n}"):
                client.topics.create(name, durability="fsync")
                client.append_many(name, [b"first"])
            for name in (f"q{n}", f"empty{n}"):
                client.topics.create(name, type="queue", durability="fsync")
            client.queue(f"q{n}").put(b"job")
            expected += calls(client, n)
        producers = [client.producer(f"t{n}", create=False, name=f"p{n}") for n in range(TOPICS)]
        for producer in producers:
            producer.send_many([b"produced"]).result(WAIT_S)
        seen: list[tuple[str, int]] = []
        watch = client.watch([f"t{n}" for n in range(TOPICS)])
        tailed: list[bytes] = []
        tailer = client.tailer("t0") if transport == "ring" else None

        def follow():
            for event in watch:
                seen.extend((event.topic, each.seq) for each in getattr(event, "records", ()))

        def tail():
            for batch in tailer:
                tailed.extend(batch.bytes() if isinstance(batch, TailBatch) else ())

        following = [Asking(follow)] + ([Asking(tail)] if tailer is not None else [])
        wait_until(
            lambda: len(seen) == 2 * TOPICS, WAIT_S, "the watch to have everything",
            lambda: f"{sorted(seen)} {[each.error for each in following]}",
        )  # fmt: skip
        waiting = [
            Asking(lambda n=n: [job.data for job in client.queue(f"empty{n}").claim(1, wait_ms=60_000)])
            for n in range(TOPICS)
        ]
        wait_until(
            lambda: all(client.queue(f"empty{n}").stats().waiting for n in range(TOPICS)), WAIT_S,
            "the claims to wait",
        )  # fmt: skip
        getattr(running, end)()
        asked = [Asking(call) for _, call, _ in expected]
        tickets = [producer.send_many([b"while away"]) for producer in producers]
        running.change("wal.shards", after)
        running.start()
        for n in range(TOPICS):
            client.queue(f"empty{n}").put(b"late")
        for thread in (*asked, *waiting):
            thread.join(WAIT_S)
        assert [
            (what, each.error) for (what, _, _), each in zip(expected, asked, strict=True) if each.error
        ] == []
        assert [each.found for each in asked] == [value for _, _, value in expected]
        assert [each.error for each in waiting] == [None] * TOPICS
        assert [each.found for each in waiting] == [[b"late"]] * TOPICS
        assert [ticket.result(WAIT_S).count for ticket in tickets] == [1] * TOPICS
        stored = [b"first", b"id", b"key", b"no id", b"plain", b"produced", b"while away"]
        for n in range(TOPICS):
            found = [each.data for each in client.reader(f"t{n}") if isinstance(each, Record)]
            assert sorted(found) == stored, f"t{n}"
        left = [each.topic for each in client.topics.list()]
        assert sorted(left) == sorted(
            f"{kind}{n}" for kind in ("t", "q", "part", "empty") for n in range(TOPICS)
        )
        wait_until(
            lambda: len(seen) == len(stored) * TOPICS and (tailer is None or len(tailed) == len(stored)),
            WAIT_S, "the watch and the tailer to have everything",
            lambda: f"{sorted(seen)}, {tailed}, {[each.error for each in following]}",
        )  # fmt: skip
        assert len(set(seen)) == len(seen)
        assert [each.error for each in following] == [None] * len(following)
        watch.close()


@pytest.mark.parametrize("after", [1, 3])
def test_a_shard_learnt_before_the_change_is_looked_up_again(after):
    """The old shard may not exist any more, or may not own the topic."""
    with (
        engine(wal={"shards": 2}) as running,
        ringlog.connect(running.url, wait=10, timeout_ms=10_000) as client,
    ):
        for n in range(TOPICS):
            client.append_many(f"t{n}", [b"first"])
        session = client._shell.session
        known = [session.topics.cached(f"t{n}") for n in range(TOPICS)]
        assert {info.shard for info in known} == {0, 1}
        running.stop()
        running.change("wal.shards", after)
        running.start()
        client.append("another", b"")
        assert session.links.shards == after
        for info in known:
            reply = client._shell.ask(
                lambda session, info=info: session.topics.ask_topic(info, TopicDelete(info.topic, False))
            )
            assert reply.deleted, info


@pytest.mark.parametrize("after", [1, 5])
def test_a_listing_that_started_before_the_change_names_each_topic_once(after):
    """The listing neither omits topics of new shards nor waits for shards that no longer exist."""
    with (
        engine(wal={"shards": 3}) as running,
        ringlog.connect(running.url, wait=10, timeout_ms=10_000) as client,
    ):
        names = sorted(f"t{n:02}" for n in range(2 * TOPICS))
        for name in names:
            client.topics.create(name)
        listed = client.topics.list(page_size=2)
        found = [next(listed).topic for _ in range(2)]
        running.stop()
        running.change("wal.shards", after)
        running.start()
        client.append("t00", b"")
        assert found + [each.topic for each in listed] == names
