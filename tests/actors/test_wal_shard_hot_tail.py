"""The newest records of queues in memory equal those of the log, need no reads, and are bounded."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ringlog.actors.wal_shard.commit import hot_tail
from ringlog.actors.wal_shard.commit.hot_tail import HotTail, contents_of
from ringlog.client.leases.inline_jobs import decode_inline_jobs
from ringlog.client.read.pages import Record
from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from ringlog.limits import INLINE_BYTES_MAX
from ringlog.storage.record_index import StoredRecordIndex
from ringlog.topic.state import ShardTopic
from tests.support.shard_world import DATA, SHM, World
from tests.support.shard_worlds import started


@pytest.fixture
def world() -> World:
    made = started()
    made.put_topic("q", type="queue", durability="disk")
    return made


def newest(world: World) -> HotTail:
    return world.run_of("q").core.requests.leases.recent_records


def payloads_in(tail: HotTail, topic: ShardTopic, first: int, count: int) -> tuple[list[bytes], bytes] | None:
    """Return payloads and stamps of these jobs. None if they are not in memory, or need their frame."""
    parts = tail.find_parts(topic, first, count)
    found = None if parts is None else contents_of(parts)
    return None if found is None or found.frames else (found.payloads, found.stamps)


def sizes(world: World, first: int, last: int) -> list[int]:
    """Return the sizes of these jobs according to storage."""
    run = world.run_of("q")
    ledger = StoredRecordIndex(run.disk, DATA, SHM, run._published)
    found = ledger.positions(
        run.core.requests.locations.locate_records(world.topic("q"), first - 1), first, last
    )
    ledger.close()
    assert found[0].tolist() == list(range(first, last + 1))
    return found[1].tolist()


def send(world: World, jobs: list[bytes], seq: int, **columns: Any) -> bytearray:
    made = encode_records(jobs, **columns)
    return frame(made, topic_id=world.topic("q").topic_id, producer_id=9, producer_seq=seq)


def records(tail: HotTail, topic: ShardTopic, first: int, count: int) -> list[Record] | None:
    """Return these jobs as their worker receives them. None if they are not sent with the reply."""
    parts = tail.find_parts(topic, first, count)
    found = None if parts is None else contents_of(parts)
    if found is None:
        return None
    claimed = m.ClaimReply(
        topic.name, topic.topic_id, topic.epoch, 0, 0, [(first, count, 1, 7)],
        payloads=found.payloads, stamps=found.stamps, frames=found.frames,
    )  # fmt: skip
    return [
        record
        for stretch in decode_inline_jobs(topic.name, claimed, found.data)
        for record in stretch.records()
    ]


@pytest.mark.parametrize("seed", range(12))
def test_a_kept_record_equals_the_one_that_lies_in_the_log(world: World, seed: int) -> None:
    chance = random.Random(seed)
    jobs: list[tuple[bytes, str | None, dict[str, int]]] = []
    world.put_topic("other", durability="disk")
    for n in range(40):
        pieces = []
        for piece in range(chance.choice((1, 1, 1, 4))):
            some = [
                chance.randbytes(chance.choice((0, 1, 7, 8, 300))) for _ in range(chance.choice((1, 1, 5)))
            ]
            kind = chance.choice(("plain", "plain", "plain", "tags", "metas"))
            tags: list[str | None] = [None] * len(some)
            metas: list[dict[str, int]] = [{}] * len(some)
            if kind == "tags":
                tags = [f"t{n}"] * len(some)
                pieces.append(send(world, some, 4 * n + piece + 1, tags=tags))
            elif kind == "metas":
                metas = [{"a": n}] * len(some)
                pieces.append(send(world, some, 4 * n + piece + 1, metas=[b'{"a":%d}' % n] * len(some)))
            else:
                pieces.append(send(world, some, 4 * n + piece + 1))
            jobs += zip(some, tags, metas, strict=True)
        world.send("q", pieces)
        world.append("other", [b"between"])
    topic, tail = world.topic("q"), newest(world)
    known = sizes(world, 1, len(jobs))
    for _ in range(300):
        first = chance.randrange(len(jobs))
        stop = min(first + chance.choice((1, 1, 2, 9, 40)), len(jobs))
        assert tail.total_of(topic, first + 1, stop - first) == sum(known[first:stop])
        found = records(tail, topic, first + 1, stop - first)
        assert found is not None
        assert [(each.data, each.tag, each.meta) for each in found] == jobs[first:stop]
        assert [each.seq for each in found] == list(range(first + 1, stop + 1))
    assert tail.find_parts(topic, len(jobs) + 1, 1) is None
    assert tail.total_of(topic, len(jobs), 2) is None


def test_stamps_are_those_of_the_commits(world: World) -> None:
    for n in range(5):
        world.append("q", [b"%d" % n] * (1 + n % 2))
        world.tick(0.5)
    found = payloads_in(newest(world), world.topic("q"), 1, 7)
    assert found is not None
    assert np.diff(np.frombuffer(found[1], "<i8")).tolist() == [500_000, 0, 500_000, 500_000, 0, 500_000]


@pytest.mark.parametrize("count", [1, 10])
def test_a_job_is_put_claimed_and_acked_without_a_read_of_the_log(
    world: World, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.run_of("q")

    def read(*_: Any) -> None:
        raise AssertionError("storage was asked")

    monkeypatch.setattr(run, "_query_storage", read)
    for n in range(50):
        world.append("q", [b"%d" % n] * count)
        claimed = world.request(m.Claim("q", "w", count, call=3 * n + 1))
        (given,) = claimed.runs
        assert given[:2] == (n * count + 1, count)
        found = payloads_in(newest(world), world.topic("q"), *given[:2])
        assert found is not None
        assert found[0] == [b"%d" % n] * count
        seqs = np.arange(given[0], given[0] + count, dtype="<u8").tobytes()
        tokens = np.arange(given[3], given[3] + count, dtype="<u8").tobytes()
        assert world.request(m.Ack("q", "w", seqs, tokens, call=3 * n + 2)).acked == count
    assert world.topic("q").count == 0


def test_settled_jobs_are_dropped_with_the_next_append(world: World) -> None:
    tail = newest(world)
    for n in range(200):
        world.append("q", [b"%d" % n])
        claimed = world.request(m.Claim("q", "w", 1))
        world.request(m.Ack("q", "w", np.array([claimed.runs[0][0]], "<u8").tobytes()))
        assert len(tail) == 1
    assert tail.bytes < 1_000


@pytest.mark.parametrize("each", [1, 3])
def test_the_bound_drops_oldest_records(world: World, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = HotTail(10_000)
    monkeypatch.setattr(world.run_of("q").core.requests.leases, "recent_records", tail)
    monkeypatch.setattr(hot_tail, "_TIDY_AT", 7)
    world.put_topic("p", type="queue", durability="disk")
    for n in range(300):
        world.append("q" if n % 3 else "p", [b"%04d" % n] * each)
        assert tail.bytes <= 10_000
        assert len(tail) >= min(n + 1, 10)
    for name in ("q", "p"):
        topic = world.topic(name)
        # From the end: a split frame needs more memory, for which the oldest records are dropped.
        there = [tail.total_of(topic, seq, 1) for seq in range(topic.head_seq, 0, -1)][::-1]
        assert there[-1] == 4
        assert there == sorted(there, key=lambda size: size is not None)
        assert there[0] is None
    tail.forget(world.topic("q").topic_id)
    tail.forget(world.topic("p").topic_id)
    assert (tail.bytes, len(tail)) == (0, 0)


def test_memory_of_split_small_jobs_is_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload of one byte takes 5 bytes in its frame, and ten times that as an object."""
    tail = HotTail(30_000)
    monkeypatch.setattr(world.run_of("q").core.requests.leases, "recent_records", tail)
    for _ in range(10):
        world.append("q", [b"x"] * 200)
    assert len(tail) == 10
    topic = world.topic("q")
    for first in range(1, 2_000, 200):
        found = payloads_in(tail, topic, first, 200)
        assert found is None or found[0] == [b"x"] * 200
        assert tail.bytes <= 30_000
    assert payloads_in(tail, topic, 1_801, 200) is not None
    assert 1 <= len(tail) < 4
    tail.forget(topic.topic_id)
    assert (tail.bytes, len(tail)) == (0, 0)


