"""Jobs that fail repeatedly move to the dead-letter topic of a real engine. Processes are killed."""

from __future__ import annotations

import pytest
import zmq

import ringlog
from ringlog import stop_points
from ringlog.actors.scheduler.forwarding.dead_letters import copy_producer_id
from ringlog.board.processes import shard_socket
from ringlog.client import EARLIEST, Client
from ringlog.client.leases.dead_letters import dead_letter_field, split_for_move
from ringlog.client.queue import Queue
from ringlog.client.read.pages import Record
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.errors import InvalidRequest, LeaseLost
from ringlog.limits import (
    DEAD_LETTERS_BYTES_PER_MOVE,
    DEAD_LETTERS_PER_MOVE,
    META_BYTES_MAX,
    RECORD_BYTES_DEFAULT,
)
from ringlog.placement import home_shard
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.topic_contents import records

SLOW = pytest.mark.slow
MOVED_S = 30.0
STAMPS = ("$dead_letter_from", "$dead_letter_deliveries", "$dead_letter_src_seq")


# -- copies -----------------------------------------------------------------------------------------------


def test_a_move_splits_jobs_at_its_limits_and_contains_at_least_one():
    many = [Record(seq=n, ts=0, data=b"x") for n in range(2 * DEAD_LETTERS_PER_MOVE + 1)]
    assert list(map(len, split_for_move(many))) == [DEAD_LETTERS_PER_MOVE, DEAD_LETTERS_PER_MOVE, 1]
    large = [Record(seq=n, ts=0, data=bytes(DEAD_LETTERS_BYTES_PER_MOVE)) for n in range(3)]
    assert list(map(len, split_for_move(large))) == [1, 1, 1]
    assert split_for_move([]) == []


def test_the_producer_id_of_a_copy_depends_only_on_its_job():
    """The id is a hash of queue, epoch and seq, so that one job is copied once (Q7)."""
    ids = {copy_producer_id(topic, epoch, seq) for topic in (1, 2) for epoch in (1, 2) for seq in (1, 2)}
    assert len(ids) == 8
    assert copy_producer_id(1, 2, 3) == copy_producer_id(1, 2, 3)


# -- a real engine ----------------------------------------------------------------------------------------

running = engine_fixture(wal={"shards": 2}, delivery={"schedulers": 2}, supervisor={"restart_max": 100})


def make(client: Client, name: str = "jobs", **config) -> Queue:
    client.topics.create(name, **{"type": "queue", "max_deliveries": 2, "dead_letter": "dead", **config})
    return client.queue(name)


def fail_all(queue: Queue, times: int = 2) -> None:
    """Deliver and nack every job this many times. One more claim must return no job."""
    for _ in range(times):
        while jobs := queue.claim(100):
            queue.nack(jobs, delay_ms=50)
            if queue.stats().ready == 0:
                break
        wait_until(lambda: not queue.stats().delayed, 20, "the jobs to be ready again")
    assert queue.claim(100) == []


def is_moved(queue: Queue, count: int) -> bool:
    found = queue.stats()
    return (found.ready, found.in_flight, found.delayed) == (0, 0, 0) and found.dead_lettered >= count


@SLOW
def test_a_job_that_fails_too_often_is_moved_with_all_its_fields(client: Client):
    """The copy keeps every column except the expiry. Stamps name its origin and cannot be forged."""
    queue = make(client, durability="fsync")
    full = {f"k{n}": n for n in range(64)}
    queue.put(b"one", key=b"k", tag="t", node="n", meta=full, headers={"h": b"v"}, priority=2, event_ts=7)
    queue.put(b"two", meta={STAMPS[0]: "forged", "own": 1})
    queue.put(b"three", meta={"large": "x" * (META_BYTES_MAX - 20)}, ttl_ms=3_600_000)
    fail_all(queue)
    wait_until(lambda: is_moved(queue, 3), MOVED_S, "the jobs to be moved")
    one, two, three = records(client, "dead")
    assert (one.data, one.key, one.tag, one.node, one.priority, one.event_ts) == (
        b"one", b"k", "t", "n", 2, 7,
    )  # fmt: skip
    stamps = dict(zip(STAMPS, ("jobs", "2", "1"), strict=True))
    assert one.meta == full | stamps
    assert dict(one.headers) == {"h": b"v"}
    assert two.meta == {"own": 1} | stamps | {STAMPS[2]: "2"}, "the stamps must not be forged"
    assert len(three.meta["large"]) == META_BYTES_MAX - 20
    assert three.headers[STAMPS[2]] == b"3", "no space in the metadata"
    assert three.expires_at is None
    assert client.topics.state("dead").config["type"] == "log", "created with defaults"


