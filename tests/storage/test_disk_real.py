"""Properties of the real disk alone: modes, links, limits of the kernel, and the state of unsynced files."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringlog.errors import DiskError, InvariantViolation
from ringlog.storage import real_disk, vectored_write
from ringlog.storage.real_disk import RealDisk, UnsyncedState
from ringlog.storage.vectored_write import TRANSIENT_RETRIES_MAX, write_fully


@pytest.fixture
def disk():
    return RealDisk()


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def test_files_and_directories_are_for_the_owner_only(disk, root):
    """The modes do not depend on the umask."""
    before = os.umask(0)
    try:
        disk.close(disk.create(f"{root}/a"))
        disk.make_dir(f"{root}/d")
        disk.unlock(disk.lock(f"{root}/LOCK"))
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.stat(f"{root}/{name}").st_mode) for name in ("a", "d", "LOCK")}
    assert modes == {"a": 0o600, "d": 0o700, "LOCK": 0o600}


def test_handles_are_not_inherited_by_child_processes(disk, root):
    """All descriptors are close-on-exec."""
    for fd in (disk.create(f"{root}/a"), disk.open_read(f"{root}/a"), disk.lock(f"{root}/LOCK")):
        assert not os.get_inheritable(fd)
        disk.close(fd)


@pytest.mark.parametrize("call", ["create", "open_read", "open_for_truncate", "open_for_overwrite", "lock"])
def test_a_symbolic_link_is_not_followed(disk, root, call):
    """Every open call refuses a symbolic link (RF-111)."""
    disk.close(disk.create(f"{root}/target"))
    os.symlink(f"{root}/target", f"{root}/link")
    with pytest.raises(DiskError) as caught:
        getattr(disk, call)(f"{root}/link")
    assert caught.value.errno in {errno.ELOOP, errno.EEXIST}


def test_a_dangling_link_does_not_create_its_target(disk, root):
    os.symlink(f"{root}/target", f"{root}/link")
    with pytest.raises(DiskError):
        disk.create(f"{root}/link")
    with pytest.raises(DiskError):
        disk.lock(f"{root}/link")
    assert not disk.exists(f"{root}/target")


@pytest.mark.parametrize("call", ["open_read", "open_for_truncate", "open_for_overwrite", "lock"])
def test_a_file_with_two_names_is_refused(disk, root, call):
    """A second hard link would give another program access to the file."""
    disk.close(disk.create(f"{root}/a"))
    os.link(f"{root}/a", f"{root}/b")
    with pytest.raises(DiskError) as caught:
        getattr(disk, call)(f"{root}/a")
    assert "must be 1, got 2" in str(caught.value)


@pytest.mark.parametrize("call", ["open_read", "open_for_truncate", "open_for_overwrite", "lock"])
def test_a_pipe_is_refused_without_blocking(disk, root, call):
    """Only regular files are opened."""
    os.mkfifo(f"{root}/pipe")
    with pytest.raises(DiskError) as caught:
        getattr(disk, call)(f"{root}/pipe")
    assert "not a regular file" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_or_directory_of_another_user_is_refused(disk, root):
    """The error contains the owner's uid."""
    disk.close(disk.create(f"{root}/a"))
    os.chown(f"{root}/a", 12345, -1)
    disk.make_dir(f"{root}/d")
    os.chown(f"{root}/d", 12345, -1)
    for act in (lambda: disk.open_read(f"{root}/a"), lambda: disk.make_dir(f"{root}/d")):
        with pytest.raises(DiskError) as caught:
            act()
        assert "12345" in str(caught.value)


def test_a_directory_that_is_a_link_is_refused(disk, root):
    disk.make_dir(f"{root}/d")
    os.symlink(f"{root}/d", f"{root}/link")
    with pytest.raises(DiskError) as caught:
        disk.make_dir(f"{root}/link")
    assert caught.value.errno == errno.EEXIST