def test_frames_larger_than_the_bound_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = HotTail(1_000)
    monkeypatch.setattr(world.run_of("q").core.requests.leases, "recent_records", tail)
    world.append("q", [bytes(100)] * 20)
    world.append("q", [bytes(5_000)])
    assert (tail.bytes, len(tail)) == (0, 0)
    world.append("q", [b"small"])
    assert tail.total_of(world.topic("q"), 22, 1) == 5


def test_a_large_job_is_sent_alone_with_its_claim_and_large_claims_are_not(world: World) -> None:
    for size in (INLINE_BYTES_MAX + 1, INLINE_BYTES_MAX, 1):
        world.append("q", [bytes(size)])
    world.append("q", [b"a", bytes(2 * INLINE_BYTES_MAX)])
    topic, tail = world.topic("q"), newest(world)
    for seq, size in enumerate((INLINE_BYTES_MAX + 1, INLINE_BYTES_MAX, 1), 1):
        (record,) = records(tail, topic, seq, 1) or ()
        assert (record.seq, record.data) == (seq, bytes(size))
        assert tail.total_of(topic, seq, 1) == size
    # A claim of one job in a large frame would receive the whole frame, once for each job.
    assert records(tail, topic, 4, 1) is records(tail, topic, 5, 1) is None
    assert (tail.total_of(topic, 4, 1), tail.total_of(topic, 5, 1)) == (1, 2 * INLINE_BYTES_MAX)
    assert records(tail, topic, 1, 2) is None
    assert records(tail, topic, 2, 2) is None
    assert records(tail, topic, 3, 3) is None
    assert records(tail, topic, 3, 2) is None  # They are in one frame with a large job.