@SLOW
def test_a_rejected_job_is_moved_with_the_reason(client: Client):
    queue = make(client, max_deliveries=0)
    queue.put_many([b"bad", b"good"])
    bad, good = queue.claim(2)
    bad.reject("no such address")
    with good:
        wait_until(lambda: queue.stats().dead_lettered == 1, MOVED_S, "the job to be moved")
    with pytest.raises(LeaseLost):
        bad.reject()
    (letter,) = records(client, "dead")
    assert (letter.data, letter.meta["$dead_letter_reason"]) == (b"bad", "no such address")
    assert abs(int(letter.meta["$dead_letter_last_failure"]) * 1_000 - letter.ts) < MOVED_S * 1e6
    assert "$dead_letter_nacks" not in letter.meta


@SLOW
def test_a_dead_letter_keeps_the_expiry_of_its_job_if_its_queue_is_configured_for_it(client: Client):
    """The setting is `dead_letter_keep_expiry`."""
    queue = make(client, dead_letter_keep_expiry=True)
    queue.put(b"bad", ttl_ms=3_600_000)
    (job,) = queue.claim()
    job.reject()
    wait_until(lambda: queue.stats().dead_lettered == 1, MOVED_S, "the job to be moved")
    assert records(client, "dead")[0].expires_at == job.record.expires_at is not None


@SLOW
@pytest.mark.parametrize("leases_durable", [False, True])
def test_a_dead_letter_contains_the_last_failure_and_the_number_of_nacks(client: Client, leases_durable):
    """The reason is that of the last failure. Forged stamps are overwritten or removed."""
    queue = make(client, leases_durable=leases_durable)
    queue.put(b"bad", meta={"$dead_letter_nacks": "forged", "$dead_letter_last_failure": "forged"})
    with pytest.raises(ValueError, match="no such"), queue.claim()[0]:
        raise ValueError("no such account\nsecond line")
    (job,) = queue.claim(wait_ms=20_000)
    job.nack(reason="still none")
    queue.put(b"silent", meta={"$dead_letter_nacks": "forged", "$dead_letter_last_failure": "forged"})
    for _ in range(2):
        queue.nack(queue.claim())
    assert queue.claim() == []
    wait_until(lambda: is_moved(queue, 2), MOVED_S, "the jobs to be moved")
    bad, silent = records(client, "dead")
    assert (bad.meta["$dead_letter_reason"], bad.meta["$dead_letter_nacks"]) == ("still none", "2")
    assert abs(int(bad.meta["$dead_letter_last_failure"]) * 1_000 - bad.ts) < MOVED_S * 1e6
    assert {"$dead_letter_nacks", "$dead_letter_last_failure", "$dead_letter_reason"} & set(
        silent.meta
    ) == set()


@SLOW
def test_a_full_dead_letter_topic_blocks_no_other_queue_and_loses_no_job(client: Client):
    """The jobs stay exhausted until the dead-letter topic accepts them."""
    client.topics.create("full", cap_records=1, discard="reject")
    client.append("full", b"there")
    stuck, other = make(client, "stuck", dead_letter="full"), make(client, "other")
    stuck.put_many([b"a", b"b"])
    other.put(b"c")
    fail_all(stuck)
    fail_all(other)
    wait_until(lambda: is_moved(other, 1), MOVED_S, "the other queue's job to be moved")
    assert (stuck.stats().ready, stuck.stats().dead_lettered) == (2, 0)
    stuck.put(b"more")
    assert [job.data for job in stuck.claim(9)] == [b"more"]
    client.topics.configure("full", cap_records=3)
    wait_until(lambda: stuck.stats().dead_lettered == 2, MOVED_S, "the jobs to be moved after all")
    assert [record.data for record in records(client, "full")] == [b"there", b"a", b"b"]


