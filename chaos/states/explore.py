"""All short histories, all cuts, all images."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos.states.images import Image, Tree
from chaos.states.judge import KILL, KILL_SHARD, POWER_LOSS, Broken, Facts, How, judge, judge_trap
from chaos.states.workload import STEPS, Workload
from ringlog.testing import disk as d
from ringlog.testing.shard_world import World


@dataclass(slots=True)
class Tally:
    """What was explored, so that a run can be held to a minimum of work."""

    histories: int = 0
    cuts: int = 0
    images: int = 0
    judged: int = 0
    acked: int = 0
    """Sum over judged images of the frames that had to be there."""
    seconds: float = 0.0
    recoveries_every: int = 40
    """One image in so many is also crashed inside its recovery."""
    recoveries: int = 0
    """Images judged that a crash inside a recovery left."""
    is_cut_short: bool = False
    _seen: set[object] = field(default_factory=set)

    def is_new(self, image: Image, facts: Facts, how: How) -> bool:
        """Say whether this case was not judged yet, and remember it."""
        self.images += 1
        key = (image.key(), facts.key(), how.name, facts.marks.durable if how.keeps_board else 0)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def histories(longest: int, steps: Iterable[str] = tuple(STEPS)) -> Iterator[tuple[str, ...]]:
    """Every sequence of up to `longest` steps, short ones first."""
    names = tuple(steps)
    for length in range(1, longest + 1):
        yield from itertools.product(names, repeat=length)


def explore(chosen: Iterable[tuple[str, ...]], tally: Tally | None = None, *, seconds: float = 1e9) -> Tally:
    """Judge every image of every cut of these histories; raises Broken saying which one failed.

    Stops quietly after `seconds` of real time; the tally says so.
    """
    tally = tally or Tally()
    started = time.monotonic()
    for steps in chosen:
        if time.monotonic() - started > seconds:
            tally.is_cut_short = True
            break
        _explore_one(steps, tally)
        tally.histories += 1
    tally.seconds += time.monotonic() - started
    return tally


def _explore_one(steps: tuple[str, ...], tally: Tally) -> None:
    history = Workload().run(steps)
    tree, facts = Tree(), Facts()
    tree.make_durable_dir("/data")
    for number, operation in enumerate(history.operations):
        if isinstance(operation, d.Note):
            facts.take(history, operation.tag, operation.payload)
            if operation.tag not in {"acked", "granted"}:
                continue
        else:
            tree.do(operation)
        tally.cuts += 1
        where = f"{'+'.join(steps)}, cut after call {number} ({operation!s:.80})"
        _explore_cut(tree, facts, number, where, tally)


def _explore_cut(tree: Tree, facts: Facts, number: int, where: str, tally: Tally) -> None:
    for image, how in _cases(tree, number):
        if not tally.is_new(image, facts, how):
            continue
        with _named(f"{where}, {how.name}"):
            judge(image, facts, how)
        tally.judged += 1
        tally.acked += len(facts.acked)
        if how is not KILL_SHARD and tally.judged % tally.recoveries_every == 0:
            with _named(f"{where}, {how.name}"):
                _explore_recovery(image, facts, how, tally)
    durable, cached = tree.as_synced(), tree.as_killed()
    if durable.key() != cached.key() and tally.is_new(cached, facts, How(f"trap {durable.key()!r}", True)):
        with _named(f"{where}, failed sync"):
            judge_trap(durable, cached, facts)
        tally.judged += 1


def _explore_recovery(image: Image, facts: Facts, how: How, tally: Tally) -> None:
    """Crash at every call inside the recovery of an image, and recover again (CP-56 to CP-60)."""
    disk = d.RecordingDisk(image.mount())
    world = World(disk, incarnation=1_000)
    if how.is_power_loss:
        world.reboot()
    world.start()
    tree = Tree.of(image)
    for number, operation in enumerate(disk.operations):
        tree.do(operation)
        for again in tree.after_power_loss(number):
            if tally.is_new(again, facts, POWER_LOSS):
                with _named(f"call {number} of recovery ({operation!s:.80})"):
                    judge(again, facts, POWER_LOSS, incarnation=2_000)
                tally.recoveries += 1


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except Broken as e:
        raise Broken(f"{where}: {e}") from e


def _cases(tree: Tree, seed: int) -> Iterator[tuple[Image, How]]:
    yield tree.as_killed(), KILL
    yield tree.as_killed(), KILL_SHARD
    for image in tree.after_power_loss(seed):
        yield image, POWER_LOSS
