"""Members of groups whose process dies on the shard's host: what they hold is ready at once (CL-10)."""

from __future__ import annotations

import pytest
from checkpoint_world import checkpoint_all, new_world
from group_world import ack, claim, held, make, pending, words
from removal_world import started

from actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from ringlog.testing.shard_world import World

LEASED, RETURNED = 1, 3
US = {"pid": 7, "born": 70}
THEM = {"pid": 8, "born": 80}


@pytest.fixture
def world() -> World:
    return started()


def dies(world: World, *, pid: int, born: int) -> None:
    run = world.run_of("t")
    run.step(ev.WorkerDied(pid, born))
    run.step()


def states(world: World) -> dict[int, int]:
    return {seq: state for seq, (state, _, _) in pending(world).items()}


def test_what_a_dead_member_holds_is_ready_for_others(world):
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
    assert 902 not in run.replies, "its claim is given nothing"
    assert ack(world, held(mine), "w").acked == 0
    assert ack(world, held(others), "x").acked == 2
    dies(world, **US)
    assert set(pending(world)) == {1, 2, 5, 6}


def test_a_release_is_in_the_log_before_it_counts(world):
    """Groups outlive their shard, and so does what became of a death."""
    make(world, 3)
    claim(world, 3, "w", **US)
    dies(world, **US)
    assert states(world) == dict.fromkeys((1, 2, 3), RETURNED)
    world.kill()
    world.start()
    assert states(world) == dict.fromkeys((1, 2, 3), RETURNED)


def test_a_stolen_lease_is_its_thiefs(world):
    make(world, 2)
    claim(world, 2, "w", **US)
    world.request(m.Steal("t", "x", words([2]), group="g", **THEM))
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}
    dies(world, **THEM)
    assert states(world) == {1: RETURNED, 2: RETURNED}


@pytest.mark.parametrize("other", [THEM, {}], ids=["another process", "one elsewhere"])
def test_of_a_name_that_several_share_only_the_leases_of_the_dead_one_end(world, other):
    make(world, 2)
    claim(world, 1, "w", **US)
    claim(world, 1, "w", **other)
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}
    dies(world, **THEM)
    assert states(world) == {1: RETURNED, 2: RETURNED if other else LEASED}


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_the_process_behind_a_lease_is_known_after_a_restart(has_snapshot):
    world = new_world()
    make(world, 2)
    claim(world, 1, "w", **US)
    if has_snapshot:
        checkpoint_all(world)
    claim(world, 1, "x", **THEM)
    world.kill()
    world.start()
    assert world.run_of("t").core.requests.process_ids() == {(7, 70), (8, 80)}
    dies(world, **US)
    assert states(world) == {1: RETURNED, 2: LEASED}


def test_a_name_that_was_used_up_is_its_next_users(world):
    make(world, 2)
    ack(world, held(claim(world, 1, "w", **US)), "w")
    claim(world, 1, "w", **THEM)
    dies(world, **US)
    assert states(world) == {2: LEASED}
    dies(world, **THEM)
    assert states(world) == {2: RETURNED}


def test_a_death_of_somebody_whose_group_went_is_nobodys(world):
    make(world, 2)
    claim(world, 1, "w", **US)
    world.request(m.GroupDelete("t", "g"))
    dies(world, **US)
    assert make(world).cursor == 1
