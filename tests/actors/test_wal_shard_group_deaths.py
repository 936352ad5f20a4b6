"""Members of consumer groups that die on the shard's host: their records are ready at once."""

from __future__ import annotations

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import ack, claim, make, pending
from tests.support.lease_words import held, words
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart

LEASED, RETURNED = 1, 3
US = {"pid": 7, "pid_started": 70}
THEM = {"pid": 8, "pid_started": 80}


def dies(world: World, *, pid: int, pid_started: int) -> None:
    run = world.run_of("t")
    run.step(ev.WorkerDied(pid, pid_started))
    run.step()


def states(world: World) -> dict[int, int]:
    return {seq: state for seq, (state, _, _) in pending(world).items()}


def test_records_of_a_dead_member_are_ready_for_others(world):
    make(world, 6)
    mine = claim(world, 2, "w", **US)
    others = claim(world, 2, "x", **THEM)
    run = world.run_of("t")
    run.step(run.request(901, m.Claim("t", "y", 2, wait_ms=20_000, group="g")))
    assert list(held(run.replies.pop(901))) == [5, 6]
    run.step(run.request(902, m.Claim("t", "w", 9, wait_ms=20_000, group="g", **US)))
    run.step(run.request(903, m.Claim("t", "y", 9, wait_ms=20_000, group="g")))
    dies(world, **US)
    again = run.replies.pop(903)
    assert [found[:3] for found in again.runs] == [(1, 2, 2)], "deliveries stay counted"
    assert 902 not in run.replies, "the claim of the dead process must receive nothing"
    assert ack(world, held(mine), "w").acked == 0
    assert ack(world, held(others), "x").acked == 2
    dies(world, **US)
    assert set(pending(world)) == {1, 2, 5, 6}


def test_a_release_is_logged_before_it_takes_effect(world):
    """Groups survive their shard, and so must the effect of a death."""
    make(world, 3)
    claim(world, 3, "w", **US)
    dies(world, **US)
    assert states(world) == dict.fromkeys((1, 2, 3), RETURNED)
    restart(world)
    assert states(world) == dict.fromkeys((1, 2, 3), RETURNED)


def test_a_stolen_lease_belongs_to_the_new_member(world):
    make(world, 2)
    claim(world, 2, "w", **US)
    world.request(m.Steal("t", "x", words([2]), group="g", **THEM))
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}
    dies(world, **THEM)
    assert states(world) == {1: RETURNED, 2: RETURNED}


@pytest.mark.parametrize("other", [THEM, {}], ids=["another process", "one elsewhere"])
def test_if_processes_share_a_name_only_the_leases_of_the_dead_one_end(world, other):
    make(world, 2)
    claim(world, 1, "w", **US)
    claim(world, 1, "w", **other)
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}
    dies(world, **THEM)
    assert states(world) == {1: RETURNED, 2: RETURNED if other else LEASED}


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_the_process_of_a_lease_is_known_after_a_restart(has_snapshot):
    world = new_world()
    make(world, 2)
    claim(world, 1, "w", **US)
    if has_snapshot:
        checkpoint_all(world)
    claim(world, 1, "x", **THEM)
    restart(world)
    assert world.run_of("t").core.requests.process_ids() == {(7, 70), (8, 80)}
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}


def test_a_name_without_leases_belongs_to_its_next_user(world):
    make(world, 2)
    ack(world, held(claim(world, 1, "w", **US)), "w")
    claim(world, 1, "w", **THEM)
    dies(world, **US)
    assert states(world) == {2: LEASED}
    dies(world, **THEM)
    assert states(world) == {2: RETURNED}


def test_a_death_after_the_deletion_of_the_group_has_no_effect(world):
    make(world, 2)
    claim(world, 1, "w", **US)
    world.request(m.GroupDelete("t", "g"))
    dies(world, **US)
    assert make(world).cursor == 1
