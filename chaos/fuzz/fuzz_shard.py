"""A shard's core: it answers any sequence of messages, and its successor recovers the same state.

An input selects the requests in order, and the values of their fields. See
tests.support.message_generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from ringlog.envelope import messages as m
from ringlog.testing.simulated_disk import SimulatedDisk
from ringlog.topic.row import decode_row, encode_row
from ringlog.types import Durability
from tests.support.busy_world import SEQS, TOKENS
from tests.support.message_generator import ByteChoices, MessageGenerator
from tests.support.shard_world import NoReply, World

MAX_LEN = 1_024
SHARE = 0.4
REQUESTS_MAX = 40
EPHEMERAL = "u"
"""Topic that is created as `ephemeral`.

Its first records do not survive the shard, even if its class changes.
"""
WAIT = (m.Claim,)
"""Message kinds whose reply may be delayed."""
KNOWN = {
    "topic": ("t", "q", "u", "p"), "group": ("", "g", "s"), "node": ("w", "v"), "dead_letter": ("u",),
    "name": ("r",), "seqs": SEQS, "tokens": TOKENS,
    "epoch": (0, 1), "lease_ms": (0, 1_000), "wait_ms": (0, 5), "delay_ms": (0, 1), "number": (1, 2),
}  # fmt: skip


def check(data: bytes) -> None:
    """Send the requests of one input. Each must be answered, and recovery must restore the same facts."""
    world = _prepared()
    run, script = world.run_of("t"), ByteChoices(data)
    ids = [world.topic(name).topic_id for name in ("t", "q", "u", "p")]
    writer, kinds = MessageGenerator(script, {**KNOWN, "topic_id": ids}), run.core.requests.kinds
    for _ in range(REQUESTS_MAX):
        if script.is_over:
            break
        message = writer.message(writer.pick(kinds))
        if message is None:
            continue
        try:
            world.ask(run, message, writer.attachment())
        except NoReply:
            if not isinstance(message, WAIT):
                raise
    recovered(world)


def recovered(world: World) -> None:
    """Check that a successor restores the same facts from the log, and that all snapshot rows decode."""
    core = world.run_of("t").core
    core.check()
    for topic in core.directory.by_id.values():
        decode_row(topic.topic_id, encode_row(topic))
    before = _facts(world)
    world.kill()
    world.start()
    world.run_of("t").core.check()
    assert _facts(world) == before


def _facts(world: World) -> dict[str, Any]:
    """Return the facts of each topic that must survive the shard."""
    return {
        topic.name: (
            topic.topic_id, topic.epoch, topic.config, topic.head_seq, topic.count, topic.earliest_seq,
            sorted((group.config.key, group.ack_floor) for group in topic.groups.values()),
            sorted((router.number, router.name, router.cursor) for router in topic.routers.values()),
        )
        for topic in world.run_of("t").core.directory.by_id.values()
        if topic.config.durability != Durability.EPHEMERAL and topic.name != EPHEMERAL
    }  # fmt: skip


def _prepared() -> World:
    """Start a world with topics of each type and class, and with a group of each mode."""
    disk = SimulatedDisk("/data")
    disk.make_dir("/data/meta")
    disk.sync_dir("/data")
    world = World(disk, file_bytes=1 << 20)
    world.start()
    world.put_topic("t")
    world.put_topic("q", type="queue", dead_letter="u", max_deliveries=2, record_priority=True)
    world.put_topic(EPHEMERAL, durability="ephemeral")
    world.put_topic("p", type="queue")
    for name in ("t", "q", "u", "p"):
        world.append(name, [b"1", b"2", b"3"])
    world.request(m.GroupOpen("t", "g", 1, dead_letter="u", max_deliveries=2))
    world.request(m.GroupOpen("t", "s", 2))
    world.request(m.Claim("q", "w", 2))
    world.request(m.Claim("p", "w", 2))
    world.request(m.Claim("t", "w", 2, group="g"))
    return world


def seeds() -> Iterator[bytes]:
    """Yield random choices, each enough for some requests."""
    for seed in range(24):
        yield Random(seed).randbytes(40 * (1 + seed % 8))
