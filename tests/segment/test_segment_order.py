"""A segment exists as a whole or not at all, wherever its writer dies and whichever disk call fails (S1)."""

from __future__ import annotations

import contextlib

import pytest
from pyroaring import BitMap64

from ringlog.errors import DiskError
from ringlog.segment.index_rebuild import rebuild_index, verify_segment
from ringlog.segment.layout import DATA, DEL, IDX, TAGS
from ringlog.segment.parts import make_dirs, part_names
from ringlog.segment.segment import Segment, find_segments
from ringlog.storage.layout import TMP_SUFFIX
from ringlog.testing.disk import (
    DiskFault,
    FaultyDisk,
    Halted,
    PowerLossDamage,
    RecordingDisk,
    Rename,
    SimulatedDisk,
    SyncDir,
    SyncFile,
)
from tests.support.segment_samples import NUMBER, simple_topic, stored_frames, write, writer

DATA_DIR = "/data"


def topics() -> list:
    """Return two topics with tags and dead records, so that all four parts are written."""
    found = [simple_topic(5, 30), simple_topic(9, 30)]
    found[0].dead = {4, 5}
    return found


def count_calls(disk: SimulatedDisk, action) -> int:
    counting = FaultyDisk(disk.copy())
    action(counting)
    return counting.calls["any"]


def believed(disk: SimulatedDisk) -> dict[str, int]:
    """Return {stem: records} of every segment that recovery adopts, after verification."""
    found = {}
    for stem in find_segments(disk, DATA_DIR):
        with contextlib.suppress(DiskError):
            Segment.open(disk, DATA_DIR, stem).close()
        if not disk.exists(f"{DATA_DIR}/{stem}{IDX}"):
            rebuild_index(disk, DATA_DIR, stem).close()
        assert verify_segment(disk, DATA_DIR, stem) == []
        found[stem] = sum(view.count for _, view in stored_frames(disk, DATA_DIR, stem))
    return found


def test_parts_are_synced_before_they_are_named_and_data_is_named_last() -> None:
    """All bytes are synced before the renames. The data part gets its name last, after the other names are
    durable (S1)."""
    disk = RecordingDisk(SimulatedDisk(DATA_DIR))
    write(disk, DATA_DIR, topics())
    names = [op.target.rpartition(".")[2] for op in disk.operations_of(Rename)]
    assert names == ["idx", "tags", "del", "data"]
    operations = disk.operations
    last = operations.index(disk.operations_of(Rename)[-1])
    assert isinstance(operations[last - 1], SyncDir)
    assert isinstance(operations[last + 1], SyncDir)
    synced = {op.path for op in operations[:last] if isinstance(op, SyncFile)}
    assert {op.source for op in disk.operations_of(Rename)} <= synced


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_a_crash_at_every_call_leaves_a_whole_segment_or_none(kind) -> None:
    disk = SimulatedDisk(DATA_DIR)
    before = write(disk, DATA_DIR, topics(), number=NUMBER - 1)
    calls = count_calls(disk, lambda on: write(on, DATA_DIR, topics()))
    seen = set()
    for nth in range(1, calls + 1):
        for seed in range(3):
            after = disk.copy()
            with contextlib.suppress(Halted):
                write(FaultyDisk(after, DiskFault("any", nth, "halt")), DATA_DIR, topics())
            after.process_kill() if kind == "kill" else after.power_loss(seed)
            found = believed(after)
            assert found.pop(before.stem) == 60
            assert list(found.values()) in ([], [60])
            seen.add(len(found))
            # The next writer may use the number again, whatever files exist.
            if not found:
                assert write(after, DATA_DIR, topics()).records == 60
                assert len(believed(after)) == 2
    assert 0 in seen


