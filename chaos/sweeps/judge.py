"""What must be there after a fault: everything acknowledged, nothing made up, nothing half done."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from chaos.order import Broken
from chaos.rigs.judge import KILL, POWER_LOSS, How, Seen, check, observe, require_same
from chaos.sweeps.house import House
from ringlog.errors import RinglogError
from ringlog.testing.disk import PowerLossDamage

CHANCE = How("power loss, by chance", is_power_loss=True)
ENDS = (POWER_LOSS, KILL, CHANCE)
ENDS_EACH = len(ENDS)
"""Runs of a line or an allocation: what it left, with each end."""
KNOWN_MAX = 1 << 20
ANYWAY = 16
"""One in so many outcomes that are known to be good is judged all the same."""


@dataclass(slots=True)
class Known:
    """What faults left, and was judged already: what comes of the same again is the same.

    Different errors at one call mostly end alike, and so do exceptions at neighbouring lines.
    """

    good: set[bytes] = field(default_factory=set)
    fresh: list[bytes] = field(default_factory=list)
    """What was remembered last, until somebody takes it (for another process's `good`)."""
    met: int = 0
    judged: int = 0

    def is_known(self, key: bytes) -> bool:
        """Say whether this outcome need not be judged again."""
        self.met += 1
        if key in self.good and self.met % ANYWAY:
            return True
        self.judged += 1
        return False

    def remember(self, *keys: bytes) -> None:
        """These held."""
        self.adopt(*keys)
        self.fresh.extend(keys)

    def adopt(self, *keys: bytes) -> None:
        """These held, as another process says. They are nobody's news: who told them on with his own would be
        told them back, and all of them would be twice as many each time."""
        if len(self.good) >= KNOWN_MAX:
            self.good.clear()
            self.fresh.clear()
        self.good.update(keys)

    def take_fresh(self) -> list[bytes]:
        """What was remembered since the last call."""
        found, self.fresh = self.fresh, []
        return found


def end_and_judge(
    house: House, how: How, seed: int, *, deep: bool = False, known: Known | None = None
) -> None:
    """The fault is over: end the engine, start it, hold it to the model, let it work, and once more.

    `deep` also makes a checkpoint, lets the reclaimer and the relocator work, and recovers once more.
    With `known` an outcome that was judged before is not judged again. Raises Broken.
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
        # A deep look has all of the other in it.
        known.remember(key + b"\0", key + bytes([deep]))
    except Broken:
        raise
    except (RinglogError, AssertionError) as e:
        raise Broken(f"after {how.name}: {type(e).__name__}: {e} {getattr(e, 'detail', '')}") from e


def _judge(house: House, how: How, before: dict[str, Seen] | None, *, deep: bool) -> None:
    house.start()
    if house.has_rot and (left := house.scrub()):
        raise Broken(f"not healed although the other tier has a whole copy: {left}")
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


def end_each(house: House, seed: int, known: Known | None = None) -> None:
    """Judge a house with each end: copies of it, and itself after a kill. Raises Broken."""
    for how in ENDS:
        if how != KILL:
            end_and_judge(house.twin(), how, seed, known=known)
    end_and_judge(house, KILL, seed, known=known)


def _end(house: House, how: How, seed: int) -> None:
    if how == KILL:
        house.world.kill()
    else:
        house.world.power_loss(seed, PowerLossDamage.LOST if how == POWER_LOSS else None)
        house.monitor.power_loss(house.base.exists)
    house.faulty.paths.clear()
    house.world.runs.clear()


def _work(house: House, how: How, *, deep: bool) -> None:
    """After the fault everything works: what is sent is acknowledged, at once."""
    failed = house.model.failed
    for name in house.model.topics:
        if house.model.may_exist(name) == {True}:
            house.append(name, 2)
    if deep:
        house.checkpoint_or_fail()
        house.reclaim()
        house.checkpoint_or_fail()  # A segment moves only when a snapshot names it.
        house.relocate()
        check(house.model, observe(house.world), how)
    if house.model.failed != failed:
        raise Broken("an operation fails although the fault is over")
