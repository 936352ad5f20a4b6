"""Requests to a World's shard about the consumer group `g` of the topic `t`."""

from __future__ import annotations

from typing import Any

from ringlog.envelope import messages as m
from ringlog.leases.change import Mode
from tests.support.lease_words import numbers, words
from tests.support.shard_world import World

QUEUE, STREAM = int(Mode.QUEUE), int(Mode.STREAM)


def make(
    world: World, records: int = 0, mode: int = QUEUE, *, durability: str = "fsync", **options: Any
) -> Any:
    """Create the topic and its group."""
    world.put_topic("t", durability=durability)
    if records:
        world.append("t", [b"record %d" % n for n in range(1, records + 1)])
    return world.request(m.GroupOpen("t", "g", mode, **options))


def claim(world: World, most: int = 1, node: str = "w", group: str = "g", **options: Any) -> m.ClaimReply:
    return world.request(m.Claim("t", node, most, group=group, **options))


def ack(world: World, jobs: Any, node: str = "w", group: str = "g", **options: Any) -> m.AckReply:
    tokens = words(jobs.values()) if isinstance(jobs, dict) else b""
    return world.request(m.Ack("t", node, words(jobs), tokens, group=group, **options))


def nack(world: World, jobs: Any, node: str = "w", **options: Any) -> m.NackReply:
    return world.request(m.Nack("t", node, words(jobs), group="g", **options))


def give_again(world: World, letters: dict[int, int]) -> tuple[int, list[int]]:
    """Redeliver records, given as position -> number of their dead letter.

    Return the number of letters that were redelivered before, and the positions that left the topic.
    """
    message = m.Redeliver("t", world.topic("t").topic_id, "g", words(letters), words(letters.values()))
    reply = world.request(message)
    return reply.repeated, numbers(reply.gone)


def pending(world: World, **options: Any) -> dict[int, tuple[int, str, int]]:
    """Return position -> (state, member, deliveries)."""
    reply = world.request(m.ListPending("t", limit=1_000, group="g", **options))
    return {
        first + n: (state, reply.nodes[place], deliveries)
        for first, count, state, deliveries, _, _, _, place, _ in reply.rows
        for n in range(count)
    }


def stand(world: World, group: str = "g") -> m.LeaseStatsReply:
    """Return the group's statistics. Check the shard's invariants and that the pending count adds up."""
    found = world.request(m.LeaseStats("t", group=group))
    world.run_of("t").core.check()
    assert found.in_flight + found.delayed + found.returned + found.exhausted == found.info.pending
    return found
