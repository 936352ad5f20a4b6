"""Any history of a queue, including kills and power losses: every job exists or was acked."""

from __future__ import annotations

import random

import pytest

from ringlog.leases.tokens import incarnation_of
from tests.support.lease_words import held, numbers
from tests.support.queue_world import ack, claim, nack, stats
from tests.support.removal_world import delete
from tests.support.shard_worlds import end_somehow, started

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("seed", range(12))
def test_every_job_exists_or_was_acked(seed: int, durability: str) -> None:
    """With class `disk`, acked jobs may return after a power loss, and only then."""
    rng, world = random.Random(seed), started()
    world.put_topic("q", type="queue", durability=durability, lease_ms=2_000)
    live: set[int] = set()
    leased: dict[int, tuple[int, int]] = {}
    """Job -> token and deadline, as its worker knows them."""
    given: set[int] = set()
    calls = 0
    for _ in range(STEPS):
        what = rng.choice(["put", "claim", "claim", "ack", "ack", "nack", "time", "delete", "end"])
        if what == "put":
            first = world.append("q", [b"x"] * rng.randint(1, 5))
            live |= set(range(first, world.topic("q").head_seq + 1))
        elif what == "claim":
            claimed = claim(world, rng.randint(1, 4))
            for seq, token in held(claimed).items():
                assert seq in live
                assert token not in given
                given.add(token)
                leased[seq] = token, claimed.deadline
        elif what in {"ack", "nack"} and leased:
            chosen = rng.sample(sorted(leased), rng.randint(1, len(leased)))
            jobs = {seq: leased.pop(seq)[0] for seq in chosen}
            calls += 1
            if what == "nack":
                nack(world, jobs, delay_ms=rng.choice([0, 500]))
                continue
            message = {"in_time": True, "call": calls}
            if rng.random() < 0.3:
                # The ack was applied and its reply was lost with the shard, so it is sent again.
                before = ack(world, jobs, **message)
                end_somehow(world, rng, has_power=True)
                leased.clear()
                live -= set(jobs) - set(numbers(before.skipped))
                assert ack(world, jobs, **message).skipped == before.skipped, (
                    "a repeated ack must have the same reply"
                )
                continue
            reply = ack(world, jobs, **message)
            done = set(jobs) - set(numbers(reply.skipped))
            assert not done & there(world)
            live -= done
        elif what == "time":
            world.clock.advance(rng.choice([0.1, 1.0, 3.0]))
            now_ms = world.clock.now_us() // 1_000
            leased = {seq: lease for seq, lease in leased.items() if lease[1] >= now_ms}
        elif what == "delete" and live and rng.random() < 0.3:
            gone = set(rng.sample(sorted(live), 1))
            delete(world, "q", seqs=sorted(gone))
            live -= gone
        elif what == "end":
            has_power = rng.random() < 0.5
            end_somehow(world, rng, has_power=has_power)
            leased.clear()
            if durability == "disk" and not has_power:
                live = there(world)  # Unsynced appends and acks may be lost.
            assert there(world) == live
            assert stats(world) == (len(live), 0, 0)
            now = world.run_of("q").incarnation
            assert all(incarnation_of(token) < now for token in given)
        ready, in_flight, delayed = stats(world)
        assert ready + in_flight + delayed == len(live)
    world.clock.advance(10)
    assert sorted(held(claim(world, 1_000))) == sorted(live)


def there(world) -> set[int]:
    """Return every job that can be read."""
    return {seq for seq, _ in world.records("q")}
