"""Plans: which fault classes run, for how long, with which seed, and their minimum counts."""

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
"""Distance between the seeds of two days. The seeds of one day's rounds stay below it."""
ROUNDS_MAX = 3
"""Maximum number of rounds, each with another seed, in which a class must reach its floors. Then it fails."""


class PlanError(ValueError):
    """An invalid plan or fault matrix. The text names the entry."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One class in a plan."""

    name: str
    target: str
    """Figure of docs/explanation/reliability.md that the class serves ("T-1")."""
    seconds: float
    limit_s: float
    """Time (s) after which the runner kills the class and it fails."""
    lane: int = 1
    """Lanes run in parallel, the entries of one lane in order. A lane that is done takes the last entry of
    another lane."""
    seed: int = 1
    daily: bool = False
    """Use new seeds each day, so that different nights test different cases."""
    required: bool = True
    """Whether the class fails if this host lacks what it needs. If false, it is skipped."""
    private_mounts: bool = False
    """Run in a private mount namespace, so that its mounts disappear with it. Needs root."""
    in_memory: bool = False
    """Keep scratch files in a tmpfs, where mounts are allowed. For classes with many files that test nothing
    about disks: ext4 takes a millisecond to create a file in a directory from which thousands were just
    deleted."""
    settings: dict[str, Any] = {}
    floors: dict[str, int] = {}
    """Minimum counts, over at most ROUNDS_MAX rounds, since a slow host needs longer for the same work."""
    ends_at_floors: bool = False
    """The class ends as soon as all floors are reached. A fast host is done early, and a slow host has the
    time it needs. For classes that can stop at any point."""
    distinct: list[str] = []
    """Counts of distinct things. Two rounds may count the same things, so the larger count is taken, not the
    sum."""

    def seed_on(self, day: date) -> int:
        """Return the seed of the first round on `day`."""
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
    """Names of the plans that must have a case of it."""
    classes: list[str] = []
    """Classes with cases of this row."""
    later: str = ""
    """Part of ringlog that the row needs and that is not built yet. Such a row has no class."""


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    entry: list[Entry]
    passes: int = 1


class _FaultFile(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as read from its file."""

    name: str
    entries: tuple[Entry, ...]
    passes: int = 1
    """How often the plan is repeated, each time with other seeds. 0: until interrupted."""
    by_name: dict[str, Entry] = field(default_factory=dict)

    def lanes(self) -> dict[int, list[Entry]]:
        """Return the entries by lane, in order."""
        found: dict[int, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.lane, []).append(entry)
        return found


def load_plan(name: str) -> Plan:
    """Read `plans/NAME.toml`. Raises PlanError."""
    path = PLANS / f"{name}.toml"
    if not path.is_file():
        raise PlanError(
            f"no plan {name}; there are {', '.join(sorted(p.stem for p in PLANS.glob('*.toml')))}"
        )
    read = _read(path, _PlanFile)
    names = [entry.name for entry in read.entry]
    if len(set(names)) != len(names):
        raise PlanError(f"{path.name}: each class must be listed once")
    return Plan(name, tuple(read.entry), read.passes, {entry.name: entry for entry in read.entry})


def load_faults() -> tuple[Fault, ...]:
    """Read the fault matrix. Raises PlanError."""
    faults = tuple(_read(FAULTS, _FaultFile).fault)
    for fault in faults:
        if bool(fault.later) == bool(fault.classes):
            raise PlanError(f"{fault.id}: exactly one of `classes` and `later` must be set")
    if len({fault.id for fault in faults}) != len(faults):
        raise PlanError("each fault id must be listed once")
    return faults


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise PlanError(f"{path.name}: {e}") from e
