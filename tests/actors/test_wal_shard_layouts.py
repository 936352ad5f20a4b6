"""Checkpoints and recoveries after changes of the number of shards."""

from __future__ import annotations

import pytest

from ringlog.envelope import messages as m
from ringlog.placement import home_shard, shard_of
from tests.support.checkpoint_world import (
    checkpoint,
    checkpoint_all,
    checkpoint_dies,
    fill,
    state,
    wal_files,
)
from tests.support.shard_worlds import new_world, restart


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (2, 5)])
def test_a_different_number_of_shards_recovers_every_topic(before, after):
    """Rows come from the snapshot of the topic's owner (C5). The test also changes the number back."""
    world = new_world(before)
    names = [f"t{i}" for i in range(12)]
    fill(world, names)
    checkpoint_all(world)
    fill(world, names, rounds=1)
    expected = state(world)
    for round, count in enumerate((after, before, after, after)):
        world.kill()
        world.start(count)
        assert state(world) == expected, (round, count)
        for shard in range(count):
            if (shard + round) % 2 == 0:
                checkpoint(world, shard)
        restart(world)
        assert state(world) == expected, (round, count)
        for name in names[::2]:
            world.append(name, [b"round %d" % round])
        if round:
            checkpoint_all(world)
        world.put_topic(f"late{round}", durability="fsync")
        world.request(m.TopicDelete(names[-1]))
        names = [*names[:-1], f"late{round}"]
        expected = state(world)


def test_an_earlier_epoch_in_the_log_does_not_end_the_epoch_of_another_layouts_snapshot():
    """One shard of the other layout owns the current epoch and has a snapshot. Another shard owned the
    earlier epoch and has none, so its log is replayed after the row of the current epoch."""
    world = new_world(3)
    first = world.put_topic("d", durability="fsync")
    last = first
    while shard_of(last.topic_id, 2) == shard_of(first.topic_id, 2):
        world.append("d", [b"of an earlier life"])
        world.request(m.TopicDelete("d"))
        last = world.put_topic("d", durability="fsync")
    world.append("d", [b"1", b"2"])
    world.kill()
    world.start(2)
    checkpoint(world, shard_of(last.topic_id, 2))
    expected = state(world)
    assert expected["d"][:3] == (last.topic_id, last.epoch, 2)
    for shards in (3, 3, 2, 1):
        world.kill()
        world.start(shards)
        assert state(world) == expected


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 3, 4])
def test_a_home_shard_knows_a_topic_that_only_its_sibling_recorded(before):
    """The last entry under another number of shards was unsynced. The owner under this number copied it into
    its own log, which the home shard does not read (C6)."""
    for n in range(8):
        world = new_world(before)
        name = f"t{n}"
        made = world.put_topic(name, durability="fsync")
        world.power_loss(seed=n)
        world.shards, world.boot_incarnation = 2, world.incarnation + 1
        world.start_shard(shard_of(made.topic_id, 2))  # and its home shard dies at once
        for shards in (before, 2, before, 2):
            world.power_loss(seed=n)
            world.start(shards)
            home = world.runs[home_shard(name, shards)]
            told = world.ask(home, m.TopicResolve(name))
            assert isinstance(told, m.TopicInfo), (n, shards, told)
            assert told.shard == shard_of(made.topic_id, shards)
        world.append(name, [b"1"])
        assert world.records(name) == [(1, b"1")]


def test_an_unfinished_checkpoint_of_another_layout_loses_no_replaced_segment():
    """The checkpoint had the complete log to absorb, so older segments are superseded (C7). Under the
    previous number of shards, only the rest of the log exists to recreate their records."""
    world = new_world(3)
    made = world.put_topic("d", durability="fsync")
    world.append("d", [b"%d" % n for n in range(15)])
    checkpoint_all(world)
    (first,) = owner_of(world, made).core.checkpoint.segments.refs
    world.append("d", [b"%d" % n for n in range(15, 20)])
    world.kill()
    world.start(1)
    world.clock.advance(1.0)
    checkpoint_dies(world, m.CheckpointRows)
    for shards in (1, 3):
        world.kill()
        world.start(shards)
        # As the reclaimer does: a segment with a greater number contains everything of it.
        assert world.ask(owner_of(world, made), m.SegmentsChange([], [first])).accepted
    for _ in range(2):
        checkpoint_all(world)
        assert world.records("d") == [(n + 1, b"%d" % n) for n in range(20)]
    restart(world, "kill")
    assert world.records("d") == [(n + 1, b"%d" % n) for n in range(20)]


def test_files_of_an_old_layout_are_deleted_when_every_shard_absorbed_them_twice():
    """Then no kept snapshot needs them any more (C4)."""
    world = new_world(3)
    names = [f"t{i}" for i in range(9)]
    fill(world, names)
    expected = state(world)
    world.kill()
    world.start(2)
    old = [(shard, name) for shard in range(3) for name in wal_files(world, shard) if name < "wal-4"]
    for round in range(2):
        for shard in range(2):
            checkpoint(world, shard)
            restart(world, "kill")
            assert state(world) == expected
            left = [each for each in old if each[1] in wal_files(world, each[0])]
            assert bool(left) == ((round, shard) != (1, 1))


def owner_of(world, made):
    return world.runs[shard_of(made.topic_id, world.shards)]
