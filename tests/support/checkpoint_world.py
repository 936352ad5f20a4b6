"""Checkpoints of a World's shards with the compactor's own code, and the state that clients can observe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ringlog.testing.disk import Halted
from ringlog.verify.directory import verify_directory
from ringlog.verify.findings import DAMAGE
from tests.support.shard_world import DATA, World
from tests.support.world_checkpoints import WorldShardRequests, checkpoint, checkpoint_all, workplace

__all__ = [
    "WorldShardRequests", "checkpoint", "checkpoint_all", "fill", "findings", "state",
    "wal_files", "workplace",
]  # fmt: skip


def fill(world, topics=("a", "b", "c"), rounds=3, records=4, **config):
    for name in topics:
        world.put_topic(name, **{"durability": "fsync"} | config)
    for _ in range(rounds):
        for name in topics:
            world.append(name, [b"%s-%d" % (name.encode(), i) for i in range(records)])


def state(world):
    """Return, for each topic name, the state that clients can observe."""
    found = {}
    for run in world.runs.values():
        for topic in run.core.directory.by_id.values():
            found[topic.name] = (
                topic.topic_id, topic.epoch, topic.head_seq, topic.earliest_seq, topic.count, topic.bytes,
                topic.lost, topic.config, topic.last_ts, world.records(topic.name),
                [(each, past.to_numbers()) for each, past in topic.producers.items()],
            )  # fmt: skip
    return found


def wal_files(world, shard=0):
    names = world.disk.list_dir(f"{DATA}/wal/shard-{shard:02d}")
    return sorted(name for name in names if name.endswith(".log"))


def findings(world: World, root: Path) -> list[str]:
    """Return the findings of the offline verifier with severity `DAMAGE`, as text."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "wal").mkdir(parents=True)
    for path, data in world.disk.contents().items():
        real = root / path.removeprefix(f"{DATA}/")
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(data)
    found = verify_directory(str(root), jobs=1).findings
    return [f"{each.path}: {each.what}" for each in found if each.severity == DAMAGE]


def checkpoint_dies(world: World, kind: type) -> None:
    """Let the compactor die in a checkpoint, before it sends a message of this kind."""
    asking = WorldShardRequests(world)

    def die(message: Any) -> None:
        if isinstance(message, kind):
            raise Halted

    asking.before = die
    with pytest.raises(Halted):
        checkpoint(world, asking=asking)
