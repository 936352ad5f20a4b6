"""Any history of a queue with durable leases.

The histories include kills, power losses, checkpoints, switches of the setting, and other shard counts.
Holders keep their jobs, and counts and delays continue.
"""

from __future__ import annotations

import random

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.envelope import messages as m
from ringlog.leases.change import Op
from tests.support.checkpoint_world import checkpoint_all
from tests.support.lease_words import held
from tests.support.queue_world import claim, make_durable, settle, stats
from tests.support.removal_world import delete
from tests.support.shard_world import World
from tests.support.shard_worlds import end_somehow, forget_changes, new_world

STEPS = 60
STEPS_OF = [
    "append", "claim", "claim", "claim", "ack", "ack", "nack", "extend", "dies", "time", "delete", "switch",
    "checkpoint", "end", "end", "end",
]  # fmt: skip


class History:
    """One queue, and the model of its expected state."""

    def __init__(self, seed: int, durability: str) -> None:
        self.rng, self.durability = random.Random(seed), durability
        self.world: World = new_world(seed % 3 + 1)
        make_durable(self.world, 3, durability=durability)
        self.is_on = True
        self.live = {1, 2, 3}
        self.leases: dict[int, tuple[str, int, int]] = {}
        """Number -> node, token, deadline, as the nodes know them."""
        self.rests: dict[int, int] = {}
        self.deliveries: dict[int, int] = {}
        self.tokens: set[int] = set()

    @property
    def now_ms(self) -> int:
        return self.world.clock.now_us() // 1_000

    def expire(self) -> None:
        now_ms = self.now_ms
        self.leases = {s: each for s, each in self.leases.items() if each[2] >= now_ms and s in self.live}
        self.rests = {s: at for s, at in self.rests.items() if at > now_ms and s in self.live}

    def step(self, call: int) -> None:
        what, node = self.rng.choice(STEPS_OF), self.rng.choice("ab")
        self.expire()
        mine = {seq: lease[1] for seq, lease in self.leases.items() if lease[0] == node}
        chosen = {seq: mine[seq] for seq in self.rng.sample(sorted(mine), min(len(mine), 3))}
        getattr(self, what)(call, node, chosen)
        self.expire()
        found = stats(self.world)
        assert found[1:] == (len(self.leases), len(self.rests))
        assert sum(found) == len(self.live)

    def append(self, call, node, chosen) -> None:
        first = self.world.append("q", [b"x"] * self.rng.randint(1, 5))
        self.live |= set(range(first, self.world.topic("q").head_seq + 1))

    def claim(self, call, node, chosen) -> None:
        most = self.rng.randint(1, 4)
        reply = claim(self.world, most, node, lease_ms=2_000, call=call, pid=ord(node), pid_started=7)
        for first, count, deliveries, token in reply.runs:
            for n in range(count):
                assert first + n in self.live
                assert first + n not in {*self.leases, *self.rests}
                assert token + n not in self.tokens, "a lease token was issued twice (Q3)"
                self.tokens.add(token + n)
                before = self.deliveries.get(first + n, 0)
                assert deliveries == before + 1 or before < 0, "wrong number of deliveries"
                self.deliveries[first + n] = deliveries
                self.leases[first + n] = node, token + n, reply.deadline
        if reply.runs and self.is_on and self.rng.random() < 0.3:
            # The reply was lost with the shard.
            self.end(call, node, chosen, has_power=True)
            again = claim(self.world, most, node, lease_ms=2_000, call=call, pid=ord(node), pid_started=7)
            assert again.runs == reply.runs

    def ack(self, call, node, chosen) -> None:
        if not chosen:
            return
        reply = settle(self.world, m.Ack, chosen, node, in_time=True, call=call)
        assert reply.skipped == b"", "its lease had not ended"
        self.live -= set(chosen)
        if self.rng.random() < 0.4:
            self.end(call, node, chosen, has_power=True)
            assert settle(self.world, m.Ack, chosen, node, in_time=True, call=call).skipped == b""

    def nack(self, call, node, chosen) -> None:
        delay_ms = self.rng.choice([0, 500])
        assert settle(self.world, m.Nack, chosen, node, delay_ms=delay_ms, call=call).skipped == b""
        self.leases = {seq: lease for seq, lease in self.leases.items() if seq not in chosen}
        if delay_ms:
            self.rests |= dict.fromkeys(chosen, self.now_ms + delay_ms)

    def extend(self, call, node, chosen) -> None:
        lease_ms = self.rng.choice([300, 4_000])
        reply = settle(self.world, m.Extend, chosen, node, lease_ms=lease_ms, call=call)
        assert reply.skipped == b""
        self.leases |= {seq: (node, token, self.now_ms + lease_ms) for seq, token in chosen.items()}

    def dies(self, call, node, chosen) -> None:
        if self.rng.random() < 0.5:
            self.world.run_of("q").step(ev.WorkerDied(ord(node), 7))
            self.leases = {seq: lease for seq, lease in self.leases.items() if lease[0] != node}

    def time(self, call, node, chosen) -> None:
        self.world.clock.advance(self.rng.choice([0.1, 0.5, 1.0, 3.0]))

    def delete(self, call, node, chosen) -> None:
        if self.live and self.rng.random() < 0.3:
            gone = self.rng.choice(sorted(self.live))
            delete(self.world, "q", seqs=[gone])
            self.live.discard(gone)

    def switch(self, call, node, chosen) -> None:
        if self.rng.random() < 0.5:
            self.is_on = not self.is_on
            make_durable(self.world, 0, durability=self.durability, leases_durable=self.is_on)

    def checkpoint(self, call, node, chosen) -> None:
        checkpoint_all(self.world)

    def end(self, call, node, chosen, *, has_power: bool | None = None) -> None:
        """Kill, stop orderly, or lose power. Then start, possibly with another number of shards."""
        rng, world = self.rng, self.world
        if has_power is None:
            has_power = rng.random() < 0.6
        end_somehow(world, rng, has_power=has_power, shards=[0, 0, 1, 2, 3])
        if self.is_on and (has_power or self.durability == "fsync"):
            return
        self.leases, self.rests = {}, {}
        if self.is_on:
            # Changes that were not synced may be lost. The model restarts from the records when all leases
            # have ended.
            world.clock.advance(10.0)
            self.live = {seq for seq, _ in world.records("q")}
            self.deliveries = dict.fromkeys(self.live, -1)
        else:
            if not has_power:
                self.live = {seq for seq, _ in world.records("q")}
            self.deliveries = {}


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["fsync", "disk"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_held_stays_so_and_everything_else_is_given_out(seed: int, durability: str) -> None:
    """A queue with durable leases equals its logged changes (Q6)."""
    history = History(seed, durability)
    for call in range(1, STEPS + 1):
        history.step(call)
    history.world.clock.advance(10)
    assert sorted(held(claim(history.world, 1_000, "c"))) == sorted(history.live)


def test_a_release_that_is_not_replayed_is_caught(monkeypatch) -> None:
    """The histories detect a replay that ignores released leases."""
    forget_changes(monkeypatch, Op.RELEASED)
    with pytest.raises(AssertionError):
        run_all()


def run_all() -> None:
    for seed in range(12):
        test_what_is_held_stays_so_and_everything_else_is_given_out(seed, "fsync")
