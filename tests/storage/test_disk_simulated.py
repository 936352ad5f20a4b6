"""The simulated disk: loss of unsynced changes, injected failures, and checks of the sync order."""

from __future__ import annotations

import errno
import gc

import pytest

from ringlog.errors import DiskError, InvariantViolation, UsageError
from ringlog.storage.disk import replace_file
from ringlog.testing.disk import (
    Allocate,
    Create,
    DiskFault,
    DiskNote,
    FaultyDisk,
    Halted,
    MakeDir,
    Monitor,
    PowerLossDamage,
    RecordingDisk,
    RemoveDir,
    Rename,
    SetLength,
    SimulatedDisk,
    SyncData,
    SyncDir,
    SyncFile,
    SyncOrderViolation,
    Unlink,
    Write,
)

A = "/data/a"
SEEDS = range(200)


@pytest.fixture
def disk():
    return SimulatedDisk("/data")


def contents(disk, path=A):
    fd = disk.open_read(path)
    data = disk.read_at(fd, 1 << 20, 0)
    disk.close(fd)
    return data


def synced_file(disk, data=b"", path=A):
    """Return a durable file that is still open."""
    fd = disk.create(path)
    disk.write_at(fd, [data], 0)
    disk.sync_file(fd)
    disk.sync_dir("/data")
    return fd


def outcomes(disk, damage):
    """Return the contents after a power loss, over many seeds."""
    found = set()
    for seed in SEEDS:
        after = disk.copy()
        after.power_loss(seed, damage)
        found.add(contents(after))
    return found


# -- power loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [None, *PowerLossDamage])
def test_synced_bytes_survive_every_power_loss(disk, damage):
    """No kind of damage affects synced bytes."""
    synced_file(disk, b"synced")
    assert outcomes(disk, damage) == {b"synced"}


@pytest.mark.parametrize("damage", [None, *PowerLossDamage])
def test_synced_bytes_survive_damage_to_later_bytes(disk, damage):
    fd = synced_file(disk, b"s" * 1000)
    disk.write_at(fd, [b"n" * 3000], 1000)
    assert all(data.startswith(b"s" * 1000) for data in outcomes(disk, damage))


def test_a_name_without_a_directory_sync_may_be_lost(disk):
    """A power loss keeps the file under some seeds and removes it under others."""
    fd = disk.create(A)
    disk.write_at(fd, [b"abc"], 0)
    disk.sync_file(fd)
    seen = set()
    for seed in SEEDS:
        after = disk.copy()
        after.power_loss(seed)
        seen.add(after.exists(A))
    assert seen == {True, False}


def test_a_power_loss_drops_the_last_directory_changes(disk):
    for name in "abc":
        disk.close(disk.create(f"/data/{name}"))
    seen = set()
    for seed in SEEDS:
        after = disk.copy()
        after.power_loss(seed)
        seen.add("".join(after.list_dir("/data")))
    assert seen == {"", "a", "ab", "abc"}


def test_a_removal_without_a_directory_sync_may_be_undone(disk):
    synced_file(disk, b"abc")
    disk.unlink(A)
    disk.power_loss(0, PowerLossDamage.LOST)
    assert contents(disk) == b"abc"


def test_a_crash_in_replace_file_leaves_the_old_or_the_new_contents(disk):
    """The process halts at every call of replace_file, followed by a power loss with many seeds."""
    replace_file(disk, "/data", "a", b"old" * 500)
    calls = FaultyDisk(disk.copy())
    replace_file(calls, "/data", "a", b"new" * 600)
    total = calls.calls["any"]
    assert total == 5
    seen = set()
    for nth in range(1, total + 2):
        for seed in range(30):
            after = disk.copy()
            try:
                replace_file(FaultyDisk(after, DiskFault("any", nth, "halt")), "/data", "a", b"new" * 600)
            except Halted:
                assert nth <= total
            after.power_loss(seed)
            seen.add(contents(after))
    assert seen == {b"old" * 500, b"new" * 600}


