"""Fails every changing disk call of twelve workloads with five errors, once or permanently (RF-37).

A run mounts the workload's disk, starts the engine, fails the k-th changing call of the act, and removes the
fault. Then it ends the engine by a kill or a power loss, and judges the state after a start (judge.py). Syncs
may also do nothing (RF-44), and directories may be impossible to sync (RF-56).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from chaos.rigs.judge import KILL, CrashKind, check, observe
from chaos.rigs.model import Model
from chaos.sweeps.house import VISIBLE, Down, FaultyEngine, Image
from chaos.sweeps.judge import CHANCE, ENDS, Known, end_and_judge
from chaos.sweeps.workloads import BY_NAME, Workload
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.testing.disk import DiskFault, FaultyDisk
from ringlog.testing.faulty_disk import Kind, OpClass

ERRORS: tuple[Kind, ...] = ("EIO", "ENOSPC", "EAGAIN", "ESTALE", "short")
"""Errors of failed calls. `short` applies to writes only."""
DEEP_EVERY = 5
assert set(ERRORS) <= set(get_args(Kind))


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `nth` counts the calls of class `op` in the act, from 1."""

    workload: str
    op: OpClass
    nth: int
    kind: Kind
    always: bool
    end: CrashKind
    salt: int = 0
    """Distinguishes cases whose power loss leaves random data."""

    @property
    def seed(self) -> int:
        """Seed of the random choices of this case. It is the same when the case runs again."""
        return zlib.crc32(str(self).encode())

    def __str__(self) -> str:
        end = f"{ENDS.index(self.end)}" + (f":{self.salt}" if self.salt else "")
        return f"call:{self.workload}:{self.op}:{self.nth}:{self.kind}:{int(self.always)}:{end}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the result of `str`. Raises ValueError."""
        _, workload, op, nth, kind, always, end, *salt = text.split(":")
        made: Any = (workload, op, int(nth), kind, bool(int(always)), ENDS[int(end)], *map(int, salt))
        return cls(*made)

    def with_ends(self, count: int, seeds: int = 1) -> list[Case]:
        """Return this case with `count` ends, and the random end `seeds` times."""
        first = ENDS.index(self.end)
        ends = (ENDS[first:] + ENDS[:first])[:count]
        return [
            replace(self, end=end, salt=salt) for end in ends for salt in range(seeds if end == CHANCE else 1)
        ]

    def rows(self) -> tuple[str, ...]:
        """Return the rows of the fault matrix that this case covers."""
        found = ["RF-37"]
        if self.op == "read":
            return ("RF-51",)
        if self.op == "write":
            found.append("RF-40" if self.kind == "short" else "RF-39")
        if self.op == "size":
            found.append("RF-46")
        if self.op in {"rename", "dir_sync"} and self.workload in {
            "checkpoint",
            "snapshots",
            "relocation",
            "remake",
        }:
            found.append("RF-54")
        if self.op == "unlink" and self.workload in {"drop", "remake"}:
            found.append("RF-55")
        return tuple(found)


class CountingDisk(FaultyDisk):
    """A FaultyDisk that records the classes of its calls in order."""

    def __init__(self, inner: Any, *plan: DiskFault) -> None:
        super().__init__(inner, *plan)
        self.made: list[tuple[OpClass, int]] = []
        self.looked: list[tuple[OpClass, int]] = []
        """Calls that read, list or check."""

    def _due(self, op: OpClass, *, changes: bool = True) -> DiskFault | None:
        due = super()._due(op, changes=changes)
        if changes:
            self.made.append((op, self.calls[op]))
        elif op == "read":
            self.looked.append((op, self.calls[op]))
        return due


def calls_of(workload: Workload, image: Image) -> list[tuple[OpClass, int]]:
    """Return (class, number within the class) of the changing calls of a workload's act without faults."""
    house = begin(workload, image, CountingDisk)
    act(workload, house)
    if house.model.failed or not house.model.acked:
        raise GuaranteeBroken(f"{workload.name} fails without a fault")
    found: list[tuple[OpClass, int]] = house.faulty.made
    return found


def looks_of(workload: Workload, image: Image) -> list[tuple[OpClass, int]]:
    """Return (class, number within the class) of the calls that read, list or check."""
    house = begin(workload, image, CountingDisk)
    act(workload, house)
    found: list[tuple[OpClass, int]] = house.faulty.looked
    return found


def begin(workload: Workload, image: Image, wrap: Any = FaultyDisk) -> FaultyEngine:
    """Return a house at the start of the act. The call counts of its disk start at 0."""
    house = FaultyEngine(image, wrap)
    if not workload.starts:
        house.start()
    house.faulty.calls.clear()
    house.faulty.made, house.faulty.looked = [], []
    return house


