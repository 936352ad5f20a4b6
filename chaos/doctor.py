"""`python -m chaos doctor`: test every mechanism that the fault classes need, and print what works.

A class whose mechanism is missing reports a skip; the doctor shows this in advance. Each check performs a
small instance of the fault in a scratch directory and undoes it. No check only tests whether a program is
installed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos import leaks
from chaos.order import CannotRun
from chaos.rigs.small_disks import command

CHECK_S = 30.0
IMAGE_BYTES = 320 << 20
"""Size of a test image. XFS makes no file system smaller than 300 MiB."""


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One mechanism for injecting faults."""

    code: str
    what: str
    check: Callable[[Path], None]


def need_root() -> None:
    """Raise CannotRun unless the process runs as root."""
    if os.geteuid() != 0:
        raise CannotRun("needs root")


def need_allocations() -> None:
    """Raise CannotRun if this interpreter cannot make an allocation fail."""
    try:
        import _testcapi
    except ImportError:
        raise CannotRun("this interpreter has no _testcapi") from None
    if not hasattr(_testcapi, "set_nomemory"):
        raise CannotRun("_testcapi has no set_nomemory")


def _pidfd(_: Path) -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        fd = os.pidfd_open(child.pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
        if child.wait(CHECK_S) != -9:
            raise CannotRun("a signal through a pidfd did not arrive")


def _compiler(scratch: Path) -> None:
    source = scratch / "shim.c"
    source.write_text("int ringlog_doctor(void) { return 7; }\n")
    command("gcc", "-shared", "-fPIC", "-o", str(scratch / "shim.so"), str(source))


def _strace(scratch: Path) -> None:
    out = scratch / "strace.out"
    done = subprocess.run(
        ["strace", "-o", str(out), "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=1",
         sys.executable, "-c", f"import os; os.fdatasync(os.open({str(scratch)!r}, os.O_RDONLY))"],
        capture_output=True, text=True, timeout=CHECK_S, check=False,
    ) if shutil.which("strace") else None  # fmt: skip
    if done is None:
        raise CannotRun("strace is not installed (package strace)")
    if "INJECTED" not in (out.read_text() if out.exists() else ""):
        raise CannotRun(f"strace injects nothing: {done.stderr[-200:]}")


def _mounts(scratch: Path) -> None:
    need_root()
    (scratch / "m").mkdir()
    command(
        "unshare", "--mount", "--propagation", "private", "sh", "-c",
        f"mount -t tmpfs -o size=1m none {scratch}/m && umount {scratch}/m",
    )  # fmt: skip


def _file_system(kind: str) -> Callable[[Path], None]:
    def check(scratch: Path) -> None:
        need_root()
        image = scratch / f"{kind}.img"
        with image.open("wb") as out:
            out.truncate(IMAGE_BYTES)
        command(f"mkfs.{kind}", "-q", str(image))
        (scratch / kind).mkdir()
        command(
            "unshare", "--mount", "--propagation", "private", "sh", "-c",
            f"mount -o loop {image} {scratch}/{kind} && umount {scratch}/{kind}",
        )  # fmt: skip

    return check


def _fuse(_: Path) -> None:
    need_root()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotRun("/dev/fuse cannot be opened")


def _kernel(_: Path) -> None:
    if shutil.which("linux.uml") is None:
        raise CannotRun("linux.uml is not installed (package user-mode-linux)")
    command("linux.uml", "--version")


def _cgroup(_: Path) -> None:
    need_root()
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        folder = parent / f"ringlog-chaos-doctor-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
                return
        finally:
            folder.rmdir()
    raise CannotRun("no cgroup with a memory limit can be made")


def _netns(_: Path) -> None:
    need_root()
    name = f"ringlog-chaos-{os.getpid()}"
    command("ip", "netns", "add", name)
    try:
        command("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
    finally:
        command("ip", "netns", "del", name)


def _setpriv(_: Path) -> None:
    need_root()
    command("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "true")


def _atheris(_: Path) -> None:
    command(sys.executable, "-c", "import atheris")


MECHANISMS = (
    Mechanism("MEM", "the k-th allocation fails", lambda _: need_allocations()),
    Mechanism("SIG", "signals through pidfds", _pidfd),
    Mechanism("PRE", "preloaded shims (needs gcc)", _compiler),
    Mechanism("STR", "system calls that fail (strace)", _strace),
    Mechanism("FULL", "private mounts, small tmpfs", _mounts),
    Mechanism("CUT", "ext4 in a loop device", _file_system("ext4")),
    Mechanism("CUT", "XFS in a loop device", _file_system("xfs")),
    Mechanism("BLK", "a block store in user space (FUSE)", _fuse),
    Mechanism("KRN", "a guest kernel (User-Mode Linux)", _kernel),
    Mechanism("CG", "memory limits by cgroup", _cgroup),
    Mechanism("NET", "network namespaces", _netns),
    Mechanism("ATK", "another user (setpriv)", _setpriv),
    Mechanism("FUZ", "atheris", _atheris),
)


def missing() -> dict[str, str]:
    """Return the mechanisms that do not work here: code and description, mapped to the reason."""
    found = {}
    for mechanism in MECHANISMS:
        with tempfile.TemporaryDirectory(prefix="ringlog-doctor-") as scratch:
            try:
                mechanism.check(Path(scratch))
            except (CannotRun, OSError) as e:
                found[f"{mechanism.code} {mechanism.what}"] = str(e)
    return found


def remove_processes(mark: str = "") -> list[str]:
    """Kill the processes that interrupted runs left, and remove the shared memory of their engines.

    `mark` is the mark of one run; "" = all. Returns one line for each item.
    """
    done = []
    processes = leaks.marked_processes(mark)
    regions = {region for process in processes for region in leaks.engine_regions(process)}
    for process in processes:
        done.append(f"killed {process.pid}")
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=CHECK_S)
    for region in sorted(regions):
        shutil.rmtree(region, ignore_errors=True)
        done.append(f"removed shared memory {region}")
    return done


def remove_leftovers() -> list[str]:
    """Remove what an interrupted run left: its processes, shared memory, cgroups and network namespaces.

    Returns one line for each item.
    """
    done = remove_processes()
    for thing in sorted(leaks.host_resources()):
        kind, _, name = thing.rpartition(" ")
        if "ringlog-chaos-" not in name:
            continue
        if kind == "cgroup":
            with contextlib.suppress(OSError):
                Path(name).rmdir()
                done.append(f"removed {thing}")
        elif kind == "network namespace":
            with contextlib.suppress(CannotRun):
                command("ip", "netns", "del", name)
                done.append(f"removed {thing}")
    return done


def main(*, clean: bool = False) -> int:
    """Print the table of mechanisms, or with `clean` remove leftovers and print them.

    Always returns 0: ringlog itself needs none of these mechanisms.
    """
    if clean:
        for line in remove_leftovers():
            print(line)
        return 0
    print(f"Linux {platform.release()}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
    missing_mechanisms = missing()
    for mechanism in MECHANISMS:
        name = f"{mechanism.code} {mechanism.what}"
        print(f"{name:48} {'no: ' + missing_mechanisms[name] if name in missing_mechanisms else 'works'}")
    return 0
