"""Small file systems in a private mount namespace. They disappear with the process."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
from pathlib import Path

from chaos.order import CannotRun

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_libc = ctypes.CDLL(None, use_errno=True)
_owner = 0


def own_mounts() -> None:
    """Enter a private mount namespace, once per process. Raises CannotRun without permission."""
    global _owner  # noqa: PLW0603  the namespace is the process's
    if _owner == os.getpid():
        return
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None):
        raise CannotRun(f"no private mounts: {os.strerror(ctypes.get_errno())} (needs root)")
    _owner = os.getpid()


def command(*words: str) -> str:
    """Run a program of the system and return its output. Raises CannotRun with its error text."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CannotRun(f"{words[0]}: {e}") from None
    if done.returncode:
        raise CannotRun(f"{' '.join(words)[:120]}: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout


def small_tmpfs(where: Path, size: int, inodes: int = 0) -> Path:
    """Mount a tmpfs of `size` bytes, and perhaps limited inodes, on a new directory."""
    own_mounts()
    where.mkdir(mode=0o700, exist_ok=True)
    options = f"size={size},mode=0700" + (f",nr_inodes={inodes}" if inodes else "")
    command("mount", "-t", "tmpfs", "-o", options, "ringlog-chaos", str(where))
    return where


def make_ext4(image: Path, size: int) -> None:
    """Create an ext4 of `size` bytes in a file."""
    with image.open("wb") as file:
        file.truncate(size)
    command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", "-m", "0", str(image))


def mount_ext4(image: Path, where: Path) -> None:
    """Mount it on a new directory. After an internal error it becomes read-only."""
    own_mounts()
    where.mkdir(mode=0o700, exist_ok=True)
    command("mount", "-o", "loop,errors=remount-ro", str(image), str(where))
    where.chmod(0o700)


def device_of(where: Path) -> str:
    """Return the name of the block device that is mounted there ("loop3")."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, path, *_ = line.split()
        if path == str(where):
            return Path(device).name
    raise CannotRun(f"nothing is mounted on {where}")


def bind_read_only(where: Path) -> None:
    """Make a directory read-only by a bind mount. Files that are open keep the old, writable mount."""
    own_mounts()
    command("mount", "--bind", str(where), str(where))
    command("mount", "-o", "remount,bind,ro", str(where))


def remount_writable(where: Path) -> None:
    """Make the directory writable again."""
    command("mount", "-o", "remount,bind,rw", str(where))


def unmount(where: Path) -> None:
    """Undo one mount. A file that is still mapped keeps it alive, but it has no path any more."""
    gc.collect()  # Readers of this process map files, which are released with the last view of them.
    command("umount", "--lazy", str(where))
