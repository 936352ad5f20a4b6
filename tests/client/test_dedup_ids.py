"""Records with dedup ids, as a program writes them (capabilities L38 to L40)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import ringlog
from ringlog.client import Appended, AppendedOnce, Client, NewRecord
from ringlog.client.queue import Queue
from ringlog.errors import BatchTooLarge, InvalidRequest, TopicNotFound, UsageError
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine

KILLS = 3
IDS = 400
TIMEOUT_MS = 60_000


@pytest.fixture(params=["ring", "ipc"])
def worker(request, ringlog_engine) -> Iterator[Client]:
    with ringlog.connect(ringlog_engine.url, wait=10, transport=request.param) as connected:
        yield connected


@pytest.fixture
def queue(worker, ringlog_topic) -> Queue:
    name = ringlog_topic("queue")
    worker.topics.create(name, type="queue", durability="fsync")
    return worker.queue(name, node="worker")


def once(done: Appended) -> AppendedOnce:
    assert isinstance(done, AppendedOnce)
    return done


def test_a_job_with_a_dedup_id_is_put_once(queue):
    """L38, I-4, I-5: whatever the repeat says, it gets the number of the first time."""
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


def test_of_many_jobs_those_that_are_new_are_put_in_one_write(queue):
    """L38: an id for each record of a batch; one twice in it is one; those without any always go."""
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


def test_an_id_is_remembered_after_its_job_is_done(queue):
    """I-9: the number is historic."""
    queue.put(b"one", dedup_id="1")
    queue.claim()[0].ack()
    assert queue.put(b"one", dedup_id="1").deduped
    assert queue.claim() == []


def test_an_id_means_nothing_where_the_topic_has_no_window(worker, ringlog_topic):
    """I-3."""
    worker.topics.create(ringlog_topic(), idempotency_window_ms=0)
    assert [worker.append(ringlog_topic(), b"x", dedup_id="1").first_seq for _ in range(2)] == [1, 2]


def test_a_topic_is_made_by_a_record_with_an_id_and_a_queue_is_not(worker, ringlog_topic):
    """QL-2, W-5."""
    assert worker.append(ringlog_topic("new"), b"x", dedup_id="1").first_seq == 1
    with pytest.raises(TopicNotFound):
        worker.queue(ringlog_topic("absent")).put(b"x", dedup_id="1")


def test_how_many_ids_a_topic_remembers_is_its_own_and_shown(worker, ringlog_topic):
    """L39, L41."""
    worker.topics.create(ringlog_topic(), idempotency_max=3)
    worker.append_many(ringlog_topic(), [NewRecord(data=b"x", dedup_id=str(n)) for n in range(5)])
    state = worker.topics.state(ringlog_topic())
    assert (state.keys, state.keys_forgotten) == (3, 2)


def test_what_cannot_be_an_id_is_refused_before_it_is_sent(queue, worker):
    """CL-13, N-6."""
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
        worker.append_many(queue.topic, [NewRecord(data=b"x", dedup_id="1")], idempotency_key="k")
    with worker.producer(queue.topic) as producer:
        with pytest.raises(UsageError, match="not with a producer"):
            producer.send_many([NewRecord(data=b"x", dedup_id="1")])
        with pytest.raises(UsageError, match="not with a producer"):
            producer.send(b"x", dedup_id="1")
    assert queue.stats().ready == 0


class Putter(threading.Thread):
    """Puts jobs under the same ids as others do, one after the other."""

    def __init__(self, running: TestEngine, transport: str) -> None:
        super().__init__(daemon=True)
        self._url, self._transport = running.url, transport
        self.told: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with ringlog.connect(
                self._url, wait=20, timeout_ms=TIMEOUT_MS, transport=self._transport,  # type: ignore[arg-type]
            ) as client:  # fmt: skip
                queue = client.queue("q")
                for n in range(IDS):
                    self.told.append(queue.put(b"%d" % n, dedup_id=str(n)).first_seq)
        except BaseException as e:  # noqa: BLE001  judged by the test
            self.error = e


class MixedWriter(threading.Thread):
    """Writes batches of which every second record has an id."""

    def __init__(self, running: TestEngine, name: str, transport: str) -> None:
        super().__init__(daemon=True)
        self._url, self._name, self._transport = running.url, name, transport
        self.written: list[bytes] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with ringlog.connect(
                self._url, wait=20, timeout_ms=TIMEOUT_MS, transport=self._transport,  # type: ignore[arg-type]
            ) as client:  # fmt: skip
                for n in range(0, IDS, 4):
                    batch = [f"{self._name}-{n + row}" for row in range(4)]
                    records = [
                        NewRecord(data=each.encode(), dedup_id=each if row % 2 else None)
                        for row, each in enumerate(batch)
                    ]
                    done = once(client.append_many("mixed", records))
                    assert len(set(done.seqs)) == len(batch)
                    self.written += [each.encode() for each in batch]
        except BaseException as e:  # noqa: BLE001  judged by the test
            self.error = e


@pytest.mark.slow
def test_batches_of_records_with_ids_and_without_are_there_once_when_shards_and_gateways_are_killed():
    """I-13: also those whose answer was lost."""
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
def test_putters_of_the_same_jobs_and_a_shard_that_is_killed_make_each_job_once():
    """L38, L40, I-6, I-10: three programs put the same four hundred; none is lost, none is there twice."""
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