def test_refused_files_leave_no_descriptor_open(disk, root):
    os.mkfifo(f"{root}/pipe")
    before = len(os.listdir("/proc/self/fd"))
    for call in ("open_read", "open_for_truncate", "open_for_overwrite", "lock"):
        with pytest.raises(DiskError):
            getattr(disk, call)(f"{root}/pipe")
    held = disk.lock(f"{root}/LOCK")
    with pytest.raises(DiskError):
        disk.lock(f"{root}/LOCK")
    disk.unlock(held)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_lock_reports_its_holder(disk, root):
    held = disk.lock(f"{root}/LOCK")
    with pytest.raises(DiskError) as caught:
        RealDisk().lock(f"{root}/LOCK")
    assert caught.value.detail["holder"] == f"pid {os.getpid()}"
    disk.unlock(held)


# -- unsynced state ---------------------------------------------------------------------------------------


def test_unsynced_reports_the_bytes_length_and_name_without_a_sync(disk, root):
    """Bytes, length and name of a file each need a sync of their own kind."""
    fd = disk.create(f"{root}/a")
    assert disk.unsynced(fd) == UnsyncedState(bytes=0, length=False, name=True)
    disk.write_at(fd, [b"abc", b"de"], 0)
    assert disk.unsynced(fd) == UnsyncedState(bytes=5, length=True, name=True)
    disk.sync_data(fd)
    assert disk.unsynced(fd) == UnsyncedState(bytes=0, length=False, name=True)
    disk.sync_dir(f"{root}/")
    assert disk.unsynced(fd) == UnsyncedState(bytes=0, length=False, name=False)
    disk.write_at(fd, [b"x"], 1)
    assert disk.unsynced(fd) == UnsyncedState(bytes=1, length=False, name=False)
    disk.sync_file(fd)
    disk.allocate(fd, 0, 100)
    assert disk.unsynced(fd) == UnsyncedState(bytes=0, length=True, name=False)
    disk.truncate(fd, 5)
    assert disk.unsynced(fd).bytes > 0
    disk.sync_file(fd)
    disk.zero_fill(fd, 0, 5)
    assert disk.unsynced(fd) == UnsyncedState(bytes=5, length=False, name=False)
    disk.close(fd)


def test_a_sync_of_another_directory_does_not_cover_a_name(disk, root):
    disk.make_dir(f"{root}/d")
    fd = disk.create(f"{root}/a")
    disk.sync_dir(f"{root}/d")
    assert disk.unsynced(fd).name
    disk.sync_dir(root)
    disk.rename(f"{root}/a", f"{root}/d/b")
    assert disk.unsynced(fd).name
    disk.sync_dir(root)
    assert disk.unsynced(fd).name
    disk.sync_dir(f"{root}/d")
    assert not disk.unsynced(fd).name
    disk.close(fd)


def test_bytes_written_during_a_sync_are_not_covered_by_it(disk, root, monkeypatch):
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"before"], 0)
    real = os.fdatasync

    def sync_with_company(synced: int) -> None:
        real(synced)
        disk.write_at(fd, [b"beside"], 100)

    monkeypatch.setattr(os, "fdatasync", sync_with_company)
    disk.sync_data(fd)
    assert disk.unsynced(fd)[:2] == (6, True)
    monkeypatch.undo()
    disk.sync_data(fd)
    assert disk.unsynced(fd)[:2] == (0, False)
    disk.close(fd)


def test_threads_may_write_and_sync_different_files_at_once(disk, root):
    def work(number: int) -> bytes:
        fd = disk.create(f"{root}/{number}")
        for at in range(50):
            disk.write_at(fd, [bytes([number]) * 8], at * 8)
        disk.sync_data(fd)
        data = disk.read_at(fd, 1000, 0)
        disk.close(fd)
        return data

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    assert results == [bytes([number]) * 400 for number in range(8)]


# -- failed syncs -----------------------------------------------------------------------------------------

