"""What the class `rot` found that the offline verifier and recovery did not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog.errors import CorruptData
from ringlog.segment.layout import IDX
from ringlog.segment.segment import Segment
from ringlog.storage.disk import RealDisk
from ringlog.testing.disk import SimulatedDisk
from ringlog.testing.log_world import LogWorld
from ringlog.testing.shard_world import DATA, World
from ringlog.verify.segment_decoder import verify_segment
from ringlog.verify.wal_decoder import verify_wal


def test_a_flipped_bit_in_the_record_columns_of_an_index_is_found_without_looking_deep(
    tmp_path: Path,
) -> None:
    world = LogWorld(str(tmp_path))
    world.append([b"a", b"bcd", b"ef"])
    world.seal()
    stem = world.sealed[0].path.removesuffix(".data")
    segment = Segment.open(RealDisk(), str(tmp_path), stem)
    at = int(segment.entries["columns_at"][0])
    segment.close()
    assert at, "sizes differ, so there is a block of columns"
    path = tmp_path / f"{stem}{IDX}"
    sound = path.read_bytes()
    assert not verify_segment(str(tmp_path), stem).is_damaged
    for offset in range(at, len(sound)):
        path.write_bytes(sound[:offset] + bytes([sound[offset] ^ 4]) + sound[offset + 1 :])
        assert verify_segment(str(tmp_path), stem).is_damaged, offset


def test_frames_that_lie_where_the_header_should_be_are_damage_and_no_unused_file() -> None:
    """RF-73: a header page and its neighbour changed places; the file was removed as never used."""
    world = World(SimulatedDisk(DATA))
    world.start()
    world.put("t", durability="fsync")
    world.append("t", [b"x"])
    world.tick(0.2)
    world.kill()
    path = f"{DATA}/wal/shard-00/wal-1-0.log"
    fd = world.disk.open_marks(path)
    data = world.disk.read_at(fd, 1 << 20, 0)
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    world.disk.write_at(fd, [swapped], 0)
    world.disk.sync_file(fd)
    world.disk.close(fd)
    assert verify_wal("wal/shard-00/wal-1-0.log", swapped).is_damaged
    world.reboot()
    with pytest.raises(CorruptData, match="frames but no header"):
        world.start()
    assert world.disk.exists(path)
