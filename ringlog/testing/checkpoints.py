"""Checkpoints of the shards of a World by the compactor's own code, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from actors.compactor.checkpoint import Checkpoint, Made, Workplace
from actors.compactor.shards import Shard
from actors.compactor.shell import NUMBERS_SHIFT
from ringlog.config import Storage
from ringlog.envelope import messages as m
from ringlog.errors import refusal
from ringlog.segment.layout import MAKER_COMPACTOR, MAKER_SHIFT, NumberAllocator, parse_stem
from ringlog.segment.segment import find_segments
from ringlog.testing.shard_world import DATA, ENGINE_ID, World


class Asking:
    """Asks a World's shards as ShardRequests asks processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.before: Callable[[m.Message], None] = lambda message: None
        """Called with every message before it is sent."""

    def ask(self, shard: int, message: m.Message, wanted: Any, *, attachment: Any = None) -> Any:
        """The reply with what is attached to it; raises the refusal, if it is one."""
        self.before(message)
        run = self._world.runs[shard]
        run.attached = None
        answer = self._world.ask(run, message, bytearray(attachment) if attachment is not None else None)
        if isinstance(answer, m.ErrorReply):
            raise refusal(answer.status, answer.message, answer.detail)
        assert isinstance(answer, wanted), answer
        return SimpleNamespace(message=answer, attachment=run.attached)


def workplace(world: World, **storage: Any) -> Workplace:
    """Where a checkpoint of this world works, as at a start of the compactor."""
    parsed = [parse_stem(stem) for stem in find_segments(world.disk, DATA)]
    numbers = [each[2] for each in parsed if each]
    numbers.append(MAKER_COMPACTOR << MAKER_SHIFT | world.incarnation << NUMBERS_SHIFT)
    return Workplace(
        disk=world.disk, data_dir=DATA, engine_id=ENGINE_ID, clock=world.clock, storage=Storage(**storage),
        numbers=NumberAllocator(MAKER_COMPACTOR, numbers), beat=lambda: None,
    )  # fmt: skip


def checkpoint(
    world: World, shard: int = 0, *, asking: Asking | None = None, roll: bool = True, **storage: Any
) -> Made:
    """One checkpoint of one shard; returns what it made."""
    one: Any = Shard(asking or Asking(world), shard)
    return Checkpoint(workplace(world, **storage), one, one.plan(roll=roll)).run()


def checkpoint_all(world: World, **storage: Any) -> None:
    """One checkpoint of every shard."""
    for shard in range(world.shards):
        checkpoint(world, shard, **storage)
