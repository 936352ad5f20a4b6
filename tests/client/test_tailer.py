"""The tailer returns the same records as a reader, in columns and without copying."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from ringlog.client.read.pages import LATEST, Cursor, Tombstone
from ringlog.client.tailer import Tailer
from ringlog.errors import CorruptData, UsageError
from ringlog.frame.layout import Column
from tests.support.log_file import TS_US
from tests.support.log_world import log_world_fixture

world = log_world_fixture()


def payloads_of(batch):
    data, offsets = batch.numpy()
    return [bytes(data[a:b]) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("shape", ["one frame", "many frames", "single records", "tagged"])
def test_every_representation_of_a_batch_has_the_same_payloads(world, shape):
    """Batches are available as bytes, memoryviews, NumPy arrays, records and Arrow tables."""
    values = [b"%d" % n * (n % 7) for n in range(50)]
    per_frame = {"one frame": 50, "many frames": 7, "single records": 1, "tagged": 10}[shape]
    for at in range(0, 50, per_frame):
        part = values[at : at + per_frame]
        world.append(part, {Column.TAG: [b"t"] * len(part)} if shape == "tagged" else None)
        world.write_other()
    world.publish()
    with Tailer(world, "t", follow=False) as tailer:
        (batch,) = list(tailer)
    assert (batch.first_seq, batch.last_seq, len(batch)) == (1, 50, 50)
    assert batch.ts == TS_US + (49 // per_frame) * per_frame
    assert batch.bytes() == values
    assert [bytes(view) for view in batch.memoryviews()] == values
    assert payloads_of(batch) == values
    assert [record.data for record in batch.records()] == values
    table = batch.arrow()
    assert table["payload"].to_pylist() == values
    assert table["seq"].to_pylist() == list(range(1, 51))
    assert ("tag" in table.schema.names) == (shape == "tagged")
    assert sum(len(part) for part in batch.record_batches()) == 50


def test_frames_with_different_columns_make_one_table(world):
    world.append([b"a"])
    world.append([b"b"], {Column.KEY: [b"k"]})
    (batch,) = list(Tailer(world, "t", follow=False))
    assert batch.arrow()["key"].to_pylist() == [b"", b"k"]
    assert batch.arrow(nulls=True)["key"].to_pylist() == [None, b"k"]


@pytest.mark.parametrize("per_frame", [1, 10])
def test_a_tailer_can_start_inside_or_between_frames(world, per_frame):
    for at in range(0, 20, per_frame):
        world.append([b"%d" % n for n in range(at + 1, at + 1 + per_frame)])
    (batch,) = list(Tailer(world, "t", 8, follow=False))
    assert (batch.first_seq, len(batch)) == (8, 13)
    assert batch.bytes() == [b"%d" % n for n in range(8, 21)]
    assert batch.memoryviews() == batch.bytes() == payloads_of(batch)
    assert batch.arrow()["seq"].to_pylist()[0] == 8


def test_a_following_tailer_returns_new_records_in_order(world):
    world.append([b"a"])
    tailer = Tailer(world, "t", LATEST)
    assert tailer.next(0.0) is None
    world.append([b"b"])
    assert tailer.next(0.0).bytes() == [b"b"]
    world.roll()
    world.append([b"c"])
    assert tailer.next(0.0).bytes() == [b"c"]
    assert tailer.cursor == Cursor(1, 3)
    tailer.seek(2)
    assert tailer.next(0.0).bytes() == [b"b"]
    tailer.close()


def test_a_tailer_returns_tombstones_as_items(world):
    for _ in range(5):
        world.append([b"x"])
    world.earliest_seq = world.ttl_floor = 4
    tailer = Tailer(world, "t", follow=False)
    gone, batch = list(tailer)
    assert gone == Tombstone("t", 1, 3, "ttl", 4, 5)
    assert (batch.first_seq, batch.last_seq) == (4, 5)
    world.recreate()
    world.append([b"new"])
    again = Tailer(world, "t", Cursor(1, 5), follow=False)
    reset, batch = list(again)
    assert reset.reason == "recreated"
    assert batch.bytes() == [b"new"]
    assert again.cursor == Cursor(2, 1)


def test_returned_batches_stay_valid_after_tailer_and_file_are_deleted(world):
    world.append([b"stays"] * 3)
    tailer = Tailer(world, "t", follow=False)
    batch = next(iter(tailer))
    views, table, (data, _) = batch.memoryviews(), batch.arrow(), batch.numpy()
    tailer.close()
    world.disk.unlink(f"{world.data_dir}/{world.file.path}")
    del batch
    assert [bytes(view) for view in views] == [b"stays"] * 3
    assert table["payload"].to_pylist() == [b"stays"] * 3
    assert bytes(data[:5]) == b"stays"


def test_arrow_tables_share_memory_with_the_mapped_file(world):
    """The Arrow buffers lie inside the mapping."""
    world.append([b"x" * 1000] * 100)
    before = pa.total_allocated_bytes()
    batch = next(iter(Tailer(world, "t", follow=False)))
    table = batch.arrow()
    assert table.nbytes > 100_000
    assert pa.total_allocated_bytes() - before < 10_000
    data, _ = batch.numpy()
    assert not data.flags.owndata
    assert not data.flags.writeable
    assert np.shares_memory(data, np.frombuffer(batch.memoryviews()[0], np.uint8))


def test_records_before_the_damage_are_returned_before_the_error(world):
    """The tailer verifies checksums before it returns records."""
    world.append([b"good"])
    bad = world.write([b"bad"])
    world.publish()
    world.file.damage(bad + 90)
    tailer = Tailer(world, "t", follow=False)
    items = iter(tailer)
    assert next(items).bytes() == [b"good"]
    with pytest.raises(CorruptData):
        next(items)
    tailer.close()


def test_a_tailer_is_refused_for_remote_clients(world):
    world.transport = "tcp"
    with pytest.raises(UsageError, match="host"):
        Tailer(world, "t")


def test_a_tailer_omits_deleted_records_that_it_read_ahead(world):
    """Two files make two batches. The second one is checked again when it is requested."""
    world.append([b"1", b"2"])
    world.roll()
    world.append([b"3", b"4"])
    tailer = Tailer(world, "t", follow=False)
    assert tailer.next(0.0).bytes() == [b"1", b"2"]
    world.remove([3])
    assert tailer.next(0.0).bytes() == [b"4"]
    tailer.close()
