"""The log writer: order of disk calls, failed attempts, and syncs from two threads."""

from __future__ import annotations

import threading

import pytest

from ringlog.errors import DiskError, InvariantViolation
from ringlog.limits import FILL_CHUNK_BYTES, WAL_HEADER_BYTES
from ringlog.storage.layout import decode_wal_header
from ringlog.storage.log_register import RegisterEntry, read_register
from ringlog.storage.wal import SYNC_CHUNK_BYTES, ShardLogIdentity, WalWriter
from ringlog.testing import disk as d
from ringlog.testing.disk import DiskFault, FaultyDisk, RecordingDisk, SimulatedDisk

DIRECTORY = "/data/wal/shard-00"
MAKES_REGISTER = ["MakeDir", "SyncDir", "Create", "Write", "SyncFile", "Rename", "SyncDir"]
ME = ShardLogIdentity("/data", DIRECTORY, 0, 1, 5, b"b" * 16, b"e" * 16)


def writer_on(disk: d.RecordingDisk | FaultyDisk | SimulatedDisk, file_bytes: int = 64 << 10) -> WalWriter:
    return WalWriter(disk, ME, file_bytes)


def opened(writer: WalWriter, at_least: int = 0) -> None:
    prepared = writer.prepare(at_least, fill=False)
    writer.open(prepared, salt=7, created_us=1, prev=(0, 0, 0), flags=0, last_identity=(0, 0))


def kinds(disk: RecordingDisk) -> list[str]:
    return [type(each).__name__ for each in disk.operations]


def test_a_new_file_is_allocated_then_gets_its_header_then_its_register_entry():
    """The file is allocated, synced and named before its header is written. The header is durable before the
    register names the file, and the register is durable before the first commit batch (RF-68)."""
    disk = RecordingDisk(SimulatedDisk(DIRECTORY))
    writer = writer_on(disk)
    prepared = writer.prepare(0)
    assert kinds(disk) == ["Create", "Allocate", "Write", "SyncData", "SyncFile", "SyncDir"]
    disk.operations.clear()
    header = writer.open(prepared, salt=7, created_us=1, prev=(3, 4, 5), flags=1, last_identity=(8, 9))
    assert kinds(disk) == ["Write", "SyncData", *MAKES_REGISTER]
    register = read_register(disk, "/data", 0)
    assert register == RegisterEntry(0, 1, b"e" * 16, 8, 9, prepared.capacity, 1, header.file_id)
    second = writer.prepare(0)
    disk.operations.clear()
    later = writer.open(second, salt=7, created_us=1, prev=(3, 4, 5), flags=1, last_identity=(9, 9))
    assert kinds(disk)[:4] == ["Write", "SyncData", "Write", "SyncData"], "one sync where it lies"
    assert read_register(disk, "/data", 0) == RegisterEntry(
        0, 2, b"e" * 16, 9, 9, second.capacity, 1, later.file_id
    )
    fd = disk.open_read(prepared.path)
    assert decode_wal_header(disk.read_at(fd, WAL_HEADER_BYTES, 0), "") == header
    assert (header.prev_file, header.prev_stop, header.prev_seal, header.flags) == (3, 4, 5, 3)


def test_a_file_without_zero_fill_is_synced_too():
    disk = RecordingDisk(SimulatedDisk(DIRECTORY))
    writer_on(disk).prepare(0, fill=False)
    assert kinds(disk) == ["Create", "Allocate", "SyncFile", "SyncDir"]


def test_a_file_is_larger_than_configured_only_for_a_larger_request():
    writer = writer_on(SimulatedDisk(DIRECTORY))
    assert writer.prepare(0).capacity == 64 << 10
    assert writer.prepare(64 << 10).capacity == 64 << 10
    assert writer.prepare((64 << 10) + 1).capacity == FILL_CHUNK_BYTES


@pytest.mark.parametrize("op", ["open", "size", "write", "data_sync", "full_sync", "dir_sync"])
@pytest.mark.parametrize("also", [None, "unlink"])
def test_a_failed_prepare_does_not_block_the_next_one(op, also):
    """The next attempt succeeds, whether or not the leftover file could be removed (RF-46)."""
    disk = FaultyDisk(SimulatedDisk(DIRECTORY), DiskFault(op, 1, "ENOSPC"))
    if also:
        disk.plan.append(DiskFault("unlink", 1, "EIO"))
    writer = writer_on(disk)
    with pytest.raises(DiskError):
        writer.prepare(0)
    disk.plan = []
    first, second = writer.prepare(0), writer.prepare(0)
    assert first.n < second.n
    writer.open(first, salt=7, created_us=1, prev=(0, 0, 0), flags=0, last_identity=(0, 0))
    writer.append([b"x" * 8], WAL_HEADER_BYTES, 8)


