"""Twelve workloads that change files.

Each has a stage, which runs once, and an act, which runs in each case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaos.sweeps.house import MINUTE_S, FaultyEngine, Image
from ringlog.segment.layout import DATA as PART
from ringlog.storage.disk import Disk
from ringlog.supervision.identity import EngineIdentity
from tests.support.shard_world import DATA

BIG = 48 << 10
"""Size (bytes) of a record that leaves no space for a second one in the first log file of a house."""


NUMBERS = 1 << 20
"""First incarnation number after the stage. The numbers of a house are smaller."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`stage` runs without faults, `act` with one.

    With `starts` the act begins before the engine is started.
    """

    name: str
    stage: Callable[[FaultyEngine], None]
    act: Callable[[FaultyEngine], None]
    rows: tuple[str, ...] = ()
    starts: bool = False
    sweeps_lines: bool = False

    def image(self) -> Image:
        """Return the disk on which every run begins."""
        house = FaultyEngine()
        EngineIdentity(house.base, DATA).record_start("", NUMBERS)
        house.start()
        house.put("f", durability="fsync")
        house.put("d", durability="disk")
        house.append("f", 3, 1)
        house.append("d", 2)
        self.stage(house)
        house.wait(1.0)
        assert house.model.failed == 0, f"the stage of workload {self.name} failed without a fault"
        return house.image()


def _nothing(house: FaultyEngine) -> None:
    house.append("f", 1)


def _commit(house: FaultyEngine) -> None:
    house.append("f", 1)
    house.append("f", 2, 1, 3, size=300)
    house.append("d", 1)
    house.append("d", 2, 2)
    house.wait(0.2)
    house.append("f", 1, size=5_000)
    house.append("d", 1)
    house.wait(0.2)


def _rotate(house: FaultyEngine) -> None:
    for _ in range(3):
        house.append("f", 1, size=BIG)
        house.append("d", 1, size=BIG)
    house.wait(0.2)


def _topics(house: FaultyEngine) -> None:
    house.put("g", durability="fsync")
    house.append("g", 2)
    house.put("g", durability="fsync", ttl_ms=1 << 40)
    house.append("g", 1)
    house.drop("g")
    house.put("h", durability="fsync")
    house.append("h", 1)
    house.wait(0.2)


def _in_doubt(house: FaultyEngine) -> None:
    for _ in range(3):
        house.append("f", 2, size=900)
    house.append("d", 2, 1)


def _recover(house: FaultyEngine) -> None:
    house.try_to(house.start)
    house.append("f", 1)


def _logged(house: FaultyEngine) -> None:
    for _ in range(3):
        house.append("f", 4, 4)
        house.append("d", 4)


def _checkpoint(house: FaultyEngine) -> None:
    house.checkpoint()
    house.append("f", 1)


def _sealed(house: FaultyEngine) -> None:
    for _ in range(3):
        house.append("f", 6, 6, size=200)
        house.append("d", 4)
        house.checkpoint()


def _snapshots(house: FaultyEngine) -> None:
    for _ in range(3):
        house.append("f", 1)
        house.checkpoint()


def _delete(house: FaultyEngine) -> None:
    house.delete("f", set(range(2, 12)))
    house.delete("f", {17, 19, 23})
    house.delete("d", {3})
    house.append("f", 1)
    house.checkpoint()


def _sparse(house: FaultyEngine) -> None:
    _sealed(house)
    house.delete("f", set(range(2, 36)))
    house.checkpoint()


def _remake(house: FaultyEngine) -> None:
    house.reclaim()
    house.wait(MINUTE_S)
    house.checkpoint()
    house.reclaim()


def _dead(house: FaultyEngine) -> None:
    _sealed(house)
    house.delete("f", set(range(1, 41)))
    house.delete("d", set(range(1, 15)))
    house.checkpoint()


def _drop(house: FaultyEngine) -> None:
    house.reclaim()
    for _ in range(4):
        house.append("f", 1)
        house.checkpoint()
        house.wait(MINUTE_S)
        house.reclaim()


def _relocate(house: FaultyEngine) -> None:
    house.relocate()
    house.wait(400.0)
    house.relocate(hot_segments=0)


def _rotten(house: FaultyEngine) -> None:
    """Damage every data part in the hot tier, after an intact copy of each is in the cold tier."""
    _sealed(house)
    house.has_rot = True
    house.copies().require_store().claim()
    for ref in house.segments():
        house.copies().upload_index_parts(ref.stem)
        house.copies().upload_part(ref.stem + PART)
        path = f"{DATA}/{ref.stem}{PART}"
        fd = house.base.open_for_overwrite(path)
        house.base.write_at(fd, [b"rotten"], house.base.size(fd) - 100)
        house.base.sync_file(fd)
        house.base.close(fd)


def _scrub(house: FaultyEngine) -> None:
    house.scrub()
    house.scrub()


def _orderly(house: FaultyEngine) -> None:
    disk: Disk = house.faulty

    def identify() -> None:
        identity = EngineIdentity(disk, DATA)
        identity.record_start("", 4)
        identity.allocate_incarnation()

    for _ in range(2):
        house.try_to(house.world.stop)
        house.world.kill()
        house.try_to(identify)
        house.try_to(house.start)
        house.append("f", 1)


WORKLOADS = (
    Workload("commit", _nothing, _commit, ("RF-39", "RF-40"), sweeps_lines=True),
    Workload("rotation", _nothing, _rotate, ("RF-46",)),
    Workload("topics", _nothing, _topics),
    Workload("recovery", _in_doubt, _recover, starts=True, sweeps_lines=True),
    Workload("checkpoint", _logged, _checkpoint, ("RF-54",), sweeps_lines=True),
    Workload("snapshots", _sealed, _snapshots, ("RF-54",), sweeps_lines=True),
    Workload("deletes", _sealed, _delete),
    Workload("remake", _sparse, _remake, ("RF-54",), sweeps_lines=True),
    Workload("drop", _dead, _drop, ("RF-55",)),
    Workload("relocation", _sealed, _relocate, ("RF-54",), sweeps_lines=True),
    Workload("scrub", _rotten, _scrub),
    Workload("restart", _nothing, _orderly),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}
