"""Log files that are missing at a start are known from the register, including the newest file (RF-76).

A missing file stops its shard, and the error names the file. When the file is restored, all records are
there.
"""

from __future__ import annotations

import pytest

from ringlog.errors import CorruptData
from ringlog.storage.log_register import ENTRY_BYTES, read_register
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from tests.support.checkpoint_world import checkpoint, checkpoint_all, fill, findings, state, wal_files
from tests.support.disk_files import create_file
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world

REGISTER = f"{DATA}/meta/log-00"


@pytest.fixture
def world():
    return new_world()


def take_away(world: World, paths: list[str]) -> dict[str, bytes]:
    """Remove files. Return their contents, so that they can be restored."""
    held = {path: world.disk.contents()[path] for path in paths}
    for path in paths:
        world.disk.unlink(path)
    return held


def put_back(world: World, held: dict[str, bytes]) -> None:
    for path, data in held.items():
        create_file(world.disk, path, data)


def logs(world: World, shard: int = 0) -> list[str]:
    return [f"{DATA}/wal/shard-{shard:02d}/{name}" for name in wal_files(world, shard)]


def newest(world: World, shard: int = 0) -> str:
    """Return the newest log file that contains data."""
    used = [path for path in logs(world, shard) if world.disk.contents()[path].strip(b"\0")]
    return max(used, key=lambda path: [int(part) for part in path[:-4].split("-")[-2:]])


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("what", ["the newest", "all"])
@pytest.mark.parametrize("snapshots", [0, 1, 3])
def test_a_missing_log_file_stops_its_shard_and_nothing_is_lost_when_it_is_restored(
    world, how, what, snapshots, tmp_path
):
    for _ in range(snapshots):
        fill(world)
        checkpoint(world)
    fill(world)
    before = state(world)
    world.stop() if how == "stop" else world.kill()
    gone = [newest(world)] if what == "the newest" else logs(world)
    assert findings(world, tmp_path / "whole") == []
    held = take_away(world, gone)
    assert any("WAL file" in each and "missing" in each for each in findings(world, tmp_path / "damaged"))
    for _ in range(2):  # an attempt changes nothing
        with pytest.raises(CorruptData, match="WAL file is missing") as refused:
            world.start()
        world.kill()
    assert f"{DATA}/{refused.value.detail['file']}" in gone
    assert "restore the file" in refused.value.detail["do"]
    for path in [path for path in logs(world) if path not in held]:
        assert not world.disk.contents()[path].strip(b"\0") or path not in gone
    put_back(world, held)
    assert findings(world, tmp_path / "again") == []
    world.start()
    assert state(world) == before


def test_a_directory_without_log_is_new_only_if_no_log_was_ever_written(world):
    fresh = new_world()
    assert (
        fresh.put_topic("a", durability="fsync").topic_id == world.put_topic("a", durability="fsync").topic_id
    )
    world.kill()
    take_away(world, logs(world))
    with pytest.raises(CorruptData, match="WAL file is missing"):
        world.start()


def test_other_shards_continue_when_the_log_of_one_is_missing():
    world = new_world(shards=2)
    fill(world, topics="abcdef")
    names = {shard: {t.name for t in run.core.directory.by_id.values()} for shard, run in world.runs.items()}
    before = state(world)
    world.kill()
    take_away(world, logs(world, 1))
    world.marks, world.published = {shard: type(world.marks[0])() for shard in (0, 1)}, {}
    world.boot_incarnation = world.incarnation + 1
    world.start_shard(0)
    with pytest.raises(CorruptData, match="WAL file is missing"):
        world.start_shard(1)
    assert state(world) == {name: before[name] for name in names[0]}


@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 3), (3, 2)])
def test_the_log_of_another_number_of_shards_is_required_until_all_absorbed_it(old, new):
    world = new_world(shards=old)
    fill(world, topics="abcdef")
    world.kill()
    held = take_away(world, [newest(world, old - 1)])
    with pytest.raises(CorruptData, match="WAL file is missing"):
        world.start(new)
    world.kill()
    put_back(world, held)
    world.start(new)
    before = state(world)
    world.kill()
    held = take_away(world, list(held))
    with pytest.raises(CorruptData, match="WAL file is missing"):
        world.start(new)
    world.kill()
    put_back(world, held)
    world.start(new)
    for _ in range(3):
        fill(world, topics="abcdef", rounds=1)
        checkpoint_all(world)
    before = state(world)
    for _ in range(2):
        world.stop()
        world.start(new)
        assert state(world) == before


