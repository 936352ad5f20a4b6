"""Metrics of a shard's consumer groups: sums, the age of the oldest floor, and the engine's status."""

from __future__ import annotations

from typing import Any

import pytest

import ringlog
from ringlog.actors.wal_shard.metrics import group_metrics
from ringlog.actors.wal_shard.metrics.group_metrics import GroupMetrics
from ringlog.envelope import messages as m
from ringlog.limits import GROUP_MEMBER_SILENT_MS
from ringlog.testing.real_engine import engine, wait_until
from tests.support.group_world import STREAM, ack, claim, make
from tests.support.lease_words import held
from tests.support.removal_world import delete
from tests.support.shard_world import World
from tests.support.shard_worlds import restart


def numbers_of(world: World, topic: str = "t") -> GroupMetrics:
    return world.run_of(topic).core.requests.leases.registry.group_metrics


def look(world: World, steady_ms: int = 0) -> tuple[int, int, int, int]:
    """Let the shard sample its groups. Return groups, lag, pending, members."""
    numbers = numbers_of(world)
    numbers.sample(world.clock.now_us() // 1_000, steady_ms)
    return len(numbers), numbers.lag, numbers.pending, numbers.members


def test_sums_follow_the_operations_of_members(world: World) -> None:
    """Lag counts undelivered and pending records. For a stream group it counts uncommitted records."""
    make(world, 6)
    assert look(world) == (1, 6, 0, 0)
    jobs = held(claim(world, 4))
    claim(world, 1, "x")
    assert look(world) == (1, 6, 5, 2)
    ack(world, {1: jobs[1], 3: jobs[3]})
    assert look(world) == (1, 4, 3, 2)
    world.request(m.GroupOpen("t", "s", STREAM))
    assert look(world) == (2, 10, 3, 2)
    taken = world.request(m.GroupTakeOver("t", "s", "r"))
    world.request(m.GroupCommit("t", "s", taken.token, 5, 7))
    assert look(world)[:3] == (2, 5, 3)
    world.request(m.GroupDelete("t", "s"))
    assert look(world)[:3] == (1, 4, 3)
    restart(world)
    assert look(world)[:3] == (1, 4, 3), "a successor must count the existing records"
    world.request(m.TopicDelete("t"))
    assert look(world) == (0, 0, 0, 0)


def test_deleted_records_and_silent_members_are_not_counted(world: World) -> None:
    """A member without requests for `GROUP_MEMBER_SILENT_MS` is silent."""
    make(world, 6)
    ack(world, held(claim(world, 1)))
    world.clock.advance(GROUP_MEMBER_SILENT_MS // 1_000 + 1)
    delete(world, "t", before=4)
    assert look(world) == (1, 3, 0, 0)


def test_the_age_of_a_floor_grows_while_work_remains_and_the_floor_does_not_move(world: World) -> None:
    make(world, 3)
    numbers = numbers_of(world)

    def age(steady_ms: int) -> int:
        look(world, steady_ms)
        return numbers.floor_age_ms

    assert age(1_000) == 0
    jobs = held(claim(world, 3))
    ack(world, {2: jobs[2]})
    assert age(5_000) == 4_000, "an ack above the floor must not move it"
    ack(world, {1: jobs[1]})
    age(6_000)
    assert age(6_500) == 500
    ack(world, {3: jobs[3]})
    age(60_000)
    assert age(61_000) == 0, "no work remains"


def test_a_bounded_number_of_groups_is_sampled_at_once_and_the_oldest_floor_is_kept_for_a_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_metrics, "GROUPS_SAMPLED_MAX", 2)
    make(world, 4)
    for name in "abcd":
        world.request(m.GroupOpen("t", name, STREAM))
    assert [look(world, 0)[1] for _ in range(4)] == [8, 16, 20, 20]
    taken = world.request(m.GroupTakeOver("t", "a", "r"))
    for turn in range(1, 9):
        world.request(m.GroupCommit("t", "a", taken.token, min(turn, 3), 5))
        look(world, 100 * turn)
    assert 500 <= numbers_of(world).floor_age_ms <= 800


def test_forgetting_an_unknown_group_has_no_effect() -> None:
    numbers = GroupMetrics()
    numbers.forget(7)
    numbers.sample(0, 0)
    assert (len(numbers), numbers.floor_age_ms) == (0, 0)


@pytest.mark.slow
def test_the_status_contains_the_metrics_of_groups() -> None:
    with engine(wal={"shards": 2}) as running, ringlog.connect(running.url, wait=10) as client:
        for name in ("a", "b", "c"):
            client.append_many(name, [b"record"] * 5)
            group = client.group(name, "g", mode="queue", node=name)
            group.ack(group.claim(3, lease_ms=60_000)[1:2])

        def shown() -> dict[str, Any]:
            found = running.status().groups
            return {} if found is None else {word: getattr(found, word) for word in found.__struct_fields__}

        def is_right() -> bool:
            found = shown()
            age_s = found.pop("floor_age_s", 0)
            return found == {"groups": 3, "lag": 12, "pending": 6, "members": 3} and age_s > 0

        wait_until(is_right, 20, "the status to contain the metrics", lambda: str(shown()))
