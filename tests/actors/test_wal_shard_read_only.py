"""A shard with a directory that is not writable: it serves reads, and writes and invents nothing."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from pyroaring import BitMap64

from ringlog.actors.wal_shard.io.read_only_probe import ReadOnlyProbe
from ringlog.contract import DrainRequested
from ringlog.envelope import messages as m
from ringlog.errors import DiskError, Status, StorageReadOnly
from ringlog.limits import READ_ONLY_PROBE_MS_MAX, READ_ONLY_PROBE_MS_MIN
from ringlog.storage.disk import Disk, disk_error
from ringlog.supervision.restart import read_only_probe_ms
from ringlog.testing.clock import ManualClock
from ringlog.testing.disk import SimulatedDisk
from tests.support.removal_world import delete
from tests.support.shard_world import DATA, SimulatedBoardMarks, World, refusals
from tests.support.shard_worlds import started

CHANGING = ("create", "write_at", "allocate", "zero_fill", "truncate", "rename", "unlink", "make_dir", "lock",
            "remove_dir", "sync_data", "sync_file", "sync_dir", "open_for_truncate", "open_for_overwrite",
            "write_back", "begin_sync")  # fmt: skip


class ReadOnlyDisk:
    """A disk that refuses every change."""

    def __init__(self, inner: Disk) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in CHANGING:
            return self._refuse
        return getattr(self.inner, name)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise disk_error("write", DATA, errno.EROFS)


class ReadOnlyDirectory(ReadOnlyDisk):
    """A directory that refuses new data on a working device: data that was written before can be synced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name) if name == "sync_file" else super().__getattr__(name)


def latched(durability: str = "fsync", unsynced: Sequence[bytes] = ()) -> World:
    """Return a world in which the only shard restarted on a disk without writes and syncs."""
    world = started({"f": "fsync"})
    world.put_topic("d", durability=durability)
    world.append("f", [b"a", b"b"])
    for payload in unsynced:
        world.append("d", [payload])
    world.kill_shard(0)
    return relatched(world)


def relatched(world: World, kind: type[ReadOnlyDisk] = ReadOnlyDisk) -> World:
    """Start the shard of a world in read-only mode."""
    world.disk_of = lambda incarnation: kind(world.disk)  # type: ignore[assignment, return-value]
    world.start_shard(0, is_read_only=True)
    return world


def writable(world: World) -> World:
    """Restart the shard after its directory became writable again."""
    world.kill_shard(0)
    world.disk_of = None
    world.start_shard(0)
    return world


def test_durable_records_can_be_read_and_located():
    world = latched()
    assert world.records("f") == [(1, b"a"), (2, b"b")]
    assert world.request(m.TopicState("f")).head_seq == 2
    listed = world.ask(world.runs[0], m.TopicList("", "", 10))
    assert [each.topic for each in listed.topics] == ["d", "f"]
    assert world.published[world.topic("f").topic_id] == 2


