"""`wal.corruption = truncate`: losses are reported, intact data is kept, and no identity is reused.

No seq, topic id or epoch is assigned a second time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame.layout import FrameType
from ringlog.limits import WAL_HEADER_BYTES
from tests.support.checkpoint_world import checkpoint, fill, findings, state, wal_files
from tests.support.disk_files import damage_file
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import new_world, restart

QUARANTINE = f"{DATA}/quarantine"


@pytest.fixture
def world():
    return new_world()


def log_of(world: World) -> str:
    """Return the newest log file that contains data."""
    paths = [f"{DATA}/wal/shard-00/{name}" for name in wal_files(world)]
    used = [path for path in paths if world.disk.contents()[path].strip(b"\0")]
    return max(used, key=lambda path: [int(part) for part in path[:-4].split("-")[-2:]])


def rot_snapshots(world: World) -> list[str]:
    paths = [path for path in world.disk.contents() if "/snapshot-" in path]
    for path in paths:
        damage_file(world.disk, path, 60, b"\xff" * 8)
    return paths


def offsets(world: World, path: str, kind: FrameType) -> list[int]:
    data = world.disk.contents()[path]
    batch = frames.scan(data[: len(data.rstrip(b"\0")) + 7 & ~7], WAL_HEADER_BYTES)
    return batch.offsets[frames.types_of(batch.words) == kind].tolist()


def start(world: World, *, is_lenient: bool) -> None:
    world.is_lenient = is_lenient
    world.start()


def settles(world: World, root: Path) -> None:
    """Check that the result of a lenient start survives strict starts and checkpoints."""
    before = state(world)
    for how in ("kill", "stop", "power"):
        world.is_lenient = False
        restart(world, how)
        assert state(world) == before, how
    for _ in range(3):
        checkpoint(world)
        world.put_topic("rolls", durability="fsync")
        world.append("rolls", [b"x"], producer=77)
    restart(world, "kill")
    after = state(world)
    assert {name: after[name] for name in before} == before
    assert findings(world, root / "laid") == []


@pytest.mark.parametrize("own", [True, False])
def test_with_damaged_snapshots_the_records_of_segments_are_kept_and_no_identity_is_reused(
    world, own, tmp_path
):
    storage = {"own_segment_bytes": 0 if own else 1 << 30}
    for _ in range(3):
        fill(world)
        checkpoint(world, **storage)
    world.append("c", [b"in the log"])
    before = {name: (world.topic(name).topic_id, world.records(name)) for name in "abc"}
    used = world.runs[0].core.directory.last_identity
    world.kill()
    rotten = rot_snapshots(world)
    with pytest.raises(CorruptData, match="missing"):
        start(world, is_lenient=False)
    world.kill()
    start(world, is_lenient=True)
    found = {topic.topic_id: topic for topic in world.runs[0].core.directory.by_id.values()}
    for topic_id, records in before.values():
        topic = found[topic_id]
        assert world.records(topic.name) == records, "the records must be readable under the new name"
        assert topic.count == len(records)
        assert topic.lost[-1][0] == records[-1][0] + 1 if topic.lost else True
    assert all(world.disk.exists(path.replace(DATA, QUARANTINE, 1)) for path in rotten)
    for name in "abc":
        info = world.put_topic(name, durability="fsync")
        assert info.topic_id > used[0]
        assert info.epoch > used[1]
        assert world.append(name, [b"another life"], producer=9) == 1
    for topic_id, records in before.values():
        assert world.append(found[topic_id].name, [b"goes on"], producer=9) > records[-1][0]
    settles(world, tmp_path)


@pytest.mark.parametrize("place", ["body", "header"])
def test_a_damaged_creation_leaves_a_topic_with_a_reported_loss_and_its_identity_is_not_reused(
    world, place, tmp_path
):
    world.put_topic("before", durability="fsync")
    world.put_topic("a", durability="fsync")
    for i in range(3):
        world.append("a", [b"%d" % i])
    world.append("before", [b"x"])
    world.tick(0.2)
    topic_id, epoch = world.topic("a").topic_id, world.topic("a").epoch
    used = world.runs[0].core.directory.last_identity
    world.kill()
    path = log_of(world)
    damage_file(
        world.disk, path, offsets(world, path, FrameType.TOPIC_CREATE)[1] + (90 if place == "body" else 30)
    )
    with pytest.raises(CorruptData, match="damaged"):
        start(world, is_lenient=False)
    world.kill()
    start(world, is_lenient=True)
    topic = world.runs[0].core.directory.by_id[topic_id]
    assert topic.epoch == epoch
    assert topic.lost[0][0] == 1
    assert topic.lost[-1][1] >= 3
    assert [seq for seq, _ in world.records("before")] == [], "the record followed the damage"
    assert world.topic("before").lost[0][0] == 1
    again = world.put_topic("a", durability="fsync")
    assert again.topic_id > used[0]
    assert again.epoch > used[1]
    assert world.append("a", [b"another life"], producer=9) == 1
    assert world.disk.exists(path.replace(DATA, QUARANTINE, 1)), "valid frames after the damage must be kept"
    settles(world, tmp_path)


def test_records_of_a_topic_created_in_a_lost_file_are_read_under_another_name(world, tmp_path):
    world.put_topic("a", durability="fsync")
    world.append("a", [b"lost"])
    world.tick(0.2)
    path = log_of(world)
    world.ask(world.runs[0], m.CheckpointOpen(True))
    world.append("a", [b"kept"])
    topic_id = world.topic("a").topic_id
    world.kill()
    world.disk.unlink(path)
    start(world, is_lenient=True)
    topic = world.runs[0].core.directory.by_id[topic_id]
    assert topic.name == f"topic-{topic_id}"
    assert topic.lost[0] == (1, 1)
    assert world.records(topic.name) == [(2, b"kept")]
    settles(world, tmp_path)


def test_seqs_in_unreadable_bytes_are_not_reused(world, tmp_path):
    """The last frames of two topics are zeroed. One of the topics has a later append."""
    for name in "abc":
        world.put_topic(name, durability="fsync")
        world.append(name, [b"first"])
    begin = len(world.disk.contents()[log_of(world)].rstrip(b"\0")) + 7 & ~7
    world.append("a", [b"lost", b"lost", b"lost"])
    world.append("b", [b"lost"])
    stop = len(world.disk.contents()[log_of(world)].rstrip(b"\0")) + 7 & ~7
    world.append("b", [b"seen"])
    world.tick(0.2)
    path = log_of(world)
    world.kill()
    damage_file(world.disk, path, begin, bytes(stop - begin))
    start(world, is_lenient=True)
    for name, head in (("a", 4), ("b", 3), ("c", 1)):
        at = world.append(name, [b"next"], producer=9)
        assert at > head, name
        assert world.topic(name).lost == [(2, at - 1)], name
    assert world.topic("b").lost == [(2, 3)], "a later frame contains the head"
    settles(world, tmp_path)


def test_a_missing_newest_file_with_truncate_reuses_no_seq(world, tmp_path):
    fill(world)
    checkpoint(world)
    fill(world)
    heads = {name: world.topic(name).head_seq for name in "abc"}
    used = world.runs[0].core.directory.last_identity
    world.kill()
    world.disk.unlink(log_of(world))
    start(world, is_lenient=True)
    for name, head in heads.items():
        assert [seq for seq, _ in world.records(name)] == list(range(1, 13))
        assert world.append(name, [b"next"], producer=9) > head
    assert world.put_topic("new", durability="fsync").topic_id > used[0]
    settles(world, tmp_path)


def test_an_intact_directory_starts_with_truncate_as_without(world):
    fill(world)
    checkpoint(world)
    fill(world)
    before, used = state(world), world.runs[0].core.directory.last_identity
    for how in ("kill", "stop"):
        world.is_lenient = True
        restart(world, how)
        assert state(world) == before
        assert world.runs[0].core.directory.last_identity == used
    assert not world.disk.exists(QUARANTINE)
