"""Find leaked resources: processes, shared memory, loop devices, network namespaces, cgroups.

A class and all its processes carry a mark in their environment. The mark identifies leftover processes and
distinguishes them from those of the other lane.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "RINGLOG_CHAOS_RUN"
SHM = Path("/dev/shm")
HELPERS_S = 30.0
"""Time limit (s) for helper processes of multiprocessing to exit after their parent. It also suffices on a
busy host."""


def marked_processes(mark: str = "") -> list[psutil.Process]:
    """Return live processes that carry `mark`, or any mark if it is empty. This process is excluded.

    Engines are included whose launcher carries it: an engine does not show its environment.
    """
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            is_ours = any(each == wanted or (not mark and each.startswith(wanted)) for each in environ)
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found += [process, *(process.children() if _is_launcher(process) else [])]
        except (OSError, psutil.Error):
            continue
    return found


def engine_regions(process: psutil.Process) -> set[Path]:
    """Return the shared-memory directories of engines of which the process has mapped a file."""
    try:
        text = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {SHM / name for name in re.findall(rf"{SHM}/(ringlog-[0-9]+-[0-9a-f]{{8}})/", text)}


def kill_marked(mark: str) -> list[str]:
    """Kill the remaining processes that carry `mark`. Returns one line for each."""
    lines = []
    psutil.wait_procs([each for each in marked_processes(mark) if _is_helper(each)], timeout=HELPERS_S)
    for process in marked_processes(mark):
        try:
            lines.append(f"process {process.pid} left behind: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    return lines


def _is_helper(process: psutil.Process) -> bool:
    """Whether the process is a tracker or worker of multiprocessing, or the launcher of engines.

    Such a helper exits by itself when it reads that its parent has exited.
    """
    return _is_launcher(process) or "from multiprocessing." in _command(process)


def _is_launcher(process: psutil.Process) -> bool:
    return "ringlog.testing.launcher" in _command(process)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def host_resources() -> set[str]:
    """Return the named resources of the host that a class could leak."""
    return {*_shared_memory(), *_loops(), *_namespaces(), *_cgroups()}


def _shared_memory() -> Iterator[str]:
    for path in SHM.iterdir():
        # Semaphores belong to multiprocessing, which unlinks them at once. They are visible here only by
        # chance.
        if not path.name.startswith("sem."):
            yield f"shared memory {path}"


def _loops() -> Iterator[str]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield f"loop device {path.parts[3]} on {path.read_text().strip()}"
        except OSError:
            continue


def _namespaces() -> Iterator[str]:
    folder = Path("/run/netns")
    if folder.is_dir():
        for path in folder.iterdir():
            yield f"network namespace {path.name}"


def _cgroups() -> Iterator[str]:
    for path in Path("/sys/fs/cgroup").glob("**/ringlog-chaos-*"):
        if path.is_dir():
            yield f"cgroup {path}"