USES = {
    "write_at": lambda disk, fd: disk.write_at(fd, [b"x"], 0),
    "zero_fill": lambda disk, fd: disk.zero_fill(fd, 0, 1),
    "allocate": lambda disk, fd: disk.allocate(fd, 0, 1),
    "truncate": lambda disk, fd: disk.truncate(fd, 0),
    "sync_data": lambda disk, fd: disk.sync_data(fd),
    "sync_file": lambda disk, fd: disk.sync_file(fd),
}


def test_a_failure_to_write_back_is_a_failed_sync(disk, root, monkeypatch):
    """The kernel reports a failed write-back once for each descriptor (RF-43).

    If write_back ignored the error, the next sync would succeed. The engine would then delete the log from
    which the file was made.
    """
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"x" * 65_536], 0)
    calls = []

    def fail_to_wait(fd: int, offset: int, length: int, flags: int) -> None:
        calls.append(flags)
        if flags & real_disk._WAIT_BEFORE:
            raise OSError(errno.EIO, "the device lost it")

    monkeypatch.setattr(real_disk, "_sync_range", fail_to_wait)
    disk.write_back(fd, 0, 32_768)
    with pytest.raises(DiskError) as caught:
        disk.write_back(fd, 32_768, 32_768)
    assert (caught.value.detail["call"], caught.value.errno) == ("write_back", errno.EIO)
    assert len(calls) == 3, "begin, begin, wait for the first"
    with pytest.raises(InvariantViolation):
        disk.sync_file(fd)
    disk.close(fd)


def test_write_back_reports_errors_of_the_system_call(disk, root):
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"x" * 65_536], 0)
    disk.write_back(fd, 0, 65_536)
    disk.write_back(fd, 65_536, 0)
    os.close(fd)
    with pytest.raises(DiskError) as caught:
        disk.write_back(fd, 0, 65_536)
    assert caught.value.errno == errno.EBADF


def test_a_failure_of_begin_sync_is_a_failed_sync(disk, root):
    """A failed sync is never retried, whether it began early or not (D4)."""
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"x" * 65_536], 0)
    disk.begin_sync(fd, 0, 65_536)
    disk.sync_data(fd)
    disk.write_at(fd, [b"y" * 4_096], 65_536)
    kept = os.dup(fd)
    os.close(fd)
    with pytest.raises(DiskError) as caught:
        disk.begin_sync(fd, 65_536, 4_096)
    assert (caught.value.detail["call"], caught.value.errno) == ("begin_sync", errno.EBADF)
    os.dup2(kept, fd)
    os.close(kept)
    with pytest.raises(InvariantViolation):
        disk.sync_data(fd)
    disk.close(fd)


@pytest.mark.parametrize("sync", ["sync_data", "sync_file"])
@pytest.mark.parametrize("use", USES)
def test_a_file_whose_sync_failed_refuses_further_use(disk, root, sync, use):
    """A failed sync is never retried (D4). The failure is real: the descriptor is closed."""
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"abc"], 0)
    kept = os.dup(fd)
    os.close(fd)
    with pytest.raises(DiskError) as caught:
        getattr(disk, sync)(fd)
    assert caught.value.errno == errno.EBADF
    assert caught.value.detail["call"] == sync
    os.dup2(kept, fd)
    os.close(kept)
    with pytest.raises(InvariantViolation) as broken:
        USES[use](disk, fd)
    assert broken.value.detail["path"] == f"{root}/a"
    assert disk.read_at(fd, 3, 0) == b"abc", "reading is allowed: recovery looks at what there is"
    disk.close(fd)


