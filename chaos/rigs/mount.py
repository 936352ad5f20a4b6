"""Real file systems in loop devices: create, mount, cut the power, mount again.

All of this belongs in a private mount namespace (`private_mounts` of a plan). A loop device has the autoclear
flag and is kept open by a descriptor. When the process ends for any reason, the device is released.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = ("ext4", "xfs")
GOING_DOWN = 0x8004587D
"""ioctl of ext4 and XFS on any descriptor of the file system. After it every write fails."""
JOURNAL_KEPT = 1
"""Flag of GOING_DOWN: the journal's contents in memory are written out first."""
JOURNAL_DROPPED = 2
FLAGS = (JOURNAL_KEPT, JOURNAL_DROPPED)
IMAGE_BYTES = {"ext4": 48 << 20, "xfs": 320 << 20}
"""XFS makes no file system smaller than 300 MiB; the image is sparse."""

_MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-E", "nodiscard,lazy_itable_init=1"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}
_MKFS_S = 30.0
_LOOP_CONFIGURE, _LOOP_GET_FREE, _LOOP_CLEAR = 0x4C0A, 0x4C82, 0x4C01
_LOOP_AUTOCLEAR = 4
_LOOP_CONFIG_BYTES, _LOOP_FLAGS_AT = 304, 8 + 52
_FLUSH_BUFFERS = 0x1261
_BUSY_S = 5.0
"""How long (s) an unmount may be busy: a kernel thread releases the last file a little later."""
_BUSY_LOOK_S = 0.002
_HOLDERS_MAX = 8
_LOOP_TRIES = 20
_MS_NOATIME, _MS_BIND, _MNT_DETACH = 1024, 4096, 2
_libc = ctypes.CDLL(None, use_errno=True)


class RigError(RuntimeError):
    """The harness failed, not ringlog. The text names the step."""


def make_file_system(kind: str, path: Path) -> Path:
    """Create an image file with an empty file system. Raises RigError."""
    with path.open("wb") as out:
        out.truncate(IMAGE_BYTES[kind])
    try:
        done = subprocess.run(
            [*_MKFS[kind], str(path)], capture_output=True, text=True, timeout=_MKFS_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise RigError(f"mkfs.{kind}: {e}") from e
    if done.returncode != 0:
        raise RigError(f"mkfs.{kind}: {done.stderr.strip()}")
    return path


class Loop:
    """A loop device on a file, until `close`."""

    def __init__(self, backing: Path) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC
        file = os.open(backing, flags)
        try:
            self.fd, self.device = self._attach(file)
        finally:
            os.close(file)

    @staticmethod
    def _attach(file: int) -> tuple[int, str]:
        config = bytearray(_LOOP_CONFIG_BYTES)
        struct.pack_into("=II", config, 0, file, 512)
        struct.pack_into("=I", config, _LOOP_FLAGS_AT, _LOOP_AUTOCLEAR)
        for _ in range(_LOOP_TRIES):
            with open("/dev/loop-control", "rb") as control:
                number = fcntl.ioctl(control, _LOOP_GET_FREE)
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                with contextlib.suppress(FileExistsError):
                    os.mknod(device, 0o600 | 0o060000, os.makedev(7, number))
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, bytes(config))
            except OSError as e:
                os.close(fd)
                if e.errno != errno.EBUSY:
                    raise RigError(f"{device}: {e.strerror}") from e
                continue  # Another process took the device.
            return fd, device
        raise RigError("no free loop device")

    def forget(self) -> None:
        """Drop the cached blocks of the device, after its contents were exchanged below it."""
        fcntl.ioctl(self.fd, _FLUSH_BUFFERS)

    def close(self) -> None:
        """Close the descriptor. The device is detached with the last one."""
        os.close(self.fd)


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    """Mount a file system with mount(2). Raises OSError."""
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), _MS_NOATIME, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {kind}: {os.strerror(code)}")


def bind(source: Path, target: Path) -> None:
    """Bind a directory to another path. Raises OSError."""
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bind {source}: {os.strerror(code)}")


def unmount(target: Path) -> None:
    """Unmount with umount(2). Retries while it is busy, at most _BUSY_S. Raises OSError."""
    deadline = time.monotonic() + _BUSY_S
    while _libc.umount2(os.fsencode(target), 0) != 0:
        code = ctypes.get_errno()
        if code != errno.EBUSY or time.monotonic() > deadline:
            raise OSError(code, f"unmount {target}: {os.strerror(code)}; {holders(target)}")
        time.sleep(_BUSY_LOOK_S)


def holders(target: Path) -> list[str]:
    """Return the open files and mappings below a directory, as far as /proc shows them."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(fd).startswith(f"{target}/"):
                        found.append(f"{process.name} fd {fd.name} {os.readlink(fd)}")
            maps = (process / "maps").read_text(errors="replace").splitlines()
            found += [f"{process.name} maps {line.split()[-1]}" for line in maps if f"{target}/" in line]
    return found[:_HOLDERS_MAX]


def detach(target: Path) -> None:
    """Detach a mount. It ends when no process uses it any more."""
    _libc.umount2(os.fsencode(target), _MNT_DETACH)


class Volume:
    """A file system on a device, mounted at `root` between `up` and `down`."""

    def __init__(self, kind: str, device: str, root: Path) -> None:
        self.kind, self.device, self.root = kind, device, root
        self.is_up = False
        root.mkdir(exist_ok=True)

    def up(self) -> None:
        """Mount it. The journal is replayed here. Raises OSError."""
        mount(self.device, self.root, self.kind)
        self.is_up = True

    def down(self) -> None:
        """Unmount it. Raises OSError if a file is still in use."""
        if self.is_up:
            unmount(self.root)
            self.is_up = False

    def give_up(self) -> None:
        """Unmount it now, or detach it, so that it is unmounted when its last file is closed."""
        try:
            self.down()
        except OSError as e:
            print(f"left mounted until the last file there is closed: {e}")
            detach(self.root)

    def cut(self, flag: int) -> None:
        """Cut the power: data that has not reached the device is lost."""
        fd = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, GOING_DOWN, struct.pack("=I", flag))
        finally:
            os.close(fd)


@contextlib.contextmanager
def volume(kind: str, scratch: Path) -> Iterator[Volume]:
    """Yield a new, mounted file system in a file below `scratch`."""
    image = make_file_system(kind, scratch / f"{kind}.img")
    loop = Loop(image)
    try:
        found = Volume(kind, loop.device, scratch / f"{kind}.mnt")
        found.up()
        try:
            yield found
        finally:
            found.give_up()
    finally:
        loop.close()
        image.unlink()
