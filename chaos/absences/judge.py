"""Cases of missing files: which file is missing at one start, the settings of that start, and the checks."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.rigs.judge import write_files
from chaos.rot import answers
from chaos.rot.cases import kind_of
from chaos.rot.specimen import COLD, OWNER, TOPICS, Specimen
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, RinglogError, TopicHalted
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import parse_stem
from ringlog.storage.layout import pack_file, parse_wal_name
from ringlog.testing.disk import SimulatedDisk
from ringlog.verify.directory import verify_directory
from tests.support.shard_world import DATA, ShardRunEnded, SimulatedBoardMarks, World
from tests.support.world_checkpoints import checkpoint

SAME, MORE_SHARDS, FEWER_SHARDS, NO_COLD = "same settings", "more shards", "fewer shards", "no cold tier"
NEVER_COLD = "never a cold tier"
"""No cold tier is configured, and the file that names its owner is deleted. Nothing suggests that a missing
file was relocated."""
MODES = (SAME, MORE_SHARDS, FEWER_SHARDS, NO_COLD, NEVER_COLD)
SHARDS = {SAME: 2, MORE_SHARDS: 3, FEWER_SHARDS: 1, NO_COLD: 2, NEVER_COLD: 2}
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Case:
    """One start without one file, and its settings."""

    path: str
    """The missing file. NOTHING: only the settings differ."""
    mode: str

    @property
    def name(self) -> str:
        """Readable name of the case, used to replay it."""
        return f"{self.mode}, without {self.path}"

    @property
    def kind(self) -> str:
        """Kind of the missing file, and whether it belongs to the hot or the cold tier."""
        if self.path == NOTHING:
            return NOTHING
        return f"{kind_of(self.path)} {'cold' if self.path.startswith(COLD) else 'hot'}"

    @property
    def fault(self) -> str:
        """Row of the fault matrix."""
        return "RF-121" if self.mode in {SAME, NEVER_COLD} else "RF-122"

    def away(self, specimen: Specimen) -> set[str]:
        """Return the paths that are missing at this start."""
        cold = {path for path in specimen.files if path.startswith(COLD)} if self.mode == NO_COLD else set()
        return {self.path, *cold} - {NOTHING}


def all_cases(specimen: Specimen) -> Iterator[Case]:
    """Yield every file with every mode, and every mode without a missing file.

    The file `engine` is excluded: the supervisor reads it, and these cases run no supervisor.
    """
    paths = [path for path in specimen.files if not path.endswith("/engine")]
    for mode in MODES:
        yield Case(NOTHING, mode)
        for path in paths:
            # If the newer snapshot is missing, the older one lists the relocated segment as a hot one.
            is_cold = path.startswith(COLD) or (mode == NEVER_COLD and "/snapshot-" in path)
            if not is_cold or mode not in {NO_COLD, NEVER_COLD}:
                yield Case(path, mode)


LATER_S = 1.0
CHECKPOINTS = 4
"""More than the number of retained snapshots: the last checkpoint drops the snapshot of the first."""
PRODUCER = 99
UNSYNCED = "gamma"
"""Topic of class `disk`. Its head may skip numbers that were reserved and not used."""
Numbers = dict[str, list[tuple[int, bytes]]]


class Judge:
    """One specimen, and the engine's answers when no file is missing."""

    def __init__(self, specimen: Specimen, scratch: Path) -> None:
        self.specimen = specimen
        self._scratch = scratch
        world = self._world(specimen.mount())
        world.start()
        self._truth = {name: answers.topic_of(world, name) for name in TOPICS}
        assert all(each.records and not each.error for each in self._truth.values()), self._truth

    def _world(self, disk: SimulatedDisk) -> World:
        world = answers.world_of(self.specimen, disk, cold=COLD, has_cold=True)
        world.reboot()
        return world

    def judge(self, case: Case) -> tuple[str, Counter[str]]:
        """Run a case. Returns what was wrong (empty if every guarantee held), and counts of the work done."""
        specimen, counts = self.specimen, Counter[str]()
        away = case.away(specimen)
        disk = specimen.mount({path: data for path, data in specimen.files.items() if path not in away})
        world = self._world(disk)
        world.has_cold = case.mode not in {NO_COLD, NEVER_COLD}
        if case.mode == NEVER_COLD:
            disk.unlink(OWNER)
        refused = self._start(world, SHARDS[case.mode])
        counts["starts"] += 1
        wrong = self._look(world, case, away, refused, counts)
        is_refused = bool(refused or counts["halted topics"] or counts["topics of which a part is away"])
        if not wrong and is_refused and not self._verifier_fails(disk, counts):
            wrong = "the engine refuses something, and the offline verifier finds nothing"
        if wrong:
            return wrong, counts
        written = self._use(world, counts)
        made = self._identities(world)
        world.kill()
        for path in away:
            if not disk.exists(path):  # the engine may have created it again
                disk.add_file(path, specimen.files[path])
        world.has_cold = True
        again = self._start(world, 2)
        counts["starts"] += 1
        if again:
            return f"does not start when {sorted(away)} is back: {again[0]}", counts
        return self._whole(world, written, made), counts

    # -- one start ------------------------------------------------------------------------------------

    def _start(self, world: World, shards: int) -> list[RinglogError]:
        """Start every shard that can start. Returns the errors of the others."""
        world.shards = shards
        world.boot_incarnation = world.incarnation + 1
        world.marks = {shard: SimulatedBoardMarks() for shard in range(shards)}
        world.published = {}
        refused: list[RinglogError] = []
        for shard in range(shards):
            try:
                world.start_shard(shard)
            except (CorruptData, DiskError) as e:
                refused.append(e)
        return refused

    def _look(
        self, world: World, case: Case, away: set[str], refused: list[RinglogError], counts: Counter[str]
    ) -> str:
        """Check the replies to clients while the file is missing.

        Returns what is wrong, or an empty string.
        """
        for error in refused:
            counts["shards that stop"] += 1
            if not _names(error, away):
                return f"a shard stops without naming what is away: {error}"
        if announced := _announced(world):
            return f"announced as lost: {announced}"
        for name, sound in self._truth.items():
            found = answers.topic_of(world, name)
            if found.state[:1] == ("none",):
                if not refused:
                    return f"topic {name} is not there: {found.state}"
                continue
            if isinstance(found.damage, TopicHalted):
                counts["halted topics"] += 1
                if not _names(found.damage, away):
                    return f"topic {name} is halted for something else: {found.damage}"
            elif found.error or found.damage:
                counts["topics of which a part is away"] += 1
                is_cold = "cold_unavailable" in found.error and any(map(_is_data, away))
                is_cold &= case.mode != NEVER_COLD or case.path.startswith(COLD)
                if not is_cold:
                    return f"topic {name}: {found.error or found.damage}"
            elif found.records != sound.records:
                return f"topic {name}: {len(found.records)} records of {len(sound.records)}, and no error"
            if name != UNSYNCED and found.state[:4] + found.state[8:] != sound.state[:4] + sound.state[8:]:
                return f"topic {name}: state {found.state} was {sound.state}"
        if case.path == NOTHING and (refused or counts["halted topics"]):
            return f"nothing is away, and the engine refuses: {refused}"
        return ""

    def _use(self, world: World, counts: Counter[str]) -> Numbers:
        """Append, create topics and take checkpoints, wherever the engine accepts it.

        Returns the acknowledged records.
        """
        written: Numbers = {}
        for n in range(CHECKPOINTS):
            for name in (*TOPICS, f"new-{n}"):
                payload = b"%s while it was away %d" % (name.encode(), n)
                try:
                    if name.startswith("new"):
                        world.put_topic(name, durability="fsync")
                    first = world.append(name, [payload], producer=PRODUCER)
                except (RinglogError, ShardRunEnded):
                    counts["writes refused"] += 1
                    continue
                written.setdefault(name, []).append((first, payload))
                counts["appends"] += 1
            world.clock.advance(LATER_S)
            for shard in list(world.runs):
                try:
                    checkpoint(world, shard)
                    counts["checkpoints"] += 1
                except RinglogError:
                    counts["checkpoints that failed"] += 1
        return written

    @staticmethod
    def _identities(world: World) -> dict[str, tuple[int, int]]:
        """Return (topic id, epoch) of every topic."""
        return {
            topic.name: (topic.topic_id, topic.epoch)
            for run in world.runs.values()
            for topic in run.core.directory.all_topics()
        }

    def _whole(self, world: World, written: Numbers, made: dict[str, tuple[int, int]]) -> str:
        """Check all records and numbers after the file is back.

        Returns what is missing, or an empty string.
        """
        if announced := _announced(world):
            return f"announced as lost when it is back: {announced}"
        identities = self._identities(world)
        for name, identity in made.items():
            if identities.get(name) != identity:
                return f"topic {name} was {identity} and is {identities.get(name)}"
        if len(set(identities.values())) < len(identities):
            return f"topics with one identity: {identities}"
        for name in {*TOPICS, *written}:
            found = answers.topic_of(world, name)
            before = self._truth[name].records if name in self._truth else []
            expected = [(seq, data) for seq, data, *_ in before] + written.get(name, [])
            records = [(seq, data) for seq, data, *_ in found.records]
            if records != expected:
                missing = sorted(set(expected) - set(records))[:4]
                why = found.error or found.damage or ""
                return f"topic {name}: of {len(expected)} records are missing {missing} {why}"
        for name in {*TOPICS, *written}:
            head = world.request(m.TopicState(name)).head_seq
            if world.append(name, [b"the next"], producer=PRODUCER + 1) != head + 1:
                return f"topic {name}: the next number is not {head + 1}"
        return ""

    # -- the verifier ---------------------------------------------------------------------------------

    def _verifier_fails(self, disk: SimulatedDisk, counts: Counter[str]) -> bool:
        """Whether the offline verifier reports damage. Call it before the directory is used."""
        root = self._scratch / "verified"
        try:
            held = disk.contents()
            write_files({path: held[path] for path in self.specimen.files if path in held}, root)
            counts["verifications"] += 1
            has_cold = (root / COLD[1:]).is_dir()
            found = verify_directory(
                str(root / DATA[1:]), jobs=1, cold_dir=str(root / COLD[1:]) if has_cold else ""
            )
            return found.is_damaged
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _announced(world: World) -> list[Any]:
    """Return the losses that recovery announced.

    UNSYNCED is excluded: its reserved numbers may be skipped.
    """
    found = [each for run in world.runs.values() for each in run.found.announced]
    return [each for each in found if each[0] != UNSYNCED]


def _names(error: Any, away: set[str]) -> bool:
    """Whether an error names one of these files."""
    text = f"{error} {error.detail}"
    names = {path.rpartition("/")[2] for path in away}
    stems = {path.rpartition(".")[0].removeprefix(f"{DATA}/") for path in away}
    numbers = {parse_wal_name(name) for name in names} - {None}
    ids = {str(pack_file(*number)) for number in numbers if number is not None}
    return any(each in text for each in (*names, *ids, *(stem for stem in stems if parse_stem(stem))))


def _is_data(path: str) -> bool:
    return path.startswith(COLD) or path.endswith(DATA_SUFFIX)
