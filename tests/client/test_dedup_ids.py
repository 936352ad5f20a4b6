"""Records with dedup ids, written through the public client."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ringlog
from ringlog.client import Appended, AppendedOnce, Client, NewRecord
from ringlog.client.queue import Queue
from ringlog.client.write import idempotent_append
from ringlog.errors import BatchTooLarge, InvalidRequest, TopicNotFound, UsageError
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine
from tests.support.client_threads import TIMEOUT_MS, ClientThread
from tests.support.engines import client_fixture

KILLS = 3
IDS = 400
client = client_fixture("ring", "ipc")


@pytest.fixture
def queue(client, ringlog_topic) -> Queue:
    name = ringlog_topic("queue")
    client.topics.create(name, type="queue", durability="fsync")
    return client.queue(name, node="worker")


def once(done: Appended) -> AppendedOnce:
    assert isinstance(done, AppendedOnce)
    return done


def test_a_job_with_a_dedup_id_is_put_once(queue):
    """A repeated id returns the seq of the first write, whatever the other fields are."""
    first = once(queue.put(b"one", dedup_id="order-17", tag="t", priority=1))
    assert (first.seqs, first.deduped, first.count) == ((1,), False, 1)
    again = once(queue.put(b"other", dedup_id="order-17"))
    assert (again.first_seq, again.last_seq, again.deduped) == (1, 1, True)
    assert again.commit_ts == first.commit_ts
    assert queue.put(b"two", dedup_id="order-18").first_seq == 2
    assert queue.put(b"three").first_seq == 3
    assert [(job.data, job.tag) for job in queue.claim(9)] == [
        (b"one", "t"),
        (b"two", None),
        (b"three", None),
    ]


def test_a_batch_appends_its_new_dedup_ids_in_one_write(queue):
    """Each record of a batch has its own id.

    An id that occurs twice in a batch is appended once.

    Records without an id are always appended.
    """
    queue.put_many([NewRecord(data=b"%d" % n, dedup_id=str(n)) for n in (1, 3)])
    done = once(
        queue.put_many(
            [
                NewRecord(data=b"a", dedup_id="0", key=b"k"),
                NewRecord(data=b"b", dedup_id="1"),
                b"plain",
                NewRecord(data=b"c", dedup_id="0"),
                NewRecord(data=b"d", dedup_id="3"),
                NewRecord(data=b"e", dedup_id="4", headers={"h": b"v"}),
            ]
        )
    )
    assert done.seqs == (3, 1, 4, 3, 2, 5)
    assert (done.repeated, done.deduped, done.count) == ({1, 3, 4}, False, 6)
    jobs = queue.claim(9)
    assert [job.data for job in jobs] == [b"1", b"3", b"a", b"plain", b"e"]
    assert (jobs[2].key, dict(jobs[4].headers)) == (b"k", {"h": b"v"})
    whole = once(queue.put_many([NewRecord(data=b"x", dedup_id=each) for each in "43"]))
    assert (whole.seqs, whole.deduped) == ((5, 2), True)


@pytest.mark.interpreted
def test_a_write_whose_seqs_the_engine_has_forgotten_is_not_sent_again(queue, monkeypatch):
    """The engine recognises the frame of a retry, and no longer knows where its records are."""
    real, sent = idempotent_append.append_keyed_frame, []

    def reply_is_lost(*arguments, **options):
        done, known = yield from real(*arguments, **options)
        sent.append(known)
        return replace(done, first_seq=0, last_seq=0, deduped=True), known

    monkeypatch.setattr(idempotent_append, "append_keyed_frame", reply_is_lost)
    done = once(queue.put_many([NewRecord(data=b"a", dedup_id="0"), NewRecord(data=b"b")]))
    assert (done.seqs, done.count) == ((0, 0), 2)
    assert sent == [b""]
    assert [job.data for job in queue.claim(9)] == [b"a", b"b"]


def test_a_dedup_id_is_remembered_after_its_job_was_acked(queue):
    """The reply contains the seq of the deleted job."""
    queue.put(b"one", dedup_id="1")
    queue.claim()[0].ack()
    assert queue.put(b"one", dedup_id="1").deduped
    assert queue.claim() == []


def test_a_dedup_id_has_no_effect_in_a_topic_without_a_window(client, ringlog_topic):
    """Both records with the same id are appended."""
    client.topics.create(ringlog_topic(), idempotency_window_ms=0)
    assert [client.append(ringlog_topic(), b"x", dedup_id="1").first_seq for _ in range(2)] == [1, 2]


def test_a_record_with_a_dedup_id_creates_a_log_topic_but_no_queue(client, ringlog_topic):
    """`put` to a missing queue fails with `TopicNotFound`."""
    assert client.append(ringlog_topic("new"), b"x", dedup_id="1").first_seq == 1
    with pytest.raises(TopicNotFound):
        client.queue(ringlog_topic("absent")).put(b"x", dedup_id="1")


def test_idempotency_max_limits_the_remembered_ids_of_a_topic(client, ringlog_topic):
    """`topics.state` reports the remembered and the forgotten ids."""
    client.topics.create(ringlog_topic(), idempotency_max=3)
    client.append_many(ringlog_topic(), [NewRecord(data=b"x", dedup_id=str(n)) for n in range(5)])
    state = client.topics.state(ringlog_topic())
    assert (state.keys, state.keys_forgotten) == (3, 2)


def test_invalid_dedup_ids_are_refused(queue, client):
    """The errors are raised before a record is appended."""
    for wrong in ("", b"bytes", 5):
        with pytest.raises(UsageError):
            queue.put(b"x", dedup_id=wrong)  # type: ignore[arg-type]
    for wrong_ms in (0, -1, True, 1.5):
        with pytest.raises(UsageError):
            queue.put(b"x", dedup_id="1", dedup_window_ms=wrong_ms)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        queue.put(b"x", dedup_id="x" * 4_097)
    with pytest.raises(BatchTooLarge):
        queue.put_many(NewRecord(data=b"x", dedup_id=str(n)) for n in range(1_001))
    with pytest.raises(InvalidRequest):
        client.append_many(queue.topic, [NewRecord(data=b"x", dedup_id="1")], idempotency_key="k")
    with client.producer(queue.topic) as producer:
        with pytest.raises(UsageError, match="not supported by producers"):
            producer.send_many([NewRecord(data=b"x", dedup_id="1")])
        with pytest.raises(UsageError, match="not supported by producers"):
            producer.send(b"x", dedup_id="1")
    assert queue.stats().ready == 0


class Putter(ClientThread):
    """A thread that puts jobs one after the other, with the same ids as other threads."""

    def __init__(self, running: TestEngine, transport: str) -> None:
        super().__init__(running.url, transport)
        self.told: list[int] = []

    def work(self, client: Client) -> None:
        queue = client.queue("q")
        for n in range(IDS):
            self.told.append(queue.put(b"%d" % n, dedup_id=str(n)).first_seq)


class MixedWriter(ClientThread):
    """A thread that writes batches in which every second record has an id."""

    def __init__(self, running: TestEngine, name: str, transport: str) -> None:
        super().__init__(running.url, transport)
        self._label = name
        self.written: list[bytes] = []

    def work(self, client: Client) -> None:
        for n in range(0, IDS, 4):
            batch = [f"{self._label}-{n + row}" for row in range(4)]
            records = [
                NewRecord(data=each.encode(), dedup_id=each if row % 2 else None)
                for row, each in enumerate(batch)
            ]
            done = once(client.append_many("mixed", records))
            assert len(set(done.seqs)) == len(batch)
            self.written += [each.encode() for each in batch]


@pytest.mark.slow
def test_mixed_batches_are_appended_once_despite_kills_of_shard_and_gateway():
    """This includes batches whose replies were lost."""
    settings = {"wal": {"shards": 1}, "gateway": {"enabled": True}, "supervisor": {"restart_max": 100}}
    with engine(**settings) as running, ringlog.connect(running.url, wait=10) as client:
        client.topics.create("mixed", durability="disk")
        writers = [MixedWriter(running, f"w{n}", way) for n, way in enumerate(("ring", "ipc", "ring", "ipc"))]
        for each in writers:
            each.start()
        kill = 0
        while any(each.is_alive() for each in writers):
            kill += 1
            before = sum(len(each.written) for each in writers)
            running.kill("gateway" if kill % 4 == 0 else "wal_shard")
            running.wait_ready()
            while any(each.is_alive() for each in writers) and (
                sum(len(each.written) for each in writers) < before + 40
            ):
                writers[0].join(0.01)
        assert [each.error for each in writers] == [None] * len(writers)
        found = [record.data for record in client.reader("mixed")]
        assert sorted(found) == sorted(data for each in writers for data in each.written)


@pytest.mark.slow
def test_three_putters_of_the_same_ids_create_each_job_once_despite_kills():
    """Within its window one dedup id is one record (W10).

    Three programs put the same 400 jobs while their shard is killed.
    """
    settings = {"wal": {"shards": 1}, "gateway": {"enabled": True}, "supervisor": {"restart_max": 100}}
    with engine(**settings) as running, ringlog.connect(running.url, wait=10) as client:
        client.topics.create("q", type="queue", durability="disk")
        putters = [Putter(running, transport) for transport in ("ring", "ipc", "ring")]
        for each in putters:
            each.start()
        for kill in range(1, KILLS + 1):
            while len(putters[0].told) < kill * IDS // (KILLS + 1) and putters[0].is_alive():
                putters[0].join(0.01)
            running.kill("wal_shard")
            running.wait_ready()
        for each in putters:
            each.join(TIMEOUT_MS / 1_000)
        assert [each.error for each in putters] == [None] * 3
        assert putters[0].told == putters[1].told == putters[2].told
        jobs = client.queue("q").claim(1_000)
        assert sorted(int(job.data) for job in jobs) == list(range(IDS))
        assert [(job.seq, int(job.data)) for job in jobs] == sorted(
            zip(putters[0].told, range(IDS), strict=True)
        )