@SLOW
@pytest.mark.parametrize("record_bytes", [RECORD_BYTES_DEFAULT, 8 * RECORD_BYTES_DEFAULT, 2_000])
def test_a_job_of_the_maximum_size_becomes_a_dead_letter_and_is_redriven(record_bytes: int):
    """The stamps do not count against the size limit. Otherwise the job would stay in its queue forever, and
    no worker could claim it."""
    with (
        engine(delivery={"schedulers": 1}, limits={"max_record_bytes": record_bytes}) as small,
        ringlog.connect(small.url, wait=20) as client,
    ):
        queue = make(client)
        job = bytes(range(256)) * (record_bytes // 256) + bytes(record_bytes % 256)
        queue.put_many([job, job[:-60], job[:-5]])
        fail_all(queue)
        wait_until(lambda: is_moved(queue, 3), MOVED_S, "the jobs to be moved")
        assert [letter.data for letter in queue.dead_letters()] == [job, job[:-60], job[:-5]]
        members = client.group("jobs.log", "g", mode="queue", start=EARLIEST, dead_letter="dead")
        client.append("jobs.log", job)
        members.reject(members.claim(wait_ms=20_000)[0], "no")
        wait_until(lambda: len(list(members.dead_letters())) == 1, MOVED_S, "the record to be moved")
        assert queue.redrive().moved == 3
        assert [each.data for each in queue.claim(9, wait_ms=20_000)] == [job, job[:-60], job[:-5]]


@SLOW
def test_copies_of_a_router_become_dead_letters_although_its_stamp_exceeds_the_limits_of_a_record(
    client: Client,
):
    queue = make(client, dead_letter="dead")
    client.routers.create("r", "source", "jobs", guarantee="exactly_once")
    metas = [None, {"large": "x" * (META_BYTES_MAX - 20)}, None, None]
    jobs = [b"first", b"x", bytes(RECORD_BYTES_DEFAULT), b"last"]
    for job, meta in zip(jobs, metas, strict=True):
        client.append("source", job, meta=meta)
    client.routers.settle("r")
    fail_all(queue)
    wait_until(lambda: is_moved(queue, 4), MOVED_S, "the jobs to be moved")
    moved = {int(dead_letter_field(letter, STAMPS[2])): letter for letter in queue.dead_letters()}
    assert [moved[seq].data for seq in range(1, 5)] == jobs
    assert b'"large"' in moved[2].headers["$dead_letter_meta"], "no space in the metadata"
    assert queue.redrive().moved == 4


@SLOW
def test_a_job_larger_than_a_lowered_limit_holds_up_no_other_job(tmp_path):
    """It stays in its queue, and the log names it."""
    before, jobs = tmp_path / "e", [b"first", bytes(5_000), b"last"]
    with (
        engine(delivery={"schedulers": 1}, directory=before) as found,
        ringlog.connect(found.url, wait=20) as client,
    ):
        make(client).put_many(jobs)
    with (
        engine(delivery={"schedulers": 1}, directory=before, limits={"max_record_bytes": 2_000}) as found,
        ringlog.connect(found.url, wait=20) as client,
    ):
        queue = client.queue("jobs")
        fail_all(queue)
        wait_until(lambda: queue.stats().dead_lettered == 2, MOVED_S, "the other jobs to be moved")
        assert [letter.data for letter in queue.dead_letters()] == [b"first", b"last"]
        wait_until(lambda: '"seq":2' in found.log_path.read_text(), MOVED_S, "the job to be logged")
    with (
        engine(delivery={"schedulers": 1}, directory=before) as found,
        ringlog.connect(found.url, wait=20) as client,
    ):
        queue = client.queue("jobs")
        fail_all(queue)
        wait_until(lambda: is_moved(queue, 1), MOVED_S, "the last job to be moved")
        assert [letter.data for letter in queue.dead_letters()] == [b"first", b"last", jobs[1]]


@SLOW
def test_a_dead_letter_queue_can_have_a_dead_letter_queue(client: Client):
    """A dead letter in a queue is an ordinary ready job, which may move on to a third topic."""
    first, second = make(client, "a", dead_letter="b"), make(client, "b", dead_letter="c")
    third = make(client, "c", dead_letter="d")
    first.put(b"ping")
    fail_all(first)
    (job,) = second.claim(wait_ms=20_000)
    assert (job.data, job.deliveries, job.meta[STAMPS[0]]) == (b"ping", 1, "a")
    job.nack()
    fail_all(second, 1)
    (job,) = third.claim(wait_ms=20_000)
    assert (job.seq, job.deliveries, job.meta[STAMPS[0]]) == (1, 1, "b")
    job.ack()


@SLOW
def test_a_cycle_of_dead_letter_topics_is_refused(running: TestEngine):
    """A job would circle forever. The check does not depend on the client that configures the last topic."""
    with (
        ringlog.connect(running.url, wait=20) as client,
        ringlog.connect(running.url, wait=20) as other,
    ):
        make(client, "one", dead_letter="two")
        for each in (client, other):
            with pytest.raises(InvalidRequest, match="two -> one -> two") as refused:
                make(each, "two", dead_letter="one")
            assert refused.value.detail["field"] == "dead_letter"
        make(client, "two", dead_letter="three")
        make(client, "three")
        for each in (client, other):
            with pytest.raises(InvalidRequest, match="three -> one -> two -> three"):
                each.topics.configure("three", dead_letter="one")
        # Cycles through groups: of the target, and of the topic to which the letters would return.
        for name in ("log", "letters"):
            client.topics.create(name)
        client.group("log", "g", mode="queue", dead_letter="letters").stats()
        for each in (client, other):
            with pytest.raises(InvalidRequest, match="letters -> log -> letters"):
                each.group("letters", "back", mode="queue", dead_letter="log").stats()
            with pytest.raises(InvalidRequest, match="letters -> log -> letters"):
                each.topics.configure("letters", dead_letter="log")
        assert [each.group for each in client.topics.groups("letters")] == []
        client.topics.configure("three", dead_letter="log")
        with pytest.raises(InvalidRequest, match="letters -> one -> two -> three -> log -> letters"):
            client.group("letters", "far", mode="queue", dead_letter="one").stats()
        # Two queues with one dead-letter topic, and a diamond, form no cycle.
        make(client, "four", dead_letter="log")


@SLOW
def test_the_mover_refuses_a_cycle_of_topics_that_were_created_at_once(running: TestEngine, client: Client):
    """Neither client could see the other topic, so the mover checks again."""
    first = make(client, "a", dead_letter="b")
    # A client that checked before the other topic existed sends this request.
    put = m.TopicPut("b", {"type": "queue", "dead_letter": "a"}, "create")
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        shard = home_shard("b", 2)
        peer.connect(shard_socket(running.info.shm_dir, shard))
        peer.send(encode(put, 1))
        assert peer.poll(20_000)
        assert isinstance(decode(peer.recv()).message, m.TopicInfo)
    first.put(b"job")
    fail_all(first)
    said = "dead_letter must not form a cycle"
    wait_until(lambda: said in running.log_path.read_text(), MOVED_S, "the mover to refuse")
    assert client.queue("b").stats().ready == 0
    client.topics.configure("b", dead_letter=None)
    (job,) = client.queue("b").claim(wait_ms=60_000)
    assert job.data == b"job"


@SLOW
@pytest.mark.parametrize("point", [name for name in stop_points.POINTS if name.startswith("dead_letter_")])
def test_a_scheduler_that_dies_between_copy_and_deletion_copies_no_job_twice(point: str):
    """The dead-letter topic remembers the producer of a copy, so the retry appends no second copy (Q7)."""
    with (
        engine(
            wal={"shards": 2}, delivery={"schedulers": 1}, supervisor={"restart_max": 100},
            environ={"RINGLOG_TEST_STOP_POINTS": f"{point}:1:kill;{point}:1:kill"},
        ) as found,
        ringlog.connect(found.url, wait=20, timeout_ms=60_000) as client,
    ):  # fmt: skip
        queue = make(client, durability="fsync")
        queue.put_many([b"%d" % n for n in range(20)])
        fail_all(queue)
        wait_until(lambda: is_moved(queue, 20), MOVED_S, "the jobs to be moved")
        assert sorted(int(record.data) for record in records(client, "dead")) == list(range(20))


@SLOW
@pytest.mark.parametrize("point", [name for name in stop_points.POINTS if name.startswith("dead_letter_")])
def test_a_power_loss_between_copy_and_deletion_copies_no_job_twice(point: str, tmp_path):
    """After the start, the copies exist and the jobs are ready. The next move appends no second copy."""
    spec = {"RINGLOG_TEST_STOP_POINTS": f"{point}:1:pause"}
    with (
        engine(
            wal={"shards": 2}, delivery={"schedulers": 1}, directory=tmp_path / "e", environ=spec
        ) as found,
        ringlog.connect(found.url, wait=20, timeout_ms=60_000) as client,
    ):
        queue = make(client, durability="fsync")
        queue.put_many([b"%d" % n for n in range(20)])
        fail_all(queue)

        def have_copies() -> bool:
            topics = [topic.topic for topic in client.topics.list()]
            return "dead" in topics and len(records(client, "dead")) == 20

        wait_until(have_copies, MOVED_S, "the copies to exist")
        assert queue.stats().ready == 20
        found.power_off()
        found._environ.pop("RINGLOG_TEST_STOP_POINTS")
        found.start()
        found.wait_ready()
        assert queue.stats().ready == 20
        fail_all(queue)
        wait_until(lambda: is_moved(queue, 20), MOVED_S, "the jobs to be moved")
        assert sorted(int(record.data) for record in records(client, "dead")) == list(range(20))
