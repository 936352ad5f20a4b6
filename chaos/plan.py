"""Plans: which classes of faults run, for how long, with which seed, and how much they must do at least."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

PLANS = Path(__file__).parent / "plans"
FAULTS = Path(__file__).parent / "faults.toml"


DAY_STEP = 100_000
"""Between the seeds of two days: the rounds of one stay below it."""
ROUNDS_MAX = 3
"""How often a class runs, each time with another seed, to do what its floors ask; after that it failed."""


class PlanError(ValueError):
    """A plan or the list of faults that makes no sense; says which entry."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One class in a plan."""

    name: str
    target: str
    """Which figure of docs/explanation/reliability.md it serves ("T-1")."""
    seconds: float
    limit_s: float
    """It has failed when it is not done by then."""
    lane: int = 1
    """Lanes run beside each other, entries of one lane one after the other. One that is done takes the last
    of the other."""
    seed: int = 1
    daily: bool = False
    """Other seeds each day: what one night does not meet another may."""
    required: bool = True
    """Whether it may be skipped on a host that lacks what it needs."""
    private_mounts: bool = False
    """Run it in a mount namespace of its own: what it mounts vanishes with it. Needs root."""
    in_memory: bool = False
    """Its files prove nothing about disks and are many: they are in memory where mounts are allowed. ext4
    needs a millisecond to make a file next to thousands that were deleted just before."""
    settings: dict[str, Any] = {}
    floors: dict[str, int] = {}
    """What must be counted at least, in ROUNDS_MAX rounds at most: a slow host needs longer for as much."""
    ends_at_floors: bool = False
    """It ends when all of them are reached, if its time is not over by then: a fast host is done early, and a
    slow one has the time it needs. For classes that can stop anywhere."""
    distinct: list[str] = []
    """Counts of different things, of which two rounds may do the same: the better round's is taken."""

    def seed_on(self, day: date) -> int:
        """The seed of its first round on that day."""
        return self.seed + (DAY_STEP * day.toordinal() if self.daily else 0)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the fault matrix."""

    id: str
    what: str
    by: list[str]
    """How it is injected: SIM, ENUM, LINE, MEM, STOP, SIG, STR, PRE, CLK, CUT, BLK, KRN, FULL, RLIM, CG, NET,
    ROT, ILV, FUZ, ATK (docs/explanation/reliability.md)."""
    oracle: list[str]
    plan: list[str]
    """"ci", "night"."""
    classes: list[str] = []
    """Which classes of the plans have cases of it."""
    later: str = ""
    """Which part of ringlog it needs that is not built yet. Such a row has no class."""


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    entry: list[Entry]
    passes: int = 1


class _FaultFile(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as read."""

    name: str
    entries: tuple[Entry, ...]
    passes: int = 1
    """How often it is repeated, each time with other seeds; 0: until interrupted."""
    by_name: dict[str, Entry] = field(default_factory=dict)

    def lanes(self) -> dict[int, list[Entry]]:
        """Entries by lane, in order."""
        found: dict[int, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.lane, []).append(entry)
        return found


def load_plan(name: str) -> Plan:
    """Read `plans/NAME.toml`; raises PlanError."""
    path = PLANS / f"{name}.toml"
    if not path.is_file():
        raise PlanError(
            f"no plan {name}; there are {', '.join(sorted(p.stem for p in PLANS.glob('*.toml')))}"
        )
    read = _read(path, _PlanFile)
    names = [entry.name for entry in read.entry]
    if len(set(names)) != len(names):
        raise PlanError(f"{path.name}: a class is listed twice")
    return Plan(name, tuple(read.entry), read.passes, {entry.name: entry for entry in read.entry})


def load_faults() -> tuple[Fault, ...]:
    """Read the fault matrix; raises PlanError."""
    faults = tuple(_read(FAULTS, _FaultFile).fault)
    for fault in faults:
        if bool(fault.later) == bool(fault.classes):
            raise PlanError(f"{fault.id}: either classes or later")
    if len({fault.id for fault in faults}) != len(faults):
        raise PlanError("a fault is listed twice")
    return faults


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise PlanError(f"{path.name}: {e}") from e
