"""Checkpoints over a real log lose and duplicate no record, also if the process dies in between."""

from __future__ import annotations

import msgspec
import pytest
from pyroaring import BitMap64

from ringlog import stop_points
from ringlog.actors.compactor.checkpoint import retire_snapshots
from ringlog.envelope.messages import RecordsDelete
from ringlog.errors import CorruptData, DiskError, Internal
from ringlog.storage import snapshot as snapshots
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted
from ringlog.types import Durability
from tests.support.compactor_shard import SmallShard, checkpoint, new_world
from tests.support.shard_world import DATA
from tests.support.shard_worlds import restart
from tests.support.stops import fails_at

STOPS = [name for name in stop_points.POINTS if name.startswith("compact_")]


def filled(topics=3, rounds=4, size=100):
    """Return a SmallShard with closed log files, and the expected {topic id: {seq: payload}}."""
    world = new_world()
    expected = {}
    for n in range(topics):
        world.put_topic(f"t{n}", durability="fsync")
    for round in range(rounds):
        fill(world, expected, topics, round, size)
    close_log(world)
    return SmallShard(world), expected


def fill(world, expected, topics, round, size=100):
    for n in range(topics):
        payloads = [f"{n}-{round}-{i}".encode().ljust(size, b".") for i in range(3 + n)]
        first = world.append(f"t{n}", payloads, durability=Durability.FSYNC)
        of_topic = expected.setdefault(world.topic(f"t{n}").topic_id, {})
        of_topic.update(zip(range(first, first + len(payloads)), payloads, strict=True))


def close_log(world):
    """Restart the shard: the next incarnation starts another file."""
    restart(world, "stop")


def newest(shard):
    return snapshots.load_snapshots(shard.world.disk, DATA, 0)[0][0]


def rows_of(snapshot):
    return {int(each): bytes(snapshot.row(i)) for i, each in enumerate(snapshot.ids)}


def wal_files(shard):
    return [name for name in shard.world.disk.list_dir(f"{DATA}/wal/shard-00") if name.endswith(".log")]


def test_a_checkpoint_seals_every_record_of_closed_files_and_its_snapshot_has_every_topic():
    """The snapshot has rows of exactly the topics that the shard reported (C8)."""
    shard, expected = filled()
    made = checkpoint(shard)
    assert shard.sealed() == expected
    assert rows_of(newest(shard)) == shard.rows()
    assert newest(shard).facts == shard.facts
    assert made.records == sum(map(len, expected.values()))
    assert shard.number == made.snapshot == 1


def test_frames_copied_after_a_crash_are_sealed_once():
    """Recovery copies unsynced frames into the next incarnation's file, so the log contains them twice."""
    shard, expected = filled(rounds=1)
    for round in range(1, 4):
        fill(shard.world, expected, 3, round)
        shard.world.kill()
        shard.world.start()
    close_log(shard.world)
    made = checkpoint(shard)
    assert shard.sealed() == expected
    assert made.records == sum(map(len, expected.values()))


def test_small_topics_share_a_segment_and_large_ones_have_their_own():
    shard, expected = filled(topics=4)
    checkpoint(shard, own_segment_bytes=65536)
    assert [ref.topics for ref in shard.refs.values()] == [4]
    shard, expected = filled(topics=4)
    checkpoint(shard, own_segment_bytes=0)
    assert [ref.topics for ref in shard.refs.values()] == [1, 1, 1, 1]
    assert shard.sealed() == expected


def test_a_segment_ends_at_its_maximum_number_of_records():
    """The setting `storage.segment_records` is the maximum."""
    shard, expected = filled(topics=2)
    checkpoint(shard, own_segment_bytes=0, segment_records=6)
    assert max(ref.records for ref in shard.refs.values()) <= 6
    assert shard.sealed() == expected


def test_a_checkpoint_absorbs_a_log_file_once_and_deletes_it_one_checkpoint_later():
    """Two snapshots are kept, each with the log that it needs. A log file stays until both absorb it (C4)."""
    shard, expected = filled()
    absorbed = {each.path.rpartition("/")[2] for each in shard.files()}
    checkpoint(shard)
    assert absorbed <= set(wal_files(shard))
    fill(shard.world, expected, 3, 9)
    close_log(shard.world)
    made = checkpoint(shard)
    assert made.unlinked
    assert shard.sealed() == expected
    assert not absorbed & set(wal_files(shard))
    assert [number for _, number in snapshots.snapshot_numbers(shard.world.disk, DATA)] == [1, 2]
    checkpoint(shard)
    assert [number for _, number in snapshots.snapshot_numbers(shard.world.disk, DATA)] == [2, 3]


def test_records_below_a_floor_or_of_deleted_topics_are_left_out_and_deleted_records_are_marked():
    shard, _ = filled(topics=3)
    gone, cut, holed = (shard.world.topic(f"t{n}") for n in range(3))
    del shard.topics()[gone.topic_id]
    cut.cap_floor = 6
    holed.dead = BitMap64([2, 5])
    checkpoint(shard, own_segment_bytes=0)
    sealed = shard.sealed()
    assert gone.topic_id not in sealed
    assert min(sealed[cut.topic_id]) >= cut.earliest_seq > 1
    assert shard.deleted(holed.topic_id) == {2, 5}
    assert all(sealed[holed.topic_id][seq] == b"" for seq in (2, 5))


