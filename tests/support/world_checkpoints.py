"""Checkpoints of the shards of a World with the compactor's own code, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ringlog.actors.compactor.checkpoint import CheckpointContext, CheckpointResult, CheckpointTask
from ringlog.actors.compactor.shard_client import CompactorShardClient
from ringlog.actors.compactor.shell import NUMBERS_SHIFT
from ringlog.config import StorageConfig
from ringlog.envelope import messages as m
from ringlog.errors import error_from_status
from ringlog.segment.layout import CREATOR_COMPACTOR, CREATOR_SHIFT, NumberAllocator, parse_stem
from ringlog.segment.segment import find_segments
from tests.support.shard_world import DATA, ENGINE_ID, World


class WorldShardRequests:
    """Sends requests to the shards of a World, with the interface that the compactor uses for processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.before: Callable[[m.Message], None] = lambda message: None
        """Called with every message before it is sent."""

    def ask(self, shard: int, message: m.Message, wanted: Any, *, attachment: Any = None) -> Any:
        """Return the reply and its attachment; raise the error of a refusal."""
        self.before(message)
        run = self._world.runs[shard]
        run.attached = None
        answer = self._world.ask(run, message, bytearray(attachment) if attachment is not None else None)
        if isinstance(answer, m.ErrorReply):
            raise error_from_status(answer.status, answer.message, answer.detail)
        assert isinstance(answer, wanted), answer
        return SimpleNamespace(message=answer, attachment=run.attached)


def workplace(world: World, **storage: Any) -> CheckpointContext:
    """Return the context of a checkpoint in this world, as a starting compactor creates it."""
    parsed = [parse_stem(stem) for stem in find_segments(world.disk, DATA)]
    numbers = [each[2] for each in parsed if each]
    numbers.append(CREATOR_COMPACTOR << CREATOR_SHIFT | world.incarnation << NUMBERS_SHIFT)
    return CheckpointContext(
        disk=world.disk, data_dir=DATA, engine_id=ENGINE_ID, clock=world.clock,
        storage=StorageConfig(**storage),
        numbers=NumberAllocator(CREATOR_COMPACTOR, numbers), heartbeat=lambda: None,
    )  # fmt: skip


def checkpoint(
    world: World,
    shard: int = 0,
    *,
    asking: WorldShardRequests | None = None,
    roll: bool = True,
    **storage: Any,
) -> CheckpointResult:
    """Run one checkpoint of one shard; return its result."""
    one: Any = CompactorShardClient(asking or WorldShardRequests(world), shard)
    return CheckpointTask(workplace(world, **storage), one, one.fetch_plan(roll=roll)).run()


def checkpoint_all(world: World, **storage: Any) -> None:
    """Run one checkpoint of every shard."""
    for shard in range(world.shards):
        checkpoint(world, shard, **storage)
