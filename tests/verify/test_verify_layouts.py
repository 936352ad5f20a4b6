"""The verifier on logs whose number of shards changed: files that all shards absorbed may be missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.placement import shard_of
from ringlog.segment.layout import SUFFIXES
from ringlog.testing.disk import SimulatedDisk
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import FileReport
from ringlog.verify.log_order import is_covered
from ringlog.verify.snapshot_decoder import SnapshotFacts
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import started
from tests.support.world_checkpoints import checkpoint


def snapshot(shard: int, shards: int, floor: int) -> FileReport:
    report = FileReport(f"meta/snapshot-{shard:02d}.1", "snapshot")
    report.header = {"shard": shard, "shards": shards, "number": 1}
    report.extra = {"facts": SnapshotFacts(0, floor, [], [])}
    return report


def test_a_file_may_be_missing_if_all_shards_of_another_layout_absorbed_it():
    report = FileReport("wal/shard-01/wal-18-0.log", "wal")
    report.header = {"shard": 1, "shards": 2}
    assert is_covered(7, report, [snapshot(1, 2, 9)])
    assert is_covered(7, report, [snapshot(0, 1, 9)])
    assert not is_covered(7, report, [snapshot(0, 1, 5)])
    assert not is_covered(7, report, [snapshot(0, 3, 9), snapshot(2, 3, 9)])
    assert is_covered(7, report, [snapshot(0, 3, 9), snapshot(2, 3, 9), snapshot(1, 3, 9)])


NAMES = [f"t{i}" for i in range(6)]


def lay(disk: SimulatedDisk, path: str, target: Path) -> None:
    """Copy a simulated directory to a real one."""
    target.mkdir()
    for name in disk.list_dir(path):
        try:
            fd = disk.open_read(f"{path}/{name}")
        except RinglogError:
            lay(disk, f"{path}/{name}", target / name)
            continue
        (target / name).write_bytes(disk.read_at(fd, disk.size(fd), 0))
        disk.close(fd)


def verified(world: World, target: Path, **options: Any) -> Verification:
    world.kill()
    lay(world.disk, DATA, target)
    return verify_directory(str(target), jobs=1, **options)


@pytest.fixture
def world() -> World:
    """A world that one shard wrote and absorbed in two snapshots, and that was then started with three
    shards."""
    disk = SimulatedDisk(DATA)
    disk.make_dir(f"{DATA}/meta")
    disk.sync_dir(DATA)
    made = started(disk=disk, file_bytes=1 << 20)
    for _ in range(3):
        for name in NAMES:
            made.put_topic(name, durability="fsync")
            made.append(name, [b"1", b"2"])
        checkpoint(made)
    made.put_topic("late", durability="fsync")
    made.append("late", [b"in a log that every shard has to absorb"])
    made.kill()
    made.start(3)
    return made


@pytest.mark.parametrize("shard", range(3))
def test_snapshots_of_an_earlier_layout_count_while_some_shards_have_none(world, tmp_path, shard):
    """The older snapshot of a shard with the same number still counts for topics of the other shards."""
    checkpoint(world, shard)
    found = verified(world, tmp_path / "data")
    assert not found.is_damaged, found.findings
    heads = {topic.topic: topic.head for topic in found.topics}
    assert heads == dict.fromkeys(NAMES, 6) | {"late": 1}


def test_a_missing_segment_listed_by_an_earlier_layout_is_damage(world, tmp_path):
    """Its records exist nowhere. The report also covers topics of the shards without a snapshot."""
    checkpoint(world, 0)
    stems = {ref.stem for run in world.runs.values() for ref in run.core.checkpoint.segments.refs.values()}
    for path in (f"{DATA}/{stem}{suffix}" for stem in stems for suffix in SUFFIXES):
        if world.disk.exists(path):
            world.disk.unlink(path)
    found = verified(world, tmp_path / "data")
    assert found.is_damaged
    assert {topic.topic for topic in found.topics if topic.gaps} == set(NAMES)


def test_a_deleted_topic_is_not_reported_from_its_remaining_log(world, tmp_path):
    """The snapshot of the topic's shard has no row of it."""
    shard = shard_of(world.topic("late").topic_id, 3)
    world.request(m.TopicDelete("late"))
    for _ in range(3):
        checkpoint(world, shard)
    found = verified(world, tmp_path / "data")
    assert not found.is_damaged, found.findings
    assert {topic.topic for topic in found.topics} == set(NAMES)


def test_the_rest_of_a_deleted_topics_segment_is_no_damage(tmp_path):
    """The snapshot of the single shard stays valid while one of the three shards has no snapshot.

    The topic was deleted later. A power loss or an error ended the removal of its segment before the index
    was removed.
    """
    world = started()
    for name in ("large", "other"):
        world.put_topic(name, durability="fsync")
        for _ in range(40):
            world.append(name, [b"x" * 30_000])
    checkpoint(world)
    topic_id = world.topic("large").topic_id
    directory = f"{DATA}/topics/{topic_id:016x}"
    parts = world.disk.list_dir(directory)
    world.kill()
    world.start(3)
    world.request(m.TopicDelete("large"))
    shard = shard_of(topic_id, 3)
    checkpoint(world, shard)
    (number,) = [ref.number for ref in world.runs[shard].core.checkpoint.segments.refs.values()]
    assert world.ask(world.runs[shard], m.SegmentsChange([], [number])).accepted
    checkpoint(world, shard)
    for part in parts:
        if world.disk.exists(f"{directory}/{part}") and not part.endswith(".idx"):
            world.disk.unlink(f"{directory}/{part}")
    assert [part[-4:] for part in world.disk.list_dir(directory)] == [".idx"]
    (tmp_path / "cold").mkdir()
    found = verified(world, tmp_path / "data", cold_dir=str(tmp_path / "cold"))
    assert not found.is_damaged, found.findings
    assert {topic.topic for topic in found.topics} == {"other"}
