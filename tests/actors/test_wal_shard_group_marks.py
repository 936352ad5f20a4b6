"""Consumer groups deliver records by their `not_before` and priority, over kills, segments and snapshots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Internal, Status
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import STREAM, ack, claim, give_again, nack
from tests.support.lease_words import held
from tests.support.removal_world import append, delete, state
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world

CLASSES = ("fsync", "disk", "memory", "ephemeral")
S = 1_000_000


def make(world: World, durability: str = "fsync", mode: int = 1, **settings: Any) -> None:
    world.put_topic("t", durability=durability, lease_ms=600_000, **settings)
    world.request(m.GroupOpen("t", "g", mode))


def write(world: World, delay_s: float | None = None, priority: int = 0, count: int = 1) -> int:
    """Append records with a delay and a priority. Return the first seq."""
    at_us = None if delay_s is None else world.clock.now_us() + round(delay_s * S)
    return append(
        world, "t", [b"record"] * count, not_before=None if at_us is None else [at_us] * count,
        priorities=[priority] * count if priority else None,
    )  # fmt: skip


def given(world: World, most: int = 100, **options: Any) -> list[int]:
    return list(held(claim(world, most, **options)))


def counts(world: World, group: str = "g") -> tuple[int, int, int, int]:
    """Return (ready, leased, delayed, undelivered)."""
    found = world.request(m.LeaseStats("t", group=group))
    world.run_of("t").core.check()
    return found.ready, found.in_flight, found.delayed, found.undelivered


@pytest.mark.parametrize("durability", CLASSES)
def test_a_record_is_not_delivered_before_its_time(world, durability):
    make(world, durability)
    write(world)
    write(world, 10)
    write(world)
    assert given(world) == [1, 3]
    assert counts(world) == (0, 2, 1, 1)
    world.clock.advance(9.999)
    assert given(world) == []
    world.clock.advance(0.001)
    assert given(world) == [2], "at its time the record must be ready"
    assert counts(world) == (0, 3, 0, 0)


def test_urgent_records_are_delivered_first_if_configured_and_by_seq_if_the_claim_requests_it(world):
    make(world, record_priority=True)
    write(world, count=2)
    write(world, priority=1)
    write(world, priority=2)
    assert given(world, 1) == [4]
    assert world.request(m.LeaseStats("t", group="g")).info.cursor == 1
    assert given(world, 1, by_number=True) == [1]
    assert world.request(m.LeaseStats("t", group="g")).info.cursor == 2
    assert given(world, 1) == [3]
    assert given(world) == [2]


def test_each_group_has_its_own_order(world):
    make(world, record_priority=True)
    world.request(m.GroupOpen("t", "other", 1))
    write(world, count=3)
    write(world, priority=2)
    assert given(world, 1) == [4]
    assert given(world, 2, group="other", by_number=True) == [1, 2]
    assert given(world, 2, group="other") == [3, 4]
    assert given(world) == [1, 2, 3]


def test_a_changed_setting_applies_to_later_claims(world):
    make(world)
    write(world, count=2)
    write(world, priority=2, count=2)
    write(world, 60)
    assert given(world, 1) == [1]
    world.put_topic("t", durability="fsync", lease_ms=600_000, record_priority=True)
    assert given(world, 1) == [3]
    world.put_topic("t", durability="fsync", lease_ms=600_000)
    assert given(world) == [2, 4]
    world.clock.advance(60)
    assert given(world) == [5]


def test_a_stream_group_ignores_times_and_priorities(world):
    make(world, mode=STREAM, record_priority=True)
    write(world, 60)
    write(world, priority=2)
    assert counts(world) == (2, 0, 0, 2)


@pytest.mark.parametrize("saved", [False, True], ids=["log", "snapshot"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_records_acked_out_of_turn_are_not_delivered_again(how, saved):
    """Their seqs are greater than those of records that were never delivered."""
    world = new_world()
    make(world, record_priority=True)
    write(world, 60)
    write(world, count=2)
    write(world, priority=2, count=3)
    jobs = held(claim(world, 2))
    assert list(jobs) == [4, 5]
    ack(world, {4: jobs[4]})
    if saved:
        checkpoint_all(world)
    assert given(world, 1, node="v") == [6]
    getattr(world, how)()
    world.start()
    assert counts(world) == (2, 2, 1, 3)
    nack(world, {5: jobs[5]})
    assert given(world) == [2, 3, 5]
    assert given(world) == []
    world.clock.advance(60)
    assert given(world) == [1]
    assert counts(world)[2:] == (0, 0)


def test_a_delayed_record_is_kept_for_the_group(world):
    """The record is not acked, so `retain_until_acked` keeps it and all later records."""
    make(world, retain_until_acked=True, cap_records=2)
    write(world, 60)
    write(world, count=4)
    ack(world, held(claim(world, 100)))
    assert state(world, "t").earliest_seq == 1
    world.clock.advance(60)
    jobs = held(claim(world, 100))
    assert list(jobs) == [1]
    ack(world, jobs)
    assert state(world, "t").earliest_seq == 4


def test_a_seek_back_applies_times_and_priorities_again(world):
    make(world, record_priority=True)
    write(world, count=2)
    write(world, priority=2, count=2)
    write(world, 60)
    ack(world, held(claim(world, 2)))
    world.request(m.GroupSeek("t", "g", 1))
    assert counts(world) == (4, 0, 1, 5)
    assert given(world, 1) == [3], "acked records must be delivered again in the same order"
    world.request(m.GroupSeek("t", "g", 4))
    assert given(world) == [4]
    world.clock.advance(60)
    assert given(world) == [5]


def test_a_redrive_distinguishes_acked_records_from_undelivered_ones(world):
    make(world, record_priority=True)
    write(world, count=2)
    write(world, priority=2)
    jobs = held(claim(world))
    ack(world, jobs)
    assert give_again(world, {2: 7, 3: 8}) == (0, [])
    assert given(world) == [1, 2, 3]
    world.run_of("t").core.check()


def test_deleted_records_are_not_counted(world):
    make(world, record_priority=True)
    write(world, count=3)
    write(world, priority=2, count=2)
    write(world, 60)
    assert given(world, 2) == [4, 5]
    delete(world, "t", seqs=[2, 4, 6])
    assert counts(world) == (2, 1, 0, 2)
    assert given(world) == [1, 3]


def test_a_waiting_claim_is_woken_at_the_instant(world):
    make(world)
    write(world, 5)
    run = world.run_of("t")
    run.step(run.request(901, m.Claim("t", "w", 5, wait_ms=20_000, group="g")))
    assert 901 not in run.replies
    deadline_ns = run.core.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.clock.monotonic_ns() <= 5_000_000_000
    world.clock.advance(5)
    run.step()
    assert list(held(run.replies.pop(901))) == [1]


def test_a_waiting_claim_respects_the_delay_of_records_appended_later(world):
    make(world)
    run = world.run_of("t")
    run.step(run.request(901, m.Claim("t", "w", 5, wait_ms=20_000, group="g")))
    write(world, 5)
    assert 901 not in run.replies, "the delay must be known before the delivery"
    world.clock.advance(5)
    run.step()
    assert list(held(run.replies.pop(901))) == [1]


def test_a_group_with_unreadable_records_fails_and_another_group_continues(world, monkeypatch):
    make(world)
    world.request(m.GroupOpen("t", "other", 1))
    write(world)
    write(world, 10)
    leases = world.run_of("t").core.requests.leases
    learned = leases.removals.query_results.notify
    broken = [leases.registry.find(m.Claim("t", "w", 1, group="g"))]

    def damage(question, found):
        is_broken = bool(broken) and question.record_query.key == broken[0][1].number
        learned(question, CorruptData("bytes are wrong") if is_broken else found)

    monkeypatch.setattr(leases.removals, "query_results", SimpleNamespace(notify=damage))
    for _ in range(2):
        with pytest.raises(Internal, match="damaged"):
            claim(world)
    assert given(world, group="other") == [1]
    run = world.run_of("t")
    run.step(run.request(901, m.Claim("t", "w", 1, wait_ms=1_000, group="g")))
    assert run.replies.pop(901).status == Status.INTERNAL
    broken.clear()
    assert given(world) == [1]