def test_a_replacement_without_a_sync_can_lose_both_contents(disk):
    """The simulated disk is strict enough to show the missing sync."""
    replace_file(disk, "/data", "a", b"old")
    disk.ignore_syncs = True
    replace_file(disk, "/data", "a", b"new")
    disk.ignore_syncs = False
    disk.sync_dir("/data")
    disk.power_loss(0, PowerLossDamage.LENGTH_ONLY)
    assert contents(disk) == b"\0\0\0"


def test_each_kind_of_damage_gives_its_documented_outcomes(disk):
    fd = synced_file(disk, b"s" * 512)
    disk.write_at(fd, [b"n" * 1024], 512)
    old, new = b"s" * 512, b"n" * 512
    assert outcomes(disk, PowerLossDamage.LOST) == {old}
    assert outcomes(disk, PowerLossDamage.KEPT) == {old + new + new}
    assert outcomes(disk, PowerLossDamage.SUBSET) == {old, old + new + new}
    assert outcomes(disk, PowerLossDamage.CUT) == {old, old + new}
    assert outcomes(disk, PowerLossDamage.HEAD_LOST) == {old, old + bytes(512) + new, old + bytes(1024)}
    assert outcomes(disk, PowerLossDamage.ZEROED) == {old, old + bytes(512) + new, old + new + bytes(512)}
    assert outcomes(disk, PowerLossDamage.LENGTH_ONLY) == {old + bytes(1024)}
    assert outcomes(disk, PowerLossDamage.CONTENT_ONLY) == {old}
    garbled = outcomes(disk, PowerLossDamage.GARBLED) - {old}
    assert len(garbled) > 10
    for data in garbled:
        assert len(data) == 1536
        assert [data[512:1024] == new, data[1024:] == new].count(True) == 1


def test_damage_content_only_keeps_bytes_inside_the_old_length(disk):
    fd = synced_file(disk, bytes(1024))
    disk.write_at(fd, [b"x" * 1024], 512)
    assert outcomes(disk, PowerLossDamage.CONTENT_ONLY) == {bytes(512) + b"x" * 512}


def test_any_subset_of_unsynced_writes_may_reach_the_device(disk):
    """The second write may be on the device without the first."""
    fd = synced_file(disk, bytes(3))
    for at, byte in enumerate(b"abc"):
        disk.write_at(fd, [bytes([byte])], at)
    expected = {bytes([a, b, c]) for a in (0, 97) for b in (0, 98) for c in (0, 99)}
    assert outcomes(disk, PowerLossDamage.SUBSET) == expected


@pytest.mark.parametrize(
    "damage",
    [
        PowerLossDamage.SUBSET,
        PowerLossDamage.CUT,
        PowerLossDamage.HEAD_LOST,
        PowerLossDamage.ZEROED,
        PowerLossDamage.GARBLED,
    ],
)
def test_a_byte_changed_where_it_lies_is_the_old_or_the_new_one(disk, damage):
    """The same holds if one call writes several deletion marks, and next to a byte that does not change."""
    disk.close(synced_file(disk, b"a\xd5bc"))
    fd = disk.open_for_overwrite(A)
    disk.write_at(fd, [b"x\xd5yz"], 0)
    assert contents(disk) == b"x\xd5yz"
    assert outcomes(disk, damage) == {
        first + b"\xd5" + second + third
        for first in (b"a", b"x")
        for second in (b"b", b"y")
        for third in (b"c", b"z")
    }
    disk.sync_file(fd)
    assert outcomes(disk, damage) == {b"x\xd5yz"}


def test_a_lost_allocation_never_erases_later_writes(disk):
    fd = synced_file(disk, b"")
    disk.allocate(fd, 0, 4)
    disk.write_at(fd, [b"wxyz"], 4)
    assert outcomes(disk, PowerLossDamage.SUBSET) == {b"", bytes(4), bytes(4) + b"wxyz"}


def test_a_seed_gives_one_outcome(disk):
    """A power loss with the same seed gives the same contents."""
    fd = synced_file(disk, b"s" * 700)
    disk.write_at(fd, [b"n" * 5000], 100)
    first, second = disk.copy(), disk.copy()
    first.power_loss(7)
    second.power_loss(7)
    assert contents(first) == contents(second)


