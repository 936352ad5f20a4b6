"""Damage in records of class `memory` does not prevent a start.

The damaged records are lost with a tombstone. All other records of the log stay, and no seq is assigned
twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.rot.answers import read_all
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame.layout import W_TOPIC, FrameType
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage.extents import LogHighWatermark
from tests.support.checkpoint_world import checkpoint, findings, wal_files
from tests.support.disk_files import damage_file
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart


@pytest.fixture
def world():
    return new_world()


def filled(world: World) -> None:
    world.put_topic("kept", durability="fsync")
    world.put_topic("quick", durability="memory")
    for i in range(5):
        world.append("quick", [b"q%d" % i, b"Q%d" % i])
        world.append("kept", [b"k%d" % i])
    for _ in range(3):
        world.tick(0.2)


def read(world: World, name: str) -> list[int]:
    located = world.request(m.Locate(name, 0))
    mark = LogHighWatermark(*world.marks[world.run_of(name).shard].published)
    return [record[0] for record in read_all(world.disk, located, mark)]


def damage(world: World, nths: list[int], name: str = "quick", at: int = 90) -> None:
    """Change a byte of some appends of a topic, in the first log file that contains any."""
    paths = [f"{DATA}/wal/shard-00/{each}" for each in wal_files(world)]
    topic_id = world.topic(name).topic_id if world.runs else TOPICS[name]
    for path in paths:
        data = world.disk.contents()[path]
        batch = frames.scan(data[: len(data.rstrip(b"\0")) + 7 & ~7], WAL_HEADER_BYTES)
        which = (frames.types_of(batch.words) == FrameType.APPEND) & (batch.words[:, W_TOPIC] == topic_id)
        offsets = batch.offsets[which].tolist()
        if not offsets:
            continue
        fd = world.disk.open_for_overwrite(path)
        for nth in nths:
            world.disk.write_at(fd, [b"\xee"], offsets[nth] + at)
        world.disk.sync_file(fd)
        world.disk.close(fd)
        return
    raise AssertionError("the topic has no records in the log")


TOPICS = {"kept": 1, "quick": 2}


@pytest.mark.slow
@pytest.mark.parametrize("nths", [[0], [2], [1, 2], [4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("how", ["kill", "stop", "power"])
def test_damaged_records_of_class_memory_are_lost_with_a_tombstone(world, nths, how, tmp_path: Path):
    filled(world)
    world.stop() if how == "stop" else world.kill()
    if how == "power":
        world.power_loss(1)
    damage(world, nths)
    assert findings(world, tmp_path / "before") == []
    world.start()
    gone = sorted(seq for nth in nths for seq in (2 * nth + 1, 2 * nth + 2))
    left = [seq for seq in range(1, 11) if seq not in gone]
    for again in range(4):
        assert read(world, "kept") == [1, 2, 3, 4, 5]
        assert [seq for seq in read(world, "quick") if seq <= 10] == left
        lost = {seq for first, last in world.topic("quick").lost for seq in range(first, last + 1)}
        assert set(gone) <= lost
        assert not lost & set(left)
        assert findings(world, tmp_path / "after") == []
        if again < 2:
            restart(world, ("kill", "stop")[again])
        else:
            checkpoint(world)
            restart(world, "kill")
    assert world.append("quick", [b"next"], producer=9) > 10
    assert world.append("kept", [b"next"], producer=9) == 6


def test_unsynced_frames_around_a_damaged_record_are_copied(world):
    """They follow the last chain mark, and only the durable mark on the board covers them."""
    world.put_topic("kept", durability="fsync")
    world.put_topic("quick", durability="memory")
    for i in range(4):
        world.append("quick", [b"q%d" % i])
    world.append("kept", [b"k"])
    damage(world, [1])
    marks = world.marks
    incarnation = world.incarnation
    world.kill_shard(0)
    assert world.marks is marks
    world.start_shard(0)
    assert world.incarnation == incarnation + 1
    for _ in range(3):
        assert read(world, "quick") == [1, 3, 4]
        assert (2, 2) in world.topic("quick").lost
        assert read(world, "kept") == [1]
        restart(world, "kill")


@pytest.mark.parametrize(("name", "at"), [("kept", 90), ("quick", 20)])
def test_damage_that_may_affect_other_classes_stops_the_shard(world, name, at):
    """The cases are a record of class `fsync`, and an invalid header with an unknown topic."""
    filled(world)
    world.kill()
    damage(world, [2], name, at)
    with pytest.raises(CorruptData, match="damaged below its durable end"):
        world.start()


def test_a_torn_end_of_class_memory_is_cut(world):
    world.put_topic("quick", durability="memory")
    world.append("quick", [b"a"])
    for _ in range(3):
        world.tick(0.2)
    world.append("quick", [b"torn"])
    path = f"{DATA}/wal/shard-00/{wal_files(world)[0]}"
    end = len(world.disk.contents()[path].rstrip(b"\0"))
    damage_file(world.disk, path, end - 1, b"\xee")
    world.kill()
    world.reboot()
    world.start()
    assert read(world, "quick") == [1]
    assert world.runs[0].found.truncated_bytes > 0
