"""Requests to a World's shard about its queue `q`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringlog.envelope import messages as m
from tests.support.lease_words import words
from tests.support.shard_world import World


def make(world: World, jobs: int, name: str = "q", **config: Any) -> None:
    """Create a queue with this number of jobs."""
    world.put_topic(name, **{"type": "queue", **config})
    if jobs:
        world.append(name, [b"job %d" % n for n in range(1, jobs + 1)])


def make_durable(world: World, jobs: int, name: str = "q", **config: Any) -> None:
    """Create a queue with durable leases."""
    make(world, jobs, name, **{"leases_durable": True, "durability": "fsync", **config})


def claim(world: World, most: int = 1, node: str = "w", name: str = "q", **options: Any) -> m.ClaimReply:
    return world.request(m.Claim(name, node, most, **options))


def settle(
    world: World, kind: Any, jobs: dict[int, int], node: str = "w", name: str = "q", **options: Any
) -> Any:
    """Send an Ack, Nack, … of these jobs, given as number -> lease token."""
    return world.request(kind(name, node, words(jobs), words(jobs.values()), **options))


def ack(world: World, jobs: dict[int, int] | Iterable[int], node: str = "w", **options: Any) -> m.AckReply:
    tokens = words(jobs.values()) if isinstance(jobs, dict) else b""
    return world.request(m.Ack("q", node, words(jobs), tokens, **options))


def nack(world: World, jobs: dict[int, int] | Iterable[int], node: str = "w", **options: Any) -> m.NackReply:
    return world.request(m.Nack("q", node, words(jobs), **options))


def stats(world: World) -> tuple[int, int, int]:
    """Return how many jobs are ready, in flight and delayed. Check the shard's invariants and their sum."""
    found = world.request(m.LeaseStats("q"))
    count = world.request(m.TopicState("q")).count
    assert found.ready + found.in_flight + found.delayed == count, (
        "the counts differ from the topic's records (Q2)"
    )
    world.run_of("q").core.check()
    return found.ready, found.in_flight, found.delayed
