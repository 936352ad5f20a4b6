"""Checkpoints of the shards of a World by the compactor's own code, in one thread."""

from __future__ import annotations

from types import SimpleNamespace

from actors.compactor.checkpoint import Checkpoint, Workplace
from actors.compactor.shards import Shard
from ringlog.config import Storage
from ringlog.envelope import messages as m
from ringlog.errors import refusal
from ringlog.segment.layout import MAKER_COMPACTOR, NumberAllocator, parse_stem
from ringlog.segment.segment import find_segments
from ringlog.testing.shard_world import DATA, ENGINE_ID, World


class Asking:
    """Asks a World's shards as ShardRequests asks processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.before = lambda message: None
        """Called with every message before it is sent."""

    def ask(self, shard, message, wanted, *, attachment=None):
        self.before(message)
        run = self._world.runs[shard]
        run.attached = None
        answer = self._world.ask(run, message, bytearray(attachment) if attachment is not None else None)
        if isinstance(answer, m.ErrorReply):
            raise refusal(answer.status, answer.message, answer.detail)
        assert isinstance(answer, wanted), answer
        return SimpleNamespace(message=answer, attachment=run.attached)


def workplace(world: World, **storage) -> Workplace:
    numbers = [parse_stem(stem)[2] for stem in find_segments(world.disk, DATA)]
    return Workplace(
        disk=world.disk, data_dir=DATA, engine_id=ENGINE_ID, clock=world.clock, storage=Storage(**storage),
        numbers=NumberAllocator(MAKER_COMPACTOR, numbers), beat=lambda: None,
    )  # fmt: skip


def checkpoint(world: World, shard: int = 0, *, asking: Asking | None = None, roll: bool = True, **storage):
    """One checkpoint of one shard; returns what it made."""
    one = Shard(asking or Asking(world), shard)
    return Checkpoint(workplace(world, **storage), one, one.plan(roll=roll)).run()


def checkpoint_all(world: World, **storage) -> None:
    for shard in range(world.shards):
        checkpoint(world, shard, **storage)