def test_a_process_kill_loses_handles_and_locks_but_no_bytes(disk):
    fd = disk.create(A)
    disk.lock("/data/LOCK")
    disk.write_at(fd, [b"abc"], 0)
    disk.process_kill()
    assert contents(disk) == b"abc"
    with pytest.raises(InvariantViolation):
        disk.write_at(fd, [b"d"], 3)
    disk.unlock(disk.lock("/data/LOCK"))


# -- syncs that fail, are ignored or are late -------------------------------------------------------------


def test_a_failed_sync_drops_pages_as_linux_does(disk):
    """Readers see the bytes and the next sync succeeds, but the device never gets the bytes."""
    fd = synced_file(disk, b"old")
    disk.write_at(fd, [b"new"], 0)
    disk.fail_syncs = 1
    with pytest.raises(DiskError) as caught:
        disk.sync_data(fd)
    assert caught.value.errno == errno.EIO
    with pytest.raises(InvariantViolation):
        disk.write_at(fd, [b"x"], 0)
    disk.process_kill()
    successor = disk.open_read(A)
    assert disk.read_at(successor, 3, 0) == b"new"
    disk.sync_data(successor)
    dropped, cut = disk.copy(), disk.copy()
    dropped.drop_caches()
    cut.power_loss(0, PowerLossDamage.KEPT)
    assert contents(dropped) == contents(cut) == b"old"


def test_copying_the_bytes_into_a_new_file_saves_them(disk):
    """A successor copies uncertain bytes into a file of its own."""
    fd = synced_file(disk, b"old")
    disk.write_at(fd, [b"new"], 0)
    disk.fail_syncs = 1
    with pytest.raises(DiskError):
        disk.sync_data(fd)
    disk.process_kill()
    data = contents(disk)
    synced_file(disk, data, "/data/b")
    disk.power_loss(0, PowerLossDamage.LOST)
    assert contents(disk, "/data/b") == b"new"


def test_drop_caches_keeps_unsynced_bytes_without_a_failed_sync(disk):
    fd = disk.create(A)
    disk.write_at(fd, [b"abc"], 0)
    disk.drop_caches()
    assert contents(disk) == b"abc"


def test_an_ignored_sync_saves_nothing(disk):
    """Such a device acknowledges a sync without doing it (RF-44)."""
    fd = synced_file(disk, b"old")
    disk.ignore_syncs = True
    disk.write_at(fd, [b"new"], 0)
    disk.sync_data(fd)
    disk.power_loss(0, PowerLossDamage.LOST)
    assert contents(disk) == b"old"


@pytest.mark.parametrize(("changes_after", "expected"), [(1, b"old"), (2, b"new")])
def test_a_late_sync_takes_effect_some_changes_later(disk, changes_after, expected):
    fd = synced_file(disk, b"old")
    other = synced_file(disk, b"", "/data/b")
    disk.late_by = 2
    disk.write_at(fd, [b"new"], 0)
    disk.sync_data(fd)
    disk.write_at(fd, [b"???"], 0)  # the first change after the sync, which the sync does not cover
    for _ in range(changes_after - 1):
        disk.write_at(other, [b"x"], 0)
    disk.power_loss(0, PowerLossDamage.LOST)
    assert contents(disk) == expected


def test_a_late_directory_sync_covers_only_the_names_of_its_time(disk):
    disk.late_by = 2
    disk.close(disk.create(A))
    disk.sync_dir("/data")
    disk.close(disk.create("/data/b"))
    disk.close(disk.create("/data/c"))
    disk.power_loss(0, PowerLossDamage.LOST)
    assert disk.list_dir("/data") == ["a"]


# -- recording -------------------------------------------------------------------------------------------


