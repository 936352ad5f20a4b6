"""Any history of a consumer group.

The histories include kills, power losses, checkpoints and other shard counts. Acked records are not delivered
again, and all other records are.
"""

from __future__ import annotations

import random

import pytest

from ringlog.envelope import messages as m
from tests.support.checkpoint_world import checkpoint_all
from tests.support.group_world import ack, claim, give_again, make, nack, pending, stand
from tests.support.lease_words import held, numbers
from tests.support.removal_world import delete
from tests.support.shard_worlds import end_somehow, forget_changes, new_world

SHARDS = (0, 0, 1, 2, 3)
"""0 changes nothing."""
STEPS = 60
STEPS_OF = [
    "append", "claim", "claim", "claim", "ack", "ack", "nack", "steal", "leave", "time", "delete", "seek",
    "again", "checkpoint", "end", "end",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_acked_stays_so_and_everything_else_is_given_out(seed: int, durability: str) -> None:
    """A group equals its logged changes (CG2). In class `disk` a power loss may undo the last ones."""
    rng, world = random.Random(seed), new_world(rng_shards(seed))
    make(world, 3, durability=durability)
    live, done = {1, 2, 3}, set[int]()
    leases: dict[int, tuple[str, int, int]] = {}
    """Position -> member, token, deadline, as the members know them."""
    tokens: set[int] = set()

    def given(node: str, reply: m.ClaimReply) -> None:
        for seq, token in held(reply).items():
            assert seq in live - done
            assert token not in tokens
            tokens.add(token)
            leases[seq] = node, token, reply.deadline

    for calls in range(1, STEPS + 1):
        what, node = rng.choice(STEPS_OF), rng.choice("ab")
        mine = {seq: lease[1] for seq, lease in leases.items() if lease[0] == node}
        chosen = {seq: mine[seq] for seq in rng.sample(sorted(mine), min(len(mine), rng.randint(1, 4)))}
        if what == "append":
            first = world.append("t", [b"x"] * rng.randint(1, 5))
            live |= set(range(first, world.topic("t").head_seq + 1))
        elif what == "claim":
            given(node, claim(world, rng.randint(1, 4), node, lease_ms=2_000, call=calls))
        elif what == "ack" and chosen:
            reply = ack(world, chosen, node, call=calls)
            if rng.random() < 0.4:
                # The reply was lost with the shard, so the ack is sent again.
                end_somehow(world, rng, has_power=True, shards=SHARDS)
                again = ack(world, chosen, node, call=calls)
                assert (again.acked, again.skipped) == (reply.acked, reply.skipped)
            assert reply.skipped == b"", "its lease had not ended"
            done |= set(chosen)
            leases = {seq: lease for seq, lease in leases.items() if seq not in chosen}
        elif what == "nack" and chosen:
            assert nack(world, chosen, node, delay_ms=rng.choice([0, 500]), call=calls).skipped == b""
            leases = {seq: lease for seq, lease in leases.items() if seq not in chosen}
        elif what == "steal" and leases:
            wanted = rng.sample(sorted(leases), 1)
            reply = world.request(m.Steal("t", node, words_of(wanted), 2_000, call=calls, group="g"))
            assert sorted(held(reply)) == wanted
            given(node, reply)
        elif what == "leave":
            assert world.request(m.GroupLeave("t", "g", node)).released == len(mine)
            leases = {seq: lease for seq, lease in leases.items() if lease[0] != node}
        elif what == "time":
            world.clock.advance(rng.choice([0.1, 1.0, 3.0]))
        elif what == "delete" and live and rng.random() < 0.3:
            gone = set(rng.sample(sorted(live), 1))
            delete(world, "t", seqs=sorted(gone))
            live -= gone
        elif what == "seek" and rng.random() < 0.3:
            cursor = world.request(m.GroupSeek("t", "g", rng.randint(1, max(live, default=1)))).cursor
            done, leases = {seq for seq in live if seq < cursor}, {}
        elif what == "again" and live:
            chosen_seq = rng.choice(sorted(live))
            assert give_again(world, {chosen_seq: calls}) == (0, [])
            assert give_again(world, {chosen_seq: calls}) == (1, []), "the letter was redelivered before"
            done.discard(chosen_seq)
        elif what == "checkpoint":
            checkpoint_all(world)
        elif what == "end":
            has_power = durability == "fsync" or rng.random() < 0.6
            before = pending(world), stand(world).info
            end_somehow(world, rng, has_power=has_power, shards=SHARDS)
            if not has_power:
                # Changes that were not synced may be lost. Members and model restart from the records.
                live = {seq for seq, _ in world.records("t")}
                world.request(m.GroupSeek("t", "g", 1))
                done, leases = set(), {}
            else:
                assert (pending(world), stand(world).info) == before
        now_ms = world.clock.now_us() // 1_000
        leases = {s: lease for s, lease in leases.items() if lease[2] >= now_ms and s in live}
        found = stand(world)
        assert found.in_flight == len(leases)
        assert found.in_flight + found.delayed + found.returned + found.undelivered == len(live - done)
    world.clock.advance(10)
    world.request(m.GroupLeave("t", "g", "a"))
    assert sorted(held(claim(world, 1_000, "c"))) == sorted(live - done)


def rng_shards(seed: int) -> int:
    return seed % 3 + 1


def words_of(seqs: list[int]) -> bytes:
    return b"".join(seq.to_bytes(8, "little") for seq in seqs)


@pytest.mark.interpreted
def test_a_change_that_is_not_replayed_is_caught(monkeypatch) -> None:
    """The histories detect a replay that ignores acks."""
    forget_changes(monkeypatch, 3)
    with pytest.raises(AssertionError):
        run_all()


def run_all() -> None:
    for seed in range(12):
        test_what_is_acked_stays_so_and_everything_else_is_given_out(seed, "fsync")


def test_seqs_of_a_reply_are_decoded() -> None:
    assert numbers(words_of([5, 7])) == [5, 7]