def test_a_commit_batch_is_appended_at_the_end_and_never_beyond_the_file():
    """A commit batch never spans files (W8)."""
    writer = writer_on(SimulatedDisk(DIRECTORY))
    opened(writer)
    writer.append([b"a" * 8, bytearray(b"b" * 8)], WAL_HEADER_BYTES, 16)
    for offset, length in (
        (WAL_HEADER_BYTES, 8), (WAL_HEADER_BYTES + 24, 8), (WAL_HEADER_BYTES + 16, 64 << 10),
    ):  # fmt: skip
        with pytest.raises(InvariantViolation):
            writer.append([bytes(length)], offset, length)


def test_close_truncates_the_unused_end():
    disk = SimulatedDisk(DIRECTORY)
    writer = writer_on(disk)
    opened(writer)
    writer.append([b"a" * 8], WAL_HEADER_BYTES, 8)
    writer.close(truncate=True)
    writer.close(truncate=True)
    fd = disk.open_read(f"{DIRECTORY}/wal-5-0.log")
    assert disk.size(fd) == WAL_HEADER_BYTES + 8


def test_a_concurrent_sync_fails_if_the_first_sync_fails():
    """The kernel reports a failed write-back once. The second sync waits and is then refused (RF-41,
    RF-43)."""

    class SlowToFail(SimulatedDisk):
        """A disk whose first sync fails after another thread had time to start a sync."""

        def __init__(self) -> None:
            super().__init__(DIRECTORY)
            self.is_failing = False
            self.begun, self.go_on = threading.Event(), threading.Event()

        def sync_data(self, fd: int) -> None:
            if self.is_failing:
                self.is_failing = False
                self.begun.set()
                assert self.go_on.wait(10)
                self.fail_syncs = 1
            super().sync_data(fd)

    disk = SlowToFail()
    writer = writer_on(disk)
    opened(writer)
    writer.append([b"a" * 8], WAL_HEADER_BYTES, 8)
    disk.is_failing = True
    outcomes: list[str] = []

    def sync() -> None:
        try:
            writer.sync()
            outcomes.append("ok")
        except (DiskError, InvariantViolation) as e:
            outcomes.append(type(e).__name__)

    flusher = threading.Thread(target=sync)
    flusher.start()
    assert disk.begun.wait(10)
    committer = threading.Thread(target=sync)
    committer.start()
    committer.join(0.2)
    assert committer.is_alive(), "it waits for the one that is under way"
    disk.go_on.set()
    flusher.join(10)
    committer.join(10)
    assert outcomes == ["DiskError", "InvariantViolation"]


@pytest.mark.parametrize(
    "sizes", [[10], [SYNC_CHUNK_BYTES], [100, 3 * SYNC_CHUNK_BYTES + 24], [SYNC_CHUNK_BYTES // 2] * 5]
)
@pytest.mark.parametrize("is_synced", [True, False])
def test_a_commit_batch_with_a_sync_is_written_in_chunks(sizes: list[int], is_synced: bool):
    """The bytes are the same with and without a sync. Write-back of each chunk begins after its write and
    before the next write."""
    calls: list[tuple[str, int, int]] = []

    class Watched(SimulatedDisk):
        def write_at(self, fd, buffers, offset):
            count = super().write_at(fd, buffers, offset)
            calls.append(("write", offset, count))
            return count

        def begin_sync(self, fd, offset, length):
            super().begin_sync(fd, offset, length)
            calls.append(("begin", offset, length))

    disk = Watched(DIRECTORY)
    writer = writer_on(disk, 4 << 20)
    opened(writer)
    calls.clear()
    buffers = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    start, length = writer.offset, sum(sizes)
    writer.append(buffers, start, length, is_synced=is_synced)
    writer.sync()
    fd = disk.open_read(writer.path)
    assert disk.read_at(fd, length, start) == b"".join(buffers)
    disk.close(fd)
    writer.close()
    written = [call for call in calls if call[0] == "write"]
    assert sum(count for _, _, count in written) == length
    if is_synced:
        assert calls[::2] == written
        assert calls[1::2] == [("begin", offset, count) for _, offset, count in written]
        assert max(count for _, _, count in written) < 2 * SYNC_CHUNK_BYTES
    else:
        assert calls == [("write", start, length)]