def test_operations_and_notes_are_recorded_in_order(disk):
    recording = RecordingDisk(disk)
    recording.make_dir("/data/d")
    recording.make_dir("/data/d")
    fd = recording.create("/data/d/a.tmp")
    recording.allocate(fd, 0, 10)
    recording.write_at(fd, [b"ab", bytearray(b"c")], 2)
    recording.zero_fill(fd, 8, 2)
    recording.truncate(fd, 9)
    recording.sync_data(fd)
    recording.add_note("ack", 7)
    recording.sync_file(fd)
    recording.rename("/data/d/a.tmp", "/data/d/a")
    recording.write_at(fd, [b"x"], 0)
    recording.close(fd)
    recording.sync_dir("/data/d")
    recording.unlink("/data/d/a")
    recording.remove_dir("/data/d")
    tmp = "/data/d/a.tmp"
    assert recording.operations == [
        MakeDir("/data/d"), Create(tmp), Allocate(tmp, 0, 10), Write(tmp, 2, b"abc"), Write(tmp, 8, b"\0\0"),
        SetLength(tmp, 9), SyncData(tmp), DiskNote("ack", 7), SyncFile(tmp), Rename(tmp, "/data/d/a"),
        Write("/data/d/a", 0, b"x"), SyncDir("/data/d"), Unlink("/data/d/a"),
        RemoveDir("/data/d"),
    ]  # fmt: skip
    assert recording.operations_of(DiskNote) == [DiskNote("ack", 7)]


def test_failed_operations_are_not_recorded(disk):
    recording = RecordingDisk(FaultyDisk(disk, DiskFault("data_sync", 1, "EIO")))
    fd = recording.create(A)
    with pytest.raises(DiskError):
        recording.sync_data(fd)
    assert recording.operations == [Create(A)]


def test_a_recorded_write_keeps_a_copy_of_its_bytes(disk):
    recording = RecordingDisk(disk)
    buffer = bytearray(b"abc")
    fd = recording.create(A)
    recording.write_at(fd, [buffer], 0)
    buffer[:] = b"xyz"
    assert recording.operations_of(Write) == [Write(A, 0, b"abc")]


# -- faults ----------------------------------------------------------------------------------------------

CALLS = {
    "open": lambda disk, fd: disk.create("/data/new"),
    "write": lambda disk, fd: disk.write_at(fd, [b"xyz"], 0),
    "data_sync": lambda disk, fd: disk.sync_data(fd),
    "full_sync": lambda disk, fd: disk.sync_file(fd),
    "rename": lambda disk, fd: disk.rename(A, "/data/b"),
    "unlink": lambda disk, fd: disk.unlink(A),
    "dir_sync": lambda disk, fd: disk.sync_dir("/data"),
    "size": lambda disk, fd: disk.allocate(fd, 0, 10),
    "read": lambda disk, fd: disk.read_at(fd, 1, 0),
    "make_dir": lambda disk, fd: disk.make_dir("/data/d"),
}


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "ESTALE"])
@pytest.mark.parametrize("op", CALLS)
def test_every_class_of_call_can_fail_with_every_error(disk, op, kind):
    """Each class of call can be made to fail with EIO, ENOSPC and ESTALE."""
    faulty = FaultyDisk(disk, DiskFault(op, 1, kind))
    synced_file(disk, b"abc")
    fd = faulty._opened(disk.create("/data/w"), "/data/w")
    with pytest.raises(DiskError) as caught:
        CALLS[op](faulty, fd)
    assert caught.value.errno == getattr(errno, kind)
    assert caught.value.detail["strerror"]
    assert faulty.calls[op] == 1


def test_a_fault_occurs_once_or_from_then_on(disk):
    once = FaultyDisk(disk, DiskFault("make_dir", 2, "EIO"))
    struck = [strikes(once, f"/data/once{i}") for i in range(4)]
    for_ever = FaultyDisk(disk, DiskFault("make_dir", 2, "EIO", always=True))
    struck_for_ever = [strikes(for_ever, f"/data/ever{i}") for i in range(4)]
    assert struck == [False, True, False, False]
    assert struck_for_ever == [False, True, True, True]


def strikes(disk, path):
    try:
        disk.make_dir(path)
    except DiskError:
        return True
    return False


def test_a_short_write_is_continued_in_two_steps(disk):
    """The recording disk below sees two writes, the caller one."""
    recording = RecordingDisk(disk)
    faulty = FaultyDisk(recording, DiskFault("write", 1, "short"))
    fd = faulty.create(A)
    assert faulty.write_at(fd, [b"abc", b"def"], 0) == 6
    assert recording.operations_of(Write) == [Write(A, 0, b"abc"), Write(A, 3, b"def")]