def test_a_deletion_in_the_log_is_marked_in_segments_of_earlier_checkpoints():
    """The deletion mark must exist before the log file may be deleted."""
    shard, _ = filled(topics=2)
    checkpoint(shard)
    name = "t1"
    topic_id = shard.world.topic(name).topic_id
    deleted = shard.world.request(RecordsDelete(name, seqs=BitMap64([3, 7]).serialize()))
    assert deleted.deleted == 2
    close_log(shard.world)
    checkpoint(shard)
    assert shard.deleted(topic_id) == {3, 7}


def test_damage_in_the_log_stops_the_checkpoint_and_changes_nothing():
    """The checkpoint registers no segment and writes no snapshot."""
    shard, _ = filled()
    [file, *_] = shard.files()
    fd = shard.world.disk.create(f"{DATA}/copy")
    damaged = bytearray(shard.read(file.path))
    damaged[file.stop - 9] ^= 1
    shard.world.disk.write_at(fd, [bytes(damaged)], 0)
    shard.world.disk.sync_file(fd)
    shard.world.disk.close(fd)
    plan = shard.plan()
    shard.world.disk.unlink(f"{DATA}/{file.path}")
    shard.world.disk.rename(f"{DATA}/copy", f"{DATA}/{file.path}")
    shard._CheckpointOpen = lambda *_: (plan, b"")
    with pytest.raises(CorruptData):
        checkpoint(shard)
    assert (shard.refs, shard.number) == ({}, 0)


def test_segments_that_the_shard_refuses_are_removed():
    shard, _ = filled()
    shard.refuses = "an overlap"
    with pytest.raises(Internal):
        checkpoint(shard)
    assert shard.world.disk.list_dir(f"{DATA}/packs") == []
    assert shard.number == 0


def test_a_checkpoint_without_a_valid_previous_snapshot_requests_every_row():
    """Changed rows alone are not sufficient if the snapshot that they build on is not valid any more."""
    shard, expected = filled()
    checkpoint(shard)
    path = f"{DATA}/meta/{snapshots.snapshot_name(0, 1)}"
    shard.world.disk.unlink(path)
    checkpoint(shard)
    assert rows_of(newest(shard)) == shard.rows()
    assert newest(shard).number == 2
    assert shard.sealed() == expected


@pytest.mark.parametrize("point", STOPS)
def test_a_death_at_any_point_leaves_no_duplicates(point):
    """The next checkpoint repeats the work and replaces the segments that the dead one registered."""
    shard, expected = filled()
    checkpoint(shard)
    fill(shard.world, expected, 3, 9)
    close_log(shard.world)
    with fails_at(point):
        checkpoint(shard)
    checkpoint(shard)
    assert shard.sealed() == expected
    assert rows_of(newest(shard)) == shard.rows()
    positions = sum(ref.records for ref in shard.refs.values())
    assert positions == sum(map(len, expected.values())), "a position is in two segments in force"


def test_the_next_checkpoint_succeeds_after_a_power_loss_at_any_disk_call():
    """Another compactor completes the checkpoint after the power loss."""
    for nth in range(1, 400):
        shard, expected = filled(topics=2, rounds=2)
        disk = FaultyDisk(shard.world.disk, DiskFault("any", nth, "halt"))
        try:
            checkpoint(shard, disk)
        except Halted:
            shard.world.power_loss(nth)
            shard.world.start()
            checkpoint(shard)
            assert shard.sealed() == expected, nth
            assert rows_of(newest(shard)) == shard.rows(), nth
            continue
        assert nth > 20
        return
    pytest.fail("the checkpoint never completed")


@pytest.mark.parametrize("op", ["open", "write", "full_sync", "rename", "dir_sync", "unlink"])
def test_a_disk_call_that_fails_ends_the_checkpoint_and_the_next_one_succeeds(op):
    for nth in range(1, 40):
        shard, expected = filled(topics=2, rounds=2)
        faulty = FaultyDisk(shard.world.disk, DiskFault(op, nth, "EIO"))
        try:
            checkpoint(shard, faulty)
        except DiskError:
            checkpoint(shard)
            assert shard.sealed() == expected, nth
            continue
        return
    pytest.fail("the checkpoint never completed")


def test_snapshots_of_another_layout_stay_until_every_shard_has_two_of_this_one():
    """After a change of `wal.shards`, a shard without a snapshot recovers from the old snapshots."""
    shard, _ = filled()
    disk = shard.world.disk
    checkpoint(shard)
    old = newest(shard)._replace(shards=4)
    for number, each in enumerate((0, 1, 2, 3), 50):
        snapshots.write_snapshot(disk, DATA, old._replace(shard=each, number=number))
    plan = msgspec.structs.replace(shard.plan(), shards=2)
    others = [(0, 50), (1, 51), (2, 52), (3, 53)]
    retire_snapshots(disk, DATA, plan, keep={1})
    assert set(others) <= set(snapshots.snapshot_numbers(disk, DATA))
    for number, each in ((60, 0), (61, 1), (62, 0), (63, 1)):
        snapshots.write_snapshot(disk, DATA, old._replace(shard=each, number=number, shards=2))
    retire_snapshots(disk, DATA, plan, keep={60, 62})
    assert snapshots.snapshot_numbers(disk, DATA) == [(0, 60), (0, 62), (1, 61), (1, 63)]