@pytest.mark.parametrize(
    "message",
    [
        m.TopicPut("new", {}),
        m.TopicPut("f", {"ttl_ms": 5}, "merge"),
        m.TopicDelete("f"),
        m.RecordsDelete("f", before_seq=2),
        m.CheckpointOpen(roll=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_request_that_changes_something_is_refused_with_the_directory(message):
    world = latched()
    answer = world.ask(world.runs[0], message)
    assert answer.status == Status.STORAGE_READ_ONLY
    assert answer.detail["directory"] == "wal/shard-00"
    assert answer.outcome == "not_applied"
    assert world.records("f") == [(1, b"a"), (2, b"b")]


def test_frames_are_refused_with_a_retriable_error():
    world = latched()
    with pytest.raises(StorageReadOnly) as caught:
        world.append("f", [b"c"])
    assert caught.value.retriable
    assert caught.value.outcome == "not_applied"
    assert caught.value.detail["directory"] == "wal/shard-00"
    assert writable(world).records("f") == [(1, b"a"), (2, b"b")]
    assert world.append("f", [b"c"], producer=2) == 3


def test_a_stored_frame_is_settled_as_a_repeat():
    """A producer that receives a refusal would send the frame again under another number (W4)."""
    world = latched()
    found = refusals(world.send("f", [world.frame_for("f", [b"a", b"b"], seq=1)]))
    assert found == [None]


def test_unsynced_records_are_not_shown_and_their_outcome_is_unknown():
    """The next writable incarnation finds them again, so they are not refused for certain."""
    world = latched("disk", [b"x", b"y"])
    assert world.records("d") == [(1, b"x")], "synced with the reservation of its number"
    error = refusals(world.send("d", [world.frame_for("d", [b"y"], seq=2)]))[0]
    assert isinstance(error, StorageReadOnly)
    assert error.outcome == "unknown"
    certain = refusals(world.send("d", [world.frame_for("d", [b"z"], seq=3)]))[0]
    assert isinstance(certain, StorageReadOnly)
    assert certain.outcome == "not_applied"
    assert writable(world).records("d") == [(1, b"x"), (2, b"y")]


def test_a_reader_beyond_the_shown_head_does_not_start_over():
    world = latched("disk", [b"x", b"y"])
    located = world.request(m.Locate("d", 2, world.topic("d").epoch))
    assert (located.head_seq, located.recreated, located.is_behind) == (1, False, True)
    located = writable(world).request(m.Locate("d", 2, world.topic("d").epoch))
    assert (located.head_seq, located.recreated, located.is_behind) == (2, False, False)


def test_a_reader_far_beyond_the_head_is_answered():
    """The answer costs what the shard has, not what the reader asks for."""
    world = started({"f": "fsync"})
    world.append("f", [b"a", b"b", b"c"])
    assert delete(world, "f", seqs=[2]).deleted == 1
    world.kill_shard(0)
    relatched(world)
    assert BitMap64.deserialize(world.request(m.Locate("f", 0)).deleted) == BitMap64([2])
    assert world.request(m.Locate("f", (1 << 63) - 1)).deleted == b""


@pytest.mark.parametrize("is_board_kept", [True, False], ids=["shard killed", "everything killed"])
def test_the_complete_log_is_shown_if_it_can_be_synced(world, is_board_kept):
    """Readers see acked deletes and the last append of each class. The published mark permits it."""
    for name, durability in (("f", "fsync"), ("d", "disk")):
        world.put_topic(name, durability=durability)
        world.append(name, [b"a", b"b", b"c"])
        world.request(m.RecordsDelete(name, before_seq=2))
        world.append(name, [b"last"])
    expected = {name: world.records(name) for name in "fd"}
    if is_board_kept:
        world.kill_shard(0)
    else:
        world.kill()
        world.boot_incarnation = world.incarnation + 1
        world.marks[0] = SimulatedBoardMarks()
    relatched(world, ReadOnlyDirectory)
    assert {name: world.records(name) for name in "fd"} == expected
    assert expected["f"] == [(2, b"b"), (3, b"c"), (4, b"last")]
    last = max(extent.file_id for extent in world.request(m.Locate("f", 0)).extents)
    assert world.marks[0].published >= (last, world.runs[0].core.log_files.stops[last])
    again = refusals(world.send("d", [world.frame_for("d", [b"last"], seq=2)]))
    assert again == [None], "it is stored"
    writable(world)
    assert {name: world.records(name) for name in "fd"} == expected
    assert world.append("f", [b"next"]) == 5


def test_the_marks_on_the_board_stay_those_of_the_last_writable_incarnation():
    world = latched("disk", [b"x", b"y"])
    before = (world.marks[0].published, world.marks[0].durable)
    refusals(world.send("f", [world.frame_for("f", [b"c"])]))
    world.send("f", [world.frame_for("f", [b"a", b"b"], seq=1)])
    world.tick(10.0)
    assert (world.marks[0].published, world.marks[0].durable) == before
    assert before[0][1] > before[1][1] > 0, "the world has no unsynced records"


def test_a_read_only_shard_stops_in_order_and_can_start_read_only_again():
    world = latched("disk", [b"x"])
    world.runs[0].step(DrainRequested())
    assert world.runs[0].stopped is not None
    world.kill_shard(0)
    relatched(world)
    assert world.records("f") == [(1, b"a"), (2, b"b")]
    assert writable(world).records("d") == [(1, b"x")]


def test_expired_records_cause_no_wakeup_of_a_read_only_shard(world):
    world.put_topic("t", durability="fsync", ttl_ms=1_000)
    world.append("t", [b"a"])
    world.kill_shard(0)
    relatched(world)
    world.tick(60.0)
    assert world.runs[0].core.next_deadline_ns() is None
    assert world.request(m.TopicState("t")).head_seq == 1


def test_a_read_only_shard_probes_at_bounded_intervals_whether_it_can_write():
    clock, disk = ManualClock(), SimulatedDisk(DATA)
    disk.make_dir(f"{DATA}/s")
    closed, looks = [True], []

    class Sometimes:
        def __getattr__(self, name: str) -> Any:
            return getattr(disk, name)

        def create(self, path: str) -> int:
            looks.append(clock.monotonic_ns())
            if closed[0]:
                raise disk_error("create", path, errno.EROFS)
            return disk.create(path)

    latch = ReadOnlyProbe(Sometimes(), clock, f"{DATA}/s", READ_ONLY_PROBE_MS_MIN, 4_096)  # type: ignore[arg-type]
    latch.begin()
    for _ in range(3_000):
        clock.advance(0.1)
        assert not latch.is_writable_again()
    pauses = [b - a for a, b in pairwise(looks)]
    assert 50 < len(looks) < 70, "the probes must be bounded and must not end"
    assert max(pauses) <= (READ_ONLY_PROBE_MS_MAX + 100) * 1_000_000
    closed[0] = False
    clock.advance(READ_ONLY_PROBE_MS_MAX / 1_000)
    assert latch.is_writable_again()
    assert disk.list_dir(f"{DATA}/s") == [], "the probe file was not removed"
    assert read_only_probe_ms(1) == READ_ONLY_PROBE_MS_MIN
    assert read_only_probe_ms(99) == READ_ONLY_PROBE_MS_MAX


def test_only_errors_that_refuse_writes_are_a_reason_for_read_only_mode():
    assert disk_error("create", "x", errno.EROFS).is_unwritable
    assert disk_error("create", "x", errno.ENOSPC).is_unwritable
    assert not disk_error("sync_data", "x", errno.EIO).is_unwritable
    assert not DiskError("held", errno=errno.EACCES, holder="pid 1").is_unwritable