def test_one_eagain_is_retried_and_endless_ones_are_an_error(disk):
    """The number of retries in a row is bounded."""
    faulty = FaultyDisk(disk, DiskFault("write", 1, "EAGAIN"), DiskFault("write", 2, "EAGAIN", always=True))
    fd = faulty.create(A)
    assert faulty.write_at(fd, [b"abc"], 0) == 3
    with pytest.raises(DiskError) as caught:
        faulty.write_at(fd, [b"def"], 0)
    assert caught.value.errno == errno.EAGAIN
    assert contents(disk) == b"abc"


def test_a_full_disk_writes_half_of_the_failing_write(disk):
    """A failed write can leave bytes behind (RF-39)."""
    faulty = FaultyDisk(disk, DiskFault("write", 1, "ENOSPC"))
    fd = faulty.create(A)
    with pytest.raises(DiskError) as caught:
        faulty.write_at(fd, [b"abcdef"], 0)
    assert caught.value.errno == errno.ENOSPC
    assert contents(disk) == b"abc"
    assert faulty.write_at(fd, [b"abcdef"], 0) == 6, "room returned (ST-13)"


def test_a_write_that_makes_no_progress_fails(disk):
    """The error is EIO."""
    faulty = FaultyDisk(disk, DiskFault("write", 1, "stuck"))
    fd = faulty.create(A)
    with pytest.raises(DiskError) as caught:
        faulty.write_at(fd, [b"abc"], 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("sync", ["sync_data", "sync_file"])
def test_an_injected_sync_failure_refuses_further_use_and_drops_bytes(disk, sync):
    """The same holds with a recording disk between the faulty and the simulated disk (D4)."""
    fault = DiskFault("data_sync" if sync == "sync_data" else "full_sync", 1, "EIO")
    faulty = FaultyDisk(RecordingDisk(disk), fault)
    fd = faulty.create(A)
    faulty.write_at(fd, [b"abc"], 0)
    with pytest.raises(DiskError):
        getattr(faulty, sync)(fd)
    for use in (faulty.sync_data, faulty.sync_file, lambda fd: faulty.write_at(fd, [b"x"], 0)):
        with pytest.raises(InvariantViolation):
            use(fd)
    assert contents(disk) == b"abc"
    disk.drop_caches()
    assert contents(disk) == b""


def test_a_halted_process_does_nothing_more(disk):
    faulty = FaultyDisk(disk, DiskFault("any", 3, "halt"))
    fd = faulty.create(A)
    faulty.write_at(fd, [b"abc"], 0)
    with pytest.raises(Halted):
        faulty.write_at(fd, [b"def"], 3)
    for act in (lambda: faulty.unlink(A), lambda: faulty.read_at(fd, 1, 0)):
        with pytest.raises(Halted):
            act()
    faulty.close(fd)  # An object that is freed after the halt closes its file too.
    assert not issubclass(Halted, Exception)
    assert contents(disk) == b"abc"


def test_only_writes_can_be_short(disk):
    with pytest.raises(UsageError):
        FaultyDisk(disk, DiskFault("data_sync", 1, "short"))


# -- the monitor ------------------------------------------------------------------------------------------


def test_require_durable_needs_synced_bytes_and_a_synced_name(disk):
    """Bytes without a directory sync can disappear with their name."""
    monitor = Monitor()
    watched = monitor.watch(disk, incarnation=1)
    with pytest.raises(SyncOrderViolation, match="never made"):
        monitor.require_durable(A, 1)
    fd = watched.create(A)
    watched.write_at(fd, [b"abc"], 0)
    monitor.require_written(A, 3)
    with pytest.raises(SyncOrderViolation, match="written up to 3"):
        monitor.require_written(A, 4)
    with pytest.raises(SyncOrderViolation, match="synced up to 0"):
        monitor.require_durable(A, 3)
    watched.sync_data(fd)
    with pytest.raises(SyncOrderViolation, match="name"):
        monitor.require_durable(A, 3)
    watched.sync_dir("/data")
    monitor.require_durable(A, 3)
    watched.write_at(fd, [b"d"], 3)
    monitor.require_durable(A, 3)
    with pytest.raises(SyncOrderViolation, match="synced up to 3"):
        monitor.require_durable(A, 4)


def test_rewritten_bytes_need_their_own_sync(disk):
    monitor = Monitor()
    watched = monitor.watch(disk, 1)
    fd = synced_file(watched, b"abcdef")
    watched.write_at(fd, [b"x"], 2)
    monitor.require_durable(A, 2)
    with pytest.raises(SyncOrderViolation):
        monitor.require_durable(A, 3)


def test_require_durable_refuses_a_file_whose_sync_failed(disk):
    monitor = Monitor()
    watched = monitor.watch(FaultyDisk(disk, DiskFault("data_sync", 1, "EIO")), 1)
    fd = synced_file(watched, b"abc")
    with pytest.raises(DiskError):
        watched.sync_data(fd)
    with pytest.raises(SyncOrderViolation, match="sync failed"):
        monitor.require_durable(A, 3)
    with pytest.raises(SyncOrderViolation, match="again"):
        watched.sync_data(fd)


def test_a_file_belongs_to_one_incarnation(disk):
    """A path is never created twice, even after its file was removed (D3)."""
    monitor = Monitor()
    first, second = monitor.watch(disk, 1), monitor.watch(disk, 2)
    fd = synced_file(first, b"abc")
    first.close(fd)
    first.unlink(A)
    with pytest.raises(SyncOrderViolation, match="second time"):
        second.create(A)


def test_another_incarnation_may_not_write_the_file(disk):
    monitor = Monitor()
    fd = monitor.watch(disk, 1).create(A)
    second = monitor.watch(disk, 2)
    second.paths[fd] = A  # as if the process had inherited the handle
    with pytest.raises(SyncOrderViolation, match="did not make it"):
        second.write_at(fd, [b"x"], 0)


def test_a_successor_may_cut_a_file_even_after_a_failed_sync(disk):
    """The successor adds no bytes, and no byte of the file counts as synced (D3)."""
    monitor = Monitor()
    first = monitor.watch(FaultyDisk(disk, DiskFault("data_sync", 1, "EIO")), 1)
    fd = synced_file(first, b"abcdef")
    with pytest.raises(DiskError):
        first.sync_data(fd)
    disk.process_kill()
    second = monitor.watch(disk, 2)
    cut = second.open_for_truncate(A)
    second.truncate(cut, 3)
    second.sync_file(cut)
    second.close(cut)
    assert contents(disk) == b"abc"
    with pytest.raises(SyncOrderViolation):
        monitor.require_durable(A, 3)


def test_a_file_is_not_renamed_before_it_is_synced(disk):
    """The monitor reports the rename (D2)."""
    watched = Monitor().watch(disk, 1)
    fd = watched.create("/data/a.tmp")
    with pytest.raises(SyncOrderViolation, match="before it is synced"):
        watched.rename("/data/a.tmp", A)
    watched.sync_file(fd)
    watched.rename("/data/a.tmp", A)


def test_the_old_file_is_not_removed_before_the_directory_sync(disk):
    """Otherwise a power loss could take both the old and the new file."""
    watched = Monitor().watch(disk, 1)
    synced_file(watched, b"old")
    fd = watched.create("/data/b")
    watched.sync_file(fd)
    with pytest.raises(SyncOrderViolation, match="before a directory sync"):
        watched.unlink(A)
    watched.sync_dir("/data")
    watched.unlink(A)


def test_the_monitor_accepts_a_correct_replacement(disk):
    monitor = Monitor()
    for incarnation in (1, 2):
        replace_file(monitor.watch(disk, incarnation), "/data", "a", b"abc")
    monitor.require_durable(A, 3)


def test_a_disk_is_copied_while_the_collector_closes_files(disk, request):
    def reads_one():
        fd = disk.open_read(A)
        try:
            yield
        finally:
            disk.close(fd)

    synced_file(disk, b"abc")
    before = gc.get_threshold()
    request.addfinalizer(lambda: gc.set_threshold(*before))
    for objects_made in range(1, 60):
        abandoned = [reads_one() for _ in range(20)]
        for reading in abandoned:
            next(reading)
        abandoned.append(abandoned)  # The cycle can only be freed by the garbage collector.
        gc.collect(0)
        gc.set_threshold(objects_made, 1, 1)
        del reading, abandoned
        assert contents(disk.copy()) == b"abc"
        gc.set_threshold(0)