def act(workload: Workload, house: FaultyEngine) -> None:
    """Run the act. It ends early if the shard does not come back."""
    try:
        workload.act(house)
    except (Down, *VISIBLE):
        house.model.failed += 1


def cases(calls: dict[str, list[tuple[OpClass, int]]]) -> Iterator[Case]:
    """Yield every call with every error, once and permanently, with one end.

    `with_ends` adds the other ends.
    """
    number = 0
    for workload, made in calls.items():
        for (op, nth), kind, always in itertools.product(made, ERRORS, (False, True)):
            if kind == "short" and (op != "write" or always):
                continue
            number += 1
            yield Case(workload, op, nth, kind, always, ENDS[number % len(ENDS)])


def read_cases(looks: dict[str, list[tuple[OpClass, int]]]) -> Iterator[Case]:
    """Yield every reading call with EIO, once and permanently."""
    number = 0
    for workload, made in looks.items():
        for (op, nth), always in itertools.product(made, (False, True)):
            number += 1
            yield Case(workload, op, nth, "EIO", always, ENDS[number % len(ENDS)])


def run_case(case: Case, image: Image) -> FaultyEngine:
    """Run and judge one case. Raises GuaranteeBroken."""
    house = _fault(case, image)
    end_and_judge(house, case.end, case.seed, deep=case.seed % DEEP_EVERY == 0)
    return house


def run_ends(
    chosen: list[Case], image: Image, known: Known, found: Callable[[str, Case], None]
) -> Model | None:
    """Run a case once and judge it with each end; call `found(what, case)` for each broken guarantee.

    Returns the model after the act, or None if the act itself broke a guarantee.
    """
    try:
        house = _fault(chosen[0], image)
    except AssertionError as e:  # GuaranteeBroken, and SyncOrderViolation of the monitored disk
        found(str(e), chosen[0])
        return None
    told = house.model.copy()
    # The end by a kill reads the state from the engine itself, so it runs last, in the original house.
    for case in sorted(chosen, key=lambda case: case.end == KILL):
        ended = house if case.end == KILL else house.twin()
        try:
            end_and_judge(ended, case.end, case.seed, deep=case.seed % DEEP_EVERY == 0, known=known)
        except AssertionError as e:
            found(str(e), case)
    return told


def _fault(case: Case, image: Image) -> FaultyEngine:
    """Return a house after the act of a case, with the fault removed."""
    workload = BY_NAME[case.workload]
    house = begin(workload, image)
    house.faulty.plan = [DiskFault(case.op, case.nth, case.kind, case.always)]
    try:
        act(workload, house)
    except (RinglogError, AssertionError, LookupError, TypeError, ValueError) as e:
        raise GuaranteeBroken(
            f"{type(e).__name__} instead of a visible failure: {e} {getattr(e, 'detail', '')}"
        ) from e
    house.faulty.plan = []
    return house


# -- syncs that do nothing ----------------------------------------------------------------------------


LIE = CrashKind("lie", is_power_loss=True, is_lie=True)


class LyingDirectories(FaultyDisk):
    """A file system that cannot sync directories: the call succeeds, but a power loss takes the names."""

    def sync_dir(self, path: str) -> None:
        if self._due("dir_sync") is None:
            self.inner.list_dir(path)


def run_lie(workload: Workload, image: Image, seed: int, *, directories: bool) -> bool:
    """Run a workload whose syncs (of all files, or of directories) do nothing, then lose power.

    Acknowledged records may be lost. No record may be invented, duplicated, moved or incomplete, and no
    number of a lost record may be reused silently. Returns False if the engine reports that it cannot
    continue. Raises GuaranteeBroken.
    """
    house = begin(workload, image, LyingDirectories if directories else FaultyDisk)
    house.base.ignore_syncs = not directories
    act(workload, house)
    house.base.ignore_syncs = False
    try:
        house.world.power_loss(seed)
        house.monitor.power_loss(house.base.exists)
        house.faulty.paths.clear()
        house.start()
        house.model.forget_acks()
        check(house.model, observe(house.world), LIE)
    except RinglogError:
        return False  # reported: an operator restores a backup
    except AssertionError as e:
        if "frames end at" in str(e) or (directories and "is missing before" in str(e)):
            return False  # a reader reports a file that is missing or has no contents
        raise GuaranteeBroken(f"after syncs that did nothing: {type(e).__name__}: {e}") from e
    return True
