"""A missing or damaged tags part is rebuilt from the data at the next start (S2)."""

from __future__ import annotations

import pytest

from ringlog.envelope import messages as m
from ringlog.frame import encode_records, frame
from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import TAGS
from ringlog.segment.segment import find_segments
from tests.support.checkpoint_world import checkpoint
from tests.support.shard_world import DATA
from tests.support.shard_worlds import new_world


def sealed():
    """Seal records with tags of one topic into a segment. Return the world and the segment's stem."""
    world = new_world()
    world.put_topic("t", durability="fsync")
    columns = encode_records([b"%d" % i for i in range(6)], tags=["a", "b"] * 3)
    sent = frame(columns, topic_id=world.topic("t").topic_id, producer_id=7, producer_seq=1)
    world.send("t", [sent])
    checkpoint(world, own_segment_bytes=1)
    (stem,) = find_segments(world.disk, DATA)
    return world, stem


def harm(disk, path: str, how: str) -> None:
    if how == "missing":
        disk.unlink(path)
        disk.sync_dir(path.rpartition("/")[0])
        return
    if how == "zeroed":
        fd = disk.open_for_overwrite(path)
        disk.write_at(fd, [bytes(disk.size(fd))], 0)
    else:
        fd = disk.open_for_truncate(path)
        disk.truncate(fd, disk.size(fd) - 8)
    disk.sync_file(fd)
    disk.close(fd)


@pytest.mark.parametrize("how", ["missing", "truncated", "zeroed"])
def test_an_unusable_tags_part_is_rebuilt_at_the_start(how: str) -> None:
    """Once, deletes by tag and every backup were refused until an operator removed the index."""
    world, stem = sealed()
    world.stop()
    harm(world.disk, f"{DATA}/{stem}{TAGS}", how)
    world.start()
    assert verify_segment(world.disk, DATA, stem) == []
    reply = world.request(m.RecordsDelete("t", 0, "a"))
    assert isinstance(reply, m.RecordsDeleted), reply
    assert [seq for seq, _ in world.records("t")] == [2, 4, 6]


def test_a_segment_without_tags_is_used_if_they_cannot_be_rebuilt() -> None:
    world, stem = sealed()
    world.stop()
    harm(world.disk, f"{DATA}/{stem}{TAGS}", "missing")
    fd = world.disk.open_for_overwrite(f"{DATA}/{stem}{DATA_SUFFIX}")
    at = 4096 + 100
    world.disk.write_at(fd, [bytes([world.disk.read_at(fd, 1, at)[0] ^ 1])], at)
    world.disk.sync_file(fd)
    world.disk.close(fd)
    world.start()
    assert world.topic("t").head_seq == 6
    assert [ref.stem for ref in world.runs[0].core.checkpoint.segments.refs.values()] == [stem]
