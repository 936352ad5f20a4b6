"""A shard with topics, queues and groups in use."""

from __future__ import annotations

from ringlog.envelope import messages as m
from tests.support.lease_words import words
from tests.support.shard_world import World
from tests.support.shard_worlds import new_world

TOPICS = ("t", "q", "p", "u", "dead")
SEQS = tuple(words(numbers) for numbers in ((1,), (1, 2), (2, 3), (4, 5, 6)))
"""Seqs of requests about jobs."""
TOKENS = tuple(words(numbers) for numbers in ((1,), (2, 3), (0, 0), ((1 << 64) - 1, 0), ((1 << 64) - 1, 1)))
"""Lease tokens, some of which no lease has."""
WAIT = {m.Claim}
"""Kinds that may wait for their reply."""


def prepared() -> World:
    """Return a world with topics of each type and class, and a group of each mode, all with records."""
    world = new_world()
    world.put_topic("t")
    world.put_topic("q", type="queue", dead_letter="dead", max_deliveries=2, record_priority=True)
    world.put_topic("p", type="queue")  # As most are: its claims and acks take the fast path.
    world.put_topic("u", durability="ephemeral")
    world.put_topic("dead", durability="fsync")
    for name in ("t", "q", "p", "u"):
        world.append(name, [b"%d" % n for n in range(6)])
    world.request(m.GroupOpen("t", "g", 1, dead_letter="dead", max_deliveries=2))
    world.request(m.GroupOpen("t", "s", 2))
    world.request(m.Claim("q", "w", 3))
    world.request(m.Claim("p", "w", 3))
    world.request(m.Claim("t", "w", 3, group="g"))
    return world
