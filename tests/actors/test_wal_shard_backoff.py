"""Jobs that return to their queue or group wait for its configured backoff."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import QUEUE, STREAM, nack, pending
from tests.support.group_world import claim as claim_of
from tests.support.group_world import make as make_group
from tests.support.lease_words import held, numbers, words
from tests.support.queue_world import claim, make, stats
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world, restart


def back(world: World, jobs: dict[int, int], **more: Any) -> None:
    reply = world.request(m.Nack("q", "w", words(list(jobs)), words(list(jobs.values())), **more))
    assert reply.nacked == len(jobs)


def pass_ms(world: World, ms: int) -> None:
    world.clock.advance(ms / 1_000)


@pytest.mark.parametrize("leases_durable", [False, True])
def test_the_backoff_grows_with_each_delivery_and_starts_when_the_lease_ends(world, leases_durable):
    """The backoff applies after an expired lease and after a nack with `has_backoff`. Other nacks use their
    own delay. Jobs of a dead worker return at once."""
    options = {"backoff_ms": 1_000, "backoff_max_ms": 1_500, "leases_durable": leases_durable}
    make(world, 4, durability="fsync", **options)
    jobs = held(claim(world, 9, lease_ms=500))
    back(world, {1: jobs[1]}, delay_ms=100, has_backoff=True)
    back(world, {2: jobs[2]}, delay_ms=100)
    pass_ms(world, 100)
    assert list(held(claim(world, 9))) == [2]
    pass_ms(world, 400)
    assert stats(world) == (0, 3, 1), "at its deadline a lease must still be valid"
    pass_ms(world, 1)
    assert stats(world) == (0, 1, 3)
    if leases_durable:
        restart(world)
        assert stats(world) == (0, 1, 3)
    pass_ms(world, 499)
    assert list(held(claim(world, 9))) == [1]
    pass_ms(world, 499)
    assert claim(world, 9).runs == []
    pass_ms(world, 1)
    again = held(claim(world, 9))
    assert list(again) == [3, 4]
    back(world, again, has_backoff=True)
    pass_ms(world, 1_499)
    assert claim(world, 9).runs == [], "the backoff must double up to its maximum"
    pass_ms(world, 1)
    assert list(held(claim(world, 9, pid=7, pid_started=70))) == [3, 4]
    world.run_of("q").step(ev.WorkerDied(7, 70))
    assert list(held(claim(world, 9))) == [3, 4]


@pytest.mark.parametrize("leases_durable", [False, True])
def test_one_nack_gives_each_job_the_backoff_of_its_own_number_of_deliveries(world, leases_durable):
    """A retry of the request has the same reply and changes nothing."""
    make(world, 1, durability="fsync", backoff_ms=100, leases_durable=leases_durable)
    for _ in range(3):
        back(world, held(claim(world, 9)), delay_ms=0)
    world.append("q", [b"another"])
    jobs = held(claim(world, 9))
    nack = m.Nack("q", "w", words([*jobs, 77]), words([*jobs.values(), 5]), call=9, has_backoff=True)
    first = world.request(nack)
    assert (list(jobs), first.nacked, first.skipped) == ([1, 2], 2, words([77]))
    assert world.request(nack) == first
    if leases_durable:
        restart(world)
        again = world.request(nack)
        assert again.skipped == words([77])
    pass_ms(world, 99)
    assert claim(world, 9).runs == []
    pass_ms(world, 1)
    assert list(held(claim(world, 9))) == [2], "the job with one delivery must be ready first"
    pass_ms(world, 699)
    assert claim(world, 9).runs == []
    pass_ms(world, 1)
    assert list(held(claim(world, 9))) == [1], "the job with four deliveries must be ready later"


def test_a_changed_backoff_applies_to_leases_that_end_later(world):
    make(world, 2, backoff_ms=1_000)
    back(world, {1: held(claim(world, 1))[1]}, has_backoff=True)
    world.put_topic("q", "merge", type="queue", backoff_ms=0)
    back(world, {2: held(claim(world, 1))[2]}, has_backoff=True)
    assert stats(world) == (1, 0, 1)
    world.put_topic("q", "merge", type="queue", backoff_ms=1_000)
    claim(world, 1, lease_ms=100)
    pass_ms(world, 101)
    assert stats(world) == (0, 0, 2)


def test_a_waiting_claim_receives_a_job_when_its_backoff_ends(world):
    """The claim arrives before the job's lease expires."""
    make(world, 1, backoff_ms=1_000)
    claim(world, 1, lease_ms=100)
    run = world.run_of("q")
    run.step(run.request(901, m.Claim("q", "x", 1, 60_000, wait_ms=20_000)))
    pass_ms(world, 1_099)
    run.step()
    assert 901 not in run.replies
    pass_ms(world, 1)
    run.step()
    assert [row[0] for row in run.replies[901].runs] == [1]


# -- named groups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "checkpoint"])
def test_records_of_a_group_wait_for_its_backoff_also_after_a_kill(how):
    world = new_world()
    info = make_group(world, 4, backoff_ms=1_000, backoff_max_ms=1_500)
    assert (info.backoff_ms, info.backoff_max_ms) == (1_000, 1_500)
    jobs = held(claim_of(world, 9, lease_ms=500))
    nack(world, {1: jobs[1]}, delay_ms=100, has_backoff=True)
    nack(world, {2: jobs[2]}, delay_ms=100)
    pass_ms(world, 100)
    assert list(held(claim_of(world, 9, lease_ms=60_000))) == [2]
    pass_ms(world, 401)
    assert {seq: state for seq, (state, _, _) in pending(world).items()} == {1: 2, 2: 1, 3: 2, 4: 2}
    if how == "checkpoint":
        checkpoint_all(world)
    restart(world)
    assert world.request(m.GroupOpen("t", "g", QUEUE)).backoff_ms == 1_000
    pass_ms(world, 499)
    assert list(held(claim_of(world, 9, lease_ms=60_000))) == [1]
    pass_ms(world, 499)
    assert not claim_of(world, 9).runs
    pass_ms(world, 1)
    again = held(claim_of(world, 9, lease_ms=60_000))
    assert list(again) == [3, 4]
    reply = nack(world, {**again, 77: 5}, call=9, has_backoff=True)
    assert (reply.nacked, numbers(reply.skipped)) == (2, [77])
    assert nack(world, {**again, 77: 5}, call=9, has_backoff=True) == reply
    pass_ms(world, 1_499)
    assert not claim_of(world, 9).runs, "the backoff must double up to its maximum"
    pass_ms(world, 1)
    assert list(held(claim_of(world, 9))) == [3, 4]


def test_a_group_without_backoff_and_a_member_that_leaves_return_records_at_once():
    world = new_world()
    make_group(world, 2)
    nack(world, held(claim_of(world, 1)), has_backoff=True)
    assert list(held(claim_of(world, 1))) == [1]
    world.request(m.GroupOpen("t", "h", QUEUE, backoff_ms=1_000))
    claim_of(world, 9, "x", "h")
    world.request(m.GroupLeave("t", "h", "x"))
    assert list(held(claim_of(world, 9, group="h"))) == [1, 2]


@pytest.mark.parametrize("asked", [(QUEUE, {"backoff_ms": 1 << 31}), (STREAM, {"backoff_ms": 1})])
def test_an_invalid_backoff_is_refused(asked):
    world = new_world()
    world.put_topic("t")
    with pytest.raises(InvalidRequest, match="backoff_ms"):
        world.request(m.GroupOpen("t", "g", asked[0], **asked[1]))