@pytest.mark.slow
def test_a_start_that_dies_at_any_disk_call_causes_no_damage(world):
    """The register never names a file that may not exist."""
    fill(world)
    before = {name: world.records(name) for name in "abc"}
    world.kill()
    for op in ("write", "data_sync", "full_sync", "dir_sync", "rename", "open"):
        for has_register in (True, False):
            for nth in range(1, 40):
                disk = world.disk.copy()
                if not has_register:
                    disk = old_directory(world)
                faulty = FaultyDisk(disk, DiskFault(op, nth, "halt"))
                died = World(faulty, file_bytes=1 << 20, incarnation=world.incarnation)
                try:
                    died.start()
                except Halted:
                    pass
                else:
                    break
                for seed in range(3):
                    after = World(disk.copy(), file_bytes=1 << 20, incarnation=world.incarnation + 1)
                    after.power_loss(seed=seed)
                    after.start()
                    assert {name: after.records(name) for name in "abc"} == before, (op, nth, seed)
            else:
                raise AssertionError("a start makes fewer calls than this")


def old_directory(world: World) -> SimulatedDisk:
    """Return the same data as an engine without registers left it."""
    kept = {path: data for path, data in world.disk.contents().items() if path != REGISTER}
    disk = SimulatedDisk(DATA, f"{DATA}/meta", *sorted({path.rpartition("/")[0] for path in kept}))
    for path, data in kept.items():
        if path.endswith(".log") and data.strip(b"\0"):
            data = without_flag(data)
        create_file(disk, path, data)
    return disk


def without_flag(data: bytes) -> bytes:
    """Return a log file without the header flag that a register exists."""
    import xxhash

    head = bytearray(data[:4088])
    head[112] &= ~2 & 0xFF
    return bytes(head) + xxhash.xxh3_64_intdigest(bytes(head)).to_bytes(8, "little") + data[4096:]


def test_a_directory_without_register_opens_and_gets_one(world, tmp_path):
    fill(world)
    checkpoint(world)
    fill(world)
    before = {name: world.records(name) for name in "abc"}
    world.kill()
    again = World(old_directory(world), file_bytes=1 << 20, incarnation=world.incarnation)
    again.start()
    assert {name: again.records(name) for name in "abc"} == before
    assert findings(again, tmp_path / "old") == []
    assert read_register(again.disk, DATA, 0).file == again.runs[0].core.log.file_id
    again.kill()
    take_away(again, [newest(again)])
    with pytest.raises(CorruptData, match="WAL file is missing"):
        again.start()


def test_a_missing_register_is_detected_from_its_log(world, tmp_path):
    fill(world)
    before = state(world)
    world.kill()
    held = take_away(world, [REGISTER])
    with pytest.raises(CorruptData, match="register is missing") as refused:
        world.start()
    assert refused.value.detail["file"] == "meta/log-00"
    assert any("meta/log-00" in each for each in findings(world, tmp_path / "damaged"))
    world.kill()
    put_back(world, held)
    world.start()
    assert state(world) == before


@pytest.mark.parametrize("entries", [[0], [0, 1]])
def test_a_damaged_register_needs_one_valid_entry(world, entries, tmp_path):
    fill(world)
    checkpoint(world)  # rotates the log
    before = state(world)
    world.kill()
    fd = world.disk.open_for_overwrite(REGISTER)
    for entry in entries:
        world.disk.write_at(fd, [b"\xee"], entry * ENTRY_BYTES + 50)
    world.disk.close(fd)
    assert bool(findings(world, tmp_path / "damaged")) is (len(entries) == 2)
    if len(entries) == 2:
        with pytest.raises(CorruptData, match="log register has no valid entry"):
            world.start()
        return
    world.start()
    assert state(world) == before
