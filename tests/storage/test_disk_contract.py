"""The contract of every Disk, tested on the real disk, the simulated disk and each wrapper around it."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from ringlog.errors import DiskError, InvariantViolation
from ringlog.limits import FILL_CHUNK_BYTES
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.vectored_write import IOV_MAX
from ringlog.testing.disk import FaultyDisk, Monitor, RecordingDisk, SimulatedDisk


class DiskContract:
    """Tests for any Disk. Subclasses provide `disk` and `root`, an existing empty directory."""

    disk: Disk
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def made(self, name: str, data: bytes = b"") -> int:
        fd = self.disk.create(self.path(name))
        if data:
            self.disk.write_at(fd, [data], 0)
        return fd

    def contents(self, name: str) -> bytes:
        fd = self.disk.open_read(self.path(name))
        try:
            return self.disk.read_at(fd, self.disk.size(fd), 0)
        finally:
            self.disk.close(fd)

    def put(self, name: str, data: bytes) -> None:
        fd = self.made(name, data)
        self.disk.sync_file(fd)
        self.disk.close(fd)

    # -- files ----------------------------------------------------------------------------------------

    def test_a_new_file_is_empty_and_has_a_name(self):
        fd = self.disk.create(self.path("a"))
        assert self.disk.size(fd) == 0
        assert self.disk.exists(self.path("a"))
        assert self.disk.list_dir(self.root) == ["a"]
        self.disk.close(fd)

    def test_create_refuses_an_existing_file(self):
        """`create` uses O_EXCL. The error reports the call, the path and the errno."""
        self.disk.close(self.disk.create(self.path("a")))
        with pytest.raises(DiskError) as caught:
            self.disk.create(self.path("a"))
        facts = caught.value.detail
        assert caught.value.errno == errno.EEXIST
        assert (facts["call"], facts["path"]) == ("create", self.path("a"))
        assert facts["strerror"] == os.strerror(errno.EEXIST)

    @pytest.mark.parametrize(
        "call", ["create", "open_read", "open_for_truncate", "list_dir", "sync_dir", "unlink", "lock"]
    )
    def test_a_path_in_a_missing_directory_is_not_found(self, call):
        with pytest.raises(DiskError) as caught:
            getattr(self.disk, call)(self.path("none/a"))
        assert caught.value.errno == errno.ENOENT
        assert caught.value.detail["call"] == call

    def test_write_at_writes_buffers_one_after_another(self):
        fd = self.disk.create(self.path("a"))
        buffers = [
            b"one",
            bytearray(b"two"),
            memoryview(b"three"),
            np.arange(2, dtype="<u4"),
            b"",
            np.empty(0),
        ]
        assert self.disk.write_at(fd, buffers, 4) == 3 + 3 + 5 + 8
        assert self.disk.read_at(fd, 100, 0) == b"\0\0\0\0onetwothree" + bytes([0, 0, 0, 0, 1, 0, 0, 0])
        assert self.disk.write_at(fd, [], 0) == 0
        assert self.disk.write_at(fd, [b""], 0) == 0
        self.disk.close(fd)

    def test_write_at_writes_more_buffers_than_one_system_call_accepts(self):
        fd = self.disk.create(self.path("a"))
        buffers = [bytes([i % 251]) * (i % 3) for i in range(3 * IOV_MAX + 7)]
        assert self.disk.write_at(fd, buffers, 1) == len(b"".join(buffers))
        assert self.disk.read_at(fd, 1 << 20, 1) == b"".join(buffers)
        self.disk.close(fd)

    def test_reading_stops_at_the_end(self):
        fd = self.made("a", b"abcdef")
        assert self.disk.read_at(fd, 3, 2) == b"cde"
        assert self.disk.read_at(fd, 10, 4) == b"ef"
        assert self.disk.read_at(fd, 10, 6) == b""
        buffer = bytearray(b"........")
        assert self.disk.read_into(fd, buffer, 2) == 4
        assert buffer == b"cdef...."
        words = np.zeros(1, dtype="<u4")
        assert self.disk.read_into(fd, words, 0) == 4
        assert words.tobytes() == b"abcd"
        assert self.disk.read_into(fd, bytearray(), 0) == 0
        self.disk.close(fd)

    def test_allocated_space_reads_as_zeros_and_keeps_existing_bytes(self):
        fd = self.made("a", b"abc")
        self.disk.allocate(fd, 0, 8192)
        assert self.disk.size(fd) == 8192
        assert self.disk.read_at(fd, 8192, 0) == b"abc" + bytes(8189)
        self.disk.allocate(fd, 0, 100)
        assert self.disk.size(fd) == 8192
        self.disk.close(fd)

    def test_an_allocation_of_zero_bytes_is_refused(self):
        fd = self.disk.create(self.path("a"))
        with pytest.raises(DiskError) as caught:
            self.disk.allocate(fd, 0, 0)
        assert caught.value.errno == errno.EINVAL
        self.disk.close(fd)

    def test_a_zero_fill_covers_its_range_and_no_more(self):
        fd = self.made("a", b"x" * 10)
        self.disk.zero_fill(fd, 2, 3)
        assert self.disk.read_at(fd, 10, 0) == b"xx\0\0\0xxxxx"
        length = FILL_CHUNK_BYTES + 5
        self.disk.zero_fill(fd, 9, length)
        assert self.disk.size(fd) == 9 + length
        assert not any(self.disk.read_at(fd, length, 9))
        self.disk.close(fd)

    def test_truncate_shortens_and_extends_a_file(self):
        fd = self.made("a", b"abcdef")
        self.disk.truncate(fd, 2)
        self.disk.truncate(fd, 4)
        assert self.disk.read_at(fd, 10, 0) == b"ab\0\0"
        self.disk.close(fd)

    def test_a_file_opened_for_reading_cannot_be_written(self):
        self.put("a", b"abc")
        fd = self.disk.open_read(self.path("a"))
        with pytest.raises(DiskError) as caught:
            self.disk.write_at(fd, [b"x"], 0)
        assert caught.value.errno == errno.EBADF
        self.disk.close(fd)
        assert self.contents("a") == b"abc"

    def test_a_file_opened_with_open_cut_can_only_become_shorter(self):
        """A process never adds to a file that another process created (D3)."""
        self.put("a", b"abcdef")
        fd = self.disk.open_for_truncate(self.path("a"))
        for add in (
            lambda: self.disk.write_at(fd, [b"x"], 6),
            lambda: self.disk.allocate(fd, 0, 10),
            lambda: self.disk.zero_fill(fd, 0, 1),
            lambda: self.disk.truncate(fd, 7),
        ):
            with pytest.raises((InvariantViolation, AssertionError)):
                add()
        assert self.disk.read_at(fd, 10, 0) == b"abcdef"
        self.disk.truncate(fd, 4)
        self.disk.sync_file(fd)
        self.disk.close(fd)
        assert self.contents("a") == b"abcd"

    def test_a_directory_is_not_opened_as_a_file(self):
        """open_read refuses everything but a regular file."""
        self.disk.make_dir(self.path("d"))
        with pytest.raises(DiskError):
            self.disk.open_read(self.path("d"))

    def test_a_file_removed_while_open_can_still_be_read(self):
        fd = self.made("a", b"abc")
        self.disk.unlink(self.path("a"))
        assert not self.disk.exists(self.path("a"))
        assert self.disk.read_at(fd, 3, 0) == b"abc"
        self.disk.close(fd)

    @pytest.mark.parametrize(
        "use",
        [
            lambda disk, fd: disk.write_at(fd, [b"x"], 0),
            lambda disk, fd: disk.allocate(fd, 0, 1),
            lambda disk, fd: disk.truncate(fd, 1),
            lambda disk, fd: disk.sync_data(fd),
            lambda disk, fd: disk.close(fd),
        ],
    )
    def test_a_closed_handle_is_refused(self, use):
        fd = self.made("a")
        self.disk.close(fd)
        with pytest.raises(InvariantViolation):
            use(self.disk, fd)

    # -- names ----------------------------------------------------------------------------------------

    def test_a_rename_replaces_an_existing_file(self):
        self.put("a", b"new")
        self.put("b", b"old")
        self.disk.rename(self.path("a"), self.path("b"))
        assert self.disk.list_dir(self.root) == ["b"]
        assert self.contents("b") == b"new"

    def test_a_file_can_move_to_another_directory_while_open(self):
        self.disk.make_dir(self.path("d"))
        fd = self.made("a", b"abc")
        self.disk.sync_data(fd)
        self.disk.rename(self.path("a"), self.path("d/b"))
        self.disk.write_at(fd, [b"d"], 3)
        self.disk.sync_data(fd)
        self.disk.close(fd)
        assert self.contents("d/b") == b"abcd"
        assert self.disk.list_dir(self.root) == ["d"]

    @pytest.mark.parametrize("is_open", [True, False])
    def test_a_file_whose_bytes_are_not_synced_is_not_renamed(self, is_open):
        """Otherwise the name could survive a power loss without the bytes (D2)."""
        fd = self.made("a", b"abc")
        if not is_open:
            self.disk.close(fd)
        with pytest.raises((InvariantViolation, AssertionError)):
            self.disk.rename(self.path("a"), self.path("b"))
        assert self.disk.list_dir(self.root) == ["a"]
        if is_open:
            self.disk.close(fd)

    def test_a_file_may_be_renamed_after_another_handle_synced_it(self):
        self.disk.close(self.made("a", b"abc"))
        fd = self.disk.open_read(self.path("a"))
        self.disk.sync_file(fd)
        self.disk.close(fd)
        self.disk.rename(self.path("a"), self.path("b"))
        assert self.contents("b") == b"abc"

    def test_an_absent_file_is_not_renamed_or_removed(self):
        for act in (
            lambda: self.disk.rename(self.path("a"), self.path("b")),
            lambda: self.disk.unlink(self.path("a")),
        ):
            with pytest.raises(DiskError) as caught:
                act()
            assert caught.value.errno == errno.ENOENT

    def test_a_directory_may_be_made_twice(self):
        self.disk.make_dir(self.path("d"))
        self.disk.make_dir(self.path("d"))
        assert self.disk.list_dir(self.path("d")) == []
        assert self.disk.exists(self.path("d"))

    def test_make_dir_refuses_the_path_of_a_file(self):
        self.put("d", b"")
        with pytest.raises(DiskError) as caught:
            self.disk.make_dir(self.path("d"))
        assert caught.value.errno == errno.EEXIST

    def test_a_directory_is_removed_only_when_it_is_empty(self):
        self.disk.make_dir(self.path("d"))
        self.put("d/a", b"")
        with pytest.raises(DiskError) as caught:
            self.disk.remove_dir(self.path("d"))
        assert caught.value.errno == errno.ENOTEMPTY
        self.disk.unlink(self.path("d/a"))
        self.disk.remove_dir(self.path("d"))
        assert not self.disk.exists(self.path("d"))
        with pytest.raises(DiskError) as caught:
            self.disk.remove_dir(self.path("d"))
        assert caught.value.errno == errno.ENOENT

    def test_a_file_is_not_removed_as_a_directory(self):
        self.put("a", b"")
        with pytest.raises(DiskError) as caught:
            self.disk.remove_dir(self.path("a"))
        assert caught.value.errno == errno.ENOTDIR

    def test_make_dir_does_not_create_parents(self):
        with pytest.raises(DiskError) as caught:
            self.disk.make_dir(self.path("d/e"))
        assert caught.value.errno == errno.ENOENT

    def test_names_are_listed_in_order(self):
        for name in ("b", "c", "a"):
            self.put(name, b"")
        assert self.disk.list_dir(self.root) == ["a", "b", "c"]

    def test_exists_distinguishes_absence_from_an_error(self):
        """An error is never treated as an absent file (RF-50)."""
        assert not self.disk.exists(self.path("a"))
        assert not self.disk.exists(self.path("none/a"))
        self.put("f", b"")
        with pytest.raises(DiskError) as caught:
            self.disk.exists(self.path("f/a"))
        assert caught.value.errno == errno.ENOTDIR

    def test_replace_file_replaces_a_file_as_a_whole(self):
        """A reader sees the old contents or the new contents, and no temporary file remains."""
        replace_file(self.disk, self.root, "a", b"first")
        replace_file(self.disk, self.root, "a", memoryview(b"second"))
        assert self.contents("a") == b"second"
        assert self.disk.list_dir(self.root) == ["a"]

    def test_replace_file_overwrites_a_leftover_temporary_file(self):
        """An earlier process may have died before its rename."""
        self.put("a.tmp", b"half")
        replace_file(self.disk, self.root, "a", b"whole")
        assert self.contents("a") == b"whole"
        assert self.disk.list_dir(self.root) == ["a"]

    # -- locks ----------------------------------------------------------------------------------------

    def test_a_lock_has_one_holder_and_can_be_taken_after_unlock(self):
        first = self.disk.lock(self.path("LOCK"))
        with pytest.raises(DiskError) as caught:
            self.disk.lock(self.path("LOCK"))
        assert caught.value.errno == errno.EWOULDBLOCK
        assert caught.value.detail["holder"]
        self.disk.unlock(first)
        self.disk.unlock(self.disk.lock(self.path("LOCK")))
        assert self.disk.list_dir(self.root) == ["LOCK"]


class TestRealDisk(DiskContract):
    @pytest.fixture(autouse=True)
    def _disk(self, tmp_path):
        self.disk, self.root = RealDisk(), str(tmp_path)


class TestSimulatedDisk(DiskContract):
    @pytest.fixture(autouse=True)
    def _disk(self):
        self.disk, self.root = SimulatedDisk("/srv/data"), "/srv/data"


class TestRecordingDisk(DiskContract):
    @pytest.fixture(autouse=True)
    def _disk(self):
        self.disk, self.root = RecordingDisk(SimulatedDisk("/data")), "/data"


class TestFaultyDiskWithoutFaults(DiskContract):
    @pytest.fixture(autouse=True)
    def _disk(self, tmp_path):
        self.disk, self.root = FaultyDisk(RealDisk()), str(tmp_path)


class TestMonitorDisk(DiskContract):
    @pytest.fixture(autouse=True)
    def _disk(self):
        self.disk, self.root = Monitor().watch(SimulatedDisk("/data"), incarnation=1), "/data"