@pytest.mark.parametrize("op", ["write", "full_sync", "rename", "dir_sync", "open", "make_dir"])
def test_a_disk_error_is_raised_and_leaves_a_whole_segment_or_none(op) -> None:
    for nth in range(1, 12):
        disk = SimulatedDisk(DATA_DIR)
        faulty = FaultyDisk(disk, DiskFault(op, nth, "EIO"))
        try:
            write(faulty, DATA_DIR, topics())
        except DiskError:
            disk.process_kill()
            assert list(believed(disk).values()) in ([], [60])
        else:
            assert len(believed(disk)) == 1
            return
    pytest.fail("the disk never got through")


def test_an_abandoned_segment_leaves_no_file_even_after_a_failure() -> None:
    disk = SimulatedDisk(DATA_DIR)
    faulty = FaultyDisk(disk, DiskFault("full_sync", 2, "EIO"))
    made = writer(faulty, DATA_DIR)
    made.add_topic(5, 1, topics()[0].runs())
    with pytest.raises(DiskError):
        made.finish()
    assert any(name.endswith(TMP_SUFFIX) for name in part_names(disk, DATA_DIR))
    made.abandon()
    assert part_names(disk, DATA_DIR) == []


def test_a_crash_during_an_index_rebuild_changes_no_data() -> None:
    """After every crash the next rebuild succeeds."""
    disk = SimulatedDisk(DATA_DIR)
    ref = write(disk, DATA_DIR, topics())
    for suffix in (IDX, TAGS):
        disk.unlink(f"{DATA_DIR}/{ref.stem}{suffix}")
    calls = count_calls(disk, lambda on: rebuild_index(on, DATA_DIR, ref.stem).close())
    for nth in range(1, calls + 1):
        after = disk.copy()
        with contextlib.suppress(Halted):
            rebuild_index(FaultyDisk(after, DiskFault("any", nth, "halt")), DATA_DIR, ref.stem)
        after.power_loss(nth)
        rebuild_index(after, DATA_DIR, ref.stem).close()
        assert believed(after) == {ref.stem: 60}


def test_a_crash_during_marking_leaves_only_requested_deletion_marks() -> None:
    """No mark is torn and synced marks survive. The log still contains the other deletions."""
    plain = [simple_topic(5, 30)]
    disk = SimulatedDisk(DATA_DIR)
    ref = write(disk, DATA_DIR, plain)

    def mark(on) -> None:
        segment = Segment.open(on, DATA_DIR, ref.stem)
        segment.mark_deleted(0, BitMap64([2, 3, 20]))
        segment.sync_marks()
        segment.mark_deleted(0, BitMap64([7]))
        segment.sync_marks()
        segment.close()

    for nth in range(1, count_calls(disk, mark) + 1):
        for seed in range(4):
            after = disk.copy()
            with contextlib.suppress(Halted):
                mark(FaultyDisk(after, DiskFault("any", nth, "halt")))
            after.power_loss(seed)
            segment = Segment.open(after, DATA_DIR, ref.stem)
            assert set(segment.deleted(0)) <= {2, 3, 7, 20}
            assert segment.bad_marks == 0
            segment.close()
    mark(disk)
    disk.power_loss(9)
    segment = Segment.open(disk, DATA_DIR, ref.stem)
    assert set(segment.deleted(0)) == {2, 3, 7, 20}
    segment.close()
    assert disk.exists(f"{DATA_DIR}/{ref.stem}{DEL}")
    assert disk.exists(f"{DATA_DIR}/{ref.stem}{DATA}")


def test_a_directory_of_a_dead_predecessor_is_synced_before_use() -> None:
    """The predecessor died between mkdir and the sync of the parent. Its successor must not assume that the
    directory is durable."""
    for calls in range(1, 9):
        disk = SimulatedDisk(DATA_DIR)
        with contextlib.suppress(Halted):
            make_dirs(FaultyDisk(disk, DiskFault("any", calls, "halt")), DATA_DIR, "topics", f"{5:016x}")
        disk.process_kill()
        made = write(disk, DATA_DIR, topics())
        disk.power_loss(1, PowerLossDamage.LOST)
        assert believed(disk) == {made.stem: made.records}