def test_a_frame_with_jobs_of_two_leases_is_sent_once(world: World) -> None:
    world.send("q", [send(world, [b"%d" % n for n in range(9)], 1, tags=["t"] * 9)])
    topic, tail = world.topic("q"), newest(world)
    parts = [*(tail.find_parts(topic, 2, 2) or ()), *(tail.find_parts(topic, 6, 1) or ())]
    found = contents_of(parts)
    assert found is not None
    assert found.frames == 1


def test_a_recreated_topic_has_none_of_the_old_jobs(world: World) -> None:
    world.append("q", [b"old"])
    world.request(m.TopicDelete("q"))
    world.put_topic("q", type="queue", durability="disk")
    assert newest(world).total_of(world.topic("q"), 1, 1) is None
    world.append("q", [b"of the new life"])
    found = payloads_in(newest(world), world.topic("q"), 1, 1)
    assert found is not None
    assert found[0] == [b"of the new life"]


def test_jobs_committed_with_the_deletion_of_their_queue_do_not_belong_to_the_next_one(world: World) -> None:
    """The hot tail receives them after the notice of the deletion."""
    run = world.run_of("q")
    run.step(run.frames(1, send(world, [b"old"], 1)), run.request(99, m.TopicDelete("q")))
    world.put_topic("q", type="queue", durability="disk")
    after = world.topic("q")
    assert newest(world).total_of(after, 1, 1) is None
    world.append("q", [b"of the new life"])
    found = payloads_in(newest(world), after, 1, 1)
    assert found is not None
    assert found[0] == [b"of the new life"]


def test_records_of_log_topics_are_kept_only_for_groups(world: World) -> None:
    world.put_topic("log", durability="disk")
    world.append("log", [b"record"])
    assert len(newest(world)) == 0
    world.request(m.GroupOpen("log", "g", 1))
    world.append("log", [b"for the group"])
    found = payloads_in(newest(world), world.topic("log"), 2, 1)
    assert found is not None
    assert found[0] == [b"for the group"]
