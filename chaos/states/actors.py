"""Compactor, relocator and reclaimer at work in a World: their production cores, in one thread.

Each call is a new life of the actor, as after a restart: what it knows it reads from the disk and from the
shard. Salts of segments come from a counter, so that a history gives the same bytes each time.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from actors.compactor import checkpoint as compactor_checkpoint
from actors.compactor.checkpoint import Checkpoint
from actors.compactor.shards import Shard
from actors.compactor.shell import NUMBERS_SHIFT
from actors.reclaimer import rewriter as reclaimer_rewriter
from actors.reclaimer.leftovers import SNAPSHOTS_BEFORE
from actors.reclaimer.pace import Pace
from actors.reclaimer.rewriter import Rewriter
from actors.reclaimer.rounds import Counts as Reclaimed
from actors.reclaimer.rounds import Reclaimer
from actors.relocator.mover import Counts as Moved
from actors.relocator.mover import Mover
from ringlog.config import Cold, Storage
from ringlog.envelope import messages as m
from ringlog.limits import KIB
from ringlog.segment.layout import MAKER_COMPACTOR, MAKER_RECLAIMER, MAKER_SHIFT, NumberAllocator
from ringlog.testing.checkpoints import Asking, workplace
from ringlog.testing.shard_world import DATA, ENGINE_ID, World
from ringlog.tier.copies import Copies
from ringlog.tier.local import LocalStore

COLD = "/cold"
RECLAIMER_SHIFT = 20
"""Numbers of one life of a reclaimer, as a power of two."""
STORAGE: dict[str, Any] = {"segment_bytes": 64 * KIB, "own_segment_bytes": 64 * KIB}
_REPLIES: dict[type[m.Message], type[m.Message]] = {
    m.CheckpointOpen: m.CheckpointPlan, m.LiveAsk: m.LiveReply, m.SegmentsChange: m.SegmentsChanged,
}  # fmt: skip
_SALT = 0x9E3779B97F4A7C15


@contextmanager
def counted_salts(first: int | Iterator[int] = 1) -> Iterator[None]:
    """Salts that the actors draw are the same in every repetition, and others for another `first` (or come
    from these numbers)."""
    numbers = itertools.count(first) if isinstance(first, int) else first
    modules: tuple[Any, ...] = (compactor_checkpoint, reclaimer_rewriter)
    stand_in = SimpleNamespace(randbits=lambda bits: next(numbers) * _SALT & ((1 << bits) - 1))
    for module in modules:
        module.secrets = stand_in
    try:
        yield
    finally:
        for module in modules:
            module.secrets = secrets


def seal(world: World, before: Callable[[m.Message], None] | None = None, *, roll: bool = True) -> int:
    """One checkpoint: the log so far, or with `roll` False its closed files, becomes segments and a snapshot.

    `before` is called with each message that the compactor sends. Returns how many segments were made.
    """
    world.clock.advance(0.001)
    asking = Asking(world)
    if before is not None:
        asking.before = before
    shard: Any = Shard(asking, 0)
    place = replace(workplace(world, **STORAGE), numbers=_numbers(world, MAKER_COMPACTOR, NUMBERS_SHIFT))
    return Checkpoint(place, shard, shard.plan(roll=roll)).run().segments


def _numbers(world: World, maker: int, shift: int) -> NumberAllocator:
    """Numbers of a new life of a maker, above all that an earlier one gave."""
    world.incarnation += 1
    return NumberAllocator(maker, [maker << MAKER_SHIFT | world.incarnation << shift])


def relocate(world: World) -> Moved:
    """One round of the relocator, which keeps nothing on the host but indexes."""
    asking = Asking(world)
    mover = Mover(
        Copies(world.disk, DATA, LocalStore(world.disk, COLD)), Cold(dir=COLD, hot_segments=0),
        shards=world.shards, clock=world.clock, jitter=lambda: 0.0,
        ask=lambda shard, message, wanted: asking.ask(shard, message, wanted).message,
    )  # fmt: skip
    mover.round()
    return mover.counts


def reclaim(world: World) -> Reclaimed:
    """Rounds of one reclaimer until what it dropped is off the disk: with so many snapshots between them."""
    found = _reclaimer(world)
    found.round()
    for _ in range(SNAPSHOTS_BEFORE):
        seal(world, roll=False)
        world.clock.advance(61)
    found.round()
    return found.counts


def _reclaimer(world: World) -> Reclaimer:
    asking = Asking(world)

    def ask(shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any]:
        answer = asking.ask(shard, message, _REPLIES[type(message)], attachment=attachment)
        return answer.message, answer.attachment

    def at_once(job: Callable[[], None]) -> bool:
        job()
        return True

    numbers = _numbers(world, MAKER_RECLAIMER, RECLAIMER_SHIFT)
    settings, disk = Storage(**STORAGE), world.disk
    pace = Pace(1 << 50, world.clock, lambda: False)
    return Reclaimer(
        disk, DATA, settings, copies=Copies(disk, DATA, LocalStore(disk, COLD)),
        rewriter=Rewriter(disk, DATA, settings, numbers, pace), shards=world.shards, engine_id=ENGINE_ID,
        ask=ask, clock=world.clock, quarantined=set, want_checkpoint=lambda: None, later=at_once,
    )  # fmt: skip
