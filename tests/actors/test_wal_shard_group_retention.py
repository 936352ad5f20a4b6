"""Retention that waits for the acks of consumer groups (CG5)."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.envelope import messages as m
from tests.support.group_world import QUEUE, STREAM, ack, claim, stand
from tests.support.lease_words import held
from tests.support.removal_world import read, state
from tests.support.shard_world import World


def make(world: World, records: int, **config: Any) -> None:
    world.put_topic("t", durability="fsync", retain_until_acked=True, **config)
    for n in range(records):
        world.append("t", [b"%02d" % n])


def group(world: World, name: str, mode: int = QUEUE) -> None:
    world.request(m.GroupOpen("t", name, mode))


def earliest(world: World) -> int:
    world.run_of("t").core.check()
    return state(world, "t").earliest_seq


def test_without_queue_mode_groups_caps_apply_as_usual(world):
    """A stream-mode group retains no records."""
    make(world, 5, cap_records=3)
    assert earliest(world) == 3
    group(world, "s", STREAM)
    world.append("t", [b"more"])
    assert (earliest(world), state(world, "t").held_by) == (4, "")


def test_caps_wait_for_the_group_with_the_lowest_floor(world):
    make(world, 0, cap_records=3)
    group(world, "fast")
    group(world, "slow")
    for n in range(8):
        world.append("t", [b"%d" % n])
    assert (earliest(world), state(world, "t").held_by) == (1, "fast"), "both are at the beginning"
    ack(world, held(claim(world, 8, group="fast")), group="fast")
    assert (earliest(world), state(world, "t").held_by) == (1, "slow")
    assert stand(world, "slow").is_holding
    assert not stand(world, "fast").is_holding
    jobs = held(claim(world, 4, group="slow"))
    ack(world, {1: jobs[1], 2: jobs[2], 4: jobs[4]}, group="slow")
    assert earliest(world) == 3, "acked records must be removed in order"
    assert read(world, "t")[0] is not None, "the removal must leave a tombstone"
    ack(world, {3: jobs[3]}, group="slow")
    assert earliest(world) == 5
    ack(world, held(claim(world, 9, group="slow")), group="slow")
    assert (earliest(world), state(world, "t").held_by) == (6, "")
    assert state(world, "t").count == 3


def test_the_hard_cap_waits_for_no_group(world):
    make(world, 0, cap_records=2, hard_cap_records=5)
    group(world, "g")
    for n in range(4):
        world.append("t", [b"%d" % n])
    jobs = held(claim(world, 2))
    assert earliest(world) == 1
    for n in range(4):
        world.append("t", [b"%d" % n])
    assert (earliest(world), state(world, "t").count) == (4, 5)
    gap, found = read(world, "t")
    assert (gap.gap_from, gap.gap_to, gap.reason) == (1, 3, "cap")
    assert found == [4, 5, 6, 7, 8]
    assert stand(world).info.pending == 0, "removed records must not be pending"
    assert ack(world, jobs).skipped == b""
    assert list(held(claim(world, 9))) == [4, 5, 6, 7, 8]


def test_caps_in_bytes_wait_as_well(world):
    make(world, 0, cap_bytes=200, hard_cap_bytes=600)
    group(world, "g")
    for _ in range(30):
        world.append("t", [b"x" * 40])
    found = state(world, "t")
    assert 200 < found.bytes <= 600
    ack(world, held(claim(world, 99)))
    assert state(world, "t").bytes <= 200


def test_a_ttl_waits_as_well_and_readers_see_the_waiting_records(world):
    make(world, 3, ttl_ms=1_000)
    group(world, "g")
    world.clock.advance(0.5)
    world.append("t", [b"late"])
    world.clock.advance(0.6)
    assert earliest(world) == 1
    assert world.run_of("t").core.removals.schedule.next_due_us == 0, "the shard spins"
    assert world.request(m.Locate("t", 0)).ttl_us == 0
    jobs = held(claim(world, 2))
    assert list(jobs) == [1, 2]
    ack(world, jobs)
    assert earliest(world) == 3
    world.clock.advance(5)
    ack(world, held(claim(world, 9)))
    assert (earliest(world), state(world, "t").count) == (5, 0)


def test_an_expired_record_is_removed_when_its_group_acked_it(world):
    make(world, 2, ttl_ms=1_000)
    group(world, "g")
    jobs = held(claim(world, 1))
    world.clock.advance(0.5)
    assert earliest(world) == 1
    world.tick(0.8)
    assert state(world, "t").held_by == "g"
    ack(world, jobs)
    world.tick()
    assert state(world, "t").count == 1


def test_a_group_that_is_deleted_or_moved_retains_nothing_more(world):
    make(world, 0, cap_records=2)
    group(world, "g")
    group(world, "h")
    for n in range(6):
        world.append("t", [b"%d" % n])
    world.request(m.GroupSeek("t", "g", 99))
    assert (earliest(world), state(world, "t").held_by) == (1, "h")
    world.request(m.GroupDelete("t", "h"))
    assert (earliest(world), state(world, "t").held_by) == (5, "")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_retention_still_waits_after_a_restart(world, how):
    make(world, 0, cap_records=2, ttl_ms=500)
    group(world, "g")
    for n in range(6):
        world.append("t", [b"%d" % n])
    world.kill() if how == "kill" else world.stop()
    world.clock.advance(5)
    world.start()
    assert (earliest(world), state(world, "t").held_by) == (1, "g")
    world.put_topic("t", durability="fsync", cap_records=2)
    assert earliest(world) > 4, "the option was taken back"
