"""Compactor, relocator and reclaimer on a World: their production cores in one thread.

Each call is a new life of the actor, as after a restart: the actor reads its state from the disk and the
shard. Salts of segments come from a counter, so that a history always produces the same bytes.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ringlog.actors.compactor import checkpoint as compactor_checkpoint
from ringlog.actors.reclaimer import rewriter as reclaimer_rewriter
from ringlog.actors.reclaimer.orphan_files import SNAPSHOTS_BEFORE_REMOVAL
from ringlog.actors.reclaimer.rate_limiter import ByteRateLimiter
from ringlog.actors.reclaimer.reclaim_round import ReclaimCounters as Reclaimed
from ringlog.actors.reclaimer.reclaim_round import Reclaimer
from ringlog.actors.reclaimer.rewriter import Rewriter
from ringlog.actors.relocator.mover import MoveCounters as Moved
from ringlog.actors.relocator.mover import Mover
from ringlog.clock import Clock
from ringlog.config import ColdConfig, StorageConfig
from ringlog.envelope import messages as m
from ringlog.limits import KIB
from ringlog.segment.layout import CREATOR_RECLAIMER, CREATOR_SHIFT, NumberAllocator
from ringlog.storage.disk import Disk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.shard_world import DATA, ENGINE_ID, World
from tests.support.world_checkpoints import WorldShardRequests, checkpoint

COLD = "/cold"
LIFE_SHIFT = 20
"""Segment numbers per life of a reclaimer, as a power of two."""
BYTES_PER_S = 1 << 50
"""Rate limit of the reclaimer, so high that it never waits."""
STORAGE: dict[str, Any] = {"segment_bytes": 64 * KIB, "own_segment_bytes": 64 * KIB}
_REPLIES: dict[type[m.Message], type[m.Message]] = {
    m.CheckpointOpen: m.CheckpointPlan, m.ListLiveRecords: m.LiveRecordsReply, m.SegmentsChange:
    m.SegmentsChanged,
}  # fmt: skip
_SALT = 0x9E3779B97F4A7C15
AsksShards = Callable[..., tuple[Any, Any]]
"""(shard, message, attachment) -> the reply and its attachment."""


@contextmanager
def drawn_salts(randbits: Callable[[int], int]) -> Iterator[None]:
    """Make the actors draw their salts from `randbits`, so that a case replays byte for byte."""
    modules: tuple[Any, ...] = (compactor_checkpoint, reclaimer_rewriter)
    for module in modules:
        module.secrets = SimpleNamespace(randbits=randbits)
    try:
        yield
    finally:
        for module in modules:
            module.secrets = secrets


@contextmanager
def counted_salts(first: int | Iterator[int] = 1) -> Iterator[None]:
    """Make salts repeatable: they follow from `first`, or come from this iterator."""
    numbers = itertools.count(first) if isinstance(first, int) else first
    with drawn_salts(lambda bits: next(numbers) * _SALT & ((1 << bits) - 1)):
        yield


def asked_by(asking: Any) -> AsksShards:
    """Return the function through which a reclaimer sends requests to shards."""

    def ask(shard: int, message: m.Message, attachment: Any = None) -> tuple[Any, Any]:
        answer = asking.ask(shard, message, _REPLIES[type(message)], attachment=attachment)
        return answer.message, answer.attachment

    return ask


def at_once(job: Callable[[], None]) -> bool:
    """Run at once the work that a reclaimer postpones."""
    job()
    return True


def reclaimer_of(
    disk: Disk, ask: AsksShards, settings: StorageConfig, numbers: NumberAllocator, clock: Clock,
    copies: SegmentCopies,
    *, shards: int = 1, engine_id: bytes = ENGINE_ID, data_dir: str = DATA, later: Any = at_once,
    quarantined: Callable[[], set[int]] = set, want_checkpoint: Callable[[], None] = lambda: None,
) -> Reclaimer:  # fmt: skip
    """Return a reclaimer that has just started."""
    pace = ByteRateLimiter(BYTES_PER_S, clock, lambda: False)
    return Reclaimer(
        disk, data_dir, settings, copies=copies, rewriter=Rewriter(disk, data_dir, settings, numbers, pace),
        shards=shards, engine_id=engine_id, ask=ask, clock=clock, quarantined=quarantined,
        want_checkpoint=want_checkpoint, submit_cold_job=later,
    )  # fmt: skip


def reclaimer_numbers(incarnation: int) -> NumberAllocator:
    """Return the segment numbers of one life of a reclaimer. They exceed those of earlier lives."""
    return NumberAllocator(
        CREATOR_RECLAIMER, [CREATOR_RECLAIMER << CREATOR_SHIFT | incarnation << LIFE_SHIFT]
    )


def cold_copies(disk: Disk) -> SegmentCopies:
    """Return the two tiers, both on one disk."""
    return SegmentCopies(disk, DATA, OwnedStore(LocalStore(disk, COLD), disk, DATA, ENGINE_ID.hex()))


def mover_of(world: World, asking: Any, hot_segments: int) -> Mover:
    """Return a relocator that has claimed its store and keeps `hot_segments` on the host."""
    copies = cold_copies(world.disk)
    copies.require_store().claim()
    return Mover(
        copies, ColdConfig(dir=COLD, hot_segments=hot_segments), shards=world.shards,
        clock=world.clock, jitter=lambda: 0.0,
        ask=lambda shard, message, wanted: asking.ask(shard, message, wanted).message,
    )  # fmt: skip


def seal(world: World, before: Callable[[m.Message], None] | None = None, *, roll: bool = True) -> int:
    """Run one checkpoint: the log becomes segments and a snapshot. Returns the number of new segments.

    With `roll` False, only closed log files are included. `before` is called with each message that the
    compactor sends.
    """
    world.clock.advance(0.001)
    asking = WorldShardRequests(world)
    if before is not None:
        asking.before = before
    world.incarnation += 1
    return checkpoint(world, asking=asking, roll=roll, **STORAGE).segments


def relocate(world: World) -> Moved:
    """Run one round of the relocator, which keeps only indexes on the host."""
    mover = mover_of(world, WorldShardRequests(world), hot_segments=0)
    mover.run_round()
    return mover.counts


def reclaim(world: World) -> Reclaimed:
    """Run rounds of one reclaimer, with snapshots in between, until the dropped files are deleted."""
    world.incarnation += 1
    found = reclaimer_of(
        world.disk, asked_by(WorldShardRequests(world)), StorageConfig(**STORAGE),
        reclaimer_numbers(world.incarnation),
        world.clock, cold_copies(world.disk), shards=world.shards,
    )  # fmt: skip
    found.run_round()
    for _ in range(SNAPSHOTS_BEFORE_REMOVAL):
        seal(world, roll=False)
        world.clock.advance(61)
    found.run_round()
    return found.counts
