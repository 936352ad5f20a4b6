"""`not_before` and priority of jobs: the shard reads them from the records, over kills and segments."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Internal, Status
from ringlog.frame import encode_records, frame
from ringlog.testing.disk import SimulatedDisk
from tests.support.checkpoint_world import checkpoint_all
from tests.support.lease_words import held
from tests.support.queue_world import ack, claim, make, nack, stats
from tests.support.removal_world import append, delete
from tests.support.routed_world import Routed
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart, started

CLASSES = ("fsync", "disk", "memory", "ephemeral")
S = 1_000_000


def put(
    world: World, delay_s: float | None = None, priority: int = 0, count: int = 1, name: str = "q"
) -> int:
    """Put jobs with a delay and a priority. Return the first seq."""
    at_us = None if delay_s is None else world.clock.now_us() + round(delay_s * S)
    return append(
        world, name, [b"job"] * count, not_before=None if at_us is None else [at_us] * count,
        priorities=[priority] * count if priority else None,
    )  # fmt: skip


def taken(world: World, most: int = 100, **options: Any) -> list[int]:
    return list(held(claim(world, most, **options)))


@pytest.mark.parametrize("durability", CLASSES)
def test_a_delayed_job_is_not_delivered_before_its_time(world, durability):
    make(world, 1, durability=durability)
    put(world, 10)
    put(world)
    assert taken(world) == [1, 3]
    assert stats(world) == (0, 2, 1)
    world.clock.advance(9.999)
    assert taken(world) == []
    world.clock.advance(0.001)
    assert taken(world) == [2], "at its time the job must be ready"
    assert stats(world) == (0, 3, 0)


def test_a_time_within_a_millisecond_is_never_early(world):
    make(world, 0)
    world.clock.advance(1 - world.clock.now_us() % S / S)
    append(world, "q", [b"x"], not_before=[world.clock.now_us() + 1_500])
    world.clock.advance(0.001_499)
    assert taken(world) == []
    world.clock.advance(0.000_501)
    assert taken(world) == [1]


@pytest.mark.parametrize("how", ["kill", "stop", "power"])
def test_a_delay_survives_a_restart_because_it_is_in_the_record(world, how):
    make(world, 1, durability="fsync")
    put(world, 10)
    put(world, 0.5)
    if how == "power":
        world.power_loss(seed=1)
    else:
        getattr(world, how)()
    world.start()
    assert stats(world) == (1, 0, 2)
    assert taken(world) == [1]
    world.clock.advance(1)
    assert taken(world) == [3]
    world.clock.advance(9)
    assert taken(world) == [2]


def test_times_and_priorities_are_read_from_segments(world):
    """After a restart, only the indexes of the segments contain times and priorities."""
    world = new_world()
    world.put_topic("q", type="queue", durability="fsync", record_priority=True, lease_ms=600_000)
    world.append("q", [b"plain"] * 3)
    put(world, 60, count=2)
    put(world, priority=2, count=2)
    put(world, 90, priority=1)
    checkpoint_all(world)
    put(world, 30, priority=2)
    restart(world)
    assert stats(world) == (5, 0, 4)
    assert taken(world, 3) == [1, 6, 7]
    checkpoint_all(world)
    world.clock.advance(30)
    assert taken(world, 1) == [9]
    world.clock.advance(30)
    assert taken(world) == [2, 3, 4, 5]
    world.clock.advance(30)
    assert taken(world) == [8]
    world.run_of("q").core.check()


def test_a_waiting_claim_is_woken_at_the_instant(world):
    make(world, 0)
    put(world, 5)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "w", 5, wait_ms=20_000)))
    assert 901 not in run.replies
    deadline_ns = run.core.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.clock.monotonic_ns() <= 5_000_000_000
    world.clock.advance(4.999)
    run.step()
    assert 901 not in run.replies
    world.clock.advance(0.001)
    run.step()
    assert list(held(run.replies.pop(901))) == [1]


def test_a_waiting_claim_respects_the_delay_of_jobs_put_later(world):
    make(world, 0)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "w", 5, wait_ms=20_000)))
    put(world, 5)
    assert 901 not in run.replies, "the delay must be known before the delivery"
    world.clock.advance(5)
    run.step()
    assert list(held(run.replies.pop(901))) == [1]


def test_jobs_of_higher_priority_are_delivered_first_if_configured(world):
    make(world, 2, record_priority=True)
    put(world, priority=1)
    put(world, priority=2)
    put(world, priority=9)
    put(world, priority=1)
    assert taken(world, 1) == [4]
    assert taken(world, 1) == [5], "a priority above the maximum is the maximum"
    assert taken(world, 1) == [3]
    assert taken(world, 9) == [1, 2, 6]


def test_without_record_priority_the_priority_is_stored_and_ignored(world):
    """The setting can be changed at any time."""
    make(world, 1)
    put(world, priority=2)
    assert taken(world, 1) == [1]
    world.put_topic("q", type="queue", record_priority=True)
    world.append("q", [b"x"])
    put(world, priority=1)
    assert taken(world, 1) == [2], "the setting must apply at run time"
    assert taken(world, 1) == [4]
    world.put_topic("q", type="queue", record_priority=False)
    put(world, priority=2)
    assert taken(world, 1) == [3]
    assert taken(world, 1) == [5]


def test_a_returned_job_is_delivered_before_new_jobs(world):
    """This holds even if a new job has a higher priority."""
    make(world, 1, record_priority=True)
    jobs = held(claim(world, 1))
    put(world, priority=2)
    nack(world, jobs)
    assert taken(world, 1) == [1]
    assert taken(world, 1) == [2]


def test_a_job_that_waited_too_long_is_promoted(world):
    """The limit is `starvation_ms`."""
    make(world, 1, record_priority=True, starvation_ms=5_000)
    world.clock.advance(3)
    put(world, priority=2)
    assert taken(world, 1) == [2]
    world.clock.advance(2.1)
    put(world, priority=2)
    assert taken(world, 1) == [1]
    assert world.request(m.LeaseStats("q")).promoted == 1
    assert taken(world, 1) == [3]


def test_priorities_never_prevent_an_ack(world):
    make(world, 3, record_priority=True, durability="fsync")
    put(world, priority=2, count=3)
    jobs = held(claim(world, 2))
    assert list(jobs) == [4, 5]
    assert ack(world, jobs).acked == 2
    restart(world)
    assert stats(world) == (4, 0, 0)
    assert taken(world, 2) == [1, 6]


def test_deletes_and_caps_remove_delayed_jobs(world):
    """Delayed jobs count for the cap."""
    make(world, 0, cap_records=4)
    put(world, 10, count=3)
    delete(world, "q", seqs=[2])
    assert stats(world) == (0, 0, 2)
    world.append("q", [b"x"] * 3)
    assert stats(world) == (3, 0, 1)
    world.clock.advance(10)
    assert taken(world) == [3, 4, 5, 6]


def test_queues_without_times_and_priorities_need_no_reads():
    seen: list[Any] = []
    world = started(effect_observer=lambda shard, effect: seen.append(effect))
    make(world, 5)
    taken(world, 2)
    world.request(m.LeaseStats("q"))
    assert not [effect for effect in seen if isinstance(effect, ev.QueryStorage)]


def test_a_queue_with_unreadable_records_delivers_nothing(world, monkeypatch):
    make(world, 1)
    put(world, 10)
    queues = world.run_of("q").core.requests.leases
    learned = queues.removals.query_results.notify
    broken = [True]

    def damage(question, found):
        learned(question, CorruptData("bytes are wrong") if broken[0] else found)

    monkeypatch.setattr(queues.removals, "query_results", SimpleNamespace(notify=damage))
    for _ in range(2):
        with pytest.raises(Internal, match="damaged"):
            claim(world)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "w", 1, wait_ms=1_000)))
    assert run.replies.pop(901).status == Status.INTERNAL
    broken[0] = False
    assert taken(world) == [1]


@pytest.mark.parametrize("ends", [False, True])
def test_a_job_copied_by_a_router_keeps_its_time(ends):
    """One frame contains the copies for two queues, also after a restart."""
    world = Routed(SimulatedDisk(DATA))
    world.start()
    for number, name in enumerate(("q", "r"), 1):
        world.put_topic(name, type="queue", durability="fsync")
        world.route_to(number, name)
    at_us = world.clock.now_us() + 5 * S
    sent = frame(encode_records([b"a", b"b"], not_before=[at_us, None]), topic_id=0)
    rows = [world.row(n, name, 0, 2, frame=0) for n, name in enumerate(("q", "r"), 1)]
    world.answer("q", m.Route(rows, 1, 1), sent)
    if ends:
        restart(world)
    assert taken(world) == [2]
    assert [run[:2] for run in world.request(m.Claim("r", "w", 9)).runs] == [(2, 1)]
    world.clock.advance(5)
    assert taken(world) == [1]


# -- statistics -------------------------------------------------------------------------------------------


def test_statistics_contain_the_age_of_the_oldest_ready_job(world):
    make(world, 0)
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == -1
    world.append("q", [b"a"])
    world.clock.advance(2)
    world.append("q", [b"b"])
    world.clock.advance(3)
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == 5_000
    jobs = held(claim(world, 1))
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == 3_000
    nack(world, jobs)
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == 5_000
    restart(world)
    world.clock.advance(1)
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == 6_000, "the age must be read from storage"
    taken(world)
    assert world.request(m.LeaseStats("q")).oldest_ready_ms == -1


def test_statistics_contain_the_waiting_time_of_jobs(world):
    make(world, 100)
    assert world.request(m.LeaseStats("q")).wait_p99_ms == 0
    taken(world)
    world.append("q", [b"a"])
    world.clock.advance(2)
    taken(world)
    assert world.request(m.LeaseStats("q")).wait_p99_ms <= 1
    world.append("q", [b"a"])
    world.clock.advance(2)
    taken(world)
    assert 2_000 <= world.request(m.LeaseStats("q")).wait_p99_ms <= 2_250
    world.clock.advance(200)
    assert world.request(m.LeaseStats("q")).wait_p99_ms == 0


# -- any history ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_history_delivers_a_job_too_early_or_loses_one(seed):
    rng, world = random.Random(seed), new_world()
    levels = rng.choice([False, True])
    world.put_topic("q", type="queue", durability="fsync", lease_ms=2_000, record_priority=levels)
    live: dict[int, int] = {}
    """Job -> its `not_before` in microseconds."""
    leased: dict[int, int] = {}
    for _ in range(50):
        what = rng.choice(["put", "put", "claim", "claim", "ack", "time", "delete", "end", "checkpoint"])
        if what == "put":
            delay, count = rng.choice([None, 0.2, 1.0, 5.0]), rng.randint(1, 4)
            first = put(world, delay, rng.choice([0, 0, 1, 2]), count)
            at_us = world.clock.now_us() + round((delay or 0) * S)
            live |= dict.fromkeys(range(first, first + count), at_us)
        elif what == "claim":
            found = held(claim(world, rng.randint(1, 5)))
            assert all(live[seq] <= world.clock.now_us() for seq in found)
            leased |= found
        elif what == "ack" and leased:
            chosen = rng.sample(sorted(leased), rng.randint(1, len(leased)))
            jobs = {seq: leased.pop(seq) for seq in chosen}
            reply = ack(world, jobs)
            if not reply.skipped:
                live = {seq: at for seq, at in live.items() if seq not in jobs}
        elif what == "time":
            world.clock.advance(rng.choice([0.1, 1.0, 3.0]))
            there = {seq for seq, _ in world.records("q")}
            live = {seq: at for seq, at in live.items() if seq in there}
        elif what == "delete" and live:
            gone = rng.choice(sorted(live))
            delete(world, "q", seqs=[gone])
            del live[gone]
        elif what == "checkpoint":
            checkpoint_all(world)
        elif what == "end":
            leased.clear()
            rng.choice([world.kill, world.stop, lambda: world.power_loss(seed=seed)])()
            world.start()
        there = {seq for seq, _ in world.records("q")}
        live = {seq: at for seq, at in live.items() if seq in there}
        stats(world)
    ready = [seq for seq, at in live.items() if at <= world.clock.now_us()]
    world.clock.advance(3)
    ready = [seq for seq, at in live.items() if at <= world.clock.now_us()]
    assert sorted(taken(world, 1_000)) == sorted(ready)
    world.clock.advance(10)
    assert set(taken(world, 1_000)) | set(ready) == set(live)