@pytest.mark.parametrize("sync", ["sync_data", "sync_file"])
@pytest.mark.parametrize(
    ("access", "refused"),
    [("create", "pread"), ("create", "pwrite"), ("open_for_overwrite", "pwrite"), ("open_read", "pread")],
)
def test_a_sync_fails_if_the_file_system_stopped_meanwhile(disk, root, monkeypatch, sync, access, refused):
    """ext4 and xfs report the success of a sync that runs while they stop. Later calls fail."""
    if access != "create":
        disk.close(disk.create(f"{root}/a"))
    fd = getattr(disk, access)(f"{root}/a")
    changed_ns = os.stat(fd).st_mtime_ns
    getattr(disk, sync)(fd)
    assert os.stat(fd).st_mtime_ns == changed_ns

    def stopped(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, refused, stopped)
    with pytest.raises(DiskError) as caught:
        getattr(disk, sync)(fd)
    assert (caught.value.detail["call"], caught.value.errno) == (sync, errno.EIO)
    monkeypatch.undo()
    with pytest.raises(InvariantViolation):
        getattr(disk, sync)(fd)
    disk.close(fd)


def test_a_directory_sync_fails_if_the_file_system_stopped_meanwhile(disk, root, monkeypatch):
    """XFS reports the success of a sync that runs while it stops. Later calls fail."""
    fd = disk.create(f"{root}/a")
    original = os.fstat

    def stopped(of: int) -> os.stat_result:
        if stat.S_ISDIR(original(of).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(of)

    monkeypatch.setattr(os, "fstat", stopped)
    with pytest.raises(DiskError) as caught:
        disk.sync_dir(root)
    assert (caught.value.detail["call"], caught.value.errno) == ("sync_dir", errno.EIO)
    monkeypatch.undo()
    disk.sync_dir(root)
    assert disk.unsynced(fd).name, "the later success proves nothing about this name"
    disk.close(fd)


def test_a_new_file_with_a_reused_descriptor_number_is_usable(disk, root):
    fd = disk.create(f"{root}/a")
    os.close(fd)
    with pytest.raises(DiskError):
        disk.sync_data(fd)
    with pytest.raises(DiskError):
        disk.close(fd)
    again = disk.create(f"{root}/b")
    assert again == fd
    disk.write_at(again, [b"x"], 0)
    disk.sync_data(again)
    disk.close(again)


def test_names_stay_unsynced_after_a_failed_directory_sync(disk, root, monkeypatch):
    """A later success does not cover the changes that an earlier failure dropped."""
    fd = disk.create(f"{root}/a")

    def fail(synced: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError) as caught:
        disk.sync_dir(root)
    assert caught.value.detail["call"] == "sync_dir"
    monkeypatch.undo()
    later = disk.create(f"{root}/b")
    disk.sync_dir(root)
    assert disk.unsynced(fd).name
    assert not disk.unsynced(later).name
    disk.close(fd)
    disk.close(later)


def test_a_directory_that_cannot_be_synced_is_tolerated(disk, root, monkeypatch):
    """Some file systems refuse to sync a directory with EINVAL (RF-56)."""

    def refuse(synced: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    disk.sync_dir(root)


# -- allocation -------------------------------------------------------------------------------------------


def test_allocate_writes_zeros_if_the_file_system_cannot_allocate(disk, root, monkeypatch):
    """Existing bytes are kept (RF-46)."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    fd = disk.create(f"{root}/a")
    disk.write_at(fd, [b"abc"], 0)
    disk.allocate(fd, 0, 5000)
    assert disk.read_at(fd, 6000, 0) == b"abc" + bytes(4997)
    assert disk.unsynced(fd).bytes == 5000
    disk.allocate(fd, 0, 100)
    assert disk.size(fd) == 5000
    disk.close(fd)


SHORT_WRITE = """
import resource, signal, sys
from ringlog.errors import DiskError
from ringlog.storage.real_disk import RealDisk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
disk = RealDisk()
fd = disk.create(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
try:
    disk.write_at(fd, [b"a" * 4000, b"b" * 4000], 0)
except DiskError as e:
    failure = e.errno
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(failure, disk.size(fd), disk.unsynced(fd).length)
whole = b"a" * 4000 + b"b" * 4000
print(disk.write_at(fd, [whole[:4000], whole[4000:]], 0), disk.read_at(fd, 9000, 0) == whole)
"""


@pytest.mark.slow
def test_a_real_short_write_continues_until_the_kernel_refuses(root):
    """RLIMIT_FSIZE makes the kernel write 6,000 of 8,000 bytes and then return EFBIG. A later write
    succeeds."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_WRITE, f"{root}/a"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split("\n")[:2] == [f"{errno.EFBIG} 6000 True", "8000 True"]


LOCK_AND_WAIT = """
import sys
from ringlog.storage.real_disk import RealDisk
RealDisk().lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_lock_ends_with_its_process(disk, root):
    """A lock never ends by age or by a check of a pid."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCK_AND_WAIT, f"{root}/LOCK"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(DiskError) as caught:
            disk.lock(f"{root}/LOCK")
        assert caught.value.detail["holder"] == f"pid {child.pid}"
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    disk.unlock(disk.lock(f"{root}/LOCK"))


# -- short writes -----------------------------------------------------------------------------------------


class Kernel:
    """A replacement for pwritev that accepts at most `step` bytes a call and raises the errors in
    `refusals`."""

    def __init__(self, step, refusals=()):
        self.image = bytearray()
        self.step = step
        self.refusals = list(refusals)
        self.most_buffers = 0

    def __call__(self, buffers, offset):
        if self.refusals and (code := self.refusals.pop(0)):
            raise OSError(code, os.strerror(code))
        self.most_buffers = max(self.most_buffers, len(buffers))
        data = b"".join([memoryview(each).tobytes() for each in buffers])[: self.step]
        self.image[offset : offset + len(data)] = data
        return len(data)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 1000])
def test_a_short_write_continues_where_it_stopped(step):
    """No byte is written twice or skipped, whatever the sizes of the buffers."""
    buffers = [b"", b"ab", b"cdefg", b"", bytes(range(50)), b"z"]
    kernel = Kernel(step)
    assert write_fully(kernel, buffers, 0) == 58
    assert kernel.image == b"".join(buffers)


def test_no_call_gets_more_than_iov_max_buffers(monkeypatch):
    monkeypatch.setattr(vectored_write, "IOV_MAX", 4)
    kernel = Kernel(5)
    buffers = [bytes([i]) * (i % 4) for i in range(40)]
    write_fully(kernel, buffers, 0)
    assert kernel.image == b"".join(buffers)
    assert kernel.most_buffers == 4


def test_a_write_without_progress_is_an_error():
    """The error reports how many bytes were written."""
    with pytest.raises(OSError, match="no progress after 0 of 3 bytes") as caught:
        write_fully(Kernel(0), [b"abc"], 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_a_transient_refusal_is_retried_a_bounded_number_of_times(code):
    """EAGAIN and EINTR are retried at most TRANSIENT_RETRIES_MAX times in a row."""
    kernel = Kernel(2, [code] * TRANSIENT_RETRIES_MAX)
    assert write_fully(kernel, [b"abcd"], 0) == 4
    assert kernel.image == b"abcd"
    endless = Kernel(2, [code] * (TRANSIENT_RETRIES_MAX + 1))
    with pytest.raises(OSError, match=os.strerror(code)):
        write_fully(endless, [b"abcd"], 0)
    assert endless.image == b""


def test_progress_resets_the_retry_count():
    """The bound applies to refusals in a row, not to all refusals of a long write."""
    kernel = Kernel(1, ([errno.EAGAIN] * TRANSIENT_RETRIES_MAX + [0]) * 3)
    assert write_fully(kernel, [b"abc"], 0) == 3


def test_other_errors_are_raised_at_once():
    kernel = Kernel(2, [0, errno.ENOSPC])
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_fully(kernel, [b"abcd"], 0)
    assert kernel.image == b"ab"
