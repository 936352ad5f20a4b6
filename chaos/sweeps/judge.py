"""Judges the state after a fault: acknowledged data exists, nothing is invented, nothing is incomplete."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from chaos.rigs.judge import KILL, POWER_LOSS, CrashKind, Seen, check, observe, require_same
from chaos.sweeps.house import FaultyEngine
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.testing.disk import PowerLossDamage

CHANCE = CrashKind("power loss, by chance", is_power_loss=True)
ENDS = (POWER_LOSS, KILL, CHANCE)
ENDS_EACH = len(ENDS)
"""Number of runs that one line or allocation counts for: one for each end."""
KNOWN_MAX = 1 << 20
ANYWAY = 16
"""One in this many outcomes that are known to be good is judged again."""


@dataclass(slots=True)
class Known:
    """Outcomes that were judged and held. An equal outcome gives the same result and is not judged again.

    Different errors of one call mostly have equal outcomes, and so do exceptions at neighbouring lines.
    """

    good: set[bytes] = field(default_factory=set)
    fresh: list[bytes] = field(default_factory=list)
    """Outcomes remembered since the last `take_fresh`, to be adopted by another process."""
    met: int = 0
    judged: int = 0

    def is_known(self, key: bytes) -> bool:
        """Return whether this outcome need not be judged again."""
        self.met += 1
        if key in self.good and self.met % ANYWAY:
            return True
        self.judged += 1
        return False

    def remember(self, *keys: bytes) -> None:
        """Remember outcomes that held, and pass them to other processes."""
        self.adopt(*keys)
        self.fresh.extend(keys)

    def adopt(self, *keys: bytes) -> None:
        """Remember outcomes that held in another process.

        They are not passed on. If each process returned adopted outcomes, their number would double each
        time.
        """
        if len(self.good) >= KNOWN_MAX:
            self.good.clear()
            self.fresh.clear()
        self.good.update(keys)

    def take_fresh(self) -> list[bytes]:
        """Return the outcomes that were remembered since the last call."""
        found, self.fresh = self.fresh, []
        return found


def end_and_judge(
    house: FaultyEngine, how: CrashKind, seed: int, *, deep: bool = False, known: Known | None = None
) -> None:
    """End the engine after a fault, start it, compare it with the model, and let it work.

    `deep` adds checkpoints, the reclaimer, the relocator, and a second recovery. With `known`, an outcome
    that was judged before is not judged again. Raises GuaranteeBroken.
    """
    try:
        is_up = 0 in house.world.runs and not house.has_rot
        before = observe(house.world) if how == KILL and is_up else None
        _end(house, how, seed)
        if known is None:
            _judge(house, how, before, deep=deep)
            return
        key = xxhash.xxh3_128_digest(f"{how.name}/{before!r}".encode() + house.digest())
        if known.is_known(key + bytes([deep])):
            return
        _judge(house, how, before, deep=deep)
        # A deep judgement includes the other one.
        known.remember(key + b"\0", key + bytes([deep]))
    except GuaranteeBroken:
        raise
    except (RinglogError, AssertionError) as e:
        raise GuaranteeBroken(f"after {how.name}: {type(e).__name__}: {e} {getattr(e, 'detail', '')}") from e


def _judge(house: FaultyEngine, how: CrashKind, before: dict[str, Seen] | None, *, deep: bool) -> None:
    house.start()
    if house.has_rot and (left := house.scrub()):
        raise GuaranteeBroken(f"not healed although the other tier has an intact copy: {left}")
    found = observe(house.world)
    check(house.model, found, how)
    if before is not None:
        require_same(before, found, "recovery changes what clients saw")
    _work(house, how, deep=deep)
    if not deep:
        return
    found = observe(house.world)
    house.world.kill()
    house.start()
    require_same(found, observe(house.world), "recovering again changes the state")
    check(house.model, found, how)


def end_each(house: FaultyEngine, seed: int, known: Known | None = None) -> None:
    """Judge a house with each end: copies of it for a power loss, the original for a kill.

    Raises GuaranteeBroken.
    """
    for how in ENDS:
        if how != KILL:
            end_and_judge(house.twin(), how, seed, known=known)
    end_and_judge(house, KILL, seed, known=known)


def _end(house: FaultyEngine, how: CrashKind, seed: int) -> None:
    if how == KILL:
        house.world.kill()
    else:
        house.world.power_loss(seed, PowerLossDamage.LOST if how == POWER_LOSS else None)
        house.monitor.power_loss(house.base.exists)
    house.faulty.paths.clear()
    house.world.runs.clear()


def _work(house: FaultyEngine, how: CrashKind, *, deep: bool) -> None:
    """Check that everything works after the fault: each append is acknowledged at once."""
    failed = house.model.failed
    for name in house.model.topics:
        if house.model.may_exist(name) == {True}:
            house.append(name, 2)
    if deep:
        house.checkpoint_or_fail()
        house.reclaim()
        house.checkpoint_or_fail()  # a segment moves only after a snapshot lists it
        house.relocate()
        check(house.model, observe(house.world), how)
    if house.model.failed != failed:
        raise GuaranteeBroken("an operation fails although the fault is over")
