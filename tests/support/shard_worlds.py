"""Worlds with started shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from ringlog.actors.wal_shard.recovery import replay
from ringlog.testing.disk import SimulatedDisk
from tests.support.shard_world import DATA, World


def started(topics: Mapping[str, str] | None = None, *, disk: Any = None, **facts: Any) -> World:
    """Return a started world with these topics, given as name -> durability."""
    world = World(disk or SimulatedDisk(DATA), **facts)
    world.start()
    for name, durability in (topics or {}).items():
        world.put_topic(name, durability=durability)
    return world


def new_world(shards: int = 1, disk: Any = None) -> World:
    """Return a started world whose shards can be checkpointed, with log files of 1 MiB."""
    disk = disk or SimulatedDisk(DATA)
    disk.make_dir(f"{DATA}/meta")  # as the supervisor does
    disk.sync_dir(DATA)
    made = World(disk, shards=shards, file_bytes=1 << 20)
    made.start()
    return made


def restart(world: World, how: str = "kill") -> None:
    """End the shards by `kill`, `stop` or a `power` loss, and start them again."""
    if how == "power":
        world.power_loss(seed=3)
    else:
        (world.kill if how == "kill" else world.stop)()
    world.start()


def end_somehow(world: World, rng: Random, *, has_power: bool, shards: Sequence[int] = ()) -> None:
    """Kill, stop, or lose power. Then start the engine, possibly with another of these numbers of shards."""
    if not has_power:
        world.power_loss(seed=rng.randrange(1 << 30))
    elif rng.random() < 0.5:
        world.kill()
    else:
        world.stop()
    world.start(rng.choice(shards) if shards else 0)


def forget_changes(monkeypatch: pytest.MonkeyPatch, op: int) -> None:
    """Let the replay of shards ignore changes of leases of this kind."""
    real = replay.replay_change

    def forgetful(topic: Any, change: Any) -> None:
        if change.op != op:
            real(topic, change)

    monkeypatch.setattr(replay, "replay_change", forgetful)
